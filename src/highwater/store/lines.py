"""Lines of a journal: one JSON object each, the header first.

Schema 3:  header           the question, once
           opened           a process opened the journal for writing, with its time limit
           cell_expected    prediction for one cell, before its first trial; not in schema 1
           trial_started    a trial with its whole specification
           trial_finished   its result, named by the specification's key
           cell_answered    the answer for one cell; the last one for a cell counts

Since schema 3 each line begins with its ``checksum``, of itself and of all lines before it: a line
that was edited, moved or removed in the middle is found and named. A journal begun in an older
schema continues without checksums.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec

from highwater.errors import HighwaterError, StudyError
from highwater.nouns.codec import Record, from_json
from highwater.nouns.environment import Environment
from highwater.nouns.secrets import hidden_words
from highwater.nouns.study import (
    STUDY_SCHEMA_VERSION,
    Cell,
    CellAnswer,
    Expectation,
    Question,
    RecordedTrial,
    UnprovenAnswer,
)
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.store.journal_file import free_study
from highwater.store.trial_evidence import unsupported

_SEALED_SINCE = 3
"""First schema whose lines have checksums."""
_CHECKSUM_DIGITS = 16
_SEAL = b'{"checksum":"%b",'


class HeaderLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="header"):
    """First line of every journal."""

    schema_version: int
    question: Question


class OpenedLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="opened"):
    """The process that writes from here on; another one that finds the journal locked names it."""

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
    """The search of one cell is about to begin."""

    at_unix_s: float
    expectation: Expectation


class StartedLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="trial_started"):
    """A trial is about to be launched."""

    spec_key: str
    attempt: int
    repeat: int
    at_unix_s: float
    spec: TrialSpec


class FinishedLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="trial_finished"):
    """A launched trial has ended."""

    spec_key: str
    attempt: int
    repeat: int
    at_unix_s: float
    result: TrialResult


class AnsweredLine(Record, frozen=True, kw_only=True, tag_field="kind", tag="cell_answered"):
    """The search of one cell has ended."""

    at_unix_s: float
    answer: CellAnswer


Line = OpenedLine | ExpectedLine | StartedLine | FinishedLine | AnsweredLine
LaunchKey = tuple[str, int, int]
"""Name of one launch of one trial: specification's key, attempt and repeat."""


class JournalContent:
    """Content of a journal's lines so far."""

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
        """Add one line. A trial that started again after an interruption keeps its place. Raises
        ValueError for the end of a trial that never started.
        """
        match line:
            case OpenedLine():
                self.opened = line
                if line.environment is not None and line.environment not in self.environments[-1:]:
                    self.environments += (line.environment,)
                if line.timeout_s is not None:
                    self.question = msgspec.structs.replace(self.question, timeout_s=line.timeout_s)
            case ExpectedLine():
                self._expectations.setdefault(line.expectation.cell, line.expectation)
            case StartedLine():
                self._start(line)
            case FinishedLine():
                self._finish(line)
            case AnsweredLine():
                cell = line.answer.cell
                self._claims[cell] = line.answer, self._why_unproven(line.answer)
                self._answered_within_s[cell] = self.question.timeout_s
                self._ended_since.discard(cell)

    def _start(self, line: StartedLine) -> None:
        trial = RecordedTrial(spec=line.spec, attempt=line.attempt, repeat=line.repeat)
        self._keys[line.spec_key] = line.spec.key
        key = (line.spec.key, line.attempt, line.repeat)
        for trials in (self._trials, self._trials_of.setdefault(_cell_of(trial), {})):
            trials.setdefault(key, trial)

    def _finish(self, line: FinishedLine) -> None:
        key = (self._keys.get(line.spec_key, ""), line.attempt, line.repeat)
        if key not in self._trials:
            raise ValueError(f"trial {line.spec_key} ended but never started")
        before = self._trials[key]
        limit_s = self.question.timeout_s
        trial = msgspec.structs.replace(before, result=line.result, timeout_s=limit_s)
        cell = _cell_of(trial)
        for trials in (self._trials, self._trials_of[cell]):
            if before.result is not None:
                del trials[key]  # run again: it moves to the end
            trials[key] = trial
        self._ended_since.add(cell)

    def trial(self, key: LaunchKey) -> RecordedTrial | None:
        """Return a launch of a trial; None if it never started."""
        return self._trials.get(key)

    def has_told(self, spec: TrialSpec, repeat: int) -> bool:
        """True if any attempt of a trial told whether memory suffices."""
        results = (trial.result for trial in self._attempts(spec, repeat))
        return any(result is not None and result.outcome.tells for result in results)

    def ran_out_after(self, trial: RecordedTrial) -> bool:
        """True if a later attempt of a trial ran out of time."""
        attempts = self._attempts(trial.spec, trial.repeat)
        later = (other.result for other in attempts if other.attempt > trial.attempt)
        return any(result is not None and result.outcome is Outcome.TIMEOUT for result in later)

    def _attempts(self, spec: TrialSpec, repeat: int) -> Iterator[RecordedTrial]:
        found = spec.key, repeat
        return (trial for (key, _, again), trial in self._trials.items() if (key, again) == found)

    def has_crashed(self, cell: Cell) -> bool:
        """True if a trial of a cell crashed, and no attempt of it told or timed out later."""
        return any(
            trial.result is not None
            and trial.result.outcome is Outcome.CRASHED
            and not self.has_told(trial.spec, trial.repeat)
            and not self.ran_out_after(trial)
            for trial in self.trials_of(cell)
        )

    def answer(self, cell: Cell) -> CellAnswer | None:
        """Return the recorded answer for a cell; None if there is none that its trials support."""
        answer, why = self._claims.get(cell, (None, lambda: None))
        return None if why() else answer

    def _why_unproven(self, answer: CellAnswer) -> Callable[[], str | None]:
        """Return what says, once asked, why the trials until now do not support an answer, or None
        if they do. A trial that is run again later may differ then.
        """
        trials = self.trials_of(answer.cell)
        return cache(lambda: unsupported(self.question, answer, trials))

    def answered_within_s(self, cell: Cell) -> float | None:
        """Time limit of a cell's answer; None without an answer, or if a trial ended since."""
        return None if cell in self._ended_since else self._answered_within_s.get(cell)

    def trials_of(self, cell: Cell) -> tuple[RecordedTrial, ...]:
        """Return the launches of a cell, in their order."""
        return tuple(self._trials_of.get(cell, {}).values())

    def has_begun(self, cell: Cell) -> bool:
        """True if anything is recorded of a cell's search."""
        return cell in self._expectations or bool(self.trials_of(cell))

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Recorded expectations, in the order of the question's cells."""
        expected = self._expectations
        return tuple(expected[cell] for cell in self.question.cells if cell in expected)

    @property
    def trials(self) -> tuple[RecordedTrial, ...]:
        """All launches, in the order of their starts; one that was run again by its end."""
        return tuple(self._trials.values())

    @property
    def answers(self) -> tuple[CellAnswer, ...]:
        """Answers that trials support, in the order of the question's cells."""
        found = map(self.answer, self.question.cells)
        return tuple(answer for answer in found if answer is not None)

    @property
    def unproven(self) -> tuple[UnprovenAnswer, ...]:
        """Answers that trials do not support, in the order of the question's cells."""
        claims = [self._claims[cell] for cell in self.question.cells if cell in self._claims]
        whys = ((answer, why()) for answer, why in claims)
        return tuple(UnprovenAnswer(answer=each, why=why) for each, why in whys if why is not None)

    @property
    def answers_within_s(self) -> tuple[float, ...]:
        """Time limit of each of ``answers``; empty if the question has none."""
        limits = (self._answered_within_s.get(answer.cell) for answer in self.answers)
        return tuple(limit_s for limit_s in limits if limit_s is not None)


def _cell_of(trial: RecordedTrial) -> Cell:
    return Cell(layout=trial.spec.layout, settings=trial.spec.settings)


def sealed(text: str, *, after: str) -> tuple[bytes, str]:
    """Return a line with a checksum in front, of itself and all before (``after``), and that."""
    content = text.encode()
    checksum = hashlib.sha256(after.encode() + content).hexdigest()[:_CHECKSUM_DIGITS]
    return _SEAL % checksum.encode() + content[1:], checksum


def _unsealed(line: bytes, *, after: str) -> tuple[bytes, str]:
    """Return the line without its checksum, and the checksum; ValueError if they do not match."""
    text = b"{" + line[len(_SEAL % (b"0" * _CHECKSUM_DIGITS)) :]
    as_written, checksum = sealed(text.decode(), after=after)
    if line != as_written:
        raise ValueError("it is not as it was written, or a line before it is missing")
    return text, checksum


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
                text, record.checksum = _unsealed(line, after=record.checksum)
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
        text, checksum = (line, None) if version < _SEALED_SINCE else _unsealed(line, after="")
        return JournalContent(from_json(text, HeaderLine), checksum=checksum)
    except (ValueError, HighwaterError) as error:
        raise _damaged(path, 1, error) from error


def not_a_study(path: Path) -> StudyError:
    """Return the error for a file that highwater did not write; such a file is never touched."""
    return StudyError(f"{path} is not a study", hint=f"use {free_study(path)}")


def _damaged(path: Path, number: int, error: Exception) -> StudyError:
    hint = f"restore the file from a copy, or start afresh with {free_study(path)}"
    return StudyError(f"line {number} of {path} is damaged: {error}", hint=hint)
