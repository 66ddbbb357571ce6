"""What `emit` says of trainers that nobody predicted: no verdict of another engine's, the fused
loss where they have one, and the bytes of their logits where they have not.
"""

import csv
import json
import re
from pathlib import Path

import pytest

UNPREDICTED = ("torchtitan", "accelerate", "axolotl", "llamafactory", "ms-swift")
REPORTS = Path(__file__).parents[1] / "data" / "public_reports.csv"
VERDICT = re.compile(r"\b(safe|likely|tight|up to [\d,]+ tokens|left|headroom)\b", re.IGNORECASE)
VOCABULARY = {"Qwen3-8B": 151_936, "Llama-3.1-8B": 128_256}


def reported() -> list[tuple[str, tuple[str, ...]]]:
    """Every public report of one of these trainers, as it is asked of `emit`; a script of
    transformers' is accelerate's to start.
    """
    names = {"transformers": "accelerate", **{name: name for name in UNPREDICTED}}
    with REPORTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["trainer"] in names]
    asked: list[tuple[str, tuple[str, ...]]] = []
    for row in rows:
        gpu = row["gpu"].replace("H100 95.1GiB", "H100-80GB").replace("A800-80GB", "A100-80GB")
        kind = gpu.replace("H200 capped at 79.15 GiB", "H200-141GB")
        words = [row["model"].replace("Qwen2-7B", "Qwen2.5-7B-Instruct"), "--gpus"]
        words += [f"{row['gpus'] or 1}x{kind}", "--length", row["length_tokens"]]
        words += ["--gpu-memory", "95GiB"] if "95.1" in row["gpu"] else []
        words += ["--gpu-memory", "79GiB"] if "capped" in row["gpu"] else []
        words += ["--lora", "32" if "rank 32" in row["training"] else "16"] * (
            "LoRA" in row["training"]
        )
        words += ["--lora-base", "nf4"] * ("4-bit" in row["training"])
        is_scaled = "Llama" in row["model"] and int(row["length_tokens"]) > 131_072
        words += ["--rope", "yarn"] * is_scaled
        words += ["--ring", "8"] * ("parallel 8" in row["parallel"])
        asked.append((names[row["trainer"]], tuple(words)))
    assert len(asked) == 8
    return asked


MORE = [
    ("axolotl", ("Llama-3.1-8B", "--gpus", "1xH100-80GB", "--length", "51974", "--lora", "16")),
    ("ms-swift", ("Qwen3-8B", "--gpus", "4xH100-80GB", "--length", "64k")),
    ("torchtitan", ("Qwen3-8B", "--gpus", "8xH20-96GB", "--length", "128k")),
]


@pytest.mark.parametrize(("target", "words"), [*reported(), *MORE])
def test_no_verdict_of_another_engine_is_told_of_a_trainer(highwater, tmp_path, target, words):
    done = highwater("emit", "--for", target, *words)
    assert not VERDICT.search(done.stdout + done.stderr)
    if done.returncode == 1:
        assert "not predicted for " in done.stderr or "does not fit" in done.stderr
        assert done.stdout == ""
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Not predicted for this trainer: ")
    document = json.loads(highwater("emit", "--for", target, *words, "--json").stdout)
    assert document["fits"] is None
    assert highwater("emit", "--for", target, *words, "-o", "mine").returncode == 0
    page = (tmp_path / "mine" / "CHECK.md").read_text()
    assert "Not predicted for this trainer: " in page
    assert not VERDICT.search(page)


@pytest.mark.parametrize(
    ("target", "words", "tokens"),
    [
        ("axolotl", ("--length", "32k", "--loss", "full"), 32_768),
        ("torchtitan", ("--length", "40k", "--loss", "full", "--ulysses", "2"), 20_480),
        ("accelerate", ("--length", "32k", "--loss", "full", "--ring", "4"), 8_192),
        ("ms-swift", ("--length", "32k", "--ulysses", "2"), 16_384),
    ],
)
def test_whole_logits_are_counted_at_ten_bytes_a_token_and_word(highwater, target, words, tokens):
    asked = ("emit", "--for", target, "Qwen3-8B", "--gpus", "4xH200-141GB", *words)
    document = json.loads(highwater(*asked, "--json").stdout)
    logits_bytes = 10 * VOCABULARY["Qwen3-8B"] * tokens
    assert document["logits_bytes"] == logits_bytes
    assert f"{logits_bytes / 2**30:.2f} GiB" in document["text"].splitlines()[0]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("llamafactory", ("Qwen3-8B", "--gpus", "1xH100-80GB", "--length", "80k", "--lora", "16")),
        ("accelerate", ("Qwen3-8B", "--gpus", "8xH100-80GB", "--ulysses", "1", "--length", "64k")),
        ("torchtitan", ("Qwen3-8B", "--gpus", "8xH100-80GB", "--ulysses", "1", "--length", "64k")),
    ],
)
def test_logits_that_are_larger_than_a_gpu_do_not_fit(highwater, target, words):
    asked = ("emit", "--for", target, *words, "--loss", "full")
    done = highwater(*asked)
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not fit" in done.stderr
    document = highwater(*asked, "--json")
    assert document.returncode == 1
    assert json.loads(document.stdout)["fits"] is False


@pytest.mark.parametrize("length", ["51974", "32k"])
def test_torchtitans_chunks_divide_a_sequence(highwater, length):
    words = ("Qwen3-8B", "--gpus", "4xH200-141GB", "--length", length, "--ulysses", "1")
    done = highwater("emit", "--for", "torchtitan", *words, "--json")
    document = json.loads(done.stdout)
    tokens = document["values"]["training.seq_len"]
    (chunks,) = map(int, re.findall(r"num_chunks=(\d+)", document["text"]))
    assert tokens % chunks == 0
    assert 256 <= tokens // chunks <= 2048


def test_a_length_that_no_chunks_divide_has_whole_logits_at_torchtitan(highwater):
    words = ("Qwen3-8B", "--gpus", "4xH200-141GB", "--length", "10007", "--ulysses", "1")
    document = json.loads(highwater("emit", "--for", "torchtitan", *words, "--json").stdout)
    assert document["logits_bytes"] == 10 * VOCABULARY["Qwen3-8B"] * 10_007
    assert "num_chunks" not in document["text"]
