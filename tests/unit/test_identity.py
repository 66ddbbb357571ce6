"""Identity: a recorded study is known again by what it asked, whatever settings are added later."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.cli.flags import request_of
from highwater.cli.grammar import parse
from highwater.errors import MachineError, UsageError
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import Record, digest, to_json
from highwater.nouns.hyperparameters import DEFAULTS, Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question
from highwater.nouns.training import Schedule, TrainingSpec, differences, run_digest
from highwater.search.predicted_study import completed_study
from highwater.store.directory import study_path
from highwater.store.journal import read_study
from places import ROOT, question_of
from trial_specs import training_of, trial_in

KEYS: dict[str, dict[str, str]] = json.loads((ROOT / "tests/data/study_keys.json").read_text())
"""Written down when a study was recorded: the question's key, and the digest of the keys of all
trials."""
STUDIES = sorted((ROOT / "docs/results").rglob("*.jsonl"))
COMMANDED = [path for path in STUDIES if read_study(path).command]
"""The others were made from Python."""

NAMES = st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=8).map("later_{}".format)
NUMBERS = st.integers(-(2**31), 2**31) | st.floats(allow_nan=False)
OTHER_DEFAULTS = st.none() | st.booleans() | NUMBERS | st.text(max_size=9)
FIELDS = st.dictionaries(NAMES, OTHER_DEFAULTS, min_size=1, max_size=4)


def test_there_is_a_key_for_every_recorded_study():
    assert set(KEYS) == {path.name for path in STUDIES}


@pytest.mark.corpus
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_recorded_study_and_its_trials_have_the_keys_that_they_always_had(path):
    study = read_study(path)
    assert study.question.key == KEYS[path.name]["question"]
    assert digest([trial.spec.key for trial in study.trials]) == KEYS[path.name]["trials"]


@pytest.mark.corpus
@pytest.mark.parametrize("path", COMMANDED, ids=lambda path: path.stem)
def test_a_recorded_study_is_found_by_the_command_that_made_it(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = list(read_study(path).command[1:])
    command[command.index("--study") + 1] = str(path.relative_to(ROOT))
    request = request_of(parse(command))
    if read_study(path).complete:
        assert completed_study(request) is not None, "it would start over"
    else:
        with pytest.raises(MachineError, match="is not finished"):
            completed_study(request)


@given(of_settings=FIELDS, of_layout=FIELDS)
def test_a_field_added_at_its_default_changes_no_key_label_or_order(of_settings, of_layout):
    for question in (question_of(), question_of(gpus=[1, 4], ulysses=[1, 2], offload=True)):
        later = with_fields(question, of_settings, of_layout)
        assert study_path(Path("logs"), later) == study_path(Path("logs"), question)
        assert later.key == question.key
        for before, after in zip(question.cells, later.cells, strict=True):
            assert later.trial(after, 4096).key == question.trial(before, 4096).key
            assert (after.label, after.layout.slug) == (before.label, before.layout.slug)
            assert after.settings.slug == before.settings.slug
            assert simplicity(after) == simplicity(before)


@given(fields=FIELDS, value=st.integers(3, 99))
def test_a_field_that_is_added_and_set_makes_another_question(fields, value):
    question = question_of()
    later = with_fields(question, fields, {})
    name = next(iter(fields))
    settings = msgspec.structs.replace(later.cells[0].settings, **{name: f"set to {value}"})
    other = msgspec.structs.replace(
        later, cells=(msgspec.structs.replace(later.cells[0], settings=settings), *later.cells[1:])
    )
    assert other.key != question.key


@given(literal=st.text("abcdefghijklmnopqrstuvwxyz-", min_size=4, max_size=20))
def test_an_added_value_has_a_label_of_its_own_and_stands_behind_those_that_are_known(literal):
    def cell(recompute: Any) -> Cell:
        return Cell(layout=Layout(), settings=Settings(recompute=recompute))

    known = ("none", "all-but-attention", "layer")
    cells, later = [*map(cell, known)], cell(literal if literal not in known else "nested")
    assert sorted([later, *reversed(cells)], key=simplicity) == [*cells, later]
    assert len({cell.label for cell in (later, *cells)}) == 4
    assert len({cell.settings.slug for cell in (later, *cells)}) == 4


def test_every_degree_is_told_in_labels_paths_and_flags():
    layouts = [
        Layout(gpus=12, ulysses_degree=u, ring_degree=r, replicate_degree=c)
        for u in (1, 2)
        for r in (1, 3)
        for c in (1, 2)
    ]
    for told in ("suffix", "slug", "flags"):
        assert len({getattr(layout, told) for layout in layouts}) == len(layouts), told
    both = Layout(gpus=6, ulysses_degree=2, ring_degree=3)
    assert Cell(layout=both, settings=Settings()).label == "nothing set, 6 GPUs, Ulysses 2, ring 3"
    assert Layout(gpus=4).slug == "sp-1"
    assert Layout(gpus=6, ring_degree=3).flags == ("--gpus", "6", "--ulysses", "1", "--ring", "3")
    sharing = ["1", "1, 2 copies", "1, ring 3", "1, ring 3, 2 copies"]
    assert [layout.sharing for layout in layouts[:4]] == sharing


def with_fields(
    question: Question, of_settings: dict[str, Any], of_layout: dict[str, Any]
) -> Question:
    """The question as a later version would have it, whose nouns have more fields."""
    cells = tuple(
        Cell(layout=_grown(cell.layout, of_layout), settings=_grown(cell.settings, of_settings))
        for cell in question.cells
    )
    return msgspec.structs.replace(question, cells=cells)


def _grown(noun: Any, added: dict[str, Any]) -> Any:
    kind: Any = type(noun)
    fields = [(name, Any, default) for name, default in added.items()]
    later = msgspec.defstruct(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True)
    assert issubclass(later, Record)
    names = [field.name for field in msgspec.structs.fields(noun)]
    return later(**{name: getattr(noun, name) for name in names})


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


def test_what_depends_on_another_setting_is_told_once_or_is_the_same():
    before, now = (changed(schedule=Schedule(name="linear", steps=steps)) for steps in (20, 40))
    (said,) = differences(before, now)
    assert said == "--steps, on which the schedule depends: 20 when the run began, 40 now"
    assert run_digest(before) != run_digest(now)
    usual, named = (changed(trial__settings=Settings(lora=8, lora_alpha=a)) for a in (None, 16.0))
    assert differences(usual, named) == ()
    assert run_digest(usual) == run_digest(named)
    now = changed(trial__settings=Settings(lora=8), schedule=Schedule(name="cosine", steps=20))
    assert differences(SPEC, now) == (
        "--lora: none when the run began, 8 now",
        "--schedule: constant when the run began, cosine now",
    )


def test_a_layout_without_named_machines_has_none_in_its_document():
    assert "machines" not in to_json(Layout(gpus=16, replicate_degree=2))
    assert "machines" in to_json(Layout(gpus=16, replicate_degree=2, machines=2))
