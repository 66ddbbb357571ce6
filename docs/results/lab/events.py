"""Traced events beside recorded ones: what a step allocates on fake tensors, and what it allocated
on an H200.

``python docs/results/lab/events.py`` (no GPU, half a minute a trial) traces the trials of
``histories.json.gz`` and writes ``events.json`` beside it; ``--table`` only prints.
"""

import argparse
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import histories
import msgspec

from highwater.model.model import load_model
from highwater.nouns.events import Allocate, Enter, EventLog, Free
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.trials.traced import CachedTracer
from highwater.trials.trial_process import cache_directory
from highwater.units import GIB, format_tokens

FILE = Path(__file__).with_suffix(".json")
ROUNDED_BYTES = 512
"""The allocator's smallest unit: sizes that round alike are alike to it."""
HEADINGS = (
    "trial",
    "phase",
    "allocations: recorded",
    "traced",
    "of the same size",
    "GiB allocated: recorded",
    "traced",
    "of the same size",
    "most alive, GiB: recorded",
    "traced",
)


def main() -> None:
    """Trace what is not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table, trace nothing")
    rows: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if not parser.parse_args().table:
        told = json.loads(gzip.decompress(histories.FILE.read_bytes()))["trials"]
        with CachedTracer(cache_directory("traces"), kernel="cudnn") as tracer:
            for name, case in told.items():
                if name not in rows:
                    traced = tracer(trial_spec(name))
                    rows[name] = beside(
                        phases(msgspec.convert(case["log"], EventLog)), phases(traced), case, traced
                    )
                    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def trial_spec(name: str) -> TrialSpec:
    """The recorded trial, on a machine without its GPU."""
    asked = dict(histories.TRIALS[name])
    model = load_model(asked.pop("model"))
    asked.pop("memory", None)
    return TrialSpec(
        model_name=model.name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        length_tokens=asked.pop("length"),
        attention_depth=asked.pop("attention_depth", None),
        layout=Layout(),
        settings=Settings(**asked),
    )


def phases(log: EventLog) -> dict[str, dict[str, Any]]:
    """By phase, of all steps together: the sizes that were allocated, and the most bytes that were
    alive.
    """
    found: dict[str, dict[str, Any]] = {}
    alive: dict[int, int] = {}
    held, now = 0, _phase(found, "setup")
    for event in log.events:
        match event:
            case Enter():
                now = _phase(found, event.phase)
            case Allocate() if event.bytes:
                size = -(-event.bytes // ROUNDED_BYTES) * ROUNDED_BYTES
                if (
                    event.bytes % 2
                    and histories.FIRST_MARK
                    <= event.bytes
                    < histories.FIRST_MARK + 2 * len(histories.MARKS)
                ):
                    continue  # a mark of the recording
                alive[event.id] = size
                held += size
                now["sizes"][size] += 1
                now["most"] = max(now["most"], held)
            case Free() if event.id in alive:
                held -= alive.pop(event.id)
            case _:
                pass
    return found


def _phase(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return found.setdefault(
        "setup" if name == "rehearsal" else name, {"sizes": Counter[int](), "most": 0}
    )


def beside(
    recorded: dict[str, Any], traced: dict[str, Any], case: dict[str, Any], log: EventLog
) -> dict[str, Any]:
    """Phase by phase: how many allocations and bytes there are, and how many have one of the same
    size on the other side.
    """
    rows = {}
    for phase in traced:
        ours, real = traced[phase], recorded.get(phase, {"sizes": Counter(), "most": 0})
        both = ours["sizes"] & real["sizes"]
        rows[phase] = {
            side: {
                "allocations": sizes.total(),
                "bytes": sum(size * count for size, count in sizes.items()),
                "most_bytes": most,
            }
            for side, sizes, most in (
                ("recorded", real["sizes"], real["most"]),
                ("traced", ours["sizes"], ours["most"]),
                ("both", both, 0),
            )
        }
    return {"phases": rows, "versions": {"recorded": case["versions"], "traced": log.versions}}


def table(rows: dict[str, Any]) -> str:
    """A line for each trial and phase, then the whole."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    total: Counter[str] = Counter()
    for name, row in rows.items():
        for phase, sides in row["phases"].items():
            counts = [
                format_tokens(sides[side]["allocations"]) for side in ("recorded", "traced", "both")
            ]
            sizes = [f"{sides[side]['bytes'] / GIB:.2f}" for side in ("recorded", "traced", "both")]
            most = [f"{sides[side]['most_bytes'] / GIB:.3f}" for side in ("recorded", "traced")]
            lines.append(f"| {' | '.join((name, phase, *counts, *sizes, *most))} |")
            for side in sides:
                total[side] += sides[side]["bytes"]
                total[f"{side} allocations"] += sides[side]["allocations"]
    if total["recorded"]:
        for side, other in (("recorded", "traced"), ("traced", "recorded")):
            allocations = total["both allocations"] / total[f"{side} allocations"]
            share = total["both"] / total[side]
            lines.append(
                f"\nof {total[f'{side} allocations']:,} {side} allocations {allocations:.2%} have "
                f"a {other} one of their size "
                f"in the same phase, of their bytes {share:.2%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
