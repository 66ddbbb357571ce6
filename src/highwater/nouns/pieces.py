"""Pieces: what a memory-only trial's attention runs on in place of whole documents.

Its time is then linear in the length. The kernel's buffers (output, log-sum-exp, gradients, float32
accumulators) hold so many bytes per token and head, whatever document a token is in: the same
tokens cut into a batch of pieces take the same bytes (docs/decisions/006).
"""

from collections.abc import Mapping
from typing import NamedTuple

from highwater.nouns.trial import Device


class _PieceRange(NamedTuple):
    """Lengths that a piece may have on a device."""

    shortest: int
    longest: int
    block: int
    """Rows that the kernels round up to in what they allocate."""


_RANGES: Mapping[Device, _PieceRange] = {
    # What is cut has more than 16,384 tokens: even with a single head no kernel then splits keys
    # for want of work.
    "cuda": _PieceRange(4096, 16384, 128),
    # From 768 on PyTorch's scratch does not depend on the length. Source: ATen,
    # FlashAttentionKernel.cpp.
    "cpu": _PieceRange(768, 1535, 1),
}
_MOST_PADDING = 0.005
"""Share by which rounded pieces may take larger buffers than the rounded whole."""


def pieces(tokens: int, device: Device) -> int | None:
    """Equal pieces to cut this many tokens into.

    1 where they are few enough to stay whole, None where they cannot be cut.
    """
    shortest, longest, block = _RANGES[device]
    if tokens <= longest:
        return 1
    counts = range(tokens // shortest, tokens // longest, -1)
    equal = (count for count in counts if tokens % count == 0)
    best = min(equal, key=lambda count: _padded(tokens, count, block), default=None)
    most = (1 + _MOST_PADDING) * _padded(tokens, 1, block)
    return None if best is None or _padded(tokens, best, block) > most else best


def _padded(tokens: int, count: int, block: int) -> int:
    """Rows of the rounded buffers of ``count`` pieces."""
    return count * (-(-tokens // count // block) * block)
