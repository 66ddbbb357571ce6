"""What is traced on this machine, replayed, beside what an H200 measured: the same trials, from docs/results/find."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="the data plane needs the train extra")

import highwater
from highwater.prediction.affine import affine
from highwater.prediction.replay import Replayed, replay
from highwater.spec.events import EventLog, TraceOrder, Trainer
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.trial import Outcome, RankMemory, TrialResult, TrialSpec
from highwater.units import GIB

STUDIES = Path(__file__).parents[2] / "docs" / "results" / "find"
ALLOCATED_TOLERANCE = 0.001
RESERVED_TOLERANCE = {True: 0.015, False: 0.004}
"""Most are equal to the byte. By whether the trial had to give back what was cached, which depends on more than the order."""
AS_MEASURED = ("-c", "from highwater.engine import model, tracer; model.fuse_attentions = lambda _: 0; tracer.main()")
"""The trials were measured when norm and rotation were the family's own operators: their traces leave them so. It can go when the
studies are of an engine that fuses them."""
TRIALS = [
    pytest.param("Qwen3-0.6B", "full", 262_144, marks=pytest.mark.slow),
    pytest.param("Qwen3-0.6B", "chunked", 262_144, marks=pytest.mark.slow),
    pytest.param("Qwen3-1.7B", "full", 114_688, marks=pytest.mark.slow),
    pytest.param("Qwen3-1.7B", "full", 122_880, marks=pytest.mark.slow),
    pytest.param("Qwen3-4B", "full", 131_072, marks=pytest.mark.slow),
    pytest.param("Qwen3-4B", "full", 139_264, marks=pytest.mark.slow),
    pytest.param("Qwen3-4B", "chunked", 57_344, marks=pytest.mark.slow),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "loss", "length"), TRIALS)
def test_a_replayed_trace_has_the_peaks_that_were_measured(model: str, loss: str, length: int) -> None:
    measured = [
        (spec, result)
        for spec, result in trials()
        if (spec.model_name, spec.settings.loss, spec.length_tokens) == (model, loss, length)
    ]
    assert measured
    log = traced(measured[0][0], command=AS_MEASURED)
    for spec, result in measured:
        (rank,) = result.ranks
        assert rank.budget is not None
        ours = replay(
            log,
            allocator=spec.settings.allocator,
            capacity_bytes=rank.budget.allocator_cap_bytes,
            is_share=spec.memory_budget_bytes is not None,
        )
        assert ours.fits == (result.outcome is Outcome.FIT), spec.settings.label
        if ours.fits:
            check(ours, rank.memory)


def test_ranks_that_share_a_sequence_are_traced_and_hold_less_the_more_they_are() -> None:
    peaks = [
        replay(traced(small(Layout(gpus=gpus, ulysses_degree=gpus))), allocator="expandable").peak_allocated_bytes
        for gpus in (1, 2)
    ]
    assert 0.4 * peaks[0] < peaks[1] < 0.8 * peaks[0]


@pytest.mark.slow
def test_offload_leaves_the_device_a_layers_states_and_grpo_keeps_its_reference_on_the_host() -> None:
    plain, offloaded, grpo = (
        replay(traced(small(Layout(), **settings)), allocator="expandable").peak_allocated_bytes
        for settings in ({}, {"offload": True}, {"objective": "grpo"})
    )
    states = 16 * load_model("tiny").shape.parameters
    assert offloaded < plain - 0.8 * states
    assert abs(grpo - plain) < 0.2 * plain


def test_the_reference_systems_step_allocates_the_same_at_any_length_on_lines_over_its_tokens() -> None:
    settings = Settings(strategy="fsdp", objective="grpo", entropy="full", sequences_per_micro_batch=2)
    logs: dict[int, EventLog] = {}
    for length in (8192, 24_576, 32_768):
        spec = msgspec.structs.replace(small(Layout()), settings=settings, length_tokens=length)
        with TemporaryDirectory() as folder:
            target = Path(folder, "events.json")
            done = run(spec, target, ("-m", "highwater.engine.tracer"), trainer="trinity")
            assert done.returncode == 0, done.stderr
            logs[2 * length] = msgspec.json.decode(target.read_bytes(), type=EventLog)
    lines = affine(logs)  # which refuses a third length that is not on the line through two
    peaks = [replay(lines.at(tokens), allocator="expandable").peak_allocated_bytes for tokens in (2**16, 2**17)]
    vocabulary = load_model("tiny").shape.vocab_size
    assert (peaks[1] - peaks[0]) / 2**16 / vocabulary > 8, "four vectors of logits, and what else a token costs"


def small(layout: Layout, **settings: Any) -> TrialSpec:
    model = load_model("tiny")
    return TrialSpec(
        model_name=model.name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=layout,
        settings=Settings(**settings),
        length_tokens=65_536,
    )


def check(ours: Replayed, measured: RankMemory) -> None:
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_allocated_bytes > 16 * GIB
    assert ours.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=ALLOCATED_TOLERANCE)
    tolerance = RESERVED_TOLERANCE[bool(measured.allocator_retries)]
    assert ours.peak_reserved_bytes == pytest.approx(measured.peak_reserved_bytes, rel=tolerance)


@cache
def traced(spec: TrialSpec, command: tuple[str, ...] = ("-m", "highwater.engine.tracer")) -> EventLog:
    """A process of its own traces, as always."""
    with TemporaryDirectory() as folder:
        target = Path(folder, "events.json")
        done = run(spec, target, command)
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(target.read_bytes(), type=EventLog)


def run(
    spec: TrialSpec, target: Path, command: tuple[str, ...], trainer: Trainer = "highwater"
) -> "subprocess.CompletedProcess[str]":
    with TemporaryDirectory() as folder:
        source = Path(folder, "order.json")
        here = msgspec.structs.replace(spec, model_directory=load_model(spec.model_name).directory)
        source.write_bytes(msgspec.json.encode(TraceOrder(spec=here, trainer=trainer)))
        return subprocess.run([sys.executable, *command, str(source), str(target)], capture_output=True, text=True, check=False)


def trials() -> list[tuple[TrialSpec, TrialResult]]:
    """Every full trial on an H200 that told."""
    studies = [highwater.open_study(path) for path in sorted(STUDIES.glob("qwen3-*.jsonl"))]
    each = [(trial.spec, trial.result) for study in studies for trial in study.trials if trial.result is not None]
    return [(spec, result) for spec, result in each if result.outcome in (Outcome.FIT, Outcome.OUT_OF_MEMORY)]
