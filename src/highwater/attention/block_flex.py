"""Block-flex attention: block-sparse attention by PyTorch's FlexAttention, from our own tables.

FlexAttention's block mask has a row of one width for every block of queries, and the transposed one
for every block of keys; PyTorch makes it of a table of all pairs of blocks. Here both are filled
from a BlockTable. Rows by ratio keep ever more blocks, so that one width for all would be half
empty: their queries are cut into stretches, each with the keys up to its own end. Which blocks are
kept is in the tables alone: without compiling, FlexAttention would not read them.

A kernel that is compiled is used where it has shown, on small input, to do what block-gather does.

Shapes:  N groups of heads, of all sequences  G query heads of a group  S tokens  s those of a
         stretch  D head size  E pairs of blocks of a stretch
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from highwater.attention.block_gather import AttendTable, attend_by_gather, block_sparse_attention
from highwater.attention.block_table import BlockTable
from highwater.spec.sparse_pattern import SPARSE_KERNEL_BLOCK, SparsePatternConfig

SparseKernel = Literal["auto", "gather", "flex"]
"""How block-sparse attention is computed; ``auto``: by FlexAttention where that was proven."""
_STRETCHES = 4
"""Of the rows of a pattern by ratio: with them tables are a quarter larger than what they keep."""
_ROWS_OF_STRETCH = 16
"""At the least."""
_PROGRAMS = 64
"""Kinds of shapes and masks that are compiled in one process: past them PyTorch raises, rather than
taking the quadratic path.
"""
_DIGITS = 16
"""Roundings of a number that a proven kernel may be off by, norm-relative."""


class Stretch(NamedTuple):
    """Queries next to each other, and the mask of the keys up to their end."""

    first: int
    """Token of its first query."""
    stop: int
    keys: int
    """Keys of it: those up to this token."""
    mask: BlockMask

    @property
    def nbytes(self) -> int:
        """Bytes of its tables."""
        found = (getattr(self.mask, name) for name in _TABLES)
        return sum(table.nbytes for table in found if table is not None)


_TABLES = tuple(
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
)


@lru_cache(maxsize=16)
def stretches(table: BlockTable) -> tuple[Stretch, ...]:
    """The masks of a table, kept for the layers of a model, which ask again."""
    assert table.tables == 1, "one table for all heads"
    counts = table.starts.diff()
    is_even = table.window_tokens is not None or table.keys_below is not None
    pieces = 1 if is_even else min(_STRETCHES, max(1, table.rows // _ROWS_OF_STRETCH))
    bounds = [table.rows * number // pieces for number in range(pieces + 1)]
    assert int(counts.sum()) == table.kept_blocks
    return tuple(_stretch(table, *each) for each in pairwise(bounds))


def _stretch(table: BlockTable, first: int, stop: int) -> Stretch:
    size, length = table.block_size, table.length_tokens
    last = min(stop * size, length)
    keys = last if table.keys_below is None else min(last, table.keys_below)
    own = slice(int(table.starts[first]), int(table.starts[stop]))
    row_E = table.row_of_entry[own] - first
    column_E = table.columns[0, own].long().cpu()
    is_full_E = _is_full(table, row_E + first, column_E)
    shape = (stop - first, -(-keys // size))
    tensors: dict[str, Any] = {}
    for name, is_own_E in (("", ~is_full_E), ("full_", is_full_E)):
        pairs = (row_E[is_own_E], column_E[is_own_E])
        for side, (line_E, entry_E), lines in (
            ("kv", pairs, shape[0]),
            ("q", pairs[::-1], shape[1]),
        ):
            numbers, indices = _padded(line_E, entry_E, lines)
            tensors[f"{name}{side}_num_blocks"] = numbers.to(table.columns.device)
            tensors[f"{name}{side}_indices"] = indices.to(table.columns.device)
    mask = BlockMask(
        (last - first * size, keys),
        BLOCK_SIZE=(size, size),
        mask_mod=_is_seen(table, first * size),
        **tensors,
    )
    return Stretch(first * size, last, keys, mask)


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
    (1, 1, lines) and (1, 1, lines, width), int32. A width is 1 at the least: a kernel reads there.
    """
    order_E = torch.argsort(line_E * (int(entry_E.max()) + 1 if len(entry_E) else 1) + entry_E)
    line_E, entry_E = line_E[order_E], entry_E[order_E]
    numbers = torch.bincount(line_E, minlength=lines)
    place_E = torch.arange(len(line_E)) - (numbers.cumsum(0) - numbers)[line_E]
    width = max(1, int(numbers.max()) if lines else 1)
    indices = torch.zeros(lines, width, dtype=torch.int32)
    indices[line_E, place_E] = entry_E.int()
    return numbers.int()[None, None], indices[None, None]


def _is_seen(table: BlockTable, first: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Which key of a kept block a query sees. The query's number is a tensor's: a stretch that
    begins elsewhere is no other program.
    """
    start = torch.tensor(first, device=table.columns.device)
    window, begins, ends = table.window_tokens, table.keys_from, table.keys_below

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        token = query + start
        seen = key <= token
        if window is not None:
            seen = seen & (key > token - window)
        if begins:
            seen = seen & (key >= begins)
        if ends is not None:
            seen = seen & (key < ends)
        return seen

    return is_seen


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def attend_by_flex(
    query_NGSD: Tensor, key_NSD: Tensor, value_NSD: Tensor, table: BlockTable, scaling: float
) -> tuple[Tensor, Tensor]:
    """One pass over a table, NGSD, and each query's log-sum-exp, NGS; differentiable on a GPU."""
    found = [
        attend_stretch(query_NGSD, key_NSD, value_NSD, each, scaling) for each in stretches(table)
    ]
    outputs, auxiliaries = zip(*found, strict=True)
    sums = [each.lse for each in auxiliaries]
    if len(found) == 1:
        return outputs[0], sums[0]
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def attend_stretch(
    query_NGSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    stretch: Stretch,
    scaling: float,
    **asked: AuxRequest | None,
) -> Any:
    """What the queries of a stretch attend to, NGsD, and their log-sum-exp beside it, or what else
    is asked for. A kernel for the CPU gives none, and no gradient.
    """
    with dynamo_config.patch(recompile_limit=_PROGRAMS):
        return _compiled()(
            query_NGSD[:, :, stretch.first : stretch.stop],
            key_NSD[:, None, : stretch.keys],
            value_NSD[:, None, : stretch.keys],
            block_mask=stretch.mask,
            scale=scaling,
            enable_gqa=query_NGSD.shape[1] > 1,
            **({"return_aux": AuxRequest(lse=True)} | asked),
        )


def attend_table_of(
    implementation: SparseKernel, pattern: SparsePatternConfig, query_BHSD: Tensor, kv_heads: int
) -> AttendTable:
    """How to attend by one table: by FlexAttention where a small proof passes, else by gathering.

    In any thread but the first nothing is compiled, and keys are gathered: replicas of
    DataParallel are threads.
    """
    is_candidate = (
        query_BHSD.device.type == "cuda"
        and query_BHSD.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.cuda.get_device_capability(query_BHSD.device) >= (8, 0)
        and not pattern.follows_content
        and pattern.block_size % SPARSE_KERNEL_BLOCK == 0
        and threading.current_thread() is threading.main_thread()
    )
    if implementation == "gather" or (implementation == "auto" and not is_candidate):
        return attend_by_gather
    if implementation == "flex":
        return attend_by_flex
    head = (query_BHSD.shape[1] // kv_heads, query_BHSD.shape[-1])
    device = query_BHSD.device
    return (
        attend_by_flex if is_proven(pattern, *head, query_BHSD.dtype, device) else attend_by_gather
    )


@lru_cache(maxsize=64)
def is_proven(
    pattern: SparsePatternConfig,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether FlexAttention gives what block-gather gives, on small input: output, log-sum-exp and
    all gradients. Warns where it does not, or does not run.
    """
    try:
        off = max(deviations(pattern, groups, head_dim, dtype, device))
    except Exception as error:  # noqa: BLE001 -- whatever a compiler raises, there is another way
        reason = str(error).partition("\n")[0] or type(error).__name__
        warnings.warn(f"FlexAttention does not run here: {reason}", stacklevel=2)
        return False
    if not off < _DIGITS * torch.finfo(dtype).eps:
        warnings.warn(f"FlexAttention is off by {off:.1e} in {dtype}", stacklevel=2)
        return False
    return True


def deviations(
    pattern: SparsePatternConfig,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    length: int | None = None,
    with_gradients: bool = True,
) -> Iterator[float]:
    """How far FlexAttention is from block-gather, norm-relative: output, log-sum-exp, gradients."""
    tokens = length or 2 * _STRETCHES * _ROWS_OF_STRETCH * pattern.block_size + 1
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 2 * groups, tokens, head_dim), *2 * [(1, 2, tokens, head_dim)])
    inputs = [
        torch.randn(shape, generator=random).to(device, dtype).requires_grad_(with_gradients)
        for shape in shapes
    ]
    found: list[list[Tensor]] = []
    for attend in (attend_by_flex, attend_by_gather):
        output, log_sums, _ = block_sparse_attention(
            *inputs, pattern=pattern, scaling=head_dim**-0.5, attend_table=attend
        )
        found.append([output, log_sums])
        if with_gradients:
            random.manual_seed(1)
            upstream = [
                torch.randn(t.shape, generator=random).to(device, t.dtype)
                for t in (output, log_sums)
            ]
            found[-1] += torch.autograd.grad((output, log_sums), inputs, upstream)
    for mine, theirs in zip(*found, strict=True):
        mine, theirs = mine.detach().double(), theirs.detach().double()
        yield float((mine - theirs).norm() / theirs.norm())
