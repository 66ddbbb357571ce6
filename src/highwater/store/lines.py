"""Lines of a journal: one JSON object each, the header first; and the content that they represent.

Schema 3:  header           the question, once
           opened           a process opened the journal for writing, with its time limit
           cell_expected    prediction for one cell, before its first trial; not in schema 1
           trial_started    a trial with its whole specification
           trial_finished   its result, named by the specification's key
           cell_answered    the answer for one cell; the last one for a cell counts

Since schema 3 each line begins with its ``checksum``, of itself and of all lines before it: a line
that was edited, moved or removed in the middle is found and named. A journal begun in an older
schema continues without checksums.

An answer is accepted only if its trials support it (docs/decisions/026). All its lengths and bytes
follow from results, whatever their order: the longest length that fit, the next, which did not, the
reason why the search ended there, and the figures of the trial at the capacity.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from highwater.errors import HighwaterError, StudyError
from highwater.nouns.codec import Record, from_json
from highwater.nouns.corpus import packed_tokens
from highwater.nouns.environment import Environment
from highwater.nouns.secrets import hidden_words
from highwater.nouns.study import (
    STUDY_SCHEMA_VERSION,
    Cell,
    CellAnswer,
    Expectation,
    MemoryOnlyFit,
    Question,
    RecordedTrial,
    UnprovenAnswer,
)
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.store.journal_file import free_study, unsealed
from highwater.units import format_tokens


@dataclass(frozen=True, slots=True)
class Contradiction:
    """``failed_index`` did not fit, but ``fit_index``, which takes no less memory, did."""

    failed_index: int
    fit_index: int


def contradictions(
    fit: Collection[int],
    failed: Collection[int],
    packed: Callable[[int], int] = lambda index: index,
) -> tuple[Contradiction, ...]:
    """Indices that did not fit, each with the closest above it that fit with no fewer tokens."""
    found: list[Contradiction] = []
    for index in sorted(failed):
        above = (each for each in sorted(fit) if each >= index and packed(each) >= packed(index))
        closest = next(above, None)
        if closest is not None:
            found.append(Contradiction(index, closest))
    return tuple(found)


def unsupported(
    question: Question, answer: CellAnswer, trials: Iterable[RecordedTrial]
) -> str | None:
    """Reason why the trials before an answer do not prove it; None if they do."""
    return next(_gaps(question, answer, _shown(question, answer, trials)), None)


@dataclass(slots=True)
class _Shown:
    """Results of a cell's trials, by index of the grid."""

    trained: dict[int, list[TrialResult]] = field(default_factory=dict[int, list[TrialResult]])
    """Full trials that count as a fit."""
    held: dict[int, list[TrialResult]] = field(default_factory=dict[int, list[TrialResult]])
    """Memory-only trials that count as a fit."""
    failed: dict[int, set[Outcome]] = field(default_factory=dict[int, set[Outcome]])
    """Outcomes of trials that told whether memory suffices, and do not count as a fit."""
    crashed: bool = False
    launches: int = 0

    @property
    def reach(self) -> int:
        """The highest index that fit, in full or memory-only; 0 if none did."""
        return max((*self.trained, *self.held), default=0)


def _shown(question: Question, answer: CellAnswer, trials: Iterable[RecordedTrial]) -> _Shown:
    """Read the trials that belong to this question; simulated ones only if it is simulated."""
    shown = _Shown()
    for trial in trials:
        index, result = question.grid.index_at_most(trial.spec.length_tokens), trial.result
        if result is None or (result.simulated and not question.simulated):
            continue
        if not _is_asked(question, answer, trial, index):
            continue
        shown.launches += 1
        if not result.outcome.tells:
            shown.crashed |= result.outcome is not Outcome.TIMEOUT
        elif not question.counts_as_fit(result):
            shown.failed.setdefault(index, set()).add(result.outcome)
        else:
            fits = shown.trained if result.outcome is Outcome.FIT else shown.held
            fits.setdefault(index, []).append(result)
    return shown


def _is_asked(question: Question, answer: CellAnswer, trial: RecordedTrial, index: int) -> bool:
    """True if the question includes a trial, apart from paths of model and files."""
    spec = trial.spec
    if index < 1 or question.grid.length(index) != spec.length_tokens:
        return False
    try:
        asked = question.trial(answer.cell, spec.length_tokens, memory_only=spec.is_memory_only)
    except HighwaterError:  # a question that nobody could ask
        return False
    nowhere: dict[str, Any] = dict.fromkeys(("checkpoint_directory", "statistics"))
    here = spec.replace(model_directory=asked.model_directory, **nowhere)
    return here == asked and (not spec.is_memory_only or question.proof == "memory")


def _gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Yield each statement of an answer that its trials do not support, in words."""
    yield from _trained_gaps(question, answer, shown)
    yield from _memory_only_gaps(question, answer, shown)
    yield from _edge_gaps(question, answer, shown)
    if answer.monotone == bool(answer.contradictions):
        yield "it says both that outcomes are monotone and that they are not"
    # in a proof by memory, full trials below the longest fit do not count here
    fit = {shown.reach} - {0} if question.proof == "memory" else {*shown.trained}
    packed = partial(packed_tokens, question, answer.cell)
    if answer.monotone and contradictions(fit, shown.failed, packed):
        yield "a shorter length did not fit where a longer one did, and it says nothing of that"
    if not 0 < answer.trials <= shown.launches:
        yield f"it says that it took {answer.trials} trials, and {shown.launches} ended"


def _tokens(count: int | None) -> str:
    return f"{format_tokens(count)} tokens"


def _trained_gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Yield differences between the capacity, with its figures, and the full trials."""
    longest = max(shown.trained, default=0)
    tokens = question.grid.length(longest) if longest else None
    figures = (answer.peak_reserved_bytes, answer.headroom_bytes, answer.tokens_per_s, answer.mfu)
    did = "no full trial did"
    if tokens is not None:
        did = f"the longest that did in a full trial is {format_tokens(tokens)}"
    if answer.capacity_tokens:
        if answer.capacity_tokens != tokens:
            yield f"it says that {_tokens(answer.capacity_tokens)} fit, and {did}"
        elif figures not in [
            (r.peak_reserved_bytes, r.headroom_bytes, r.tokens_per_s, r.mfu)
            for r in shown.trained[longest]
        ]:
            yield f"its figures are those of no trial of {_tokens(tokens)}"
    elif longest:
        yield f"it says that no length fit, and {did}"
    elif any(figure is not None for figure in figures):
        yield "it has figures of a length that fit, and none did"
    elif answer.capacity_tokens == 0 and (1 not in shown.failed or shown.reach):
        yield "it says that nothing fits, and no trial of the shortest length says so"


def _memory_only_gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Yield differences between the memory-only proof and the memory-only trials."""
    proof, longest = answer.memory_only, max(shown.held, default=0)
    tokens = question.grid.length(longest) if longest > max(shown.trained, default=0) else None
    if proof is None:
        if tokens is not None:
            yield f"it leaves out that {_tokens(tokens)} fit in a memory-only trial"
        return
    proofs = [
        MemoryOnlyFit(
            length_tokens=tokens,
            peak_reserved_bytes=r.peak_reserved_bytes,
            headroom_bytes=r.headroom_bytes,
        )
        for r in shown.held.get(longest, ())
        if tokens is not None
    ]
    if proof not in proofs:
        yield f"no memory-only trial shows what it says of {_tokens(proof.length_tokens)}"


def _edge_gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Yield differences between the stated end of the search and the trials at the next length."""
    longer = question.size_of(answer.cell) - shown.reach
    beyond = question.grid.length(shown.reach + 1)
    ends = shown.failed.get(shown.reach + 1, set[Outcome]())
    is_edge = answer.limit in ("memory", "host_memory")
    fails = answer.does_not_fit_tokens
    if fails != (beyond if is_edge else None):
        said = "nothing" if fails is None else _tokens(fails)
        yield f"it says that {said} did not fit, and the next length is {format_tokens(beyond)}"
    elif answer.limit == "memory" and not ends - {Outcome.HOST_OUT_OF_MEMORY}:
        yield f"no trial of {_tokens(beyond)} ran out of memory"
    elif answer.limit == "host_memory" and Outcome.HOST_OUT_OF_MEMORY not in ends:
        yield f"no trial of {_tokens(beyond)} ran out of host memory"
    elif answer.limit == "ceiling" and longer:
        yield f"it says that the longest length fit, and there are {longer} longer ones to try"
    elif answer.limit == "time" and not longer:
        yield "it says that time ended it, and there is no longer length to try"
    elif answer.limit == "time" and ends:
        yield f"it says that time ended it, and a trial of {_tokens(beyond)} told"
    elif answer.limit == "inconclusive" and not shown.crashed:
        yield "it says that trials crashed, and none did"


_SEALED_SINCE = 3
"""First schema whose lines have checksums."""


class HeaderLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="header"):
    """First line of a journal: its schema and its question."""

    schema_version: int
    question: Question


class OpenedLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="opened"):
    """Journal line: the process that writes from here on, for other processes' errors to name."""

    pid: int
    host: str
    at_unix_s: float
    highwater_version: str
    command: tuple[str, ...] = ()
    environment: Environment | None = None
    """Machine and shell of the process; None for a dry run, and in older journals."""
    timeout_s: float | None = None
    """Time limit from here on; None: unchanged, at first the header's."""

    def __post_init__(self) -> None:
        """Hide secrets in the command; earlier versions recorded them."""
        msgspec.structs.force_setattr(self, "command", hidden_words(self.command))


class ExpectedLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="cell_expected"):
    """Journal line: the prediction for a cell whose search is about to begin."""

    at_unix_s: float
    expectation: Expectation


class _LaunchLine(Record, frozen=True, kw_only=True):
    """Base of journal lines about a launch, which is named by its specification's key."""

    spec_key: str
    attempt: int
    repeat: int
    at_unix_s: float


class StartedLine(_LaunchLine, frozen=True, kw_only=True, tag_field="kind", tag="trial_started"):
    """Journal line: a trial is about to be launched."""

    spec: TrialSpec


class FinishedLine(_LaunchLine, frozen=True, kw_only=True, tag_field="kind", tag="trial_finished"):
    """Journal line: the result of a launched trial."""

    result: TrialResult


class AnsweredLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="cell_answered"):
    """Journal line: the answer of a cell whose search has ended."""

    at_unix_s: float
    answer: CellAnswer


Line = OpenedLine | ExpectedLine | StartedLine | FinishedLine | AnsweredLine
LaunchKey = tuple[str, int, int]
"""Name of one launch of one trial: specification's key, attempt and repeat."""


class JournalContent:
    """What the lines of a journal say together: question, trials, answers, expectations."""

    def __init__(self, header: HeaderLine, *, checksum: str | None = None) -> None:
        self.schema_version = header.schema_version
        self.checksum = checksum
        """Checksum of the last line; None if lines have none."""
        self.question = header.question
        """Question, with the time limit of the process that last opened the journal."""
        self.opened: OpenedLine | None = None
        self.environments: tuple[Environment, ...] = ()
        """Environments in order, each different from the one before."""
        self._trials: dict[LaunchKey, RecordedTrial] = {}
        self._keys: dict[str, str] = {}
        """Today's key for each written key: a newer setting, at its default, changes no trial."""
        self._trials_of: dict[Cell, dict[LaunchKey, RecordedTrial]] = {}
        """Trials by cell."""
        self._claims: dict[Cell, tuple[CellAnswer, Callable[[], str | None]]] = {}
        self._answered_within_s: dict[Cell, float | None] = {}
        """Time limit under which each cell was answered."""
        self._ended_since: set[Cell] = set()
        """Cells of which a trial has ended after their answer."""
        self._expectations: dict[Cell, Expectation] = {}

    def add(self, line: Line) -> None:
        """Add one line; a restarted trial keeps its place. ValueError: an end without a start."""
        match line:
            case OpenedLine():
                self.opened = line
                if line.environment is not None and line.environment not in self.environments[-1:]:
                    self.environments += (line.environment,)
                if line.timeout_s is not None:
                    self.question = self.question.replace(timeout_s=line.timeout_s)
            case ExpectedLine():
                self._expectations.setdefault(line.expectation.cell, line.expectation)
            case StartedLine():
                self._start(line)
            case FinishedLine():
                self._finish(line)
            case AnsweredLine():
                answer, cell = line.answer, line.answer.cell
                trials = self.trials_of(cell)  # until now: one that is run again later may differ
                why = cache(lambda: unsupported(self.question, answer, trials))
                self._claims[cell] = answer, why
                self._answered_within_s[cell] = self.question.timeout_s
                self._ended_since.discard(cell)

    def _start(self, line: StartedLine) -> None:
        trial = RecordedTrial(spec=line.spec, attempt=line.attempt, repeat=line.repeat)
        self._keys[line.spec_key] = line.spec.key
        key = (line.spec.key, line.attempt, line.repeat)
        for trials in (self._trials, self._trials_of.setdefault(trial.cell, {})):
            trials.setdefault(key, trial)

    def _finish(self, line: FinishedLine) -> None:
        key = (self._keys.get(line.spec_key, ""), line.attempt, line.repeat)
        if key not in self._trials:
            raise ValueError(f"trial {line.spec_key} ended but never started")
        before = self._trials[key]
        limit_s = self.question.timeout_s
        trial = before.replace(result=line.result, timeout_s=limit_s)
        cell = trial.cell
        for trials in (self._trials, self._trials_of[cell]):
            if before.result is not None:
                del trials[key]  # run again: it moves to the end
            trials[key] = trial
        self._ended_since.add(cell)

    def trial(self, key: LaunchKey) -> RecordedTrial | None:
        """Return the launch with this key (trial, attempt, repeat); None if it never started."""
        return self._trials.get(key)

    def has_told(self, spec: TrialSpec, repeat: int) -> bool:
        """True if some attempt at a trial showed whether memory suffices."""
        results = (trial.result for trial in self._attempts(spec, repeat))
        return any(result is not None and result.outcome.tells for result in results)

    def ran_out_after(self, trial: RecordedTrial) -> bool:
        """True if a later attempt of a trial timed out."""
        attempts = self._attempts(trial.spec, trial.repeat)
        later = (other.result for other in attempts if other.attempt > trial.attempt)
        return any(result is not None and result.outcome is Outcome.TIMEOUT for result in later)

    def _attempts(self, spec: TrialSpec, repeat: int) -> Iterator[RecordedTrial]:
        found = spec.key, repeat
        return (trial for (key, _, again), trial in self._trials.items() if (key, again) == found)

    def has_crashed(self, cell: Cell) -> bool:
        """True if a cell's trial crashed, no attempt showed if it fits, no later one timed out."""
        return any(
            trial.result is not None
            and trial.result.outcome is Outcome.CRASHED
            and not self.has_told(trial.spec, trial.repeat)
            and not self.ran_out_after(trial)
            for trial in self.trials_of(cell)
        )

    def answer(self, cell: Cell) -> CellAnswer | None:
        """Return the recorded answer for a cell; None if its trials support no answer."""
        answer, why = self._claims.get(cell, (None, lambda: None))
        return None if why() else answer

    def answered_within_s(self, cell: Cell) -> float | None:
        """Time limit in seconds of a cell's answer; None without one, or if a trial ended since."""
        return None if cell in self._ended_since else self._answered_within_s.get(cell)

    def trials_of(self, cell: Cell) -> tuple[RecordedTrial, ...]:
        """Return the recorded trials of a cell (settings on a layout of GPUs), in order of their
        start. A trial that was run again stands where its last result was recorded.
        """
        return tuple(self._trials_of.get(cell, {}).values())

    def has_begun(self, cell: Cell) -> bool:
        """True if a prediction or a trial of a cell is recorded."""
        return cell in self._expectations or bool(self.trials_of(cell))

    def parts_of_a_study(self) -> dict[str, Any]:
        """Return keyword arguments of ``Study``. In the order of the question's cells: answers that
        trials prove, their time limits, answers that trials do not prove, predicted lengths.
        """
        cells, expected, claims = self.question.cells, self._expectations, self._claims
        whys = {cell: claims[cell][1]() for cell in cells if cell in claims}
        proven = [cell for cell, why in whys.items() if why is None]
        limits = (self._answered_within_s.get(cell) for cell in proven)
        return {
            "schema_version": self.schema_version,
            "question": self.question,
            "trials": tuple(self._trials.values()),
            "answers": tuple(claims[cell][0] for cell in proven),
            "unproven": tuple(
                UnprovenAnswer(answer=claims[cell][0], why=why)
                for cell, why in whys.items()
                if why is not None
            ),
            "answers_within_s": tuple(limit_s for limit_s in limits if limit_s is not None),
            "expectations": tuple(expected[cell] for cell in cells if cell in expected),
            "environments": self.environments,
        }


def parse(full_lines: bytes, *, path: Path) -> JournalContent:
    """Parse the full lines of the journal at ``path``, header included. Raises StudyError if it is
    not a journal, is of a newer schema, or has a line that cannot be read or was changed: an
    accident cuts a journal at its end, never in the middle.
    """
    first, *rest = full_lines.removesuffix(b"\n").split(b"\n")
    record = _header(first, path)
    decoder = msgspec.json.Decoder(Line)
    for number, line in enumerate(rest, start=2):
        try:
            text = line
            if record.checksum is not None:
                text, record.checksum = unsealed(line, after=record.checksum)
            record.add(decoder.decode(text))
        # RecursionError: a line nested too deeply, which highwater never writes.
        except (ValueError, RecursionError, HighwaterError) as error:
            raise _damaged(path, number, error) from error
    return record


class _AnyHeader(msgspec.Struct, tag_field="kind", tag="header"):
    schema_version: int


def _header(line: bytes, path: Path) -> JournalContent:
    """Return the content of a journal from its header alone."""
    try:
        version = msgspec.json.decode(line, type=_AnyHeader).schema_version
    except (ValueError, RecursionError) as error:
        raise not_a_study(path) from error
    if version > STUDY_SCHEMA_VERSION:
        raise StudyError(
            f"{path} was written by a newer highwater: its schema is {version}, this one reads "
            f"{STUDY_SCHEMA_VERSION}",
            hint=f"`pip install .` in the checkout of that highwater, or use {free_study(path)}",
        )
    try:
        text, checksum = (line, None) if version < _SEALED_SINCE else unsealed(line, after="")
        return JournalContent(from_json(text, HeaderLine), checksum=checksum)
    except (ValueError, HighwaterError) as error:
        raise _damaged(path, 1, error) from error


def not_a_study(path: Path) -> StudyError:
    """Return the error for a file that highwater did not write; such a file is never touched."""
    return StudyError(f"{path} is not a study", hint=f"use {free_study(path)}")


def _damaged(path: Path, number: int, error: Exception) -> StudyError:
    hint = f"restore the file from a copy, or start afresh with {free_study(path)}"
    return StudyError(
        f"line {number} of {path} is damaged: {getattr(error, 'problem', error)}", hint=hint
    )
