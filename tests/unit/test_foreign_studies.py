"""Studies of other trainers on pages and in recommendations."""

import json
from pathlib import Path

import msgspec
import pytest
from studies import report_of

import highwater
from highwater.errors import UsageError
from highwater.memory.interval.residuals import study_residuals
from highwater.nouns.capacities import study_capacities
from highwater.nouns.plan import plan
from highwater.nouns.request import request_from
from highwater.nouns.study import Study
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.chooser import places
from highwater.pages.guide import guide
from highwater.pages.guide_page import guide_markdown
from highwater.pages.prediction_tables import recommendation_answer
from highwater.pages.recommendation_tables import recommendation_tables
from highwater.pages.study_answer import answer_table, study_answer, trial_table
from highwater.pages.study_page import study_csv, study_markdown, study_page
from highwater.pages.table import plain_table
from highwater.search.budget import outlook
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal, read_study
from highwater.trials.simulated import OneByOne
from highwater.units import GIB
from places import machine_with
from trial_specs import rank_that_used

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
