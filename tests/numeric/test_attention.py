"""Dense attention against the float64 textbook."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from closeness import assert_near, with_gradients
from highwater.engine.activations.host import Kept
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.dense import attend, select_kernel
from highwater.engine.attention.mixed_lengths import attend_mixed, calls_of, front_tokens
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.attention.registry import register
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import ModelError
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
