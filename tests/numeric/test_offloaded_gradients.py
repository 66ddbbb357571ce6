"""Gradients that FSDP2 leaves in host memory: one layer's after the other is taken away."""

import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_models import built, packed
from highwater.engine.data.batches import Batch
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard, release
from highwater.engine.parallel.offload import LAYERS_BEHIND
from highwater.engine.training import step
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, backward_of, clip, train_step
from highwater.model.held_bytes import STAGED_LAYERS
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from tiny_models import SIZES, write_model

pytestmark = pytest.mark.usefixtures("alone")
LAYERS = 6
MICRO_BATCHES = 3
SHAPE = SIZES | {"model_type": "qwen3", "num_hidden_layers": LAYERS, "vocab_size": 256}


@pytest.mark.parametrize("recompute", ["layer", "none"])
def test_sums_over_micro_batches_are_those_of_fsdp2_bit_by_bit(recompute, tmp_path):
    plain, offloaded = (
        training(tmp_path, offload=offload, recompute=recompute) for offload in (False, True)
    )
    for _ in range(2):
        results = [train_step(each, micro_batches()) for each in (plain, offloaded)]
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1][0], results[1][1][0])
    for each in (plain, offloaded):
        backward_of(each, micro_batches())
    wanted, found = gradients(plain), gradients(offloaded)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) and wanted[name].any() for name in wanted)


def test_fsdp2_finds_no_gradient_and_leaves_a_few_layers_at_a_time(tmp_path):
    """Beside a gradient it would wait for every copy."""
    trained = training(tmp_path, offload=True)
    lasting = {name: own.grad for name, own in trained.policy.named_parameters()}
    left, most = weakref.WeakKeyDictionary[Any, str](), []

    def reduced(name: str, own: Any) -> None:
        assert own.grad is not lasting[name]
        left[own.grad] = name.partition("layers.")[2].partition(".")[0]
        most.append(len(set(left.values())))

    hooks = [
        own.register_post_accumulate_grad_hook(lambda p, name=name: reduced(name, p))
        for name, own in trained.policy.named_parameters()
    ]
    backward_of(trained, micro_batches())
    assert len(most) == MICRO_BATCHES * len(hooks)
    assert max(most) <= LAYERS_BEHIND + 2 == STAGED_LAYERS, (
        "those whose copies may run, the one that is reduced, and the root"
    )
    assert not left
    assert all(own.grad is lasting[name] for name, own in trained.policy.named_parameters())


def test_without_a_gradient_before_the_sum_is_in_memory_of_its_own(tmp_path):
    trained = training(tmp_path, offload=True)
    backward_of(trained, micro_batches())
    expected = gradients(trained)
    trained.optimizer.zero_grad(set_to_none=True)
    backward_of(trained, micro_batches())
    for parameter in trained.policy.parameters():
        own = local_shard(parameter.grad)
        assert own.untyped_storage().nbytes() == own.nbytes, (
            "not FSDP2's, which holds the whole unit's"
        )
    found = gradients(trained)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_after_a_pass_that_fails_there_are_gradients_again_and_another_can_begin(tmp_path):
    trained = training(tmp_path, offload=True)
    backward_of(trained, micro_batches())
    layer = next(part for name, part in trained.policy.named_modules() if name.endswith("layers.2"))
    hook = layer.register_full_backward_hook(_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        backward_of(trained, micro_batches())
    hook.remove()
    release(trained.policy)  # the pass left the root gathered
    assert all(parameter.grad is not None for parameter in trained.policy.parameters())
    backward_of(trained, micro_batches())


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("as an allocation in a backward pass ends")


def test_a_parameter_that_no_micro_batch_trains_keeps_its_gradient(tmp_path):
    trained = training(tmp_path, offload=True)
    frozen = "causal_lm.model.layers.2."
    for name, parameter in trained.policy.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
        local_shard(parameter.grad).fill_(1)
    backward_of(trained, micro_batches())
    for name, gradient in gradients(trained).items():
        assert bool((gradient == 1).all()) == name.startswith(frozen), name


def test_a_backward_pass_of_somebody_elses_is_fsdp2s(tmp_path, monkeypatch):
    ours, theirs = training(tmp_path, offload=True), training(tmp_path, offload=True)
    backward_of(ours, micro_batches())
    monkeypatch.setattr(step, "adding_up", lambda _: nullcontext())
    backward_of(theirs, micro_batches())
    expected, found = gradients(theirs), gradients(ours)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("size", "is_clipped"), [(1e-6, False), (1.0, True)])
def test_offloaded_gradients_are_clipped_as_others_are(size, is_clipped, tmp_path):
    trained = training(tmp_path, offload=True)
    for parameter in trained.policy.parameters():
        local_shard(parameter.grad).fill_(size)
    norm = float(clip(trained.policy, mesh=trained.mesh, max_norm=1.0))
    wanted = size / norm if is_clipped else size
    for gradient in gradients(trained).values():
        torch.testing.assert_close(gradient, torch.full_like(gradient, wanted), rtol=1e-4, atol=0.0)


def training(tmp_path: Path, *, offload: bool, recompute: Any = "layer") -> Training:
    directory = write_model(tmp_path / "model", SHAPE, tie_word_embeddings=False)
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))
    how = {"loss": "chunked", "recompute": recompute, "offload": offload}
    model = built(directory, mesh, torch.bfloat16, master_dtype=torch.float32, **how)
    return Training(policy=model, optimizer=make_optimizer(model, Hyperparameters()), mesh=mesh)


def micro_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(256, (40 + n,), generator=generator) for n in range(MICRO_BATCHES)]
    return [packed(each) for each in ids]


def gradients(trained: Training) -> dict[str, Any]:
    return {
        name: local_shard(parameter.grad).clone()
        for name, parameter in trained.policy.named_parameters()
    }
