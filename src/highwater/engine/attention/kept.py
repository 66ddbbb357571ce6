"""What was attended, kept for a layer's recomputation, where it is not computed once more.

Attention that is a function of its own for autograd asks here before it computes anything. Fused
kernels that it ends in are then no concern of ``torch.utils.checkpoint``'s own list of operators.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor

Attended = tuple[Tensor, ...]
"""What is attended, and the logarithms of the queries' sums of exponentials."""
Kept = Callable[[Callable[[], Attended]], Attended]
"""Function that is given how to attend, and gives what was attended."""
_KEPT: ContextVar[Kept | None] = ContextVar("kept in recompute", default=None)
_IS_KEEPING: ContextVar[bool] = ContextVar("attended by a function of ours", default=False)


def attended(attend: Callable[[], Attended]) -> Attended:
    """What ``attend`` gives; in a recomputation what it gave before, if that is kept."""
    kept = _KEPT.get()
    if kept is None:
        return attend()
    token = _IS_KEEPING.set(True)
    try:
        return kept(attend)
    finally:
        _IS_KEEPING.reset(token)


def is_keeping() -> bool:
    """Whether what runs here is kept as a whole: no operator of it has to be kept by itself."""
    return _IS_KEEPING.get()


def kept_in_recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Two contexts for a layer's forward pass and its recomputation: what was attended in the first
    is what is given in the second. For ``torch.utils.checkpoint``.
    """
    kept: list[Attended] = []

    def keep(attend: Callable[[], Attended]) -> Attended:
        kept.append(attend())
        return kept[-1]

    def give(_: Callable[[], Attended]) -> Attended:
        return kept.pop(0)

    return _with(keep), _with(give)


@contextmanager
def _with(kept: Kept) -> Generator[None]:
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
