"""What a corpus takes that a trial's synthetic sequences do not: logits of the first tokens. They
are predicted, but where a study's answer is taken, which was measured without.
"""

import msgspec
import pytest

from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.corpus import Corpus
from highwater.nouns.request import request_from
from highwater.nouns.training import TrainingRequest
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.recommendation.training_settings import chosen_trial, data_notes
from highwater.trials.probe import probe
from highwater.units import format_bytes

LENGTH = 1024
VOCABULARY = 151_936
HALF_BYTES = 4 * VOCABULARY * LENGTH // 2
"""Logits in float32 of the half of a sequence that a trial takes for a prompt."""

ROOM = {"4GiB": HALF_BYTES - 1, "8GiB": HALF_BYTES}
"""Bytes that are left, by the memory."""


def notes(*, memory: str, trained_tokens: int, loss: str = "full") -> tuple[str, ...]:
    """What is noted of a corpus of a thousand tokens, of settings as a study measured them."""
    request = request_from(
        {"model": "tiny", "device": "cpu", "memory": memory, "loss": loss}, keywords=True
    )
    asked = TrainingRequest(data=("data.jsonl",), length=LENGTH, steps=1, output="run")
    corpus = Corpus(
        directory="/corpus",
        digest="0",
        objective="sft",
        length_tokens=LENGTH,
        documents=1,
        units=1,
        tokens=1000,
        trained_tokens=trained_tokens,
        longest_tokens=1000,
    )
    chosen = chosen_trial(request, asked, probe())
    assert data_notes(chosen, corpus) == (), "every token is predicted to be trained"
    # A study has the headroom of its own trials: half of a sequence has no logits there.
    predicted = msgspec.structs.replace(chosen.predicted, headroom_bytes=ROOM[memory])
    measured = msgspec.structs.replace(chosen.spec, prompt_tokens=PROMPT_TOKENS)
    return data_notes(chosen._replace(spec=measured, predicted=predicted), corpus)


def test_texts_that_are_trained_from_their_beginning_are_noted_where_their_logits_lack_room():
    (note,) = notes(memory="4GiB", trained_tokens=999)
    assert note.startswith(f"up to {format_bytes(HALF_BYTES)} more of logits than predicted")


@pytest.mark.parametrize(
    "otherwise",
    [{"memory": "8GiB"}, {"trained_tokens": 500}, {"loss": "chunked"}],
    ids=["room", "prompts", "a chunked loss"],
)
def test_nothing_is_noted_where_there_is_room_a_prompt_or_a_chunked_loss(
    otherwise,
):
    assert notes(**{"memory": "4GiB", "trained_tokens": 999, **otherwise}) == ()


def test_a_prediction_of_a_training_has_the_logits_of_every_token():
    fields = {"model": "tiny", "device": "cpu", "memory": "4GiB", "loss": "full"}
    asked = TrainingRequest(data=("data.jsonl",), length=LENGTH, steps=1, output="run")
    chosen = chosen_trial(request_from(fields, keywords=True), asked, probe())
    spec = chosen.spec
    in_a_trial = likely_footprint(
        Step(
            load_model(spec.model_directory).shape,
            spec.settings,
            spec.layout,
            length_tokens=LENGTH,
            device="cpu",
        )
    )
    assert chosen.predicted.footprint.needed_bytes >= in_a_trial.needed_bytes + HALF_BYTES
