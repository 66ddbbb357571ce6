"""Settings of all tests: no property is held to a time, which on a shared machine says nothing
about it.

What a fuzzer or a sweep counted (``record_property("counted", text)``) is printed at the end,
however many processes ran it.
"""

import gc
import os
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import settings

from fork_server import ForkServer

settings.register_profile("highwater", deadline=None, max_examples=40)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("deep", deadline=None, max_examples=500)
settings.load_profile("deep" if os.environ.get("HIGHWATER_DEEP") else "highwater")


def pytest_configure(config: pytest.Config) -> None:
    """No thread of a process spins while others want the core: two trials at once take up to six
    times as long where they do. Nobody asks the Hub: a test that does starts a server of its own.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    gc.disable()  # until all is collected


def pytest_collection_finish() -> None:
    """What is collected stays: no collection of garbage walks through it again, and those of what
    tests make are rarer.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """One for all tests of this process, which has imported and answered what commands do."""
    from torch_server import ANSWERING

    ANSWERING.start()
    yield ANSWERING
    ANSWERING.end()


@pytest.fixture
def forks(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every module and command of ours that is started during a test start as a fork."""
    monkeypatch.setattr(subprocess, "Popen", fork_server.popen_of_commands)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
