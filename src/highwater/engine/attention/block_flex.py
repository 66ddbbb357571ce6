"""Block-flex attention: block-sparse attention by PyTorch's FlexAttention, from our own tables.

FlexAttention's block mask has a row of one width for every block of queries, and the transposed one
for every block of keys; PyTorch makes it of a table of all pairs of blocks. Here both are filled
from a BlockTable. Which blocks are kept is in the tables alone: without compiling, FlexAttention
would not read them.

A kernel that is compiled is used where it has shown, on small input, to do what block-gather does.

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
from torch._dynamo import config as dynamo_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from highwater.engine.attention.block_gather import (
    AttendTable,
    attend_by_gather,
    block_sparse_attention,
)
from highwater.engine.attention.block_table import BlockTable
from highwater.engine.attention.kernel_proof import PROVEN_BLOCKS, ProofSizes, deviations_of, flaw
from highwater.nouns.sparse_pattern import SPARSE_KERNEL_BLOCK, SparsePatternConfig

IsSeen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key of a kept block: of the numbers of a sequence, a head, the two."""
SparseKernel = Literal["auto", "gather", "flex"]
"""How block-sparse attention is computed; ``auto``: by FlexAttention where that was proven."""
_PROGRAMS = 64
"""Kinds of shapes and masks that are compiled in one process: past them PyTorch raises, rather than
taking the quadratic path.
"""


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)
def block_mask(table: BlockTable) -> BlockMask:
    """The mask of a table, kept for the layers of a model, which ask again."""
    assert table.tables == 1, "one table for all heads"
    length = table.length_tokens
    keys = length if table.keys_below is None else min(length, table.keys_below)
    row_E, column_E = table.row_of_entry, table.columns[0].long().cpu()
    is_full_E = _is_full(table, row_E, column_E)
    return filled_mask(
        (row_E, column_E, is_full_E),
        (length, keys),
        size=table.block_size,
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
    """The mask of pairs of blocks, by row: the rows, columns and which are seen whole, on the host;
    of so many queries and keys.
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
        # kernels of PyTorch before 2.12 read both at the one's distance between lines
        both = torch.cat([indices for _, indices in parts], dim=-1).to(device)
        widths = [indices.shape[-1] for _, indices in parts]
        indices_of = both.split(widths, dim=-1)
        for full, (numbers, _), indices in zip(("", "full_"), parts, indices_of, strict=True):
            tensors[f"{full}{side}_num_blocks"] = numbers.to(device)
            tensors[f"{full}{side}_indices"] = indices
    return BlockMask(lengths, BLOCK_SIZE=(size, size), mask_mod=is_seen, **cast(Any, tensors))


def mask_bytes(mask: BlockMask) -> int:
    """Bytes of a mask's tables."""
    found = (
        getattr(mask, f"{full}{side}_{what}")
        for full in ("", "full_")
        for side in ("kv", "q")
        for what in ("num_blocks", "indices")
    )
    return sum(table.nbytes for table in found if table is not None)


def _is_full(table: BlockTable, row_E: Tensor, column_E: Tensor) -> Tensor:
    """Whether every token of a block of queries sees every key of a block."""
    size = table.block_size
    full_E = (column_E < row_E) & (column_E * size >= table.keys_from)
    if table.keys_below is not None:
        full_E &= (column_E + 1) * size <= table.keys_below
    if table.window_tokens is not None:
        full_E &= (row_E + 1) * size - 1 - column_E * size < table.window_tokens
    return full_E


def _padded(line_E: Tensor, entry_E: Tensor, lines: int) -> tuple[Tensor, Tensor]:
    """How many entries each line has, and its entries in their order, as many places for each;
    (1, 1, lines) and (1, 1, lines, width), int32. A width is of whole 16 bytes.
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
    """Which key of a kept block a query sees; all bounds are tensors' numbers, for one program."""
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
    """One pass over a table, NGSD, and each query's log-sum-exp, NGS; differentiable on a GPU."""
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
    """What queries attend to, NGSD, and what else is asked for beside it. A kernel for the CPU
    gives that alone, and no gradient.
    """
    keys = mask.seq_lengths[1]
    with dynamo_config.patch(recompile_limit=_PROGRAMS):
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
    """How to attend by one table: by FlexAttention where a small proof passes, else by gathering
    keys.
    """
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
    """Whether FlexAttention is for this device, dtype and pattern, in this thread: of threads that
    Python started nothing is compiled but in the first, and replicas of DataParallel are such.
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
    """Whether kernels are compiled in this thread: the first, or one of PyTorch's own, in which
    backward passes run, and what they recompute.
    """
    current = threading.current_thread()
    return current is threading.main_thread() or type(current).__name__ == "_DummyThread"


def kernel_of(module: nn.Module, implementation: SparseKernel) -> SparseKernel:
    """What a module asks for; a replica of DataParallel gathers, so that what its backward pass
    recomputes, in another thread, is what it was.
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
    """Why FlexAttention does not give what block-gather gives, on small input: output, log-sum-exp
    and all gradients. None where it does.
    """
    sizes = ProofSizes(groups, PROVEN_BLOCKS * pattern.block_size + 1, head_dim, dtype, device)
    return flaw(partial(deviations, pattern, sizes), sizes)


def deviations(pattern: SparsePatternConfig, sizes: ProofSizes) -> Iterator[float]:
    """How far FlexAttention is from block-gather, norm-relative: output, log-sum-exp, gradients."""

    def attended(attend: AttendTable, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        output, log_sums, _ = block_sparse_attention(
            *inputs, pattern=pattern, scaling=sizes.head_dim**-0.5, attend_table=attend
        )
        return output, log_sums

    by_flex, by_gather = (partial(attended, way) for way in (attend_by_flex, attend_by_gather))
    yield from deviations_of(by_flex, by_gather, sizes)
