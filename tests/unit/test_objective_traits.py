"""Traits of objectives: what each row makes of settings, and that nobody compares names instead."""

import ast
from pathlib import Path

import pytest

from highwater.model.footprint import host_state_bytes, step_flops
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.objective import TRAITS, without_reference
from highwater.nouns.settings import Settings

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


@pytest.mark.parametrize("objective", [name for name in TRAITS if TRAITS[name].has_reference])
def test_what_is_named_in_the_place_of_a_reference_has_the_same_data_and_none(objective):
    other = TRAITS[without_reference(objective)]
    assert not other.has_reference
    assert other.pairs == TRAITS[objective].pairs


def test_grpo_and_dpo_without_a_reference_are_ppo_and_a_reward_model():
    assert [without_reference(name) for name in ("grpo", "dpo")] == ["ppo", "rw"]
