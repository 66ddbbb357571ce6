"""Run by test_ring.py on each rank."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_steps import each, of_all
from torch import Tensor

from combinatorial import in_pairs
from highwater.engine.attention.block_gather import block_sparse_attention
from highwater.engine.attention.block_table import block_tables
from highwater.engine.attention.branch_attention import Sharing, branch_attention
from highwater.engine.attention.branches import Branch, dilated_branches, exchange
from highwater.engine.attention.modules import (
    BlockSparseAttention,
    BlockSparseRingDilatedAttention,
    DilatedAttention,
)
from highwater.engine.parallel import collectives
from highwater.engine.parallel.collectives import attend_sharded
from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout
from highwater.errors import UsageError
from highwater.nouns.sparse_pattern import PatternType, SparsePatternConfig
from references.sparse_masks import dense, meetings

BLOCK, WINDOW, GLOBAL = 8, 19, 11
PATTERNS: tuple[PatternType | None, ...] = (
    *("dilated_sparse", "strided", "random", "local_window", "global_local"),
    None,
)
"""None: everything is kept."""
BRANCHES = {"none": None, "spanning": ((20, 96), (1, 3)), "own": ((8, 16), (1, 2))}
ROWS = {"one": (96,), "odd": (41, 3, 77)}
HEADS = {"groups": (4, 2), "odd": (5, 5), "one key": (3, 1)}
HEAD_SIZE, SCALING, BATCH = 5, 0.3, 2


class Case(NamedTuple):
    pattern: PatternType | None
    branches: str
    row: str
    heads: str
    shares: str

    @property
    def name(self) -> str:
        return ", ".join(map(str, self))


def cases() -> list[Case]:
    shares = ("zigzag", "contiguous")
    return [
        Case(*each) for each in in_pairs(PATTERNS, list(BRANCHES), list(ROWS), list(HEADS), shares)
    ]


def results() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = each(cases(), lambda case: run(case, rank, world))
    return {"ranks": of_all({**own, "modules": run_modules(rank, world)})}


def run(case: Case, rank: int, world: int) -> dict[str, float | str]:
    lengths, heads = ROWS[case.row], HEADS[case.heads]
    degrees = (1, world) if case.shares == "zigzag" else (world, 1)
    layout = SequenceLayout(lengths, *degrees)
    pattern = None
    if case.pattern is not None:
        ratio = None if "local" in case.pattern else 0.3
        pattern = SparsePatternConfig(
            pattern_type=case.pattern,
            sparsity_ratio=ratio,
            block_size=BLOCK,
            local_window_size=WINDOW,
            global_tokens=GLOBAL,
        )
    segments = BRANCHES[case.branches]
    count = in_row(pattern, lengths, heads[0], segments)
    whole, upstream = inputs(sum(lengths), heads)
    output, sums = dense(*whole, count, SCALING)
    expected = (output, sums.masked_fill(sums == -torch.inf, 0.0))
    wanted = torch.autograd.grad(expected, whole, upstream)

    positions_T = torch.from_numpy(layout.share_of(rank).positions_T)
    is_token_T = positions_T != PADDING

    def held(tensor_BXSD: Tensor, padding: float = 0.0) -> Tensor:
        own_BXTD = tensor_BXSD.detach()[:, :, positions_T]
        return own_BXTD.masked_fill(~is_token_T[:, None], padding)

    own = [held(tensor, 7.0).requires_grad_() for tensor in whole]
    branches = (Branch(),) if segments is None else dilated_branches(*segments, heads[0])
    sharing = Sharing(
        layout=layout, branches=branches, pattern=pattern, scaling=SCALING, group=dist.group.WORLD
    )
    sent: list[int] = []
    with counted(sent):
        output, log_sums = branch_attention(*own, sharing=sharing)
        forward = sum(sent)
        has_keys_T = count.sum(-1)[:, positions_T] > 0
        finite = log_sums.masked_fill(~(has_keys_T & is_token_T), 0.0)
        found = torch.autograd.grad(
            (output, finite), own, (held(upstream[0]), held(upstream[1][..., None])[..., 0])
        )
    pairs = {
        "output": (output * is_token_T[:, None], held(expected[0])),
        "sums": (finite, held(expected[1][..., None])[..., 0]),
        **{
            name: (mine, held(theirs))
            for name, mine, theirs in zip(("q", "k", "v"), found, wanted, strict=True)
        },
    }
    deviations: dict[str, float | str] = {
        name: float((mine - theirs).norm()) / max(1.0, float(theirs.norm()))
        for name, (mine, theirs) in pairs.items()
    }
    each = 2 * BATCH * HEAD_SIZE * 8  # a key and a value of one head of every sequence
    had_to = needed(pattern, lengths, heads, segments, layout, rank) * each
    whole = {"is_causal": True, "device": torch.device("cpu")}
    planned = sum(
        exchange(layout, branch, pattern, rank=other, source=rank, **whole).tokens
        for branch in branches
        for other in range(layout.degree)
        if other != rank
    )
    return deviations | {
        "sent beyond what is seen": forward - had_to,
        "sent otherwise than planned": 0 if bool(planned) == bool(forward) else 1,
        "sent again and home": sum(sent) - 2 * forward - arrived(sharing, heads, each),
    }


def run_modules(rank: int, world: int) -> dict[str, float | str]:
    """The modules with a group, and Ulysses around a pattern, beside the same on the whole row."""
    group = dist.group.WORLD
    assert group is not None
    config = SparsePatternConfig(pattern_type="strided", sparsity_ratio=0.3, block_size=BLOCK)
    whole = [t.detach() for t in inputs(96, (4, 4))[0]]
    found: dict[str, float | str] = {}
    for shares in ("contiguous", "zigzag"):
        degrees = (1, world) if shares == "zigzag" else (world, 1)
        positions_T = torch.from_numpy(SequenceLayout((96,), *degrees).share_of(rank).positions_T)
        how = {"group": group, "shares": shares}
        for name, alone, shared, is_causal in (
            (
                "dilated, not causal",
                DilatedAttention((20, 96), (1, 3)),
                DilatedAttention((20, 96), (1, 3), **how),
                False,
            ),
            ("sparse", BlockSparseAttention(config), BlockSparseAttention(config, **how), True),
            (
                "all three",
                BlockSparseRingDilatedAttention((48, 96), (1, 2), config),
                BlockSparseRingDilatedAttention((48, 96), (1, 2), config, **how),
                True,
            ),
        ):
            expected = alone(*(t.transpose(1, 2) for t in whole), is_causal)[:, positions_T]
            mine = shared(*(t[:, :, positions_T].transpose(1, 2) for t in whole), is_causal)
            found[f"{name}, {shares}"] = float((mine - expected).norm() / expected.norm())
    each = 96 // world

    def attend(*tensors: Tensor) -> Tensor:
        made = block_sparse_attention(*tensors, pattern=config, scaling=SCALING)
        return made.output_BHSD.transpose(1, 2)

    own = [t[:, :, rank * each : (rank + 1) * each] for t in whole]
    mine = attend_sharded(*own, group=group, attend=attend)
    expected = attend(*whole)[:, rank * each : (rank + 1) * each]
    found["Ulysses"] = float((mine - expected).norm() / expected.norm())
    for name, make in {
        "block_top_k": lambda: BlockSparseAttention(
            SparsePatternConfig(pattern_type="block_top_k"), group=group
        ),
        "sum over the sequence": lambda: DilatedAttention(
            (8,), (1,), normalisation="groups", group=group
        ),
        "ranks hold": lambda: BlockSparseAttention(config, group=group)(
            *(t.transpose(1, 2) for t in own), document_lengths=(96 * world,)
        ),
    }.items():
        try:
            make()
            found[f"{name} is not refused"] = 1.0 if world > 1 or name != "ranks hold" else 0.0
        except UsageError as error:
            found[f"{name} is refused by another name"] = float(name not in str(error))
    return found


def in_row(
    pattern: SparsePatternConfig | None,
    lengths: Sequence[int],
    heads: int,
    segments: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Tensor:
    """How often a head's token sees a key, HSS: by every branch, within every document."""
    parts = [
        meetings(length, heads, segments or ((length,), (1,)), partial(seen, pattern))
        for length in lengths
    ]
    return torch.stack([torch.block_diag(*of_head) for of_head in zip(*parts, strict=True)])


def seen(pattern: SparsePatternConfig | None, length: int) -> Tensor:
    """Which key each token of a row sees: of windows from their definition, of others by the blocks
    of the table, which test_block_sparse.py judges.
    """
    token, other = torch.arange(length)[:, None], torch.arange(length)
    causal = other <= token
    if pattern is None:
        return causal
    if pattern.pattern_type == "local_window":
        return causal & (other > token - WINDOW)
    if pattern.pattern_type == "global_local":
        return causal & ((other > token - WINDOW) | (other < GLOBAL))
    return causal & in_kept_blocks(pattern, length)


def in_kept_blocks(pattern: SparsePatternConfig | None, length: int) -> Tensor:
    """Which keys are in blocks that a token's block keeps, with no regard to what is seen there."""
    if pattern is None or not length:
        return torch.ones(length, length, dtype=torch.bool)
    kept = torch.zeros(-(-length // BLOCK), -(-length // BLOCK), dtype=torch.bool)
    for table in block_tables(pattern, length, torch.device("cpu")):
        kept[table.row_of_entry, table.columns[0].long()] = True
    return kept.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:length, :length]


def needed(
    pattern: SparsePatternConfig | None,
    lengths: Sequence[int],
    heads: tuple[int, int],
    segments: tuple[tuple[int, ...], tuple[int, ...]] | None,
    layout: SequenceLayout,
    rank: int,
) -> int:
    """Keys of this rank that others have to be sent, of every head that reads them: those of whose
    tile, what the rank holds of one block next to each other, some query of theirs sees one; once
    for each branch.
    """
    host = [torch.from_numpy(layout.share_of(each).positions_T) for each in range(layout.degree)]
    mine = host[rank][host[rank] != PADDING]
    total = 0
    block = 128 if pattern is None else BLOCK
    for segment, rate in zip(
        *(((max(lengths),), (1,)) if segments is None else segments), strict=True
    ):
        for offset in range(min(rate, heads[0])):
            of_branch = in_row(pattern, lengths, offset + 1, ((segment,), (rate,)))[offset]
            read = len({head // (heads[0] // heads[1]) for head in range(offset, heads[0], rate)})
            tile_of = tiles(lengths, segment, rate, offset, block, mine)
            for other in range(layout.degree):
                if other != rank:
                    theirs = host[other][host[other] != PADDING]
                    is_seen = (of_branch[theirs][:, mine] > 0).any(0)
                    wanted = {tile for tile, is_it in zip(tile_of, is_seen, strict=True) if is_it}
                    total += read * sum(tile in wanted for tile in tile_of if tile is not None)
    return total


def tiles(
    lengths: Sequence[int], segment: int, rate: int, offset: int, block: int, mine: Tensor
) -> list[tuple[int, ...] | None]:
    """The tile of each token that a rank holds: document, segment, block."""
    ends = torch.tensor(lengths).cumsum(0)
    found: list[tuple[int, ...] | None] = []
    gaps, last = 0, None
    for position in mine.tolist():
        document = int((ends <= position).sum())
        within = position - (int(ends[document]) - lengths[document])
        inner = within % segment
        if inner % rate != offset:
            found.append(None)
            continue
        place = (document, within // segment, inner // rate)
        gaps += last is not None and place != (*last[:2], last[2] + 1)
        found.append((document, within // segment, inner // rate // block, gaps))
        last = place
    return found


def arrived(sharing: Sharing, heads: tuple[int, int], each: int) -> int:
    """Bytes of the keys and values that come here, whose gradients go home, in float64 too."""
    total = 0
    for branch in sharing.branches:
        groups = heads[0] // heads[1]
        read = len({head // groups for head in range(heads[0])[branch.heads]})
        for source in range(sharing.degree):
            if source != sharing.rank:
                total += (
                    each
                    * read
                    * exchange(
                        sharing.layout,
                        branch,
                        sharing.pattern,
                        is_causal=True,
                        rank=sharing.rank,
                        source=source,
                        device=torch.device("cpu"),
                    ).tokens
                )
    return total


class counted:  # noqa: N801 -- a context
    """Counts the bytes that go into the network, by PyTorch's own operation."""

    def __init__(self, sent: list[int]) -> None:
        self.sent, self.plain = sent, collectives.dist.P2POp

    def __enter__(self) -> None:
        def operation(way: Any, tensor: Tensor, *others: Any) -> Any:
            if way is dist.isend:
                self.sent.append(tensor.nbytes)
            return self.plain(way, tensor, *others)

        collectives.dist.P2POp = operation

    def __exit__(self, *_: object) -> None:
        collectives.dist.P2POp = self.plain


def inputs(length: int, heads: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    whole = [tensor(BATCH, n, length, HEAD_SIZE) for n in (heads[0], heads[1], heads[1])]
    upstream = [tensor(BATCH, heads[0], length, HEAD_SIZE), tensor(BATCH, heads[0], length)]
    return [each.requires_grad_() for each in whole], upstream
