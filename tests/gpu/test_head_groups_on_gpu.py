"""Attention in head groups on a GPU."""

import json
import sys

import pytest
import torch
from transformers import LlamaConfig

from highwater.engine.attention.dense import select_kernel
from highwater.engine.attention.registry import register
from highwater.engine.models.build import build_on_meta
from highwater.engine.models.fused import rotary_attention
from highwater.engine.models.fused.rotary_attention import RotaryAttention
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.memory.formula.layers import Step, working_set_bytes
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from layer import measure as measure_layer
from tiny_models import sized

CUDA = torch.device("cuda", 0)
HIDDEN, HEADS, KEYS, SIZE = 4096, 32, 8, 128
"""An 8B's."""
CLOSE = 1e-2
"""Norm-relative, between two ways of bfloat16: a few roundings to 8 bits."""
BEYOND = 2**31 // HIDDEN + 4096
"""Tokens whose queries have more than 2**31 numbers."""
ROWS = {
    "one document": (8192,),
    "equal documents": (2048,) * 4,
    "mixed documents": (8192, 700, 9000, 1, 33),
}


def attention_of(dtype: torch.dtype) -> RotaryAttention:
    config = LlamaConfig(**sized(64, HIDDEN, 1, (HEADS, KEYS), intermediate_size=64))
    how = {"query_heads": HEADS, "kv_heads": KEYS, "head_dim": SIZE}
    kernel = select_kernel(CUDA, torch.bfloat16, **how)
    model = build_on_meta(config, attention=register(kernel), loss="full", master_dtype=dtype)
    attention = next(each for each in model.modules() if isinstance(each, RotaryAttention))
    attention.to_empty(device=CUDA)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=CUDA) * HIDDEN**-0.5)
    return attention


def gradients(
    attention: RotaryAttention, lengths: tuple[int, ...], groups: int
) -> dict[str, torch.Tensor]:
    attention.groups = groups
    generator = torch.Generator(CUDA).manual_seed(2)
    tokens, dtype = sum(lengths), attention.q_proj.weight.dtype
    how = {"generator": generator, "device": CUDA, "dtype": dtype}
    x = torch.randn(1, tokens, HIDDEN, **how).requires_grad_()
    angles = torch.arange(tokens, device=CUDA)[:, None] / 10_000 ** torch.linspace(
        0, 1, SIZE // 2, device=CUDA
    )
    positions = [
        f(torch.cat((angles, angles), dim=-1)).to(dtype)[None] for f in (torch.cos, torch.sin)
    ]
    out = attention(x, tuple(positions), sequence_layout=SequenceLayout(lengths))[0]
    kept = out.detach().cpu()
    wanted = [x, *attention.parameters()]
    found = torch.autograd.grad(out, wanted, torch.randn(out.shape, **how))
    names = ["input", *(name for name, _ in attention.named_parameters())]
    return {"output": kept} | {n: g.cpu() for n, g in zip(names, found, strict=True)}


def apart(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm of what is expected, a part of the rows at a time on the GPU."""
    off = wanted = 0.0
    pairs = (each.flatten(0, -2).split(1 << 16) for each in (ours, expected))
    for mine, other in zip(*pairs, strict=True):
        exact = other.to(CUDA).double()
        off += float((mine.to(CUDA).double() - exact).square().sum())
        wanted += float(exact.square().sum())
    return (off / wanted) ** 0.5


def tell(found: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")


@pytest.mark.parametrize("row", list(ROWS))
def test_groups_give_the_output_and_gradients_of_all_heads_at_once(row):
    attention = attention_of(torch.bfloat16)
    every, few, each = (gradients(attention, ROWS[row], groups) for groups in (1, 2, 8))
    off = {
        groups: {name: apart(found[name], every[name]) for name in every}
        for groups, found in (("2", few), ("8", each))
    }
    tell({"case": row, "apart": off})
    assert all(value < CLOSE for of in off.values() for value in of.values())


@pytest.mark.parametrize("groups", [2, 4])
def test_a_layer_takes_what_the_formula_says(groups):
    # of a wide model the weights' gradients decide at 32,768 tokens
    model, lengths = "Qwen3-0.6B", (32_768, 65_536)
    settings = Settings(loss="chunked", attention_head_groups=groups)
    shape = load_model(model).shape
    of = [Step(shape, settings, Layout(), length_tokens=each) for each in lengths]
    sizes = [working_set_bytes(step.layer(shape.runs[0].kind)) for step in of]
    predicted = (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])
    measured = measure_layer(model, device="cuda", head_groups=groups)["layer_bytes_per_token"]
    tell({"case": f"{model} {groups}", "predicted": predicted, "measured": measured})
    assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("lengths", [(BEYOND,), (BEYOND // 8,) * 8])
def test_more_than_2_to_the_31_numbers_are_computed_right_by_groups(lengths, monkeypatch):
    """Two groups and eight agree; all heads at once is told beside them, whatever it computes."""
    attention = attention_of(torch.bfloat16)
    every = gradients(attention, lengths, 8)
    asked = gradients(attention, lengths, 1)
    assert attention._groups(sum(lengths), None) == 2, "all heads at once are too many numbers"
    off = {name: apart(asked[name], every[name]) for name in every}
    monkeypatch.setattr(rotary_attention, "MOST_NUMBERS", 2**62)
    told: object
    try:
        plain = gradients(attention, lengths, 1)
        told = {name: apart(plain[name], every[name]) for name in every}
    except RuntimeError as error:
        told = str(error).splitlines()[0]
    tell({"case": f"{len(lengths)} documents", "two groups": off, "at once": told})
    assert all(value < CLOSE for value in off.values())
