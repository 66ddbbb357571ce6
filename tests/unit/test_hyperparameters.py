"""Hyperparameters: what they may be, where they belong, and that a question and its commands know
them.
"""

import ast
from pathlib import Path

import msgspec
import pytest
import yaml
from studies import report_of

from highwater.errors import UsageError
from highwater.model.footprint import host_state_bytes, step_flops
from highwater.model.model import load_model
from highwater.nouns.hyperparameters import DEFAULTS, NAMES, Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import TRAITS, without_reference
from highwater.nouns.request import TOPICS, request_from, taken_by
from highwater.nouns.settings import Settings
from highwater.nouns.study import Question, Study
from highwater.pages.study_commands import find_words, try_words
from highwater.pages.study_page import question_table
from places import question_of
from tables import table

NUMBERS = [name for name in NAMES if name != "kl_estimator"]
CRITIC = {"objective": "ppo", "critic": True, "entropy": "full"}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.1])
def test_a_number_out_of_its_range_is_refused_with_one_that_works(name, value):
    said = f"{name.replace('_', ' ')} is {value}, and has to be"
    with pytest.raises(UsageError, match=said) as refused:
        request_from({"model": "tiny", name: str(value)})
    flag, works = refused.value.hint.removeprefix("for example ").strip("`").split()
    assert flag == f"--{name.replace('_', '-')}"
    assert getattr(request_from({"model": "tiny", name: works}), name) == DEFAULTS[name]
    with pytest.raises(UsageError):
        Hyperparameters(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("adam_beta1", 1.0), ("adam_beta2", 1.5), ("adam_epsilon", 0.0), ("dual_clip", 1.0)),
        *(("clip_ratio_low", 1.01), ("value_clip", 0.0), ("discount", 1.01), ("gae_lambda", 2.0)),
        *(("dpo_beta", 0.0), ("dual_clip", 0.5)),
    ],
)
def test_the_ends_of_ranges_are_as_what_uses_them_needs(name, value):
    """0 switches off what can be."""
    with pytest.raises(UsageError, match="has to be"):
        Hyperparameters(**{name: value})
    off = ("weight_decay", "max_grad_norm", "dual_clip", "kl_coefficient", "learning_rate")
    assert Hyperparameters(**dict.fromkeys(off, 0.0)).weight_decay == 0


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_a_file_may_write_an_exponent_without_a_dot(text):
    said = {"model": "tiny", **yaml.safe_load(f"learning_rate: {text}")}
    assert request_from(said, config_file="study.yaml").learning_rate == 1e-6


@pytest.mark.parametrize(
    ("name", "value", "has_it"),
    table("hyperparameters", "a_number_that_the_loss_does_not_have"),
)
def test_a_number_that_the_loss_does_not_have_is_refused(name, value, has_it):
    flag = f"--{name.replace('_', '-')}"
    for settings in ({}, {"objective": "rw", "sequences_per_micro_batch": 2}):
        with pytest.raises(UsageError, match="would change nothing") as refused:
            question_of(**{name: value}, **settings)
        assert refused.value.hint == f"leave `{flag}` out"
    assert getattr(question_of(**{name: value}, **has_it).hyperparameters, name) == value


@pytest.mark.parametrize("name", NAMES)
def test_another_number_is_another_question_of_the_same_cells(name):
    changed = {name: "k3" if name == "kl_estimator" else DEFAULTS[name] / 2 or 0.5}
    if name == "dual_clip":
        changed = {name: 0.0}
    settings = CRITIC if not name.startswith("kl") else {"objective": "grpo"}
    if name == "dpo_beta":
        settings = {"objective": "dpo", "sequences_per_micro_batch": 2}
    usual, other = question_of(**settings), question_of(**settings, **changed)
    assert usual.key != other.key
    assert usual.cells == other.cells
    trials = [each.trial(each.cells[0], 4096) for each in (usual, other)]
    assert trials[0].key != trials[1].key
    flag = f"--{name.replace('_', '-')}"
    for words in (find_words(other), try_words(trials[1], other.model)):
        value = words[words.index(flag) + 1]
        assert getattr(request_from({"model": "tiny", name: value}), name) == changed[name]
    assert not {flag} & {*find_words(usual), *try_words(trials[0], usual.model)}


def test_questions_from_before_there_were_any_have_the_defaults():
    recorded = msgspec.to_builtins(question_of())
    del recorded["hyperparameters"]
    assert msgspec.convert(recorded, Question).hyperparameters == Hyperparameters()


def test_every_one_has_a_flag_of_what_trains_and_none_of_what_predicts_memory():
    rows = (*TOPICS["optimizer"], *TOPICS["objective"])
    assert {row.name for row in rows} == set(NAMES)
    assert {row.commands for row in rows} == {("find", "try", "train")}
    for command in ("predict", "recommend", "emit"):
        assert not set(NAMES) & {row.name for row in taken_by(command)}
    assert not set(NAMES) & set(Settings.__struct_fields__), "rungs differ in memory"


def test_a_report_says_which_were_changed():
    def rows(**changes: float) -> dict[str, str]:
        report = report_of(Study(question=question_of(**changes)))
        return dict(question_table(report).rows)

    told = rows(learning_rate=1e-6, weight_decay=0)["hyperparameters"]
    assert told.split() == ["--learning-rate", "1e-06", "--weight-decay", "0.0"]
    assert "hyperparameters" not in rows()


SOURCE = Path(__file__).parents[2] / "src" / "highwater"
FORMULAS = SOURCE / "engine/training/step.py"
"""Where each objective's own formula is chosen."""


def settings_of(objective, **changes):
    together = TRAITS[objective].documents_together
    return Settings(objective=objective, sequences_per_micro_batch=2 * together, **changes)


def compared(path):
    """Constants that something is compared with in a file, by ``==``, ``in`` or ``case``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            within = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            within = [node.value]
        else:
            continue
        for each in within:
            yield from (leaf.value for leaf in ast.walk(each) if isinstance(leaf, ast.Constant))


def test_an_objective_is_asked_for_by_its_name_where_its_formula_is_chosen_alone():
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path != FORMULAS and set(TRAITS) & {one for one in compared(path) if type(one) is str}
    }
    assert found == set()
    assert set(TRAITS) <= set(compared(FORMULAS))


@pytest.mark.parametrize("objective", TRAITS)
def test_a_row_says_what_settings_hold(objective):
    traits, settings = TRAITS[objective], settings_of(objective)
    shape = load_model("Qwen3-0.6B").shape
    assert settings.holds_logits is not traits.gives_scalars
    assert (host_state_bytes(shape, settings, layout=Layout(gpus=1)) > 0) is traits.has_reference
    once = step_flops(shape, length_tokens=8192, sequences=2, settings=Settings())
    asked = step_flops(shape, length_tokens=8192, sequences=2, settings=settings)
    assert asked * 3 == once * (4 if traits.has_reference else 3)


@pytest.mark.parametrize(("objective", "other"), [("grpo", "ppo"), ("dpo", "rw")])
def test_what_is_named_in_the_place_of_a_reference_has_the_same_data_and_none(objective, other):
    assert without_reference(objective) == other
    assert not TRAITS[other].has_reference
    assert TRAITS[other].pairs == TRAITS[objective].pairs
    assert {name for name in TRAITS if TRAITS[name].has_reference} == {"grpo", "dpo"}
