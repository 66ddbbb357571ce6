"""Benchmarks of attentions as somebody's GPU might have measured them: figures for tests."""

from collections.abc import Iterable
from typing import Any

from highwater.nouns import attention_bench as nouns
from highwater.units import GIB, MIB

BOTH: tuple[nouns.Direction, ...] = ("forward", "forward+backward")


def row(
    implementation: str,
    length: int | None,
    time_s: float | None = None,
    peak: int | None = None,
    *,
    result: nouns.BenchResult = "fits",
    mode: nouns.Mode = "single",
    direction: nouns.Direction = "forward",
    **more: Any,
) -> nouns.BenchRow:
    """A case; without a time one that did not fit."""
    if time_s is not None:
        after_qkv, reserved = (peak or 0) // 3, (peak or 0) + MIB
        each = {"after_qkv": after_qkv, "peak_allocated": peak, "peak_reserved": reserved}
        peaks = {f"{name}_bytes": (size,) * more.get("gpus", 1) for name, size in each.items()}
        kept_share = 0.05 if "sparse" in implementation else 1.0
        more = {"time_s": time_s, "passes": 3, "kept_share": kept_share, **peaks, **more}
    case = {"implementation": implementation, "mode": mode, "direction": direction}
    return nouns.BenchRow(**case, length_tokens=length, result=result, **more)


def bench(
    rows: Iterable[nouns.BenchRow],
    *,
    checks: tuple[nouns.BenchCheck, ...] = (),
    not_run: tuple[nouns.NotRun, ...] = (),
    machine: nouns.BenchMachine | None = None,
    is_whole: bool = True,
    **order: Any,
) -> nouns.AttentionBench:
    """A benchmark on one GPU of 80 GiB, or as ``order`` says."""
    rows = tuple(rows)
    directions = tuple(each for each in BOTH if any(row.direction == each for row in rows))
    implementations = tuple(dict.fromkeys(row.implementation for row in rows))
    asked = {"implementations": implementations, "directions": directions or BOTH}
    asked |= {"device": "cuda", "dtype": "bf16", "timeout_s": 60.0, **order}
    made: dict[str, Any] = {
        "made_at": "2026-02-03T04:05:06+00:00",
        "command": ("highwater", "bench", "attention"),
    }
    made |= {"checks": checks, "rows": rows, "not_run": not_run, "is_whole": is_whole}
    return nouns.AttentionBench(
        **made,
        order=nouns.BenchOrder(**asked),
        machine=machine or card("NVIDIA H100 80GB HBM3", 79 * GIB),
    )


def card(name: str, total: int) -> nouns.BenchMachine:
    return nouns.BenchMachine(
        device_name=name,
        memory_total_bytes=total,
        outside_bytes=512 * MIB,
        versions={"torch": "2.11.0", "cuda": "12.8"},
        kernel="cudnn",
    )


def measured(
    implementation: str, lengths: Iterable[int], *, token_s: float, token_bytes: int, **more: Any
) -> list[nouns.BenchRow]:
    return [
        row(implementation, length, token_s * length, token_bytes * length, **more)
        for length in lengths
    ]
