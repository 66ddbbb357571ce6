"""Working sizes: how much of a step is alive at a time where it is done piece by piece, and in what
numbers. What is trained is cut by them; what is predicted counts them.
"""

from collections.abc import Mapping

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
