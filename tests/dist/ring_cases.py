"""Run by test_ring.py on each rank."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_steps import each, of_all
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from combinatorial import in_pairs
from highwater.engine.activations.host import Kept
from highwater.engine.attention import block_attention as kept
from highwater.engine.attention import ring
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.attention.ring import Ring, attend_in_ring
from highwater.engine.parallel.collectives import attend_sharded, pass_on
from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout

ROWS = {
    "one": (17,),
    "odd": (5, 5, 1, 30),
    "equal": (64, 64),
    "shorter than the ring": (1, 2, 3),
    "long and short": (101, 7),
}
HEADS = {"groups": (4, 2), "all": (4, 4), "one key": (4, 1)}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
HEAD_SIZE, SCALING = 8, 0.3


class Case(NamedTuple):
    row: str
    heads: str
    dtype: str
    ulysses: int

    @property
    def name(self) -> str:
        return ", ".join((self.row, self.heads, self.dtype, f"Ulysses {self.ulysses}"))


def cases_for(processes: int) -> list[Case]:
    degrees = [n for n in (1, 2) if processes % n == 0 and processes // n > 1]
    return [Case(*each) for each in in_pairs(list(ROWS), list(HEADS), list(DTYPES), degrees)]


def results() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    ring.LONG_TOKENS = 20  # of "long and short" the long one has calls of its own on 2 to 4 ranks
    groups = {degree: _groups(degree, world) for degree in (1, 2) if world % degree == 0}
    own = each(cases_for(world), lambda case: run(case, rank, world, *groups[case.ulysses]))
    return {"ranks": of_all(own)}


def _groups(ulysses: int, world: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's neighbours, which exchange heads, and its ring."""
    neighbours = [list(range(first, first + ulysses)) for first in range(0, world, ulysses)]
    rings = [list(range(first, world, ulysses)) for first in range(ulysses)]
    own = [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in (neighbours, rings)]
    return own[0], own[1]


def run(
    case: Case, rank: int, world: int, neighbours: dist.ProcessGroup, around: dist.ProcessGroup
) -> dict[str, float | str]:
    lengths, dtype = ROWS[case.row], DTYPES[case.dtype]
    whole, gradient = _inputs(lengths, *HEADS[case.heads], dtype)
    layout = SequenceLayout(lengths, case.ulysses, world // case.ulysses)
    expected = reference_attention(*whole, document_lengths=lengths, scaling=SCALING)
    wanted = torch.autograd.grad(expected, whole, gradient.double())
    positions_T = torch.from_numpy(layout.share_of(rank).positions_T)
    is_token_T = positions_T != PADDING

    def held(tensor_SXD: Tensor) -> Tensor:
        """What this rank holds of a tensor of the row, as the engine has it: BXTD."""
        own_TXD = tensor_SXD.detach()[positions_T] * is_token_T[:, None, None]
        return own_TXD.transpose(0, 1)[None]

    own = [held(tensor).requires_grad_() for tensor in whole]
    of_calls = Ring(
        held_lengths=tuple(length // layout.ring_degree for length in layout.padded_lengths),
        scaling=SCALING,
        kernel="flash",
        group=around,
    )
    attend = partial(attend_in_ring, ring=of_calls)
    found_BTHD = (
        attend(*own) if case.ulysses == 1 else attend_sharded(*own, group=neighbours, attend=attend)
    )
    got = torch.autograd.grad(found_BTHD, own, held(gradient).transpose(1, 2))
    pairs = {"output": (found_BTHD.transpose(1, 2), expected)} | {
        name: (mine, theirs)
        for name, mine, theirs in zip(("query", "key", "value"), got, wanted, strict=True)
    }
    found = {
        name: float((mine - held(theirs))[:, :, is_token_T].abs().max()) if is_token_T.any() else 0
        for name, (mine, theirs) in pairs.items()
    }
    upstream = held(gradient).transpose(1, 2)
    found["seen by others"] = _seen_by_others(attend, own, layout, rank) if case.ulysses == 1 else 0
    return found | (_kept(own, attend, upstream, got) if case.ulysses == 1 else {})


def _seen_by_others(
    attend: partial[Tensor], own: list[Tensor], layout: SequenceLayout, rank: int
) -> int:
    share = layout.share_of(rank)
    of_first_T = torch.from_numpy(share.documents_T) == 0
    of_others_T = torch.from_numpy(share.positions_T) != PADDING
    before = attend(*(tensor.detach() for tensor in own))
    changed = [tensor.detach().masked_fill(of_first_T[:, None], 3.0) for tensor in own]
    return int((before != attend(*changed))[:, of_others_T & ~of_first_T].sum())


def _kept(
    own: list[Tensor], attend: partial[Tensor], upstream: Tensor, expected: Sequence[Tensor]
) -> dict[str, float | str]:
    """The largest deviation of a gradient where the call is recomputed and keeps what it attended;
    and how often something was passed on besides keys and values twice, their gradients once.
    """
    passed = 0

    def counted(*arguments: Any) -> Any:
        nonlocal passed
        passed += 1
        return pass_on(*arguments)

    ring.pass_on = counted
    try:
        found_BTHD = checkpoint(
            attend, *own, use_reentrant=False, context_fn=lambda: kept.kept_in_recompute(Kept())
        )
        got = torch.autograd.grad(found_BTHD, own, upstream)
    finally:
        ring.pass_on = pass_on
    degree = attend.keywords["ring"].degree
    pairs = zip(got, expected, strict=True)
    off = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    return {"kept": off, "passed besides": abs(passed - 2 * (degree - 1) - degree)}


def _inputs(
    lengths: tuple[int, ...], heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(0)

    def tensor(count: int) -> Tensor:
        return torch.randn(sum(lengths), count, HEAD_SIZE, generator=random, dtype=dtype)

    whole = [tensor(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    return whole, tensor(heads)
