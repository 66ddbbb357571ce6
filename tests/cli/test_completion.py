"""Completion, in the shells themselves: what is offered after the words that were typed."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from conftest import BIN, SIMULATED, TIMEOUT_S, Run, installed

from highwater.cli.flags import Shell
from highwater.cli.grammar import COMMANDS, commands
from places import captured
from tables import table

WITHIN_S = 60
CASES: dict[str, set[str]] = {
    typed: set(offered) for typed, offered in table("completion", "cases").items()
} | {"": set(COMMANDS), "completion ": set(get_args(Shell))}
"""What is typed after ``highwater``, and what is offered; the last word is not finished."""
_OFFER = """
source ./script
IFS=$'\\n' read -r -d '' -a typed
COMP_WORDS=(highwater "${typed[@]}" "$1")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p highwater | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash(highwater: Run, tmp_path: Path) -> Path:
    done = highwater("completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "script").write_text(done.stdout)
    return tmp_path


@pytest.mark.parametrize("example", COMMANDS["completion"].examples)
def test_the_line_of_the_help_keeps_a_script_in_a_home_that_has_nothing(tmp_path, example):
    home = {**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", example], env=home, check=True, timeout=TIMEOUT_S)
    (script,) = (path for path in tmp_path.rglob("*highwater*") if path.is_file())
    assert "recommend" in script.read_text()


def offered(folder: Path, typed: str) -> set[str]:
    *words, last = typed.split(" ")
    done = captured(
        ["bash", "--norc", "-c", _OFFER, "bash", last],
        input="".join(f"{word}\n" for word in words),
        cwd=folder,
        timeout=WITHIN_S,
    )
    assert done.stderr == ""
    return {line for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize(("typed", "completions"), CASES.items(), ids=CASES)
def test_bash_completes(bash, typed, completions):
    assert offered(bash, typed) == completions


def test_bash_completes_every_flag_files_and_folders(bash):
    for name, parser in commands().items():
        assert offered(bash, f"{name} --") == {"--help", *parser.flags()}, name
    (bash / "models").mkdir()
    (bash / "study.jsonl").touch()
    assert offered(bash, "show st") == {"study.jsonl"}
    assert offered(bash, "guide st") == {"study.jsonl"}
    assert offered(bash, "predict mod") == {"models"}
    assert offered(bash, "find tiny --checkpoint-dir mod") == {"models"}


@contextmanager
def terminal_of(*shell: str, folder: Path) -> Iterator[int]:
    terminal, its_side = pty.openpty()
    process = subprocess.Popen(
        shell,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "PS1": "", "INPUTRC": os.devnull},
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        start_new_session=True,
    )
    os.close(its_side)
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_a_tab_in_a_terminal_completes(bash):
    with terminal_of("bash", "--norc", "--noprofile", "-i", folder=bash) as terminal:
        os.write(terminal, b"source ./script; echo re''ady\n")
        assert "ready" in _read_until(terminal, "ready")
        os.write(terminal, b"highwater predict qwen3-32\t--gpus 4xb20\t")
        assert "highwater predict Qwen3-32B --gpus 4xB200" in _typed(terminal, "B200")


def _typed(terminal: int, awaited: str) -> str:
    line: list[str] = []
    for character in _read_until(terminal, awaited):
        if character == "\b":
            line.pop()
        elif character != "\a":
            line.append(character)
    return "".join(line)


def _read_until(terminal: int, awaited: str) -> str:
    said, until = b"", time.monotonic() + WITHIN_S
    while time.monotonic() < until and awaited.encode() not in said:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        said += os.read(terminal, 1 << 16)
    return said.decode()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("typed", "completions"), CASES.items(), ids=CASES)
def test_fish_completes(highwater, tmp_path, typed, completions):
    (tmp_path / "script").write_text(highwater("completion", "fish").stdout)
    asked = f"source script; complete -C {shlex.quote(f'highwater {typed}')}"
    done = captured(
        ["fish", "--no-config", "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=WITHIN_S,
    )
    found = {line.partition("\t")[0] for line in done.stdout.splitlines()}
    # fish offers what has the letters anywhere, where nothing begins with them
    assert completions <= found


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(highwater, tmp_path):
    """With its own completion system, on a terminal."""
    (tmp_path / "_highwater").write_text(highwater("completion", "zsh").stdout)
    with terminal_of("zsh", "-f", "-i", folder=tmp_path) as terminal:
        os.write(
            terminal,
            b"fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; unset zle_bracketed_paste"
            b"; echo re''ady\n",
        )
        assert "ready" in _read_until(terminal, "ready")
        os.write(terminal, b"highwater predict qwen3-32\t--gpus 4xb20\t")
        assert "highwater predict Qwen3-32B --gpus 4xB200" in _typed(terminal, "B200")


@pytest.mark.parametrize("shell", get_args(Shell))
def test_no_script_calls_python(highwater, shell):
    script = highwater("completion", shell).stdout
    assert "python" not in script.lower()
    assert "$(highwater" not in script
    assert "; highwater" not in script


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("highwater", ("predict", "Qwen3-8B", "--gpus", "4xA100-80GB", "--explain")),
        ("highwater", ("find", "Qwen3-0.6B", *SIMULATED)),
        ("highwater", ("show", "none.jsonl")),
        ("highwater", ()),
        ("search_context_length_capacity", ("--model_path", "模型")),
    ],
    ids=["answer", "search", "refusal", "help", "drop-in"],
)
def test_a_forked_command_says_and_ends_as_the_installed_one(run, tmp_path, program, words):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    expected = installed(program, *words, cwd=tmp_path, environment=environment)
    done = run(program, *words)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert _untimed(done.stderr) == _untimed(expected.stderr)


def _untimed(talk: str) -> list[str]:
    return [line.partition("] ")[2] or line for line in talk.splitlines()]
