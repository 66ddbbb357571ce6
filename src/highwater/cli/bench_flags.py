"""The flags of ``highwater bench``: what is measured, of which shapes, and when it ends."""

import argparse
from typing import get_args

from highwater.cli.flags import add_trained
from highwater.nouns.attention_bench import DIRECTIONS, IMPLEMENTATIONS, BenchDtype
from highwater.nouns.settings import PATTERN_FIELDS
from highwater.nouns.trial import Device


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater bench``, but ``--json``, which every command has."""
    parser.add_argument(
        "subject", choices=("attention",), metavar="SUBJECT", help="what is measured: attention"
    )
    parser.add_argument(
        "--device", choices=get_args(Device), help="where; default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each GPU, or of each process on the CPU, its runtime included: 8GiB on a "
        "big card stands in for a small one; default: all, on the CPU what is free",
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        default=1,
        help="from 2 on also DataParallel, ring and Ulysses; on the CPU processes (default: 1)",
    )
    parser.add_argument(
        "--heads", metavar="N", type=int, default=2, help="query heads (default: 2)"
    )
    parser.add_argument(
        "--kv-heads", metavar="N", type=int, help="key and value heads; default: as many"
    )
    parser.add_argument(
        "--head-dim", metavar="N", type=int, default=32, help="size of a head (default: 32)"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(BenchDtype),
        help="default: bf16, on the CPU fp32, on GPUs without bf16 fp16",
    )
    parser.add_argument(
        "--same-qkv",
        action="store_true",
        help="queries, keys and values are one tensor, counted once: the published setting",
    )
    parser.add_argument(
        "--lengths",
        metavar="TOKENS",
        nargs="+",
        help="measure at these lengths alone; default: doubling, then bisection to the longest",
    )
    parser.add_argument(
        "--max-length",
        metavar="TOKENS",
        help="longest length to try; default: 16m tokens, on the CPU 4k",
    )
    parser.add_argument(
        "--implementations",
        metavar="NAME",
        nargs="+",
        default=[],
        help="who takes part, by name, family or published class: "
        f"{', '.join(IMPLEMENTATIONS)}; default: all",
    )
    add_trained(parser, PATTERN_FIELDS, what_for="")
    parser.add_argument(
        "--segment-lengths",
        metavar="TOKENS",
        nargs="+",
        help="dilated and block_sparse_ring_dilated: tokens of a segment of each branch; default: "
        "half the length and all of it",
    )
    parser.add_argument(
        "--dilation-rates",
        metavar="N",
        nargs="+",
        type=int,
        help="a rate for each of them, 2 for every second token; default: 1 2, and 4, 8, ... for "
        "more segments",
    )
    parser.add_argument("--only", choices=DIRECTIONS, help="one direction; default: both")
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="longest time of one pass; default: 60s, on the CPU 10s",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the report: JSON, Markdown, HTML and plots; default: a new one below "
        "./logs/attention",
    )
    parser.add_argument(
        "--allow-busy", action="store_true", help="also on GPUs that somebody else uses"
    )
