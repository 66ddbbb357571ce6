"""Run by test_ring.py on each rank."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_steps import each, of_all
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from closeness import deviation
from highwater.engine.activations.host import Kept
from highwater.engine.attention import gated_delta as module
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.gated_delta import DeltaHeads, gated_delta
from highwater.nouns.layout import DELTA_CHUNK_TOKENS
from references.delta_rule import EPSILON, by_documents, inputs

GROUP = DELTA_CHUNK_TOKENS
SLICE = GROUP + 20
HEADS = DeltaHeads(key_heads=1, value_heads=2, key_size=4, value_size=3)
DECAY = 0.002
"""Small enough for a slice's first token to be seen slices later."""


class Case(NamedTuple):
    """A row, and where its first documents end; the last one goes on to the end of the row."""

    name: str
    ends: tuple[int, ...] = ()
    slice_tokens: int = SLICE
    is_convolved: bool = True
    """False: the convolution reads no tokens but each one itself."""


CASES = (
    Case("one document"),
    Case("no convolution", is_convolved=False),
    Case("documents end with slices", (SLICE, 2 * SLICE)),
    Case("no convolution, and documents end with slices", (SLICE,), SLICE, False),
    Case("a document ends a token before a slice", (SLICE - 1,)),
    Case("a document ends a token behind a slice", (SLICE + 1,)),
    Case("documents of any length", (30, 31, 71, SLICE + 40, SLICE + 43)),
    Case("slices as short as the convolution", slice_tokens=3),
    Case("slices of two tokens", (1,), slice_tokens=2),
    Case("slices of one token", slice_tokens=1),
)


def results() -> dict[str, Any]:
    module.DELTA_GROUP_TOKENS = GROUP
    return {"ranks": of_all(each(CASES, run))}


def run(case: Case) -> dict[str, float]:
    """Deviations of this rank's outputs, and of the gradients of its slice and of weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    row_tokens = ranks * case.slice_tokens
    ends = (*(end for end in case.ends if end < row_tokens), row_tokens)
    lengths = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
    leaves = inputs(row_tokens, decay=DECAY, heads=HEADS)
    mine = slice(rank * case.slice_tokens, (rank + 1) * case.slice_tokens)

    def ours(*own: Tensor) -> Tensor:
        *others, convolution, norm = own
        taps = convolution if case.is_convolved else convolution[:, -1:]
        how = {"heads": HEADS, "document_lengths": lengths, "norm_epsilon": EPSILON}
        return gated_delta(*others, taps, norm, **how, ring=dist.group.WORLD)

    def held(tensors: list[Tensor]) -> list[Tensor]:
        return [each.detach()[mine] for each in tensors[:4]] + [t.detach() for t in tensors[4:]]

    *others, convolution, norm = leaves
    taps = convolution if case.is_convolved else _last_alone(convolution)
    told: list[Any] = [None] * (2 + len(leaves))
    if rank == 0:  # the reference, token by token, is the same on every rank
        expected = by_documents([*others, taps, norm], lengths, HEADS)
        random = torch.Generator().manual_seed(1)
        upstream = torch.randn(expected.shape, generator=random).double()
        wanted = torch.autograd.grad(expected, leaves, upstream)
        told = [expected.detach(), upstream, *wanted]
    dist.broadcast_object_list(told)
    expected, upstream, *wanted = told
    own = [each.requires_grad_() for each in held(leaves)]
    out = ours(*own)
    found = {"output": deviation(out, expected[mine])}
    anew = checkpoint(ours, *own, use_reentrant=False, context_fn=lambda: kept_in_recompute(Kept()))
    for name, output in {"": out, ", kept": anew}.items():
        of_slice = [*torch.autograd.grad(output, own, upstream[mine])]
        for total in of_slice[4:]:
            dist.all_reduce(total)
        pairs = zip(of_slice, held(wanted), strict=True)
        found |= {f"{n}{name}": deviation(*pair, 1e-6) for n, pair in enumerate(pairs)}
    others = held([2 * each.detach() if n < 2 else each for n, each in enumerate(leaves)])
    is_seen = bool((ours(*(others if rank == 0 else own)) != out).any())
    first, last = case.slice_tokens, row_tokens - case.slice_tokens
    crosses = any(end - n < first and end > last for n, end in zip(lengths, ends, strict=True))
    # What is in the first slice is seen in the last one if one document is in both.
    found["seen"] = float(rank == ranks - 1 and is_seen is not crosses)
    return found


def _last_alone(convolution_CW: Tensor) -> Tensor:
    """The same taps, of which the last one alone counts."""
    return convolution_CW * torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=convolution_CW.dtype)
