"""AdamW with moments in host memory, on one process."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from traces import SHARED, alive_at, formula_bytes, peak_bytes, requested_bytes, shape_of

from highwater.engine.training.host_states import MOMENTS, VECTOR, HostStateAdamW
from highwater.engine.training.optimizers import make_optimizer
from highwater.model.held_bytes import device_state_bytes, gradient_bytes, update_bytes
from highwater.nouns.hyperparameters import Hyperparameters
from tables import deep
from tiny_models import config_of, sized

NUMBERS = Hyperparameters(learning_rate=0.01, weight_decay=0.1)
DTYPES = (torch.float32, torch.float64)


def model_of(seed: int, dtype: Any, sizes: tuple[int, int] = (37, 53)) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(*sizes, dtype=dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


def in_pieces(optimizer: torch.optim.Optimizer, piece: int) -> torch.optim.Optimizer:
    assert isinstance(optimizer, HostStateAdamW)
    assert piece % VECTOR == 0
    optimizer._piece = piece
    return optimizer


def same(one: nn.Module, other: nn.Module, *optimizers: torch.optim.Optimizer) -> bool:
    ours, theirs = optimizers
    for mine, their in zip(one.parameters(), other.parameters(), strict=True):
        both = [(mine, their)]
        both += [(ours.state[mine][name], theirs.state[their][name]) for name in ("step", *MOMENTS)]
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in both):
            return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    vectors=st.integers(1, 40),
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_pieces_of_any_size_give_adamws_numbers(dtype, vectors, rows, columns, seed):
    """Also where a piece does not divide a shard, and where a vector does not."""
    one, other = (model_of(seed, dtype, (columns, rows)) for _ in range(2))
    resident = make_optimizer(one, NUMBERS)
    streamed = in_pieces(make_optimizer(other, NUMBERS, on_host=True), VECTOR * vectors)
    for number in range(3):
        step(one, resident, number)
        step(other, streamed, number)
    assert same(one, other, resident, streamed)


def test_what_is_loaded_is_a_copy_in_the_memory_that_was_there():
    model = model_of(1, torch.float32)
    optimizer = make_optimizer(model, NUMBERS, on_host=True)
    places = [optimizer.state[model.weight][name].data_ptr() for name in MOMENTS]
    saved = deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"].fill_(1)
    optimizer.load_state_dict(saved)
    saved["state"][0]["exp_avg"].fill_(2)
    assert (optimizer.state[model.weight]["exp_avg"] == 1).all()
    assert [optimizer.state[model.weight][name].data_ptr() for name in MOMENTS] == places


def test_a_parameter_without_a_gradient_is_passed_by():
    models = [model_of(1, torch.float32) for _ in range(2)]
    optimizers = [
        make_optimizer(each, NUMBERS, on_host=on)
        for each, on in zip(models, (True, False), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, 0)
        kept = model.bias.clone()
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), None
        optimizer.step()
        assert torch.equal(model.bias, kept)
        assert [int(optimizer.state[p]["step"]) for p in (model.weight, model.bias)] == [2, 1]
    assert same(*models, *optimizers)


def test_groups_keep_their_numbers_over_a_load():
    optimizer = make_optimizer(model_of(1, torch.float32), NUMBERS, on_host=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, NUMBERS.learning_rate]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


SHAPE = config_of("tiny") | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
SHAPE |= sized(2048, 512, 4, (8, 2), intermediate_size=1536, head_dim=64)
DEEP = SHAPE | {"num_hidden_layers": 12}
"""States of few tokens are most of it, and the update is the peak."""
WIDE = SHAPE | {"vocab_size": 120_000, "tie_word_embeddings": False, "num_hidden_layers": 2}
"""Of whose embedding a piece is a part."""
USUAL = {"config": SHAPE, "offload": "states", "loss": "chunked", "length_tokens": 16_384}
TWO = {"gpus": 2}
ONE = {"accumulates": False, "micro_batches": 1}
SHORT: dict[str, Any] = {"config": DEEP, "length_tokens": 64}
TRIALS: dict[str, dict[str, Any]] = {
    "alone": {},
    "one micro-batch": ONE,
    "no recompute": {"recompute": "none"},
    "whole logits": {"loss": "full"},
    "reference": {"objective": "grpo"},
    "critic": {"objective": "ppo", "critic": True},
    "two": TWO,
    "two, shared": SHARED,
    "copies": {"gpus": 2, "replicate_degree": 2},
    "short": SHORT,
    "short, one micro-batch": {**SHORT, **ONE},
    "short, two": {**SHORT, **TWO},
    "wide": {"config": WIDE, "length_tokens": 64},
    "wide, two, one micro-batch": {**ONE, **TWO, "config": WIDE, "length_tokens": 64},
}
EVERYDAY = deep(*TRIALS) or ("critic", "two, shared", "short", "wide, two, one micro-batch")
"""One of each term."""
TOLERANCE = 0.01
"""Relative: what is no larger than one row of numbers per token is no term of the formula."""


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_step_peaks_where_the_formula_says(specs, logs, name):
    assert formula_bytes(specs[name]) == pytest.approx(peak_bytes(logs[name]), rel=TOLERANCE)


@pytest.mark.parametrize("name", EVERYDAY)
def test_what_lasts_has_no_moments_and_an_update_leaves_nothing(specs, logs, name):
    spec = specs[name]
    shape, shards = shape_of(spec), spec.layout.shard_degree
    expected = device_state_bytes(shape, spec.settings, device="cuda", shards=shards)
    if not spec.settings.keeps_gradients:
        expected -= gradient_bytes(shape, spec.settings)
    lasting = sum(alive_at(logs[name], "experience").values())
    # norms, a step for each parameter, and the rows that the last shard lacks
    assert lasting == pytest.approx(expected // shards, rel=0.01, abs=2**20)
    spec = specs[name]
    shape, shards = shape_of(spec), spec.layout.shard_degree
    buffers = update_bytes(shape, spec.settings, shards=shards)
    states = device_state_bytes(shape, spec.settings, device="cuda", shards=shards) // shards
    found = requested_bytes(logs[name])["optimizer"]
    assert buffers < found < states + buffers + 2**21
    if name.startswith("short"):
        assert found > states + 0.99 * buffers
