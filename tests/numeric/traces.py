"""Trials of models that a test describes, their traces, and what is alive in one."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.model.model import ModelShape, load_model
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack, TraceOrder
from highwater.nouns.trial import TrialSpec
from highwater.trials.traced import fullest_rank
from tiny_models import write_model
from torch_server import SERVER
from trial_specs import trial_of

Kind = tuple[str, str, str]
SHARED = {"gpus": 2, "ulysses_degree": 2}
RING = {"gpus": 2, "ring_degree": 2}


def trial(directory: Path, config: Mapping[str, Any], **fields: Any) -> TrialSpec:
    return trial_of(write_model(directory, config), **fields)


class Traces(dict[str, EventLog]):
    """What the fullest rank of each trial allocates and frees, by the trial's name."""

    def __init__(self, trials: Mapping[str, TrialSpec], folder: Path) -> None:
        super().__init__()
        self._trials = dict(trials)
        self._folder = folder

    def __missing__(self, name: str) -> EventLog:
        spec = self._trials[name]
        order = TraceOrder(spec=spec, rank=fullest_rank(spec))
        self[name] = log = trace(order, self._folder / str(len(self)))
        return log


def traced(trials: Mapping[str, TrialSpec], folder: Path) -> Traces:
    """The traces of these trials, each made once."""
    return Traces(trials, folder)


def shape_of(spec: TrialSpec) -> ModelShape:
    return load_model(spec.model_directory).shape


def peak_bytes(log: EventLog) -> int:
    return replay(log, allocator="expandable").peak_allocated_bytes


def formula_bytes(spec: TrialSpec) -> int:
    step = Step(shape_of(spec), spec.settings, spec.layout, length_tokens=spec.length_tokens)
    return upper_footprint(step).allocated_bytes


def trace(order: TraceOrder, path: Path) -> EventLog:
    """What is traced of an order; ``path``, with other endings, is where it is written."""
    source, target = (path.with_suffix(f".{end}") for end in ("order", "events"))
    source.write_text(to_json(order))
    words = ("tracer", str(source), str(target))
    done = SERVER.run("highwater.engine.tracer.tracer:main", *words, within_s=600)
    assert done.returncode == 0, done.stderr
    return from_json(target.read_bytes(), EventLog)


def alive_at(log: EventLog, phase: str) -> Counter[Kind]:
    born, alive = "setup", dict[int, tuple[Kind, int]]()
    for event in log.events:
        match event:
            case Allocate():
                alive[event.id] = (
                    (log.operators[event.operator], born, log.modules[event.module]),
                    event.bytes,
                )
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
    most: Counter[str] = Counter()
    phase, alive, total = "setup", dict[int, int](), 0
    for event in log.events:
        match event:
            case Allocate():
                alive[event.id] = event.bytes
                total += event.bytes
                most[phase] = max(most[phase], total)
            case Free() | GiveBack():
                total -= alive.pop(event.id, 0)
            case Enter():
                phase = event.phase
            case _:
                pass
    return dict(most)
