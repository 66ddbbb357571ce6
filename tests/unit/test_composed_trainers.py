"""Trainers that compose another's step answer by its law, and say that it is another's."""

import json
from pathlib import Path

import msgspec
import pytest

import highwater
from highwater.memory.trainers import MEMORY, predictor_of
from highwater.nouns.trainer import REGISTRY, TRAINERS, predicted_as
from highwater.pages.prediction_tables import prediction_answer, recommendation_answer
from highwater.store.journal import read_study
from highwater.trainers.emitted import LIGER
from highwater.trainers.hugging_face import FILE
from highwater.trainers.llamafactory import FUSED as LLAMAFACTORY_FUSES

STUDIES = Path(__file__).parents[2] / "docs" / "results" / "other_trainers" / "studies"
COMPOSED = [name for name, row in REGISTRY.items() if row.trains_by]
ASKED = {"gpus": "2xH100-80GB", "length": "16k", "lora": 16}


def on_host(answer):
    return answer.cell.settings.activations == "host"


def step_of(answer):
    """All but whether another of the same document is better."""
    return msgspec.structs.replace(answer, is_on_frontier=True)


@pytest.mark.parametrize("name", COMPOSED)
def test_it_is_predicted_as_the_step_that_it_composes_and_says_so(name):
    own, theirs = (
        highwater.predict("Qwen3-0.6B", trainer=trainer, **ASKED)
        for trainer in (name, REGISTRY[name].trains_by)
    )
    lacks_host = "activations" in REGISTRY[name].lacks
    shared = [each for each in theirs.cells if not lacks_host or not on_host(each)]
    assert [step_of(each) for each in own.cells] == [step_of(each) for each in shared]
    assert any(map(on_host, own.cells)) is not lacks_host
    assert (own.trainer, theirs.trainer) == (name, "transformers")
    said = f"Predicted as Hugging Face's step; {predicted_as(name).partition('; ')[2]}."
    assert prediction_answer(own).endswith(said)
    assert "measured" not in prediction_answer(theirs)
    found = highwater.recommend("Qwen3-0.6B", trainer=name, **ASKED)
    assert recommendation_answer(found).endswith(said)
    nothing = highwater.recommend("Qwen3-32B", trainer=name, gpus="1xH100-80GB", length="64k")
    assert predicted_as(name) in recommendation_answer(nothing)
    assert own.accuracy.startswith(predicted_as(name).partition("; ")[2])


def test_only_the_registry_names_whose_law_it_is():
    assert set(COMPOSED) == {"accelerate", "llamafactory", "axolotl", "ms-swift"}
    assert all(MEMORY[name].formula is MEMORY["transformers"].formula for name in COMPOSED)
    assert all(TRAINERS[name].targets == (name,) for name in COMPOSED)


def test_each_fuses_the_loss_of_every_family_that_the_law_knows():
    """Where a chunked loss is predicted, Liger's is emitted."""
    learned = json.loads(FILE.read_bytes())
    families = {name for rows in learned.values() for name in rows} | {"qwen2", "mistral"}
    assert len(families) >= 4
    assert families <= LIGER & LLAMAFACTORY_FUSES


def test_its_studies_are_taken_beside_the_prediction():
    path = STUDIES / "accelerate-one-gpu-again.jsonl"
    asked = {"gpus": "1xH100-80GB", "gpu_memory": "24GiB", "trainer": "accelerate", "length": "8k"}
    predicted = highwater.recommend("Qwen3-0.6B", **asked)
    found = highwater.recommend("Qwen3-0.6B", **asked, studies=[path])
    assert predicted.chosen.cell.settings.loss == "chunked"
    assert (found.chosen.source, found.chosen.cell.settings.loss) == ("measured", "full")
    taught = highwater.predict("Qwen3-0.6B", **asked, calibrate_with=[path])
    assert taught.calibration.own_trials == 2


def test_its_searches_start_without_the_law_for_their_loss_is_in_a_file():
    question = read_study(STUDIES / "accelerate-one-gpu-again.jsonl").question
    assert predictor_of(question, question.cells[0], 24 * 2**30) is None
