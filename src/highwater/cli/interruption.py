"""Being told to stop: SIGTERM, from a scheduler or `docker stop`, ends a command in the same order
as Ctrl-C does, and a training SIGHUP, too, where its terminal closes.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from highwater.errors import EXIT_INTERRUPTED, EXIT_TERMINATED


class Terminated(KeyboardInterrupt):
    """SIGTERM has come, or another signal that is heeded."""


@contextmanager
def heeding(number: signal.Signals) -> Generator[None]:
    """Raises Terminated in the block when the signal comes, unless whoever started this process
    decided otherwise.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, _terminate)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """What a shell expects after this signal."""
    return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
