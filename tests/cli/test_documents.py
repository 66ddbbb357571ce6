"""Every command and program in README.md and CONTRIBUTING.md is run, or, where it needs a GPU, asked as a dry run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
COMMANDS = [
    (document, line.removeprefix("$ ").partition("  #")[0].strip())
    for document in DOCUMENTS
    for block in re.findall(r"```console\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 6
    assert PROGRAMS


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_a_command_in_a_document_runs(document: str, command: str, run: Run) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), f"{document} names a target that the Makefile does not have"
        return
    if program == "pip":
        done = subprocess.run(
            [sys.executable, "-m", *("pip", "install", "--dry-run", "--no-deps", "--no-index", "--no-build-isolation"), *words[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "does not provide the extra" not in done.stderr
        return
    words = [str(ROOT / word) if word.startswith(("examples/", "docs/", "tests/")) else word for word in words]
    if "--dry-run" not in words and words[0] not in ("predict", "guide", "recommend", "emit", "report"):
        words += ["--dry-run"] if "cpu" in words else ["--dry-run", "--device", "cuda"]
    done = run(program, *words)
    assert done.returncode == 0, done.stderr
    assert "high-water mark" in done.stdout or "--length" in words or words[0] == "guide"


@pytest.mark.parametrize("name", re.findall(r"^\| `(highwater \w+|\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
def test_a_command_in_the_table_exists(name: str, run: Run) -> None:
    assert run(*name.split(), "--help").returncode == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_in_the_readme_runs(program: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
