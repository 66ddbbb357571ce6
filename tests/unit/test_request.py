"""Requests: flags, files and keywords are read in one place, and every mistake is answered with
what works.
"""

import ast
import re

import msgspec
import pytest
import yaml

import highwater
from highwater.cli.flags import typed_values
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.nouns.request import Request, request_from
from highwater.nouns.settings import Settings
from highwater.pages.study_commands import find_words, try_words
from highwater.recommendation.candidates import query_of_prediction
from highwater.search.cell_outcomes import SearchEvent, TrialFinished
from places import question_of
from tables import table
from trial_specs import answers_among

SOLD_BY = "memory size '80GB' is what cards are sold by, and their drivers report less"


def test_typed_text_becomes_numbers():
    typed = {"gpus": ["1", "2"], "confirm": "2", "memory": "79.15GiB", "timeout": "90s"}
    request = request_from({"model": "Qwen3-0.6B", **typed})
    assert (request.gpus, request.confirm) == ((1, 2), 2)
    assert (request.memory_bytes, request.timeout_s) == (84986665369, 90.0)


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    table("request", "a_mistake_is_told_in_the_users_words"),
)
def test_a_mistake_is_told_in_the_users_words_with_the_nearest_thing_that_works(values, said, hint):
    with pytest.raises(UsageError, match=re.escape(said)) as refusal:
        request_from({"model": "Qwen3-0.6B", **values})
    assert hint in refusal.value.hint


@pytest.mark.parametrize("name", Request.__struct_fields__)
def test_a_wrong_type_of_any_setting_is_answered_with_a_line_or_a_keyword_that_works(name):
    good = {"model": "Qwen3-0.6B"}
    with pytest.raises(UsageError) as refusal:
        request_from({**good, name: {"a": 1}}, config_file="study.yaml")
    assert refusal.value.problem.startswith(f"study.yaml: {name} ")
    line = refusal.value.hint.split("`")[1]
    if line == "highwater schema":  # of some words none is like it, and the problem names them
        assert " is not one of " in refusal.value.problem
        return
    request_from({**good, **yaml.safe_load(line)}, config_file="study.yaml")
    with pytest.raises(UsageError) as refusal:
        request_from({**good, name: {"a": 1}}, keywords=True)
    keyword, value = refusal.value.hint.split("`")[1].split("=")
    request_from({**good, keyword: ast.literal_eval(value)}, keywords=True)


@pytest.mark.parametrize("value", [1, [1], (1,)])
@pytest.mark.parametrize("origin", [{}, {"config_file": "study.yaml"}], ids=str)
def test_one_number_is_a_list_of_one(value, origin):
    named = {"model": "Qwen3-0.6B", "gpus": value, "ulysses": value}
    request = request_from(named, **origin)
    assert (request.gpus, request.ulysses) == ((1,), (1,))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory", "80GB", SOLD_BY),
        ("headroom", "some", "headroom: 'some' is not a memory size"),
        ("start_length", "1", "start_length: a start length of 1 token"),
        ("timeout", "soon", "timeout: 'soon' is not a time"),
        ("gpus", 0, "gpus is 0"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_key_in_a_file_and_its_keyword_in_python(
    name, value, said
):
    with pytest.raises(UsageError) as in_a_file:
        request_from({"model": "Qwen3-0.6B", name: value}, config_file="study.yaml")
    assert in_a_file.value.problem == f"study.yaml: {said}"
    with pytest.raises(UsageError) as in_python:
        request_from({"model": "Qwen3-0.6B", name: value}, keywords=True)
    assert in_python.value.problem == said
    assert "--" not in in_a_file.value.hint + in_python.value.hint


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        ({}, "--memory 80GiB"),
        ({"config_file": "study.yaml"}, "memory: 80GiB"),
        ({"keywords": True}, "memory='80GiB'"),
    ],
)
def test_a_memory_without_its_unit_is_answered_with_it_as_the_user_spells_it(origin, hint):
    with pytest.raises(UsageError) as refusal:
        request_from({"model": "Qwen3-0.6B", "memory": "80"}, **origin)
    assert refusal.value.hint == f"give the unit: `{hint}`"


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize(
    ("origin", "names"),
    [
        ({}, ("--sequences-per-micro-batch", "--token-budget")),
        ({"config_file": "study.yaml"}, ("sequences_per_micro_batch", "token_budget")),
        ({"keywords": True}, ("sequences_per_micro_batch", "token_budget")),
    ],
)
def test_a_token_budget_beside_a_number_of_sequences_is_refused_and_either_alone_is_not(
    origin, names, sequences
):
    both = {"model": "Qwen3-0.6B", "token_budget": "64k", "sequences_per_micro_batch": sequences}
    with pytest.raises(UsageError, match=names[0]) as refusal:
        request_from(both, **origin)
    assert tuple(refusal.value.hint.split("`")[1::2]) == names
    for left_out in names:
        name = left_out.removeprefix("--").replace("-", "_")
        request_from({key: value for key, value in both.items() if key != name}, **origin)


def test_the_question_of_one_micro_batch_is_another_one_whose_rungs_say_so():
    one, several = question_of(micro_batches=1), question_of()
    assert one.key != several.key
    assert question_of(micro_batches=2).key == several.key
    assert not any(cell.settings.accumulates for cell in one.cells)
    assert all(cell.settings.accumulates for cell in question_of(micro_batches=4).cells)
    assert all("one micro-batch" in cell.label for cell in one.cells)


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


def test_what_a_guide_asks_again_of_a_prediction_has_one_micro_batch():
    found = highwater.predict("Qwen3-1.7B", gpus="1xH200-141GB", micro_batches=1)
    query = query_of_prediction(found)
    assert query is not None
    assert ("micro_batches", 1) in query.settings
    assert ("--micro-batches", "1") in zip(
        *(query.words(gpus=1, length_tokens=8192)[start:] for start in (0, 1)), strict=False
    )


def test_a_search_from_python_answers_every_cell_and_can_be_followed(tmp_path):
    heard: list[SearchEvent] = []
    study = highwater.find(
        "Qwen3-0.6B",
        gpus=[1, 2],
        memory="80GiB",
        device="cuda",
        dry_run=True,
        study=str(tmp_path / "s.jsonl"),
        on_event=heard.append,
    )
    assert study.complete
    assert answers_among(heard) == list(study.answers)
    assert sum(isinstance(event, TrialFinished) for event in heard) == len(study.trials)
    recorded = highwater.open_study(tmp_path / "s.jsonl")
    assert msgspec.structs.replace(recorded, notes=study.notes) == study
