"""Evaluation rows: every document once, in rows that hold it."""

import pytest

np = pytest.importorskip("numpy", reason="the data plane needs the train extra")

from hypothesis import given
from hypothesis import strategies as st

from highwater.engine.data.step_plan import evaluation_rows

ROW_TOKENS = 100


@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40), paired=st.booleans())
def test_every_document_is_evaluated_once_and_beside_the_other_of_its_pair(lengths, paired):
    lengths = [*lengths, *lengths] if paired else lengths
    units = [number // (2 if paired else 1) for number in range(len(lengths))]
    together = np.array(units) if paired else None
    rows = evaluation_rows(np.array(lengths), together, row_tokens=ROW_TOKENS)
    assert [document for row in rows for document in row] == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[document] for document in row) <= ROW_TOKENS
        assert len({units[document] for document in row}) * (2 if paired else 1) == len(row)
