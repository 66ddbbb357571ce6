"""Starting and finding the processes of one test: each test marks its environment."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "HIGHWATER_TEST_MARK"
GONE_S = 60
"""Time in which nothing may be left of what was killed, on a machine that is busy."""
HANGS_S = 240
"""Bound on the time until the second trial hangs: two trials, on a machine that is busy."""
ENDS_S = 240
"""Bound on the time until a command ends that has nothing to wait for."""
FIND = (
    *("highwater", "find", "tiny", "--device", "cpu", "--memory", "1GiB", "--loss", "full"),
    *("--start-length", "32", "--resolution", "32", "--study", "study.jsonl"),
)
_PENDING = ("SigPnd:", "ShdPnd:")


def marked(mark: str) -> list[int]:
    """Process ids of all that live under the mark, whoever its parent and its session are now."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if wanted in environment:
            found.append(int(entry.name))
    return found


def is_arrived(pid: int, number: signal.Signals) -> bool:
    """Whether no signal of this number is on its way to a process any more: until then a second
    one would be lost. A process that has ended of it keeps it among those on their way until
    somebody waits for it.
    """
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:  # ended meanwhile
        return True
    sets = [line.split()[1] for line in status.splitlines() if line.startswith(_PENDING)]
    ended = "\nState:\tZ" in status
    return ended or not any(int(found, 16) >> (number - 1) & 1 for found in sets)


def wait_until(holds: Callable[[], object], *, within_s: float) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def are_gone(mark: str) -> bool:
    """Whether nothing is alive any more that was started under the mark, or soon is not."""
    return wait_until(lambda: marked(mark) == [], within_s=GONE_S)


def started(*words: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def done(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=ENDS_S, check=False)


def lines(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
