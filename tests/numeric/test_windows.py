"""Attention within a window and beside sinks against a mask built by hand, in float64."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from closeness import assert_equal, assert_near, deviation, with_gradients
from highwater.engine.activations.host import Kept
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.plain_block import PlainBlock
from highwater.engine.attention.registry import Attention, register
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns import layout as working_sizes

TOLERANCE = 1e-12
SCALING = 0.3
PACKINGS = [(33,), (7, 7, 7), (5, 5, 1, 13), (1, 1), (64, 3, 3)]
CASES = list(zip(PACKINGS, [(4, 4), (4, 2), (6, 1), (7, 1), (4, 2)], strict=True))


def by_hand(
    query_HSD: "torch.Tensor",
    key_KSD: "torch.Tensor",
    value_KSD: "torch.Tensor",
    *,
    lengths: Sequence[int],
    window: int | None,
    sinks_H: "torch.Tensor | None" = None,
    cap: float | None = None,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Output HSD and log-sum-exp HS: softmax over one mask of the whole row, a loop per token."""
    tokens = sum(lengths)
    reads = torch.zeros(tokens, tokens, dtype=torch.bool)
    start = 0
    for length in lengths:
        for at in range(length):
            for other in range(at + 1):
                reads[start + at, start + other] = window is None or at - other < window
        start += length
    groups = query_HSD.shape[0] // key_KSD.shape[0]
    keys, values = (t.repeat_interleave(groups, dim=0) for t in (key_KSD, value_KSD))
    scores = query_HSD @ keys.transpose(1, 2) * SCALING
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~reads, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, tokens, 1)], dim=-1)
    return scores.softmax(-1)[..., :tokens] @ values, scores.logsumexp(-1)


def heads_of(
    heads: tuple[int, int], tokens: int, size: int = 8, dtype: Any = None
) -> list["torch.Tensor"]:
    torch.manual_seed(0)
    return [
        torch.randn(count, tokens, size, dtype=dtype or torch.float64, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]


def assert_as_by_hand(
    own: list["torch.Tensor"],
    lengths: tuple[int, ...],
    *,
    window: int | None,
    sinks_H: "torch.Tensor | None" = None,
    cap: float | None = None,
) -> None:
    """Output, log-sum-exp and the gradients of queries, keys, values and sinks."""
    pattern = Pattern(scaling=SCALING, window_tokens=window, sinks_H=sinks_H, soft_cap=cap)
    documents = Documents(lengths=lengths, pattern=pattern, kernel="flash")
    output, log_sums = attend_in_pattern(*(t[None] for t in own), documents=documents)
    expected, wanted_sums = by_hand(*own, lengths=lengths, window=window, sinks_H=sinks_H, cap=cap)
    assert deviation(output[0].transpose(0, 1), expected) < TOLERANCE
    assert deviation(log_sums[0], wanted_sums) < TOLERANCE
    leaves = own if sinks_H is None else [*own, sinks_H]
    _, *found = with_gradients([output[0].transpose(0, 1)], leaves)
    _, *wanted = with_gradients([expected], leaves)
    # of one key alone the weight is 1 whatever its score: an exact 0, or its rounding
    assert_near(found, wanted, TOLERANCE, beside=expected.numel() ** 0.5)


def rows_at_hand(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    monkeypatch.setattr(working_sizes, "SCORES_AT_HAND", scores)


@pytest.mark.parametrize("scores", [1, 300, 2**23])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 13, 32])
@pytest.mark.parametrize(("lengths", "heads"), CASES)
def test_a_window_is_the_mask_that_it_says(lengths, heads, window, scores, monkeypatch):
    """With a row at a time, some, and all: documents past the window and within it in one row."""
    rows_at_hand(monkeypatch, scores)
    assert_as_by_hand(heads_of(heads, sum(lengths)), lengths, window=window)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("lengths", "heads"), CASES)
def test_a_sink_is_a_score_without_a_value(lengths, heads, window, monkeypatch):
    """Of small sinks, of large ones, and of one that outweighs every key."""
    rows_at_hand(monkeypatch, 300)
    own = heads_of(heads, sum(lengths))
    sinks_H = torch.linspace(-3.0, 40.0, heads[0], dtype=torch.float64).requires_grad_()
    assert_as_by_hand(own, lengths, window=window, sinks_H=sinks_H)


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("lengths", "heads"), CASES)
def test_a_cap_is_on_scores_and_not_on_sinks(lengths, heads, window, cap, monkeypatch):
    rows_at_hand(monkeypatch, 300)
    own = heads_of(heads, sum(lengths))
    assert_as_by_hand(own, lengths, window=window, cap=cap)
    sinks_H = torch.linspace(-3.0, 2.0, heads[0], dtype=torch.float64).requires_grad_()
    assert_as_by_hand(own, lengths, window=window, cap=cap, sinks_H=sinks_H)


def test_no_more_scores_are_at_hand_than_have_room(monkeypatch):
    """Of a sequence 64 times as long, too: what is at hand depends on the window alone."""
    rows_at_hand(monkeypatch, 2**12)
    for length in (256, 16_384):
        query, key, value = (t[None] for t in heads_of((4, 2), length, size=2))
        block = PlainBlock(query, key, value, SCALING, 48)
        sizes = [
            4 * (rows.queries.stop - rows.queries.start) * (rows.keys.stop - rows.keys.start)
            for rows in block._rows()
        ]
        assert max(sizes) <= 2**12
        assert len(sizes) < length


def test_bfloat16_is_summed_in_float32(monkeypatch):
    """Beside float64 on the same numbers no more is lost than the output's own rounding."""
    rows_at_hand(monkeypatch, 500)
    own = [t.detach().bfloat16() for t in heads_of((4, 2), 70)]
    exact, _ = by_hand(*(t.double() for t in own), lengths=(70,), window=9)
    output, log_sums = PlainBlock(*(t[None] for t in own), SCALING, 9).forward()
    assert log_sums.dtype == torch.float32
    assert deviation(output[0].double(), exact) < 2**-8


class Layer(nn.Module):
    """An attention module as a family's: it hands its window on, or leaves it in a mask."""

    def __init__(self, attention: Attention, **features: Any) -> None:
        super().__init__()
        self.attend = ALL_ATTENTION_FUNCTIONS[attention.name]
        self.features = features

    def forward(self, *own: "torch.Tensor", lengths: tuple[int, ...]) -> "torch.Tensor":
        layout = SequenceLayout(lengths)
        return self.attend(
            self, *own, None, sequence_layout=layout, scaling=SCALING, **self.features
        )[0]


@pytest.mark.parametrize("lengths", [(20, 20, 4), (4, 20)])
def test_a_layer_that_keeps_its_attention_computes_it_once(lengths, monkeypatch):
    passes: list[tuple[int, ...]] = []
    forward = PlainBlock.forward

    def counted(block: PlainBlock) -> Any:
        passes.append(tuple(block.query_BHSD.shape))
        return forward(block)

    monkeypatch.setattr(PlainBlock, "forward", counted)
    attention = register("flash")
    layers = [Layer(attention, sliding_window=6), Layer(attention, sliding_window=None)]
    own = [t[None] for t in heads_of((4, 2), sum(lengths))]

    def both(**how: Any) -> "torch.Tensor":
        hidden = own[0]
        for layer in layers:  # each is recomputed by itself
            run = partial(layer, lengths=lengths)
            hidden = checkpoint(run, hidden, *own[1:], **how) if how else run(hidden, *own[1:])
            hidden = hidden.sin().transpose(1, 2)
        return hidden

    plain = both()
    once = len(passes)
    assert once == 1, "documents no longer than the window are the dense kernel's"
    kept = both(use_reentrant=False, context_fn=lambda: kept_in_recompute(Kept()))
    wanted, found = with_gradients([plain], own), with_gradients([kept], own)
    assert len(passes) == 2 * once, "not once more in the recomputation"
    assert_equal(found, wanted)


def test_pieces_stand_for_no_document_that_a_window_cuts():
    """Its time is linear already, and it attends as it does in training."""
    lengths = (4096, 64)
    own = [t[None] for t in heads_of((2, 1), sum(lengths), dtype=torch.float32)]
    whole, pieces = (
        attend_in_pattern(
            *own,
            documents=Documents(
                lengths=lengths,
                pattern=Pattern(scaling=SCALING, window_tokens=100),
                kernel="flash",
                in_pieces=in_pieces,
            ),
        ).output_BSHD
        for in_pieces in (False, True)
    )
    assert torch.equal(whole, pieces)
