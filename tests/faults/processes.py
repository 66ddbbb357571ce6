"""Finding the processes of one test: each test marks its environment, and whatever it starts
inherits the mark.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

MARK = "HIGHWATER_TEST_MARK"
_PENDING = ("SigPnd:", "ShdPnd:")


def marked(mark: str) -> list[int]:
    """Process ids of everything alive that was started under the mark, whoever its parent and its
    session are now.
    """
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
