"""Dilated attention against a dense softmax in float64 that counts how often a token meets a key:
output, log-sum-exp and every gradient, odd lengths; the other convention against its definition.
"""

import importlib
import sys
import types
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn

from highwater import DilatedAttention
from highwater.engine.attention.dilated import dilated_attention
from highwater.errors import UsageError

TOLERANCE = 1e-10
"""Norm-relative in float64."""
BRANCHES = (((16,), (1,)), ((8, 16), (1, 2)), ((4, 16, 64), (1, 2, 4)), ((7, 20), (3, 5)))


def tensors(length: int, heads: tuple[int, int], batch: int = 2, size: int = 8) -> list[Tensor]:
    torch.manual_seed(length)
    shapes = [(batch, count, length, size) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def meetings(
    length: int, heads: int, branches: tuple[tuple[int, ...], tuple[int, ...]], is_causal: bool
) -> Tensor:
    """How many branches have a token and a key in one segment, both at the head's offset; HSS."""
    token, key = torch.arange(length)[:, None], torch.arange(length)
    found = torch.zeros(heads, length, length)
    for segment, rate in zip(*branches, strict=True):
        for head in range(heads):
            meet = token // segment == key // segment
            for each in (token, key):
                meet = meet & (each % segment % rate == head % rate)
            found[head] += meet & (key <= token) if is_causal else meet
    return found


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [1, 16, 37, 64])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)])
def test_branches_are_one_softmax_over_the_keys_that_they_meet(branches, is_causal, length, heads):
    q, k, v = tensors(length, heads)
    ours, log_sums = dilated_attention(
        q,
        k,
        v,
        segment_lengths=branches[0],
        dilation_rates=branches[1],
        scaling=0.3,
        is_causal=is_causal,
    )
    keys, values = (t.repeat_interleave(heads[0] // heads[1], dim=1) for t in (k, v))
    bias = meetings(length, heads[0], branches, is_causal).double().log()
    scores = q @ keys.transpose(-1, -2) * 0.3 + bias
    has_keys = (bias > -torch.inf).any(-1)
    weights = scores.masked_fill(~has_keys[..., None], 0.0).softmax(-1) * has_keys[..., None]
    expected = weights @ values
    upstream = torch.randn_like(expected)
    found = torch.autograd.grad(ours, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    for name, mine, theirs in zip("oqkv", (ours, *found), (expected, *wanted), strict=True):
        assert (mine - theirs).norm() <= TOLERANCE * max(theirs.norm(), 1.0), name
    finite = has_keys.expand(log_sums.shape)
    assert (log_sums[finite] - scores.logsumexp(-1)[finite]).abs().max() < TOLERANCE
    assert (log_sums[~finite] == -torch.inf).all()


def test_the_published_branches_are_the_default():
    q, k, v = tensors(50, (4, 4))
    default = dilated_attention(q, k, v, scaling=0.3)[0]
    named = dilated_attention(
        q, k, v, segment_lengths=(25, 50), dilation_rates=(1, 2), scaling=0.3
    )[0]
    assert torch.equal(default, named)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"segment_lengths": (8, 16), "dilation_rates": (1,)}, "2 segment lengths and 1"),
        ({"segment_lengths": (), "dilation_rates": ()}, "0 segment lengths"),
        ({"segment_lengths": (0,), "dilation_rates": (1,)}, "segment lengths"),
        (
            {"segment_lengths": (9,), "dilation_rates": (1,), "normalisation": "groups"},
            "do not divide 16",
        ),
    ],
)
def test_branches_that_cannot_be_are_refused(settings, said):
    q, k, v = tensors(16, (2, 2))
    with pytest.raises(UsageError, match=said):
        dilated_attention(q, k, v, scaling=1.0, **settings)


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
def test_groups_are_those_of_the_package(peer, branches, heads, is_causal):
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
