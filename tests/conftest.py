"""Settings of all tests: no property is held to a time, which on a shared machine says nothing
about it.

Tests that run once for each recorded study, family, catalog entry or page, and real trials that
run once for each number of processes or kind of fault, are marked ``corpus``.
``--corpus`` says how many of their cases run: ``none``, the ``sample`` of the day, a part of
``PARTS`` that goes once round in as many days, or ``all``. With ``turns``, as CI has it, all run
but those marked ``by_turns``, of which each test has one a day, or with ``by_turns(days=3)`` a
third, and those of ``long_tests.txt``, of whose cases a part runs each day and every one within
``LONG_DAYS``, or the days of its mark if those are more. ``HIGHWATER_DAY`` names another day.

What a fuzzer or a sweep counted (``record_property("counted", text)``) is printed at the end,
however many processes ran it.
"""

import os
from collections import defaultdict
from datetime import date
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings

PARTS = 8
"""Days until every case of the corpus was in the sample."""

LONG_DAYS = 8
"""Days until every case of a long test has run."""
LONG_TESTS = Path(__file__).with_name("long_tests.txt")

settings.register_profile("highwater", deadline=None, max_examples=40)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("deep", deadline=None, max_examples=500)
settings.load_profile("highwater")  # `--hypothesis-profile` names another


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--corpus",
        choices=("none", "sample", "turns", "all"),
        default="all",
        help="cases that run once for each recorded study, family, catalog entry or page",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Every process of a run has the same day, also past midnight, and no thread of one spins
    while others want the core: two trials at once take up to six times as long where they do.
    Nobody asks the Hub: a test that does starts a server of its own.
    """
    os.environ.setdefault("HIGHWATER_DAY", str(date.today().toordinal()))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_report_header(config: pytest.Config) -> str:
    day = os.environ["HIGHWATER_DAY"]
    return f"corpus: {config.getoption('corpus')}, of HIGHWATER_DAY={day}"


@pytest.hookimpl(trylast=True)  # a sample is of what `-m` leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for of the corpus."""
    asked = config.getoption("corpus")
    if asked == "all":
        return
    mark = "by_turns" if asked == "turns" else "corpus"
    long = long_tests() if asked == "turns" else frozenset[str]()
    by_test: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        test, is_marked = item.nodeid.partition("[")[0], item.get_closest_marker(mark) is not None
        if is_marked or test in long:
            by_test[test, is_marked].append(item)
    every = [item for cases in by_test.values() for item in cases]
    kept: list[pytest.Item] = []
    for (test, is_marked), cases in by_test.items():
        days = (days_of(cases, mark) or len(cases)) if is_marked else 1
        kept += turn(cases, max(days, LONG_DAYS), test) if test in long else sample(cases, days)
    left_out = set(every) if asked == "none" else set(every) - set(kept)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def long_tests() -> frozenset[str]:
    """The tests that take long, by their ids."""
    lines = LONG_TESTS.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


def turn(cases: list[pytest.Item], days: int, test: str) -> list[pytest.Item]:
    """The day's part of a long test's cases, none on some days; each test begins on its own."""
    day = int(os.environ["HIGHWATER_DAY"]) + crc32(test.encode())
    return cases[day % days :: days]


def days_of(cases: list[pytest.Item], mark: str) -> int | None:
    """Days until every case of a test has run; None: as many as it has cases."""
    if mark == "corpus":
        return PARTS
    found = cases[0].get_closest_marker(mark)
    return None if found is None else found.kwargs.get("days")


def sample(cases: list[pytest.Item], parts: int | None) -> list[pytest.Item]:
    """The day's part of a test's cases; one of them, where there are fewer than parts, or None."""
    day, parts = int(os.environ["HIGHWATER_DAY"]), min(parts or len(cases), len(cases))
    return cases[day % parts :: parts]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was counted."""
    reports = (
        report
        for found in terminalreporter.stats.values()
        for report in found
        if isinstance(report, pytest.TestReport)
    )
    counted = [
        f"{report.nodeid}: {text}"
        for report in reports
        for name, text in report.user_properties
        if name == "counted"
    ]
    if counted:
        terminalreporter.section("counted")
    for line in dict.fromkeys(counted):
        terminalreporter.line(line)
