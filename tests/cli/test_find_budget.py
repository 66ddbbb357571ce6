"""``find --budget`` with real trials on the CPU: it ends in time, keeps what it has, goes on."""

import json
import time

import pytest
from conftest import following, refusal

from highwater.cli.commands import exit_code
from highwater.errors import EXIT_ANSWERED, EXIT_INCONCLUSIVE
from highwater.store.journal import read_study

CPU = ("--device", "cpu", "--memory", "1GiB", "--loss", "full")
GRID = ("--start-length", "512", "--max-length", "512", "--resolution", "512")
STUCK = """
import pathlib
import time

def stuck(*, length_tokens, **_):
    while True:
        while pathlib.Path("stuck").exists():
            time.sleep(0.1)
        yield [[1] * length_tokens]
"""


def test_a_search_ends_with_its_budget_and_the_same_command_goes_on(highwater, tiny, tmp_path):
    pytest.importorskip("torch", reason="trials need the train extra")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "stuck_batches.py").write_text(STUCK)
    (tmp_path / "stuck").touch()
    data = ("--data", "stuck_batches:stuck", "--study", "s.jsonl")
    words = ("find", str(tiny), *CPU, *GRID, *data, "--budget")
    environment = {"PYTHONPATH": str(tmp_path / "own")}
    began = time.monotonic()
    done = highwater(*words, "10s", **environment)
    assert done.returncode == EXIT_INCONCLUSIVE, done.stderr
    assert 10 <= time.monotonic() - began < 60
    assert "1 search, nobody knows beforehand" in done.stderr
    assert "ends after 10 s at the latest" in done.stderr
    assert (
        "the budget of 10 s is spent, 1 of 1 searches are not finished: nothing set" in done.stderr
    )
    assert done.stdout.startswith("Not known yet: ")
    study = read_study(tmp_path / "s.jsonl")
    assert [trial.result for trial in study.trials] == [None]
    assert following(done) == [*words, "10s"]

    (tmp_path / "stuck").unlink()
    done = highwater(*following(done)[:-1], "4m", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny trains up to 512 tokens on 1 process on the CPU")
    assert following(done)[0] == "show"
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "trial_finished" for line in lines) == 1


def test_a_budget_that_no_trial_fits_into_is_refused(highwater, tiny):
    problem, hint = refusal(highwater("find", str(tiny), *CPU, *GRID, "--budget", "3s"), 2)
    assert problem == "a budget of 3.00 s ends before a trial has"
    assert "`--budget 10s`" in hint


def test_a_dry_run_takes_no_time_and_says_nothing_of_it(highwater):
    words = ("find", "Qwen3-0.6B", "--device", "cuda", "--memory", "80GiB", "--dry-run")
    usual, bounded = highwater(*words), highwater(*words, "--budget", "1m")
    assert (bounded.returncode, bounded.stdout) == (0, usual.stdout)
    assert "at the latest" not in bounded.stderr


def test_what_was_found_is_an_answer_though_the_budget_ended_it(highwater, tmp_path):
    words = ("find", "Qwen3-0.6B", "--device", "cuda", "--memory", "80GiB", "--dry-run")
    assert highwater(*words, "--study", "s.jsonl").returncode == 0
    path = tmp_path / "s.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    answered = next(i for i, line in enumerate(lines) if '"kind":"cell_answered"' in line)
    path.write_text("".join(lines[: answered + 1]))
    study = read_study(path)
    assert not study.complete
    assert exit_code(study) == EXIT_INCONCLUSIVE
    assert exit_code(study, has_budget=True) == EXIT_ANSWERED
    shown = highwater("show", "s.jsonl")
    assert shown.stdout.startswith("Qwen3-0.6B trains up to ")
    assert "not searched yet" in shown.stdout
