"""Being told to stop: SIGTERM, from a scheduler or `docker stop`, ends a command in the same order
as Ctrl-C does.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from highwater.errors import EXIT_INTERRUPTED, EXIT_TERMINATED


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextmanager
def heeding_sigterm() -> Generator[None]:
    """Raises Terminated in the block when SIGTERM comes, unless whoever started this process
    decided otherwise.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """What a shell expects after this signal."""
    return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
