"""FSDP2's offload on a GPU: the gradients of training without it, no more of the GPU."""

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from closeness import deviation
from engine_models import built, packed
from highwater.engine.attention.dense import select_kernel
from highwater.engine.data.batches import Batch
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training import step
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, backward_of
from highwater.model.held_bytes import STAGED_LAYERS, staged_gradient_bytes
from highwater.model.model import load_model
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.units import MIB
from tiny_models import WIDE_HEADS, write_model

pytestmark = pytest.mark.usefixtures("alone")
GRADIENT_TOLERANCE = 0.02
"""Norm-relative: attention's and the embedding's gradients are added up in no fixed order, in
bfloat16."""
MEMORY_TOLERANCE = 0.001
"""Relative: that of the traces."""
LENGTH = 4096
MICRO_BATCHES = 3
LAYERS = 8


class Pass(NamedTuple):
    """What three micro-batches left, and took on the way, beyond what was there before."""

    gradients: dict[str, Any]
    allocated_bytes: int
    reserved_bytes: int
    pinned_bytes: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights: on the GPU and offloaded, training starts from the same random ones."""
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": 16_000, "max_position_embeddings": 8192}
    return write_model(
        tmp_path_factory.mktemp("model"), WIDE_HEADS, **sizes, tie_word_embeddings=False
    )


def test_offloaded_gradients_are_those_of_the_gpu(model):
    expected, found = (run(model, offload=offload).gradients for offload in (False, True))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert deviation(found[name], gradient) < GRADIENT_TOLERANCE, name


def test_adding_up_beside_the_gpu_costs_it_nothing_and_few_pinned_blocks(model, monkeypatch):
    run(model, offload=True)  # compiles kernels and makes workspaces
    ours = run(model, offload=True)
    monkeypatch.setattr(step, "adding_up", lambda _: nullcontext())
    fsdp2s = run(model, offload=True)
    assert ours.allocated_bytes == pytest.approx(fsdp2s.allocated_bytes, rel=MEMORY_TOLERANCE)
    assert ours.reserved_bytes == pytest.approx(fsdp2s.reserved_bytes, rel=MEMORY_TOLERANCE)
    shape = load_model(str(model)).shape
    staged_bytes = staged_gradient_bytes(shape, Settings(offload=True), layout=Layout(gpus=1))
    all_bytes = 4 * shape.parameters
    # PyTorch gives a block out again once it has seen the GPU pass by: on short layers, one layer
    # later.
    layer_bytes = staged_bytes - staged_gradient_bytes(
        replace(shape, layers=STAGED_LAYERS - 1), Settings(offload=True), layout=Layout(gpus=1)
    )
    most_bytes = staged_bytes + layer_bytes + MIB
    assert staged_bytes / 2 < ours.pinned_bytes <= most_bytes < all_bytes, (
        f"{staged_bytes} were predicted"
    )


def run(directory: Path, *, offload: bool) -> Pass:
    device = torch.device("cuda", 0)
    before_bytes = _emptied()
    mesh = process_mesh.shard_mesh(Layout(), device)
    trained = built(
        directory,
        mesh,
        torch.bfloat16,
        kernel=select_kernel(device, torch.bfloat16, query_heads=8, kv_heads=4, head_dim=128),
        length_tokens=LENGTH,
        loss="chunked",
        master_dtype=torch.float32,
        offload=offload,
    )
    training = Training(
        policy=trained, optimizer=make_optimizer(trained, Hyperparameters()), mesh=mesh
    )
    _emptied()
    torch.cuda.reset_peak_memory_stats()
    pinned_bytes = _pinned_bytes()
    backward_of(training, micro_batches())
    torch.cuda.synchronize()
    return Pass(
        gradients={
            name: local_shard(p.grad).to("cpu", copy=True) for name, p in trained.named_parameters()
        },
        allocated_bytes=torch.cuda.max_memory_allocated() - before_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved() - before_bytes,
        pinned_bytes=_pinned_bytes() - pinned_bytes,
    )


def micro_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        packed(torch.randint(16_000, (LENGTH,), generator=generator)) for _ in range(MICRO_BATCHES)
    ]


def _pinned_bytes() -> int:
    """Of the process, what PyTorch keeps included; its own count of what is in use never goes down
    (torch 2.11).
    """
    return torch.cuda.host_memory_stats()["allocated_bytes.current"]


def _emptied() -> int:
    """Bytes that others hold on the GPU; neither there nor of pinned memory is anything kept."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    return torch.cuda.memory_allocated()
