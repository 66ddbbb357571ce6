"""Trials of models that a test describes, their traces, and what is alive in one."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.launch.tracing import fullest_rank
from highwater.spec.codec import from_json, to_json
from highwater.spec.events import Allocate, Enter, EventLog, Free, GiveBack, TraceOrder
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.trial import TrialSpec

_ONE_AFTER_THE_OTHER = """
import os, sys
from pathlib import Path
from highwater.engine import tracer
for order in sys.argv[1:]:
    if not os.fork():
        sys.argv[1:] = [order, str(Path(order).with_suffix('.events'))]
        tracer.main()
    if os.wait()[1]:
        sys.exit(order)
"""
"""Each in a process of its own, as always, which here need not import everything anew."""
Kind = tuple[str, str, str]


def trial(directory: Path, config: Mapping[str, Any], **fields: Any) -> TrialSpec:
    """On one GPU, vanilla, unless ``fields`` say otherwise."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(str(directory))
    named = {"model_name": model.name, "model_directory": model.directory, "config_digest": model.config_digest}
    return TrialSpec(**{**named, "device": "cuda", "layout": Layout(), "settings": Settings(), **fields})


def traced(trials: Mapping[str, TrialSpec], folder: Path) -> dict[str, EventLog]:
    """What the fullest rank of each trial allocates and frees, by the trial's name."""
    orders = [folder / f"{number}.order" for number in range(len(trials))]
    for order, spec in zip(orders, trials.values(), strict=True):
        order.write_text(to_json(TraceOrder(spec=spec, rank=fullest_rank(spec))))
    done = subprocess.run(
        [sys.executable, "-c", _ONE_AFTER_THE_OTHER, *map(str, orders)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: from_json(order.with_suffix(".events").read_bytes(), EventLog) for name, order in zip(trials, orders, strict=True)
    }


def alive_at(log: EventLog, phase: str) -> Counter[Kind]:
    """Bytes by kind, as this phase begins for the first time."""
    born, alive = "setup", dict[int, tuple[Kind, int]]()
    for event in log.events:
        match event:
            case Allocate():
                alive[event.id] = (log.operators[event.operator], born, log.modules[event.module]), event.bytes
            case Free() | GiveBack():
                alive.pop(event.id, None)
            case Enter():
                if event.phase == phase:
                    break
                born = event.phase
            case _:
                pass
    sizes: Counter[Kind] = Counter()
    for kind, size in alive.values():
        sizes[kind] += size
    return sizes


def requested_bytes(log: EventLog) -> dict[str, int]:
    """The most that is asked for at once, by phase: no rounding, no allocator."""
    most: Counter[str] = Counter()
    phase, alive = "setup", dict[int, int]()
    for event in log.events:
        match event:
            case Allocate():
                alive[event.id] = event.bytes
                most[phase] = max(most[phase], sum(alive.values()))
            case Free() | GiveBack():
                alive.pop(event.id, None)
            case Enter():
                phase = event.phase
            case _:
                pass
    return dict(most)
