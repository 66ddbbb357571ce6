"""Where the time of a training step goes on a GPU: seconds of its kernels by kind.

``python benchmarks/step_kernels.py Qwen3-1.7B --contenders liger chunked --length 32768`` (one GPU)
profiles one step of each contender in one process, of the same weights and sequences as
``bench.step``, after one that compiles. A kernel's kind is read off its name, by ``KINDS``; the
JSON has every kernel's own seconds and calls, and ``--read`` prints the table of such a file.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from highwater.nouns.codec import CONFIG_BYTES, read_file
from process_environment import environment
from step import CONTENDERS, TimedStep, same_weights, sequences_of

KINDS: Mapping[str, str] = {
    "attention": r"flash|fmha|sdpa|cudnn::fusion",
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitk",
    "norms and rotations": r"layer_?norm|rms_?norm|gammabeta|rope|rotary",
    "optimizer": r"adam|multi_tensor|lpnorm",
    "copies": r"memcpy|memset|copy|cat_?array|chunk_cat|split_with_sizes|fillfunctor",
}
"""Pattern that a kernel's name contains, in any case of letters; the first that fits counts.

All other kernels are ``loss, gates and the rest``.
"""
REST = "loss, gates and the rest"
Kernels = Mapping[str, tuple[float, int]]
"""Seconds and number of calls of each kernel, by its name."""


def main() -> None:
    """Print the table; write the JSON document to ``--out``."""
    arguments = _parse()
    if arguments.read:
        print(table(json.loads(read_file(arguments.read, most_bytes=CONFIG_BYTES))["kernels"]))
        return
    model, length, micro_batches = arguments.model, arguments.length, arguments.micro_batches
    with tempfile.TemporaryDirectory() as folder:
        directory = same_weights(model, Path(folder))
        steps = {name: CONTENDERS[name](directory, length) for name in arguments.contenders}
        sequences = sequences_of(model, length, micro_batches)
        kernels = {name: profiled(step, sequences) for name, step in steps.items()}
    print(table(kernels), file=sys.stderr)
    what = {"model": model, "length_tokens": length, "micro_batches": micro_batches}
    text = json.dumps({"environment": environment()} | what | {"kernels": kernels}, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("model", nargs="?", help="directory or catalog name")
    asked.add_argument(
        "--read", type=Path, metavar="FILE", help="print the table of this JSON, profile nothing"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        default=["liger", "chunked"],
        help="who takes part",
    )
    parser.add_argument("--length", type=int, default=32_768, help="tokens of one sequence")
    parser.add_argument(
        "--micro-batches", type=int, default=2, help="sequences of a step, one after the other"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here")
    return parser.parse_args()


def profiled(step: TimedStep, sequences: list[tuple[Tensor, Tensor]]) -> Kernels:
    """The kernels of one step, the second: the first one compiles."""
    step(sequences)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(sequences)
        torch.cuda.synchronize()
    events: list[Any] = list(profiler.key_averages())
    return {
        event.key: (event.self_device_time_total / 1e6, event.count)
        for event in events
        if event.self_device_time_total
    }


def kind_of(kernel: str) -> str:
    """The kind of a kernel, or ``REST``."""
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), REST
    )


def table(kernels: Mapping[str, Kernels]) -> str:
    """A Markdown table of seconds and calls by contender: a row for each kind, and one for all."""
    lines = [
        f"| kernels | {' | '.join(f'{name}: s | calls' for name in kernels)} |",
        f"|{'---|' * (1 + 2 * len(kernels))}",
    ]
    for kind in (*KINDS, REST, "all"):
        cells = [kind]
        for found in kernels.values():
            own = [figures for name, figures in found.items() if kind in ("all", kind_of(name))]
            seconds, calls = (sum(figures) for figures in zip(*own, strict=True)) if own else (0, 0)
            cells += [f"{seconds:.3f}", f"{calls:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
