"""Thirty questions of real users, docs/results/questions: one command answers each."""

import json
import shlex
from typing import Any

import pytest

from highwater.errors import EXIT_ANSWERED_NO, EXIT_USER
from places import RESULTS, script

FOLDER = RESULTS / "questions"
QUESTIONS = json.loads((FOLDER / "questions.json").read_text())
RECORDED: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "answers.json").read_text())
REFUSED = "highwater predict deepseek-ai/DeepSeek-V3 --gpus 64xA100"
"""Its family is none that was compared: the page has the refusal."""
ANSWERS = script(FOLDER / "answers.py")


def test_there_are_thirty_of_all_kinds():
    assert (len(QUESTIONS), len({each["source_url"] for each in QUESTIONS})) == (30, 30)
    assert all(each["source_url"].startswith("https://github.com/") for each in QUESTIONS)
    assert {
        *("LoRA", "QLoRA", "nothing fits", "several nodes", "other trainer"),
        *("my GPU is not listed", "DPO", "GRPO", "mixture of experts", "host memory"),
    } <= {topic for each in QUESTIONS for topic in each["topics"]}


@pytest.mark.parametrize("recorded", RECORDED["after"], ids=lambda each: each["command"])
def test_one_command_answers_a_question_in_a_sentence(run, recorded):
    """Its first line on 80 columns, without the Hub."""
    program, *words = shlex.split(recorded["command"])
    done = run(program, *words, COLUMNS="80", HF_HUB_OFFLINE="1", HF_HOME="nothing")
    assert "Traceback" not in done.stderr
    code, line = done.returncode, (done.stdout or done.stderr).splitlines()[0]
    assert code == recorded["exit_code"], line
    if recorded["command"] == REFUSED:
        assert (code, line) == (EXIT_USER, recorded["first_line"])
        return
    assert ANSWERS.says_tokens_or_no(line), line
    assert line.startswith("No") == (code == EXIT_ANSWERED_NO), line
    assert ANSWERS.is_answered({"exit_code": code, "first_line": line}), line


def test_the_page_is_of_what_is_recorded_and_every_question_is_on_it():
    assert ANSWERS.page(RECORDED) == (FOLDER / "README.md").read_text()
    commands = [each["command"] for each in QUESTIONS]
    for when in ("before", "after"):
        assert [each["command"] for each in RECORDED[when]] == commands
    assert all(each["seconds"] < ANSWERS.ANSWER_S for each in RECORDED["after"])
