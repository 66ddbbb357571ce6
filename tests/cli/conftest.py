"""The installed commands, run as a user runs them: real processes in an empty directory."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fork_server import COMMANDS, TESTS, ForkServer
from places import captured
from tiny_models import write_model

BIN = Path(sys.executable).parent
SIMULATED = ("--device", "cuda", "--memory", "80GiB", "--dry-run")
"""Flags that make a search answer from a memory law, on any machine."""

SIMULATED_ON_THE_CPU = (
    *("--device", "cpu", "--memory", "1GiB", "--dry-run", "--start-length", "256"),
    *("--resolution", "256", "--max-length", "1k"),
)
"""The same of a few short lengths on processes of the CPU."""

TIMEOUT_S = 240
HERE = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "PATH": f"{BIN}:{os.environ['PATH']}"}

FORKING = """\
import subprocess
from forked_modules import Forked
subprocess.Popen = Forked
"""
"""Beginning of a program that is forked: the commands that it starts are forks, too."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def _forking(server: ForkServer) -> Run:
    """Runs a program with the whole of its environment."""

    def forked(
        program: str, *words: str, cwd: Path, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        how: dict[str, Any] = {"within_s": TIMEOUT_S, "cwd": cwd, "environment": environment}
        return server.run(COMMANDS[program], program, *words, **how)

    return forked


@pytest.fixture(scope="session")
def forked(fork_server: ForkServer) -> Run:
    return _forking(fork_server)


@pytest.fixture(scope="session")
def forked_without_the_hub() -> Iterator[Run]:
    """The same by one that has not imported ``huggingface_hub``, which reads it then."""
    programs = (main.partition(":")[0] for main in COMMANDS.values())
    server = ForkServer(*programs, "warmed_commands", environment={"PYTHONPATH": str(TESTS)})
    yield _forking(server)
    server.end()


@pytest.fixture
def run(tmp_path: Path, forked: Run, forked_without_the_hub: Run) -> Run:
    """Runs a command in an empty directory, GPUs hidden; ``found_in``: modules for its children."""

    def run(
        program: str, *words: str, found_in: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        everything = {**os.environ, **HERE, **environment}
        if found_in is not None:
            everything["PYTHONPATH"] = found_in
        if program not in COMMANDS or any(name.startswith("PYTHON") for name in environment):
            return installed(program, *words, cwd=tmp_path, environment=everything)
        is_told = any(name.startswith("HF_") for name in environment)
        by = forked_without_the_hub if is_told else forked
        return by(program, *words, cwd=tmp_path, environment=everything)

    return run


def installed(
    program: str, *words: str, cwd: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return captured([BIN / program, *words], cwd=cwd, env=environment, timeout=TIMEOUT_S)


@pytest.fixture
def highwater(run: Run) -> Run:
    return lambda *words, **environment: run("highwater", *words, **environment)


@pytest.fixture(scope="session")
def simulated(forked: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    words = ("find", "Qwen3-0.6B", *SIMULATED, "--study", "study.jsonl")
    assert forked("highwater", *words, cwd=folder, environment={**os.environ}).returncode == 0
    return folder / "study.jsonl"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def refusal(done: subprocess.CompletedProcess[str], code: int) -> tuple[str, str]:
    """Problem and hint of a refused command: the exact form, and nothing on stdout."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    lines = done.stderr.splitlines()
    error, blank, hint = lines[-3:]
    assert error.startswith("error: ")
    assert blank == ""
    assert hint.startswith("hint: ")
    assert all(line.startswith("note: ") for line in lines[:-3])
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


def offered(hint: str) -> list[list[str]]:
    return [shlex.split(words) for words in hint.split("`")[1::2]]


class Typed(NamedTuple):
    """A command as it is after its hint was followed."""

    words: tuple[str, ...]
    """The words after ``highwater``, or a whole line of the shell."""
    offered: tuple[str, ...]
    """What the hint gave of them."""
    is_whole: bool = False
    """Whether the hint was a whole command."""
    is_shell: bool = False
    """Whether it is a line of the shell, after which the command is typed again."""


_SHELL = ("mkdir", "iconv", "cat", "ls")
_ELSEWHERE = ("pip", "nvidia-smi", "ray", "srun", "wc", "df", "export", "torchrun")
"""Programs that hints name and that a test does not run."""


def followed(words: tuple[str, ...], problem: str, hint: str) -> Iterator[Typed]:
    """The ways that a hint offers, each typed: a flag takes the place of what was typed of it or is
    added, a value that of the value that is refused; what is to be left out is; ``and`` joins two.
    """
    ways: list[Typed] = []
    end = 0
    is_left_out = False
    for found in re.finditer("`([^`]+)`", hint):
        between, behind = hint[end : found.start()], hint[found.end() :]
        end = found.end()
        parts = tuple(shlex.split(found[1]))
        is_bare = parts[0].startswith("-") and len(parts) == 1
        goes_on = is_left_out and is_bare and re.fullmatch(r"( out)?, or |, | and ", between)
        is_left_out = (
            bool(goes_on) or re.match(r"(( and|,| or) `[^`]+`)* out\b", behind) is not None
        )
        if (
            parts[0] in _ELSEWHERE
            or "where the GPUs are" in between
            or (is_bare and not is_left_out and "smaller" in between)
        ):
            continue
        is_joined = bool(ways) and re.search(r",? and\b", between) is not None and not goes_on
        base = ways.pop().words if is_joined else words
        ways.append(_typed(base, problem, parts, found[1], is_left_out=is_left_out))
    yield from ways


def _typed(
    words: tuple[str, ...], problem: str, parts: tuple[str, ...], line: str, *, is_left_out: bool
) -> Typed:
    if parts[0] in COMMANDS:
        return Typed(parts, parts, is_whole=True)
    if parts[0] in _SHELL:
        return Typed((line,), parts, is_shell=True)
    if not parts[0].startswith("-"):
        refused = [word for word in words if repr(word) in problem] or [
            word for word in words if re.search(rf"(?<!\S){re.escape(word)}(?![\w.])", problem)
        ]
        assert refused, (problem, line)
        wrong = max(refused, key=len)
        return Typed(tuple(line if word == wrong else word for word in words), parts)
    if problem.startswith("unknown flag") and not is_left_out:
        wrong = problem.split()[-1]
        return Typed(tuple(parts[0] if word == wrong else word for word in words), parts)
    flags = [word for word in parts if _is_flag(word)]
    kept, is_dropped = list[str](), False
    for word in words:
        is_dropped = word in flags if _is_flag(word) else is_dropped
        kept += [] if is_dropped else [word]
    return Typed((*kept, *(() if is_left_out else parts)), parts)


def _is_flag(word: str) -> bool:
    return re.match(r"--?[a-zA-Z]", word) is not None


def following(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The words of the next command, which the last line of stderr offers, after the program's."""
    command, _, _ = done.stderr.splitlines()[-1].removeprefix("next: ").partition("  (")
    program, *words = shlex.split(command)
    assert program == "highwater"
    return words
