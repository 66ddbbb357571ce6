"""Requests for other trainers: what they are told, what they cannot be told."""

import ast
import shlex
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_declared_settings import value_of

from highwater.cli.config import to_yaml
from highwater.cli.flags import request_of
from highwater.cli.grammar import parse
from highwater.errors import HighwaterError, UsageError
from highwater.memory.trainers import MEMORY
from highwater.nouns import foreign_request, trainer
from highwater.nouns.layout import Layout
from highwater.nouns.plan import plan, plan_trial
from highwater.nouns.request import DECLARED, Request, request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Question
from highwater.nouns.trial import TrialSpec
from highwater.pages.study_commands import find_words, try_words
from highwater.trainers.foreign import TRIALS
from highwater.trainers.targets import TARGETS
from places import ROOT, machine_with, question_of
from tables import table

COMMAND = "torchrun --nproc-per-node {gpus} train.py --len {length} --sp {ulysses} --steps {steps}"
ASKED: dict[str, Any] = {"model": "Qwen3-0.6B", "trainer": "command", "command": COMMAND}
MACHINE = machine_with(8)


def asked(**changes: Any) -> Request:
    return request_from({**ASKED, **changes}, keywords=True)


def question(**changes: Any) -> Question:
    return plan(asked(**changes), MACHINE).question


def trial_of(**changes: Any) -> TrialSpec:
    found = question(**changes)
    return found.trial(found.cells[0], 8192)


def test_the_rungs_of_another_trainer_are_the_allocators():
    cells = question(gpus=[1, 2], ulysses=[1, 2]).cells
    found = [(c.layout.gpus, c.layout.ulysses_degree, c.settings.allocator) for c in cells]
    layouts, allocators = ((1, 1), (2, 1), (2, 2)), ("native", "expandable")
    assert found == [(*layout, allocator) for layout in layouts for allocator in allocators]
    (only,) = question(gpus=[1], allocator="expandable").cells
    assert only.settings.label == "Env"


def test_a_trial_fills_the_placeholders_of_its_command(tmp_path):
    spec = trial_of(gpus=[4], ulysses=[2], steps=3)
    words = foreign_request.filled_command(spec.foreign.command, spec, tmp_path)
    assert shlex.join(words) == ("torchrun --nproc-per-node 4 train.py --len 8192 --sp 2 --steps 3")
    every = foreign_request.split_command(
        " ".join(f"--{name}={{{name}}}" for name in foreign_request.PLACEHOLDERS)
    )
    assert foreign_request.placeholders_of(every) == set(foreign_request.PLACEHOLDERS)
    filled = foreign_request.filled_command(every, spec, tmp_path)
    assert not any("{" in word for word in filled)
    assert f"--output={tmp_path}" in filled
    assert f"--model={spec.model_directory}" in filled
    assert foreign_request.filled_command(("{{a}}", "{length}"), spec, tmp_path) == ("{a}", "8192")


@pytest.mark.parametrize(
    ("command", "what"), table("foreign_requests", "a_command_that_cannot_be_filled_is_refused")
)
def test_a_command_that_cannot_be_filled_is_refused(command, what):
    with pytest.raises(UsageError) as refused:
        question(command=command)
    assert what in refused.value.hint


@given(st.text(max_size=40))
def test_no_command_is_too_odd_to_be_split_or_refused(text):
    try:
        words = foreign_request.split_command(text)
    except UsageError:
        return
    typed = trainer.ForeignTrainer(trainer="command", command=words).typed
    assert foreign_request.split_command(typed) == words, "what is shown is the same command again"


@pytest.mark.parametrize(
    ("named", "missing"),
    [
        ({"gpus": [1, 2], "command": "train {length}"}, "{gpus}"),
        ({"gpus": [4], "ulysses": [1, 2], "command": "train {length} {gpus}"}, "{ulysses}"),
        ({"gpus": [4], "ring": [1, 2], "command": "train {length}"}, "{ring}"),
    ],
)
def test_several_values_that_a_command_is_not_told_are_refused(named, missing):
    with pytest.raises(UsageError) as refused:
        question(**named)
    assert missing in refused.value.problem


def test_one_value_may_stand_in_the_command_itself():
    found = question(gpus=[4], ulysses=[2], command="train --nproc 4 --sp 2 {length}")
    assert {(c.layout.gpus, c.layout.ulysses_degree) for c in found.cells} == {(4, 2)}
    assert {c.layout.gpus for c in question(command="train {length}").cells} == {1}
    assert {c.layout.gpus for c in question().cells} == {1, 2, 4, 8}


@pytest.mark.parametrize("name", sorted(set(DECLARED) - trainer.FOREIGN["command"].settings))
def test_what_a_command_cannot_be_told_is_refused_by_name(name):
    row = DECLARED[name]
    with pytest.raises(UsageError) as refused:
        asked(**{name: value_of(row)})
    assert row.words in refused.value.problem
    assert refused.value.hint


@pytest.mark.parametrize("name", ["command", "trainer_config", "done_pattern"])
def test_what_is_said_of_another_trainer_says_nothing_of_this_engine(name):
    named = {"command": COMMAND, "trainer_config": "base.yaml", "done_pattern": "done"}
    request = request_from({"model": "Qwen3-0.6B", name: named[name]}, keywords=True)
    with pytest.raises(UsageError, match=DECLARED[name].words):
        plan(request, MACHINE)


@pytest.mark.parametrize(
    "changes", [{"command": None}, {"proof": "memory"}, {"done_pattern": "(unclosed"}]
)
def test_what_is_missing_or_cannot_be_is_refused_before_anything_starts(changes):
    with pytest.raises(HighwaterError):
        question(**changes)


def test_everything_that_an_outcome_depends_on_is_in_the_keys():
    known = trial_of()
    ours = question_of(gpus=[1], loss="full", allocator="native")
    others = (
        trial_of(command=f"{COMMAND} --more"),
        trial_of(done_pattern="done"),
        trial_of(done_pattern=""),
        ours.trial(ours.cells[0], 8192),
    )
    assert len({spec.key for spec in (known, *others)}) == 5
    assert question().key != question(command=f"{COMMAND} --more").key
    assert question().key == question().key


def test_a_configuration_is_known_by_its_content_wherever_it_lies(tmp_path):
    trainers, paths = [], [tmp_path / f"{name}.yaml" for name in "ab"]
    for path in paths:
        path.write_text("warmup: 3\n")
        trainers.append(
            foreign_request.foreign_of(msgspec.structs.replace(asked(), trainer_config=str(path)))
        )
    keys = {msgspec.structs.replace(trial_of(), foreign=foreign).key for foreign in trainers}
    assert len(keys) == 1
    assert trainers[0] is not None
    assert foreign_request.base_config(trainers[0]) == b"warmup: 3\n"
    paths[0].write_text("warmup: 4\n")
    with pytest.raises(UsageError, match="has changed"):
        foreign_request.base_config(trainers[0])
    paths[0].unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        foreign_request.base_config(trainers[0])


def test_a_question_and_a_trial_are_asked_again_by_what_a_report_or_a_file_says(tmp_path):
    named = {"gpus": [1, 2], "command": "python t.py --x 'a b' {{}} {length} {gpus}"}
    named["done_pattern"] = "step 2"
    found, file = question(**named), tmp_path / "study.yaml"
    file.write_text(to_yaml(asked(**named)))
    for words in (list(find_words(found))[1:], ["find", "--config", str(file)]):
        assert plan(request_of(parse(words)), MACHINE).question.key == found.key
    for cell in found.cells:
        spec = found.trial(cell, 8192)
        arguments = parse(list(try_words(spec, found.model))[1:])
        assert plan_trial(request_of(arguments), MACHINE, 8192).key == spec.key


SRC = ROOT / "src" / "highwater"


def test_every_trainer_and_target_has_each_part_that_the_registry_says():
    assert set(trainer.REGISTRY) == {trainer.OURS, *trainer.FOREIGN, *trainer.TRAINERS, *TARGETS}
    assert set(get_args(trainer.TriedTrainer)) == {trainer.OURS, *trainer.FOREIGN}
    for parts in (trainer.TRAINERS, MEMORY, trainer.FOREIGN, TRIALS, TARGETS):
        assert all(parts.values())
    traced = {path.stem.removesuffix("_step") for path in (SRC / "engine/tracer").glob("*_step.py")}
    traces = [name for name, traits in trainer.TRAINERS.items() if traits.traces != "none"]
    assert traced == {trainer.REGISTRY[name].trains_by or name for name in traces}
    assert {name for name, traits in trainer.TRAINERS.items() if traits.is_watched} <= set(
        trainer.FOREIGN
    )
    assert {row.predicted_for for row in TARGETS.values()} <= set(trainer.TRAINERS)
    assert {target for row in trainer.TRAINERS.values() for target in row.targets} <= set(TARGETS)


def test_a_trainers_module_is_imported_when_it_is_asked_for():
    asks = (
        "import sys; from highwater.memory.trainers import MEMORY; "
        "from highwater.trainers.targets import TARGETS; "
        "there = lambda: sorted(n for n in sys.modules if n.startswith('highwater.trainers.t')); "
        "print(there()); TARGETS['torchtitan']; print(there())"
    )
    said = subprocess.check_output([sys.executable, "-c", asks], text=True).splitlines()
    before, after = "'highwater.trainers.targets'", "'highwater.trainers.torchtitan'"
    assert said == [f"[{before}]", f"[{before}, {after}]"]


def test_nobody_compares_a_trainer_with_a_name():
    names = set(get_args(trainer.TrainerName))
    for path in SRC.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        compared = [node for node in nodes if isinstance(node, ast.Compare)]
        sides = [each for node in compared for each in (node.left, *node.comparators)]
        assert not {each.value for each in sides if isinstance(each, ast.Constant)} & names, path


def test_every_setting_of_a_rung_has_a_name_that_a_target_may_know():
    fields = {row.rung_field for row in DECLARED.values()}
    assert set(Settings.__struct_fields__) <= fields
    names = {*DECLARED, *Layout().degree_settings}
    assert all(row.knows <= names for row in TARGETS.values())
