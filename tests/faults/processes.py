"""Finding the processes of one test: each test marks its environment, and whatever it starts inherits the mark."""

import os
import time
from collections.abc import Callable
from pathlib import Path

MARK = "HIGHWATER_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Process ids of everything alive that was started under the mark, whoever its parent and its session are now."""
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


def wait_until(holds: Callable[[], object], *, within_s: float) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
