"""``train --report-to``: what each package reads back of a real run, by its own library."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from highwater.errors import MachineError
from highwater.nouns.settings import Settings
from highwater.nouns.trial import REPORTERS
from highwater.trials import probe

pytest.importorskip("torch", reason="training needs the train extra")

KEY = "hunter2-0123456789abcdef"
_BLOCK = 32768


def needed(name: str) -> Any:
    if "reporters" in os.environ.get("HIGHWATER_REQUIRE", ""):
        return __import__(name, fromlist=["_"])
    return pytest.importorskip(name, reason=f"needs the {name.partition('.')[0]} extra")


def words(tiny: Path, folder: Path, *more: str, steps: int = 2) -> tuple[str, ...]:
    data = folder / "data.jsonl"
    rows = [{"input_ids": [(each * step) % 50 + 1 for each in range(40)]} for step in range(1, 9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cpu = ("--device", "cpu", "--memory", "4GiB", "--length", "64", "--rows", "1")
    return (
        *("train", str(tiny), "--data", str(data), *cpu, "--save-every", "1"),
        *("--steps", str(steps), "--output", str(folder / "run"), *more),
    )


def lines(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "run" / "statistics.jsonl").read_text().splitlines():
        numbers = json.loads(line)
        step = found.setdefault(numbers.pop("step"), {})
        for name, value in numbers.items():
            each = enumerate(value) if isinstance(value, list) else ()
            step |= {f"{name}/rank {rank}": it for rank, it in each} or {name: value}
    return {
        step: {name: it for name, it in numbers.items() if it is not None}
        for step, numbers in found.items()
    }


def in_tensorboard(folder: Path) -> list[dict[int, dict[str, float]]]:
    module = needed("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "run" / "reports" / "tensorboard"))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    return [found]


def records(log: bytes) -> Iterator[bytes]:
    """Records of a file of offline W&B: LevelDB's format of logs, after a header of 7 bytes."""
    assert log[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(log):
        if (left := _BLOCK - place % _BLOCK) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", log[place : place + 7])
        whole += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def in_wandb(folder: Path) -> list[dict[int, dict[str, float]]]:
    """The offline runs, by the package's own messages: it has no reader of its files any more."""
    needed("wandb")
    from wandb.proto import wandb_internal_pb2

    found: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted((folder / "run" / "reports" / "wandb").glob("offline-run-*/run-*.wandb")):
        steps = found.setdefault(path.stem.removeprefix("run-"), {})
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if items:
                numbers = {name: it for name, it in items.items() if not name.startswith("_")}
                steps.setdefault(int(items["_step"]), {}).update(numbers)
    return list(found.values())


def in_mlflow(folder: Path) -> list[dict[int, dict[str, float]]]:
    client = needed("mlflow").MlflowClient(f"sqlite:///{folder}/run/reports/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'highwater'")
    found: list[dict[int, dict[str, float]]] = []
    for run in client.search_runs([experiment.experiment_id]):
        steps: dict[int, dict[str, float]] = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                steps.setdefault(metric.step, {})[name] = metric.value
        found.append(steps)
        assert run.info.status == "FINISHED"
    return found


def in_trackio(folder: Path) -> list[dict[int, dict[str, float]]]:
    needed("trackio")
    read = (
        "import json, trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "runs = [run.name for run in trackio.Api().runs('highwater')]\n"
        "logs = [SQLiteStorage.get_logs('highwater', name) for name in runs]\n"
        "print(json.dumps(logs, default=str))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=True
    )
    found: list[dict[int, dict[str, float]]] = []
    for rows in json.loads(done.stdout.splitlines()[-1]):
        steps: dict[int, dict[str, float]] = {}
        for row in rows:
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
            steps.setdefault(row["step"], {}).update(numbers)
        found.append(steps)
    return found


READERS = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
    "trackio": in_trackio,
}


def test_every_reporter_is_read_back():
    assert tuple(READERS) == REPORTERS


@pytest.mark.parametrize("name", READERS)
def test_a_package_reads_the_lines_in_one_run_after_a_stop(highwater, tiny, tmp_path, name):
    needed(name)
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "MY_API_KEY": KEY}
    asked = ("--report-to", name)
    for steps in (2, 3):  # the second goes on after the first
        done = highwater(*words(tiny, tmp_path, *asked, steps=steps), **environment)
        assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "training.log").read_text()
    assert "nothing more is reported" not in log, log
    (found,) = READERS[name](tmp_path)
    wanted = lines(tmp_path)
    assert set(found) == set(wanted) == {1, 2, 3}
    for step, numbers in wanted.items():
        assert {key: found[step][key] for key in numbers} == pytest.approx(numbers, rel=1e-6)
    for path in (tmp_path / "run" / "reports").rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()


def test_a_reporter_that_is_not_reached_is_told_once_and_all_ends_well(highwater, tiny, tmp_path):
    needed("mlflow")
    done = highwater(
        *words(tiny, tmp_path, "--report-to", "mlflow", "tensorboard"),
        MLFLOW_TRACKING_URI=f"http://me:{KEY}@127.0.0.1:9",
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "training.log").read_text()
    assert log.count("nothing more is reported to mlflow: ") == 1
    assert KEY not in log
    (found,) = in_tensorboard(tmp_path)
    assert set(found) == set(lines(tmp_path)) == {1, 2}


@pytest.mark.parametrize("name", REPORTERS)
def test_a_package_that_is_missing_is_refused_before_anything_starts(name, monkeypatch):
    monkeypatch.setattr(probe, "find_spec", lambda _: None)
    with pytest.raises(MachineError, match=f"needs {name}, which is not installed") as refused:
        probe.refuse_missing_package(Settings(), reporters=(name,))
    assert refused.value.hint.startswith(f"`pip install '{name}>=")


def test_an_unknown_reporter_and_the_flag_that_is_gone_are_refused(highwater, tiny, tmp_path):
    refused = highwater(*words(tiny, tmp_path, "--report-to", "comet"))
    assert refused.returncode == 2
    assert all(name in refused.stderr for name in REPORTERS)
    gone = highwater(*words(tiny, tmp_path, "--tensorboard"))
    assert gone.returncode == 2
    assert "--report-to tensorboard" in gone.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_recorded_with_the_flag_that_is_gone_goes_on(highwater, tiny, tmp_path):
    assert highwater(*words(tiny, tmp_path)).returncode == 0
    path = tmp_path / "run" / "training.json"
    recorded = json.loads(path.read_text())
    files = recorded["trial"]["statistics"]
    del files["report_to"], files["reports_directory"]
    files["tensorboard_directory"] = str(tmp_path / "run" / "tensorboard")
    path.write_text(json.dumps(recorded))
    done = highwater(*words(tiny, tmp_path, steps=3))
    assert done.returncode == 0, done.stderr
    assert set(lines(tmp_path)) == {1, 2, 3}
