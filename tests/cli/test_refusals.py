"""What is refused before anything starts: a clear error, its exit code, and a hint that works."""

import re

import pytest
from conftest import SIMULATED, offered, refusal

from highwater.errors import UsageError
from highwater.nouns.hardware import CPU_FLAGS
from highwater.store.directory import check_log_directory


def test_an_unknown_model_is_answered_with_the_known_ones(highwater):
    told = "no model 'Qwen3-0.7B': not a directory, not in the catalog"
    problem, hint = refusal(highwater("find", "Qwen3-0.7B", *SIMULATED), 2)
    assert problem == told, "the wording of a refusal, here and nowhere else"
    assert highwater("find", re.findall(r"Qwen3-[\w.]+B", hint)[0], *SIMULATED).returncode == 0
    assert refusal(highwater("find", "Qwen3-0.7B", "--print-config"), 2)[0] == told


def test_a_small_model_is_offered_a_short_search_of_its_own(highwater, tiny):
    _, hint = refusal(highwater("find", str(tiny), "--device", "cuda"), 3)
    assert offered(hint) == [["highwater", "find", str(tiny), *CPU_FLAGS.split()]]
    assert highwater(*offered(hint)[0][1:], "--dry-run").returncode == 0


@pytest.mark.parametrize("words", [("find", "tiny"), ("try", "tiny", "--length", "512")])
def test_without_a_gpu_the_first_thing_said_is_that_this_is_the_cpu(highwater, words):
    done = highwater(*words, "--memory", "1GiB", "--dry-run")
    assert done.returncode == 0
    assert done.stderr.startswith("note: no GPU is visible")


def test_on_the_cpu_lengths_end_early_and_that_is_said(highwater):
    done = highwater(
        "find", "tiny", "--device", "cpu", "--memory", "8GiB", "--loss", "chunked", "--dry-run"
    )
    (note,) = (line for line in done.stderr.splitlines() if line.startswith("note: on"))
    assert "8,192" in note
    assert offered(note) == [["--max-length"]]
    assert "8,192 tokens fit" in done.stdout


def test_the_log_directory_that_is_offered_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    home = tmp_path / "$(touch pwned) it's"
    home.mkdir()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError) as refused:
        check_log_directory(tmp_path / "file" / "logs")
    assert offered(refused.value.hint) == [["--log-dir", str(home / "highwater-logs")]]


def test_the_newest_study_is_hinted_at_only_where_there_is_one(highwater):
    assert "highwater show" not in refusal(highwater("report", "none.jsonl"), 2)[1]
    assert (
        highwater(
            "find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/Qwen3-0.6B/study-1.jsonl"
        ).returncode
        == 0
    )
    hint = refusal(highwater("report", "none.jsonl"), 2)[1]
    assert offered(hint) == [["highwater", "show"]]
    assert highwater("show").returncode == 0


def test_without_a_command_the_help_is_shown_and_nothing_is_answered(highwater):
    done = highwater()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: highwater" in done.stderr
