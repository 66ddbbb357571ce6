"""``try --attention-depth`` and ``find --proof memory`` as a user types them: real trials on the
CPU, and refusals.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, offered, refusal

from highwater.api.search import prepare
from highwater.nouns.request import request_from
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.units import MIB

CPU = ("--device", "cpu", "--memory", "1GiB")


def test_a_memory_only_trial_says_what_it_is_and_shows_no_figure_of_a_training(highwater, tiny):
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
    assert "memory-only" in shown


pytest.importorskip("torch", reason="trials need the train extra")

STATISTICS_CPU = ("--device", "cpu", "--memory", "2GiB", "--log-dir", "logs", "--length", "101")


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "logs").rglob("model_len-101.statistics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_lines_say_what_the_result_says(highwater, tiny, tmp_path):
    done = highwater("try", str(tiny), *STATISTICS_CPU, "--gpus", "2", "--json")
    result = json.loads(done.stdout)["result"]
    found = lines(tmp_path)
    assert [step["loss"] for step in found] == result["ranks"][0]["losses"]
    assert [step["gradient_norm"] for step in found] == result["ranks"][0]["gradient_norms"]
    assert found[-1]["tokens_per_s"] == pytest.approx(result["tokens_per_s"])


def test_tensorboard_reads_the_numbers_of_the_lines(highwater, tiny, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = highwater(
        "try", str(tiny), *STATISTICS_CPU, "--gpus", "2", "--ulysses", "2", "--tensorboard"
    )
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
    done = highwater(
        "try", str(tiny), *STATISTICS_CPU, "--tensorboard", PYTHONPATH=str(tmp_path / "without")
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    problem, blank, hint = done.stderr.splitlines()[-3:]
    assert "not installed" in problem
    assert (blank, hint.partition(" or ")[0]) == ("", "hint: `pip install tensorboard`,")


def test_a_memory_only_trial_writes_no_statistics(highwater, tiny, tmp_path):
    done = highwater("try", str(tiny), *STATISTICS_CPU, "--attention-depth", "1")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "logs").rglob("*.statistics.jsonl"))


VOCABULARY = {"Qwen3-0.6B": 151_936, "Qwen3-8B": 151_936, "Llama-3.1-8B": 128_256}
LENGTH = 2048


def logits_bytes(highwater: Run, *words: str) -> int:
    done = highwater("predict", *words, "--json")
    (cell,) = json.loads(done.stdout)["cells"]
    (loss,) = (phase for phase in cell["footprint"]["phases"] if phase["name"] == "loss")
    (logits,) = (term["bytes"] for term in loss["terms"] if term["name"] == "logits")
    return logits


@pytest.mark.parametrize(
    ("model", "tokens"), [("Qwen3-0.6B", 4096), ("Qwen3-0.6B", 1000), ("Llama-3.1-8B", 8192)]
)
def test_a_full_loss_is_predicted_with_the_logits_of_every_token(highwater, model, tokens):
    words = (model, "--gpus", "1xH200-141GB", "--length", str(tokens), "--loss", "full")
    words = (*words, "--allocator", "native", "--ulysses", "1", "--offload")
    of_a_token = 2 * VOCABULARY[model]
    assert logits_bytes(highwater, *words) == of_a_token * tokens
    prompted = logits_bytes(highwater, *words, "--prompt-tokens", "2048")
    assert prompted == of_a_token * (tokens - min(2048, tokens // 2))


def data_segment(highwater: Run, *words: str) -> int:
    asked = ("tiny", "--device", "cpu", "--memory", "6GiB", "--length", str(LENGTH), "--json")
    done = highwater("try", *asked, *words)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["result"]["ranks"]
    return rank["memory"]["peak_data_segment_bytes"]


def test_a_trial_trains_every_token_and_takes_their_logits(highwater):
    every = data_segment(highwater, "--loss", "full")
    prompted = data_segment(highwater, "--loss", "full", "--prompt-tokens", "1024")
    logits = 4 * 151_936 * 1024
    assert every - prompted == pytest.approx(logits, abs=64 * MIB)


def prompt_of(**fields: Any) -> int:
    values = {"model": "tiny", "device": "cpu", "memory": "2GiB", **fields}
    return prepare(request_from(values, keywords=True)).question.prompt_tokens


def test_a_search_has_no_prompt_unless_one_is_named():
    assert prompt_of() == 0
    assert prompt_of(prompt_tokens=7) == 7
    assert prompt_of(prompt_tokens="512") == 512


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


@pytest.mark.parametrize("trainer", ["trinity", "trl"])
def test_trainers_whose_prompts_are_their_own_are_not_told_of_one(highwater, trainer):
    words = ("predict", "Qwen3-4B", "--gpus", "1xH20-96GB", "--trainer", trainer)
    _, hint = refusal(highwater(*words, "--prompt-tokens", "9"), 2)
    assert offered(hint) or "leave" in hint
