"""The reaper: a small process that starts a command, or ranks, and leaves no process behind.

It is the reaper of all its descendants: when what it started ends, when it is told to end, or when
its parent dies (even by kill -9), it kills every one of them, those in process sessions of their
own too, and waits until they are gone. Of several ranks the first that fails ends the others.

Run as ``python -P -m highwater.trials.reaper PARENT_PID [OPTION...] COMMAND...``, which
``under_reaper`` writes; PARENT_PID 0: whoever started it may go. Exits with the command's status,
of several ranks with that of the first that failed (128 + n for signal n). Options:

    --remove DIRECTORY    made for the command alone: removed once nobody is left who writes to it
    --inherit DIRECTORY   the parent's to remove: removed where the parent is dead by then
    --data-bytes N        what it starts has at most so large a data segment (RLIMIT_DATA), each
    --grace-s N           told to end by SIGTERM, it tells what it started, and kills it N seconds
                          later, or when it is told once more; at once by SIGUSR1, or where the
                          parent died
    --launcher-s N        what it starts has processes elsewhere: told to end, it is passed on once
                          a second, for at most N seconds, before everything here is killed
    --ranks SHARE         the command is run by ranks (JSON, ``RankShare`` of ranks.py)
    --output plain        ranks read and write what the reaper does, and nothing of it is kept

Linux only: it stands on two prctl options, source: prctl(2).
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from highwater.nouns.codec import from_json, to_json
from highwater.trials.ranks import Ranks, RankShare, started

EXIT_ENDED = 128 + signal.SIGTERM
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
END_AT_ONCE = signal.SIGUSR1
"""Signal that ends the reaper at once, whatever its grace, and even before it has begun. SIGINT
would not do: a shell has its background processes ignore it."""
_AWAITED = {signal.SIGTERM, signal.SIGINT, END_AT_ONCE, signal.SIGCHLD}
"""Signals that are waited for and never handled, so that none interrupts other code."""
_LAST_WORDS_S = 0.5
"""Seconds that the other ranks have, after one has failed, to report a failure of their own. Then
they are killed: a rank that waits for its peer in a collective waits for ever."""

Ends = list[tuple[int, int]]
"""Process ids and statuses of ended processes, the earliest first; -n for signal n."""


def module(name: str, *words: str) -> list[str]:
    """Command to run a module; ``-P`` keeps the working directory out of ``sys.path``."""
    return [sys.executable, "-P", "-m", name, *words]


def under_reaper(
    command: Sequence[str],
    *,
    remove: Sequence[str | Path] = (),
    inherit: Sequence[str | Path] = (),
    ranks: RankShare | None = None,
    data_bytes: int | None = None,
    grace_s: float | None = None,
    launcher_s: float | None = None,
    parent: int | None = None,
) -> list[str]:
    """Command of a reaper that runs ``command`` and dies with ``parent``, or this process."""
    options: dict[str, Sequence[object]] = {
        "--remove": remove,
        "--inherit": inherit,
        "--data-bytes": [data_bytes],
        "--grace-s": [grace_s],
        "--launcher-s": [launcher_s],
        "--ranks": [None if ranks is None else to_json(ranks)],
    }
    words = [
        word
        for option, values in options.items()
        for value in values
        if value is not None
        for word in (option, str(value))
    ]
    return module("highwater.trials.reaper", str(parent or os.getpid()), *words, *command)


def main() -> NoReturn:
    """Run the command line's command under this reaper, and exit with its status."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    given: defaultdict[str, list[str]] = defaultdict(list)
    while command[0].startswith("--"):
        option, value, *command = command
        given[option].append(value)
    ranks = from_json(given["--ranks"][0], RankShare) if "--ranks" in given else None
    data_bytes, grace_s, launcher_s = (
        float(given[option][0]) if option in given else None
        for option in ("--data-bytes", "--grace-s", "--launcher-s")
    )
    is_plain = given["--output"] == ["plain"]
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if parent:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    awaits = partial(_wait_for, parent=parent, grace_s=grace_s)
    ends = None
    if parent in (0, os.getppid()):
        ends = _run(command, ranks, data_bytes, awaits, launcher_s=launcher_s, is_plain=is_plain)
    _kill_descendants()
    inherited = [] if os.getppid() == parent else given["--inherit"]
    for directory in given["--remove"] + inherited:
        shutil.rmtree(directory, ignore_errors=True)
    # The status of the first process that failed; 0 if none did.
    failed = next((status for _, status in ends or () if status), 0)
    os._exit(EXIT_ENDED if ends is None else status_of(failed))


def _run(
    command: Sequence[str],
    ranks: RankShare | None,
    data_bytes: float | None,
    awaits: Callable[[Collection[int]], Ends | None],
    *,
    launcher_s: float | None,
    is_plain: bool,
) -> Ends | None:
    """Run the command or its ranks until ``awaits`` returns; None if told to end."""
    reaper = os.getpid()

    def prepare() -> None:
        """Arrange that the new process is killed if the reaper is killed."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(EXIT_ENDED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        if data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(data_bytes), int(data_bytes)))

    if ranks is None:
        # The name keeps the process object alive: without it the child might be reaped elsewhere.
        child = started(command, prepare=prepare)
        ends = awaits({child.pid})
        if ends is None and launcher_s is not None:
            _end_elsewhere(child, launcher_s)
        return ends
    running = Ranks(command, share=ranks, prepare=prepare, is_plain=is_plain)
    ends = awaits(running.pids)
    if ends is not None:
        _kill_descendants()
        running.leave_exits(ends)
    return ends


def _wait_for(pids: Collection[int], *, parent: int, grace_s: float | None) -> Ends | None:
    """Reap until all ``pids`` ended, or a while after one failed; None if told to end at once."""
    ends: Ends = []
    deadline_s: float | None = None
    is_told = has_failed = False
    while len(ends) < len(pids):
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if left_s is None:
            heard = signal.sigwaitinfo(_AWAITED)
        else:
            heard = signal.sigtimedwait(_AWAITED, left_s)
        if heard is None:
            return ends if has_failed else None
        if heard.si_signo != signal.SIGCHLD:
            is_at_once = heard.si_signo == END_AT_ONCE or parent not in (0, os.getppid())
            if grace_s is None or is_told or is_at_once:
                return None
            is_told, deadline_s = True, time.monotonic() + grace_s
            for running in set(pids) - {pid for pid, _ in ends}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running, signal.SIGTERM)
            continue
        ends += [(pid, status) for pid, status in _reap() if pid in pids]
        if not has_failed and any(status for _, status in ends):
            has_failed, last_words_s = True, time.monotonic() + _LAST_WORDS_S
            deadline_s = last_words_s if deadline_s is None else min(deadline_s, last_words_s)
    return ends


def _end_elsewhere(launcher: "subprocess.Popen[bytes]", within_s: float) -> None:
    """Send a launcher SIGTERM every second until it ends: a single one would let ranks save."""
    deadline_s = time.monotonic() + within_s
    while launcher.poll() is None and time.monotonic() < deadline_s:
        launcher.terminate()
        signal.sigtimedwait({signal.SIGCHLD}, 1.0)


def _reap() -> Ends:
    """Reap every child that has ended by now, adopted orphans included."""
    ended: Ends = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def status_of(status: int) -> int:
    """Status as a shell reports it: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def _kill_descendants() -> None:
    """Kill and reap descendants until none is left: a process being killed may start another."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    main()
