"""What is refused before anything starts: a clear error, its exit code, and a hint that works."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import SIMULATED, Run, Typed, followed, offered, refusal

from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, UsageError
from highwater.nouns.cluster import cluster
from highwater.nouns.hardware import CPU_FLAGS
from highwater.store.directory import check_log_directory
from highwater.units import GIB, parse_bytes
from places import DATA
from tiny_models import SMALLEST, TINY, write_model


def test_an_unknown_model_and_a_small_one_are_offered_what_works(highwater, tiny):
    told = "no model 'Qwen3-0.7B': not a directory, not in the catalog"
    problem, hint = refusal(highwater("find", "Qwen3-0.7B", *SIMULATED), 2)
    assert problem == told, "the wording of a refusal, here and nowhere else"
    assert highwater("find", re.findall(r"Qwen3-[\w.]+B", hint)[0], *SIMULATED).returncode == 0
    assert refusal(highwater("find", "Qwen3-0.7B", "--print-config"), 2)[0] == told
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
    (quicker,) = offered(note)
    assert quicker == ["--start-length", "512", "--resolution", "512", "--max-length", "2k"]
    assert "trains up to 8,192 tokens" in done.stdout


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
    assert offered(refusal(highwater("report", "none.jsonl"), 2)[1]) == [["highwater", "show"]]
    assert highwater("show").returncode == 0


def test_without_a_command_the_help_is_shown_and_nothing_is_answered(highwater):
    done = highwater()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: highwater" in done.stderr


GPUS = ("--gpus", "1xH100-80GB")
TRAINING = ("--data", "data.jsonl", "--output", "run", "--steps", "1")


def test_a_model_that_is_not_understood_is_refused_by_every_command(highwater, tiny):
    (tiny / "config.json").write_text(json.dumps({**TINY, "vocab_size": None}))
    at_length = ("--length", "2048")
    for words in (
        ("find", str(tiny), *SIMULATED),
        ("find", str(tiny), "--device", "cpu"),
        ("try", str(tiny), "--device", "cpu", *at_length),
        ("predict", str(tiny), *GPUS),
        ("recommend", str(tiny), *GPUS, *at_length),
        ("emit", "--for", "trl", str(tiny), *GPUS, *at_length),
        ("guide", "--predict", str(tiny), *GPUS),
        ("train", str(tiny), "--device", "cpu", *TRAINING, *at_length),
    ):
        problem, hint = refusal(highwater(*words), 2)
        assert "has no vocab_size" in problem
        assert hint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", *GPUS), None),
        (("recommend", *GPUS, "--length", "2048"), None),
        (("emit", "--for", "trl", *GPUS, "--length", "2048"), None),
        (("find", *SIMULATED), None),
        (("predict", *GPUS, "--trainer", "trinity"), "scales or caps its logits"),
        (("emit", "--for", "verl", *GPUS, "--length", "2048"), "scales or caps its logits"),
    ],
)
def test_scaled_logits_are_known_to_every_command_but_for_trinity(
    highwater, run, tmp_path, tiny, words, said
):
    write_model(tiny, model_type="granite", logits_scaling=8.0, residual_multiplier=0.22)
    command, *rest = words
    done = highwater(command, str(tiny), *rest)
    if said is None:
        assert done.returncode == 0, done.stderr
        return
    problem, hint = refusal(done, 2)
    assert said in problem
    (offered_command,) = [part for part in hint.split("`") if part.startswith("highwater ")]
    again, _ = answered(run, tmp_path, tuple(offered_command.split()))
    assert again.returncode == 0


ROWS: list[dict[str, Any]] = json.loads((DATA / "hints.json").read_text(encoding="utf-8"))
FILES = {
    "d.txt": b"a few words",
    "data.jsonl": b'{"text": "a few words"}',
    "held_out.jsonl": b'{"text": "other words"}',
    "latin1.txt": b"\xfcber all words",
    "spread.jsonl": b'{\n"text": "a few words"\n}',
    "file": b"mine",
}


@pytest.mark.parametrize("row", ROWS, ids=[row["command"].replace(" ", "_") for row in ROWS])
def test_a_hint_that_is_typed_does_what_it_says(run, tmp_path, row):
    words = whole(tuple(shlex.split(row["command"])))
    prepare(run, tmp_path, row)
    done = run(*words)
    assert (done.returncode, done.stdout) in ((2, ""), (3, "")), done.stderr
    problem, hint = refused(done)
    assert row.get("said", "") in problem
    if not row.get("reads"):
        assert "starting to read" not in done.stderr, "data is read when all typed is right"
    if "offers" in row:
        offers = [shlex.join(words) for words in offered(hint) if words != ["nvidia-smi"]]
        assert offers == row["offers"]
    ways = list(followed(words[1:], problem, hint))
    assert bool(ways) != row.get("offers_no_value", False), hint
    for way in ways:
        prepare(run, tmp_path, row)
        check_offer(row, way)
        if way.is_shell:
            subprocess.run(["bash", "-c", way.words[0]], check=True, cwd=tmp_path)
            typed = shlex.split(row.get("then", row["command"]))
        elif way.is_whole:
            typed = [*way.words, *shlex.split(row.get("with", ""))]
        else:
            typed = [words[0], *way.words]
        again, has_trained = answered(run, tmp_path, whole(tuple(typed)))
        if row.get("past"):
            assert again.returncode in (0, 1) or refused(again)[0] != problem
            continue
        assert again.returncode in (EXIT_ANSWERED, EXIT_ANSWERED_NO), (hint, again.stderr)
        assert has_trained or not row.get("trains") or way.is_whole, hint


def refused(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    error, blank, hint = done.stderr.splitlines()[-3:]
    assert (error[:7], blank, hint[:6]) == ("error: ", "", "hint: ")
    return error[7:], hint[6:]


def whole(words: tuple[str, ...]) -> tuple[str, ...]:
    is_named = words[0] in ("highwater", "search_context_length_capacity")
    return words if is_named else ("highwater", *words)


Answer = tuple["subprocess.CompletedProcess[str]", bool]
ANSWERED: dict[tuple[frozenset[str], tuple[str, ...]], Answer] = {}
"""By what lies in the folder, and a command's words, flags in any order: many rows end in one."""


def answered(run: Run, folder: Path, words: tuple[str, ...]) -> Answer:
    flags = re.split(r" (?=--)", shlex.join(words))
    asked = frozenset(path.name for path in folder.iterdir()), (flags[0], *sorted(flags[1:]))
    if asked not in ANSWERED:
        done = run(*words)
        ANSWERED[asked] = done, any(folder.glob("*/model/model.safetensors"))
    return ANSWERED[asked]


def prepare(run: Run, folder: Path, row: dict[str, Any]) -> None:
    """Leave ``FILES`` and what the row types before, and a model if it asks for a small one: where
    the hint has nothing to do with memory, training the catalog's 151,936 words shows no more.
    """
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if row.get("is_small"):
        write_model(folder / "tiny", SMALLEST)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for command in row.get("before", []):
        assert run(*whole(tuple(shlex.split(command)))).returncode == 0


def check_offer(row: dict[str, Any], way: Typed) -> None:
    """That the offer is no more than what was meant, and possible on this machine."""
    offered = dict(zip(way.offered, (*way.offered[1:], ""), strict=True))
    sizes = [parse_bytes(word) for word in way.offered if word.endswith("iB")]
    if "memory_at_most_gb" in row:
        assert 0.98 * row["memory_at_most_gb"] * 10**9 < sizes[0] <= row["memory_at_most_gb"] * 1e9
    if "gpu_at_most_gib" in row and "--gpus" in {*way.words, *way.offered}:
        typed = dict(zip(way.words, (*way.words[1:], ""), strict=True))
        memory = typed.get("--gpu-memory")
        memory_bytes = None if memory is None else parse_bytes(memory)
        gpus = cluster(typed["--gpus"], gpu_memory_bytes=memory_bytes, machine=None)
        assert gpus.device_bytes <= row["gpu_at_most_gib"] * GIB
    if row.get("no_cpu"):
        assert offered.get("--device") != "cpu"
