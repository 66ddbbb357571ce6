"""What `make test` says it runs, it runs."""

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_pytest_enters_every_folder_that_has_tests(pytestconfig: pytest.Config) -> None:
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"arch", "cli", "dist", "emit", "faults", "gpu", "numeric", "pages", "references", "unit"} <= folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in pytestconfig.getini("norecursedirs"))]


def test_pages_are_never_passed_over_in_silence(tmp_path: Path) -> None:
    here = {"PATH": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = ("-m", "pytest", "-n", "0", "-q", "-m", "pages", "-k", "what_is_dark", "tests/pages")
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "`apt-get install chromium`" in done.stdout or "`make test-pages`" in done.stdout
    assert "skipped" not in done.stdout


def test_pages_are_tested_where_somebody_asks_for_them(pytestconfig: pytest.Config) -> None:
    assert "not pages" in " ".join(pytestconfig.getini("addopts"))
    assert "-m pages tests/pages" in (ROOT / "Makefile").read_text()
