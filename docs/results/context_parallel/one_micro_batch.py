"""Measure steps of one micro-batch and of two on one H200, beside what was predicted of each.

``python docs/results/context_parallel/one_micro_batch.py`` (one H200, no network, random weights)
writes, for each case that ``one_micro_batch.json`` has no measurement of, what the formula and a
trace predict, unless it is there already, then what ``highwater try`` measured, and prints it as a
line of JSON; the table comes last. ``--predict`` (no GPU) writes the predictions alone, ``--table``
only prints, ``--only`` names cases. A case that fails says so in its line, and the next one begins.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import highwater
from highwater.memory.capacity import CellPrediction

GIB = 1024**3
HERE = Path(__file__).with_suffix(".json")
GPU = "1xH200-141GB"
TIMEOUT_S = 60
"""Longest time for one trial."""
_EDGE = 0.5
"""Where a budget lies between what one micro-batch is predicted to need and what two are."""


class Case(NamedTuple):
    """One trial."""

    model: str
    length_tokens: int
    micro_batches: int
    loss: str = "chunked"
    allocator: str = "expandable"
    strategy: str = "fsdp2"
    at_the_edge: bool = False
    """With a budget that one micro-batch is predicted to fit and two are not."""

    @property
    def name(self) -> str:
        """The case in words."""
        edge = " at the edge" * self.at_the_edge
        how = f"{self.loss} {self.allocator} {self.strategy}"
        return f"{self.model} {self.length_tokens} {how} x{self.micro_batches}{edge}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the trial, as predictions and commands name them."""
        named = {name: getattr(self, name) for name in ("loss", "allocator", "strategy")}
        return {**named, "micro_batches": self.micro_batches}


PLACES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("Qwen3-0.6B", 8_192, {}),
    ("Qwen3-0.6B", 32_768, {}),
    ("Qwen3-0.6B", 65_536, {}),
    ("Qwen3-0.6B", 32_768, {"loss": "full", "allocator": "native"}),
    ("Qwen3-0.6B", 32_768, {"strategy": "fsdp"}),
    ("Qwen3-1.7B", 8_192, {}),
    ("Qwen3-1.7B", 32_768, {}),
    ("Qwen3-1.7B", 65_536, {}),
    ("Qwen3-0.6B", 32_768, {"at_the_edge": True}),
    ("Qwen3-1.7B", 32_768, {"at_the_edge": True}),
)
CASES = [Case(*place, count, **how) for *place, how in PLACES for count in (1, 2)]


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--table", action="store_true", help="print the table alone")
    parser.add_argument("--only", nargs="+", help="words, one of which a case's name has")
    parser.add_argument("--no-trace", action="store_true", help="predict by formula alone")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(HERE.read_text()) if HERE.is_file() else {}
    for case in [] if arguments.table else CASES:
        if arguments.only and not any(word in case.name for word in arguments.only):
            continue
        row = rows.setdefault(case.name, {"case": case._asdict()})
        if "measured" in row or (arguments.predict and "formula" in row):
            continue
        if "formula" not in row:
            row |= _soft(
                "predicted", lambda case=case: _predicted(case, has_trace=not arguments.no_trace)
            )
            _write(rows)  # before anything is measured
        if not arguments.predict:
            row |= _soft("measured", lambda case=case, row=row: _measured(case, row))
            _write(rows)
        print(json.dumps({"name": case.name, **row}), flush=True)
    print(table(rows))


def _soft(what: str, do: Any) -> dict[str, Any]:
    """What is found, and how long it took; where it fails, why."""
    began = time.monotonic()
    try:
        found = do()
    # a script that goes on whatever one case does
    except Exception as error:  # noqa: BLE001
        found = {f"{what}_failed": " ".join(f"{type(error).__name__}: {error}".split())[:600]}
    return {**found, f"{what}_within_s": round(time.monotonic() - began, 1)}


def _predicted(case: Case, *, has_trace: bool) -> dict[str, Any]:
    """What the formula, and a trace, say of the GPU's memory; at the edge also its budget."""
    budget_bytes = _budget(case) if case.at_the_edge else None
    found: dict[str, Any] = {} if budget_bytes is None else {"budget_bytes": budget_bytes}
    for exact in (False, True) if has_trace else (False,):
        cell = _cell(case, budget_bytes, exact=exact)
        around = cell.interval
        found["trace" if exact else "formula"] = {
            "device_used_bytes": cell.device_used_bytes,
            "allocated_bytes": cell.footprint.allocated_bytes
            if cell.replayed is None
            else cell.replayed.peak_allocated_bytes,
            "low_bytes": around and around.low_bytes,
            "high_bytes": around and around.high_bytes,
            "fits": bool(cell.likely_edge_tokens),
            "peak_in": cell.peak_phase,
        }
    return found


def _cell(case: Case, budget_bytes: int | None, *, exact: bool) -> CellPrediction:
    (cell,) = highwater.predict(
        case.model,
        gpus=GPU,
        gpu_memory=budget_bytes,
        length=case.length_tokens,
        exact=exact,
        offload=False,
        **case.settings,
    ).cells
    return cell


def _budget(case: Case) -> int:
    """Bytes between what one micro-batch needs and what two do, in whole MiB."""
    one, two = (
        _cell(case._replace(micro_batches=count), None, exact=False).footprint.needed_bytes
        for count in (1, 2)
    )
    return int(one + _EDGE * (two - one)) >> 20 << 20


def _measured(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """What ``highwater try`` says."""
    words = [sys.executable, "-m", "highwater", "try", case.model, "--gpus", "1", "--json"]
    words += ["--length", str(case.length_tokens), "--timeout", f"{TIMEOUT_S}s"]
    for name, value in case.settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if "budget_bytes" in row:
        words += ["--memory", str(row["budget_bytes"])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=2 * TIMEOUT_S)
    if not done.stdout.strip():
        raise RuntimeError(done.stderr.strip())
    result = json.loads(done.stdout)["result"]
    rank = result["ranks"][0]
    measured = {
        name: rank[name]
        for name in ("losses", "gradient_norms", "step_times_s", "versions", "device_name")
    }
    told = {name: result[name] for name in ("outcome", "reason", "wall_s")}
    return {"measured": {**told, **rank["memory"], **measured}}


def _write(rows: dict[str, dict[str, Any]]) -> None:
    HERE.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One row a case, GiB; then how much one micro-batch saved."""
    head = (
        *("case", "budget", "outcome", "used, formula", "used, trace", "used, measured"),
        *("allocated, formula", "trace", "measured", "off by", "retries", "last step s", "losses"),
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for case in CASES:
        if case.name in rows:
            lines.append(f"| {case.name} | {' | '.join(_figures(rows[case.name]))} |")
    lines += ["", "allocated by two micro-batches less that by one, GiB: formula, trace, measured"]
    for case in CASES:
        pair = [rows.get(case._replace(micro_batches=count).name, {}) for count in (1, 2)]
        if case.micro_batches == 1 and not case.at_the_edge and all(pair):
            saved = (_saved(*pair, *path) for path in _ALLOCATED)
            lines.append(f"{case.name.removesuffix(' x1')}: {', '.join(saved)}")
    return "\n".join(lines)


_ALLOCATED = (
    ("formula", "allocated_bytes"),
    ("trace", "allocated_bytes"),
    ("measured", "peak_allocated_bytes"),
)


def _figures(row: dict[str, Any]) -> list[str]:
    measured = row.get("measured", {})
    allocated = [_at(row, *path) for path in _ALLOCATED]
    off = "-"
    if allocated[0] and allocated[2]:
        off = f"{allocated[0] / allocated[2] - 1:+.2%}"
    times, losses = measured.get("step_times_s"), measured.get("losses") or ()
    return [
        _gib(row.get("budget_bytes")),
        measured.get("outcome") or row.get("measured_failed", "-"),
        *(_gib(_at(row, by, "device_used_bytes")) for by in ("formula", "trace", "measured")),
        *map(_gib, allocated),
        off,
        str(measured.get("allocator_retries", "-")),
        f"{times[-1]:.2f}" if times else "-",
        ", ".join(f"{loss:.5f}" for loss in losses),
    ]


def _saved(one: dict[str, Any], two: dict[str, Any], *path: str) -> str:
    less, more = _at(one, *path), _at(two, *path)
    return "-" if less is None or more is None else f"{(more - less) / GIB:.3f}"


def _at(row: dict[str, Any], *path: str) -> int | None:
    value: Any = row
    for name in path:
        value = (value or {}).get(name)
    return value


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.3f}"


if __name__ == "__main__":
    main()
