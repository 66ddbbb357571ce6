"""What a training refuses before it reads any data, and what it says of data that it evaluates."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import highwater
from highwater.cli.app import main
from highwater.errors import EXIT_USER, UsageError
from highwater.trials.training_ranks import own_folder


def train(folder: Path, **changes: Any) -> None:
    """Ask for two steps of a tiny model on the CPU."""
    data = folder / "data.jsonl"
    data.write_text('{"text": "a text"}\n')
    usual: dict[str, Any] = {"data": str(data), "length": 256, "steps": 2, "device": "cpu"}
    highwater.train("tiny", **{"output": folder / "run", "memory": "1GiB", **usual, **changes})


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({"reward": "rewards:length"}, "the objective sft has none", "--objective grpo"),
        ({"settings": "recommend"}, "there is no study recommend", "--settings recommended"),
        (
            {"resume_from": "step-000009"},
            "no checkpoint 'step-000009'",
            "leave `--resume-from` out",
        ),
        ({"resume_from": "the latest"}, "no checkpoint 'the latest'", "leave `--resume-from` out"),
    ],
)
def test_what_is_not_there_is_refused_and_leaves_no_folder(changes, problem, hint, tmp_path):
    with pytest.raises(UsageError) as refused:
        train(tmp_path, **changes)
    assert problem in refused.value.problem
    assert hint in refused.value.hint
    assert not (tmp_path / "run").exists()


def test_any_step_of_the_training_may_be_recorded_and_no_later_one(tmp_path):
    with pytest.raises(UsageError, match="records step 10, and the last one is 9") as refused:
        train(tmp_path, steps=10, device="cuda", memory_profiler="3,10")
    assert "`--memory-profiler 0`" in refused.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("below", ["notes.txt", "notes.txt/run", "notes.txt/a/run"])
def test_a_run_below_a_file_is_offered_a_folder_that_can_be_made(below, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"notes\.txt is no folder") as refused,
        own_folder(tmp_path / below),
    ):
        pass
    offered = Path(refused.value.hint.split("`")[1].removeprefix("--output "))
    with own_folder(offered):
        assert offered.is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["dry_run", "max_length", "runner", "trainer"])
def test_a_keyword_of_searches_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(UsageError, match=f"^{name} is a setting of searches") as refused:
        train(tmp_path, **{name: None})
    assert refused.value.hint == f"leave `{name}` out"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["dry_run: true", "runner: ray", "trainer: trl"])
def test_a_file_that_names_another_run_than_the_engines_is_refused(line, tmp_path, capsys):
    (tmp_path / "study.yaml").write_text(f"{line}\n")
    (tmp_path / "data.jsonl").write_text('{"text": "a text"}\n')
    files = ("--config", tmp_path / "study.yaml", "--data", tmp_path / "data.jsonl")
    numbers = ("--length", 256, "--steps", 2, "--memory", "1GiB", "--device", "cpu")
    words = ("train", "tiny", *files, *numbers, "--output", tmp_path / "run")
    assert main([*map(str, words)]) == EXIT_USER
    assert f"leave `{line.partition(':')[0]}` out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_removed_meanwhile_hides_no_error(tmp_path):
    def remove_and_stop() -> None:
        shutil.rmtree(tmp_path / "run")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), own_folder(tmp_path / "run"):
        remove_and_stop()
