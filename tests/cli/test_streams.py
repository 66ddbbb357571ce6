"""Streams that are closed, full, of another encoding or without a reader: never a traceback, and
the study is safe.
"""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, SIMULATED, refusal

FIND = ("highwater", "find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/m/study-1.jsonl")


def in_a_shell(
    directory: Path, words: tuple[str, ...], redirected: str
) -> "subprocess.CompletedProcess[str]":
    """What becomes of a command with its streams redirected by a shell."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": f"{BIN}:{os.environ['PATH']}"}
    script = f'"$@" {redirected}'
    return subprocess.run(
        ["bash", "-c", script, "sh", *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("words", [FIND, (*FIND, "--json")])
def test_an_answer_that_cannot_be_written_is_an_error_and_the_hint_shows_it(
    highwater, tmp_path, words
):
    done = in_a_shell(tmp_path, words, "> /dev/full")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    *_, problem, _, hint = done.stderr.splitlines()
    assert problem.startswith("error: the answer ")
    assert problem.endswith(os.strerror(errno.ENOSPC))
    assert "high-water mark" in highwater(*hint.split("`")[1].split()[1:]).stdout


def test_a_closed_stdout_is_refused_before_anything_starts(tmp_path):
    done = in_a_shell(tmp_path, FIND, ">&-")
    problem, hint = refusal(done, 2)
    assert problem.startswith("stdout is closed")
    assert list(tmp_path.iterdir()) == []
    assert in_a_shell(tmp_path, FIND, hint.split("`")[1]).returncode == 0


@pytest.mark.parametrize("redirected", ["2>&-", "2> >(head -c 1 > /dev/null)", "2> /dev/full"])
def test_a_search_goes_on_when_nobody_hears_its_talk(tmp_path, redirected):
    done = in_a_shell(tmp_path, FIND, redirected)
    assert done.returncode == 0, done.stderr
    assert "high-water mark" in done.stdout
    assert all(
        json.loads(line)
        for line in (tmp_path / "logs" / "m" / "study-1.jsonl").read_text().splitlines()
    )


def test_any_name_can_be_told_in_ascii(highwater, tiny):
    model = tiny.rename(tiny.with_name("模型"))
    words = ("find", str(model), *SIMULATED, "--max-length", "8192")
    table = highwater(*words, PYTHONIOENCODING="ascii")
    assert (table.returncode, table.stdout.isascii()) == (0, True)
    document = highwater(*words, "--json", PYTHONIOENCODING="ascii")
    assert json.loads(document.stdout)["question"]["model"]["name"] == "模型"


def test_a_name_that_is_not_utf_8_is_refused_in_words(highwater, tiny):
    odd = tiny.rename(Path(os.fsdecode(os.fsencode(tiny) + b"\xff")))
    problem, _ = refusal(highwater("find", str(odd), *SIMULATED), 2)
    assert problem == f"{tiny}\\udcff is not UTF-8"
    tiny.symlink_to(odd)
    problem, _ = refusal(highwater("find", str(tiny), *SIMULATED), 2)
    assert f" {tiny}\\udcff " in problem
    odd.rename(odd.with_name("renamed"))
    assert highwater("find", "renamed", *SIMULATED).returncode == 0
