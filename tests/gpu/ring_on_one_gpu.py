"""One rank of a ring whose ranks share a GPU."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from highwater.engine.attention import ring
from highwater.engine.attention.dense import attend
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.attention.ring import Ring, attend_in_ring
from highwater.engine.parallel.collectives import pass_on
from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout

ROWS = {"one": (1021,), "packed": (5, 130, 130, 700), "short": (1, 2, 65)}
HEADS, KV_HEADS, SIZE, SCALING = 8, 2, 128, 128**-0.5


class Arriving:
    """A tensor that arrives on the host, and goes to the GPU."""

    def __init__(self, works: Sequence[dist.Work], there: list[Tensor], here: list[Tensor]) -> None:
        self._works, self._there, self._here = works, there, here

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for there, here in zip(self._there, self._here, strict=True):
            here.copy_(there)


def by_the_host(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Any:
    there, works = pass_on([tensor.cpu() for tensor in tensors], group)
    here = [torch.empty_like(tensor) for tensor in tensors]
    return here, [Arriving(works, there, here)]


def main() -> None:
    kernel, folder = sys.argv[1], Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ring.pass_on = by_the_host
    found = {name: case(lengths, kernel, rank, world) for name, lengths in ROWS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def case(lengths: tuple[int, ...], kernel: Any, rank: int, world: int) -> Any:
    random = torch.Generator("cuda").manual_seed(0)
    of = {"device": "cuda", "dtype": torch.bfloat16, "generator": random}
    whole = [torch.randn(sum(lengths), n, SIZE, **of) for n in (HEADS, KV_HEADS, KV_HEADS)]
    upstream = torch.randn(sum(lengths), HEADS, SIZE, **of)
    exact = [tensor.double().requires_grad_() for tensor in whole]
    expected = reference_attention(*exact, document_lengths=lengths, scaling=SCALING)
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]

    row = [t.transpose(0, 1)[None].detach().requires_grad_() for t in whole]
    alone = attend(*row, document_lengths=lengths, scaling=SCALING, kernel=kernel)
    gradients = torch.autograd.grad(alone, row, upstream[None])
    one_kernel = [alone[0], *(t[0].transpose(0, 1) for t in gradients)]

    layout = SequenceLayout(lengths, ring_degree=world)
    positions = torch.from_numpy(layout.share_of(rank).positions_T).cuda()
    is_token = positions != PADDING

    def held(tensor: Tensor) -> Tensor:
        return (tensor.detach()[positions] * is_token[:, None, None]).transpose(0, 1)[None]

    own = [held(tensor).requires_grad_() for tensor in whole]
    lengths_held = tuple(length // world for length in layout.padded_lengths)
    around = Ring(held_lengths=lengths_held, scaling=SCALING, kernel=kernel, group=dist.group.WORLD)
    output = attend_in_ring(*own, ring=around)
    got = torch.autograd.grad(output, own, held(upstream).transpose(1, 2))
    mine = [output[0], *(t[0].transpose(0, 1) for t in got)]
    names = ("output", "query", "key", "value")
    return {
        name: (
            deviation(ours[is_token], theirs[positions][is_token]),
            deviation(single[positions][is_token], theirs[positions][is_token]),
        )
        for name, ours, single, theirs in zip(names, mine, one_kernel, wanted, strict=True)
    }


def deviation(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm().clamp_min(1e-12))


if __name__ == "__main__":
    main()
