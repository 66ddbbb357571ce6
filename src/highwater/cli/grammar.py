"""The grammar of ``highwater``: its commands, what each is for, and which settings it takes. Their
flags are written by cli/flags.

Each example is run by tests/cli/test_help.py, on names that it makes: ``study.jsonl``,
``snapshot.pickle``, ``capacities.csv``.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from highwater.cli.flags import TRAINING, add_flags, own_flags
from highwater.cli.parser import Parser, parse_strictly
from highwater.errors import UsageError
from highwater.nouns.declaration import Setting, Topic
from highwater.nouns.request import TOPICS
from highwater.nouns.secrets import hidden_words
from highwater.version import __version__


class CommandHelp(NamedTuple):
    """One command, as the help has it."""

    group: str
    """What people do with it: a heading of ``highwater --help``."""
    help: str
    examples: tuple[str, str, str]
    """The first one is the hint of a refusal, too."""
    settings: Mapping[str, tuple[Topic, ...]] = {}
    """Headings of its help, with the topics of a request's settings that stand below each."""


_NUMBERS: Mapping[str, tuple[Topic, ...]] = {
    "the optimizer, which changes no memory": ("optimizer",),
    "what --objective grpo, ppo and dpo weigh and clip, which changes no memory": ("objective",),
}
_PREDICTED: tuple[Topic, ...] = ("trial", "lengths", "search")
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
        {"settings and lengths": _PREDICTED},
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
        {"settings": _PREDICTED},
    ),
    "find": CommandHelp(
        _TRY,
        "the longest context that a model trains with here, by real trials",
        (
            "highwater find Qwen3-0.6B",
            "highwater find Llama-3.1-8B --gpus 4 --lora 32",
            "highwater find Qwen3-8B --device cuda --memory 80GiB --dry-run",
        ),
        {
            "a trial": ("trial",),
            "the search": ("lengths", "search"),
            "where trials run": ("machines",),
            **_NUMBERS,
        },
    ),
    "try": CommandHelp(
        _TRY,
        "one trial of one length",
        (
            "highwater try Qwen3-0.6B --length 32k",
            "highwater try Qwen3-8B --length 64k --gpus 4 --ulysses 4 --loss chunked",
            "highwater try tiny --length 4k --device cpu",
        ),
        {"the trial": ("trial",), **_NUMBERS},
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
        {"the step": ("trial",), "several machines": ("machines",), **_NUMBERS},
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
        {"settings": _PREDICTED},
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


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What was typed after ``highwater``. Raises UsageError, with the nearest word that works."""
    parser = grammar()
    commands = parser.commands
    if words and not words[0].startswith("-") and words[0] not in commands:
        near = get_close_matches(words[0], commands, n=1, cutoff=0.4)
        raise UsageError(
            f"there is no command {words[0]!r}",
            hint=f"use `{commands[near[0] if near else 'find'].example}`",
        )
    arguments = parse_strictly(
        commands[words[0]] if words and words[0] in commands else parser, words, whole=parser
    )
    arguments.typed = ("highwater", *words)
    arguments.command_line = hidden_words(arguments.typed)  # what is shown and recorded
    return arguments


def usage() -> str:
    """The help of ``highwater`` itself."""
    return grammar().format_help()


def commands() -> Mapping[str, Parser]:
    """The grammar of each command, by its name."""
    return grammar().commands


def groups() -> dict[str, list[str]]:
    """The names of the commands, by what people do with them."""
    names: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        names.setdefault(command.group, []).append(name)
    return names


def grammar() -> Parser:
    """The grammar of ``highwater`` itself."""
    parser = Parser(
        prog="highwater",
        examples=tuple(COMMANDS[name].examples[0] for name in ("predict", "recommend", "find")),
        groups=groups(),
        description="The longest context you can train a model with, on these GPUs, and with "
        "which settings.",
    )
    parser.add_argument("--version", action="version", version=f"highwater {__version__}")
    subparsers = parser.add_subparsers(dest="command_name", metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=f"{name}: {command.help}",
            examples=command.examples,
        )
        add_flags(subparser, name, own_flags(name))
        for heading, rows in _sections(name, command):
            add_flags(subparser.add_argument_group(heading), name, rows)
    return parser


def _sections(name: str, command: CommandHelp) -> Iterator[tuple[str, list[Setting]]]:
    """The headings of a command's help, and the settings below each."""
    if name == "train":
        for heading in dict.fromkeys(row.topic for row in TRAINING):
            yield heading, [row for row in TRAINING if row.topic == heading]
    for heading, topics in command.settings.items():
        rows = (row for topic in topics for row in TOPICS[topic])
        yield heading, [row for row in rows if name in row.commands]
