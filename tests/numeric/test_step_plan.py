"""The plan of a training: every document once an epoch, in rows that hold them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, chain, count, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_models import tiny_training
from highwater.engine.data.batches import Document, pack
from highwater.engine.data.step_plan import StepPlan, evaluation_rows
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import Training
from highwater.engine.training.training_run import evaluate
from highwater.errors import UsageError

np = pytest.importorskip("numpy", reason="the data plane needs the train extra")
ROW = 64
SIZES = st.lists(st.integers(1, ROW), min_size=1, max_size=60)
PAIRS = st.lists(st.integers(1, ROW // 2), min_size=1, max_size=30).map(
    lambda sizes: [size for size in sizes for _ in range(2)]
)
PLANNED = [((4, 0), (2, 1)), ((6, 3, 7), (5,)), ((4, 0), (2, 7, 6))]
"""What ``test_a_plan_is_this_one_on_every_machine`` plans: with another plan under the same seed a
run that was stopped would go on elsewhere."""
GROUPS = st.lists(
    st.lists(st.integers(1, ROW // 4), min_size=3, max_size=8), min_size=1, max_size=20
)


def plan(lengths: list[int], units: list[int], **given: object) -> StepPlan:
    choices = {"row_tokens": ROW, "micro_batches": 3, "seed": 0, **given}
    return StepPlan(np.array(lengths), np.array(units), **choices)  # type: ignore[arg-type]


def rows_of(made: StepPlan, steps: int) -> list[tuple[int, ...]]:
    return [row for number in range(1, steps + 1) for row in made.step(number)]


def steps_of(made: StepPlan, documents: int) -> int:
    """Steps until so many documents were trained: those of an epoch, or of several."""
    trained = accumulate(sum(map(len, made.step(number))) for number in count(1))
    return next(steps for steps, seen in enumerate(trained, 1) if seen >= documents)


def fullness(made: StepPlan, lengths: np.ndarray) -> float:
    """The part of an epoch's rows that tokens fill."""
    trained = accumulate(map(len, rows_of(made, steps_of(made, len(lengths)))))
    rows = next(number for number, seen in enumerate(trained, 1) if seen == len(lengths))
    return lengths.sum() / (rows * 2048)


@given(lengths=SIZES, rows=st.integers(1, 5), seed=st.integers(0, 3))
def test_an_epoch_has_every_document_once_in_rows_that_hold_them(lengths, rows, seed):
    made = plan(lengths, list(range(len(lengths))), micro_batches=rows, seed=seed)
    for epochs in (1, 2, 3):
        steps = steps_of(made, epochs * len(lengths))
        trained = rows_of(made, steps)
        assert len(trained) == steps * rows
        assert all(trained)
        assert all(sum(lengths[number] for number in row) <= ROW for row in trained)
        times = Counter(chain(*trained))
        assert min(times[number] for number in range(len(lengths))) >= epochs
        # What is trained past the epochs are the first rows of the next, fewer than a step has.
        over = Counter({number: count - epochs for number, count in times.items()})
        assert len(list((+over).elements())) <= sum(map(len, trained[-rows:]))


@given(lengths=SIZES, seed=st.integers(0, 3))
def test_rows_one_after_the_other_are_whole_epochs(lengths, seed):
    made = plan(lengths, list(range(len(lengths))), micro_batches=1, seed=seed)
    for start, end in pairwise(
        [0, *(steps_of(made, epochs * len(lengths)) for epochs in (1, 2, 3))]
    ):
        found = sorted(chain(*(made.step(number)[0] for number in range(start + 1, end + 1))))
        assert found == list(range(len(lengths)))


@given(lengths=PAIRS, seed=st.integers(0, 3))
def test_a_pair_is_together_in_one_row_the_chosen_one_first(lengths, seed):
    made = plan(lengths, [number // 2 for number in range(len(lengths))], seed=seed)
    for row in rows_of(made, steps_of(made, len(lengths))):
        assert row[::2] == tuple(number - 1 for number in row[1::2])
        assert all(number % 2 == 0 for number in row[::2])
        assert sum(lengths[number] for number in row) <= ROW


@given(groups=GROUPS, seed=st.integers(0, 3))
def test_a_group_is_in_one_step_whole_and_no_row_is_empty(groups, seed):
    lengths = list(chain(*groups))
    units = [number for number, group in enumerate(groups) for _ in group]
    made = plan(lengths, units, seed=seed, spread_units=True)
    trained: list[int] = []
    for number in range(1, steps_of(made, 2 * len(lengths)) + 1):
        rows = made.step(number)
        assert all(rows)
        assert all(sum(lengths[each] for each in row) <= ROW for row in rows)
        here = list(chain(*rows))
        trained += here
        numbers = {units[each] for each in here}
        assert sorted(here) == [each for each, unit in enumerate(units) if unit in numbers]
    assert Counter(trained) == Counter(list(range(len(lengths))) * 2)


@given(
    groups=st.lists(st.lists(st.integers(1, ROW), min_size=1, max_size=3), min_size=1, max_size=12),
    rows=st.integers(1, 4),
)
def test_groups_that_are_smaller_than_a_steps_rows_are_planned_whole_or_refused(groups, rows):
    lengths = list(chain(*groups))
    units = [number for number, group in enumerate(groups) for _ in group]
    made = None
    with suppress(UsageError):
        made = plan(lengths, units, micro_batches=rows, spread_units=True)
    if made is None:
        # With fewer rows none can be left empty, and what one row holds fits any step.
        assert rows > min(map(len, groups)) or max(map(sum, groups)) > ROW
        return
    steps = [made.step(number) for number in range(1, steps_of(made, 3 * len(lengths)) + 1)]
    assert all(all(rows) for rows in steps)
    times = Counter(chain(*chain(*steps)))
    assert set(times.values()) == {3}
    assert len(times) == len(lengths)


@given(lengths=SIZES, seed=st.integers(0, 100), number=st.integers(1, 40))
def test_a_plan_is_the_same_from_wherever_it_is_asked(lengths, seed, number):
    units = list(range(len(lengths)))
    one, other = plan(lengths, units, seed=seed), plan(lengths, units, seed=seed)
    for before in range(1, number):
        one.step(before)
    assert (one.step(number), one.step(1)) == (other.step(number), other.step(1))


def test_a_plan_is_this_one_on_every_machine():
    made = plan([10, 20, 30, 40, 50, 60, 5, 15], list(range(8)), micro_batches=2, seed=7)
    assert [made.step(1), made.step(2), made.step(3)] == PLANNED


def test_epochs_and_seeds_have_orders_of_their_own():
    units = list(range(200))
    one, other = (plan([ROW] * 200, units, micro_batches=200, seed=seed) for seed in (0, 1))
    assert one.step(1) != one.step(2)
    assert one.step(1) != other.step(1)
    assert one.step(1) != tuple((number,) for number in units)


def test_rows_and_steps_are_nearly_full_and_short_documents_not_left_over():
    lengths = np.minimum(2048, np.random.default_rng(0).lognormal(5.5, 1.2, 20_000).astype(int) + 2)
    made = StepPlan(lengths, np.arange(20_000), row_tokens=2048, micro_batches=16, seed=0)
    assert fullness(made, lengths) > 0.98
    steps = [list(chain(*made.step(number))) for number in range(1, steps_of(made, 20_000))]
    half = len(steps) // 2
    first, second = (lengths[list(chain(*part))].mean() for part in (steps[:half], steps[half:]))
    assert abs(first - second) < 0.1 * lengths.mean()
    lengths = np.minimum(2048, np.random.default_rng(0).lognormal(5.5, 1.2, 8_000).astype(int) + 2)
    made = StepPlan(
        lengths, np.arange(8_000) // 8, row_tokens=2048, micro_batches=16, seed=0, spread_units=True
    )
    assert fullness(made, lengths) > 0.9
    tokens = [[int(lengths[list(row)].sum()) for row in made.step(number)] for number in (1, 2)]
    assert all(min(rows) > 0.5 * max(rows) for rows in tokens)


@pytest.mark.parametrize(
    ("lengths", "units", "choices", "problem", "hint"),
    [
        ([ROW + 1], [0], {}, "a document of 65 tokens, and a row of 64", "`--length 65`"),
        ([40, 40], [0, 0], {}, "80 tokens that belong together", "`--sequences-per-micro-batch 2`"),
        ([1, 1], [0, 0], {"spread_units": True}, "2 documents for 3 rows", "`--rows 2`"),
        ([65, 1, 1], [0, 0, 0], {"spread_units": True}, "a document of 65", "`--length 65`"),
        ([60] * 4, [0] * 4, {"spread_units": True}, "4 documents of 240 tokens", "`--rows 4`"),
        ([], [], {}, "a corpus without documents", "`--data data.jsonl`"),
        (
            [60, 60, 60, 60],
            [0, 0, 1, 1],
            {"spread_units": True},
            "a row would be left empty",
            "`--rows 2`",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_can(lengths, units, choices, problem, hint):
    with pytest.raises(UsageError) as refused:
        plan(lengths, list(units), **choices)
    assert problem in refused.value.problem
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("lengths", "units", "rows"), [([1, 1], [0, 0], 2), ([60] * 4, [0] * 4, 4)]
)
def test_with_the_rows_of_the_hint_it_is_planned(lengths, units, rows):
    made = plan(lengths, units, micro_batches=rows, spread_units=True)
    assert sorted(chain(*made.step(1))) == list(range(len(lengths)))


@pytest.fixture(params=["sft", "dpo", "rw"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    with process_mesh.alone(torch.device("cpu")):
        yield tiny_training(tmp_path, request.param)


def test_no_micro_batches_are_refused_with_a_hint_that_works(training):
    with pytest.raises(UsageError, match="no micro-batches") as refused:
        evaluate(training, [])
    assert "`evaluate(training, [batch])`" in refused.value.hint
    documents = [Document(torch.arange(n), torch.arange(n), reward=float(n)) for n in (9, 7)]
    found = evaluate(training, [pack(documents)])
    assert found.counted == (1 if training.traits.pairs else 14)
    assert found.loss is not None


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
