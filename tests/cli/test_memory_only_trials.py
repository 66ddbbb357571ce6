"""``try --attention-depth`` and ``find --proof memory`` as a user types them."""

import json

import pytest
from conftest import refusal

from highwater.nouns.trial import PROMPT_TOKENS

pytest.importorskip("torch", reason="trials need the train extra")

CPU = ("--device", "cpu", "--memory", "1GiB")


def test_a_memory_only_trial_says_so_and_shows_no_figure_of_a_training(highwater, tiny, tmp_path):
    words = ("try", str(tiny), "--length", "2048", *CPU, "--attention-depth", "1")
    done = highwater(*words)
    assert done.returncode == 0, done.stderr
    assert "measured, memory-only" in done.stdout
    assert "memory-only fit: memory holds it, nothing was trained" in done.stdout
    assert not any(name in done.stdout for name in ("tokens/s", "MFU", "step time", "loss"))
    assert (
        done.stderr.splitlines()[-1]
        == f"next: highwater find {tiny} {' '.join(CPU)} --proof memory"
    )
    result = json.loads(highwater(*words, "--json").stdout)["result"]
    assert result["outcome"] == "MEMORY_ONLY_FIT"
    assert result["tokens_per_s"] is None
    assert result["mfu"] is None
    assert [
        (rank["losses"], rank["gradient_norms"], rank["step_times_s"]) for rank in result["ranks"]
    ] == [([], [], [])]
    assert list((tmp_path / "logs").rglob("*.log"))
    assert not list((tmp_path / "logs").rglob("*.statistics.jsonl"))


def test_a_search_that_proves_by_memory_trains_in_full_what_time_allows(highwater, tiny):
    grid = (
        *("--start-length", "512", "--resolution", "512", "--max-length", "1024", "--loss"),
        "full",
    )
    done = highwater("find", str(tiny), *CPU, *grid, "--proof", "memory", "--json")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert answer["capacity_tokens"] == 1024
    assert answer["memory_only"] is None
    assert answer["limit"] == "ceiling"
    shown = highwater("show").stdout
    assert "trained in full" in shown
    assert "memory-only" not in shown, "a column with nothing in it is left out"


def test_the_lines_say_what_the_result_says(highwater, tiny, tmp_path):
    two = ("--device", "cpu", "--memory", "2GiB", "--gpus", "2", "--length", "101")
    result = json.loads(highwater("try", str(tiny), *two, "--json").stdout)["result"]
    (path,) = (tmp_path / "logs").rglob("model_len-101.statistics.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["loss"] for step in found] == result["ranks"][0]["losses"]
    assert [step["gradient_norm"] for step in found] == result["ranks"][0]["gradient_norms"]
    assert found[-1]["tokens_per_s"] == pytest.approx(result["tokens_per_s"])


def test_a_study_is_gone_on_with_by_its_own_prompt(highwater):
    words = ("tiny", "--device", "cpu", "--memory", "2GiB", "--max-length", "4k", "--dry-run")
    first = (*words, "--study", "study.jsonl", "--prompt-tokens", str(PROMPT_TOKENS))
    assert highwater("find", *first).returncode in (0, 1)
    again = highwater("find", *words, "--study", "study.jsonl")
    assert again.returncode in (0, 1), again.stderr
    assert "begin with a prompt of 2,048 tokens" in again.stderr
    problem, _ = refusal(
        highwater("find", *words, "--study", "study.jsonl", "--prompt-tokens", "0"), 2
    )
    assert "prompt_tokens is 2048 there and 0 here" in problem
