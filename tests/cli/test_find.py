"""``highwater find``: the answer on stdout, talk on stderr; every answer has the next command."""

import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from conftest import HERE, SIMULATED, following, refusal

from highwater.cli.commands import exit_code
from highwater.errors import EXIT_ANSWERED, EXIT_INCONCLUSIVE
from highwater.nouns.codec import from_json
from highwater.nouns.study import Study
from highwater.store.journal import read_study
from places import captured


def test_a_dry_run_answers_the_ends_of_each_count_and_leaves_nothing_behind(highwater, tmp_path):
    done = highwater("find", "Qwen3-0.6B", *SIMULATED, "--gpus", "1", "2", "--ulysses", "1")
    assert done.returncode == 0
    answer, _, title, _, header, *rows = done.stdout.splitlines()
    simple, longest = answer.split(" The longest is ")
    assert re.match(r"Qwen3-0\.6B trains up to [\d,]+ tokens on 1 x simulated GPU with ", simple)
    assert re.match(r"≥1,048,576 tokens with expandable segments, a chunked loss, ", longest)
    assert title == "Qwen3-0.6B on simulated GPU, 80.00 GiB per GPU: simulated, nothing was trained"
    assert header.split()[:5] == ["settings", "GPUs", "Ulysses", "capacity", "ended"]
    assert [re.split(" {2,}", row)[:3] for row in rows[:4]] == [
        [settings, gpus, "1"]
        for gpus in "12"
        for settings in ("nothing set", "expandable, chunked loss, activations on host")
    ]
    assert "out of memory" in rows[0]
    dry = [word for word in SIMULATED if word != "--dry-run"]
    assert following(done) == ["find", "Qwen3-0.6B", *dry, "--gpus", "1", "2", "--ulysses", "1"]
    assert "nothing set, 1 GPU: trying " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_json_answer_is_one_document_with_units_in_its_keys(highwater):
    done = highwater("find", "Qwen3-0.6B", *SIMULATED, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema_version"]) == (0, 3)
    assert from_json(done.stdout, Study).complete
    answer = document["answers"][0]
    assert answer["does_not_fit_tokens"] > answer["capacity_tokens"] > 0
    assert "next:" not in done.stderr


def test_the_next_command_of_every_answer_works(highwater):
    done = highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "my study.jsonl")
    for _ in range(3):
        assert following(done)[0] == "show"
        done = highwater(*following(done))
        assert done.returncode == 0
        assert "Qwen3-0.6B" in done.stdout


def test_the_same_command_resumes_and_runs_nothing_twice(highwater, tmp_path):
    words = ("find", "Qwen3-0.6B", *SIMULATED, "--study", "s.jsonl")
    first, again = highwater(*words), highwater(*words)
    assert first.stdout == again.stdout
    assert "trying" not in again.stderr
    trials = [
        line
        for line in again.stderr.splitlines()
        if " tokens fit" in line or " tokens ran out" in line
    ]
    assert trials
    assert all(": recorded: " in line for line in trials)
    assert "recorded" not in first.stderr
    assert "note: resuming s.jsonl: " in again.stderr
    assert (tmp_path / "s.jsonl").read_text().count('"kind":"opened"') == 2


def test_another_question_to_the_cpu_is_told_in_processes(highwater):
    words = (
        *("find", "tiny", "--device", "cpu", "--memory", "1GiB", "--loss", "full", "--dry-run"),
        *("--study", "s.jsonl"),
    )
    highwater(*words)
    problem, _ = refusal(highwater(*words, "--gpus", "2"), 2)
    assert re.search("1 process there .* 2 processes here$", problem)


EVIL = '$(touch pwned) `touch pwned` it\'s "here" & touch pwned'


def typed(tmp_path: Path, line: str) -> subprocess.CompletedProcess[str]:
    return captured(["sh", "-c", line], cwd=tmp_path, env={**os.environ, **HERE}, timeout=60)


def flag_in(hint: str, start: str) -> str:
    return hint[hint.index(start) :].rpartition("`")[0]


def test_a_hint_with_any_name_in_it_can_be_pasted_into_a_shell(highwater, tmp_path):
    study, search = f"{EVIL}/s.jsonl", shlex.join(["highwater", "find", "Qwen3-0.6B", *SIMULATED])
    highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", study)
    _, hint = refusal(
        highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", study, "--confirm", "1"), 2
    )
    another = flag_in(
        hint.removesuffix(", or leave `--study` out: each question gets a file of its own"),
        "--study",
    )
    assert typed(tmp_path, f"{search} --confirm 1 {another}").returncode == 0
    (tmp_path / EVIL / "s.jsonl").write_text("my notes\n")
    _, hint = refusal(highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", study), 2)
    assert typed(tmp_path, f"{search} {flag_in(hint, '--study')}").returncode == 0
    _, hint = refusal(highwater("find", "--config", f"{EVIL}/none.yaml"), 2)
    assert typed(tmp_path, flag_in(hint, "highwater find")).returncode == 0
    assert (tmp_path / EVIL / "none.yaml").exists()
    left = {"none.yaml", "s-2.jsonl", "s-3.jsonl", "s.jsonl"}
    assert {path.name for path in (tmp_path / EVIL).iterdir()} == left
    assert list(tmp_path.rglob("pwned")) == []


def test_the_next_command_with_any_name_in_it_can_be_pasted_into_a_shell(highwater, tiny, tmp_path):
    model = tiny.rename(tmp_path / EVIL)
    small = ("--device", "cuda", "--memory", "8 GiB", "--dry-run")
    for words, more in (
        (("find", str(model), *small, "--study", f"{EVIL}/s.jsonl"), ""),
        (("try", str(model), "--length", "4k", *small), " --dry-run"),
    ):
        command = highwater(*words).stderr.splitlines()[-1].removeprefix("next: ")
        assert typed(tmp_path, command + more).returncode == 0
    assert list(tmp_path.rglob("pwned")) == []


def test_flags_override_the_file_and_the_printed_configuration_asks_the_same(highwater, tmp_path):
    (tmp_path / "study.yaml").write_text(
        "model: Qwen3-0.6B\ndevice: cuda\nmemory: 80GiB\ndry_run: true\ngpus: [1, 2]\nloss: full\n"
    )
    by_file = highwater("find", "--config", "study.yaml", "--gpus", "1", "--print-config")
    by_flags = highwater(
        "find", "Qwen3-0.6B", *SIMULATED, "--gpus", "1", "--loss", "full", "--print-config"
    )
    assert (by_file.returncode, by_file.stderr) == (0, "")
    assert by_file.stdout == by_flags.stdout
    (tmp_path / "printed.yaml").write_text(by_file.stdout)
    answers = [
        highwater("find", "--config", name, "--gpus", "1").stdout
        for name in ("study.yaml", "printed.yaml")
    ]
    assert answers[0] == answers[1]
    assert "trains up to " in answers[0]
    assert " on 1 x " in answers[0]
    assert "2 GPUs" not in answers[0]
    assert "chunked" not in answers[0]


def test_a_reader_that_goes_away_is_no_crash(highwater, tmp_path):
    highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "s.jsonl")
    script = "highwater show s.jsonl --as json | head -c 10"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


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
    own = str(tmp_path / "own")
    began = time.monotonic()
    done = highwater(*words, "10s", found_in=own)
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
    done = highwater(*following(done)[:-1], "4m", found_in=own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny trains up to 512 tokens on 1 process on the CPU")
    assert following(done)[0] == "show"
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "trial_finished" for line in lines) == 1


def test_a_dry_run_takes_no_time_and_says_nothing_of_it(highwater):
    words = ("find", "Qwen3-0.6B", *SIMULATED)
    usual, bounded = highwater(*words), highwater(*words, "--budget", "1m")
    assert (bounded.returncode, bounded.stdout) == (0, usual.stdout)
    assert "at the latest" not in bounded.stderr


def test_what_was_found_is_an_answer_though_the_budget_ended_it(highwater, tmp_path):
    assert highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "s.jsonl").returncode == 0
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


def test_notes_of_a_dry_run_follow_its_answer(highwater):
    *_, note, after = highwater("find", "Qwen3-0.6B", *SIMULATED).stderr.splitlines()
    assert "other settings are not tried" in note
    assert after.startswith("next: ")
