"""The leash: a small process between `find` and torchrun that leaves nothing behind, however either of them ends.

torchrun starts its workers in process sessions of their own, so that ending its process group does not end them. The leash is
the reaper of all its descendants: when the command ends, when it is told to end, or when its parent dies (even by kill -9), it
kills every one of them and waits until they are gone.

Run as ``python -m highwater.launch.leash PARENT_PID COMMAND...``; exits with the command's status (128 + n for signal n).
Linux only: it stands on two prctl options, source: prctl(2).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

import psutil

EXIT_ENDED = 128 + signal.SIGTERM
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _EndedError(Exception):
    """Somebody asked the leash to end, or its parent died."""


def main() -> NoReturn:
    """Run the command on the leash and exit with its status."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    status = EXIT_ENDED
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            raise _EndedError
        # Should the leash itself be killed, torchrun goes with it, and the workers with torchrun.
        child = subprocess.Popen(command, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
        status = _wait_for(child.pid)
    except _EndedError:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _kill_descendants()
    os._exit(status)


def _wait_for(pid: int) -> int:
    """Reap whatever ends until ``pid`` does; its status as a shell gives it."""
    while True:
        reaped, status = os.waitpid(-1, 0)
        if reaped == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kill and reap until there is no descendant left: one that is killed may have started another meanwhile."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _end(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise _EndedError


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    main()
