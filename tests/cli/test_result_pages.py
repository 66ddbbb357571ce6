"""The pages of results: each table is what its command prints of the files beside it; one command
answers each of thirty questions of real users.
"""

import json
import os
import shlex
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from conftest import HERE, TIMEOUT_S

from fork_server import ForkServer
from highwater.errors import EXIT_ANSWERED_NO, EXIT_USER
from places import RESULTS, ROOT, script
from tables import table

TABLES = table("result_pages", "tables")
"""A page below docs/results, and the command whose table it has."""
OTHERS = table("result_pages", "others")
"""Commands whose tables a page has a part of, or sums up."""


@pytest.fixture
def printed(fork_server: ForkServer) -> Callable[[str], str]:

    def printed(command: str) -> str:
        script, *words = command.split()
        words = (str(RESULTS / script), *words)
        environment = {**os.environ, **HERE}
        done = fork_server.run(*words, within_s=TIMEOUT_S, cwd=ROOT, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


@pytest.mark.parametrize(("name", "command"), TABLES, ids=[each[1] for each in TABLES])
def test_a_page_has_the_table_that_its_command_prints(printed, name, command):
    page = (RESULTS / name).read_text().splitlines()
    rows = [line for line in printed(command).splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert [row for row in rows if row not in page] == []
    tables = [
        list(lines)
        for is_table, lines in groupby(page, key=lambda line: line.startswith("|"))
        if is_table
    ]
    own = [table for table in tables if any(row in rows for row in table[2:])]
    assert [row for table in own for row in table if row not in rows] == [], (
        "nothing prints these any more"
    )


@pytest.mark.parametrize("command", OTHERS)
def test_a_command_prints_a_table(printed, command):
    assert sum(line.startswith("|") for line in printed(command).splitlines()) > 2


@pytest.mark.parametrize(
    "script", sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.py"))
)
def test_every_script_starts(printed, script):
    text = (RESULTS / script).read_text()
    if "argparse" in text:
        assert "usage:" in printed(f"{script} --help")
    else:
        compile(text, script, "exec")


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
