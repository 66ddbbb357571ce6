"""Names: every room of the tree is there, and no name that was given up comes back."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from source_trees import PACKAGE, nodes, trees

ROOT = Path(__file__).parents[2]
ROOMS = {
    *("cli", "pages", "api", "recommendation", "search", "trials", "trainers", "store", "memory"),
    *("model", "nouns", "engine"),
}
"""Of the control plane, from the top down, and the data plane, whole."""
GIVEN_UP_FILES = {
    *("affine", "answered", "askable", "asked", "asking", "cached", "campaign", "choosing"),
    *("evidence", "foresight", "gradient_sums", "guess", "guiding", "hidden_bytes", "judge"),
    *("known", "leash", "ledger", "ordering", "place", "remedies", "reporting", "score"),
    *("shipped", "stand_ins", "terms"),
}
GIVEN_UP_WORDS = {
    *("Asking", "EventLedger", "Guess", "Noun", "Place", "Remedy", "Room", "Score", "asking"),
    *("campaign", "engine_guess", "foresight", "gradient_sums", "guess", "hidden_bytes", "leash"),
    *("ledger", "remedies", "remedy", "slope", "slopes", "stand_ins", "take_place", "shipped"),
    *("AskedTrial", "GradientSums", "SettingsScore", "ShippedTrace"),
}
ELSEWHERE: dict[str, set[str]] = {}
"""Words that mean what the field means by them there."""
SHARED = {
    "logs": "what trials write: where it lies, and what it says",
    "ranks": "the processes that train together: a trial's, and those of a loop of one's own",
    "recommend": "the command and what it answers",
    "rope": "rotary positions: the config and the model",
    "trainer": "who trains: the trainers that are known, and ours in a loop of one's own",
    "training": "what a run of training is, and how it is started",
    "trial": "what a trial is, and how it is trained",
}
"""Names of files in more than one room, and the one thing that they mean in all."""
SAME_BY_CHANCE = {
    "_TAIL_BYTES": "of a log that is read, and of what a rank says that is kept",
    "_WARPS": "of two kernels, each tuned by itself",
}
"""Constants of one name and one value in two files, and why neither is the other."""
UNITS = {"KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}


def test_the_rooms_are_these():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found == ROOMS
    assert all(ast.get_docstring(trees()[PACKAGE / room / "__init__.py"]) for room in found)


def test_no_file_has_a_name_that_was_given_up():
    assert not [path for path in trees() if path.stem in GIVEN_UP_FILES]
    assert not {path.parent.name for path in trees()} & {"prediction", "report", "launch"}


def test_nothing_in_a_file_has_a_name_that_was_given_up():
    found: dict[str, set[str]] = defaultdict(set)
    for path, inside in nodes().items():
        for node in inside:
            names = {getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname")}
            for name in names & GIVEN_UP_WORDS:
                found[str(name)].add(str(path.relative_to(PACKAGE)))
    for name, where in found.items():
        assert where <= ELSEWHERE.get(name, set()), name


def test_no_two_files_of_one_name_mean_different_things():
    stems: dict[str, list[str]] = defaultdict(list)
    for path in trees():
        stems[path.stem].append(str(path.relative_to(PACKAGE)))
    twice = {stem for stem, paths in stems.items() if len(paths) > 1}
    assert twice - {"__init__"} == set(SHARED)


def test_no_two_files_of_tests_are_one_module():
    outside_packages = [
        path.stem
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert len(outside_packages) > 100
    assert sorted(set(outside_packages)) == sorted(outside_packages)


def test_a_number_of_one_name_and_one_value_stands_once():
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for name, value in numbers(tree):
            places[name.strip("_"), value].append(f"{path.relative_to(PACKAGE)}: {name}")
    assert len(places) > 100
    twice = {found[0].partition(": ")[2]: found for found in places.values() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in SAME_BY_CHANCE} == {}


def numbers(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Constants of a file whose values are made of numbers alone, a mapping of them too, by name;
    what a unit's name stands for is worked out.
    """
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id.isupper() and isinstance(value, ast.expr):
            with suppress(NameError, TypeError):
                code = compile(ast.Expression(value), "", "eval")
                found = eval(code, {"__builtins__": {}}, UNITS)  # noqa: S307 -- our own source
                told = list(found.values()) if isinstance(found, dict) else [found]
                if all(isinstance(number, int | float) for number in told):
                    yield target.id, repr(found)


def test_no_two_types_have_one_name():
    types: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            name = node.name if isinstance(node, ast.ClassDef) else _alias(node)
            if name is not None:
                types[name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in types.items() if len(where) > 1} == {}


def _alias(node: ast.stmt) -> str | None:
    """The name that a file gives to a type; None for another statement."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        return name if re.fullmatch(r"_?[A-Z][a-z]\w*", name) else None
    return None
