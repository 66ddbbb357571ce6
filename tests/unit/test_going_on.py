"""What a run has to have the same to go on, and what it may change."""

import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from highwater.errors import UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.hyperparameters import DEFAULTS, Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.training import RunState, Schedule, TrainingSpec, differences, run_digest
from trial_specs import training_of, trial_in

TRIAL = trial_in("/models/tiny", layout=Layout(gpus=2))
SPEC = training_of(TRIAL, steps=20, micro_batches=8)


def changed(**changes: Any) -> TrainingSpec:
    """The spec with other fields; those of what stands in it by ``<record>__<field>``."""
    spec = SPEC
    for name, value in changes.items():
        record, _, field = name.rpartition("__")
        if record == "trial":
            value = msgspec.structs.replace(spec.trial, **{field: value})
        elif record in ("settings", "hyperparameters"):
            inner = msgspec.structs.replace(getattr(spec.trial, record), **{field: value})
            value = msgspec.structs.replace(spec.trial, **{record: inner})
        elif record:
            value = msgspec.structs.replace(getattr(spec, record), **{field: value})
        outer = record if record else field
        outer = "trial" if record in ("settings", "hyperparameters") else outer
        spec = msgspec.structs.replace(spec, **{outer: value})
    return spec


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trial__config_digest": "d"}, "the model is another"),
        ({"corpus__digest": "b"}, "the data is another"),
        ({"trial__length_tokens": 32}, "--length: 64 when the run began, 32 now"),
        ({"micro_batches": 4}, "--rows: 8"),
        ({"trial__seed": 1}, "--seed: 0"),
        ({"trial__settings": Settings(objective="ppo")}, "--objective: sft"),
        ({"trial__settings": Settings(lora=8)}, "--lora: none"),
        ({"trial__settings": Settings(optimizer="adamw-8bit")}, "--optimizer: adamw"),
        ({"trial__settings": Settings(rope="yarn")}, "--rope: auto"),
        ({"trial__settings": Settings(attention="block_sparse")}, "--attention: dense"),
        (
            {"trial__settings": Settings(sequences_per_micro_batch=2)},
            "--sequences-per-micro-batch: 1",
        ),
        ({"hyperparameters__learning_rate": 0.5}, "--learning-rate: 1e-05"),
        ({"schedule": Schedule(name="cosine", steps=20)}, "--schedule: constant"),
        ({"schedule__warmup_steps": 3}, "--warmup-steps: 0"),
        ({"trial__device": "cuda"}, "--device: cpu"),
    ],
)
def test_what_decides_the_curve_is_named_and_in_the_digest(change, said):
    now = changed(**change)
    assert differences(SPEC, now)[0].startswith(said)
    assert differences(now, SPEC)
    assert run_digest(now) != run_digest(SPEC)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_hyperparameter_decides(name):
    other: Any = "k1" if name == "kl_estimator" else DEFAULTS[name] * 0.75
    if name == "dual_clip":
        other = 2.5
    before = changed(trial__settings=training_with(Hyperparameters(**{name: other})))
    trial = msgspec.structs.replace(before.trial, hyperparameters=Hyperparameters(**{name: other}))
    now = msgspec.structs.replace(before, trial=trial)
    (said,) = differences(before, now)
    assert said.startswith(f"--{name.replace('_', '-')}: {DEFAULTS[name]} ")
    assert run_digest(now) != run_digest(before)


def training_with(numbers: Hyperparameters) -> Settings:
    """The first settings in whose loss these are."""
    every = (
        Settings(),
        Settings(objective="dpo", sequences_per_micro_batch=2),
        Settings(objective="grpo", entropy="full"),
        Settings(objective="ppo", critic=True),
    )
    for settings in every:
        with suppress(UsageError):
            numbers.refuse_unused(settings)
            return settings
    raise AssertionError(f"no loss has {numbers}")


@pytest.mark.parametrize(
    "change",
    [
        {"trial__layout": Layout(gpus=4, replicate_degree=2)},
        {"trial__layout": Layout(gpus=4, ulysses_degree=2)},
        {"trial__settings": Settings(strategy="fsdp")},
        {"trial__settings": Settings(allocator="expandable")},
        {"trial__settings": Settings(loss="chunked")},
        {"trial__settings": Settings(recompute="none")},
        {"trial__settings": Settings(mlp_tiles=4)},
        {"trial__settings": Settings(offload=True)},
        {"trial__settings": Settings(offload="states")},
        {"trial__settings": Settings(save_hf="last", checkpoint="sharded")},
        {"trial__memory_budget_bytes": 2**31},
        {"trial__model_directory": "/elsewhere/tiny"},
        {"corpus__directory": "/elsewhere/a"},
        {"evaluation": SPEC.corpus},
        {"steps": 40, "schedule": Schedule(steps=40)},
        {"evaluate_every": 5},
        {"save_every": 5},
        {"output_directory": "/runs/b"},
    ],
)
def test_what_does_not_decide_the_curve_may_change(change):
    assert changed(**change) != SPEC
    assert differences(SPEC, changed(**change)) == ()
    assert run_digest(changed(**change)) == run_digest(SPEC)


def test_more_steps_are_another_curve_where_the_rate_depends_on_them():
    before, now = (changed(schedule=Schedule(name="linear", steps=steps)) for steps in (20, 40))
    (said,) = differences(before, now)
    assert said == "--steps, on which the schedule depends: 20 when the run began, 40 now"
    assert run_digest(before) != run_digest(now)


def test_an_alpha_that_is_named_is_the_same_as_the_usual_one():
    usual, named = (changed(trial__settings=Settings(lora=8, lora_alpha=a)) for a in (None, 16.0))
    assert differences(usual, named) == ()
    assert run_digest(usual) == run_digest(named)


def test_a_spec_and_a_state_are_read_as_they_were_written():
    assert from_json(to_json(SPEC), TrainingSpec) == SPEC
    state = RunState(
        step=3, losses=(0.1, 1 / 3, math.pi), evaluation_loss=2.5, corpus_digest="a", run_digest="r"
    )
    assert from_json(to_json(state), RunState) == state


def test_adapters_and_a_schedule_are_named_once_though_more_depends_on_them():
    now = changed(trial__settings=Settings(lora=8), schedule=Schedule(name="cosine", steps=20))
    assert differences(SPEC, now) == (
        "--lora: none when the run began, 8 now",
        "--schedule: constant when the run began, cosine now",
    )
