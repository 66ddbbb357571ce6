"""What `make test` says it runs, it runs."""

import os
import re
import sys
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

from places import captured

ROOT = Path(__file__).parents[2]


def test_pytest_enters_every_folder_that_has_tests(pytestconfig):
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {
        *("arch", "cli", "dist", "emit", "faults", "gpu", "numeric", "pages", "references"),
        "unit",
    } <= folders
    assert not [
        name
        for name in folders
        if any(fnmatch(name, pattern) for pattern in pytestconfig.getini("norecursedirs"))
    ]


def recipe(target: str) -> str:
    """What the Makefile runs for a target, less the names of its programs."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{target}:"))
    return "\n".join(takewhile(lambda line: line.startswith("\t"), lines[start + 1 :]))


def test_ci_runs_the_whole_suite_and_test_all_with_every_combination(pytestconfig):
    assert pytestconfig.getini("addopts")[-2:] == [
        "-m",
        "not gpu and not pages and not emit and not ray",
    ]
    assert recipe("test").strip() == "$(PYTEST)"
    assert "HIGHWATER_REQUIRE=transformers4 $(PYTEST)\n" in recipe("test-all")
    assert (ROOT / ".ci" / "run").read_text().endswith("exec make --jobs 2 types test\n")
    for kind in ("pages", "emit", "ray"):
        assert f"test-{kind}" in recipe("test-all")
        assert f" -m {kind}" in recipe(f"test-{kind}") or f"-m '{kind} or" in recipe(f"test-{kind}")


def test_what_runs_with_the_oldest_versions_is_there():
    found = re.findall(r"(tests/\w+/test_),\$\(addsuffix \.py,([^)]*)\)", recipe("test-oldest"))
    names = [(start, name) for start, named in found for name in named.replace("\\", "").split()]
    files = [ROOT / f"{start}{name}.py" for start, name in names]
    assert len(files) > 10
    assert [path for path in files if not path.exists()] == []


def test_pages_are_never_passed_over_in_silence(tmp_path):
    here = {"PATH": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = ("-m", "pytest", "-n", "0", "-q", "-m", "pages", "-k", "what_is_dark")
    one_of_them = "tests/pages/test_guide_in_a_browser.py"
    done = captured([sys.executable, *words, one_of_them], cwd=ROOT, env=here)
    assert done.returncode == 1
    assert "`apt-get install chromium`" in done.stdout or "`make test-pages`" in done.stdout
    assert "skipped" not in done.stdout
