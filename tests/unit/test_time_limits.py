"""The time limit of a study may change: what was cut short is run again with more time."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from studies import report_of
from test_proof import GRID_SIZE, STEP, ask, fits_up_to, steps_at

from highwater.cli.commands import exit_code
from highwater.errors import EXIT_INCONCLUSIVE, StudyError
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, Past, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.study_commands import commands, find_words
from highwater.pages.study_page import question_table, state
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal, read_study
from highwater.trials.simulated import OneByOne
from places import FOUND, examples
from trial_specs import TimedRunner, TimeLaw, answers_among

Ends = Sequence[Outcome | None]

SLOW = 1e13
"""FLOPs each second: 20 s are too short for 100 steps of the grid, even memory-only."""
KILLS = st.none() | st.integers(0, 8)
ENDS = st.lists(st.sampled_from([None, Outcome.TIMEOUT, Outcome.CRASHED]), max_size=16)
CRASHES = st.lists(st.sampled_from([None, None, Outcome.CRASHED]), max_size=12)
STUDIES = sorted(FOUND.glob("*.jsonl"))
TIMED = [path for path in STUDIES if read_study(path).question.timeout_s is not None]


class Ran(OneByOne):
    """A simulated GPU that keeps what it ran, and may be killed."""

    def __init__(
        self, capacity: int, step_time: TimeLaw | float, timeout_s: float | None,
        kill: int | None = None, ends: Ends = (),
    ) -> None:  # fmt: skip
        """``step_time`` is a law, or how many FLOPs are done each second."""
        law = steps_at(step_time) if isinstance(step_time, float) else step_time
        self._gpu = TimedRunner(fits_up_to(capacity * STEP), step_time=law, timeout_s=timeout_s)
        self._kill, self._ends = kill, ends
        self.specs: list[TrialSpec] = []
        self.keys: set[tuple[str, int]] = set()

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        if len(self.specs) == self._kill:
            raise KeyboardInterrupt
        end = self._ends[len(self.specs)] if len(self.specs) < len(self._ends) else None
        self.specs.append(spec)
        self.keys.add((spec.key, repeat))
        if end is not None:
            return TrialResult(outcome=end, reason="given", attempt=attempt)
        return self._gpu.run(spec, attempt=attempt, repeat=repeat)

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        return [(spec.length_tokens, spec.is_memory_only) for spec in self.specs]


def within(timeout_s: float, **changes: object) -> Question:
    return ask(timeout_s=timeout_s, **changes)


def search(
    path: Path, question: Question, ran: Ran, *, retry_crashed: bool = False
) -> tuple[CellAnswer, ...]:
    with open_journal(path, question, retry_crashed=retry_crashed) as journal:
        return tuple(answers_among(recorded_search(question, ran, journal)))


def told(path: Path) -> set[tuple[str, int]]:
    ended = [trial for trial in read_study(path).trials if trial.result is not None]
    return {(trial.spec.key, trial.repeat) for trial in ended if trial.result.outcome.tells}


def test_a_second_cell_that_was_answered_runs_nothing_although_the_first_goes_further(tmp_path):
    cells = tuple(Cell(layout=Layout(), settings=Settings(mlp_tiles=tiles)) for tiles in (1, 4))

    def second_is_fast(spec: TrialSpec) -> float:
        return steps_at(SLOW)(spec) if spec.settings.mlp_tiles == 1 else 0.01

    path = tmp_path / "study.jsonl"
    first = search(path, within(20.0, cells=cells), Ran(70, second_is_fast, 20.0))
    ran = Ran(70, second_is_fast, 2000.0)
    second = search(path, within(2000.0, cells=cells), ran)
    assert (first[0].limit, second[0].limit) == ("time", "memory")
    assert second[1].capacity_tokens == first[1].capacity_tokens == 70 * STEP
    assert {spec.settings.mlp_tiles for spec in ran.specs} == {1}


@settings(max_examples=examples(60), deadline=None)
@given(
    capacity=st.integers(0, GRID_SIZE - 1),
    flops_per_s=st.floats(1e12, 1e15),
    limits=st.lists(st.tuples(st.floats(1.0, 3000.0), KILLS, CRASHES), min_size=1, max_size=5),
    method=st.sampled_from(["bisect", "linear"]),
    confirm=st.integers(0, 1),
)
def test_whatever_limits_a_study_met_nothing_that_told_runs_twice_and_no_answer_shrinks(
    tmp_path_factory, capacity, flops_per_s, limits, method, confirm
):
    path = tmp_path_factory.mktemp("study") / "study.jsonl"

    def asked(timeout_s: float) -> Question:
        return within(timeout_s, method=method, confirm=confirm)

    for timeout_s, kill, ends in limits:
        before = told(path) if path.exists() else set()
        ran = Ran(capacity, flops_per_s, timeout_s, kill, ends)
        with suppress(KeyboardInterrupt):
            search(path, asked(timeout_s), ran)
        assert not before & ran.keys
    longest_s = max(timeout_s for timeout_s, *_ in limits)
    ran = Ran(capacity, flops_per_s, longest_s)
    (resumed,) = search(path, asked(longest_s), ran, retry_crashed=True)
    ended = [trial for trial in read_study(path).trials if trial.result is not None]
    full = [trial.spec.length_tokens for trial in ended if trial.result.outcome is Outcome.FIT]
    in_full = resumed.capacity_tokens or 0
    assert in_full == max(full, default=0), "nothing that was trained is forgotten"
    assert resumed.monotone
    ran = Ran(capacity, flops_per_s, longest_s)
    (fresh,) = search(path.with_name("fresh.jsonl"), asked(longest_s), ran)
    assert (resumed.reach_tokens or 0) >= (fresh.reach_tokens or 0)
    assert resumed.limit == fresh.limit
    for timeout_s in (longest_s, longest_s / 2):
        again = Ran(capacity, flops_per_s, timeout_s)
        assert search(path, asked(timeout_s), again) == (resumed,)
        assert again.specs == []


@settings(max_examples=examples(60), deadline=None)
@given(
    capacity=st.integers(0, GRID_SIZE - 1),
    searches=st.lists(st.tuples(KILLS, ENDS), min_size=1, max_size=5),
    method=st.sampled_from(["bisect", "linear"]),
    confirm=st.integers(0, 1),
)
@example(  # killed when the launch of a length had run out of time, before its cell was answered
    capacity=11, searches=[(6, [*(None,) * 5, Outcome.TIMEOUT])], method="bisect", confirm=0
)
def test_a_full_answer_without_a_run_stays(tmp_path_factory, capacity, searches, method, confirm):
    path = tmp_path_factory.mktemp("study") / "study.jsonl"
    question = ask(proof="full", timeout_s=None, method=method, confirm=confirm)
    for kill, ends in searches:
        before = told(path) if path.exists() else set()
        ran = Ran(capacity, 1e15, None, kill, ends)
        with suppress(KeyboardInterrupt):
            search(path, question, ran)
        assert not before & ran.keys
    (answer,) = search(path, question, Ran(capacity, 1e15, None), retry_crashed=True)
    assert (answer.capacity_tokens, answer.limit) == (capacity * STEP, "memory")
    assert answer.monotone is True
    assert_stays(path, question, (answer,), Ran(capacity, 1e15, None))


def assert_stays(path: Path, question: Question, answers: tuple[CellAnswer, ...], ran: Ran) -> None:
    """Asked again, the study answers the same, runs nothing."""
    before = path.read_text().splitlines()
    assert search(path, question, ran) == answers
    assert ran.specs == []
    (opened,) = path.read_text().splitlines()[len(before) :]
    assert '"kind":"opened"' in opened


def first_full_then_quick(capacity: int, timeout_s: float, ends: Ends = ()) -> Ran:
    """Full trials take as long as their length, memory-only ones next to nothing."""

    def seconds(spec: TrialSpec) -> float:
        return 1.0 if spec.is_memory_only else 3.0 * spec.length_tokens / STEP

    return Ran(capacity, seconds, timeout_s, ends=ends)


def test_a_first_full_trial_that_crashes_with_more_time_undoes_nothing(tmp_path):
    path, crashes = tmp_path / "study.jsonl", (Outcome.CRASHED,) * 3
    edge = (100 * STEP, 101 * STEP)
    (short,) = search(path, within(5.0), first_full_then_quick(100, 5.0))
    assert short.capacity_tokens is None
    assert (short.reach_tokens, short.does_not_fit_tokens) == edge
    ran = first_full_then_quick(100, 60.0, crashes)
    (crashed,) = search(path, within(60.0), ran)
    assert ran.tokens == [(STEP, False)] * 3
    assert (crashed.reach_tokens, crashed.limit) == (100 * STEP, "inconclusive")
    assert crashed.monotone is True
    again = first_full_then_quick(100, 60.0, crashes)
    assert search(path, within(60.0), again, retry_crashed=True) == (crashed,)
    assert read_study(path).answers == (crashed,)
    answered = path.read_text().count('"kind":"cell_answered"')
    assert answered == 3, "the third was found after trials of its own"
    (mended,) = search(path, within(60.0), first_full_then_quick(100, 60.0), retry_crashed=True)
    assert mended.limit == "memory"
    assert (mended.reach_tokens, mended.does_not_fit_tokens) == edge
    assert (mended.capacity_tokens or 0) > STEP


@pytest.mark.parametrize(("again_s", "retry_crashed"), [(6000.0, True), (60000.0, False)])
def test_a_full_trial_after_the_edge_that_crashed_is_tried_again(tmp_path, again_s, retry_crashed):
    path, crashes = tmp_path / "study.jsonl", (None, *(Outcome.CRASHED,) * 3)
    search(path, within(60.0), first_full_then_quick(100, 60.0))
    (crashed,) = search(path, within(6000.0), first_full_then_quick(100, 6000.0, crashes))
    assert "409,600 tokens in full" in crashed.reason
    assert (crashed.capacity_tokens, crashed.limit) == (64 * STEP, "memory")
    less = first_full_then_quick(100, 600.0)
    assert search(path, within(600.0), less, retry_crashed=True) == (crashed,)
    assert less.specs == [], "with less time the answer stays"
    mended = first_full_then_quick(100, again_s)
    (answer,) = search(path, within(again_s), mended, retry_crashed=retry_crashed)
    assert mended.tokens == [(100 * STEP, False)]
    assert (answer.capacity_tokens, answer.memory_only) == (100 * STEP, None)
    assert "in full" not in answer.reason
    assert_stays(path, within(again_s), (answer,), first_full_then_quick(100, again_s))


@pytest.mark.parametrize("proof", ["memory", "full"])
@pytest.mark.parametrize("ends", [(), (None,)], ids=["the first trial", "a later one"])
def test_a_trial_that_always_crashes_is_launched_three_times_and_never_again(tmp_path, proof, ends):
    path, crash = tmp_path / "study.jsonl", (Outcome.CRASHED,) * 3
    question = within(60.0) if proof == "memory" else ask(proof="full", timeout_s=None)

    def gpu(*ends: Outcome | None) -> Ran:
        if proof == "memory":
            return first_full_then_quick(100, 60.0, ends)
        return Ran(100, 1e15, None, ends=ends)

    first = gpu(*ends, *crash, *crash)
    (answer,) = search(path, question, first)
    assert len(first.specs) == len(ends) + 3
    (note,) = open_notes(path, question)
    assert "`--retry-crashed`" in note
    for _ in range(2):
        again = gpu(*crash)
        assert search(path, question, again) == (answer,)
        assert again.specs == []
    goal = gpu(*crash)
    assert search(path, question, goal, retry_crashed=True) == (answer,)
    assert len(goal.specs) == 3
    (answer,) = search(path, question, gpu(), retry_crashed=True)
    assert (answer.limit, answer.reach_tokens) == ("memory", 100 * STEP)
    assert open_notes(path, question) == []


def open_notes(path: Path, question: Question) -> list[str]:
    with open_journal(path, question) as journal:
        return list(journal.notes)


def recorded(
    path: Path, timeout_s: float, attempts: tuple[int, ...] = (1, 2), **how: bool
) -> list[TrialResult | None]:
    """How the attempts at the shortest length ended, as far as that stands under a limit."""
    with open_journal(path, within(timeout_s), **how) as journal:
        return [journal.recorded(SHORTEST, attempt=attempt, repeat=0) for attempt in attempts]


def record(path: Path, timeout_s: float, *ends: tuple[int, TrialResult]) -> None:
    """Launches of the shortest length under a limit, by their attempts."""
    with open_journal(path, within(timeout_s)) as journal:
        for attempt, end in ends:
            journal.trial_started(SHORTEST, attempt=attempt, repeat=0)
            journal.trial_finished(SHORTEST, attempt=attempt, repeat=0, result=end)


SHORTEST = ask().trial(ask().cells[0], STEP, memory_only=True)
LATE, CRASHED = (
    TrialResult(outcome=outcome, reason="") for outcome in (Outcome.TIMEOUT, Outcome.CRASHED)
)


def test_a_crash_before_a_trial_ran_out_of_time_is_not_tried_again(tmp_path):
    path, ends = tmp_path / "study.jsonl", [LATE, CRASHED, LATE]
    record(path, 300.0, *enumerate(ends, 1))
    with open_journal(path, within(300.0)) as journal:
        list(recorded_search(ask(), Ran(9, SLOW, 300.0), journal, past=lambda _: Past()))
    for timeout_s, stand in ((300.0, ends), (301.0, [None] * 3)):
        assert recorded(path, timeout_s, (1, 2, 3), retry_crashed=True) == stand
        with open_journal(path, within(timeout_s), retry_crashed=True) as journal:
            assert (journal.past(ask().cells[0]).answer is None) == (timeout_s > 300.0)


@pytest.mark.parametrize("recorded", TIMED, ids=lambda path: path.stem)
def test_a_study_from_before_goes_on_under_another_limit(recorded, tmp_path):
    path = tmp_path / "study.jsonl"
    path.write_bytes(recorded.read_bytes())
    before = read_study(path)
    limit_s = before.question.timeout_s or 0.0
    ended = [trial for trial in before.trials if trial.result is not None]
    cut = {trial.spec.key for trial in ended if trial.result.outcome is Outcome.TIMEOUT}
    cut -= {trial.spec.key for trial in ended if trial.result.outcome.tells}
    for timeout_s, is_longer in ((limit_s / 2, False), (2 * limit_s, True)):
        question = msgspec.structs.replace(before.question, timeout_s=timeout_s)
        with open_journal(path, question) as journal:
            study = journal.snapshot()
            found = [journal.recorded(t.spec, attempt=t.attempt, repeat=t.repeat) for t in ended]
            lacking = {t.spec.key for t, told in zip(ended, found, strict=True) if told is None}
            settled = [journal.past(cell).answer for cell in study.question.cells]
        assert (study.answers, study.question.timeout_s) == (before.answers, timeout_s)
        assert [trial.result for trial in study.trials] == [trial.result for trial in before.trials]
        assert lacking == (cut if is_longer else set())
        stand = [None if is_longer else study.answer_of(cell) for cell in study.question.cells]
        assert settled == stand


def test_a_trial_that_was_cut_short_twice_counts_by_its_own_limits(tmp_path):
    path = tmp_path / "study.jsonl"
    record(path, 600.0, (1, LATE))
    record(path, 300.0, (2, LATE))
    for timeout_s in (200.0, 300.0):
        assert recorded(path, timeout_s) == [LATE, LATE]
    assert (recorded(path, 301.0), recorded(path, 601.0)) == ([LATE, None], [None, None])
    record(path, 900.0, (1, TrialResult(outcome=Outcome.MEMORY_ONLY_FIT, reason="fit")))
    assert recorded(path, 900.0)[1] == LATE, "the first attempt told: nobody needs the second"
    limits = [trial.timeout_s for trial in read_study(path).trials]
    assert limits == [300.0, 900.0], "what was run again stands where it ended"


def test_what_a_study_says_of_its_limit_is_the_last_one(tmp_path):
    path = tmp_path / "study.jsonl"
    for timeout_s in (300.0, 600.0):
        open_journal(path, within(timeout_s)).close()
    question = read_study(path).question
    proof = ["--proof", "memory", "--timeout", "600s", "--dry-run"]
    assert list(find_words(question))[-5:] == proof
    assert "up to 10m 00s" in dict(question_table(report_of(read_study(path))).rows)["search"]
    with pytest.raises(StudyError) as refusal:
        open_journal(path, within(900.0, confirm=1))
    assert "confirm is 0 there" in refusal.value.problem
    assert "timeout" not in refusal.value.problem


def test_a_report_says_which_answers_had_less_time_and_that_a_search_is_not_finished(tmp_path):
    path = tmp_path / "study.jsonl"
    answers = search(path, within(300.0), Ran(100, 2e14, 300.0))
    with suppress(KeyboardInterrupt):
        search(path, within(3000.0), Ran(100, 2e14, 3000.0, kill=0))
    study, report = read_study(path), report_of(read_study(path))
    assert (study.answers, study.answers_within_s, study.complete) == (answers, (300.0,), False)
    for said in ("**Unfinished**", "0 of 1 cells are", "1 more in less time"):
        assert said in state(report)
    assert exit_code(study) == EXIT_INCONCLUSIVE
    limits = re.findall("up to (.m|..m) 00s", dict(question_table(report).rows)["search"])
    assert limits == ["50m", "5m"]
    answers = search(path, within(3000.0), Ran(100, 2e14, 3000.0))
    open_journal(path, within(60.0)).close()
    study, report = read_study(path), report_of(read_study(path))
    assert (study.answers, study.answers_within_s, study.complete) == (answers, (3000.0,), True)
    searched = dict(question_table(report).rows)["search"]
    assert "up to 50m 00s" in searched
    assert "answers" not in searched
    (anew,) = (each for each in report.commands if each.what.startswith("every trial anew"))
    assert "--timeout 3000s" in anew.text


def test_the_command_that_does_a_study_anew_has_the_time_that_its_answers_had(tmp_path):
    path = tmp_path / "study.jsonl"
    search(path, within(300.0), Ran(100, 2e14, 300.0))
    typed = ("highwater", "find", "Qwen3-0.6B", "--proof", "memory", "--timeout", "60s")
    open_journal(path, within(60.0), command=typed).close()
    *_, anew = (command for command in commands(read_study(path)) if "--study" in command.words)
    asked = (*typed[:3], "--prompt-tokens", "2048", *typed[3:-2])
    assert anew.words == (*asked, "--timeout", "300s", "--study", "study-again.jsonl")
