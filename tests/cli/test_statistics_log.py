"""What a trial writes of its steps beside its log: the same numbers on any number of processes, as
lines of JSON and for TensorBoard.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trials need the train extra")

CPU = ("--device", "cpu", "--memory", "2GiB", "--log-dir", "logs", "--length", "101")


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "logs").rglob("model_len-101.statistics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_lines_say_what_the_result_says(highwater, tiny, tmp_path):
    done = highwater("try", str(tiny), *CPU, "--gpus", "2", "--json")
    result = json.loads(done.stdout)["result"]
    found = lines(tmp_path)
    assert [step["loss"] for step in found] == result["ranks"][0]["losses"]
    assert [step["gradient_norm"] for step in found] == result["ranks"][0]["gradient_norms"]
    assert found[-1]["tokens_per_s"] == pytest.approx(result["tokens_per_s"])


def test_tensorboard_reads_the_numbers_of_the_lines(highwater, tiny, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = highwater("try", str(tiny), *CPU, "--gpus", "2", "--ulysses", "2", "--tensorboard")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "logs").rglob("model_len-101.tensorboard")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    for step in lines(tmp_path):
        for name, value in step.items():
            if name == "step":
                continue
            of_tags = (
                {f"{name}/rank {rank}": each for rank, each in enumerate(value)}
                if isinstance(value, list)
                else {name: value}
            )
            for tag, wanted in of_tags.items():
                found = {event.step: event.value for event in events.Scalars(tag)}
                assert found[step["step"]] == pytest.approx(wanted, rel=1e-6), tag


def test_without_tensorboard_it_is_refused_with_what_to_install(highwater, tiny, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "tensorboard.py").write_text("raise ImportError('not installed')\n")
    done = highwater("try", str(tiny), *CPU, "--tensorboard", PYTHONPATH=str(tmp_path / "without"))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    problem, blank, hint = done.stderr.splitlines()[-3:]
    assert "not installed" in problem
    assert (blank, hint.partition(" or ")[0]) == ("", "hint: `pip install tensorboard`,")


def test_a_memory_only_trial_writes_no_statistics(highwater, tiny, tmp_path):
    done = highwater("try", str(tiny), *CPU, "--attention-depth", "1")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "logs").rglob("*.statistics.jsonl"))
