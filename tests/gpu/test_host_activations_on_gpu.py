"""Activations in host memory on a GPU."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_models import built, packed
from highwater.engine.activations import host as host_module
from highwater.engine.activations.host import HostActivations
from highwater.engine.attention.dense import select_kernel
from highwater.engine.data.batches import Batch
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.experience import forward_batch
from highwater.engine.training.memory_profiler import divide_budget
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, backward_of
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora
from highwater.units import GIB, MIB
from places import captured
from tiny_models import WIDE_HEADS, write_model

pytestmark = pytest.mark.usefixtures("alone")
LAYERS, HIDDEN = 6, 1024
ADAPTERS = 4 * 8 * (4 * HIDDEN + 2 * (HIDDEN + 512) + 3 * (HIDDEN + 4096))
"""Bytes of the gradients of a layer's adapters: float32, rank 8."""
STEPS = (((8192,), (4096, 4096)), ((2048, 1024, 512, 100), (9000,)), ((8192,), (8192,)))
"""Lengths of documents, by step and micro-batch: rows of changing lengths."""
SPREADS = 1.5
"""Attention's gradients are added up in no fixed order: two runs differ."""
LATE_CYCLES = 20_000_000
"""Of the GPU's clock: about ten milliseconds, longer than a layer here."""
NOT_A_NUMBER = 0xFF
"""Every byte of a bfloat16 or float32 that is none."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": 8_000, "max_position_embeddings": 16_384}
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, WIDE_HEADS, **sizes, tie_word_embeddings=False)


@pytest.mark.parametrize("lora", [None, 8])
@pytest.mark.parametrize("recompute", ["layer", "all-but-attention"])
@pytest.mark.parametrize("layers_on_gpu", [1, 2])
def test_gradients_are_within_the_usual_spread(model, recompute, layers_on_gpu, lora, monkeypatch):
    plain, again = (gradients(trained(model, recompute, lora=lora)) for _ in range(2))
    poison(monkeypatch)
    ours = gradients(trained(model, recompute, host_of(layers_on_gpu), lora=lora))
    for one, two, mine in zip(plain, again, ours, strict=True):
        assert apart(mine, one) <= SPREADS * apart(two, one)


def test_a_race_would_show(model, monkeypatch):
    """Without the computation's wait for what comes back, NaN does get into the gradients."""
    slow_down(monkeypatch)
    monkeypatch.setattr(host_module.torch, "empty_strided", unfilled)
    monkeypatch.setattr(HostActivations, "_bring", bring_without_waiting)
    found = gradients(trained(model, "layer", host_of(1)))
    assert any(bool(torch.isnan(g).any()) for step in found for g in step.values())


def apart(one: dict[str, "torch.Tensor"], two: dict[str, "torch.Tensor"]) -> float:
    assert one.keys() == two.keys()
    return sum(float((one[name] - two[name]).norm()) ** 2 for name in one) ** 0.5


def bring_without_waiting(self: Any, kept: Any) -> None:
    self._waiting.pop().come()
    if self._waiting:
        self._waiting[-1].come()


@pytest.mark.parametrize("recompute", ["layer", "all-but-attention"])
def test_peaks_are_less_by_what_left_and_the_same_at_every_step(model, recompute):
    batch = [row(16_384)]

    def peaks(host: HostActivations | None) -> set[int]:
        training = trained(model, recompute, host, lora=8)  # whose gradients are no peak
        peak_of(training, batch)  # in the first of a process cuBLAS takes its workspace
        return {peak_of(training, batch) for _ in range(4)}

    ((plain,), (ours,)) = peaks(None), peaks(host_of(1))
    heads = 0 if recompute == "layer" else 8 * 128 * 2 + 8 * 4
    each = 16_384 * (HIDDEN * 2 + heads)
    # The first layer's stays for its own pass, and the next one's comes back meanwhile: the peak
    # moves to the second layer, beside gradients of the four after it, the last of them twice.
    assert plain - ours == pytest.approx((LAYERS - 2) * each - (LAYERS - 1) * ADAPTERS, abs=MIB)


def test_host_memory_has_the_size_of_what_lies_there(model):
    host = host_of(1)
    training = trained(model, "layer", host)
    backward_of(training, [row(16_384)])
    wanted = (LAYERS - 1) * 16_384 * HIDDEN * 2
    assert wanted <= host.memory.mapped_bytes <= wanted + LAYERS * 2 * MIB


def test_the_allocator_leaves_room_for_the_page_tables_of_host_memory(model):
    device = torch.device("cuda", 0)
    training = trained(model, "layer", host := host_of(1))
    fractions: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda part, _: fractions.append(part)
        )
        divide_budget(device, budget_bytes=16 * GIB, nccl_bytes=0, host=host)
        backward_of(training, [row(16_384 * 8)])
    total = torch.cuda.mem_get_info(device)[1]
    assert len(fractions) > 1
    assert (fractions[0] - fractions[-1]) * total >= host.memory.mapped_bytes / 512 - 4 * MIB


@pytest.mark.skipif("TORCH_CUDA_SANITIZER" in os.environ, reason="this is what it starts")
def test_the_sanitizer_finds_no_race():
    """PyTorch's own: each access to a tensor of a stream has to wait for the others' accesses."""
    words = [*("-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "gpu"), __file__]
    words += ["-k", "sanitized"]
    done = captured(
        [sys.executable, *words],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "HIGHWATER_REQUIRE": "gpu"},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "1 passed" in done.stdout


@pytest.mark.skipif("TORCH_CUDA_SANITIZER" not in os.environ, reason="started by the test above")
def test_a_sanitized_step(model):
    training = trained(model, "all-but-attention", host_of(1))
    backward_of(training, [row(2048), row(2048)])
    torch.cuda.synchronize()


def host_of(layers_on_gpu: int) -> HostActivations:
    return HostActivations(
        torch.device("cuda", 0), layers_on_gpu=layers_on_gpu, budget_bytes=8 * GIB
    )


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory of the device with NaN where it is let go of, and where it is not yet filled."""
    release, give = HostActivations._release, host_module.PinnedPlaces.give
    slow_down(monkeypatch)

    def released(self: HostActivations) -> None:
        if self._leaving and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            with torch.no_grad():
                for tensor in self._leaving:
                    tensor.detach().fill_(float("nan"))
        release(self)

    def given(self: Any, place: Any) -> None:
        torch.cuda.synchronize()
        place.memory.fill_(NOT_A_NUMBER)
        give(self, place)

    monkeypatch.setattr(HostActivations, "_release", released)
    monkeypatch.setattr(host_module.PinnedPlaces, "give", given)
    monkeypatch.setattr(host_module.torch, "empty_strided", unfilled)


_EMPTY = torch.empty_strided


def unfilled(*sizes: Any, **how: Any) -> "torch.Tensor":
    tensor = _EMPTY(*sizes, **how)
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each copy begin later than whoever does not wait for it."""
    after = host_module._after_computation

    @contextmanager
    def late(stream: Any) -> Iterator[None]:
        with after(stream):
            torch.cuda._sleep(LATE_CYCLES)
            yield

    monkeypatch.setattr(host_module, "_after_computation", late)


def trained(
    directory: Path, recompute: Any, host: HostActivations | None = None, *, lora: int | None = None
) -> Training:
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device("cuda", 0)
    how: dict[str, Any] = {"recompute": recompute, "host": host, "master_dtype": torch.float32}
    if lora is not None:
        adapters = Lora(rank=lora, alpha=16, targets="all-linear", base="bf16")
        how |= {"lora": adapters, "master_dtype": torch.bfloat16}
    mesh = process_mesh.shard_mesh(Layout(), device)
    kernel = select_kernel(device, torch.bfloat16, query_heads=8, kv_heads=4, head_dim=128)
    how |= {"kernel": kernel, "length_tokens": 16_384, "loss": "chunked"}
    policy = built(directory, mesh, torch.bfloat16, **how)
    return Training(
        policy=policy,
        optimizer=make_optimizer(policy, Hyperparameters()),
        mesh=mesh,
        keeps_gradients=False,
    )


def gradients(training: Training) -> list[dict[str, "torch.Tensor"]]:
    found = []
    for step in STEPS:
        training.policy.zero_grad()
        backward_of(training, [row(*lengths) for lengths in step])
        found.append(
            {
                name: local_shard(p.grad).float().cpu()
                for name, p in training.policy.named_parameters()
                if p.grad is not None
            }
        )
        forward_batch(training.policy, [row(3000)], device=training.device)
    return found


def peak_of(training: Training, batch: list[Batch]) -> int:
    training.policy.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward_of(training, batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def row(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    return packed(*(torch.randint(8_000, (length,), generator=generator) for length in lengths))
