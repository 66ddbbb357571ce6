"""What `emit` says first of each trainer."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from highwater.cli import recommend as command
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.nouns.trainer import REGISTRY, is_step_of, predicted_as, step_in_words, trainer_title
from highwater.trainers.targets import TARGETS

REPORTS = Path(__file__).parents[2] / "docs" / "results" / "other_trainers" / "reports.csv"
VERDICT = re.compile(r"\b(safe|likely|tight|up to [\d,]+ tokens|left|headroom)\b", re.IGNORECASE)
WORDS = 151_936
"""Of Qwen3-8B's vocabulary."""


def recorded() -> list[tuple[str, ...]]:
    """Every cell of a public report, as it is asked of `emit`, and one of a model with windows."""
    asked: list[tuple[str, ...]] = []
    with REPORTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["length_tokens"]]
    for row in rows:
        gpu = row["gpu"].replace("H100 95.1GiB", "H100-80GB").replace("A800-80GB", "A100-80GB")
        kind = gpu.replace("H200 capped at 79.15 GiB", "H200-141GB").replace("64 GiB", "A100-80GB")
        words = [row["model"].replace("Qwen2-7B", "Qwen2.5-7B-Instruct"), "--gpus"]
        words += [f"{row['gpus'] or 1}x{kind or 'H100-80GB'}", "--length", row["length_tokens"]]
        words += ["--gpu-memory", "95GiB"] if "95.1" in row["gpu"] else []
        words += ["--gpu-memory", "79GiB"] if "capped" in row["gpu"] else []
        rank = "32" if "rank 32" in row["training"] else "16"
        words += ["--lora", rank] * ("LoRA" in row["training"])
        words += ["--lora-base", "nf4"] * ("4-bit" in row["training"])
        is_scaled = "Llama" in row["model"] and int(row["length_tokens"]) > 131_072
        words += ["--rope", "yarn"] * is_scaled
        words += ["--ring", "8"] * ("parallel 8" in row["parallel"])
        asked.append(tuple(words))
    return [
        *dict.fromkeys(asked),
        ("Qwen3-8B", "--gpus", "4xH100-80GB", "--length", "64k"),
        ("gpt-oss-20b", "--gpus", "4xH100-80GB", "--length", "32k"),
    ]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_first_line_is_true_of_the_trainer_and_no_verdict_is_anothers(target, capsys):
    """Over every recorded cell; what is not predicted as its own has no word of a verdict."""
    own = TARGETS[target].predicted_for
    who = REGISTRY[target].trained or f"{trainer_title(target)}'s trainer"
    step = "" if target == own else f" for {step_in_words(own)}"
    outside = " A step's seconds leave out generation." * (own == "trinity")
    kinds: set[str] = set()
    for words in recorded():
        rollout = ("--rollout-gpus", "1") * (target == "areal")
        try:
            code = command.emit(parse(("emit", "--for", target, *words, *rollout)))
        except UsageError:  # of what it has no words for nothing is emitted
            continue
        said = capsys.readouterr()
        first = said.out.removeprefix("#!/usr/bin/env bash\n").partition("\n")[0]
        if code == 1:
            assert re.match("not predicted for|nothing fits|No: .* does not fit", said.out)
            kinds.add("nothing")
        elif not first.startswith(("# Not predicted for this trainer: ", '"""Not predicted')):
            assert f" for {who}" in first
            assert first.startswith(("# Yes: ", "# Likely: ", "# Tight: "))
            by = predicted_as(own)
            assert f". P{by[1:]}{step}. " in first
            assert re.search(r"\. ((In its|Attention is) .*\. )?With ", first)
            assert first.endswith(outside)
            kinds.add("predicted")
        else:
            assert not VERDICT.search(said.out + said.err)
            kinds.add("not predicted")
    is_its_own = is_step_of(own, target)
    assert ("predicted" in kinds) == is_its_own
    assert ("not predicted" in kinds) == (not is_its_own or bool(REGISTRY[own].trains_by))


def test_a_folders_page_says_whose_prediction_it_is(emitted, tmp_path):
    words = "Qwen3-8B --gpus 4xH100-80GB --length 64k"
    for target, more in (("axolotl", ""), ("axolotl", "--ring 4"), ("torchtitan", "")):
        folder = f"{target}{len(more)}"
        document = emitted(target, f"{words} {more} -o {folder}")
        page = (tmp_path / folder / "CHECK.md").read_text()
        if (target, more) == ("axolotl", ""):
            assert document["fits"] is True
            assert "Predicted as Hugging Face's step, Axolotl's own unmeasured." in page
        else:
            assert document["fits"] is None
            assert "Not predicted for this trainer: " in page
            assert not VERDICT.search(page)


@pytest.fixture
def emitted(highwater: Run) -> Callable[[str, str], dict[str, Any]]:
    return lambda target, words: json.loads(
        highwater("emit", "--for", target, *words.split(), "--json").stdout
    )


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ("axolotl", "liger_fused_linear_cross_entropy"),
        ("llamafactory", "enable_liger_kernel"),
        ("ms-swift", "use_liger_kernel"),
        ("accelerate", None),
    ],
)
def test_the_chunked_loss_is_chosen_and_what_it_buys_is_said(highwater, emitted, target, field):
    asked = "Qwen3-8B --gpus 4xH100-80GB --length 16k"
    document = emitted(target, asked)
    assert field is None or document["values"][field] is True
    done = highwater("recommend", *asked.split(), "--trainer", target, "--json")
    usual = {"loss": "full", "activations": "gpu"}
    wanted = {"activations": "gpu", "allocator": "expandable"}
    by_loss = {
        settings["loss"]: each
        for each in json.loads(done.stdout)["candidates"]
        if (settings := usual | each["cell"]["settings"]).items() >= wanted.items()
    }
    whole, chunked = by_loss["full"], by_loss["chunked"]
    assert whole["fits"]
    less = (chunked["headroom_bytes"] - whole["headroom_bytes"]) / 2**30
    assert f"takes {less:.2f} GiB less of each GPU than whole logits" in document["text"]
    assert f"which end at {whole['capacity_tokens']:,} tokens" in document["text"]
    named = emitted(target, f"{asked} --loss full")
    assert (named["fits"], named["logits_bytes"]) == (True, 10 * WORDS * 16_384)
    assert field is None or field not in named["values"]


@pytest.mark.parametrize(("target", "is_there"), [("axolotl", True), ("llamafactory", False)])
def test_activations_on_the_host_are_taken_where_there_are_words(highwater, target, is_there):
    asked = ("Qwen3-8B", "--gpus", "2xH100-80GB", "--length", "32k")
    done = highwater("emit", "--for", target, *asked)
    assert (done.returncode == 0) == is_there
    assert ("activation_offloading: hidden_states" in done.stdout) == is_there
    assert is_there or "nothing fits: there is nothing to configure" in done.stdout


@pytest.mark.parametrize(
    ("target", "words", "tokens"),
    [
        ("axolotl", "--length 32k --loss full --ring 2", 16_384),
        ("torchtitan", "--length 40k --loss full --ulysses 2", 20_480),
        ("torchtitan", "--length 10007 --ulysses 1", 10_007),
        ("accelerate", "--length 32k --loss full --ring 4", 8_192),
        ("ms-swift", "--length 32k --ulysses 2", 16_384),
    ],
)
def test_whole_logits_are_counted_at_ten_bytes_a_token_and_word(emitted, target, words, tokens):
    """Also those of a length that no chunks of torchtitan's divide."""
    document = emitted(target, f"Qwen3-8B --gpus 4xH200-141GB {words}")
    assert document["logits_bytes"] == 10 * WORDS * tokens
    assert f"{10 * WORDS * tokens / 2**30:.2f} GiB" in document["text"].splitlines()[0]
    assert "num_chunks" not in document["text"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("ms-swift", "Qwen3-8B --ulysses 2 --length 128k"),
        ("accelerate", "gemma-2-2b --ulysses 1 --length 40k"),
        ("torchtitan", "Qwen3-8B --ulysses 1 --length 64k"),
    ],
)
def test_logits_that_are_larger_than_a_gpu_do_not_fit(highwater, target, words):
    asked = ("emit", "--for", target, *words.split(), "--gpus", "8xH100-80GB", "--loss", "full")
    done, document = highwater(*asked), highwater(*asked, "--json")
    assert (done.returncode, document.returncode) == (1, 1)
    assert re.match("No: .* does not fit", done.stdout)
    assert json.loads(document.stdout)["fits"] is False


@pytest.mark.parametrize("length", ["64k", "128k"])
def test_too_large_logits_are_answered_with_a_shorter_length_that_is_written(highwater, length):
    asked = ("google/gemma-4-31B", "--gpus", "B200", "--qlora", "16", "--length", length)
    done = highwater("emit", *asked, "--for", "ms-swift")
    assert done.returncode == 1
    (tokens,) = re.findall(r"([\d,]+) tokens would fit by the same sum", done.stdout)
    command = done.stderr.partition("next: highwater ")[2].split()
    assert f"--length {tokens.replace(',', '')}" in " ".join(command)
    written = highwater(*command)
    assert written.returncode == 0
    assert "attn_impl: sdpa" in written.stdout


@pytest.mark.parametrize("length", ["51974", "32k"])
def test_torchtitans_chunks_divide_a_sequence(emitted, length):
    document = emitted("torchtitan", f"Qwen3-8B --gpus 4xH200-141GB --length {length} --ulysses 1")
    tokens = document["values"]["training.seq_len"]
    (chunks,) = map(int, re.findall(r"num_chunks=(\d+)", document["text"]))
    assert tokens % chunks == 0
    assert 256 <= tokens // chunks <= 2048
