"""A trial's processes under a reaper, from the side of whoever started it: awaited, and ended."""

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from highwater.run.reaper import END_AT_ONCE
from highwater.spec.protocols import TOLD_S, TrialEndedError

_END_S = 30.0


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
