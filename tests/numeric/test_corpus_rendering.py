"""Records become the tokens that transformers' own chat templates and TRL give."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from corpora import (
    BEGIN,
    CHATML,
    COUNTING,
    END,
    END_TURN,
    MARKED,
    THINKING,
    ids_of,
    made,
    of_records,
    trained_of,
    write_lines,
    write_tokenizer,
)
from transformers import AutoTokenizer

from highwater.engine.data.data_files import data_files, records
from highwater.engine.data.rendering import Rendering, supervised
from highwater.engine.data.text_tokens import Tokenizer
from highwater.engine.data.tokenise import rendered
from highwater.errors import UsageError
from tables import table

CHAT = [
    {"role": "system", "content": "Answer questions."},
    {"role": "user", "content": "What is one and one?"},
    {"role": "assistant", "content": "It is two."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chatml"))


def opened(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_text_is_trained_whole_with_one_end_and_no_tokenizer_pads_it(chatml, tmp_path):
    text = "the cat sat on the mat and the dog ran after the cat over the hill"
    corpus = of_records(tmp_path, [{"text": text}], tokenizer=chatml)
    tokenizer = opened(chatml)
    expected = [*plain(tokenizer, text), tokenizer.eos_token_id]
    assert len(expected) > 16
    assert ids_of(corpus) == trained_of(corpus) == [expected]
    texts = [{"text": f"the cat{END}"}, {"text": "the cat"}]
    corpus = of_records(tmp_path, texts, tokenizer=chatml)
    first, second = ids_of(corpus)
    assert first == second


def test_what_a_tokenizer_puts_before_a_text_is_there_and_its_end_once(tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer", begins=True)
    records = [{"text": "the cat"}, {"prompt": "the cat", "completion": " sat"}]
    corpus = of_records(tmp_path, records, tokenizer=directory)
    tokenizer = opened(directory)
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in (BEGIN, END))
    assert ids_of(corpus)[0] == tokenizer("the cat")["input_ids"]
    assert ids_of(corpus)[1] == [begin, *plain(tokenizer, "the cat sat"), end]
    assert trained_of(corpus)[1] == [*plain(tokenizer, " sat"), end]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_a_conversation_is_what_the_chat_template_makes_of_it(template, tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer", template)
    corpus = of_records(tmp_path, [{"messages": CHAT}], tokenizer=directory)
    expected = opened(directory).apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert ids_of(corpus) == [expected]


def test_marked_turns_are_those_of_transformers_own_mask(tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer", MARKED)
    corpus = of_records(tmp_path, [{"messages": CHAT}], tokenizer=directory)
    given = opened(directory).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = given["assistant_masks"]
    trained = [token for token, is_it in zip(given["input_ids"], mask, strict=True) if is_it]
    assert trained
    assert trained_of(corpus) == [trained]


def test_turns_are_found_by_proof_or_by_the_hint(tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer", THINKING)
    corpus = of_records(tmp_path, [{"messages": CHAT}], tokenizer=directory)
    assert opened(directory).decode(trained_of(corpus)[0]) == (
        f"It is two.{END_TURN}\n<think>\n\n</think>\n\nBecause.{END_TURN}\n"
    )
    directory = write_tokenizer(tmp_path / "tokenizer", COUNTING)
    data = write_lines(tmp_path / "d.jsonl", [{"messages": CHAT}])
    with pytest.raises(UsageError, match=r"^d\.jsonl:1: where message 3") as refused:
        made(tmp_path, data, tokenizer=directory)
    assert "`--train-on all`" in refused.value.hint
    corpus = made(tmp_path, data, tokenizer=directory, trained="all")
    assert ids_of(corpus) == trained_of(corpus)
    assert ids_of(corpus)[0] == opened(directory).apply_chat_template(CHAT)["input_ids"]


@pytest.mark.parametrize("name", ["completion", "response"])
def test_of_a_prompt_and_its_completion_the_completion_is_trained(name, chatml, tmp_path):
    texts = {"prompt": "What is one and one?", name: " It is two."}
    data = write_lines(tmp_path / "d.jsonl", [texts, {"prompt": CHAT[:2], name: CHAT[2:3]}])
    corpus = made(tmp_path, data, tokenizer=chatml)
    tokenizer = opened(chatml)
    assert [tokenizer.decode(ids) for ids in trained_of(corpus)] == [
        f" It is two.{END}",
        f"It is two.{END_TURN}\n",
    ]
    assert ids_of(corpus)[1] == tokenizer.apply_chat_template(CHAT[:3])["input_ids"]
    everything = made(tmp_path, data, tokenizer=chatml, trained="all")
    assert trained_of(everything) == ids_of(everything) == ids_of(corpus)


def test_a_prompt_is_what_a_model_is_given_though_a_token_reaches_out_of_it(chatml, tmp_path):
    corpus = of_records(tmp_path, [{"prompt": "over th", "completion": "e hill"}], tokenizer=chatml)
    tokenizer = opened(chatml)
    assert plain(tokenizer, "over the hill") != plain(tokenizer, "over th") + plain(
        tokenizer, "e hill"
    )
    assert ids_of(corpus)[0][:-1] == plain(tokenizer, "over th") + plain(tokenizer, "e hill")
    assert "1 document a token would reach" in corpus.summary.notes[0]


def test_a_tokenizer_that_adds_a_space_is_cut_where_its_tokens_end_or_refused(tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer", None, words=True)
    tokenizer = opened(directory)
    good = write_lines(tmp_path / "good.jsonl", [{"prompt": "the cat", "completion": " sat on"}])
    corpus = made(tmp_path, good, tokenizer=directory)
    assert ids_of(corpus)[0][:-1] == plain(tokenizer, "the cat sat on")
    assert ids_of(corpus)[0][: -len(trained_of(corpus)[0])] == plain(tokenizer, "the cat")
    bad = write_lines(tmp_path / "bad.jsonl", [{"prompt": "over th", "completion": "e hill"}])
    with pytest.raises(UsageError, match=r"^bad\.jsonl:1: a token of .* spell another text"):
        made(tmp_path, bad, tokenizer=directory)
    everything = made(tmp_path, bad, tokenizer=directory, trained="all")
    assert ids_of(everything)[0][:-1] == plain(tokenizer, "over the hill")


def test_what_a_template_does_not_write_or_begins_otherwise_is_refused(tmp_path):
    directory = write_tokenizer(tmp_path / "tokenizer", "{{ '' }}")
    with pytest.raises(UsageError, match=r"^d\.jsonl:2: .* `content` of message 1"):
        of_records(tmp_path, [{"text": "the cat"}, {"messages": CHAT[:2]}], tokenizer=directory)
    directory = write_tokenizer(tmp_path / "tokenizer", COUNTING)
    pair = {"chosen": CHAT[:3], "rejected": [*CHAT[:2], CHAT[4]]}
    with pytest.raises(UsageError, match=r"^d\.jsonl:1: where message 3") as refused:
        of_records(tmp_path, [pair], tokenizer=directory, objective="dpo")
    assert "as texts" in refused.value.hint


def test_bytes_are_tokens_where_there_is_no_tokenizer(tmp_path):
    records = [{"text": "été"}, {"prompt": "a", "completion": "b"}]
    corpus = of_records(tmp_path, records, vocab_size=257)
    assert ids_of(corpus) == [[*"été".encode(), 256], [97, 98, 256]]
    assert trained_of(corpus)[1] == [98, 256]
    assert corpus.summary.tokenizer == "bytes"
    with pytest.raises(UsageError, match="257 with the end of a text"):
        made(tmp_path, tmp_path / "d.jsonl", vocab_size=256)


@pytest.mark.parametrize("objective", ["rw", "dpo"])
def test_a_pair_is_chosen_then_rejected_with_the_prompt_untrained(objective, chatml, tmp_path):
    texts = {"prompt": "Why?", "chosen": " Because.", "rejected": " It is two."}
    messages = {
        "prompt": CHAT[:2],
        "chosen": CHAT[2:3],
        "rejected": [{"role": "assistant", "content": "Why?"}],
    }
    whole = {"chosen": CHAT[:3], "rejected": [*CHAT[:2], *messages["rejected"]]}
    beside = {"prompt": "What is one and one?", **whole}
    corpus = of_records(
        tmp_path, [texts, messages, whole, beside], tokenizer=chatml, objective=objective
    )
    tokenizer = opened(chatml)
    told = [tokenizer.decode(ids) for ids in trained_of(corpus)]
    assert told[:2] == [f" Because.{END}", f" It is two.{END}"]
    assert told[2:4] == [f"It is two.{END_TURN}\n", f"Why?{END_TURN}\n"]
    assert ids_of(corpus)[2:4] == ids_of(corpus)[4:6] == ids_of(corpus)[6:8]
    assert (corpus.units.tolist(), corpus.summary.units) == ([0, 0, 1, 1, 2, 2, 3, 3], 4)


def test_rollouts_in_one_record_or_in_several_are_the_same(chatml, tmp_path):
    together = [
        {"prompt": "Why?", "responses": [" Because.", " It is two."], "rewards": [1.0, 0.25]},
        {"prompt": CHAT[:2], "responses": ["It is two.", "Why?"], "rewards": [2, -1]},
    ]
    apart = [
        {"prompt": each["prompt"], "response": response, "reward": reward, "group": number}
        for number, each in enumerate(together)
        for response, reward in zip(each["responses"], each["rewards"], strict=True)  # type: ignore[call-overload]
    ]
    scattered = [apart[0], apart[2], apart[1], apart[3]]
    corpora = [
        made(
            tmp_path,
            write_lines(tmp_path / f"{at}.jsonl", records),
            tokenizer=chatml,
            objective="grpo",
        )
        for at, records in enumerate((together, apart, scattered))
    ]
    for corpus in corpora:
        assert ids_of(corpus) == ids_of(corpora[0])
        assert trained_of(corpus) == trained_of(corpora[0])
        documents = [corpus.document(number) for number in range(4)]
        assert [document.reward for document in documents] == [1.0, 0.25, 2.0, -1.0]
        assert [document.group for document in documents] == corpus.units.tolist() == [0, 0, 1, 1]
        assert corpus.summary.units == 2
    assert [corpora[2].name_of(number) for number in range(4)] == [
        *("2.jsonl:1", "2.jsonl:3", "2.jsonl:2", "2.jsonl:4")
    ]
    tokenizer = opened(chatml)
    assert tokenizer.decode(trained_of(corpora[0])[2]) == f"It is two.{END}"
    begun = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True)["input_ids"]
    assert ids_of(corpora[0])[2][: len(begun)] == begun


def test_sampled_ids_and_their_logprobs_are_kept_to_the_bit(chatml, tmp_path):
    record = {
        "prompt": "Why?",
        "response_ids": [[7, 8], [9]],
        "logprobs": [[-0.5, -1.5], [-0.1]],
        "rewards": [1, 0],
    }
    without = {"prompt": "Why?", "responses": [" Because."], "rewards": [0.5]}
    corpus = of_records(tmp_path, [record, without], tokenizer=chatml, objective="grpo")
    prompt = plain(opened(chatml), "Why?")
    assert ids_of(corpus)[:2] == [[*prompt, 7, 8], [*prompt, 9]]
    assert trained_of(corpus)[:2] == [[7, 8], [9]]
    assert corpus.document(0).old_logprobs_L[-2:].tolist() == [-0.5, -1.5]
    assert corpus.document(2).old_logprobs_L is None
    assert "1 prompt with a single response" in corpus.summary.notes[0]
    assert corpus.summary.notes[0].endswith("its advantage is its reward / (1 + 1e-6)")


def test_a_function_gives_the_rewards_and_ppo_has_units_of_one(chatml, tmp_path, monkeypatch):
    (tmp_path / "judge_of_tests.py").write_text(
        "def shortness(*, prompt, response, record):\n"
        "    return record['weight'] / (len(prompt) + len(response))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    records = [{"prompt": "Why?", "response": "Because.", "weight": 6.0}]
    corpus = of_records(
        tmp_path, records, tokenizer=chatml, objective="ppo", reward="judge_of_tests:shortness"
    )
    assert (corpus.document(0).reward, corpus.units.tolist()) == (0.5, [0])


HOSTILE: list[tuple[str, dict[str, Any], str]] = table("record_rendering", "hostile")


@pytest.mark.parametrize(("objective", "record", "problem"), HOSTILE)
def test_what_cannot_be_trained_is_refused_by_line(objective, record, problem, chatml, tmp_path):
    with pytest.raises(UsageError) as refused:
        of_records(tmp_path, [record], tokenizer=chatml, objective=objective)
    assert refused.value.problem.startswith("d.jsonl:1: ")
    assert problem in refused.value.problem
    assert refused.value.hint


def test_messages_without_a_template_and_a_foreign_tokenizer_are_refused(chatml, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"messages": CHAT}])
    with pytest.raises(UsageError, match="no tokenizer, whose chat template"):
        made(tmp_path, data)
    with pytest.raises(UsageError, match="and the model knows the ids 0 to 99"):
        made(tmp_path, data, tokenizer=chatml, vocab_size=100)
    with pytest.raises(UsageError, match="no tokenizer can be opened"):
        made(tmp_path, data, tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("source", "problem", "hint"),
    [
        ("harsh_judge:judge", "d.jsonl:1: harsh_judge:judge raised RuntimeError: no", "sed -n 2p"),
        ("harsh_judge:praise", "d.jsonl:1: harsh_judge:praise gave 'good' for", "return 1.0"),
        ("harsh_judge:doubt", "d.jsonl:1: harsh_judge:doubt gave nan for a reward", "return 1.0"),
        ("harsh_judge.py", "'harsh_judge.py' is not module:function", "rewards:length"),
    ],
)
def test_a_function_without_rewards_is_refused(source, problem, hint, tmp_path, monkeypatch):
    (tmp_path / "harsh_judge.py").write_text(
        "def judge(**_):\n    raise RuntimeError('no')\n"
        "def praise(**_):\n    return 'good'\n"
        "def doubt(**_):\n    return float('nan')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as refused:
        of_records(tmp_path, [{"prompt": "a", "response": "b"}], objective="ppo", reward=source)
    assert problem in refused.value.problem
    assert hint in refused.value.hint


def rendered_by(processes: int, data: Path, tokenizer: Path) -> list[tuple[str, list[list[int]]]]:
    rendering = Rendering(Tokenizer(tokenizer), vocab_size=512)
    (file,) = data_files([str(data)]).files
    render = partial(supervised, rendering, everything=False)
    return [
        (record.name, [document.ids_L.tolist() for unit in units for document in unit.documents])
        for record, units in rendered(records(file), render, processes=processes)
    ]


def test_any_number_of_processes_renders_the_same_in_the_same_order(chatml, tmp_path):
    rows = [{"messages": [*CHAT[:2], {"role": "assistant", "content": "a" * n}]} for n in range(99)]
    data = write_lines(tmp_path / "d.jsonl", rows)
    assert rendered_by(2, data, chatml) == rendered_by(1, data, chatml)


def test_of_several_refusals_the_first_is_told_by_any_number_of_processes(chatml, tmp_path):
    texts = [{"text": "the cat"}] * 70
    data = write_lines(tmp_path / "d.jsonl", [*texts, {"text": 7}, *texts, {"text": 8}])
    with data.open("a") as stream:
        stream.write("{\n")  # read long before the others are rendered
    for processes in (1, 2):
        with pytest.raises(UsageError, match=r"^d\.jsonl:71: `text` is not a text: 7"):
            rendered_by(processes, data, chatml)
    broken = write_lines(tmp_path / "broken.jsonl", texts)
    with broken.open("a") as stream:
        stream.write("{\n")
    for processes in (1, 2):
        with pytest.raises(UsageError, match=r"^broken\.jsonl:71 is no record of JSON"):
            rendered_by(processes, broken, chatml)
