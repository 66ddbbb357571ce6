"""Window proof: whether flash attention's window on this GPU is what a window is, shown by a small
forward and backward pass beside the plain one.
"""

from functools import lru_cache

import torch
from torch import Tensor

from highwater.engine.attention.block_attention import WindowedBlock
from highwater.engine.attention.plain_block import PlainBlock

_QUERY_HEADS, _KV_HEADS, _WINDOW = 4, 2, 37
_LENGTHS = (131, 258)
"""Odd tiles of queries and keys, before the window's edge and past it."""
PROOF_TOLERANCE = 0.02
"""Norm-relative, in bfloat16 and float16: a rounding of each probability. A window that is off by a
token is off by 0.1."""


@lru_cache(maxsize=64)
def computes_windows(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention computes windows of this head size here, output and every gradient.

    Where it does not, the plain path does, on the same device.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        return all(_equals_plain(device, dtype, head_dim, length) for length in _LENGTHS)
    except RuntimeError:  # the kernel refuses: an old card, heads too large
        return False


def _equals_plain(device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def tensor(heads: int) -> Tensor:
        shape = (2, length, heads, head_dim)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        return drawn.to(device, dtype).transpose(1, 2)

    query, upstream = tensor(_QUERY_HEADS), tensor(_QUERY_HEADS)
    key, value = tensor(_KV_HEADS), tensor(_KV_HEADS)
    scaling = head_dim**-0.5
    flash = WindowedBlock(query, key, value, scaling, _WINDOW)
    plain = PlainBlock(query.float(), key.float(), value.float(), scaling, _WINDOW)
    output, log_sums = flash.forward()
    wanted_output, wanted_sums = plain.forward()
    ours = (output, log_sums, *flash.backward(upstream, output, log_sums))
    wanted = (
        wanted_output,
        wanted_sums,
        *plain.backward(upstream.float(), wanted_output, wanted_sums),
    )
    return all(
        bool((mine.float() - other).norm() <= PROOF_TOLERANCE * other.norm())
        for mine, other in zip(ours, wanted, strict=True)
    )
