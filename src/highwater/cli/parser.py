"""Parser: a grammar whose errors are errors like all others, and whose help ends with examples.

Each example is run by tests/cli/test_help.py, on names that it makes: ``study.jsonl``,
``snapshot.pickle``, ``capacities.csv``.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from highwater.errors import UsageError

_WRONG_VALUE = re.compile(
    r"argument (?P<flag>-\S+): invalid (?:(?P<kind>\w+) value: |choice: )"
    r"(?P<quote>['\"])(?P<value>.*)(?P=quote)(?: \(choose from .*\))?",
    re.DOTALL,
)
"""What argparse says of a flag whose value is not of its type, or not one of its words."""
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, with a command that works as the hint."""

    def __init__(
        self,
        *,
        examples: Sequence[str],
        groups: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """``examples``: commands for the end of the help, the first one for hints.
        ``groups``: headings, each with those commands of it that its help lists.
        """
        super().__init__(allow_abbrev=False, **options)
        self.examples = tuple(examples)
        self._groups = groups

    @property
    def example(self) -> str:
        """A command that works."""
        return self.examples[0]

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, in words where a flag's value is wrong."""
        wrong = _WRONG_VALUE.fullmatch(message)
        if wrong is not None:
            raise self._wrong_value(wrong["flag"], wrong["value"], kind=wrong["kind"])
        raise UsageError(
            message, hint=f"for example `{self.example}`; `{self.prog} --help` lists every flag"
        )

    def _wrong_value(self, flag: str, value: str, *, kind: str | None) -> UsageError:
        """``flag`` as argparse names it: ``-o/--output``. ``kind``: the type that it has; None
        where it is one of several words.
        """
        name = flag.rpartition("/")[2]
        if kind is not None:
            what = _KINDS.get(kind, f"a {kind}")
            return UsageError(
                f"{name} takes {what}, and {value!r} is none",
                hint=f"for example `{self.example}`; `{self.prog} --help` lists every flag",
            )
        (action,) = (each for each in self._actions if flag == "/".join(each.option_strings))
        words = [str(each) for each in action.choices or ()]
        near = get_close_matches(value, words, n=1, cutoff=0.5) or words[:1]
        return UsageError(
            f"{name} {value!r} is not one of {', '.join(words)}", hint=f"use `{name} {near[0]}`"
        )

    def flags(self) -> list[str]:
        """Every flag, as its help lists them."""
        return sorted(
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        )

    def arguments(self) -> list[argparse.Action]:
        """Every argument and flag."""
        return list(self._actions)

    def format_help(self) -> str:
        """The help: commands below their headings, flags, examples. No example is folded: it is
        pasted.
        """
        text = super().format_help() if self._groups is None else self._grouped_help(self._groups)
        examples = "".join(f"  {example}\n" for example in self.examples)
        return f"{text}\nexamples:\n{examples}"

    def _grouped_help(self, groups: Mapping[str, Sequence[str]]) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for heading, names in groups.items():
            formatter.start_section(heading)
            formatter.add_arguments(self._command(name) for name in names)
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(action for action in self._actions if action.option_strings)
        formatter.end_section()
        formatter.add_text(f"`{self.prog} COMMAND --help` lists the flags of a command.")
        return formatter.format_help()

    def _command(self, name: str) -> argparse.Action:
        """A command as a line of the help."""
        parser = self.commands[name]
        text = (parser.description or "").removeprefix(f"{name}: ")
        return _Line(option_strings=[], dest=name, metavar=name, help=text)

    @property
    def commands(self) -> Mapping[str, "Parser"]:
        """The grammar of each command, by its name."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):  # as those of subparsers are
                return action.choices
        return {}


class _Line(argparse.Action):
    """A line of a help that is no argument."""

    def __call__(self, *_: object, **__: object) -> None:
        """Nothing is parsed."""


def parse_strictly(
    parser: Parser, words: Sequence[str], *, whole: Parser | None = None
) -> argparse.Namespace:
    """The parsed words; raises UsageError for the first that ``parser`` (a command of ``whole``)
    does not know.
    """
    for word in words:
        if word.startswith("-") and word.endswith("=--"):  # which argparse takes for an empty list
            raise UsageError(
                f"{word.removesuffix('=--')} has no value", hint=f"for example `{parser.example}`"
            )
    arguments, unknown = (whole or parser).parse_known_args(words)
    if unknown:
        raise _unknown(unknown[0], parser)
    return arguments


def _unknown(word: str, parser: Parser) -> UsageError:
    if not word.startswith("-"):
        return UsageError(f"unexpected argument {word!r}", hint=f"for example `{parser.example}`")
    flags = {flag.lstrip("-"): flag for flag in parser.flags()}
    near = get_close_matches(word.partition("=")[0].lstrip("-"), flags, n=1)
    meant = f"did you mean `{flags[near[0]]}`?" if near else None
    hint = meant or f"`{parser.prog} --help` lists every flag"
    return UsageError(f"unknown flag {word}", hint=hint)


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
