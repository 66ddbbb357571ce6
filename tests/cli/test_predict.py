"""``highwater predict`` as a user runs it."""

import re
from itertools import pairwise

import pytest
from conftest import SIMULATED, following, offered, refusal

from highwater.trainers.trl.words import VERSION
from tables import table

A100S = ("--gpus", "4xA100-80GB")


def test_capacities_are_predicted_for_gpus_that_are_not_here(highwater):
    done = highwater("predict", "Qwen3-8B", *A100S)
    assert done.returncode == 0, done.stderr
    answer, longest, _, title, *_ = done.stdout.splitlines()
    native = "its native 40,960 tokens (longest: ≥1,048,576)"
    assert answer.startswith(f"Qwen3-8B trains {native} on 4 x A100-80GB: safe, ")
    assert answer.endswith(" Predicted for highwater. With FSDP (as ZeRO-3).")
    assert longest.startswith("The longest is ")
    assert title == "Qwen3-8B on 4 x A100-80GB, 79.15 GiB each: predicted by formula"
    caveat = done.stdout.rstrip().splitlines()[-1]
    assert caveat.endswith(" more: try it first")
    assert "Qwen3-8B" in caveat, "nobody has measured it"
    few = highwater("predict", "Qwen3-8B", "--gpus", "1xH100-80GB", "--strategy", "fsdp").stdout
    assert "with H100-80GB, Qwen3-8B, states on host and activations on host: try it" in few
    assert following(done) == ["predict", "Qwen3-8B", *A100S, "--explain"]


@pytest.mark.parametrize(
    ("typed", "is_told"), [([], False), (["--ulysses", "1", "2"], True), (["--all"], True)]
)
def test_a_layout_that_cannot_be_is_told_of_where_somebody_named_it(highwater, typed, is_told):
    training = ("--objective", "dpo", "--lora", "16", "--trainer", "trl")
    done = highwater("predict", "gemma-3-27b-text", *A100S, *training, *typed)
    assert done.returncode == 0, done.stderr
    assert ("Ulysses 2 is skipped" in done.stderr) == is_told


def test_of_a_ring_that_is_named_no_degree_of_heads_that_nobody_named_is_told(highwater):
    one = ("predict", "Qwen3-8B", *A100S, "--length", "32k", "--ring")
    assert "is skipped" not in highwater(*one, "4").stderr
    named = highwater(*one, "3", "4").stderr
    assert "Ulysses 1, ring 3 on 4 GPUs is skipped" in named
    assert named.count("is skipped") == 1


def test_a_length_turns_it_round_and_the_first_rung_that_fits_is_explained(highwater):
    done = highwater(
        "predict", "Qwen3-8B", "--gpus", "1xH200-141GB", "--length", "64k", "--explain", "--all"
    )
    assert done.returncode == 0, done.stderr
    table, explained = done.stdout.split("bytes by term: predicted")
    fits = dict(re.findall(r"^(.+?)  +1  +(safe|no) ", table, re.MULTILINE))
    on_host = [
        f"expandable,{loss} {what} on host"
        for loss in ("", " chunked loss,")
        for what in ("moments", "states")
    ]
    assert {words: fit for words, fit in fits.items() if "activations" not in words} == {
        **dict.fromkeys(("nothing set", "expandable", "expandable, chunked loss"), "no"),
        **dict.fromkeys(on_host, "safe"),
    }
    simplest = "expandable, chunked loss, activations on host, 1 GPU,"  # as `recommend` has it
    assert table.rstrip().endswith(simplest)
    assert "(the peak)" in explained
    settings = "--gpus 1 --ulysses 1 --length 65536 --allocator expandable --loss chunked"
    assert following(done) == ["try", "Qwen3-8B", *settings.split(), "--activations", "host"]
    assert "65,536*" in table.split("\n\n")[1]
    assert re.search(r"^\* .*40,960.*YaRN", table, re.MULTILINE)
    tried = highwater(*following(done), "--device", "cuda", "--memory", "139.8GiB", "--dry-run")
    assert tried.returncode == 0, "what was said to fit is what is tried"


def test_the_terms_of_the_peak_and_what_is_besides_add_up(highwater):
    done = highwater("predict", "Qwen3-8B", "--gpus", "4xH100-80GB", "--length", "64k", "--explain")
    lines = done.stdout.split("bytes by term: predicted")[1].strip().splitlines()
    table, footnote = lines[1:-2], lines[-1]
    parts = {line[:31].strip(): index for index, line in enumerate(table) if line[:31].strip()}
    ends = dict(zip(parts, [*list(parts.values())[1:], len(table)], strict=True))
    added = [
        name
        for name in parts
        if "(the peak)" in name or name in ("reserved besides", "outside the allocator")
    ]
    terms = [float(line.split()[-1]) for name in added for line in table[parts[name] : ends[name]]]
    assert any("until memory runs short" in line for line in table), "the cache is one of them"
    assert sum(terms) == pytest.approx(float(footnote.split()[0]), abs=0.006 * len(terms))
    kept = float(re.search(r"only keeps ([\d.]+) GiB of it, and headroom", footnote)[1])
    left = float(re.search(r"([\d.]+) GiB left", done.stdout)[1])
    assert float(footnote.split()[0]) - kept + left == pytest.approx(79.10, abs=0.02)


def test_a_length_that_does_not_fit_names_the_longest_that_does_and_flags_that_work(highwater):
    asked = ("predict", "Qwen3-8B", "--gpus", "6xH200-141GB", "--activations", "gpu")
    longest = highwater(*asked).stdout.split(" longest is ")[1].split()[0]
    done = highwater(*asked, "--length", "900k")
    assert done.returncode == 1
    first = done.stdout.partition("\n\n")[0]
    assert f"\nWhat would fit: {longest} tokens here with " in first
    typed = re.findall(r"\(`(--[^`]+)`\)", first)
    assert typed, "another technique"
    for flags in typed:
        assert highwater(*asked, "--length", "900k", *flags.split()).returncode == 0


def test_a_row_says_what_lacks_and_the_sentences_likely_length(highwater):
    done = highwater("predict", "Qwen3-8B", "--gpus", "8xRTX-4090", "--length", "8k")
    rows = re.findall(r"  (no\b.*?) {2,}(-?)[\d.]+ [GM]iB$", done.stdout, re.MULTILINE)
    assert {*rows} == {("no", "-"), ("no: host memory", "")}
    asked = ("Qwen3-32B", "--gpus", "1xRTX-4090", "--lora", "16", "--lora-base", "nf4")
    for words in (("predict", *asked), ("predict", *asked, "--all")):
        done = highwater(*words).stdout
        assert done.startswith("Qwen3-32B may train up to 12,288 tokens on 1 x RTX-4090")
        assert re.search(r"chunked loss, activations on host.* 12,288, likely", done), words
    done = highwater("recommend", *asked, "--length", "8k").stdout
    assert re.search(r"the simplest +12,288, likely", done)
    assert re.search(r"tight: leaves .* 8,192, tight", done)


@pytest.mark.parametrize(
    ("words", "then"), table("predict", "the_command_after_an_explanation_works")
)
def test_the_command_after_an_explanation_works_and_has_its_settings(highwater, words, then):
    assert following(highwater("predict", *words.split(), "--explain")) == then.split()
    simulated = SIMULATED if then.startswith("find") else ()
    assert highwater(*then.split(), *simulated).returncode in (0, 1)


def test_a_star_says_past_the_native_length_only_where_there_is_one(highwater):
    for length, starred in (("32k", False), ("64k", True)):
        table = highwater("predict", "Qwen3-8B", *A100S, "--length", length).stdout
        assert ("past the native length" in table) == ("*" in table.split("\n\n")[1]) == starred


@pytest.mark.parametrize(
    ("words", "accuracy", "note"),
    [
        (("Llama-3.1-8B", *A100S), "by the closed form, fitted", "no cell by replay"),
        (
            ("Qwen3-0.6B", *A100S, "--allocator", "native"),
            "by replay of a trace, which has",
            "6 of 6 cells by replay",
        ),
        (
            ("Qwen3-0.6B", *A100S),
            "; the others by the closed form, fitted",
            "12 of 18 cells by replay",
        ),
    ],
)
def test_another_trainers_accuracy_is_that_of_what_answered(highwater, words, accuracy, note):
    done = highwater("predict", *words, "--trainer", "trinity", "--explain")
    assert accuracy in done.stdout
    assert ("69 of 80 cells" in done.stdout) == ("closed form" in accuracy)
    assert ("39 of 40 cells" in done.stdout) == ("replay" in done.stdout)
    assert "72 of 80" not in done.stdout
    assert f"note: {note}" in done.stderr


def test_weights_in_float32_are_named_where_weights_in_bf16_have_another_answer(highwater):
    asked = "predict Qwen3-1.7B --gpus RTX-5090 --trainer transformers --optimizer adamw-8bit"
    narrow = f"{asked} --parameters bf16".partition("transformers ")[2]
    second = highwater(*asked.split()).stdout.splitlines()[1]
    named = re.match(rf"With weights in float32: .* in bf16, (\S+) tokens .*`{narrow}`", second)
    first = highwater(*asked.split(), *narrow.split()[2:]).stdout.splitlines()[0]
    assert f"(longest: {named[1]})" in first


def test_a_no_names_the_fewest_machines_with_a_flag_that_works_as_it_is_typed(highwater):
    asked = "predict Qwen2.5-72B --length 32k --host-memory 1007GiB --trainer llamafactory"
    words = (*asked.split(), "--deepspeed", "zero3-offload", "--gpus")
    no = highwater(*words, "8xA100-80GB")
    named = re.search(r"16 x A100-80GB on 2 machines \(`--gpus (\S+)`\)", no.stdout)
    assert no.returncode == 1
    yes = highwater(*words, named[1])
    assert yes.returncode == 0
    assert "was measured nowhere" in yes.stderr


def test_a_timeline_needs_a_trace_and_a_new_file(highwater, tmp_path):
    words = ("predict", "tiny", "--gpus", "A100-80GB", "--length", "4096", "--timeline")
    taken = tmp_path / "taken.pickle"
    taken.write_text("mine")
    hint = refusal(highwater(*words, str(tmp_path / "new.pickle")), 2)[1]
    assert offered(hint) == [["--exact"]]
    problem, hint = refusal(highwater(*words, str(taken), "--exact"), 2)
    assert problem.startswith(f"{taken} ")
    assert taken.read_text() == "mine"
    ((flag, new),) = offered(hint)
    assert flag == "--timeline"
    one_rung = ("--loss", "full", "--allocator", "native")
    drawn = highwater(*words, new, "--exact", *one_rung, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / new).stat().st_size > 0
    assert "--timeline" not in drawn.stderr, (
        "the next command does not name the file that is there now"
    )
    for nowhere in (str(tmp_path / "no" / "where.pickle"), "/proc/x.pickle", ""):
        problem, hint = refusal(highwater(*words, nowhere, "--exact"), 2)
        assert problem.startswith(f"{nowhere or '.'} ")
        *_, (flag, new) = offered(hint)
        assert flag == "--timeline"
        assert new.startswith("timeline")


def test_what_trl_needs_is_answered_without_a_gpu(highwater):
    words = ("Qwen3-4B", "--gpus", "1xH200-141GB", "--trainer", "trl", "--length", "128k")
    done = highwater("predict", *words)
    assert done.returncode == 0
    assert done.stdout == (
        "Yes: Qwen3-4B trains 131,072 tokens (3.2 x native 40,960) on 1 x H200-141GB for "
        f"TRL {VERSION.removesuffix('.0')}: safe, peak 100.04 GiB, 39.76 GiB left. Predicted. "
        "With expandable segments, a chunked loss and YaRN.\n"
        "\n"
        "Qwen3-4B on 1 x H200-141GB, 139.80 GiB each, 131,072* tokens, trained by TRL: predicted "
        "by formula\n"
        "\n"
        "settings                                  Ulysses  fits   headroom\n"
        "expandable, chunked loss                        1  safe  39.76 GiB\n"
        "expandable, chunked loss, states on host        1  safe  99.77 GiB\n"
        "\n"
        "* past the native length of 40,960: YaRN; `--explain` says how good such "
        "answers were\n"
    )
    assert following(done) == ["predict", *words, "--explain"]
    explained = highwater("predict", *words, "--explain")
    assert "expandable, 3 edges: 0.950 to 1.061 of the prediction" in explained.stdout
    tried = ("--gpus", "1", "--ulysses", "1", "--length", "131072", "--trainer", "trl")
    assert following(explained) == ["try", "Qwen3-4B", *tried, "--allocator", "expandable"]
    searched = following(highwater("predict", *words[:-2], "--objective", "grpo", "--explain"))
    assert searched[:2] == ["find", "Qwen3-4B"]
    assert "--loss" not in searched
    assert {"--trainer", "--objective"} <= set(searched)


def test_the_next_trial_is_held_to_the_memory_that_was_asked_about(highwater):
    small = ("Qwen3-0.6B", "--gpus", "1", "--gpu-memory", "24GiB", "--host-memory", "64GiB")
    for asked, then in (
        (("predict", *small, "--explain"), "find"),
        (("predict", *small, "--length", "32k", "--explain"), "try"),
        (("recommend", *small, "--length", "32k"), "try"),
    ):
        words = following(highwater(*asked))
        assert words[0] == then
        limits = dict(pairwise(words))
        assert (limits["--memory"], limits["--host-memory"]) == ("24GiB", "64GiB")


def test_amds_gpus_have_predictions_alone_by_every_answer(highwater):
    done = highwater("predict", "Llama-3.1-70B", "--gpus", "MI300X", "--lora", "16")
    assert done.returncode == 0
    assert "no trial is run on it" in done.stderr
    assert "try it first" not in done.stdout
    assert done.stdout.rstrip().endswith("; no trial runs there")
    assert re.search(r"On the GPUs alone: [\d,]+\.\n", done.stdout), "as where it is the longest"
    assert "predictions only" in highwater("gpus", "MI300X").stdout.splitlines()[3]
