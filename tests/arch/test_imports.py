"""Imports: no module needs itself, and all of them run down the stack of rooms, wherever in a file
they stand: in a function, or for a type checker alone.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_trees import PACKAGE, nodes

ROOT = Path(__file__).parents[2]
STACKS = [
    [re.split(r" [|:] ", layer) for layer in contract["layers"]]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    if contract["type"] == "layers"
]
"""Rooms from the top down, of each plane: what `lint-imports` holds, too."""
ABOVE_ALL = {"highwater", "highwater.__main__"}
"""The package, whose names are loaded when somebody asks for them, and the command."""
BELOW_ALL = {"highwater.version"}

SIBLINGS = {"highwater.model", "highwater.nouns"}
"""They import each other: a question holds the shape of its model."""
ABOVE_ENGINE = "highwater.engine"
"""The door, whose names are loaded when somebody asks for them."""

Graph = dict[str, set[str]]


def import_graph(package: Path, files: Mapping[Path, Iterable[ast.AST]]) -> Graph:
    """What each module imports of its own package: every `import` in its file is read."""
    found = {module_name(path, package): inside for path, inside in files.items()}
    return {
        name: {each for node in inside for each in imported(node, found.keys())}
        for name, inside in found.items()
    }


@cache
def graph_of_src() -> Graph:
    return import_graph(PACKAGE, nodes())


def module_name(path: Path, package: Path) -> str:
    names = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imported(node: ast.AST, modules: Set[str]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if not isinstance(node, ast.ImportFrom):
        return set()
    assert node.level == 0, "imports are absolute"
    below = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in modules else str(node.module) for name in below.values()} & modules


def cycle(graph: Graph) -> list[str]:
    """A chain of imports that ends where it began; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def goes_down(importer: str, found: str) -> bool:
    """Whether an import stays in its room, or goes to one further down in the same stack."""
    if importer in ABOVE_ALL | {ABOVE_ENGINE} or found in BELOW_ALL:
        return True
    one, other = room_of(importer), room_of(found)
    if one == other or {one, other} == SIBLINGS:
        return True
    depths = [
        {room: depth for depth, rooms in enumerate(stack) for room in rooms} for stack in STACKS
    ]
    return any(one in depth and other in depth and depth[one] < depth[other] for depth in depths)


def room_of(name: str) -> str:
    """The room of a module; those of the data plane lie below ``highwater.engine``."""
    parts = name.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["engine"] else 2])


def test_no_module_imports_itself_through_others():
    assert len(graph_of_src()) > 200
    assert cycle(graph_of_src()) == []


@pytest.mark.parametrize(
    "late",
    [
        "def start():\n    from own.one import first\n    return first\n",
        "def start():\n    if start:\n        import own.one\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from own import one\n",
    ],
)
def test_a_cycle_is_found_whichever_way_it_is_closed(late):
    texts = {
        "__init__": "",
        "one": "import json\nfrom own.two import start\nfirst = json\n",
        "two": "from own import three\n",
    }

    def found(three: str) -> list[str]:
        own = {Path("own", f"{name}.py"): text for name, text in (texts | {"three": three}).items()}
        read = {path: ast.walk(ast.parse(text)) for path, text in own.items()}
        return cycle(import_graph(Path("own"), read))

    assert found("") == []
    assert set(found(late)) == {"own.one", "own.two", "own.three"}


def test_every_import_goes_down_the_rooms():
    up = {(name, each) for name, found in graph_of_src().items() for each in found if name != each}
    assert not {pair for pair in up if not goes_down(*pair)}


def test_what_goes_up_or_sideways_or_to_the_other_plane_is_told():
    assert goes_down("highwater.pages.page", "highwater.units")
    assert goes_down("highwater.engine.bench.attention.benchmark", "highwater.engine.parallel.mesh")
    for one, other in (
        ("highwater.nouns.plan", "highwater.trials.probe"),
        ("highwater.search.proof", "highwater.recommendation.candidates"),
        ("highwater.trials.traced", "highwater.engine.tracer.tracer"),
        ("highwater.engine.training.step", "highwater.memory.capacity"),
        ("highwater.api.search", "highwater"),
    ):
        assert not goes_down(one, other)


BY_NAME = {
    "__init__.py": "importlib.import_module(_PUBLIC[name])",
    "nouns/trainer.py": "import_module(f'highwater.trainers.{REGISTRY[name].module}')",
}
"""The package's public names, and the registry of trainers: imported when they are asked for."""


def test_nothing_but_the_package_and_the_registry_loads_modules_by_a_name_in_a_string():
    loading = {
        (str(path.relative_to(PACKAGE)), ast.unparse(node))
        for path, inside in nodes().items()
        for node in inside
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    }
    others = loading - BY_NAME.items()
    assert BY_NAME.items() <= loading
    assert others, "other libraries, and a user's own module"
    assert not [call for _, call in others if "highwater" in call]


def test_nothing_that_another_machine_sends_is_unpickled():
    collectives = {"all_gather_object", "gather_object", "broadcast_object_list"}
    collectives |= {"scatter_object_list", "send_object_list", "recv_object_list"}
    named = {
        f"{path.relative_to(PACKAGE)}: {node.attr}"
        for path, inside in nodes().items()
        for node in inside
        if isinstance(node, ast.Attribute)
        and (node.attr in collectives or ast.unparse(node) in ("pickle.loads", "pickle.load"))
    }
    assert not named
