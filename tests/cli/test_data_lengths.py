"""Which length some data needs: documents by length, what a length keeps, and what a pass takes."""

import json
import random
import re
from pathlib import Path

import pytest

import highwater
from highwater.errors import HighwaterError

pytestmark = pytest.mark.usefixtures("forks")
LENGTHS = (*([500] * 60), *([3_000] * 25), *([9_000] * 10), *([20_000] * 4), 70_001)
"""Tokens of each text, of about 4 bytes."""
TOKENS = sum(LENGTHS)
highwater_api = highwater
"""Under a name that no fixture has."""
ON = ("--gpus", "8xH100-80GB")


@pytest.fixture
def data(tmp_path: Path) -> str:
    texts = ["x" * (4 * length - 1) for length in LENGTHS]  # and the end of a text
    random.Random(0).shuffle(texts)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return str(path)


def kept(length: int) -> int:
    """What a length keeps, by the definition."""
    return sum(min(each, length) for each in LENGTHS)


@pytest.mark.parametrize("row", ['{{"id": "a b", "num_tokens": {}}}', "{}"])
def test_a_count_a_line_is_taken_as_it_is(data, tmp_path, row):
    path = tmp_path / "counts.txt"
    path.write_text("".join(f"{row.format(each)}\n\n" for each in LENGTHS))
    found = highwater.data_lengths(str(path))
    assert (found.tokenizer, found.bytes_per_token, found.tokens) == ("rows", None, TOKENS)
    assert found.lengths == highwater.data_lengths(data).lengths
    path.write_text(f'{path.read_text()}{{"text": "c", "num_tokens": 2}}\n')
    with pytest.raises(HighwaterError, match=r"counts\.txt:201 lacks a count of tokens"):
        highwater.data_lengths(str(path))
    path.write_text("12\n")
    assert highwater.data_lengths(str(path)).tokenizer == "bytes"


def test_ids_need_no_tokenizer_to_be_counted(run, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(f'{{"input_ids": {[150_000] * each}}}\n' for each in (8_000, 300)))
    first = run("highwater", "data", str(path)).stdout.splitlines()[0]
    assert first.endswith(": 8,192 tokens hold 99 % of 2 documents whole (longest: 8,000).")
    first = run("highwater", "predict", "Qwen3-8B", *ON, "--data", str(path)).stdout.splitlines()[0]
    assert first.endswith(" tokens (25.6 x native 40,960): none is cut.")


def test_each_length_keeps_what_its_definition_says_and_the_last_one_everything(data):
    found = highwater.data_lengths(data)
    assert (found.documents, found.tokens, found.longest_tokens) == (100, TOKENS, 70_001)
    assert (found.tokenizer, found.bytes_per_token) == ("bytes", 4)
    assert (found.whole_tokens, found.reach_tokens) == (20_224, None)
    assert [each.length_tokens for each in found.lengths] == [2**power for power in range(10, 18)]
    for each in found.lengths:
        assert each.kept_tokens == kept(each.length_tokens)
        assert each.documents == sum(one <= each.length_tokens for one in LENGTHS)
        assert each.trained is None
    assert found.lengths[-1].kept_tokens == TOKENS
    assert found.enough.kept_tokens >= 0.95 * TOKENS
    shorter = [each for each in found.lengths if each.length_tokens < found.enough.length_tokens]
    assert all(each.kept_tokens < 0.95 * TOKENS for each in shorter)


def test_conversations_without_a_tokenizer_have_the_bytes_of_what_is_said_in_them(tmp_path):
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    said = [("user", {"content": "12345"}), ("assistant", {"content": "678\u00fc"})]
    asked = [("user", {"content": "x" * 900}), ("assistant", {"tool_calls": [call]})]
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": role, **each} for role, each in row]} for row in (said, asked)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = highwater.data_lengths(str(path))
    assert (found.tokenizer, found.documents) == ("bytes", 2)
    short, long = found.tokens - found.longest_tokens, found.longest_tokens
    assert short == -(-len("12345678\u00fc".encode()) // 4)
    assert 900 < 4 * long < 900 + 2 * len(json.dumps(call))
    assert any("what is said is counted" in note for note in found.notes)


def test_one_pass_takes_the_kept_tokens_at_the_predicted_speed_and_costs_the_gpus_hours(data):
    found = highwater.data_lengths(data, "Qwen3-8B", gpus="8xH100-80GB", price="2.50/h", lora=16)
    for each in found.lengths:
        alone = highwater.predict(
            "Qwen3-8B", gpus="8xH100-80GB", length=each.length_tokens, lora=16
        ).answer
        assert each.trained.cell == alone.cell
        assert each.epoch_s == pytest.approx(each.kept_tokens / alone.step.tokens_per_s)
        assert each.epoch_price == pytest.approx(2.5 * 8 * each.epoch_s / 3600)


def test_a_command_says_the_length_that_holds_nearly_all_and_draws_the_documents(highwater, data):
    done = highwater("data", data, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    counts = "No tokenizer here, 4 bytes a token: `highwater data --model FOLDER` counts."
    about = ": about 20,224 tokens hold 99 % of 100 documents whole (longest: "
    assert about in first
    assert counts in rest
    share = highwater("data", data, "--whole", "90%").stdout
    assert ": about 9,216 tokens hold 90 % of 100 documents whole" in share
    assert share.splitlines()[1].startswith("5 of 100 documents (5.0%) are longer than 9,216 ")
    for typed in ("0", "101%", "most"):
        assert "for example `98%`" in highwater("data", data, "--whole", typed).stderr
    named = highwater("data", data, "--model", "Qwen3-8B").stdout
    assert counts in named
    assert re.match(r"65,536 tokens keep 9[89]\.\d% .*; 131,072 keep all\.", rest[0])
    assert any(": estimated from bytes" in line for line in rest)
    drawn = [line.count("#") for line in rest if "#" in line]
    assert drawn[0] == max(drawn) == 16
    assert max(map(len, rest[3:])) <= 80
    assert json.loads(highwater("data", data, "--json").stdout)["tokens"] == TOKENS


def test_a_folder_with_a_tokenizer_and_no_config_counts(highwater, tmp_path):
    """``FOLDER`` of the hint; beside GPUs the folder's name has to be a model's, too."""
    words = {"x": 0, "?": 1, "<end>": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
    folder, path = tmp_path / "Qwen3-8B", tmp_path / "texts.jsonl"
    folder.mkdir()
    spaces = {"type": "Whitespace"}
    whole = {"version": "1.0", "model": model, "pre_tokenizer": spaces, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    path.write_text("".join(f"{json.dumps({'text': 'x ' * count})}\n" for count in (7, 99)))
    found = highwater_api.data_lengths(str(path), str(folder))
    assert (found.tokens, found.longest_tokens, found.bytes_per_token) == (108, 100, None)
    counted = "texts.jsonl: 256 tokens hold 99 % of 2 documents whole (longest: 100)"
    for model in ("Qwen3-8B", "./Qwen3-8B"):
        done = highwater("data", "texts.jsonl", "--model", model)
        assert done.stdout.splitlines()[0] == f"{counted}."
        assert "predict Qwen3-0.6B --gpus" in done.stderr.splitlines()[-1]
    done = highwater("predict", "Qwen3-8B", *ON, "--data", "texts.jsonl")
    assert done.stdout.startswith(f"{counted}; 8 x H100-80GB train Qwen3-8B up to ")


def test_predict_says_what_a_longer_step_and_a_pass_take_and_what_to_type_next(highwater, data):
    done = highwater("predict", "Qwen3-8B", *ON, "--data", data, "--price", "2.50")
    assert done.returncode == 0, done.stderr
    first, *_ = done.stdout.splitlines()
    reach = highwater_api.predict("Qwen3-8B", gpus="8xH100-80GB").explained.capacity_tokens
    times = "(25.6 x native 40,960)"
    assert first.endswith(f" H100-80GB train Qwen3-8B up to {reach:,} tokens {times}: none is cut.")
    assert " times as long" in done.stdout
    assert re.search(r"takes about .*, [\d.]+ GPU-hours, [\d.]+ dollars, predicted", done.stdout)
    assert "recommend Qwen3-8B --gpus 8xH100-80GB --length 65536" in done.stderr.splitlines()[-1]


def test_of_data_longer_than_what_trains_the_longest_that_does_comes_first(run, data):
    asked = {"gpus": "1xRTX-4090", "lora": 16, "activations": "gpu"}
    found = highwater.data_lengths(data, "Qwen3-8B", **asked)
    longest = [each for each in found.lengths if each.trained][-1]
    assert found.enough == longest
    assert longest.kept_tokens < 0.95 * TOKENS
    words = ("--gpus", "1xRTX-4090", "--lora", "16", "--activations", "gpu", "--data", data)
    done = run("highwater", "predict", "Qwen3-8B", *words)
    first = done.stdout
    assert f"{longest.length_tokens:,} tokens, the longest that train here, keep" in first
    assert f"{2 * longest.length_tokens:,} keep" in first
    assert "and do not train here" in first
    assert found.cut.length_tokens == found.reach_tokens
    assert f"--length {found.reach_tokens}" in done.stderr.splitlines()[-1]


def test_without_a_price_the_catalogs_is_taken_and_dated_where_it_has_one(highwater, data):
    asked = ("predict", "Qwen3-8B", "--data", data, "--gpus")
    listed = highwater(*asked, "8xH100-80GB")
    assert " dollars, predicted" in listed.stdout
    assert "RunPod's list price (Secure Cloud) of 2026-09-25" in listed.stderr
    named = highwater(*asked, "8xH100-80GB", "--price", "3.49")
    assert named.stdout == listed.stdout
    assert "RunPod" not in named.stderr
    assert "dollars" not in highwater(*asked, "8xH800-80GB").stdout


def test_gpus_that_train_no_length_leave_what_is_counted(data):
    found = highwater.data_lengths(data, "Llama-3.1-405B", gpus="RTX-4090")
    assert [each.trained for each in found.lengths] == [None] * len(found.lengths)
    assert found.lengths[-1].kept_tokens == TOKENS
    with pytest.raises(HighwaterError, match="price of -1"):
        highwater.data_lengths(data, price=-1)


def test_of_another_trainer_the_share_that_its_longest_length_cuts_is_told(run, data):
    words = ("--gpus", "2xRTX-4090", "--lora", "16", "--trainer", "llamafactory")
    asked = {"gpus": "2xRTX-4090", "lora": 16, "trainer": "llamafactory"}
    at = highwater.predict("Qwen3-8B", **asked).answer.capacity_tokens
    longer = sum(each > at for each in LENGTHS)
    done = run("highwater", "predict", "Qwen3-8B", *words, "--data", data)
    first, second, *_ = done.stdout.splitlines()
    by = "2 x RTX-4090 train Qwen3-8B for LLaMA-Factory's trainer"
    assert first.endswith(f" whole (longest: 70,001); {by} up to {at:,} tokens.")
    assert len(first.split()) <= 30
    words = ("Gemma-3-12b-it", "--gpus", "L40S", "--lora", "16")
    assert (
        "; 1 x L40S with host memory trains "
        in run("highwater", "predict", *words, "--data", data).stdout
    )
    assert second.startswith(f"{longer} of 100 documents ({longer / 100:.1%}) ")
    assert f" longer than {at:,} tokens; cut there, about {kept(at) / TOKENS:.1%} of" in second
    assert f"--length {at}" in done.stderr.splitlines()[-1]


def test_a_length_that_is_named_says_what_it_cuts(run, data):
    done = run("highwater", "predict", "Qwen3-8B", *ON, "--length", "10k", "--data", data)
    first = done.stdout.splitlines()[0]
    assert first.startswith(
        f"{data}: 5 of 100 documents (5.0%) are longer than 10,240 tokens; cut there, "
    )
    assert f" {kept(10_240) / TOKENS:.1%} of your tokens are left" in first
    found = highwater.data_lengths(data, "Qwen3-8B", gpus="8xH100-80GB", length="10k")
    assert found.cut.trained is not None
    assert (found.cut.kept_tokens, found.cut.documents) == (kept(10_240), 95)
