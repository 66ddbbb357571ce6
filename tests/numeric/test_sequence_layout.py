"""A packed row, cut over ranks by slices and by a ring, is whole again; each rank knows what it
holds.
"""

import time

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=9).map(tuple)
DEGREES = st.integers(1, 5)


@given(LENGTHS, DEGREES, DEGREES)
def test_what_is_cut_is_whole_again(lengths, ulysses, ring):
    layout = SequenceLayout(lengths, ulysses, ring)
    held = [layout.share_of(rank).positions_T for rank in range(layout.degree)]
    assert {len(each) for each in held} == {layout.tokens_per_rank}
    together = torch.from_numpy(np.concatenate(held))
    is_token = together != PADDING
    assert sorted(together[is_token].tolist()) == list(range(sum(lengths)))
    rows = torch.randn(len(together), 2)
    assert torch.equal(layout.restored(rows)[together[is_token]], rows[is_token])


@given(LENGTHS, DEGREES, DEGREES)
def test_a_rank_knows_document_and_offset_of_every_token_that_it_holds(lengths, ulysses, ring):
    layout = SequenceLayout(lengths, ulysses, ring)
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    offsets = [offset for length in lengths for offset in range(length)]
    for rank in range(layout.degree):
        share = layout.share_of(rank)
        told = zip(
            *(t.tolist() for t in (share.positions_T, share.documents_T, share.offsets_T)),
            strict=True,
        )
        for position, document, offset in told:
            if position == PADDING:
                assert document == len(lengths)
            else:
                assert (document, offset) == (documents[position], offsets[position])
        assert sum(part.tokens for part in share.parts) == layout.tokens_per_rank
        real = share.positions_T[share.positions_T != PADDING]
        assert bool((np.diff(real) > 0).all()), "in the order of the row"


@given(LENGTHS, st.integers(2, 5))
def test_over_a_ring_every_rank_has_the_same_causal_work(lengths, ring):
    layout = SequenceLayout(lengths, ring_degree=ring)
    work = [int((layout.share_of(rank).offsets_T + 1).sum()) for rank in range(layout.degree)]
    assert len(set(work)) == 1


def test_ranks_of_a_ring_hold_the_chunks_that_the_published_order_gives_them():
    layout = SequenceLayout((8, 4), ring_degree=2)
    assert layout.share_of(0).positions_T.tolist() == [0, 1, 6, 7, 8, 11]
    assert layout.share_of(1).positions_T.tolist() == [2, 3, 4, 5, 9, 10]
    mixed = SequenceLayout((8, 4), ulysses_degree=2, ring_degree=2)
    assert [mixed.share_of(rank).positions_T.tolist() for rank in range(4)] == [
        *([0, 1, 6], [7, 8, 11]),
        *([2, 3, 4], [5, 9, 10]),
    ]


def test_a_million_tokens_of_a_thousand_documents_are_cut_without_a_loop_over_them(record_property):
    layout = SequenceLayout((1049,) * 1000, ulysses_degree=2, ring_degree=3)
    began = time.perf_counter()
    together = torch.from_numpy(
        np.concatenate([layout.share_of(rank).positions_T for rank in range(6)])
    )
    restored = layout.restored(together)
    took_s = time.perf_counter() - began
    record_property("counted", f"1,049,000 tokens of 1,000 documents, 6 ranks: {took_s:.2f} s")
    assert torch.equal(restored, torch.arange(1_049_000))
