"""How processes ended, in words that are never empty."""

import signal
from pathlib import Path

import pytest

from highwater.trials.trial_process import failed, how_ended, last_words


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with 0"),
        (3, "exited with 3"),
        (137, "ended by signal 9 (SIGKILL)"),
        (-signal.SIGSEGV, "ended by signal 11 (SIGSEGV)"),
        (255, "exited with 255"),
        (-200, "ended by signal 200"),
    ],
)
def test_an_exit_status_is_told_in_words(status: int, words: str) -> None:
    assert how_ended(status) == words


@pytest.mark.parametrize("status", [0, 1, 137, None])
@pytest.mark.parametrize("text", ["", "\n \n", "a\nb\nc\nd\n"])
def test_nothing_is_told_as_a_reason_that_is_empty(
    text: str, status: int | None, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    said = last_words(log, status)
    assert said.endswith(": b / c / d" if text.strip() else ", without a word")
    assert said.partition(",")[0].strip()
    error = failed("nothing was made", log, status)
    assert error.problem == f"nothing was made: {said}"
    assert ("pip install" in error.hint) == (status in (0, 1))
