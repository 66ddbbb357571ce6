"""Each trainer is a row of the registry, and a module that has its parts."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

from highwater.memory.trainers import MEMORY
from highwater.nouns.foreign_trainer import FOREIGN
from highwater.nouns.layout import Layout
from highwater.nouns.request import DECLARED
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import OURS, REGISTRY, TRAINERS, TrainerName, TriedTrainer
from highwater.trainers.foreign import TRIALS
from highwater.trainers.targets import TARGETS

SRC = Path(__file__).parents[2] / "src" / "highwater"


def test_every_trainer_has_each_part_that_the_registry_says():
    assert set(REGISTRY) == {OURS, *FOREIGN, *TRAINERS, *TARGETS}
    assert set(get_args(TriedTrainer)) == {OURS, *FOREIGN}
    for parts in (TRAINERS, MEMORY, FOREIGN, TRIALS, TARGETS):
        assert all(parts.values())
    traced = {path.stem.removesuffix("_step") for path in (SRC / "engine/tracer").glob("*_step.py")}
    assert traced == {name for name, traits in TRAINERS.items() if traits.traces != "none"}
    assert {name for name, traits in TRAINERS.items() if traits.is_watched} <= set(FOREIGN)


def test_every_target_has_a_row_whose_step_some_trainer_has():
    assert {row.predicted_for for row in TARGETS.values()} <= set(TRAINERS)
    assert {target for row in TRAINERS.values() for target in row.targets} <= set(TARGETS)


def test_a_trainers_module_is_imported_when_it_is_asked_for():
    asks = (
        "import sys; from highwater.memory.trainers import MEMORY; "
        "from highwater.trainers.targets import TARGETS; "
        "there = lambda: sorted(n for n in sys.modules if n.startswith('highwater.trainers.t')); "
        "print(there()); TARGETS['torchtitan']; print(there())"
    )
    said = subprocess.check_output([sys.executable, "-c", asks], text=True).splitlines()
    assert said == [
        "['highwater.trainers.targets']",
        "['highwater.trainers.targets', 'highwater.trainers.torchtitan']",
    ]


def test_nobody_compares_a_trainer_with_a_name():
    names = set(get_args(TrainerName))
    compared = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(
            isinstance(each, ast.Constant) and each.value in names
            for each in (node.left, *node.comparators)
        )
    ]
    assert compared == []


def test_every_setting_of_a_rung_has_a_name_that_a_target_may_know():
    fields = {row.rung_field for row in DECLARED.values()}
    assert set(Settings.__struct_fields__) <= fields
    names = {*DECLARED, *Layout().degree_settings}
    assert all(row.knows <= names for row in TARGETS.values())
