"""Dense attention against the float64 textbook: output and every gradient, odd lengths, packed
documents, grouped heads.
"""

import pytest
import torch

from highwater.engine.attention.dense import attend, select_kernel
from highwater.engine.attention.reference import reference_attention
from highwater.engine.attention.registry import register
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import ModelError

TOLERANCE = 1e-12
"""Norm-relative in float64: only the order of summation differs."""

PACKINGS = [(1,), (33,), (7, 7, 7), (5, 5, 1, 13), (1, 1, 1), (64, 3, 3)]


@pytest.mark.parametrize("document_lengths", PACKINGS)
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (7, 1)])
def test_packed_attention_equals_the_textbook(document_lengths, query_heads, kv_heads):
    torch.manual_seed(0)
    tokens, size = sum(document_lengths), 8
    q, k, v = (
        torch.randn(tokens, heads, size, dtype=torch.float64, requires_grad=True)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(tokens, query_heads, size, dtype=torch.float64)
    as_heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
    ours = attend(*as_heads, document_lengths=document_lengths, scaling=0.3, kernel="flash")[0]
    expected = reference_attention(q, k, v, document_lengths=document_lengths, scaling=0.3)
    assert deviation(ours, expected) < TOLERANCE
    gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    for gradient, wanted in zip(
        gradients, torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        # Of documents of one token the attention is their value: what is exactly 0 in the textbook
        # is here what did not cancel.
        assert deviation(gradient, wanted) < TOLERANCE or (
            not wanted.any() and gradient.norm() < TOLERANCE * upstream.norm()
        )


def test_a_document_does_not_see_the_one_before_it():
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    before = attend(q, k, v, document_lengths=(5, 7), scaling=1.0, kernel="flash")
    k[:, :, :5], v[:, :, :5] = 100.0, -100.0
    after = attend(q, k, v, document_lengths=(5, 7), scaling=1.0, kernel="flash")
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, :5], after[:, :5])


def test_a_kernel_that_cannot_run_is_an_error_and_not_the_quadratic_one():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"):
        attend(q, q, q, document_lengths=(5,), scaling=1.0, kernel="cudnn")


def test_the_kernel_of_a_cpu_is_flash():
    assert (
        select_kernel(torch.device("cpu"), torch.float32, query_heads=4, kv_heads=2, head_dim=16)
        == "flash"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "mask"),
        ({"sequence_layout": None}, "see each other"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_is_not_computed_is_refused(arguments, said):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    interface = ALL_ATTENTION_FUNCTIONS[register("flash").name]
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(ModelError, match=said):
        interface(
            torch.nn.Identity(),
            q,
            q,
            q,
            **{"attention_mask": None, "sequence_layout": SequenceLayout((4,)), **arguments},
        )


def deviation(ours: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((ours - expected).detach().norm() / expected.detach().norm().clamp_min(1e-300))
