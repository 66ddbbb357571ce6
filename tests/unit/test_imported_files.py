"""The files a trace depends on: what the tracer imports, and nothing of pages and commands."""

import shutil
from pathlib import Path

import pytest

from highwater.trials.traced import imported_digest, imported_files

SOURCE = Path(__file__).parents[2] / "src" / "highwater"
TRACER = "highwater.engine.tracer.tracer"
FILES = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import own.typed\n",
    "start.py": "import os\nfrom own.room import first\nfrom own.room.second import value\n",
    "room/__init__.py": "",
    "room/first.py": "def late():\n    if late:\n        import own.late\n",
    "room/second.py": "import typing\nif typing.TYPE_CHECKING:\n    import own.typed\n"
    "else:\n    import own.run\nvalue = 1\n",
    "late.py": "from own import start\n",
    "run.py": "",
    "typed.py": "",
    "aside.py": "",
}


def package(folder: Path) -> Path:
    """A package of nine files, of which a process that runs ``own.start`` imports seven."""
    for name, text in FILES.items():
        path = folder / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "own"


def test_what_is_imported_is_followed_into_functions_and_not_into_what_only_types_need(tmp_path):
    own = package(tmp_path)
    found = {str(path.relative_to(own)) for path in imported_files("own.start", own)}
    assert found == FILES.keys() - {"typed.py", "aside.py"}


@pytest.mark.parametrize(
    ("name", "is_of_a_trace"),
    [
        *(("pages/guide_page.py", False), ("cli/commands.py", False)),
        *(("search/bracket.py", False), ("memory/formula/formula.py", False)),
        *(("nouns/capacities.py", False), ("engine/models/loss.py", True)),
        *(("engine/kernels/rows_triton.py", True), ("engine/attention/__init__.py", True)),
        *(("nouns/trial.py", True), ("nouns/events.py", True), ("units.py", True)),
    ],
)
def test_a_trace_is_made_again_when_what_the_tracer_imports_has_changed(
    name, is_of_a_trace, tmp_path
):
    copy = shutil.copytree(SOURCE, tmp_path / "highwater")
    before = imported_digest(TRACER, SOURCE)
    assert imported_digest(TRACER, copy) == before, "wherever the package lies"
    (copy / name).write_text(f"{(copy / name).read_text()}\n# another line\n")
    assert (imported_digest(TRACER, copy) != before) is is_of_a_trace
