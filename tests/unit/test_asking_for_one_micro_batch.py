"""One micro-batch a step: what a rung says of it, and whoever names the rung again."""

import msgspec
import pytest

import highwater
from highwater.cli.flags import typed_values
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.pages.study.study_commands import find_words, try_words
from highwater.recommendation.queries import query_of_prediction
from places import question_of


def test_the_question_of_one_micro_batch_is_another_one_whose_rungs_say_so():
    one, several = question_of(micro_batches=1), question_of()
    assert one.key != several.key
    assert question_of(micro_batches=2).key == several.key
    assert not any(cell.settings.accumulates for cell in one.cells)
    assert all(cell.settings.accumulates for cell in question_of(micro_batches=4).cells)
    assert all("one-micro-batch" in cell.label for cell in one.cells)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_commands_of_a_study_name_its_micro_batches_once(micro_batches):
    question = question_of(micro_batches=micro_batches)
    spec = question.trial(question.cells[0], 8192)
    for words in (find_words(question), try_words(spec, question.model)):
        assert words.count("--micro-batches") == (micro_batches != 2)
        again = request_from(typed_values(parse(words[1:])))
        assert (again.micro_batches, again.accumulates) == (micro_batches, micro_batches > 1)


def test_settings_that_say_otherwise_than_the_count_are_refused():
    question = question_of(micro_batches=1)
    spec = question.trial(question.cells[0], 8192)
    for wrong in ({"micro_batches": 2}, {"settings": Settings()}):
        with pytest.raises(UsageError, match="added up"):
            msgspec.structs.replace(spec, **wrong).__post_init__()


def test_an_interval_says_that_no_trial_had_one_micro_batch():
    asked = {"gpus": "1xH200-141GB", "length": "32k", "loss": "chunked"}
    one = highwater.predict("Qwen3-1.7B", micro_batches=1, **asked)
    several = highwater.predict("Qwen3-1.7B", micro_batches=3, **asked)
    assert one.calibration is not None
    assert several.calibration is not None
    assert set(one.calibration.unlike) - set(several.calibration.unlike) == {
        "one micro-batch a step"
    }
    assert one.calibration.factors == several.calibration.factors


def test_what_a_guide_asks_again_of_a_prediction_has_one_micro_batch():
    found = highwater.predict("Qwen3-1.7B", gpus="1xH200-141GB", micro_batches=1)
    query = query_of_prediction(found)
    assert query is not None
    assert ("micro_batches", 1) in query.settings
    assert ("--micro-batches", "1") in zip(
        *(query.words(gpus=1, length_tokens=8192)[start:] for start in (0, 1)), strict=False
    )
