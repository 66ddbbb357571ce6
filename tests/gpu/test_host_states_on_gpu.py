"""Moments in pinned host memory on a GPU."""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict

from engine_models import built
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.checkpoint import save_sharded
from highwater.engine.training.host_states import MOMENTS, VECTOR, HostStateAdamW
from highwater.engine.training.optimizers import make_optimizer
from highwater.model.held_bytes import pinned_state_bytes, update_bytes
from highwater.model.model import load_model
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import STREAMED
from highwater.nouns.settings import Settings
from highwater.units import GIB, MIB
from tiny_models import sized, write_model

pytestmark = pytest.mark.usefixtures("alone")
DEVICE = "cuda:0"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 128}
CONFIG |= sized(32_003, 2048, 4, (16, 4), intermediate_size=5500, max_position_embeddings=4096)
CONFIG["tie_word_embeddings"] = False
"""Matrices of many pieces, of less than one, and of some and a part; 0.3 B parameters."""
NUMBERS = Hyperparameters(learning_rate=0.01, weight_decay=0.1)
SETTINGS = Settings(offload="states")
STEPS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: every one that is built of it starts from the same random ones."""
    return write_model(tmp_path_factory.mktemp("model"), CONFIG)


def model_of(directory: Path, *, seed: int = 1) -> Decoder:
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cuda", 0))
    how = {"loss": "chunked", "master_dtype": torch.float32, "seed": seed}
    return built(directory, mesh, torch.bfloat16, **how)


def optimizer_of(model: Decoder, *, on_host: bool, piece: int = STREAMED) -> Any:
    optimizer = make_optimizer(model, NUMBERS, on_host=on_host)
    assert isinstance(optimizer, HostStateAdamW) is on_host
    if on_host:
        optimizer._piece = piece
    return optimizer


@torch.no_grad()
def step(model: Decoder, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for parameter in model.parameters():
        local_shard(parameter.grad).normal_(generator=generator)
    optimizer.step()


@torch.no_grad()
def assert_same(one: Decoder, other: Decoder, *optimizers: torch.optim.Optimizer) -> None:
    """Parameters, moments and steps, bit by bit; moments in host memory are read first, as the step
    left them.
    """
    ours, theirs = optimizers
    pairs = list(zip(one.named_parameters(), other.parameters(), strict=True))
    for (name, mine), their in pairs:
        for moment in MOMENTS:
            a, b = local_shard(ours.state[mine][moment]), local_shard(theirs.state[their][moment])
            assert torch.equal(a.cpu(), b.cpu()), (name, moment)
    for (name, mine), their in pairs:
        assert torch.equal(local_shard(mine), local_shard(their)), name
        assert ours.state[mine]["step"] == theirs.state[their]["step"], name


@pytest.mark.parametrize("piece", [STREAMED, 5 * VECTOR * 4099, 1 << 16])
def test_parameters_and_moments_are_those_of_adamw_on_the_gpu(directory, piece):
    """Also of small pieces, of which many are on their way at once."""
    host, resident = model_of(directory), model_of(directory)
    streamed = optimizer_of(host, on_host=True, piece=piece)
    beside = optimizer_of(resident, on_host=False)
    for number in range(STEPS):
        step(host, streamed, number)
        step(resident, beside, number)
        assert_same(host, resident, streamed, beside)


def test_moments_are_pinned_and_parameters_on_the_gpu(directory):
    gc.collect()
    torch._C._host_emptyCache()
    before_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    model = model_of(directory)
    optimizer = optimizer_of(model, on_host=True)
    step(model, optimizer, 0)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert local_shard(parameter).is_cuda
        assert state["step"].is_cuda
        for name in MOMENTS:
            moment = local_shard(state[name])
            assert moment.device.type == "cpu"
            assert moment.is_pinned()
            assert moment.dtype is torch.float32
    shape = load_model(str(directory)).shape
    predicted = pinned_state_bytes(shape, SETTINGS, layout=Layout())
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before_bytes
    assert predicted == pytest.approx(pinned, rel=0.01), "norms aside"


def test_a_step_takes_its_buffers_of_the_gpu_and_leaves_nothing(directory):
    model = model_of(directory)
    optimizer = optimizer_of(model, on_host=True)
    step(model, optimizer, 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    parameters = sum(local_shard(p).numel() for p in model.parameters())
    assert 8 * parameters < before < 8 * parameters + 128 * MIB, "parameters and gradients"
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    buffers = update_bytes(load_model(str(directory)).shape, SETTINGS, shards=1)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(buffers, abs=2 * MIB)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("loads_on_host", [False, True])
@pytest.mark.parametrize("saves_on_host", [False, True])
def test_training_goes_on_from_what_either_saved(directory, tmp_path, saves_on_host, loads_on_host):
    went_on = model_of(directory)
    optimizer = optimizer_of(went_on, on_host=saves_on_host)
    for number in range(STEPS):
        step(went_on, optimizer, number)
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cuda", 0))
    save_sharded(went_on, optimizer, tmp_path, mesh=mesh)
    resumed = model_of(directory, seed=2)
    fresh = optimizer_of(resumed, on_host=loads_on_host)
    state: dict[str, Any] = {
        "model": state_dict.get_model_state_dict(resumed),
        "optimizer": state_dict.get_optimizer_state_dict(resumed, fresh),
    }
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    state_dict.set_model_state_dict(resumed, state["model"])
    state_dict.set_optimizer_state_dict(resumed, fresh, state["optimizer"])
    for parameter in resumed.parameters():
        moment = local_shard(fresh.state[parameter]["exp_avg"])
        assert moment.is_cuda is not loads_on_host
        assert moment.is_cuda or moment.is_pinned()
    assert_same(went_on, resumed, optimizer, fresh)
    step(went_on, optimizer, STEPS)
    step(resumed, fresh, STEPS)
    assert_same(went_on, resumed, optimizer, fresh)


def test_a_step_takes_about_as_long_as_the_copies_alone(directory, capsys):
    """Printed, not asserted: links differ."""
    model = model_of(directory)
    streamed = optimizer_of(model, on_host=True)
    step(model, streamed, 0)
    moments = [local_shard(streamed.state[p][name]) for p in model.parameters() for name in MOMENTS]
    size = sum(moment.numel() * moment.element_size() for moment in moments)
    coming, going = torch.cuda.Stream(), torch.cuda.Stream()
    here = torch.empty(2, STREAMED, device=DEVICE)

    def copy() -> None:
        for moment in moments:
            for start in range(0, moment.numel(), STREAMED):
                part = moment.view(-1)[start : start + STREAMED]
                with torch.cuda.stream(coming):
                    here[0, : len(part)].copy_(part, non_blocking=True)
                with torch.cuda.stream(going):
                    part.copy_(here[1, : len(part)], non_blocking=True)

    step_s, copy_s = seconds(streamed.step), seconds(copy)
    resident_s = seconds(optimizer_of(model, on_host=False).step)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{size / GIB:.2f} GiB of moments, there and back: a step {step_s * 1e3:.1f} ms, the "
            f"copies alone {copy_s * 1e3:.1f} ms ({size / GIB / copy_s:.1f} GiB/s each way), "
            f"with moments on the GPU {resident_s * 1e3:.1f} ms\n"
        )


def seconds(work: Callable[[], object], times: int = 5) -> float:
    took: list[float] = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)
