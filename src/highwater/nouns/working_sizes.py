"""Working sizes: how much of a step is alive at a time where it is done piece by piece, and in what
numbers. What is trained is cut by them; what is predicted counts them.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from highwater.units import MIB

CHUNK_BYTES: Mapping[str, int] = {"cuda": 512 * MIB, "cpu": 32 * MIB}
"""Logits of one chunk where they are never whole, by device: enough rows for efficient matrix
products."""
TILE_BYTES: Mapping[str, int] = {"cuda": 128 * MIB, "cpu": MIB}
"""One product of a tile where an MLP goes in tiles, of which three are alive, by device: tokens
enough for efficient matrix products."""
ELEMENT_BYTES: Mapping[str, int] = {"cuda": 2, "cpu": 4}
"""One number of activations, logits, gathered weights and saved Hugging Face weights, by device:
bfloat16 on a GPU, float32 on the CPU."""
SCORES_AT_HAND = 2**23
"""Scores that plain attention computes at once, of all documents and heads; one row at the least.
"""


class Stretch(NamedTuple):
    """What plain attention takes at a time, of one document and one head."""

    rows: int
    """Queries."""
    keys: int
    """Keys that one of them reads at least."""


def stretch(length_tokens: int, window_tokens: int | None, heads: int) -> Stretch:
    """The largest stretch of documents of this length; ``heads``: those of all of them."""
    window = min(length_tokens, window_tokens or length_tokens)
    room = SCORES_AT_HAND // heads
    # r rows of a window read window + r - 1 keys: r (window + r) is to be within the room
    rows = max(1, (math.isqrt(window**2 + 4 * room) - window) // 2)
    return Stretch(min(length_tokens, rows), min(length_tokens, window + rows - 1))
