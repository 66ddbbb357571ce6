"""Blocks: how much the PyTorch paths, which compute in float32, take at a time."""

from highwater.units import MIB

BLOCK_BYTES = MIB
"""Bytes of one float32 block of rows; a few blocks are alive at a time."""
