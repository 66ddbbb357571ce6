"""Journal: an append-only study on disk that survives ``kill -9`` at any byte.

One JSON object per line (lines.py). Each line is one write and one fsync, and has a checksum of
itself and of all lines before it. While the journal is open for writing its file is locked
(journal_file.py), so that two processes cannot write one study. A line cut short by a crash is
dropped when the journal is next opened.
"""

import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from highwater.errors import HighwaterError, StudyError
from highwater.nouns.codec import make_durable, to_builtins, to_json
from highwater.nouns.environment import Environment
from highwater.nouns.hardware import CPU_SEARCH
from highwater.nouns.secrets import HIDDEN
from highwater.nouns.study import (
    STUDY_SCHEMA_VERSION,
    Cell,
    CellAnswer,
    Expectation,
    Past,
    Question,
    RecordedTrial,
    Study,
)
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.store.directory import newest_studies
from highwater.store.journal_file import (
    JournalFile,
    LockedError,
    free_study,
    open_file,
    read_journal,
    sealed,
    split_torn,
)
from highwater.store.lines import (
    AnsweredLine,
    ExpectedLine,
    FinishedLine,
    HeaderLine,
    JournalContent,
    Line,
    OpenedLine,
    StartedLine,
    not_a_study,
    parse,
)
from highwater.units import format_tokens
from highwater.version import __version__

_DIFFERENCES_SHOWN = 4
_NO_PART_OF_A_QUESTION = ("model.directory", "timeout_s")


def another_question(path: Path, *, recorded: Question, asked: Question) -> StudyError:
    """Return the error for a journal with a different question, naming the differences."""
    there, here = dict(_flat(recorded)), dict(_flat(asked))
    differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    names = [name for name in differing if name not in _NO_PART_OF_A_QUESTION]
    # If cells differ, their names are enough.
    if "cells" in names:
        names = [name for name in names if not name.startswith("cells.")]
    first = names[:_DIFFERENCES_SHOWN]
    shown = "; ".join(
        f"{name} is {there.get(name)} there and {here.get(name)} here" for name in first
    )
    more = f"; and {len(names) - len(first)} more" if len(names) > len(first) else ""
    hint = f"use {free_study(path)}, or leave `--study` out: each question gets a file of its own"
    return StudyError(f"{path} asks another question: {shown}{more}", hint=hint)


def _flat(question: Question) -> Iterator[tuple[str, Any]]:
    """Yield every field of a question with its dotted name; cells by label, after their list."""
    fields = to_builtins(question)
    fields["cells"] = {cell.label_on(question.device): to_builtins(cell) for cell in question.cells}
    yield "cells", "; ".join(fields["cells"])
    yield from _leaves(fields, "")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


class Journal:
    """One study, open for writing and locked until ``close``. Made by ``open_journal``."""

    def __init__(
        self, file: JournalFile, record: JournalContent, notes: tuple[str, ...], retry_crashed: bool
    ) -> None:
        self.path = file.path
        self.notes = notes
        self._file = file
        self._record = record
        self._retry_crashed = retry_crashed
        """True if trials that only crashed are to be launched again."""
        answers = ((cell, record.answer(cell)) for cell in record.question.cells)
        self._decided = {cell for cell, answer in answers if answer and not answer.is_undecided}
        """Cells that had a decided answer when the journal was opened."""

    def recorded(self, spec: TrialSpec, *, attempt: int, repeat: int) -> TrialResult | None:
        """Return the recorded result of a launch; None if the launch is to be run."""
        trial = self._record.trial((spec.key, attempt, repeat))
        return trial.result if trial is not None and self._stands(trial) else None

    def past(self, cell: Cell) -> Past:
        """Return a cell's recorded answer and trials, as far as a search need not repeat them."""
        trials = tuple(trial for trial in self._record.trials_of(cell) if self._stands(trial))
        answer = self._record.answer(cell) if self._is_settled(cell) else None
        return Past(answer=answer, trials=trials)

    def _stands(self, trial: RecordedTrial) -> bool:
        """True if a trial's result is final. A result that does not say whether memory suffices,
        from a shorter time limit than now, is run again unless another attempt says it. A crash was
        retried often enough, and is run again only on request. A timeout counts if the question has
        a time limit, or if its cell was decided (docs/decisions/026).
        """
        if trial.result is None:
            return False
        if trial.result.outcome.tells or self._record.has_told(trial.spec, trial.repeat):
            return True
        now_s = self._record.question.timeout_s
        if now_s is not None and trial.timeout_s is not None and trial.timeout_s < now_s:
            return False
        is_late = trial.result.outcome is Outcome.TIMEOUT
        if now_s is not None and (is_late or self._record.ran_out_after(trial)):
            return True
        if trial.result.outcome is Outcome.CRASHED:
            return not self._retry_crashed
        return trial.cell in self._decided

    def has_given_up(self, cell: Cell) -> bool:
        """True if a cell was answered after crashes alone, which are not tried again."""
        trials = self._record.trials_of(cell)
        crashed = [t for t in trials if t.result and t.result.outcome is Outcome.CRASHED]
        is_answered = self._record.answer(cell) is not None and self._record.has_crashed(cell)
        return is_answered and all(self._stands(trial) for trial in crashed)

    def _is_settled(self, cell: Cell) -> bool:
        """True if a cell was answered under a longer time limit, or an equal one without retry."""
        answer, within_s = self._record.answer(cell), self._record.answered_within_s(cell)
        now_s = self._record.question.timeout_s
        if answer is None or within_s is None or now_s is None or answer.limit == "inconclusive":
            return False
        is_retried = self._retry_crashed and self._record.has_crashed(cell)
        return within_s > now_s or (within_s == now_s and not is_retried)

    def opened(
        self, command: Sequence[str], environment: Environment | None, timeout_s: float | None
    ) -> None:
        """Record that this process writes from now on. Raises MachineError if the disk is full."""
        line = OpenedLine(
            pid=os.getpid(),
            host=socket.gethostname(),
            at_unix_s=time.time(),
            highwater_version=__version__,
            command=tuple(command),
            environment=environment,
            timeout_s=timeout_s,
        )
        self._append(line)

    def takes_expectation(self, cell: Cell) -> bool:
        """True if a cell's prediction is to be recorded: before its search, from schema 2 on."""
        return self._record.schema_version > 1 and not self._record.has_begun(cell)

    def cell_expected(self, expectation: Expectation) -> None:
        """Record the prediction for a cell; raises MachineError if the disk is full."""
        self._append(ExpectedLine(at_unix_s=time.time(), expectation=expectation))

    def trial_started(self, spec: TrialSpec, *, attempt: int, repeat: int) -> None:
        """Record the launch of a trial before it. Raises MachineError if the disk is full."""
        self._append(StartedLine(**_launch(spec, attempt, repeat), spec=spec))

    def trial_finished(
        self, spec: TrialSpec, *, attempt: int, repeat: int, result: TrialResult
    ) -> None:
        """Record how a trial ended; raises MachineError when the disk is full."""
        self._append(FinishedLine(**_launch(spec, attempt, repeat), result=result))

    def cell_answered(self, answer: CellAnswer) -> None:
        """Record a cell's answer, unless an equal one under at least as much time is recorded."""
        now_s = self._record.question.timeout_s
        within_s = self._record.answered_within_s(answer.cell)
        has_time = now_s is None or (within_s is not None and within_s >= now_s)
        if self._record.answer(answer.cell) != answer or not has_time:
            self._append(AnsweredLine(at_unix_s=time.time(), answer=answer))

    def snapshot(self) -> Study:
        """Return the study as it is now."""
        return _study(self.path, self._record, self.notes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that any process can open the journal again."""
        self._file.close()

    def _append(self, line: Line) -> None:
        """Write one line, then add it to the record, which so is never ahead of the disk."""
        text = to_json(line)
        if self._record.checksum is None:  # the journal has an older schema, without checksums
            self._file.append(text.encode() + b"\n")
        else:
            content, checksum = sealed(text, after=self._record.checksum)
            self._file.append(content + b"\n")
            self._record.checksum = checksum
        self._record.add(line)


def _launch(spec: TrialSpec, attempt: int, repeat: int) -> dict[str, Any]:
    now_s = time.time()
    return {"spec_key": spec.key, "attempt": attempt, "repeat": repeat, "at_unix_s": now_s}


def open_journal(
    path: Path,
    question: Question,
    *,
    command: Sequence[str] = (),
    environment: Environment | None = None,
    retry_crashed: bool = False,
) -> Journal:
    """Open the study at ``path`` for writing: created, or resumed if it asks the same question.

    The time limit is not part of the question. With ``retry_crashed`` a trial that only crashed is
    launched again, as often as a new one. Raises StudyError if another process is writing the file,
    or if it has another question, is damaged, or is not a study; later also if anyone touches the
    open file. Raises MachineError when the disk is full.
    """
    try:
        file = open_file(path, is_private=_has_secrets(question))
    except LockedError as error:
        raise StudyError(
            f"{path} is being written by {_holder(path)}",
            hint=f"wait until it ends, watch it with `highwater show {shlex.quote(str(path))}`, "
            f"or use {free_study(path)}",
        ) from error
    try:
        record, notes = _recover(file, question)
        journal = Journal(file, record, notes, retry_crashed)
        journal.opened(command, environment, question.timeout_s)
        if any(map(journal.has_given_up, question.cells)):
            retry = "add `--retry-crashed` once its cause is mended"
            journal.notes += (f"what only crashed is not launched again: {retry}",)
    except BaseException:
        file.close()
        raise
    return journal


def read_study(path: Path) -> Study:
    """Read the study at ``path``, without a lock; StudyError if it is missing or damaged."""
    try:
        content = read_journal(path)
    except OSError as error:
        raise StudyError(f"{path} cannot be read: {error.strerror}", hint=_another()) from error
    full, torn = split_torn(content)
    try:
        if not full:
            raise not_a_study(path)
        record = parse(full, path=path)
    except StudyError as error:  # the original hint is for writing a study, not for reading one
        raise StudyError(error.problem, hint=_another()) from error
    note = "the last line is not complete: a search is writing it, or was killed while it did"
    return _study(path, record, (note,) if torn else ())


def _another() -> str:
    """Hint: ``highwater show`` if that finds a study, else a command that makes one."""
    with suppress(StudyError, OSError):
        newest_studies(Path("./logs"))  # in which `highwater show` looks by default
        return "`highwater show` shows the newest study that can be read"
    return f"name another file; `{CPU_SEARCH}` makes one"


def _holder(path: Path) -> str:
    """Name the process that last opened the journal; the lock alone does not tell."""
    try:
        opened = parse(split_torn(read_journal(path))[0], path=path).opened
    except (OSError, HighwaterError):
        opened = None
    if opened is None:
        return "another process"
    is_here = opened.host == socket.gethostname()
    return f"process {opened.pid}" if is_here else f"process {opened.pid} on {opened.host}"


def _recover(file: JournalFile, question: Question) -> tuple[JournalContent, tuple[str, ...]]:
    """Read the locked journal, cut off a torn last line, and give an empty file its header."""
    path = file.path
    full, torn = split_torn(file.content())
    if not full:
        header = HeaderLine(schema_version=STUDY_SCHEMA_VERSION, question=question)
        text, checksum = sealed(to_json(header), after="")
        # A crash may leave the beginning of our header; other content is somebody else's file.
        if not text.startswith(torn):
            raise not_a_study(path)
        file.cut(0)
        file.append(text + b"\n")
        make_durable(file.path.parent)
        return JournalContent(header, checksum=checksum), ()
    record = parse(full, path=path)
    if record.question.key != question.key:
        raise another_question(path, recorded=record.question, asked=question)
    if not torn:
        return record, ()
    file.cut(len(full))
    dropped = f"the last line of {path} was cut short, {len(torn)} bytes: dropped"
    return record, (f"{dropped}; what it recorded is tried again",)


def _study(path: Path, record: JournalContent, notes: tuple[str, ...]) -> Study:
    typed = record.opened.command if record.opened else ()
    is_ours = typed[:1] == ("search_context_length_capacity",) or typed[:2] == ("highwater", "find")
    if typed and not is_ours:  # a forged file could make its reader type any command
        notes += ("the command that it names is none of highwater's, and is left out",)
    if _has_secrets(record.question):
        notes += (f"secrets in the command are not kept: type them in the place of {HIDDEN}",)
    parts = record.parts_of_a_study()
    for each in parts["unproven"]:
        tokens = each.answer.reach_tokens
        said = "no length is told" if tokens is None else f"{format_tokens(tokens)} tokens"
        label = each.answer.cell.label_on(record.question.device)
        notes += (f"unproven: {label}: the study answers {said}; {each.why}",)
    return Study(path=str(path), notes=notes, command=typed if is_ours else (), **parts)


def _has_secrets(question: Question) -> bool:
    return question.foreign is not None and question.foreign.secrets_digest is not None
