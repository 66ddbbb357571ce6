"""Traced and replayed peaks beside those of every full trial in docs/results/find; writes JSON, prints the table.

``python docs/results/predict/traced.py`` (no GPU, half a minute a trace) goes on with ``traced.json`` beside it; ``--table`` only
prints.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

import highwater
from highwater.prediction.replay import replay
from highwater.spec.events import EventLog, TraceOrder
from highwater.spec.model import load_model
from highwater.spec.trial import Outcome, TrialResult, TrialSpec
from highwater.units import GIB, format_tokens

STUDIES = Path(__file__).parents[1] / "find"
FILE = Path(__file__).with_suffix(".json")
HEADINGS = ("model", "rung", "length", "allocated: traced", "measured", "off by", "reserved: traced", "measured", "off by")


def main() -> None:
    """Trace what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table, trace nothing")
    rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    logs: dict[tuple[str, str, int], EventLog] = {}
    for spec, result in () if parser.parse_args().table else told():
        if spec.key in rows:
            continue
        same = (spec.model_name, spec.settings.loss, spec.length_tokens)
        if same not in logs:
            logs = {same: traced(spec)}
        rows[spec.key] = beside(spec, result, logs[same])
        FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def told() -> Iterator[tuple[TrialSpec, TrialResult]]:
    """Full trials that say whether their length fits; those of one model and length together."""
    studies = [highwater.open_study(path) for path in STUDIES.glob("qwen3-*.jsonl")]
    each = [(trial.spec, trial.result) for study in studies for trial in study.trials if trial.result is not None]
    order = sorted(each, key=lambda pair: (pair[0].model_name, pair[0].settings.loss, pair[0].length_tokens, pair[0].key))
    return ((spec, result) for spec, result in order if result.outcome in (Outcome.FIT, Outcome.OUT_OF_MEMORY))


def traced(spec: TrialSpec) -> EventLog:
    """What the tracer, a process of its own, writes of a trial."""
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "order.json"), Path(folder, "events.json")
        here = msgspec.structs.replace(spec, model_directory=load_model(spec.model_name).directory)
        source.write_bytes(msgspec.json.encode(TraceOrder(spec=here)))
        subprocess.run([sys.executable, "-m", "highwater.engine.tracer", source, target], check=True)
        return msgspec.json.decode(target.read_bytes(), type=EventLog)


def beside(spec: TrialSpec, result: TrialResult, log: EventLog) -> dict[str, Any]:
    """The replay with the trial's own capacity, and what was measured."""
    (rank,) = result.ranks
    capacity = rank.budget.allocator_cap_bytes if rank.budget is not None else None
    is_share = spec.memory_budget_bytes is not None
    ours = replay(log, allocator=spec.settings.allocator, capacity_bytes=capacity, is_share=is_share)
    return {
        "model": spec.model_name,
        "rung": spec.settings.label,
        "length_tokens": spec.length_tokens,
        "capacity_bytes": capacity,
        "traced": {
            "fits": ours.fits,
            "phase": ours.phase,
            "peak_allocated_bytes": ours.peak_allocated_bytes,
            "peak_reserved_bytes": ours.peak_reserved_bytes,
            "retries": ours.retries,
            "versions": log.versions,
        },
        "measured": {
            "fits": result.outcome is Outcome.FIT,
            "phase": rank.failure.phase if rank.failure else None,
            "peak_allocated_bytes": rank.memory.peak_allocated_bytes,
            "peak_reserved_bytes": rank.memory.peak_reserved_bytes,
            "retries": rank.memory.allocator_retries,
        },
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A row per trial; those that ran out say where."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for row in rows.values():
        ours, known = row["traced"], row["measured"]
        names = [row["model"], row["rung"], format_tokens(row["length_tokens"])]
        if ours["fits"] and known["fits"]:
            pairs = [(ours[name], known[name]) for name in ("peak_allocated_bytes", "peak_reserved_bytes")]
            figures = [text for a, b in pairs for text in (f"{a / GIB:.2f}", f"{b / GIB:.2f}", f"{a / b - 1:+.3%}")]
        else:
            ends = ["fits" if side["fits"] else f"runs out in {side['phase']}" for side in (ours, known)]
            figures = [*ends, "", "", "", ""]
        lines.append(f"| {' | '.join((*names, *figures))} |")
    right = sum(row["traced"]["fits"] == row["measured"]["fits"] for row in rows.values())
    return "\n".join((*lines, "", f"{right} of {len(rows)} trials are told right: whether they fit"))


if __name__ == "__main__":
    main()
