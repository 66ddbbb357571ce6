"""``highwater recommend`` as a user runs it."""

import re

import pytest
from conftest import following

ASKED = ("recommend", "Qwen3-8B", "--gpus", "4xH20-96GB", "--length", "96k")
DRY = ("--device", "cuda", "--memory", "95GiB", "--dry-run")


def test_the_simplest_rung_that_fits_is_named_with_why_nothing_simpler_and_what_the_next_would_buy(
    highwater,
):
    done = highwater(*ASKED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    length = "98,304 tokens (2.4 x native 40,960)"
    assert lines[0].startswith(f"Yes: Qwen3-8B trains {length} on 4 x H20-96GB: safe, ")
    assert lines[1].startswith("With ")
    assert lines[3] == "Qwen3-8B, 98,304 tokens on 4 x H20-96GB, 95.10 GiB each: predicted"
    rows = [re.split(" {2,}", line) for line in done.stdout.split("\n\n")[2].splitlines()]
    verdicts = [row[rows[0].index("this length")] for row in rows[1:]]
    chosen = verdicts.index("the simplest")
    assert "tight: leaves 1.81 GiB" in verdicts[:chosen]
    assert {*verdicts[chosen + 1 :]} == {"fits"}
    reached = [int(re.sub(r"\D", "", row[rows[0].index("trains up to")])) for row in rows[1:]]
    assert sorted(reached[chosen:]) == reached[chosen:]
    assert len(done.stdout.strip().split("\n\n")[3:]) == 1, "one caveat"
    explained = highwater(*ASKED, "--explain").stdout
    lines = explained.splitlines()
    assert lines[3] == "Qwen3-8B, 98,304 tokens on 4 x H20-96GB, 95.10 GiB each"
    told = {line[:14].strip(): line[14:] for line in reversed(lines[3:])}
    assert told["settings"] == "expandable, chunked loss, predicted"
    assert told["headroom"].endswith(" of each GPU: safe")
    assert re.findall(r"[\d,]+", told["token budget"]) == ["98,304", "1", "98,304"]
    assert told["step"].endswith(" tokens/s")
    assert "rope_type: yarn, factor: 2.4" in explained
    assert explained.count("lacks ") == 1
    assert "tight: leaves 1.81 GiB of a GPU" in explained
    assert explained.index("an exchange in every layer") < explained.index("numerical stability")
    assert "measured: " not in explained
    assert "GB " not in done.stdout.replace("96GB ", "")


def test_the_next_command_is_one_trial_of_it(highwater):
    words = following(highwater(*ASKED))
    assert words[:8] == ["try", "Qwen3-8B", "--gpus", "4", "--ulysses", "1", "--length", "98304"]
    assert words[8:12] == ["--allocator", "expandable", "--loss", "chunked"]
    done = highwater(*words, *DRY)
    assert done.returncode in (0, 1), done.stderr
    assert "98,304 tokens, expandable, " in done.stdout


def test_nothing_that_fits_is_answered_no_with_what_would_do(highwater):
    words = ("recommend", "Qwen3-8B", "--gpus", "1xA100-80GB", "--length", "256k")
    for more in ((), ("--list",)):
        done = highwater(*words, *more)
        assert done.returncode == 1
        first = done.stdout
        assert first.startswith("No: Qwen3-8B does not train at ")
        assert "\nWhat would fit: " in first
    assert highwater(*words, "--json").returncode == 1
    assert "--gpus" in following(done)
    assert highwater(*following(done)).returncode == 0


def test_lengths_of_pairs_are_said_to_be_of_one_of_them(highwater):
    words = ("Qwen3-8B", "--gpus", "8xH100", "--length", "8k", "--objective")
    for command in ("predict", "recommend"):
        paired = highwater(command, *words, "dpo").stdout
        assert " Lengths are of one sequence of a pair.\n" in paired
        assert "pair" not in highwater(command, *words, "sft").stdout


@pytest.mark.parametrize("asked", ["predict", "recommend --length 8k"])
def test_generation_is_said_to_be_outside_the_seconds_of_a_step(highwater, asked):
    words = (*asked.split(), "Qwen3-8B", "--gpus", "8xH100", "--objective")
    said = " tokens/s without generation"
    assert said in highwater(*words, "grpo").stdout.splitlines()[0]
    assert said not in highwater(*words, "sft").stdout


def test_what_is_named_next_beside_a_rollout_is_emitted(highwater):
    asked = "Qwen3-8B --gpus 4xA100-80GB --length 32k --trainer trl --objective grpo --rollout vllm"
    done = highwater("recommend", *asked.split(), "--prompt-tokens", "1024")
    assert highwater(*following(done)).returncode == 0


def test_a_host_that_is_nearly_full_is_not_safe(highwater):
    words = ("predict", "Llama-3.1-70B", "--gpus", "8xA100-80GB", "--length", "64k")
    full = highwater(*words, "--host-memory", "1152GiB").stdout
    roomy = highwater(*words, "--host-memory", "1400GiB").stdout
    assert full.startswith("Likely: ")
    assert "1104.19 GiB of host memory" in full
    assert roomy.startswith("Yes: ")
    assert "1104.19 GiB of host memory" in roomy


OWN_FILE = """base_model: Qwen/Qwen2.5-7B-Instruct
sequence_len: 16384
adapter: lora
lora_r: 64
lora_target_linear: true
micro_batch_size: 2
gradient_checkpointing: true
optimizer: adamw_torch_fused
"""


def test_a_file_that_does_not_fit_is_answered_with_its_own_keys(highwater, tmp_path):
    """Model and length are the file's; rows that only a micro-batch tells apart show it."""
    (tmp_path / "axo.yml").write_text(OWN_FILE)
    asked = ("--gpus", "1xA100-40GB", "--trainer", "axolotl", "--trainer-config", "axo.yml")
    done = highwater("predict", *asked)
    assert done.returncode == 1
    first, third, second = done.stdout.splitlines()[:3]
    assert first.startswith("Predicted as Hugging Face's step, Axolotl's own unmeasured: axo.yml")
    assert len(first.split()) <= 30
    parts = r", ([\d.]+ GiB short): change to `liger_f.*: true`; as written ([\d,]+) train\."
    short, tokens = re.search(parts, first).groups()
    assert re.match(r"The longest, [\d,]+ tokens.*, takes `liger_.*`activation_off.*: safe", second)
    changed = re.match(r"For 16,384 tokens (change to `liger.* \(frees [\d.]+ GiB\)): ", third)[1]
    fits = highwater("predict", *asked, "--length", tokens.replace(",", ""))
    assert (" fits 1 x A100-40GB, " in fits.stdout, fits.returncode) == (True, 0)
    done = highwater(*following(done))
    assert done.returncode == 0
    said = f"Not as axo.yml is written, {short}: {changed}, and Qwen2.5-7B-Instruct trains 16,384 "
    assert done.stdout.startswith(said), "the same facts"
    table = done.stdout.split("\n\n")[2].splitlines()[1:]
    assert len({tuple(row.split("  ")[:1]) for row in table}) == len(table) == 4
