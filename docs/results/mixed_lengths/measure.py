"""Attention of one layer over packed rows whose documents are of different lengths, on one GPU: a
call for each document beside the few calls of engine/attention/mixed_lengths.

    python docs/results/mixed_lengths/measure.py --rows 4 > docs/results/mixed_lengths/record.ndjson
    python docs/results/mixed_lengths/measure.py --table

Every way attends each row twice, forward and backward. A line of JSON says what the first and the
second time took, what the GPU lost to the kernels for good, and how far output and gradients are
from those of the first way. Rows are of Qwen3-0.6B's heads; ``--long`` tries thresholds.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from highwater.engine.attention.dense import attend
from highwater.engine.attention.mixed_lengths import attend_mixed

RECORD = Path(__file__).with_name("record.ndjson")
HEADS, KV_HEADS, SIZE = 16, 8, 128
ROW = 65_536


def rows(median: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Rows of at most ``ROW`` tokens, of documents with a long tail, the longest first."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        lengths: list[int] = []
        while sum(lengths) < ROW - 64:
            length = int(draw.lognormvariate(0, 1.3) * median)
            lengths.append(max(16, min(length, ROW - sum(lengths))))
        found.append(tuple(sorted(lengths, reverse=True)))
    return found


def each_alone(*tensors: Tensor, document_lengths: tuple[int, ...], **how: Any) -> Tensor:
    """A call for each document, as every row had it before."""
    parts, start = [], 0
    for length in document_lengths:
        own = [tensor[:, :, start : start + length] for tensor in tensors]
        parts.append(attend(*own, document_lengths=(length,), **how))
        start += length
    return torch.cat(parts, dim=1)


def timed(way: Callable[..., Tensor], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Seconds of one forward and backward pass, its peak, and its gradients."""
    torch.manual_seed(sum(lengths))
    tensors = [
        torch.randn(1, sum(lengths), heads, SIZE, device="cuda", dtype=torch.bfloat16)
        .requires_grad_()
        .transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    upstream = torch.randn(1, sum(lengths), HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    output = way(*tensors, document_lengths=lengths, scaling=SIZE**-0.5)
    gradients = torch.autograd.grad(output, tensors, upstream)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before
    return {"s": took, "peak_bytes": peak, "found": [output.detach(), *gradients]}


def ways(long: list[int]) -> dict[str, Callable[..., Tensor]]:
    """What is compared."""
    mixed = {
        f"mixed, cuDNN from {each}": partial(attend_mixed, kernel="cudnn", long_tokens=each)
        for each in long
    }
    flash = {"flash attention alone": partial(attend_mixed, kernel="flash")}
    return flash | mixed | {"a call for each": partial(each_alone, kernel="cudnn")}


def deviation(ours: Tensor, expected: Tensor) -> float:
    """How far off, as a part of the norm."""
    mine, wanted = ours.cuda().float(), expected.cuda().float()
    return float((mine - wanted).norm() / wanted.norm())


def outside() -> int:
    """Bytes of the GPU that are neither free nor PyTorch's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measured(median: int, count: int, long: list[int]) -> list[dict[str, Any]]:
    """A line for each way, over the same rows."""
    lines = []
    of_all = rows(median, count, seed=median)
    timed(partial(attend, kernel="cudnn"), (ROW,))  # libraries are loaded
    whole = timed(partial(attend, kernel="cudnn"), (ROW,))
    timed(partial(attend_mixed, kernel="flash"), (ROW // 2, ROW // 2))
    expected = None
    for name, way in reversed(list(ways(long).items())):
        before = outside()
        first, second, peaks, found = [], [], [], []
        for lengths in of_all:
            first.append(timed(way, lengths)["s"])
            again = timed(way, lengths)
            second.append(again["s"])
            peaks.append(again["peak_bytes"])
            found.append([tensor.cpu() for tensor in again.pop("found")])
        lost = outside() - before
        expected = expected or found
        off = max(
            deviation(a, b)
            for ours, theirs in zip(found, expected, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        lines.append(
            {
                "way": name,
                "median_document_tokens": median,
                "rows": len(of_all),
                "documents": sum(map(len, of_all)),
                "first_s": statistics.mean(first),
                "again_s": statistics.mean(second),
                "lost_bytes": lost,
                "peak_bytes": max(peaks),
                "peak_of_one_document_bytes": whole["peak_bytes"],
                "off": off,
            }
        )
    return lines


def main() -> int:
    """Measure, or print what is recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    parser.add_argument("--long", type=int, nargs="+", default=[8192])
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--medians", type=int, nargs="+", default=[400, 4096, 12_288])
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(line) for line in RECORD.read_text().splitlines()]))
        return 0
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for median in arguments.medians:
        for line in measured(median, arguments.rows, arguments.long):
            print(json.dumps(about | line), flush=True)
    return 0


def table(lines: list[dict[str, Any]]) -> str:
    """What was recorded, a row for each way."""
    shown = [
        "| documents of | way | first time | again | lost to kernels | peak over one document's |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        cells = (
            f"{line['median_document_tokens']:,} tokens",
            line["way"],
            f"{1e3 * line['first_s']:.0f} ms",
            f"{1e3 * line['again_s']:.0f} ms",
            f"{line['lost_bytes'] / 2**20:.0f} MiB",
            f"{line['peak_bytes'] / line['peak_of_one_document_bytes']:.2f}",
        )
        shown.append(f"| {' | '.join(cells)} |")
    return "\n".join(shown)


if __name__ == "__main__":
    sys.exit(main())
