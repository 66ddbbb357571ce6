"""Studies that tests of reports share: real ones, and ones with what a test asks for."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from highwater.nouns.study import STUDY_SCHEMA_VERSION, RecordedTrial, Study
from highwater.nouns.trial import Failure, LogEnd, Outcome, TrialResult
from highwater.pages.study_report import StudyReport, assembled
from highwater.store.journal import read_study
from places import FOUND, question_of
from trial_specs import rank_that_used

REAL = sorted(FOUND.glob("*.jsonl"))
HOSTILE = (
    '"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 '
    "}}'|\x1b[31m`c`**b**[l](javascript:alert(3))\n# h\u202e"
)
"""Text that means something to a browser, to a template, to Markdown and to a terminal."""
QUESTION = msgspec.structs.replace(
    question_of(loss="chunked", allocator="expandable", start_length=4096, resolution=4096),
    simulated=False,
)
CELL = QUESTION.cells[0]


def real_report(name: str) -> StudyReport:
    return report_of(read_study(FOUND / f"{name}.jsonl"))


def report_of(study: Study, logs: LogEnd | None = None) -> StudyReport:
    """The report of a study; every log ends with ``logs``."""
    return assembled(study, lambda *_: logs or LogEnd(reason="no logs"))


def trial(
    length_tokens: int,
    outcome: Outcome | None,
    *,
    used_bytes: int | None = None,
    text: str = "it ended",
) -> RecordedTrial:
    """A trial of the only cell; None has not ended."""
    if outcome is None:
        return RecordedTrial(spec=QUESTION.trial(CELL, length_tokens))
    failure = None if outcome.is_fit else Failure(kind="error", phase="forward", text=text)
    ranks = (rank_that_used(used_bytes, failure=failure),)
    return RecordedTrial(
        spec=QUESTION.trial(CELL, length_tokens, memory_only=outcome is Outcome.MEMORY_ONLY_FIT),
        result=TrialResult(outcome=outcome, reason=text, ranks=ranks),
    )


def study_of(*trials: RecordedTrial, **changes: object) -> Study:
    return msgspec.structs.replace(
        Study(path="study.jsonl", question=QUESTION, trials=trials), **changes
    )


def hostile_study() -> Study:
    """A real study, every text of which somebody else has written."""
    texts = (
        *("name", "model_name", "directory", "model_directory", "device_name", "reason", "text"),
        *("phase", "log_path", "path", "hint", "command", "versions", "notes", "torch"),
    )

    def change(value: object, key: str) -> object:
        if isinstance(value, Mapping):
            return {name: change(inner, name) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [change(inner, key) for inner in value]
        return HOSTILE if isinstance(value, str) and key in texts else value

    fields = change(msgspec.to_builtins(read_study(FOUND / "qwen3-0.6b-79gib-full.jsonl")), "")
    assert isinstance(fields, dict)
    fields["notes"] = [HOSTILE]
    fields["answers"][0]["contradictions"] = [HOSTILE]
    return msgspec.convert(fields, Study)


def without_checksums(lines: str, *, schema_version: int = 2) -> str:
    """The lines of a journal as they were written before they had any."""
    kept = re.sub(r'(?m)^\{"checksum":"[0-9a-f]{16}",', "{", lines)
    name = '"schema_version":'
    return kept.replace(f"{name}{STUDY_SCHEMA_VERSION}", f"{name}{schema_version}", 1)


def fifo(path: Path) -> Path:
    """A pipe that nobody writes: whoever reads it waits."""
    os.mkfifo(path)
    return path
