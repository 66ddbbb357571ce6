"""A trial's processes under a reaper, from the side of whoever started it: awaited, and ended,
and how they ended in words.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event

from highwater.errors import MachineError
from highwater.nouns.protocols import TOLD_S, TrialEndedError
from highwater.trials.probe import INSTALL_HINT
from highwater.trials.reaper import END_AT_ONCE

_END_S = 30.0
_LAST_LINES = 3
SIGNALLED = 128
"""Exit statuses above it are signals, as shells and a reaper tell them."""


def exit_code_of(
    process: subprocess.Popen[bytes], *, timeout_s: float, ended: Event, tell: Callable[[], None]
) -> int | None:
    """Wait for the end of what runs under a reaper, and ``tell`` meanwhile twice a second; its exit
    status, None when time was up.

    Nothing of it runs any more when this returns or raises; it raises TrialEndedError when
    ``ended`` is set.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(TOLD_S, left_s))
            if ended.is_set():
                raise TrialEndedError
            tell()
        return None
    finally:
        end_reaper(process)


def end_reaper(process: subprocess.Popen[bytes]) -> None:
    """End the reaper, which ends everything under it, at once.

    A second Ctrl-C meanwhile is heard when that is done, and orphans nothing.
    """
    process.send_signal(END_AT_ONCE)
    deadline = time.monotonic() + _END_S
    interrupt: KeyboardInterrupt | None = None
    while process.poll() is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def failed(what: str, log: Path, status: int | None) -> MachineError:
    """The error of a process that left no answer; ``what`` could not be done, in words."""
    is_exit = status is not None and status <= SIGNALLED
    return MachineError(
        f"{what}: {last_words(log, status)}",
        hint=INSTALL_HINT if is_exit else "see whether memory is left, `free -h`, and try again",
    )


def last_words(log: Path, status: int | None) -> str:
    """How a process ended, and its last three lines in a log, in one; ``status``: None where time
    was up.
    """
    how = "time was up" if status is None else how_ended(status)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{how}: {' / '.join(lines[-_LAST_LINES:])}" if lines else f"{how}, without a word"


def how_ended(status: int) -> str:
    """``exited with 3``, or ``ended by signal 9 (SIGKILL)``, also of what a reaper ran."""
    number = -status if status < 0 else status - SIGNALLED
    try:
        return f"ended by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"ended by signal {number}" if status < 0 else f"exited with {status}"
