"""Cases of tests: those that are data, and those that only `make test-all` runs."""

import json
import os
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def table(file: str, name: str) -> Any:
    """The cases of this name in ``tests/data/FILE.json``."""
    return json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))[name]


def deep(*cases: Any) -> tuple[Any, ...]:
    """These cases where ``HIGHWATER_DEEP`` is set, as `make test-all` sets it, and none elsewhere;
    the processes that a test starts are told, too.
    """
    return cases if os.environ.get("HIGHWATER_DEEP") else ()
