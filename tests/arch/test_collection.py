"""What `make test` says it runs, it runs."""

from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_pytest_enters_every_folder_that_has_tests(pytestconfig: pytest.Config) -> None:
    folders = {path.parent.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert {"arch", "cli", "dist", "faults", "gpu", "numeric", "pages", "unit"} <= folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in pytestconfig.getini("norecursedirs"))]
