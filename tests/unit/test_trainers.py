"""Each trainer is a row in every room that has a part of it."""

import ast
from pathlib import Path
from typing import get_args

from highwater.memory.trainers import MEMORY
from highwater.nouns.foreign_trainer import FOREIGN
from highwater.nouns.layout import Layout
from highwater.nouns.request import DECLARED
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import TRAINERS, Target, TrainerName
from highwater.trainers.targets import TARGETS

SRC = Path(__file__).parents[2] / "src" / "highwater"


def test_every_room_has_a_row_of_every_trainer():
    tree = ast.parse((SRC / "engine/tracer/trainers.py").read_text())  # torch stays outside
    (traced,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TRACED"
    )
    assert isinstance(traced, ast.Dict)
    assert set(TRAINERS) == set(MEMORY) == set(get_args(TrainerName))
    assert {ast.literal_eval(key) for key in traced.keys if key} == {
        name for name, traits in TRAINERS.items() if traits.traces != "none"
    }
    assert {name for name, traits in TRAINERS.items() if traits.is_watched} <= set(FOREIGN)


def test_every_target_has_a_row_whose_step_some_trainer_has():
    assert tuple(TARGETS) == get_args(Target)
    assert {row.predicted_for for row in TARGETS.values()} <= set(TRAINERS)
    assert {target for row in TRAINERS.values() for target in row.targets} <= set(TARGETS)


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
