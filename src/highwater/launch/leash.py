"""The leash: a small process between `find` and torchrun that leaves nothing behind, however either of them ends.

torchrun starts its workers in process sessions of their own, so that ending its process group does not end them. The leash is
the reaper of all its descendants: when the command ends, when it is told to end, or when its parent dies (even by kill -9), it
kills every one of them and waits until they are gone.

Run as ``python -m highwater.launch.leash PARENT_PID [--remove DIRECTORY] COMMAND...``; exits with the command's status (128 + n
for signal n). The directory, made for the command alone, is removed once nobody is left who writes to it.
Linux only: it stands on two prctl options, source: prctl(2).
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from typing import NoReturn

import psutil

EXIT_ENDED = 128 + signal.SIGTERM
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_AWAITED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
"""Signals that are waited for and never handled: none can come between two lines and leave somebody behind."""


def main() -> NoReturn:
    """Run the command on the leash and exit with its status."""
    parent, command, own_directory = int(sys.argv[1]), sys.argv[2:], None
    if command[0] == "--remove":
        _, own_directory, *command = command
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    status = EXIT_ENDED
    if os.getppid() == parent:
        child = subprocess.Popen(command, preexec_fn=_prepare_child)
        status = _wait_for(child.pid)
    _kill_descendants()
    if own_directory is not None:
        shutil.rmtree(own_directory, ignore_errors=True)
    os._exit(status)


def _wait_for(pid: int) -> int:
    """Reap whatever ends until ``pid`` does; its status as a shell gives it, or EXIT_ENDED when the leash is told to end."""
    while signal.sigwait(_AWAITED) == signal.SIGCHLD:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return EXIT_ENDED


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


def _prepare_child() -> None:
    """Should the leash itself be killed, torchrun goes with it, and the workers with torchrun."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    main()
