"""Dense attention against the float64 textbook; within a window, beside sinks and with wide heads
against a mask built by hand.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from closeness import assert_equal, assert_near, deviation, with_gradients
from highwater.engine.activations.host import Kept
from highwater.engine.attention import wide_block
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.dense import attend, select_kernel
from highwater.engine.attention.mixed_lengths import attend_mixed, calls_of, front_tokens
from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
from highwater.engine.attention.plain_block import PlainBlock, reference_attention
from highwater.engine.attention.registry import Attention, register
from highwater.engine.attention.wide_block import WideBlock
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import ModelError
from highwater.nouns import layout as working_sizes
from highwater.nouns.corpus import pieces

TOLERANCE = 1e-12
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
    as_heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
    ours = attend(*as_heads, document_lengths=document_lengths, scaling=0.3, kernel="flash")[0]
    expected = reference_attention(q, k, v, document_lengths=document_lengths, scaling=0.3)
    found, wanted = (with_gradients([each], (q, k, v)) for each in (ours, expected))
    # Of documents of one token the attention is their value: what is exactly 0 in the textbook is
    # here what did not cancel.
    beside = [1e-300 if each.any() else ours.numel() ** 0.5 for each in wanted]
    for mine, theirs, least in zip(found, wanted, beside, strict=True):
        assert_near([mine], [theirs], TOLERANCE, beside=least)


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


LONG = 32
ROWS = [(33, 5), (5, 33, 7), (40, 71, 3), (1, 64, 2, 2, 39), (7, 5, 3), (64, 32, 1), (100, 37)]


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_output_and_gradients_equal_it(kernel, lengths, query_heads, kv_heads, is_recomputed):
    torch.manual_seed(0)
    tokens, size = sum(lengths), 8
    rows = [
        torch.randn(tokens, heads, size, dtype=torch.float64, requires_grad=True)
        for heads in (query_heads, kv_heads, kv_heads)
    ]

    def ours(*rows: torch.Tensor) -> torch.Tensor:
        return attend_mixed(
            *(row.transpose(0, 1)[None] for row in rows),
            document_lengths=lengths,
            scaling=0.3,
            kernel=kernel,
            long_tokens=LONG,
        )[0]

    output = (
        checkpoint(ours, *rows, use_reentrant=False, context_fn=lambda: kept_in_recompute(Kept()))
        if is_recomputed
        else ours(*rows)
    )
    expected = reference_attention(*rows, document_lengths=lengths, scaling=0.3)
    assert_near(with_gradients([output], rows), with_gradients([expected], rows), TOLERANCE)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.sampled_from([None, 64, 4096]))
def test_each_query_is_in_one_call_with_all_the_keys_before_it(lengths, long_tokens):
    calls = calls_of(tuple(lengths), long_tokens=long_tokens)
    computed = [0] * sum(lengths)
    for front in calls.fronts:
        for token in range(front.start, front.stop):
            computed[token] += 1
    starts = {sum(lengths[:number]) for number in range(len(lengths))}
    for call in calls.shared:
        assert [stop for _, stop in call.queries] == [stop for _, stop in call.keys]
        for (start, stop), (key_start, key_stop) in zip(call.queries, call.keys, strict=True):
            assert key_start in starts
            assert key_start <= start < stop <= key_stop
            for token in range(start, stop):
                computed[token] += 1
        ends = [stop for _, stop in call.keys[:-1]]
        assert ends == [start for start, _ in call.keys[1:]], "the keys are one slice"
    assert computed == [1] * sum(lengths)


def test_no_call_takes_more_for_itself_than_one_document_of_the_row():
    lengths = (9000, 8200, 8192) + (3,) * 50 + (200,) * 20 + (9,) * 1000
    for call in calls_of(lengths, long_tokens=8192).shared:
        assert sum(stop - start + 128 for start, stop in call.queries) <= sum(lengths)


ROW = 65_536
PACKINGS_MIXED_LENGTHS = [
    *((60_000, 5_536), (13_107,) * 4 + (13_108,), (32_785, 32_751), (9_001,) * 7 + (2_529,)),
    *((400,) * 163 + (336,), (20_000, 20_001, *(500,) * 51, 35)),
]


@pytest.mark.parametrize("lengths", PACKINGS_MIXED_LENGTHS)
@pytest.mark.parametrize("long_tokens", [None, 8192])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (16, 16), (28, 4)])
def test_a_backward_pass_takes_what_one_document_would_count(lengths, long_tokens, heads, kv_heads):
    assert sum(lengths) == ROW
    calls = calls_of(lengths, long_tokens=long_tokens)
    every_head = 4 * heads if heads > kv_heads else 0

    def gradients(queries: int, keys: int) -> int:
        return 2 * heads * queries + 4 * kv_heads * keys

    one = gradients(ROW, ROW) + (4 * heads + every_head) * ROW
    held = most = 0
    for front in calls.fronts:
        tokens = front.stop - front.start
        most = max(most, held + gradients(tokens, tokens) + (4 * heads + every_head) * tokens)
        held += gradients(tokens, tokens)
    for call in calls.shared:
        queries = sum(stop - start for start, stop in call.queries)
        first, last = call.span
        workspace = 4 * heads * (queries + 128 * len(call.queries)) + every_head * (last - first)
        most = max(most, held + gradients(queries, last - first) + workspace)
        held += gradients(queries, last - first)
        held -= sum(
            gradients(0, front.stop - front.start)  # added to the call's own
            for front in calls.fronts
            if not front.is_whole and first <= front.start < last
        )
    assert held == gradients(ROW, ROW)
    most = max(most, held + 2 * heads * ROW)  # one of the three put together
    assert most <= 1.005 * one


@given(st.integers(8192, 2**20))
def test_long_documents_are_of_sixteen_shapes_for_each_doubling(length):
    front = front_tokens(length)
    assert 0 <= length - front <= length / 16
    assert front_tokens(front) == front


def test_fronts_of_any_lengths_are_few():
    assert len({front_tokens(length) for length in range(8192, 2**16)}) == 3 * 16


def test_in_pieces_a_long_document_is_computed_as_many_short_ones():
    torch.manual_seed(0)
    count = pieces(24_576, "cuda")
    lengths = (24_576 // count,) * count + (100,)
    rows = [torch.randn(24_676, 1, 8, requires_grad=True) for _ in range(3)]
    output = attend_mixed(
        *(row.transpose(0, 1)[None] for row in rows),
        document_lengths=(24_576, 100),
        scaling=0.3,
        kernel="cudnn",
        in_pieces=True,
    )[0]
    expected = reference_attention(*rows, document_lengths=lengths, scaling=0.3)
    assert_near(with_gradients([output], rows), with_gradients([expected], rows), 1e-5)


SCALING = 0.3
ROWS = [(33,), (7, 7, 7), (5, 5, 1, 13), (1, 1), (64, 3, 3)]
CASES = list(zip(ROWS, [(4, 4), (4, 2), (6, 1), (7, 1), (4, 2)], strict=True))


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


WIDE = 320
IN_BFLOAT16 = 1e-2


def wide_heads(tokens: int, dtype: torch.dtype) -> list["torch.Tensor"]:
    """Wider than fused kernels take."""
    own = heads_of((4, 2), tokens, WIDE)
    return [(each.detach()[None] / WIDE**0.25).to(dtype) for each in own]


@pytest.mark.parametrize("scores", [2**26, 700, 1])
@pytest.mark.parametrize("scaling", [1.0, 0.25])
@pytest.mark.parametrize("lengths", [(37,), (11, 11, 1, 29)])
def test_packed_documents_of_wide_heads_equal_the_formula(lengths, scaling, scores, monkeypatch):
    monkeypatch.setattr(wide_block, "SCORES_AT_HAND", scores)
    own = [t.requires_grad_() for t in wide_heads(sum(lengths), torch.float64)]
    row = Documents(lengths=lengths, pattern=Pattern(scaling=scaling, is_wide=True), kernel="flash")
    output = attend_in_pattern(*own, documents=row).output_BSHD[0]
    rows = [tensor[0].transpose(0, 1) for tensor in own]
    expected = reference_attention(*rows, document_lengths=lengths, scaling=scaling)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(output, expected, rtol=1e-10, atol=1e-10)
    found, wanted = (torch.autograd.grad(each, own, upstream) for each in (output, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 9])
def test_in_bfloat16_rounding_alone_is_between_wide_heads_and_the_plain_path(window):
    own = wide_heads(150, torch.bfloat16)
    upstream = torch.randn(own[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = PlainBlock(*(t.double() for t in own), 1.0, window)
    wanted = exact.forward()
    wanted = (*wanted, *exact.backward(upstream.double(), *wanted))
    block = WideBlock(*own, 1.0, window)
    found = block.forward()
    assert found[1].dtype == torch.float32
    found = (*found, *block.backward(upstream, *found))
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.double() - theirs).norm()) < IN_BFLOAT16 * float(theirs.norm())


def test_a_memory_only_trial_computes_the_rows_of_wide_heads_that_take_the_most(monkeypatch):
    monkeypatch.setattr(wide_block, "SCORES_AT_HAND", 4 * 64 * 4)
    own = wide_heads(64, torch.float64)
    whole, part = (WideBlock(*own, 1.0, None, None, short).forward()[0] for short in (False, True))
    assert torch.equal(part[:, :, -3:], whole[:, :, -3:])
    assert not part[:, :, :-3].any()
