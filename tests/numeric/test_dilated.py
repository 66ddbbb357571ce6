"""Dilated attention against a dense softmax in float64 that counts how often tokens meet keys."""

import importlib
import sys
import types
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_near, with_gradients
from highwater import DilatedAttention
from highwater.engine.attention.dilated import dilated_attention
from highwater.errors import UsageError
from references.sparse_masks import dense, meetings

TOLERANCE = 1e-10
BRANCHES = (((16,), (1,)), ((8, 16), (1, 2)), ((4, 16, 64), (1, 2, 4)), ((7, 20), (3, 5)))


def tensors(length: int, heads: tuple[int, int], batch: int = 2, size: int = 8) -> list[Tensor]:
    torch.manual_seed(length)
    shapes = [(batch, count, length, size) for count in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


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
    count = meetings(length, heads[0], branches)
    count = count if is_causal else count.tril(-1).mT + count
    expected, sums = dense(q, k, v, count, 0.3)
    wanted = with_gradients([expected], (q, k, v))
    assert_near(with_gradients([ours], (q, k, v)), wanted, TOLERANCE, beside=1)
    finite = sums > -torch.inf
    assert (log_sums[finite] - sums[finite]).abs().max() < TOLERANCE
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
    qkv = [torch.randn(2, 64, heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ours = DilatedAttention(*branches, normalisation="groups")(*qkv, is_causal=is_causal)
    theirs = peer(branches[0], branches[1])(*qkv, is_causal=is_causal)
    assert_near(with_gradients([ours], qkv), with_gradients([theirs], qkv), TOLERANCE, beside=1)


def test_a_softmax_over_all_branches_is_another_convention(peer):
    """What the two conventions share: one branch without dilation, before it is divided."""
    inputs = [torch.randn(1, 32, 4, 8, dtype=torch.float64) for _ in range(3)]
    softmax = DilatedAttention([16], [1])(*inputs, is_causal=True)
    theirs = peer([16], [1])(*inputs, is_causal=True)
    assert (softmax / softmax.sum(1, keepdim=True) - theirs).norm() <= TOLERANCE * theirs.norm()
    assert (softmax - theirs).norm() > 0.1 * theirs.norm()
