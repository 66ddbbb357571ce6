"""Traces in processes of their own: made once, kept."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import psutil
import pytest

import highwater
from highwater.errors import MachineError, UsageError
from highwater.memory.capacity import Prediction
from highwater.memory.trace.replay import replay, timeline
from highwater.model.model import load_model
from highwater.nouns.codec import to_json
from highwater.nouns.events import Allocate, TraceOrder
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.trials import traced
from highwater.trials.traced import CachedTracer, fullest_rank, source_files
from highwater.units import GIB
from trial_specs import trial_of

TINY = load_model("tiny")


def trial(**changes) -> TrialSpec:
    return trial_of("tiny", **changes)


@pytest.mark.usefixtures("forks")
def test_a_trace_is_kept_for_whoever_asks_and_a_damaged_one_made_again(tmp_path, monkeypatch):
    made: list[TrialSpec] = []
    tracer = CachedTracer(tmp_path, kernel="cudnn", on_trace=made.append)
    first = tracer(trial())
    assert first.events
    assert (
        tracer(trial(settings=Settings(allocator="expandable"), memory_budget_bytes=20 * GIB))
        == first
    )
    assert len(made) == 1, "no event depends on the allocator"
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:100], whole[:500] + bytes(600) + whole[1100:], b""):
        # cut, overwritten, emptied
        kept.write_bytes(damaged)
        assert traced._read(kept) is None
    monkeypatch.setattr(
        CachedTracer,
        "_trace",
        lambda *_: b'{"source":"traced","versions":{},"operators":[],"events":[]}',
    )
    assert tracer(trial()).events == ()
    assert len(made) == 2
    assert tracer(trial()).events == ()
    assert len(made) == 2
    monkeypatch.setattr(traced, "_sources", lambda: "another engine")
    tracer(trial())
    assert len(made) == 3


def test_the_tracer_imports_nothing_that_its_key_does_not_name(tmp_path):
    order, events = tmp_path / "order.json", tmp_path / "events.json"
    order.write_text(to_json(TraceOrder(spec=trial(), rank=0)))
    command = [sys.executable, "-X", "importtime", *("-m", traced._TRACER, order, events)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert events.is_file()
    package = Path(highwater.__file__).parent
    imported = set(re.findall(r"^import time:.*\| +(highwater[\w.]*)$", done.stderr, re.MULTILINE))
    digested = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in source_files(package)
    }
    assert {"highwater", "highwater.engine.models.loss", "highwater.nouns.trial"} <= imported
    assert imported <= digested
    rooms = {name.split(".")[1] for name in digested if "." in name}
    assert not rooms & {"cli", "pages", "api", "search", "recommendation", "trials", "memory"}


def test_trials_that_allocate_the_same_have_one_trace_when_asked_at_once(tmp_path, monkeypatch):
    made: list[TrialSpec] = []
    tracer = CachedTracer(tmp_path, kernel="cudnn", on_trace=made.append)

    def slow(*_: object) -> bytes:
        sleep(0.5)
        return b'{"source":"traced","versions":{},"operators":[],"events":[]}'

    monkeypatch.setattr(CachedTracer, "_trace", slow)
    both = [trial(settings=Settings(allocator=allocator)) for allocator in ("native", "expandable")]
    assert len(tracer.unmade([*both, trial(length_tokens=8192)])) == 2
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(tracer, both)
    assert one == other
    assert len(made) == 1
    assert tracer.unmade(both) == set()


def recorded(folder: Path, share: float) -> Path:
    """A study of two trials of ``tiny`` on a GPU, and a third that nobody finished."""
    path = folder / "mine.jsonl"
    asked = {
        "gpus": [1],
        "memory": "16GiB",
        "device": "cuda",
        "loss": "full",
        "allocator": "native",
        "dry_run": True,
    }
    highwater.find(
        "tiny", start_length="32k", resolution="32k", max_length="128k", study=str(path), **asked
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["schema_version"] = 2  # whose lines have no checksums
    for line in lines:
        del line["checksum"]
        line.get("question", {}).update(simulated=False)
        if "result" in line:
            line["result"]["simulated"] = False
            rank = line["result"]["ranks"][0]
            rank |= {"attention_kernel": "flash", "device_name": "NVIDIA A100-SXM4-80GB"}
            rank["memory"]["device_used_bytes"] = round(share * rank["memory"]["device_used_bytes"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.usefixtures("forks")
@pytest.mark.timeout(300)
def test_traces_learn_from_own_trials_each_traced_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study, heard, made = recorded(tmp_path, 2.0), [], []
    asked = {
        "gpus": "A100-80GB",
        "exact": True,
        "length": "32k",
        "loss": "full",
        "allocator": "native",
    }

    def predicted() -> Prediction:
        heard.clear()
        made.clear()
        return highwater.predict(
            "tiny",
            calibrate_with=[study],
            on_calibrate=lambda *counts: heard.append(counts),
            on_trace=made.append,
            **asked,
        )

    taught = predicted()
    assert heard == [(2, 2)]
    assert [spec.length_tokens for spec in made[:2]] in ([32_768, 65_536], [65_536, 32_768])
    assert taught.calibration.own_trials >= 1
    (factors,) = taught.calibration.factors
    assert factors.upper > 1.1, "twice what was predicted, of one trial at least"
    assert predicted() == taught
    assert heard == [(2, 0)]
    assert not made
    moved = json.loads(study.read_text().splitlines()[0])["question"]["model"]["directory"]
    study.write_text(study.read_text().replace(moved, str(tmp_path / "elsewhere")))
    assert predicted() == taught, "the catalog has the same configuration"
    study.write_text(study.read_text().replace(TINY.config_digest, "0123456789abcdef"))
    with pytest.raises(UsageError, match=r"tiny, .*config\.json .*elsewhere"):
        predicted()


@pytest.mark.timeout(120)
def test_nothing_is_traced_any_more_once_a_calibration_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study, made = recorded(tmp_path, 2.0), []
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(spec: TrialSpec) -> None:
        made.append(spec)
        if len(made) == 1:  # two are traced at once
            signal.pthread_kill(main, signal.SIGINT)

    others = psutil.Process().children(recursive=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            highwater.predict(
                "tiny",
                gpus="A100-80GB",
                exact=True,
                length="32k",
                calibrate_with=[study],
                on_trace=interrupt,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert made
    assert not list((tmp_path / "cache").rglob("*.json.gz")), "each would take seconds"
    assert set(psutil.Process().children(recursive=True)) <= set(others)


@pytest.mark.usefixtures("forks")
def test_a_tracer_that_fails_is_told_with_its_last_words(tmp_path):
    tracer = CachedTracer(tmp_path, kernel="cudnn")
    with pytest.raises(MachineError, match=r"exited with 1: .*nowhere"):
        tracer(trial(model_directory=str(tmp_path / "nowhere")))
    assert list(tmp_path.iterdir()) == []


def test_the_fullest_rank_has_no_prompt():
    assert [
        fullest_rank(trial(layout=Layout(gpus=4, ulysses_degree=degree))) for degree in (1, 2, 4)
    ] == [0, 1, 3]


@pytest.mark.usefixtures("forks")
def test_a_trace_names_modules_and_pytorchs_own_viewer_reads_its_timeline(tmp_path):
    from torch.cuda import _memory_viz

    log = CachedTracer(tmp_path, kernel="cudnn")(
        trial(settings=Settings(loss="chunked"), length_tokens=65_536)
    )
    peak = replay(log, allocator="expandable")
    names = {alive.module for alive in peak.alive}
    assert "model.layers.*" in names
    assert "model.embed_tokens" in names
    assert not any("wrapped" in name or "causal_lm" in name for name in log.modules)
    # ours
    text = _memory_viz.trace(pickle.loads(timeline(log, allocator="expandable")))  # noqa: S301
    allocated = sum(event.bytes > 0 for event in log.events if isinstance(event, Allocate))
    assert text.count(" = MEM[") == allocated + 2, "and cuBLAS's two workspaces"
    assert text.count("free completed") == text.count("del ")
