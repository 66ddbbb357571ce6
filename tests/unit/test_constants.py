"""Constants of a machine: refused without a GPU, summed by name, drawn a row for each thing."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import highwater
from highwater.cli.doctor import _constants_table, doctor
from highwater.errors import MachineError, UsageError
from highwater.memory.capacity import MemoryLimit, Prediction
from highwater.memory.formula.constants import (
    CONTEXT_BYTES,
    CONTEXT_OF_SEVERAL_BYTES,
    CUBLAS_WORKSPACES_BYTES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_BYTES,
    NCCL_SECOND_GROUP_BYTES,
    machine_constants,
)
from highwater.memory.interval.residuals import study_residuals
from highwater.memory.question import predicted_question
from highwater.nouns.cluster import Cluster
from highwater.nouns.codec import from_builtins, from_json, to_json
from highwater.nouns.events import Allocate, Enter, EventLog
from highwater.nouns.hardware import Constants, Reading
from highwater.nouns.trial import TrialSpec
from highwater.pages.prediction_tables import prediction_table
from highwater.recommendation.user_measurements import own_constants
from highwater.trials.probe import probe
from highwater.trials.traced import predict_traced
from highwater.units import GIB, MIB

ROOT = Path(__file__).parents[2]
H200 = ROOT / "docs" / "results" / "predict" / "constants-h200.json"
CARD = Cluster(gpus=1, device_name="H200-141GB", device_bytes=140 * GIB)


def reading(name: str, outside: int, kept: int = 0) -> Reading:
    return Reading(name=name, outside_bytes=outside * MIB, allocator_bytes=kept * MIB)


def constants_of(gpus: int, *readings: Reading) -> Constants:
    context = reading("context", 600)
    return Constants(device_name="a GPU", gpus=gpus, versions={}, readings=(context, *readings))


ONE, TWO = constants_of(1, reading("cuBLAS", 60, 32)), constants_of(2, reading("NCCL group", 300))


def test_readings_add_up_by_name_and_what_is_not_there_is_nothing():
    assert ONE.outside_bytes("context", "cuBLAS", "NCCL group") == 660 * MIB


def test_the_table_has_a_row_for_each_thing_and_a_column_for_each_count():
    table = _constants_table((ONE, TWO))
    assert table.columns == ("", "1 GPU", "2 GPUs")
    *things, (_, *together) = table.rows
    assert things == [
        ("context", "600.0 MiB", "600.0 MiB"),
        ("cuBLAS", "60.0 MiB (32.0 MiB)", "-"),
        ("NCCL group", "-", "300.0 MiB"),
    ]
    assert together == ["660.0 MiB", "900.0 MiB"]


@pytest.mark.skipif(bool(probe().gpus), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_nothing_to_measure():
    with pytest.raises(MachineError, match="no GPU is visible"):
        doctor(argparse.Namespace(measure=True, json=False))


def changed(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    """What was printed on H200s, changed."""
    document = json.loads(H200.read_text())
    change(document)
    path = folder / "constants.json"
    path.write_text(json.dumps(document))
    return path


def grow(document: dict[str, Any]) -> None:
    """The context of one GPU."""
    document["constants"][0]["readings"][0]["outside_bytes"] += 20 * GIB


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_own_constants_are_in_the_place_of_those_that_come_along(gpus):
    document = json.loads(H200.read_text())
    every = from_builtins(document["constants"], tuple[Constants, ...])
    (read,) = (each for each in every if each.gpus == gpus)
    asked = {"gpus": f"{gpus}xH200-141GB", "ulysses": [gpus]}
    prediction = highwater.predict("Qwen3-8B", constants=H200, **asked)
    own = {
        "context": read.context_bytes,
        "NCCL": read.outside_bytes("NCCL group", "NCCL collectives"),
        "NCCL, all-to-all": read.outside_bytes("NCCL all-to-all"),
    }
    for cell in prediction.cells:
        outside = {term.name: term.bytes for term in cell.footprint.outside}
        pinned = {name for name in outside if "pinned memory" in name}
        assert bool(pinned) == cell.cell.settings.uses_host
        assert all(outside.pop(name) > 0 for name in pinned)
        assert outside == {name: size for name, size in own.items() if size}
    assert prediction.memory_limit.constants is not None
    assert prediction.memory_limit.constants.device_name == "NVIDIA H200"
    assert from_json(to_json(prediction), Prediction) == prediction


def said_of_constants(prediction: Prediction) -> str:
    notes = prediction_table(prediction, is_explained=True).footnotes
    return "".join(note for note in notes if "as measured on" in note)


def test_of_more_gpus_than_were_read_nccl_is_what_comes_along():
    prediction = highwater.predict("Qwen3-8B", gpus="8xH200-141GB", constants=H200, ulysses=[2])
    own = prediction.memory_limit.constants
    assert own is not None
    for cell in prediction.cells:
        terms = {term.name: term.bytes for term in cell.footprint.outside}
        assert terms["context"] == own.context_bytes[4]
        assert terms["NCCL"] == NCCL_BYTES[8] + NCCL_SECOND_GROUP_BYTES
    assert "; NCCL of 8 GPUs " in said_of_constants(prediction)


def test_a_larger_context_leaves_less_room_and_the_answer_names_where_it_was_measured(tmp_path):
    asked = {"gpus": "H200-141GB", "loss": "full", "allocator": "native"}
    without, with_more = (
        highwater.predict("Qwen3-4B", constants=file, **asked)
        for file in (None, changed(grow, tmp_path))
    )
    assert with_more.cells[0].capacity_tokens < without.cells[0].capacity_tokens
    versions = "torch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, cuDNN 91900"
    assert said_of_constants(with_more).endswith(f"as measured on NVIDIA H200: {versions}")
    assert said_of_constants(without) == ""


def test_a_replay_has_the_workspaces_that_cublas_was_seen_to_take():
    seen = constants_of(1, reading("cuBLAS", 60, 32), reading("cuBLAS, backward", 60, 8))
    settings = {"loss": "full", "allocator": "native"}
    question, _ = predicted_question("Qwen3-0.6B", CARD, "highwater", 4096, settings)

    def empty(_: TrialSpec) -> EventLog:
        events = (Enter("forward"), Allocate(1, 0, 0, 0))
        return EventLog(source="traced", versions={}, operators=("mm",), events=events)

    for constants, workspaces in ((None, 64 * MIB), (machine_constants((seen,)), 40 * MIB)):
        limit = MemoryLimit(device_bytes=40 * GIB, constants=constants)
        (found,) = predict_traced(question, limit, empty)
        assert found.replayed is not None
        assert found.replayed.peak_allocated_bytes == workspaces


def test_own_trials_are_measured_against_the_constants_of_the_gpus_they_ran_on(tmp_path):
    study = highwater.open_study(ROOT / "docs/results/find/qwen3-0.6b-79gib-chunked.jsonl")
    larger = own_constants(changed(grow, tmp_path), CARD)
    elsewhere = msgspec.structs.replace(larger, device_name="NVIDIA A100-SXM4-80GB")
    (alone,), (same,), (other,) = (study_residuals(study, own) for own in (None, larger, elsewhere))
    assert other == alone
    more = larger.context_bytes[1] - CONTEXT_BYTES["cuda"]
    assert same.predicted_bytes - alone.predicted_bytes == more


def l4s(document: dict[str, Any]) -> None:
    for each in document["constants"]:
        each["device_name"] = "NVIDIA L4"


def one_l4(document: dict[str, Any]) -> None:
    document["constants"][0]["device_name"] = "NVIDIA L4"


def without_reading(gpus: int, reading: int) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["constants"][gpus]["readings"].pop(reading)


def below_zero(document: dict[str, Any]) -> None:
    document["constants"][0]["readings"][0]["outside_bytes"] = -5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("constants"), "is not what `highwater doctor --measure --json` prints"),
        (lambda d: d.update(constants=[]), "has no readings: it was printed without `--measure`"),
        (lambda d: d.update(schema_version=2), "is of version 2, this reads 1"),
        (one_l4, "is of several kinds of GPUs: NVIDIA H200, "),
        (l4s, "was read on NVIDIA L4, and H200"),
        (without_reading(0, 0), "lacks readings of context"),
        (without_reading(2, 7), "lacks readings of context, of cuBLAS, or of NCCL"),
        (below_zero, "lacks readings of context"),
    ],
)
def test_a_file_that_says_nothing_of_these_gpus_is_refused(tmp_path, change, problem):
    with pytest.raises(UsageError) as refused:
        highwater.predict("Qwen3-8B", gpus="H200-141GB", constants=changed(change, tmp_path))
    assert problem in refused.value.problem
    assert "`highwater doctor --" in refused.value.hint


def test_another_trainer_takes_no_constants_of_this_engine():
    with pytest.raises(UsageError, match=r"constants .* Trinity-RFT"):
        highwater.predict("Qwen3-8B", gpus="H200-141GB", constants=H200, trainer="trinity")


def test_the_constants_of_predictions_are_those_that_were_read_on_an_h200():
    document = json.loads(H200.read_text())
    one, two, four = from_builtins(document["constants"], tuple[Constants, ...])
    assert [each.gpus for each in (one, two, four)] == [1, 2, 4]

    def is_near(known: int, read: Constants, within: float, *names: str) -> None:
        assert known == pytest.approx(read.outside_bytes(*names), rel=within)

    ours = [reading.name for reading in one.readings]
    is_near(CONTEXT_BYTES["cuda"], one, 0.005, *ours)
    ours.remove("FSDP2")
    for each in (two, four):
        is_near(CONTEXT_OF_SEVERAL_BYTES["cuda"], each, 0.015, *ours)
        is_near(NCCL_BYTES[each.gpus], each, 0.002, "NCCL group", "NCCL collectives")
        is_near(NCCL_ALL_TO_ALL_BYTES[each.gpus], each, 0.02, "NCCL all-to-all")
    kept = {reading.name: reading.allocator_bytes for reading in one.readings}
    assert (kept["cuBLAS"], kept["cuBLAS, backward"]) == CUBLAS_WORKSPACES_BYTES
