"""What a trial writes of its steps beside its log: the same numbers on any number of processes, as
lines of JSON and for TensorBoard.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trials need the train extra")

CPU = ("--device", "cpu", "--memory", "2GiB", "--log-dir", "logs", "--length", "101")
TOLERANCE = 5e-6
"""Relative: summation order alone differs, all is float32."""
LAYOUTS = {
    "1": ("--gpus", "1", "--micro-batches", "4"),
    "2": ("--gpus", "2", "--micro-batches", "2"),
    "2, shared": ("--gpus", "2", "--ulysses", "2", "--micro-batches", "4"),
}
"""The same sequences in a step."""
OF_A_MACHINE = ("step_time_s", "tokens_per_s", "statistics_time_s", "peak_data_segment_bytes")


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "logs").rglob("model_len-101.statistics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("objective", ["sft", "grpo"])
def test_a_step_says_the_same_of_the_same_sequences_on_any_layout(
    highwater, tiny, tmp_path, objective
):
    steps: dict[str, list[dict[str, Any]]] = {}
    for name, flags in LAYOUTS.items():
        done = highwater("try", str(tiny), *CPU, *flags, "--objective", objective, "--logit-range")
        assert done.returncode == 0, done.stderr
        steps[name] = lines(tmp_path)
        (tmp_path / "logs").rename(tmp_path / name)
    alone = steps.pop("1")
    assert [step["step"] for step in alone] == [1, 2]
    assert all(step["n_tokens"] == 404 and step["n_valid_tokens"] == 400 for step in alone)
    for name, found in steps.items():
        for step, wanted in zip(found, alone, strict=True):
            assert step.keys() == wanted.keys()
            for key in wanted.keys() - {*OF_A_MACHINE}:
                if key.endswith("_by_rank"):
                    assert sum(step[key]) == sum(wanted[key]), (name, key)
                else:
                    near = pytest.approx(wanted[key], rel=TOLERANCE, abs=TOLERANCE)
                    assert step[key] == near, (name, key)
            assert len(step["peak_data_segment_bytes"]) == 2


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
