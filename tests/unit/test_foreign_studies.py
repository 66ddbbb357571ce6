"""Trainers that compose another's step answer by its law; studies of other trainers on pages and in
recommendations.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from foreign_trials import trainer_of
from hypothesis import given
from hypothesis import strategies as st
from studies import report_of

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import Prediction
from highwater.memory.formula.layers import Step
from highwater.memory.interval.calibration import COVERAGE, factors_of, interval
from highwater.memory.interval.residuals import Residual, study_residuals
from highwater.memory.trainers import MEMORY, formula_of_trials
from highwater.model.model import load_model
from highwater.nouns.capacities import study_capacities
from highwater.nouns.layout import Layout
from highwater.nouns.plan import plan
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, RecordedTrial, Study
from highwater.nouns.trainer import REGISTRY, ForeignName, TrainerName, predicted_as
from highwater.nouns.trial import Outcome, RankReport, TrialResult, TrialSpec
from highwater.pages.chooser import places
from highwater.pages.guide import guide
from highwater.pages.guide_page import guide_markdown
from highwater.pages.prediction_tables import (
    prediction_answer,
    prediction_table,
    recommendation_answer,
)
from highwater.pages.recommendation_tables import recommendation_tables
from highwater.pages.study_answer import answer_table, study_answer, trial_table
from highwater.pages.study_page import study_csv, study_markdown, study_page
from highwater.pages.table import plain_table
from highwater.search.budget import outlook
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal, read_study
from highwater.trainers.emitted import LIGER as LIGER_FUSES
from highwater.trainers.hugging_face import FILE, footprint
from highwater.trainers.llamafactory import FUSED as LLAMAFACTORY_FUSES
from highwater.trainers.user_file import study_as_told
from highwater.trials.simulated import OneByOne
from highwater.units import GIB
from places import machine_with
from trial_specs import grid_of, question_on, rank_that_used

OTHERS = Path(__file__).parents[2] / "docs" / "results" / "other_trainers" / "studies"
SHAPE = load_model("Qwen3-0.6B").shape
LENGTHS = tuple(range(2048, 40_960, 1024))
PLAIN: dict[str, Any] = {"finetuning_type": "full", "bf16": True}
LIGER = PLAIN | {"enable_liger_kernel": True}
OURS, BY_ACCELERATE = {"trainer": "highwater"}, {"trainer": "accelerate"}
FULL = Settings(allocator="expandable")
CHUNKED = Settings(allocator="expandable", loss="chunked")
ASKED: dict[str, Any] = {"gpus": "1xH100-80GB", "trainer": "llamafactory"}
ASKED |= {"allocator": "expandable", "micro_batches": 2}


def study_of(
    shares: list[float], *, trainer: ForeignName = "llamafactory", config: Path | None = None,
    told: Settings = FULL, layout: Layout | None = None, recorded: Settings = FULL,
) -> Study:  # fmt: skip
    """Trials on an H100 that fit, each of which took a share of what the law says of it where its
    settings are as ``told``; the study has them as ``recorded``.
    """
    foreign = trainer_of(trainer, config)
    layout = layout or Layout()
    question = question_on(
        grid_of(1024, 262_144),
        Cell(layout=layout, settings=recorded),
        device_name="NVIDIA H100 80GB HBM3",
        device_total_bytes=80 * GIB,
        foreign=foreign,
    )
    study = Study(path="own.jsonl", question=question, trials=())
    trials = tuple(
        ended(study, length, Outcome.FIT, round(share * predicted(length, told, layout)))
        for length, share in zip(LENGTHS, shares, strict=False)
    )
    return msgspec.structs.replace(study, trials=trials)


def predicted(length: int, told: Settings, layout: Layout) -> int:
    found = footprint(Step(SHAPE, told, layout, length))
    return found.needed_bytes + found.cached_bytes


def ended(
    study: Study, length: int, outcome: Outcome, used_bytes: int, given_bytes: int = 640 * GIB
) -> RecordedTrial:
    ranks = (rank_that_used(used_bytes, given_bytes),)
    result = TrialResult(outcome=outcome, reason="as it was", ranks=ranks)
    return RecordedTrial(spec=study.question.trial(study.question.cells[0], length), result=result)


def taught(study: Study, trainer: TrainerName = "llamafactory") -> tuple[Residual, ...]:
    return MEMORY[trainer].learn(study_as_told(study, trainer, {}), None)


def file_of(folder: Path, study: Study) -> Path:
    path = folder / "own.jsonl"
    with open_journal(path, study.question) as journal:
        for trial in study.trials:
            assert trial.result is not None
            journal.trial_started(trial.spec, attempt=1, repeat=0)
            journal.trial_finished(trial.spec, attempt=1, repeat=0, result=trial.result)
    return path


def config_in(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


SHARES = st.lists(st.floats(0.7, 1.5), min_size=1, max_size=len(LENGTHS))


@given(SHARES)
def test_an_interval_of_own_trials_holds_what_they_took_at_the_stated_share(shares):
    residuals = taught(study_of(shares))
    assert len(residuals) == len(shares)
    factors = factors_of([each.factor for each in residuals], "expandable")
    ends = [(interval(each.predicted_bytes, factors), each.measured_bytes) for each in residuals]
    least = len(shares) if factors.is_widened else COVERAGE * len(shares)
    assert sum(measured <= each.high_bytes for each, measured in ends) >= least
    assert sum(measured >= each.low_bytes for each, measured in ends) >= least


def test_a_trial_is_held_against_its_own_length_and_also_one_that_ran_out():
    shares = [0.8, 1.0, 1.3]
    for share, length, residual in zip(shares, LENGTHS, taught(study_of(shares)), strict=False):
        assert residual.predicted_bytes == predicted(length, FULL, Layout())
        assert residual.factor == pytest.approx(share, rel=1e-9)
        assert residual.device_name == "NVIDIA H100 80GB HBM3"
    study = study_of([1.0])
    needed = predicted(49_152, FULL, Layout())
    for given_gib, teaches in ((2 * needed / GIB, True), (needed / GIB / 2, False)):
        late = ended(study, 49_152, Outcome.OUT_OF_MEMORY, GIB, round(given_gib * GIB))
        found = taught(msgspec.structs.replace(study, trials=(*study.trials, late)))
        assert [each.length_tokens for each in found] == [2048, 49_152][: 1 + teaches]
        assert (max(each.factor for each in found) > 1.5) is teaches


def answered(tmp_path: Path, study: Study, **asked: Any) -> Prediction:
    path = file_of(tmp_path, study)
    return highwater.predict("Qwen3-0.6B", **{**ASKED, **asked}, calibrate_with=[path])


@pytest.mark.parametrize("trainer", ["llamafactory", "axolotl", "ms-swift", "accelerate"])
def test_its_answer_says_from_how_many_trials_of_yours_its_interval_is(tmp_path, trainer):
    asked = {**ASKED, "trainer": trainer, "loss": "full", "length": "16k"}
    alone = highwater.predict("Qwen3-0.6B", **asked)
    found = answered(tmp_path, study_of([1.1, 1.2], trainer=trainer), **asked)
    assert alone.calibration is None
    assert "without an interval" in alone.accuracy
    known = found.calibration
    assert (known.own_trials, known.edges) == (2, 0)
    assert known.factors[0].upper > 1.2
    own = "its interval is learned from 2 trials of yours"
    assert f". Predicted as Hugging Face's step, {own}. With " in prediction_answer(found)
    assert found.accuracy.startswith(own)
    assert "without an interval" not in found.accuracy
    said = plain_table(prediction_table(found, is_explained=True))
    assert "2 trials" in said
    assert "2 of them yours" in said
    for text in (prediction_answer(found), said):
        assert "was measured held more" not in text
        assert "unmeasured" not in text


def test_own_trials_teach_of_what_they_had_alone(tmp_path):
    found = answered(tmp_path, study_of([1.2]), allocator="native", loss="chunked", length="8k")
    known = found.calibration
    assert found.cells[0].interval is not None
    assert {"native segments", "chunked loss"} <= set(known.unlike)
    assert "try it first" in plain_table(prediction_table(found))
    plain, liger = (
        taught(study_of([1.0], told=told, config=config_in(tmp_path, content)))
        for content, told in ((PLAIN, FULL), (LIGER, CHUNKED))
    )
    assert [each.factor for each in (*plain, *liger)] == [1, 1]
    assert plain[0].predicted_bytes > 1.05 * liger[0].predicted_bytes
    assert (plain[0].loss, liger[0].loss) == ("full", "chunked")


def test_adapters_and_optimizer_are_the_files_unless_the_search_named_them(tmp_path):
    own = {"lora_rank": 4, "lora_target": "q_proj", "optim": "adamw_torch_8bit"}
    config = config_in(tmp_path, own)

    def told(**recorded: Any) -> Settings:
        study = study_of([1.0], config=config, **recorded)
        return study_as_told(study, "llamafactory", {}).question.cells[0].settings

    said = told()
    assert (said.lora, said.lora_targets, said.optimizer) == (4, "q_proj", "adamw-8bit")
    kept = told(recorded=Settings(allocator="expandable", lora=16))
    assert (kept.lora, kept.lora_targets) == (16, "all-linear")
    assert kept.sequences_per_micro_batch == 1


@pytest.mark.parametrize(
    ("trainer", "content", "is_kept"),
    [
        ("axolotl", {"bf16": True}, True),
        ("axolotl", {"fsdp_config": {"activation_checkpointing": False}}, False),
        ("ms-swift", {"tuner_type": "full", "gradient_checkpointing": False}, True),
        ("llamafactory", PLAIN | {"disable_gradient_checkpointing": True}, False),
    ],
)
def test_layers_that_are_kept_whole_teach_nothing(tmp_path, trainer, content, is_kept):
    study = study_of([1.0], trainer=trainer, config=config_in(tmp_path, content))
    if is_kept:
        assert taught(study, trainer)[0].factor == 1
        return
    with pytest.raises(UsageError, match=r"own.jsonl has no trial that is predicted: own.yaml has"):
        taught(study, trainer)


def test_accelerates_own_copies_are_copies(tmp_path):
    config = config_in(tmp_path, {"distributed_type": "MULTI_GPU"})
    two = Layout(gpus=2)

    def layout() -> Layout:
        study = study_of([1.0], trainer="accelerate", config=config, layout=two)
        return study_as_told(study, "accelerate", {}).question.cells[0].layout

    assert layout() == Layout(gpus=2, replicate_degree=2)
    config.write_text("mixed_precision: bf16\n")  # a trial shares by FSDP then
    assert layout() == two


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_is_not_as_it_was_is_refused_until_it_is_back(tmp_path, is_gone):
    config = config_in(tmp_path, LIGER)
    study, before = study_of([1.0], told=CHUNKED, config=config), config.read_bytes()
    if is_gone:
        config.unlink()
    else:
        config.write_bytes(before + b"learning_rate: 1.0e-4\n")
    asked = {"loss": "chunked", "length": "8k"}
    with pytest.raises(UsageError) as refused:
        answered(tmp_path, study, **asked)
    assert str(tmp_path / "own.jsonl") in refused.value.problem
    assert f"{config} {'cannot be read' if is_gone else 'has changed'}" in refused.value.problem
    assert f"put {config} back as it was" in (refused.value.hint or "")
    config.write_bytes(before)
    again = {**ASKED, **asked, "calibrate_with": [tmp_path / "own.jsonl"]}
    assert highwater.predict("Qwen3-0.6B", **again).calibration.own_trials == 1


def test_what_nobody_predicts_shares_sequences_or_was_not_read_teaches_nothing(tmp_path):
    config = config_in(tmp_path, PLAIN | {"use_dora": True})
    with pytest.raises(UsageError, match="use_dora: True, which is not predicted"):
        answered(tmp_path, study_of([1.0], config=config))
    ring = study_of([1.0], layout=Layout(gpus=2), recorded=FULL)
    shared = msgspec.structs.replace(ring.trials[0].spec, layout=Layout(gpus=2, ring_degree=2))
    other = msgspec.structs.replace(ring.trials[0], spec=shared)
    assert len(taught(msgspec.structs.replace(ring, trials=(*ring.trials, other)))) == 1
    with pytest.raises(UsageError, match=r"no trial that is predicted: .*shared sequences"):
        taught(msgspec.structs.replace(ring, trials=(other,)))
    study = study_of([1.0])
    (trial,) = study.trials
    assert trial.result is not None
    unread = msgspec.structs.replace(trial.result, ranks=(RankReport(rank=0),))
    silent = msgspec.structs.replace(trial, result=unread)
    with pytest.raises(UsageError, match="no trial that says how much memory it used"):
        taught(msgspec.structs.replace(study, trials=(silent,)))


@pytest.mark.parametrize(
    ("study", "asked", "problem"),
    [
        ("accelerate-one-gpu", {}, "accelerate: predictions are about LLaMA-Factory"),
        ("one-gpu-trl", {"trainer": "axolotl"}, "of TRL: predictions are about Axolotl"),
        ("one-gpu-highwater", BY_ACCELERATE, "of highwater: predictions are about accelerate"),
        ("accelerate-one-gpu", OURS, "of accelerate: predictions are about highwater"),
        ("accelerate-one-gpu", {"trainer": "transformers"}, "nothing about the step that Hugging"),
        ("one-gpu-highwater", {"trainer": "trl"}, "of highwater: predictions are about TRL"),
        ("one-gpu-trl", OURS, "of TRL: predictions are about highwater"),
        ("../../find/qwen3-0.6b-79gib-full", {"trainer": "trinity"}, "trials of this engine"),
        ("accelerate-one-gpu", {"model": "gemma-2-2b"}, "was not traced with layers"),
        ("accelerate-one-gpu", BY_ACCELERATE | {"exact": True}, "without `--calibrate`"),
    ],
)
def test_a_study_that_says_nothing_of_what_is_asked_is_refused(study, asked, problem):
    """Of another trainer, of what nobody predicts, and beside a trace, which learns nothing."""
    usual = {"model": "Qwen3-0.6B", "gpus": "1xH100-80GB", "trainer": "llamafactory"}
    with pytest.raises(UsageError) as refused:
        highwater.predict(**usual | asked, calibrate_with=[OTHERS / f"{study}.jsonl"])
    assert problem in f"{refused.value.problem} {refused.value.hint}"


def test_accelerates_recorded_search_is_held_by_the_interval_of_the_one_before_it():
    """Of the same script on the same card: four trials teach, two more are in their interval."""
    first, again = (
        [*taught(highwater.open_study(OTHERS / f"accelerate-one-gpu{name}.jsonl"), "accelerate")]
        for name in ("", "-again")
    )
    assert (len(first), len(again)) == (4, 2)
    factors = factors_of([each.factor for each in first], "expandable")
    assert factors is not None
    for each in again:
        ends = interval(each.predicted_bytes, factors)
        assert ends.low_bytes <= each.measured_bytes <= ends.high_bytes


def test_the_loss_of_a_script_is_said_to_be_taken(tmp_path):
    study = study_of([1.0], trainer="accelerate")
    found = answered(tmp_path, study, trainer="accelerate", length="8k")
    assert any("the script has the loss" in note for note in found.notes)


STUDIES = Path(__file__).parents[2] / "docs" / "results" / "other_trainers" / "studies"
COMPOSED = [name for name, row in REGISTRY.items() if row.trains_by]
COMPOSED_ASKED = {"gpus": "2xH100-80GB", "length": "16k", "lora": 16}


def on_host(answer):
    return answer.cell.settings.activations == "host"


def step_of(answer):
    """All but whether another of the same document is better."""
    return msgspec.structs.replace(answer, is_on_frontier=True)


@pytest.mark.parametrize("name", COMPOSED)
def test_it_is_predicted_as_the_step_that_it_composes_and_says_so(name):
    own, theirs = (
        highwater.predict("Qwen3-0.6B", trainer=trainer, **COMPOSED_ASKED)
        for trainer in (name, REGISTRY[name].trains_by)
    )
    lacks_host, by = "activations" in REGISTRY[name].lacks, REGISTRY[name].trains_by
    shared = [each for each in theirs.cells if not lacks_host or not on_host(each)]
    assert [step_of(each) for each in own.cells] == [step_of(each) for each in shared]
    assert any(map(on_host, own.cells)) == any(map(on_host, shared))
    assert (own.trainer, theirs.trainer) == (name, by)
    said = f"P{predicted_as(name)[1:]}."
    assert said.startswith(f"Predicted as {REGISTRY[by].title}'s step, ")
    assert said in prediction_answer(own)
    assert "measured" not in prediction_answer(theirs)
    found = highwater.recommend("Qwen3-0.6B", trainer=name, **COMPOSED_ASKED)
    assert said in recommendation_answer(found)
    nothing = highwater.recommend("Qwen3-32B", trainer=name, gpus="1xH100-80GB", length="64k")
    assert said in recommendation_answer(nothing)
    assert own.accuracy.startswith(predicted_as(name).partition("; ")[2])


def test_each_fuses_the_loss_of_every_family_that_the_law_knows():
    """Where a chunked loss is predicted, Liger's is emitted."""
    learned = json.loads(FILE.read_bytes())
    families = {name for rows in learned.values() for name in rows} | {"qwen2", "mistral"}
    assert len(families) >= 4
    assert families <= LIGER_FUSES & LLAMAFACTORY_FUSES


def test_its_studies_are_taken_and_its_searches_start_without_the_law():
    path = STUDIES / "accelerate-one-gpu-again.jsonl"
    asked = {"gpus": "1xH100-80GB", "gpu_memory": "24GiB", "trainer": "accelerate", "length": "8k"}
    predicted = highwater.recommend("Qwen3-0.6B", **asked)
    found = highwater.recommend("Qwen3-0.6B", **asked, studies=[path])
    assert predicted.chosen.cell.settings.loss == "chunked"
    assert (found.chosen.source, found.chosen.cell.settings.loss) == ("measured", "full")
    taught = highwater.predict("Qwen3-0.6B", **asked, calibrate_with=[path])
    assert taught.calibration.own_trials == 2
    question = read_study(STUDIES / "accelerate-one-gpu-again.jsonl").question
    assert formula_of_trials(question, question.cells[0], 24 * 2**30) is None


COMMAND = "python train.py --max-len {length}"
FITS = 60_000
"""Longest length that the stand-in for the trainer trains, past the model's native one."""
CLAIMS = ("fsdp2", "recompute", "synthetic", "YaRN", "sft", "chunked")


class Trainer(OneByOne):
    """A runner whose trials end as a trainer's would: they fit up to a length."""

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        fits = spec.length_tokens <= FITS
        used = (10 * GIB + spec.length_tokens * GIB // 1024) if fits else 78 * GIB
        return TrialResult(
            outcome=Outcome.FIT if fits else Outcome.OUT_OF_MEMORY,
            reason="2 steps seen in the log" if fits else "torch.OutOfMemoryError: CUDA out of ...",
            ranks=(rank_that_used(used, 79 * GIB),),
            attempt=attempt,
        )


@pytest.fixture
def study(tmp_path: Path) -> Study:
    asked = {"model": "Qwen3-0.6B", "trainer": "command", "command": COMMAND}
    request = request_from({**asked, "memory": "79GiB", "gpus": [1]}, keywords=True)
    question = plan(request, machine_with(8)).question
    path = tmp_path / "study.jsonl"
    with open_journal(path, question) as journal:
        list(recorded_search(question, Trainer(), journal))
    return read_study(path)


def test_a_search_of_another_trainer_is_recorded_and_answered(study):
    assert study.complete
    assert {answer.capacity_tokens for answer in study.answers} == {51_200}
    assert study.expectations == ()
    assert study.question.foreign.command == ("python", "train.py", "--max-len", "{length}")


def test_its_pages_name_the_trainer_and_claim_nothing_of_this_engine(study):
    report = report_of(study)
    table = answer_table(study)
    assert "trained by your command" in table.title
    assert "device used, sampled" in table.columns
    assert all("-" not in row[5:7] for row in table.rows), "peak and headroom are known"
    page, text = study_page(report), study_markdown(report)
    for shown in (plain_table(table), study_answer(study), text, page):
        assert "your command" in shown
        for claim in CLAIMS:
            assert claim not in shown, claim
    assert COMMAND in text
    assert "sampled" in text
    trial = study.trials[0]
    assert trial.result is not None
    shown = plain_table(trial_table(trial.spec, trial.result))
    assert "device used, sampled" in shown
    assert COMMAND in shown
    assert study_csv(report).count("\n") == len(study.trials) + 1


def test_nothing_of_it_is_predicted(study):
    report = report_of(study)
    assert report.predictions.reason is not None
    assert all(cell.predicted is None for cell in report.cells)
    assert all(each.edge_s is None for each in outlook(study.question))
    with pytest.raises(UsageError, match="is of trials of your command"):
        study_residuals(study)


def test_a_guide_keeps_trainers_apart(study):
    assert study.path is not None
    capacities = study_capacities(study)
    assert {each.trainer for each in capacities} == {"command"}
    made = guide(study.path, predict=["Qwen3-0.6B"], gpus=["1xH100-80GB"])
    whose = {table.training.partition(" (")[0].partition(",")[0] for table in made.tables}
    assert whose == {"your command", "highwater"}
    (own,) = (table for table in made.tables if table.training.startswith("your command"))
    assert COMMAND in own.training
    assert "sft" not in own.training
    text = guide_markdown(guide(study.path))
    assert "your command" in text
    assert "measured" in text
    (place,) = places(guide(study.path))
    assert place.answers
    assert all(not answer.command for answer in place.answers)


HERE = {"model": "Qwen3-0.6B", "gpus": "1xH200-141GB", "gpu_memory": "79GiB"}


def test_a_recommendation_for_it_rests_on_its_studies_alone(study):
    assert study.path is not None
    found = highwater.recommend(length=16_384, trainer="command", studies=[study.path], **HERE)
    assert found.trainer == "command"
    assert {each.source for each in found.candidates} == {"measured"}
    assert found.chosen.cell.settings.allocator == "native", "the simplest"
    said = recommendation_answer(found)
    assert said.startswith("Yes")
    assert "with your command" in said
    shown = "\n".join(map(plain_table, recommendation_tables(found)))
    assert "fits" in shown
    for claim in (*CLAIMS, "predicted"):
        assert claim not in shown
        assert claim not in said
    too_long = highwater.recommend(length=262_144, trainer="command", studies=[study.path], **HERE)
    assert too_long.chosen is None
    assert recommendation_answer(too_long).startswith("No")
    assert "predicted" not in recommendation_answer(too_long)
    assert json.loads(msgspec.json.encode(found))["trainer"] == "command"


def test_it_says_nothing_about_this_engine_nor_this_engine_about_it(study):
    assert study.path is not None
    ours = highwater.recommend(length=16_384, studies=[study.path], **HERE)
    assert {each.source for each in ours.candidates} == {"predicted"}
    assert any("--trainer command" in note for note in ours.notes)
    with pytest.raises(UsageError, match="no study"):
        highwater.recommend(length=16_384, trainer="command", **HERE)
    asked = {"length": 16_384, "trainer": "command", "studies": [study.path]}
    with pytest.raises(UsageError, match="recompute"):
        highwater.recommend(**asked, recompute="none", **HERE)
