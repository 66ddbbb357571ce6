"""Traces in processes of their own: made once, kept, and made again when what is traced has changed or the file is damaged."""

import pickle
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the data plane needs the train extra")

import highwater
from highwater.errors import MachineError
from highwater.launch import tracing
from highwater.launch.tracing import CachedTracer, fullest_rank
from highwater.prediction.replay import replay
from highwater.prediction.timeline import timeline
from highwater.spec.events import Allocate
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.trial import TrialSpec
from highwater.units import GIB

TINY = load_model("tiny")


def trial(**changes) -> TrialSpec:
    fields = {
        "model_name": TINY.name,
        "model_directory": TINY.directory,
        "config_digest": TINY.config_digest,
        "device": "cuda",
        "layout": Layout(),
        "settings": Settings(),
        "length_tokens": 4096,
    }
    return TrialSpec(**(fields | changes))


def test_a_trace_is_kept_for_whoever_asks_the_same_and_a_damaged_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TrialSpec] = []
    tracer = CachedTracer(tmp_path, kernel="cudnn", on_trace=made.append)
    first = tracer(trial())
    assert first.events
    assert tracer(trial(settings=Settings(allocator="expandable"), memory_budget_bytes=20 * GIB)) == first
    assert len(made) == 1, "no event depends on the allocator"
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:100], whole[:500] + bytes(600) + whole[1100:], b""):  # cut, overwritten, emptied
        kept.write_bytes(damaged)
        assert tracing._read(kept) is None
    monkeypatch.setattr(CachedTracer, "_trace", lambda *_: b'{"source":"traced","versions":{},"operators":[],"events":[]}')
    assert tracer(trial()).events == ()
    assert len(made) == 2
    assert tracer(trial()).events == ()
    assert len(made) == 2
    monkeypatch.setattr(tracing, "_sources", lambda: "another engine")
    tracer(trial())
    assert len(made) == 3


def test_a_tracer_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    tracer = CachedTracer(tmp_path, kernel="cudnn")
    with pytest.raises(MachineError, match=r"the tracer ended with exit code 1: .*nowhere"):
        tracer(trial(model_directory=str(tmp_path / "nowhere")))
    assert list(tmp_path.iterdir()) == []


def test_the_fullest_rank_has_no_prompt() -> None:
    assert [fullest_rank(trial(layout=Layout(gpus=4, ulysses_degree=degree))) for degree in (1, 2, 4)] == [0, 1, 3]


def test_a_trace_names_modules_and_pytorchs_own_viewer_reads_its_timeline(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    log = CachedTracer(tmp_path, kernel="cudnn")(trial(settings=Settings(loss="chunked"), length_tokens=65_536))
    peak = replay(log, allocator="expandable")
    names = {alive.module for alive in peak.alive}
    assert "model.layers.*" in names
    assert "model.embed_tokens" in names
    assert not any("wrapped" in name or "causal_lm" in name for name in log.modules)
    text = _memory_viz.trace(pickle.loads(timeline(log, allocator="expandable")))  # noqa: S301 -- ours
    allocated = sum(event.bytes > 0 for event in log.events if isinstance(event, Allocate))
    assert text.count(" = MEM[") == allocated + 2, "and cuBLAS's two workspaces"
    assert text.count("free completed") == text.count("del ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_capacities_are_predicted_by_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    heard: list[int] = []
    prediction = highwater.predict(
        "tiny",
        gpus="A100-80GB",
        gpu_memory="16GiB",
        exact=True,
        loss="full",
        start_length="16k",
        resolution="16k",
        max_length="512k",
        on_trace=lambda spec: heard.append(spec.length_tokens),
    )
    assert prediction.method == "trace"
    for cell in prediction.cells:
        assert cell.replayed is not None
        assert cell.capacity_tokens > 0
        assert cell.does_not_fit_tokens is not None
        assert 0 <= cell.headroom_bytes < 16 * GIB
    assert heard
