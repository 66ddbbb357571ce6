"""Attention outputs kept for a layer's recomputation, so that attention is not computed again.

Each attention with an autograd function of its own asks here before it computes. So the operators
of ``torch.utils.checkpoint`` need not list the fused kernels inside these functions.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor

Attended = tuple[Tensor, ...]
"""Attention output, and the log-sum-exps of the queries."""
Kept = Callable[[Callable[[], Attended]], Attended]
"""Function that takes an attention call and returns its result, computed now or kept before."""
_KEPT: ContextVar[Kept | None] = ContextVar("kept in recompute", default=None)
_IS_KEEPING: ContextVar[bool] = ContextVar("attended by a function of ours", default=False)


def attended(attend: Callable[[], Attended]) -> Attended:
    """Return the result of ``attend``; in a recomputation the one kept from the forward pass."""
    kept = _KEPT.get()
    if kept is None:
        return attend()
    token = _IS_KEEPING.set(True)
    try:
        return kept(attend)
    finally:
        _IS_KEEPING.reset(token)


def is_keeping() -> bool:
    """True inside an attention that is kept as a whole, so that none of its operators need be."""
    return _IS_KEEPING.get()


def kept_in_recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts for ``torch.utils.checkpoint``, for a layer's forward pass and
    recomputation: attention outputs are kept in the first and given back in the second.
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
