"""The pages of results: each table is what its command prints of the files beside it."""

import os
from collections.abc import Callable
from itertools import groupby

import pytest
from conftest import HERE, TIMEOUT_S

from fork_server import ForkServer
from places import RESULTS, ROOT
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
