"""The commands of ``highwater`` as its help lists them: what each is for, and three examples.

Each example is run by tests/cli/test_help.py, on names that it makes: ``study.jsonl``,
``snapshot.pickle``, ``capacities.csv``.
"""

from typing import NamedTuple


class CommandHelp(NamedTuple):
    """One command, as the help has it."""

    group: str
    """What people do with it: a heading of ``highwater --help``."""
    help: str
    examples: tuple[str, str, str]
    """The first one is the hint of a refusal, too."""


SHELLS = ("bash", "zsh", "fish")
"""Shells whose completion is written."""

_ANSWER = "answer a question, without a GPU"
_TRY = "try on GPUs"
_TAKE = "take away"
_LOOK = "look at"
_SET_UP = "set up"
_DEVELOP = "developer tools"

COMMANDS: dict[str, CommandHelp] = {
    "predict": CommandHelp(
        _ANSWER,
        "how long sequences can be, and with which settings, on GPUs that need not be here",
        (
            "highwater predict Qwen3-8B --gpus 4xA100-80GB",
            "highwater predict meta-llama/Llama-3.1-8B-Instruct --gpus RTX-4090 --lora 16",
            "highwater predict Qwen3-32B --gpus 2x8xH100-80GB --length 64k",
        ),
    ),
    "recommend": CommandHelp(
        _ANSWER,
        "the simplest settings that train a length on some GPUs, why simpler ones do not, what "
        "the next would buy",
        (
            "highwater recommend Qwen3-8B --gpus 4xH20-96GB --length 64k",
            "highwater recommend Qwen3-8B --gpus 4xH20-96GB --length 64k --list",
            "highwater recommend Qwen/Qwen2.5-7B-Instruct --gpus 8xH100-80GB --objective grpo "
            "--length 128k",
        ),
    ),
    "find": CommandHelp(
        _TRY,
        "the longest context that a model trains with here, by real trials",
        (
            "highwater find Qwen3-0.6B",
            "highwater find Llama-3.1-8B --gpus 4 --lora 32",
            "highwater find Qwen3-8B --device cuda --memory 80GiB --dry-run",
        ),
    ),
    "try": CommandHelp(
        _TRY,
        "one trial of one length",
        (
            "highwater try Qwen3-0.6B --length 32k",
            "highwater try Qwen3-8B --length 64k --gpus 4 --ulysses 4 --loss chunked",
            "highwater try tiny --length 4k --device cpu",
        ),
    ),
    "train": CommandHelp(
        _TRY,
        "train with what was found or is recommended, on your own data, to a model that loads",
        (
            "highwater train Qwen3-0.6B --data data.jsonl --length 32k --steps 200 --output ./run",
            "highwater train Qwen3-8B --data data.jsonl --length 64k --steps 500 --output ./run "
            "--settings study.jsonl",
            "highwater train tiny --data docs/ --length 1k --steps 20 --output ./run --device cpu",
        ),
    ),
    "guide": CommandHelp(
        _TAKE,
        "a page for the team: the simplest settings for each length, from studies, known "
        "capacities and predictions",
        (
            "highwater guide --predict Qwen3-8B --gpus 4xA100-80GB",
            "highwater guide --predict Qwen3-4B Qwen3-8B --gpus 4xA100-80GB 8xH100-80GB -o team.md",
            "highwater guide study.jsonl -o guide.html",
        ),
    ),
    "emit": CommandHelp(
        _TAKE,
        "the recommended settings as the configuration of another trainer",
        (
            "highwater emit --for trinity Qwen3-8B --gpus 8xH20-96GB --rollout-gpus 2 --length 32k",
            "highwater emit --for trl Qwen/Qwen3-8B --gpus 8xH100-80GB --length 128k",
            "highwater emit --for verl Llama-3.1-8B --gpus 4xH100-80GB --length 32k --lora 32",
        ),
    ),
    "show": CommandHelp(
        _LOOK,
        "a study: as a table, in the published layout, as its final lines, or as JSON",
        (
            "highwater show",
            "highwater show study.jsonl --as published",
            "highwater show study.jsonl --as json",
        ),
    ),
    "report": CommandHelp(
        _LOOK,
        "a page about one study: trials, brackets, memory, predictions, failures, commands; as "
        "HTML, Markdown, CSV or JSON",
        (
            "highwater report",
            "highwater report study.jsonl -o report.html",
            "highwater report study.jsonl --json",
        ),
    ),
    "profile": CommandHelp(
        _LOOK,
        "what was alive in a PyTorch memory snapshot, at its peak or when memory ran out: of any "
        "program; two side by side",
        (
            "highwater profile snapshot.pickle",
            "highwater profile snapshot.pickle --html profile.html",
            "highwater profile before.pickle after.pickle",
        ),
    ),
    "models": CommandHelp(
        _LOOK,
        "the models of the catalog: names, ids on the Hub, sizes, native lengths",
        ("highwater models qwen3", "highwater models", "highwater models llama --json"),
    ),
    "gpus": CommandHelp(
        _LOOK,
        "the kinds of GPUs of the catalog: memory, bf16 FLOP/s, and where each figure is from",
        ("highwater gpus h100", "highwater gpus", "highwater gpus rtx --json"),
    ),
    "doctor": CommandHelp(
        _SET_UP,
        "what works on this machine, and what to install for the rest",
        (
            "highwater doctor",
            "highwater doctor --json",
            "highwater doctor --measure --json > constants.json",
        ),
    ),
    "completion": CommandHelp(
        _SET_UP,
        "the script by which a shell completes commands, flags, models and GPUs",
        (
            "highwater completion bash > ~/.local/share/bash-completion/completions/highwater",
            'highwater completion zsh > "${fpath[1]}/_highwater"',
            "highwater completion fish > ~/.config/fish/completions/highwater.fish",
        ),
    ),
    "bench": CommandHelp(
        _DEVELOP,
        "attention: the longest sequence that each attention holds here, what it costs there, "
        "and a report",
        (
            "highwater bench attention --device cpu",
            "highwater bench attention --gpus 2 --memory 24GiB",
            "highwater bench attention --device cpu --max-length 1k --implementations dense",
        ),
    ),
    "schema": CommandHelp(
        _DEVELOP,
        "the JSON Schema of --config files",
        (
            "highwater schema",
            "highwater schema > study.schema.json",
            "highwater schema | python -m json.tool --compact",
        ),
    ),
}
"""Every command by its name, in the order of the help."""


def groups() -> dict[str, list[str]]:
    """The names of the commands, by what people do with them."""
    names: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        names.setdefault(command.group, []).append(name)
    return names
