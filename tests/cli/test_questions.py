"""Thirty questions of real users, docs/results/questions: one command answers each."""

import json
import shlex
from pathlib import Path

import pytest
from conftest import Run

from places import script

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "questions"
QUESTIONS = json.loads((FOLDER / "questions.json").read_text())


def first_line(run: Run, command: str) -> tuple[int, str]:
    """Exit code and first line of the answer, on 80 columns, without the Hub."""
    program, *words = shlex.split(command)
    done = run(program, *words, COLUMNS="80", HF_HUB_OFFLINE="1", HF_HOME="nothing")
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stdout or done.stderr).splitlines()[0]


def test_there_are_thirty_of_all_kinds():
    assert len(QUESTIONS) == 30
    assert len({each["source_url"] for each in QUESTIONS}) == 30
    assert all(each["source_url"].startswith("https://github.com/") for each in QUESTIONS)
    assert {
        *("LoRA", "QLoRA", "nothing fits", "several nodes", "other trainer"),
        *("my GPU is not listed", "DPO", "GRPO", "mixture of experts", "host memory"),
    } <= {topic for each in QUESTIONS for topic in each["topics"]}


@pytest.mark.parametrize("command", [each["command"] for each in QUESTIONS])
def test_one_command_answers_a_question_in_a_sentence(run, command):
    code, line = first_line(run, command)
    assert code in (0, 1), line
    assert script(FOLDER / "answers.py").says_tokens_or_no(line), line
    assert line.startswith("No") == (code == 1), line
    assert script(FOLDER / "answers.py").is_answered({"exit_code": code, "first_line": line}), line


def test_the_page_is_of_what_is_recorded_and_every_question_is_on_it():
    recorded = json.loads((FOLDER / "answers.json").read_text())
    assert script(FOLDER / "answers.py").page(recorded) == (FOLDER / "README.md").read_text()
    commands = [each["command"] for each in QUESTIONS]
    assert [each["command"] for each in recorded["before"]] == commands
    assert [each["command"] for each in recorded["after"]] == commands
    assert all(
        each["seconds"] < script(FOLDER / "answers.py").ANSWER_S for each in recorded["after"]
    )
