"""Attention of one layer over packed rows that two GPUs share: a ring with a call for each run of
documents of one length, as it was, the ring as it is, and Ulysses.

    python docs/results/mixed_lengths/ring.py > docs/results/mixed_lengths/ring.ndjson

Rows of ``measure.py``, of Qwen3-0.6B's heads, in bfloat16. Every way attends each row twice,
forward and backward: a line of JSON has the tokens a second of both times, for both GPUs together.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from highwater.engine.attention import ring
from highwater.engine.attention.dense import attend
from highwater.engine.parallel.collectives import attend_sharded
from highwater.engine.parallel.sequence_layout import SequenceLayout

sys.path.insert(0, str(Path(__file__).parent))
from measure import HEADS, KV_HEADS, SIZE, rows

RANKS, ROWS = 2, 4
MEDIANS = (400, 4_096)


def main() -> None:
    """Start both ranks, of which the first prints."""
    with TemporaryDirectory() as folder:
        store = {"STORE": f"{folder}/store"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__], env=os.environ | store | {"RANK": str(rank)}
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.wait()


def serve(rank: int) -> None:
    """Be one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(os.environ["STORE"], RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, device_id=device)
    for median in MEDIANS:
        of_all = rows(median, ROWS, seed=median)
        for name, way in ways().items():
            took = [[timed(way, lengths, device) for _ in range(2)] for lengths in of_all]
            tokens = sum(map(sum, of_all))
            first, again = (tokens / sum(each[number] for each in took) for number in (0, 1))
            line = {"way": name, "median_document_tokens": median, "rows": ROWS}
            speeds = {"first_tokens_per_s": round(first), "again_tokens_per_s": round(again)}
            if rank == 0:
                print(json.dumps(line | speeds | {"gpu": torch.cuda.get_device_name()}), flush=True)
    dist.destroy_process_group()


Way = Callable[[tuple[int, ...], list[Tensor]], Tensor]


def ways() -> dict[str, Way]:
    """What is compared; each takes the documents and a rank's queries, keys and values."""
    return {
        "ring, a call for each run of one length": partial(_ring, 0),
        "ring": partial(_ring, ring.LONG_TOKENS),
        "Ulysses": _ulysses,
    }


def _ring(long_tokens: int, lengths: tuple[int, ...], tensors: list[Tensor]) -> Tensor:
    ring.LONG_TOKENS = long_tokens
    of_calls = ring.Ring(
        held_lengths=_held(lengths), scaling=SIZE**-0.5, kernel="cudnn", group=dist.group.WORLD
    )
    return ring.attend_in_ring(*tensors, ring=of_calls)


def _ulysses(lengths: tuple[int, ...], tensors: list[Tensor]) -> Tensor:
    whole = tuple(length * RANKS for length in _held(lengths))
    how = partial(attend, document_lengths=whole, scaling=SIZE**-0.5, kernel="cudnn")
    return attend_sharded(*tensors, group=dist.group.WORLD, attend=how)


def _held(lengths: tuple[int, ...]) -> tuple[int, ...]:
    padded = SequenceLayout(lengths, ring_degree=RANKS).padded_lengths
    return tuple(length // RANKS for length in padded)


def timed(way: Way, lengths: tuple[int, ...], device: torch.device) -> float:
    """Seconds of one forward and backward pass."""
    tokens = sum(_held(lengths))
    tensors = [
        torch.randn(1, tokens, heads, SIZE, device=device, dtype=torch.bfloat16)
        .requires_grad_()
        .transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    output = way(lengths, tensors)
    torch.autograd.grad(output, tensors, torch.ones_like(output))
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    serve(int(os.environ["RANK"])) if "STORE" in os.environ else main()
