"""Random weights: the numbers at a place of a parameter, whatever part is drawn."""

import pytest
import torch
from torch import nn

from highwater.engine.models.fill import fill_buffers
from highwater.engine.models.random_weights import CHUNK_NUMBERS, draw, fill_random
from tiny_models import SIZES

CPU = torch.device("cpu")
ROWS, WIDTH = 2100, 1000
"""Three chunks, the last one short, whose ends are within rows."""


def drawn(
    name: str = "layers.0.weight", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    parameter = nn.Parameter(torch.full((ROWS, WIDTH), torch.nan, dtype=dtype))
    fill_random(name, parameter, std=0.02, seed=seed, device=CPU)
    return parameter.detach()


def test_they_are_normal_and_no_chunk_repeats_another():
    whole = drawn().flatten()
    assert ROWS * WIDTH > 2 * CHUNK_NUMBERS
    assert float(whole.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(whole.std()) == pytest.approx(0.02, rel=0.01)
    assert not torch.equal(whole[:1000], whole[CHUNK_NUMBERS : CHUNK_NUMBERS + 1000])


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1), (0, ROWS), (700, 1400), (1048, 1049), (ROWS - 1, ROWS), (5, 5)]
)
def test_any_rows_are_those_of_the_whole(first, last):
    rows = torch.full(((last - first) * WIDTH,), torch.nan)
    draw(
        rows,
        first=first * WIDTH,
        total=ROWS * WIDTH,
        stream="0 layers.0.weight",
        std=0.02,
        device=CPU,
    )
    assert torch.equal(rows.view(-1, WIDTH), drawn()[first:last])


def test_a_narrow_copy_is_the_wide_one_rounded_and_another_seed_or_name_another():
    assert torch.equal(drawn(dtype=torch.bfloat16), drawn().bfloat16())
    assert torch.equal(drawn(dtype=torch.float64), drawn().double())
    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), drawn(seed=1))
    assert not torch.equal(drawn(), drawn("layers.1.weight"))


@pytest.mark.parametrize(("name", "value"), [("norm.weight", 1.0), ("q_proj.bias", 0.0)])
def test_norms_are_1_and_biases_0(name, value):
    parameter = nn.Parameter(torch.full((8,), torch.nan))
    fill_random(name, parameter, std=0.02, seed=0, device=CPU)
    assert parameter.tolist() == [value] * 8


def test_a_vector_of_another_name_is_drawn():
    """DiffLlama takes the exponential of such products: ones would overflow it."""
    parameter = nn.Parameter(torch.full((64,), torch.nan))
    fill_random("self_attn.lambda_q1", parameter, std=0.02, seed=0, device=CPU)
    assert 0 < float(parameter.detach().abs().max()) < 0.2


transformers = pytest.importorskip("transformers")


def test_the_activation_of_apertus_has_the_numbers_that_its_class_gives_it():
    config = transformers.ApertusConfig(**SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = transformers.AutoModelForCausalLM.from_config(config).model.layers[0].mlp.act_fn
    ours = model.model.layers[0].mlp.act_fn
    assert fill_buffers(model, ours, device=torch.device("cpu")) == []
    found = {name: float(buffer) for name, buffer in ours.named_buffers()}
    assert found == {name: float(buffer) for name, buffer in theirs.named_buffers()}
    assert found["beta"] == 0.5
