"""Dilated attention by groups of heads is that of dilated-attention-pytorch 0.2.0, its own code,
whose operator of xformers is replaced by the textbook formula: output and every gradient.

``make`` installs the package without its dependencies; a missing one is a failure.
"""

import importlib
import sys
import types
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn

from highwater import DilatedAttention

TOLERANCE = 1e-10
"""Norm-relative in float64: values are divided by sums that may be near 0."""


class LowerTriangularMask:
    """As xformers has it: a query sees the keys up to its own."""


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: object = None, op: object = None
) -> Tensor:
    """Textbook attention, of (batch, length, heads, head_dim)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if attn_bias is not None:
        assert isinstance(attn_bias, LowerTriangularMask)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)


@pytest.fixture(scope="module")
def peer() -> type[nn.Module]:
    """The package's class."""
    assert version("dilated-attention-pytorch") == "0.2.0"
    package, operators = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    operators.AttentionOp = object
    operators.LowerTriangularMask = LowerTriangularMask
    operators.memory_efficient_attention = memory_efficient_attention
    package.ops = operators
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "xformers", package)
        patch.setitem(sys.modules, "xformers.ops", operators)
        return importlib.import_module(
            "dilated_attention_pytorch.dilated_attention"
        ).DilatedAttention


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [3, 4, 5, 7, 12])
@pytest.mark.parametrize(
    "branches",
    [((16,), (2,)), ((32, 64), (1, 2)), ((8, 16, 64), (1, 2, 4)), ((16, 16, 32), (3, 5, 7))],
)
def test_groups_are_those_of_the_package(
    peer,
    branches,
    heads,
    is_causal,
):
    torch.manual_seed(heads)
    inputs = [
        torch.randn(2, 64, heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    ours = DilatedAttention(*branches, normalisation="groups")(*inputs, is_causal=is_causal)
    theirs = peer(branches[0], branches[1])(*inputs, is_causal=is_causal)
    assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()
    upstream = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs, inputs, upstream),
        strict=True,
    ):
        assert (mine - other).norm() <= TOLERANCE * max(1.0, other.norm())


def test_a_softmax_over_all_branches_is_another_convention(peer):
    """What the two conventions share: one branch without dilation, before it is divided."""
    inputs = [torch.randn(1, 32, 4, 8, dtype=torch.float64) for _ in range(3)]
    softmax = DilatedAttention([16], [1])(*inputs, is_causal=True)
    theirs = peer([16], [1])(*inputs, is_causal=True)
    assert (softmax / softmax.sum(1, keepdim=True) - theirs).norm() <= TOLERANCE * theirs.norm()
    assert (softmax - theirs).norm() > 0.1 * theirs.norm()
