"""The pages of results: each table is what its command prints of the files beside it, and every
command there can start.
"""

import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
SEARCHES, PREDICTIONS = "lab/searches.md", "lab/predictions.md"
TABLES = (
    ("find/README.md", "find/measure.py --page long --table"),
    ("find/README.md", "find/measure.py --page published --table"),
    (SEARCHES, "find/measure.py --page sft --table"),
    (SEARCHES, "find/measure.py --page edges --table"),
    (SEARCHES, "lab/memory_only.py --table"),
    ("other_trainers/README.md", "other_trainers/capacities.py --table"),
    ("other_trainers/README.md", "other_trainers/reports.py"),
    ("other_trainers/README.md", "other_trainers/step_cells.py --left-out"),
    ("other_trainers/how_far.md", "other_trainers/how_far.py --table"),
    ("concurrent/README.md", "concurrent/eight_cells.py --table"),
    ("training/README.md", "training/sft.py --table"),
    ("speed/README.md", "speed/speeds.py --table"),
    ("speed/README.md", "speed/offload_step.py --table"),
    ("checkpoints/README.md", "checkpoints/saves.py --table"),
    ("attention/README.md", "attention/copy_task.py --table"),
    ("context_parallel/README.md", "context_parallel/six_gpus.py --table"),
    ("context_parallel/README.md", "context_parallel/topology.py --table"),
    ("context_parallel/README.md", "context_parallel/topology.py --device cuda --table"),
    ("context_parallel/README.md", "context_parallel/two_ranks.py --table"),
    ("context_parallel/README.md", "context_parallel/two_ranks_capacity.py --table"),
    ("h20/README.md", "h20/compare.py --table"),
    ("predict/README.md", "predict/traced.py --summary"),
    ("predict/README.md", "predict/intervals.py"),
    (PREDICTIONS, "predict/traced.py --table"),
    (PREDICTIONS, "lab/events.py --table"),
    (PREDICTIONS, "lab/outside.py"),
    (PREDICTIONS, "lab/second_check.py --table"),
    (PREDICTIONS, "lab/breakdown.py --table"),
    ("lab/trinity.md", "lab/outside_scan.py --table"),
)
"""A page below docs/results, and the command whose table it has."""
OTHERS = (
    "context_parallel/one_micro_batch.py --table",
    "lab/histories.py --table",
    "lab/peers.py --table",
)
"""Tables that a page has a part of, or sums up."""


def run(command: str) -> str:
    script, *words = command.split()
    done = subprocess.run(
        [sys.executable, str(RESULTS / script), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "command"), TABLES, ids=[each[1] for each in TABLES])
def test_a_page_has_the_table_that_its_command_prints(name, command):
    page = (RESULTS / name).read_text().splitlines()
    rows = [line for line in run(command).splitlines() if line.startswith("|")]
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
def test_a_command_prints_a_table(command):
    assert sum(line.startswith("|") for line in run(command).splitlines()) > 2


@pytest.mark.parametrize(
    "script", sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.py"))
)
def test_every_script_starts(script):
    text = (RESULTS / script).read_text()
    if "argparse" in text:
        assert "usage:" in run(f"{script} --help")
    else:
        compile(text, script, "exec")
