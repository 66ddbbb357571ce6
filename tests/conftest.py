"""Settings of all tests: no property is held to a time, which on a shared machine says nothing about it.

What a fuzzer or a sweep counted (``record_property("counted", text)``) is printed at the end, however many processes ran it.
"""

import pytest
from hypothesis import settings

settings.register_profile("highwater", deadline=None)
settings.load_profile("highwater")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was counted."""
    reports = (report for found in terminalreporter.stats.values() for report in found if isinstance(report, pytest.TestReport))
    counted = [f"{report.nodeid}: {text}" for report in reports for name, text in report.user_properties if name == "counted"]
    if counted:
        terminalreporter.section("counted")
    for line in dict.fromkeys(counted):
        terminalreporter.line(line)
