"""What the other tests run, forked from a process that has imported it, is what is installed."""

import os

import pytest
from conftest import SIMULATED, installed


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
    """What was said, without how long it had taken by then."""
    return [line.partition("] ")[2] or line for line in talk.splitlines()]
