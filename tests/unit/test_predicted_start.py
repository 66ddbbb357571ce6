"""Predicted start: a predicted edge costs two trials where it is right and changes no answer where
it is wrong; refused files.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import without_checksums

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import MemoryLimit, Prediction
from highwater.memory.predictor import predict_cells
from highwater.memory.trainers import MEMORY
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.events import Allocate, Enter, EventLog
from highwater.nouns.hardware import Gpu
from highwater.nouns.layout import Layout
from highwater.nouns.request import Request
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question, Study
from highwater.nouns.trial import TrialSpec
from highwater.search import start_length as predicted_start
from highwater.search.bracket import HINT_COST
from highwater.search.scheduler import search_cells
from highwater.trials.simulated import SimulatedRunner
from highwater.units import GIB
from trial_specs import answers_among, fits_up_to, grid_of, question_on

FOUND = Path(__file__).parents[2] / "docs" / "results" / "find"
STEP, SIZE = 1000, 64
ASKED: dict[str, Any] = {
    "gpus": [1],
    "memory": "79.15GiB",
    "allocator": "expandable",
    "loss": "full",
    "offload": False,
    "activations": "gpu",
    "ulysses": [1],
}


def ask(*cells: Cell, **changes: Any) -> Question:
    return question_on(grid_of(STEP, SIZE * STEP), *cells, device_total_bytes=80 * GIB, **changes)


@given(st.integers(0, SIZE), st.integers(0, 2 * SIZE))
def test_a_predicted_edge_costs_two_trials_where_it_is_right_and_no_answer_where_it_is_not(
    capacity, expected
):
    cell = Cell(layout=Layout(), settings=Settings())
    question = ask(cell)
    runner = SimulatedRunner(fits_up_to(capacity * STEP))
    events = search_cells(question, runner, expected={cell: expected * STEP}.get)
    (answer,) = answers_among(events)
    assert answer.capacity_tokens == capacity * STEP
    if expected == capacity:
        assert answer.trials <= 2
    assert answer.trials <= 2 * max(1, capacity).bit_length() + 2 + HINT_COST


def predicted(folder: Path, **changes: Any) -> Path:
    """A file of ``highwater predict --json``."""
    asked = {
        "gpus": "1xH200-141GB",
        "gpu_memory": "79.15GiB",
        "allocator": "expandable",
        "loss": "full",
        "offload": False,
        "activations": "gpu",
    }
    asked |= changes
    path = folder / "prediction.json"
    path.write_text(
        to_json(highwater.predict(asked.pop("model", "Qwen3-0.6B"), **asked)), encoding="utf-8"
    )
    return path


def find(path: Path, **changes: Any) -> Study:
    asked = {
        "model": "Qwen3-0.6B",
        "device": "cuda",
        "dry_run": True,
        "prediction": str(path),
        **ASKED,
    } | changes
    return highwater.find(**asked)


@pytest.mark.parametrize("has_intervals", [True, False])
def test_the_first_trial_of_a_search_is_the_likely_length_in_the_file(tmp_path, has_intervals):
    """A file from before there were intervals names it as its capacity."""
    path = predicted(tmp_path)
    told = json.loads(path.read_text())
    if not has_intervals:
        del told["calibration"], told["cells"][0]["likely_tokens"], told["cells"][0]["interval"]
    told["cells"][0]["likely_tokens" if has_intervals else "capacity_tokens"] = 61_440
    path.write_text(json.dumps(told))
    assert find(path).trials[0].spec.length_tokens == 61_440


@pytest.mark.corpus
@pytest.mark.parametrize(
    "path", sorted(FOUND.glob("*.prediction.json")), ids=lambda path: path.name
)
def test_every_prediction_that_was_made_before_can_still_be_read(path):
    found = from_json(path.read_bytes(), Prediction)
    assert found.cells
    assert all(cell.likely_edge_tokens >= cell.capacity_tokens for cell in found.cells)


def test_a_cell_that_a_file_does_not_name_is_left_to_the_formula_with_a_note(tmp_path):
    study = find(predicted(tmp_path), allocator=None)
    assert [answer.cell.settings.label for answer in study.answers] == ["vanilla", "Env"]
    assert any(note.endswith(" nothing set, 1 GPU") for note in study.notes)


def test_a_study_says_what_was_predicted_of_each_cell_and_by_what(tmp_path):
    path = predicted(tmp_path)
    (told,) = from_json(path.read_bytes(), Prediction).cells
    asked = {"allocator": None, "study": str(tmp_path / "study.jsonl")}
    find(path, **asked)
    vanilla, env = highwater.open_study(tmp_path / "study.jsonl").expectations
    assert env.cell.settings.label == "Env"
    assert env.likely_tokens == told.likely_edge_tokens
    assert env.prediction == str(path)
    assert (vanilla.cell.settings.label, vanilla.prediction) == ("vanilla", "formula")
    assert vanilla.likely_tokens > 0
    beginning = highwater.study_report(tmp_path / "study.jsonl").beginning
    assert beginning is not None
    assert beginning.predictions == (str(path),)
    assert beginning.likely_tokens == {"expandable, 1 GPU": told.likely_edge_tokens}


def test_a_prediction_that_came_after_the_trials_is_not_recorded(tmp_path):
    asked: dict[str, Any] = {"study": str(tmp_path / "study.jsonl")}
    before = find(Path("formula"), **asked)
    assert [each.prediction for each in before.expectations] == ["formula"]
    assert find(predicted(tmp_path), **asked).expectations == before.expectations
    lines = (tmp_path / "study.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "older.jsonl").write_text(
        without_checksums("".join(line for line in lines if '"cell_expected"' not in line))
    )
    assert find(predicted(tmp_path), study=str(tmp_path / "older.jsonl")).expectations == ()


def test_a_formula_that_says_nothing_of_the_trials_is_not_recorded():
    cell = Cell(layout=Layout(), settings=Settings())
    request, question = Request(model="Qwen3-0.6B"), ask(cell)
    assert predicted_start.expectation(request, question, cell, None) is not None
    shape = msgspec.structs.replace(question.model.shape, model_type="of no kind")
    obstacles: tuple[dict[str, Any], ...] = (
        {"device_total_bytes": None},
        {"device": "cpu"},
        {"data": "my.batches:packed"},
        {"model": msgspec.structs.replace(question.model, shape=shape)},
    )
    for obstacle in obstacles:
        assert (
            predicted_start.expectation(
                request, msgspec.structs.replace(question, **obstacle), cell, None
            )
            is None
        )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "Qwen3-1.7B"}, "speaks of Qwen3-1.7B, not of Qwen3-0.6B"),
        ({"gpu_memory": "40GiB"}, "speaks of GPUs with 40.00 GiB, these trials have 79.15 GiB"),
        ({"loss": "chunked"}, "says nothing of expandable, 1 GPU"),
    ],
)
def test_a_file_that_speaks_of_other_trials_is_refused(tmp_path, changes, problem):
    with pytest.raises(UsageError, match=problem):
        find(predicted(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes", [{"length": "32k"}, {"trainer": "trinity", "allocator": "native"}]
)
def test_a_file_without_this_engines_longest_lengths_is_refused(tmp_path, changes):
    asked: dict[str, Any] = {
        "gpus": "1xH200-141GB",
        "gpu_memory": "79.15GiB",
        "offload": False,
    } | changes
    path = tmp_path / "prediction.json"
    path.write_text(to_json(highwater.predict("Qwen3-0.6B", **asked)), encoding="utf-8")
    with pytest.raises(UsageError, match="longest lengths"):
        find(path)


def test_what_is_no_prediction_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        find(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a prediction"):
        find(tmp_path / "other.json")


def test_simulated_trials_are_not_traced():
    with pytest.raises(UsageError, match="a dry run traces nothing"):
        find(Path("trace"))


def test_cells_are_traced_in_their_order_and_the_search_begins_where_the_traces_end(monkeypatch):
    cells = tuple(
        Cell(layout=Layout(), settings=Settings(allocator=name))
        for name in ("native", "expandable")
    )
    question = ask(*cells, memory_budget_bytes=40 * GIB)
    gpu = Gpu(
        index=0,
        name="a GPU",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=0,
        compute_capability=(9, 0),
        processes=(),
    )
    monkeypatch.setattr(predicted_start, "probe", lambda: SimpleNamespace(gpus=(gpu,)))
    monkeypatch.setattr(predicted_start, "CachedTracer", Tracer)
    request = Request(model="Qwen3-0.6B", prediction="trace")
    assert predicted_start.check_prediction(request, question) == ()
    with predicted_start.predicted_start(request, question) as expected:
        capacities = [expected(cell) for cell in cells]
    outside = next(
        iter(
            predict_cells(
                question, MemoryLimit(device_bytes=40 * GIB), MEMORY["highwater"].predictor
            )
        )
    ).footprint.outside_bytes
    assert capacities == [(40 * GIB - outside) // Tracer.BYTES_PER_STEP * STEP] * 2


class Tracer:
    """Trials that need so much for each step of the grid."""

    BYTES_PER_STEP = GIB

    def __init__(self, directory: Path, *, kernel: str) -> None:
        assert directory.name == "traces"
        assert kernel == "cudnn"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, spec: TrialSpec) -> EventLog:
        events = (
            Enter("forward"),
            Allocate(1, self.BYTES_PER_STEP * (spec.length_tokens // STEP), 0, 0),
        )
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)
