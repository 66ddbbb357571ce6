"""What `make test` says it runs, it runs."""

import os
import subprocess
import sys
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_pytest_enters_every_folder_that_has_tests(pytestconfig: pytest.Config) -> None:
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {
        "arch",
        "cli",
        "dist",
        "emit",
        "faults",
        "gpu",
        "numeric",
        "pages",
        "references",
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


def test_the_corpus_is_left_out_sampled_and_whole_where_it_is_said_to_be(
    pytestconfig: pytest.Config,
) -> None:
    assert "--corpus none" in recipe("check")
    assert "--corpus $(CORPUS)" in recipe("test")
    assert "\nCORPUS ?= sample\n" in (ROOT / "Makefile").read_text()
    assert "make test CORPUS=turns" in (ROOT / ".ci" / "run").read_text()
    assert "--corpus" not in recipe("test-all")
    assert pytestconfig.getoption("corpus") in ("sample", "turns", "all"), "by default all of it"


def settings_of(pytestconfig: pytest.Config) -> Any:
    """tests/conftest.py, as pytest has loaded it."""
    (settings,) = (
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests" / "conftest.py")
    )
    return settings


def test_in_so_many_days_as_there_are_parts_every_case_of_a_test_is_in_the_sample(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(pytestconfig)
    for count in (1, 5, settings.PARTS, 49):
        days = []
        for day in range(settings.PARTS):
            monkeypatch.setenv("HIGHWATER_DAY", str(day))
            days.append(settings.sample(range(count), settings.PARTS))
        assert {case for cases in days for case in cases} == {*range(count)}
        assert min(map(len, days)) >= 1
        assert max(map(len, days)) <= count / settings.PARTS + 1
    for count in (1, 3):
        turns = []
        for day in range(count):
            monkeypatch.setenv("HIGHWATER_DAY", str(day))
            turns += settings.sample(range(count), None)
        assert sorted(turns) == [*range(count)]


def test_in_the_days_that_a_test_says_every_case_of_it_has_its_turn(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(pytestconfig)
    request.node.add_marker(pytest.mark.by_turns(days=3))
    assert settings.days_of([request.node], "by_turns") == 3
    assert settings.days_of([request.node], "corpus") == settings.PARTS
    for count in (1, 2, 7):
        turns = []
        for day in range(3):
            monkeypatch.setenv("HIGHWATER_DAY", str(day))
            turns.append(settings.sample(range(count), 3))
        assert {case for cases in turns for case in cases} == {*range(count)}
        assert 1 <= min(map(len, turns)) <= max(map(len, turns)) <= count / 3 + 1


def test_every_long_test_is_there_and_all_of_its_cases_have_their_turn(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(pytestconfig)
    for test in settings.long_tests():
        path, *names = test.split("::")
        source = (ROOT / path).read_text()
        assert f"def {names[-1]}(" in source or f"\nclass {names[0]}(" in source, test
    for count, days in ((1, 4), (2, 4), (3, 5), (9, 4)):
        turns = []
        for day in range(days):
            monkeypatch.setenv("HIGHWATER_DAY", str(day))
            turns += settings.turn(range(count), days, "tests/one.py::test_it")
        assert sorted(turns) == [*range(count)]


def test_pages_are_never_passed_over_in_silence(tmp_path: Path) -> None:
    here = {"PATH": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = ("-m", "pytest", "-n", "0", "-q", "-m", "pages", "-k", "what_is_dark", "tests/pages")
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "`apt-get install chromium`" in done.stdout or "`make test-pages`" in done.stdout
    assert "skipped" not in done.stdout


def test_pages_are_tested_where_somebody_asks_for_them(pytestconfig: pytest.Config) -> None:
    assert "not pages" in " ".join(pytestconfig.getini("addopts"))
    assert "-m pages tests/pages" in (ROOT / "Makefile").read_text()
