"""What a record says, in whatever words, is what is trained."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from corpora import (
    CHATML,
    END,
    END_TURN,
    MARKED,
    ids_of,
    made,
    trained_of,
    write_lines,
    write_tokenizer,
)
from pyarrow import parquet
from transformers import AutoTokenizer

from highwater.engine.data import data_files as readers
from highwater.engine.data.store import OpenCorpus
from highwater.errors import UsageError
from tables import table

DATA = Path(__file__).parents[1] / "data" / "own_data"

TOOLED = (
    "{% for tool in tools or [] %}{{ 'tool ' + (tool | tojson) + '\n' }}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% endif %}"
    "{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes all that there is, arguments without a guard, contents without the space around them."""
CAREFUL = TOOLED.replace("message.reasoning_content %", "message.reasoning_content and loop.last %")
"""Leaves out what was thought in earlier turns, as Qwen3's does."""
CONCATENATED = TOOLED.replace("(call.function.arguments | tojson)", "call.function.arguments")
"""Wants arguments as text, as DeepSeek's does."""
PRINTED = TOOLED.replace(
    "' ' + (call.function.arguments | tojson) + '</call>' }}",
    "' ' }}{{ call.function.arguments }}{{ '</call>' }}",
)
"""Prints arguments, an object as Python does."""
NULL_CALLS = TOOLED.replace(
    "{% for call in message.tool_calls or [] %}",
    "{% for call in (message.tool_calls or []) if message.content is none %}",
).replace("{{ message.content | trim }}", "{{ message.content or '' }}")
"""Writes calls only where the content is null, as DeepSeek's older one does."""

ASKED = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CITY = {"city": "Oslo"}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RETURNED = {"role": "tool", "content": "3"}
ANSWERED = {"role": "assistant", "content": "It is 3."}
WRONG = {"role": "assistant", "content": "No."}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Directories with a tokenizer, by the template that they were asked for."""

    class Made(dict[str | None, Path]):
        def __missing__(self, template: str | None) -> Path:
            self[template] = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
            return self[template]

    return Made()


def said(corpus: OpenCorpus, directory: Path) -> list[tuple[str, str]]:
    """The text of each document, and what of it is trained."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        (tokenizer.decode(ids), tokenizer.decode(trained))
        for ids, trained in zip(ids_of(corpus), trained_of(corpus), strict=True)
    ]


class Telling:
    """Tells what becomes of records with a template."""

    def __init__(self, folder: Path, tokenizers: dict[str | None, Path]) -> None:
        self._folder = folder
        self._tokenizers = tokenizers

    def __call__(
        self, data: Path | dict[str, Any], template: str | None = TOOLED, **choices: Any
    ) -> list[tuple[str, str]]:
        if not isinstance(data, Path):
            data = write_lines(self._folder / "d.jsonl", [data])
        directory = self._tokenizers[template]
        corpus = made(self._folder, data, tokenizer=directory, length_tokens=2048, **choices)
        return said(corpus, directory)

    def refusal(self, data: Path | dict[str, Any], template: str | None, **how: Any) -> UsageError:
        with pytest.raises(UsageError) as refused:
            self(data, template, **how)
        assert refused.value.hint
        return refused.value


def typed(error: UsageError, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type the command of a hint, which takes jq."""
    (command,) = error.hint.split("`")[1::2]
    monkeypatch.chdir(folder)
    assert os.system(command) == 0  # noqa: S605 -- a hint, as somebody types it


@pytest.fixture
def tell(tmp_path: Path, tokenizers: dict[str | None, Path]) -> Telling:
    return Telling(tmp_path, tokenizers)


@pytest.mark.parametrize("answer", table("record_words", "calls"))
@pytest.mark.parametrize("template", [TOOLED, CONCATENATED, PRINTED, NULL_CALLS])
def test_a_call_in_anybodys_words_is_one_call(answer, template, tell):
    messages = [ASKED, answer, {"role": "function", "content": "3", "name": "weather"}, ANSWERED]
    ((text, trained),) = tell({"messages": messages}, template)
    assert trained == (f'<call>weather {{"city": "Oslo"}}</call>{END_TURN}\nIt is 3.{END_TURN}\n')
    assert "<|im_start|>tool\n3<|im_end|>\n" in text


UNWRITTEN: list[tuple[str, list[dict[str, Any]], int, str]] = table("record_words", "unwritten")


@pytest.mark.parametrize(("template", "messages", "number", "field"), UNWRITTEN)
def test_what_a_template_does_not_write_is_refused(template, messages, number, field, tell):
    error = tell.refusal({"messages": messages}, template)
    assert error.problem.startswith("d.jsonl:1: ")
    assert f"`{field}" in error.problem
    assert f"message {number}" in error.problem


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "arguments": CITY, "parameters": CITY},
        {"function": {"name": "f", "parameters": {}, "args": CITY}},
        {"name": "f", "input": '{"n": 1}', "arguments": "{}"},
        {"name": "f", "arguments": 0},
        {"name": "f", "parameters": False},
        {"name": "f", "args": [1]},
    ],
)
def test_a_call_whose_arguments_are_not_told_is_refused_and_not_without_any(call, tell):
    for message in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "function_call": call},
        {"from": "function_call", "value": json.dumps(call)},
    ):
        error = tell.refusal({"messages": [ASKED, message]}, TOOLED)
        assert "message 2 of `messages`: `" in error.problem


def test_calls_and_tools_that_no_template_writes_are_refused(tell):
    message = {"role": "tool_call", "content": json.dumps(CALL["function"]), "tool_calls": [CALL]}
    assert "`tool_calls`" in tell.refusal({"messages": [ASKED, message]}, TOOLED).problem
    tools = [{"name": "weather", "parameters": {}}]
    for record in ({"messages": [ASKED, ANSWERED]}, {"prompt": [ASKED], "completion": [ANSWERED]}):
        assert "`tools`" in tell.refusal({**record, "tools": tools}, CHATML).problem
        assert '"name": "weather"' in tell({**record, "tools": json.dumps(tools)})[0][0]
        assert tell({**record, "tools": ""}) == tell({**record, "tools": []}) == tell(record)


def test_a_name_that_a_template_writes_is_trained_and_one_of_one_word_may_be_left_out(tell):
    named = {"messages": [{**ASKED, "name": "alice_1"}, ANSWERED]}
    assert tell(named) == tell({"messages": [ASKED, ANSWERED]})
    named["messages"][0]["name"] = "Alice Smith"
    writing = TOOLED.replace("message.role + '", "(message.name or message.role) + '")
    assert tell(named, writing)[0][0].startswith("<|im_start|>Alice Smith\n")


def test_thoughts_of_earlier_turns_are_trained_in_records_of_their_own(tell, tmp_path):
    thinking = {**ANSWERED, "reasoning_content": "Cold."}
    error = tell.refusal({"messages": [ASKED, thinking, ASKED, thinking]}, CAREFUL)
    assert "a record for each answer" in error.hint
    split = [{"messages": [ASKED, thinking]}, {"messages": [ASKED, ANSWERED, ASKED, thinking]}]
    told = tell(write_lines(tmp_path / "split.jsonl", split), CAREFUL)
    assert told[0][1] == f"<think>Cold.</think>It is 3.{END_TURN}\n"
    assert told[1][1] == f"It is 3.{END_TURN}\n{told[0][1]}"


def test_a_developer_is_the_system_and_an_unknown_role_is_refused(tell):
    record = {"messages": [{"role": "developer", "content": "Be kind."}, ASKED, ANSWERED]}
    assert "<|im_start|>system\nBe kind." in tell(record)[0][0]
    knowing = "{# developer #}" + TOOLED
    assert "<|im_start|>developer\nBe kind." in tell(record, knowing)[0][0]
    for role in ("narrator", "Bard", "function"):
        turns = [{"from": "human", "value": "Hi"}, {"from": role, "value": "Yes"}]
        assert f"message 2 of `conversations`: `from` is not a role that is known: '{role}'" in (
            tell.refusal({"conversations": turns}, TOOLED).problem
        )


TURN = "<|im_start|>{}\n{}<|im_end|>\n".format
PROMPTS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = table("record_words", "prompts")


@pytest.mark.parametrize(("record", "prompt"), PROMPTS)
def test_whatever_asks_is_the_prompt_of_a_conversation(record, prompt, tell):
    begun = "".join(TURN(*turn) for turn in prompt)
    assert tell(record) == [(begun + TURN("assistant", "2"), f"2{END_TURN}\n")]
    name = next(iter(record))
    if "messages" not in record:
        assert f"`{name}`" in tell.refusal(record, None).problem


def test_two_systems_that_differ_are_refused(tell):
    messages = [{"role": "system", "content": "A"}, ASKED, ANSWERED]
    assert tell({"messages": messages, "system": "A"}) == tell({"messages": messages})
    error = tell.refusal({"messages": messages, "system": "B"}, TOOLED)
    assert "`system` is another text" in error.problem


PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"instruction": "Hi", "input": "you"}, TURN("user", "Hi\nyou")),
    ({"question": "Hi", "system": "S"}, TURN("system", "S") + TURN("user", "Hi")),
    (
        {"prompt": "Hi", "history": [["Q", "A"]]},
        "".join(map(TURN, *zip(("user", "Q"), ("assistant", "A"), ("user", "Hi"), strict=True))),
    ),
    ({"conversations": [{"from": "human", "value": "Hi"}]}, TURN("user", "Hi")),
    ({"messages": [ASKED], "system": "S"}, TURN("system", "S") + TURN("user", ASKED["content"])),
]


@pytest.mark.parametrize("objective", ["dpo", "rw"])
@pytest.mark.parametrize(("asked", "begun"), PAIRS)
def test_a_pair_has_its_prompt_whatever_asks(asked, begun, objective, tell):
    expected = [(begun + TURN("assistant", text), f"{text}{END_TURN}\n") for text in ("Yes", "No")]
    for form in (
        lambda text: text,
        lambda text: {"from": "gpt", "value": text},
        lambda text: [{"role": "assistant", "content": text}],
    ):
        pair = {"chosen": form("Yes"), "rejected": form("No")}
        assert tell({**asked, **pair}, objective=objective) == expected


def test_a_rollout_has_its_system_and_history(tell):
    asked = {"prompt": "Hi", "system": "S", "history": [["Q", "A"]]}
    ((text, trained),) = tell({**asked, "response": "Yes", "reward": 1}, objective="ppo")
    turns = [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "Hi")]
    begun = "".join(TURN(*turn) for turn in turns)
    assert text == f"{begun}<|im_start|>assistant\nYes{END}"
    assert trained == f"Yes{END}"


UNREAD: list[tuple[str, dict[str, Any], str]] = table("record_words", "unread")


@pytest.mark.parametrize(("objective", "record", "field"), UNREAD)
def test_an_unread_text_is_refused(objective, record, field, tell, tmp_path, monkeypatch):
    beside = {"id": "a-1", "source": "b", "Language": "en", "doc_id": "c", "turns": 2, "ok": True}
    beside |= {"tokenCount": 3, "weight": 1, "masked": False, "url": "https://a.b/c?d=e%20f"}
    given = {name: value for name, value in record.items() if name != field}
    for place in (tmp_path / "lines" / "d.jsonl", tmp_path / "list" / "d e.json"):
        place.parent.mkdir()
        whole = {**beside, **record}
        place.write_text(json.dumps([whole, whole] if place.suffix == ".json" else whole))
        error = tell.refusal(place, TOOLED, objective=objective)
        assert f"`{field}`" in error.problem
        typed(error, place.parent, monkeypatch)
        mended = tell(place.parent / "without.jsonl", TOOLED, objective=objective)
        assert mended[: len(mended) // (2 if place.suffix == ".json" else 1)] == tell(
            given, TOOLED, objective=objective
        )


@pytest.mark.parametrize("kind", ["parquet", "saved", "arrow"])
def test_an_unread_column_of_a_table_is_refused(kind, tell, tmp_path):
    rows = [{"text": "a", "note": "b"}, {"text": "c", "note": None}]
    place = tmp_path / f"d.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), place)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        place = tmp_path / "saved"
        if kind == "arrow":
            (place,) = place.glob("*.arrow")
    error = tell.refusal(place, None)
    assert "`note`" in error.problem
    assert error.hint.endswith("leave it out of the table")


def test_a_function_that_gives_rewards_reads_the_whole_record(tell, tmp_path, monkeypatch):
    (tmp_path / "exact_judge.py").write_text(
        "def same(*, response, record, **_):\n    return float(response == record['solution'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    record = {"prompt": "1+1?", "response": "2", "solution": "2"}
    assert len(tell(record, objective="ppo", reward="exact_judge:same")) == 1


MASKS: list[dict[str, Any]] = [
    *({"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"trained": 0}),
    *({"loss": False}, {"masked": True}, {"weight": 0, "train": True}, {"Weight": 0}),
]


@pytest.mark.parametrize("template", [TOOLED, MARKED])
@pytest.mark.parametrize("mask", MASKS)
def test_a_turn_that_is_masked_is_not_trained(mask, template, tell):
    messages = [ASKED, {**ANSWERED, **mask}, ASKED, ANSWERED]
    ((text, trained),) = tell({"messages": messages}, template)
    assert text.count("It is 3.") == 2
    assert trained == f"It is 3.{END_TURN}" + ("\n" if template == TOOLED else "")
    ((_, everything),) = tell({"messages": messages}, template, trained="all")
    assert everything == text.replace(f"It is 3.{END_TURN}\n", "", 1)


def test_a_masked_user_is_not_trained_with_everything_else(tell):
    ((_, trained),) = tell({"messages": [{**ASKED, "weight": 0}, ANSWERED]}, trained="all")
    assert trained == TURN("assistant", "It is 3.")


@pytest.mark.parametrize(("message", "field"), table("record_words", "masks"))
def test_a_mask_that_is_no_yes_or_no_is_refused(message, field, tell):
    error = tell.refusal({"messages": [ASKED, ANSWERED, message]}, TOOLED)
    assert f"`{field}`" in error.problem
    assert "message 3" in error.problem


def test_what_is_about_a_message_or_a_part_masks_nothing(tell):
    part = {"type": "text", "text": ANSWERED["content"], "id": 3, "train": True, "annotations": []}
    about = {"id": 7, "turn": 1, "token_count": 3, "rating": 0, "model": "a-1", "weight": 1}
    told = tell({"messages": [ASKED, {**ANSWERED, "content": [part], **about}]})
    assert told == tell({"messages": [ASKED, ANSWERED]})


MASKED: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"messages": [ASKED, ANSWERED], "weight": 0}, "weight"),
    ("sft", {"messages": [ASKED, ANSWERED], "train": False}, "train"),
    ("sft", {"prompt": "p", "completion": "c", "weight": 0.0}, "weight"),
    ("sft", {"text": "t", "loss": False}, "loss"),
    ("sft", {"text": "t", "masked": True}, "masked"),
    ("sft", {"input_ids": [1, 2], "Trained": 0}, "Trained"),
    ("sft", {"instruction": "p", "output": "c", "training": False, "weight": 1}, "training"),
    ("dpo", {"prompt": "p", "chosen": "b", "rejected": "c", "train": False}, "train"),
    ("ppo", {"prompt": "p", "response": "b", "reward": 1, "weight": 0}, "weight"),
]


@pytest.mark.parametrize(("objective", "record", "field"), MASKED)
def test_a_record_that_is_not_to_be_trained_is_refused(objective, record, field, tell, tmp_path):
    without = {name: value for name, value in record.items() if name != field}
    data = write_lines(tmp_path / "two.jsonl", [without, record])
    error = tell.refusal(data, TOOLED, objective=objective)
    assert error.problem.startswith(f"two.jsonl:2: `{field}` is ")


def test_masks_that_cannot_be_are_refused(tell, tmp_path, monkeypatch):
    (tmp_path / "kind_judge.py").write_text("def one(**_):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = {"prompt": "p", "response": "b", "difficulty": 3, "hint": "c", "train": False}
    how = {"objective": "ppo", "reward": "kind_judge:one"}
    assert "`train` is " in tell.refusal(record, TOOLED, **how).problem
    assert len(tell({**record, "train": True}, **how)) == 1
    pair = {"chosen": [ASKED, {**ANSWERED, "weight": 0}], "rejected": [ASKED, ANSWERED]}
    assert "`weight`" in tell.refusal(pair, TOOLED, objective="dpo").hint


def test_a_table_gives_the_tokens_of_the_lines_that_it_was_made_of(tell, tmp_path):
    lines, table = (tell(DATA / name) for name in ("tools_lines.jsonl", "tools.parquet"))
    assert table == lines
    assert not any("null" in text for text, _ in table)
    rows = [json.loads(line) for line in (DATA / "tools_lines.jsonl").read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows[::-1]), tmp_path / "turned.parquet")
    assert tell(tmp_path / "turned.parquet") == lines[::-1]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert tell(tmp_path / "saved") == lines


def test_a_null_in_a_text_of_json_is_the_makers_own(tell):
    for arguments, written in (({"unit": None}, "{}"), ('{"unit": null}', '{"unit": null}')):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        record = {"messages": [ASKED, {**CALLED, "tool_calls": [call]}, RETURNED, ANSWERED]}
        assert f"<call>weather {written}</call>" in tell(record)[0][1]


@pytest.mark.parametrize("arguments", ['["Oslo"]', "Oslo", '"Oslo"', 3])
def test_arguments_that_are_no_object_are_refused(arguments, tell):
    call = {"function": {"name": "weather", "arguments": arguments}}
    error = tell.refusal({"messages": [ASKED, {**CALLED, "tool_calls": [call]}]}, TOOLED)
    assert "message 2 of `messages`: `arguments`" in error.problem


@pytest.mark.parametrize("part", [{"type": "image", "url": "a"}, {"text": "a"}, "a", 3])
def test_a_part_that_is_no_text_is_refused(part, tell):
    error = tell.refusal({"messages": [{**ASKED, "content": [part]}, ANSWERED]}, TOOLED)
    assert "message 1 of `messages`: `content`" in error.problem


def test_a_file_that_is_one_list_is_read(tell, tmp_path):
    rows = [{"text": "été"}, {"text": "b", "meta": {"a": None}}]
    for name, text in {
        "one.json": json.dumps(rows),
        "many.jsonl": "\ufeff \n" + json.dumps(rows, indent=2, ensure_ascii=False) + "\n\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(text.encode(), mtime=0))
        for path in (tmp_path / name, packed):
            assert [text for text, _ in tell(path, None)] == [f"été{END}", f"b{END}"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"text": "a"}, {"text": 7}]', "d.json:2: `text` is not a text"),
        ('[{"text": "a"}, "b"]', "d.json is no list of records"),
        ('[{"text": "a"}', "d.json is no list of records"),
        ("[]", "d.json has no record"),
    ],
)
def test_a_list_is_refused_by_the_record_that_cannot_be_read(text, problem, tell, tmp_path):
    (tmp_path / "d.json").write_text(text)
    assert tell.refusal(tmp_path / "d.json", None).problem.startswith(problem)


def test_a_list_that_is_too_long_for_memory_is_made_lines_by_the_hint(tell, tmp_path, monkeypatch):
    (tmp_path / "d.json").write_text(json.dumps([{"text": "a" * 999}] * 2999))
    monkeypatch.setattr(readers, "_LIST_BYTES", 1 << 20)
    error = tell.refusal(tmp_path / "d.json", None)
    assert "d.json is one list of more than 1 MiB" in error.problem
    typed(error, tmp_path, monkeypatch)
    assert len(tell(tmp_path / "lines.jsonl", None)) == 2999
