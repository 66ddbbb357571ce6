"""Block-flex attention: block-sparse attention by PyTorch's FlexAttention, from our own tables.

FlexAttention's block mask is a table with rows of one width, once for blocks of queries and once
transposed, for blocks of keys. PyTorch builds both from a table of all pairs of blocks; here they
are filled from a BlockTable. Only a compiled FlexAttention reads these tables.

A compiled kernel is used only if its results equal those of block-gather on small input.

Shapes:  N groups of heads, of all sequences  G query heads of a group  S tokens  D head size
         E pairs of blocks of a table
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from highwater.engine.attention.block_gather import (
    AttendTable,
    attend_by_gather,
    block_sparse_attention,
)
from highwater.engine.attention.block_table import BlockTable, TilePairs
from highwater.engine.attention.kernel_proof import PROVEN_BLOCKS, ProofSizes, deviations_of, flaw
from highwater.nouns.sparse_pattern import SPARSE_KERNEL_BLOCK, SparsePatternConfig

IsSeen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""True where a query sees a key of a kept block; takes indices of sequence, head, query and key."""
SparseKernel = Literal["auto", "gather", "flex"]
"""Implementation of block-sparse attention; ``auto``: FlexAttention if it passed its proof."""
_PROGRAMS = 64
"""Compiled variants (shapes and masks) allowed in one process: beyond them PyTorch raises, rather
than taking the quadratic path."""


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)
def block_mask(table: BlockTable) -> BlockMask:
    """Return FlexAttention's mask for a table; cached, because every layer calls this."""
    assert table.tables == 1, "one table for all heads"
    length = table.length_tokens
    keys = length if table.keys_below is None else min(length, table.keys_below)
    row_E, column_E = table.row_of_entry, table.columns[0].long().cpu()
    size = table.block_size
    is_full_E = (column_E < row_E) & sees_whole(table, row_E * size, column_E * size, size)
    return filled_mask(
        (row_E, column_E, is_full_E),
        (length, keys),
        size=size,
        is_seen=_is_seen(table),
        device=table.columns.device,
    )


def filled_mask(
    entries_3E: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int, int],
    *,
    size: int,
    is_seen: IsSeen,
    device: torch.device,
) -> BlockMask:
    """Build a mask from pairs of blocks, all on the host: the block of queries, the block of keys,
    and True if every query sees every key. ``lengths``: numbers of queries and of keys.
    """
    row_E, column_E, is_full_E = entries_3E
    tensors: dict[str, Tensor] = {}
    for side, line_E, entry_E, length in (
        ("kv", row_E, column_E, lengths[0]),
        ("q", column_E, row_E, lengths[1]),
    ):
        parts = [
            _padded(line_E[is_own_E], entry_E[is_own_E], -(-length // size))
            for is_own_E in (~is_full_E, is_full_E)
        ]
        # kernels of PyTorch before 2.12 read both tables with the row stride of one of them
        both = torch.cat([indices for _, indices in parts], dim=-1).to(device)
        widths = [indices.shape[-1] for _, indices in parts]
        indices_of = both.split(widths, dim=-1)
        for full, (numbers, _), indices in zip(("", "full_"), parts, indices_of, strict=True):
            tensors[f"{full}{side}_num_blocks"] = numbers.to(device)
            tensors[f"{full}{side}_indices"] = indices
    return BlockMask(lengths, BLOCK_SIZE=(size, size), mask_mod=is_seen, **cast(Any, tensors))


def sees_whole(bounds: BlockTable | TilePairs, token_E: Tensor, key_E: Tensor, size: int) -> Tensor:
    """True where each of ``size`` tokens from ``token_E`` on sees ``size`` keys from ``key_E`` on
    by the window and the range of keys; causality is not checked.
    """
    whole_E = key_E >= bounds.keys_from
    if bounds.keys_below is not None:
        whole_E &= key_E + size <= bounds.keys_below
    if bounds.window_tokens is not None:
        whole_E &= token_E + size - 1 - key_E < bounds.window_tokens
    return whole_E


def _padded(line_E: Tensor, entry_E: Tensor, lines: int) -> tuple[Tensor, Tensor]:
    """Sort entries by line and pad each line. Returns the number of entries, shape (1, 1, lines),
    and the entries, shape (1, 1, lines, width), int32. The width is a multiple of 16 bytes.
    """
    order_E = torch.argsort(line_E * (int(entry_E.max()) + 1 if len(entry_E) else 1) + entry_E)
    line_E, entry_E = line_E[order_E], entry_E[order_E]
    numbers = torch.bincount(line_E, minlength=lines)
    place_E = torch.arange(len(line_E)) - (numbers.cumsum(0) - numbers)[line_E]
    width = max(1, int(numbers.max()) if lines else 1)
    indices = torch.zeros(lines, -(-width // 4) * 4, dtype=torch.int32)
    indices[line_E, place_E] = entry_E.int()
    return numbers.int()[None, None], indices[None, None]


def _is_seen(table: BlockTable) -> IsSeen:
    """Return a table's mask function; its bounds are tensors, so that one program serves all."""
    all_tokens = table.rows * table.block_size
    window, begins, ends = (
        torch.tensor(all_tokens if bound is None else bound, device=table.columns.device)
        for bound in (table.window_tokens, table.keys_from, table.keys_below)
    )

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & (key > query - window) & (key >= begins) & (key < ends)

    return is_seen


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def attend_by_flex(
    query_NGSD: Tensor, key_NSD: Tensor, value_NSD: Tensor, table: BlockTable, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend by one table, NGSD, with each query's log-sum-exp, NGS; differentiable on a GPU."""
    asked = AuxRequest(lse=True)
    output_NGSD, auxiliary = attend_mask(
        query_NGSD, key_NSD, value_NSD, block_mask(table), scaling, return_aux=asked
    )
    return output_NGSD, auxiliary.lse


def attend_mask(
    query_NGSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    mask: BlockMask,
    scaling: float,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Run the compiled FlexAttention: output, NGSD, and auxiliary tensors with ``return_aux``. The
    CPU returns only the output, without gradient.
    """
    keys = mask.seq_lengths[1]
    from torch._dynamo import config  # this import takes seconds, and the CPU seldom compiles

    with config.patch(recompile_limit=_PROGRAMS):
        return _compiled()(
            query_NGSD,
            key_NSD[:, None, :keys],
            value_NSD[:, None, :keys],
            block_mask=mask,
            scale=scaling,
            enable_gqa=query_NGSD.shape[1] > 1,
            return_aux=return_aux,
        )


def attend_table_of(
    implementation: SparseKernel, pattern: SparsePatternConfig, query_BHSD: Tensor, kv_heads: int
) -> AttendTable:
    """Choose the function for one table: FlexAttention if its small proof passes, else gather."""
    is_candidate = takes(query_BHSD.device, query_BHSD.dtype, pattern)
    if implementation == "gather" or (implementation == "auto" and not is_candidate):
        return attend_by_gather
    if implementation == "flex":
        return attend_by_flex
    heads = (query_BHSD.shape[1] // kv_heads, query_BHSD.shape[-1])
    reason = obstacle(pattern, *heads, query_BHSD.dtype, query_BHSD.device)
    if reason is None:
        return attend_by_flex
    warnings.warn(f"{reason}; keys are gathered instead", stacklevel=2)
    return attend_by_gather


def takes(device: torch.device, dtype: torch.dtype, pattern: SparsePatternConfig) -> bool:
    """True if FlexAttention may serve this device, dtype and pattern in this thread. Threads that
    Python started, like DataParallel's replicas, cannot compile; the main thread can.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and not pattern.follows_content
        and pattern.block_size % SPARSE_KERNEL_BLOCK == 0
        and may_compile()
    )


def may_compile() -> bool:
    """True if kernels may be compiled in this thread: the main one, or one of PyTorch's own, which
    run backward passes and their recomputation.
    """
    current = threading.current_thread()
    return current is threading.main_thread() or type(current).__name__ == "_DummyThread"


def kernel_of(module: nn.Module, implementation: SparseKernel) -> SparseKernel:
    """Return the kernel that a module uses. With ``auto`` a replica of DataParallel gathers keys,
    so that the recomputation in its backward pass, in another thread, uses the same kernel.
    """
    is_replica = getattr(module, "_is_replica", False)
    return "gather" if implementation == "auto" and is_replica else implementation


@lru_cache(maxsize=64)
def obstacle(
    pattern: SparsePatternConfig,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Reason why FlexAttention's results differ from block-gather on small input; None if equal."""
    sizes = ProofSizes(groups, PROVEN_BLOCKS * pattern.block_size + 1, head_dim, dtype, device)
    return flaw(partial(deviations, pattern, sizes), sizes)


def deviations(pattern: SparsePatternConfig, sizes: ProofSizes) -> Iterator[float]:
    """Yield norm-relative errors of FlexAttention against block-gather: outputs and gradients."""

    def attended(attend: AttendTable, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        output, log_sums, _ = block_sparse_attention(
            *inputs, pattern=pattern, scaling=sizes.head_dim**-0.5, attend_table=attend
        )
        return output, log_sums

    by_flex, by_gather = (partial(attended, way) for way in (attend_by_flex, attend_by_gather))
    yield from deviations_of(by_flex, by_gather, sizes)
