"""The installed commands, run as a user runs them: real processes in an empty directory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
SIMULATED = ("--device", "cuda", "--memory", "80GiB", "--dry-run")
"""Flags that make a search answer from a memory law, on any machine."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in an empty directory; every GPU is hidden, so that all machines answer alike."""

    def run(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "PATH": f"{BIN}:{os.environ['PATH']}"}
        return subprocess.run(
            [BIN / program, *words],
            cwd=tmp_path,
            env={**os.environ, **hidden, **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


@pytest.fixture
def highwater(run: Run) -> Run:
    """Runs ``highwater``."""
    return lambda *words, **environment: run("highwater", *words, **environment)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A directory with the config of a tiny model."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    config = {
        "model_type": "qwen3",
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


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
