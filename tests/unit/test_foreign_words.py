"""A word of others names the flag of ours, or who does it; and nothing else is guessed."""

import re

import pytest

from highwater.cli.grammar import commands, foreign_words, parse
from highwater.errors import UsageError

FLAGS = {command: set(parser.flags()) for command, parser in commands().items()}
LENGTH = {"try": ("--length", "4k")}


def hint_of(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parse(words)
    return error.value.hint


@pytest.mark.parametrize(
    ("command", "typed", "ours"),
    [
        ("find", "--batch-size 4", "--sequences-per-micro-batch 4"),
        ("train", "--lr 2e-5", "--learning-rate 2e-5"),
        ("predict", "--lora-rank 16", "--lora 16"),
        ("predict", "--qlora", "--lora 16 --lora-base nf4"),
        ("try", "--load-in-4bit", "--lora 16 --lora-base nf4"),
        ("train", "--per_device_train_batch_size=2", "--sequences-per-micro-batch 2"),
        ("predict", "--max_seq_length 8192", "--length 8192"),
        ("find", "--gradient-accumulation-steps 8", "--micro-batches 8"),
        ("find", "--max-seq-length 8192", "--max-length 8192"),
        ("train", "--max-length 8192", "--length 8192"),
        ("find", "--optim adamw_8bit", "--optimizer adamw-8bit"),
        ("predict", "--gpus 2x8xH100 --qlora", "--lora 16 --lora-base nf4 --copies 16"),
        ("try", "--use-liger-kernel", "--loss chunked"),
        ("train", "--kl-coef 0.1", "--kl-coefficient 0.1"),
        ("find", "--ulysses-sequence-parallel-size 4", "--ulysses 4"),
        ("recommend", "--cpu-offload", "--offload"),
    ],
)
def test_a_word_of_others_is_told_as_our_flag_which_then_works(command, typed, ours):
    beside = LENGTH.get(command, ())
    assert hint_of(command, "Qwen3-8B", *beside, *typed.split()) == f"use `{ours}`"
    if command not in ("train",):
        assert parse([command, "Qwen3-8B", *beside, *ours.split()])


@pytest.mark.parametrize(
    ("command", "typed", "said"),
    [
        ("predict", "--lr 1e-5", "--learning-rate 1e-5"),
        ("recommend", "--max-steps 9", "--steps 9"),
        ("predict", "--weight-decay 0", "--weight-decay 0"),
    ],
)
def test_a_flag_of_other_commands_names_them(command, typed, said):
    hint = hint_of(command, "Qwen3-8B", *typed.split())
    assert hint == f"leave `{typed.split()[0]}` out: {said} is for find, try and train"


@pytest.mark.parametrize(
    "word",
    [
        *("rollout-n", "beta", "tp", "zero", "fp16", "lora-dropout", "logging-steps"),
        *("num-generations", "attn-implementation", "max-completion-length"),
        *("gradient-accumulation-steps",),
    ],
)
def test_a_word_of_others_without_a_flag_is_never_taken_for_another_one(word):
    said = foreign_words()[word].split(" | ")[-1]
    assert hint_of("train", f"--{word}", "5") == said


@pytest.mark.parametrize(
    "word",
    ["model", "dtype", "wandb", "tensorboard", "epochs", "packing", "zero3", "fsdp", "deepspeed"],
)
def test_what_has_no_flag_says_who_does_it(word):
    hint = hint_of("train", "--" + word, "x")
    assert "did you mean" not in hint
    assert hint == foreign_words()[word]
    for flag in re.findall(r"`(--[\w-]+)", hint):
        assert flag in FLAGS["train"]


@pytest.mark.parametrize("word", ["--foo", "--loader", "--epsilon-greedy", "--x"])
def test_no_flag_is_guessed_from_another_word(word):
    assert hint_of("find", "Qwen3-8B", word, "1") == "`highwater find --help-all` lists every flag"


@pytest.mark.parametrize(
    ("mistyped", "flag"),
    [("--ulyses", "--ulysses"), ("--dry-rn", "--dry-run"), ("--optimiser", "--optimizer")],
)
def test_a_mistyped_flag_is_still_offered(mistyped, flag):
    assert hint_of("find", "Qwen3-8B", mistyped, "1") == f"did you mean `{flag}`?"


def test_no_word_of_others_is_a_flag_of_ours_and_every_flag_told_is_one():
    known = set().union(*FLAGS.values())
    assert len(foreign_words()) >= 35
    for word, said in foreign_words().items():
        told = {command for command, flags in FLAGS.items() if said.split()[0] in flags}
        own = {command for command in told or ("find", "train") if f"--{word}" in FLAGS[command]}
        assert not own or (word in ("length", "max-length") and own == {"predict"}), word
        assert set(re.findall(r"--[a-z][\w-]*", said)) <= known, word
