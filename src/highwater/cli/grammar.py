"""The grammar of ``highwater``: its commands with their purpose and the settings that each takes.
Flags are made from the declarations at the fields of ``Request``, ``TrainingRequest`` and
``CommandFlags`` (flags.py). Its errors are UsageErrors, and each help ends with examples.

tests/cli/test_help.py runs each example, on files that it makes: ``study.jsonl``,
``snapshot.pickle``, ``capacities.csv``.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn, get_args, get_origin

from highwater.cli.flags import TRAINING, CommandFlags
from highwater.errors import UsageError
from highwater.model.model_place import catalog_model, is_hub_id
from highwater.nouns.cluster import cluster
from highwater.nouns.codec import Record, packaged
from highwater.nouns.declaration import (
    REQUIRED,
    SWITCH,
    Setting,
    Topic,
    meant_word,
    nearest,
    word_hint,
    words_of,
)
from highwater.nouns.request import DECLARED, TOPICS
from highwater.nouns.secrets import hidden_words
from highwater.nouns.settings import PATTERN_FIELDS, listed
from highwater.nouns.training import TrainingRequest
from highwater.version import __version__

_WRONG_VALUE = re.compile(
    r"argument (?P<flag>-\S+): (?:expected (?:one|at least one) argument|invalid "
    r"(?:(?P<kind>\w+) value: |choice: )"
    r"(?P<quote>['\"])(?P<value>.*)(?P=quote)(?: \(choose from .*\))?)",
    re.DOTALL,
)
"""argparse's message about a flag that has no value, one of the wrong type, or no choice of its."""
_MISTYPED = 0.8
"""Similarity (0 to 1) from which a known flag is offered for an unknown one."""
PUBLISHED = "search_context_length_capacity"
"""Name of the published script, whose flags differ: other programs' are not translated there."""
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, with a command that works as the hint."""

    def __init__(
        self,
        *,
        examples: Sequence[str],
        groups: Mapping[str, Sequence[str]] | None = None,
        first: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """``examples``: commands for the end of the help; the first is also used in hints.
        ``groups``: headings of the help, each with the names of its commands. ``first``: flags of
        the short help, if ``--help-all`` lists the others; empty: there is one help.
        """
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.examples = tuple(examples)
        self.example = self.examples[0]
        """A command that works."""
        self.typed: Sequence[str] = ()
        self._groups = groups
        self._first = first
        self.whole = "--help-all" if first else "--help"
        """The flag that lists every flag."""
        self.sections: dict[str, Any] = {}
        """Groups of flags, by the word that ``--help=WORD`` takes."""
        with_group: dict[str, Any] = {"nargs": "?", "metavar": "GROUP"} if first else {"nargs": 0}
        of_group = ", or that of a group of flags" if first else " message and exit"
        text = f"show this help{of_group}"
        kept: dict[str, Any] = {"action": _Help, "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", help=text, **with_group, **kept)
        self.add_argument("--help-all", nargs=0, help=argparse.SUPPRESS, **kept)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UsageError, reworded if a flag's value is missing."""
        listed = f"`{self.prog} {self.whole}` lists every flag"
        hint = f"for example `{self.example}`; {listed}"
        wrong = _WRONG_VALUE.fullmatch(message)
        if wrong is None:
            raise UsageError(message, hint=hint)
        name, kind, value = wrong["flag"].rpartition("/")[2], wrong["kind"], wrong["value"]
        (action,) = (each for each in self._actions if name in each.option_strings)
        if value is None:
            row = DECLARED.get(action.dest)
            if row is not None and (example := row.example or (row.kind and row.kind.example)):
                words = words_of({row.name: example})
                words = (self.example, *words) if len(self.typed) == 2 else words
                hint = f"for example `{' '.join(words)}`"
            raise UsageError(f"{name} has no value", hint=hint)
        if kind is not None:
            what = _KINDS.get(kind, f"a {kind}")
            raise UsageError(f"{name} takes {what}, and {value!r} is none", hint=hint)
        words = [str(each) for each in action.choices or ()]
        setting, typed = name.lstrip("-").replace("-", "_"), f"{name} {{}}".format
        hint = word_hint(setting, value, words, typed=typed, listed=listed)
        raise UsageError(f"{name} {value!r} is not one of {', '.join(words)}", hint=hint)

    @property
    def arguments(self) -> list[argparse.Action]:
        """Every argument and flag."""
        return list(self._actions)

    def flags(self) -> list[str]:
        """Every flag that the help lists, sorted."""
        return sorted(
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        )

    def format_help(self) -> str:
        """The help's text: commands by heading, flags, and examples, which are not folded."""
        if self._groups is not None:
            return self._with_examples(self._grouped_help(self._groups))
        return self._with_examples(self._short_help() if self._first else super().format_help())

    def help_of(self, section: str | None) -> str:
        """The help of every flag, or of one section. Raises UsageError for an unknown section."""
        if section is None:
            return self._with_examples(super().format_help())
        if section not in self.sections:
            names = ", ".join(self.sections) or "no groups"
            hint = f"`{self.prog} --help`" + (f"; the groups are {names}" if self.sections else "")
            raise UsageError(f"the help has no group {section!r}", hint=hint)
        group, formatter = self.sections[section], self._get_formatter()
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
        return formatter.format_help()

    def _short_help(self) -> str:
        """The help's text for the flags in ``first``, and how to list all flags."""
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} [MODEL] [FLAGS]", [], [])
        formatter.add_text(self.description)
        formatter.start_section("flags")
        shown = {f"--{name}" for name in (*self._first, "help")}
        formatter.add_arguments(
            each for each in self._actions if shown & {*each.option_strings} or each.dest == "model"
        )
        formatter.end_section()
        sections = ", ".join(f"--help={name}" for name in self.sections)
        formatter.add_text(f"All {len(self.flags())} flags: --help-all; groups: {sections}.")
        return formatter.format_help()

    def _with_examples(self, text: str) -> str:
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
        parser = self.commands[name]
        text = (parser.description or "").removeprefix(f"{name}: ")
        return _Line(option_strings=[], dest=name, metavar=name, help=text)

    @property
    def commands(self) -> Mapping[str, "Parser"]:
        """Parser of each command, by name; empty for the parser of a command."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):  # as those of subparsers are
                return action.choices
        return {}


class _Help(argparse.Action):
    """Argparse action that prints the help, all of it or a section, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)  # noqa: S101 (only a Parser has it)
        section = values if isinstance(values, str) else None
        is_first = option_string != "--help-all" and section is None
        sys.stdout.write(parser.format_help() if is_first else parser.help_of(section))
        parser.exit()


class _Line(argparse.Action):
    """A line of the help that is not an argument."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing: such a line is never parsed."""


def parse_strictly(
    parser: Parser, words: Sequence[str], *, whole: Parser | None = None
) -> argparse.Namespace:
    """Parse the words of ``parser``, a command of ``whole``; UsageError for an unknown word."""
    for word in words:
        name = word.removesuffix("=--")  # argparse takes `--flag=--` for an empty list
        if name != word and name.startswith("-"):
            raise UsageError(f"{name} has no value", hint=f"for example `{parser.example}`")
    parser.typed = words
    arguments, unknown = (whole or parser).parse_known_args(words)
    if unknown:
        raise _unknown(unknown[0], parser, words)
    return arguments


def _unknown(word: str, parser: Parser, words: Sequence[str]) -> UsageError:
    if not word.startswith("-"):
        gpus = " ".join(words).partition("--gpus ")[2].partition(" -")[0].split()
        hint = f"for example `{parser.example}`"
        if word in gpus:  # `4 x A100`, of which the flag took the first word
            try:
                text = re.sub(r"^(\d+)(?=[^\dxX])", r"\1x", "".join(gpus))
                meant = cluster(text, gpu_memory_bytes=None, machine=None)
                hint = f"use `--gpus {meant.typed}`"
            except UsageError as error:
                hint = error.hint
        return UsageError(f"unexpected argument {word!r}", hint=hint)
    flags = {flag.lstrip("-"): flag for flag in parser.flags()}
    near = get_close_matches(word.partition("=")[0].lstrip("-"), flags, n=1, cutoff=_MISTYPED)
    meant = None if parser.prog == PUBLISHED else _meant(word, words, flags.values())
    meant = meant or (f"did you mean `{flags[near[0]]}`?" if near else None)
    hint = meant or f"`{parser.prog} {parser.whole}` lists every flag"
    return UsageError(f"unknown flag {word}", hint=hint)


def foreign_words() -> dict[str, str]:
    """Names of settings in TRL, Hugging Face's Trainer, verl, Axolotl and Unsloth, each with our
    flag, in which ``{}`` is replaced by the typed value; or with a sentence on how it is done here.
    Of several flags, separated by ``|``, the first that the command has is used.
    """
    return packaged("cli/foreign_words.json", dict[str, str])


def _meant(word: str, words: Sequence[str], flags: Collection[str]) -> str | None:
    """Hint for an unknown flag: our flag for it, or the command that has it; None if unknown."""
    name, _, value = word.lstrip("-").partition("=")
    following = [*words[words.index(word) + 1 :], "-"][0] if word in words else "-"
    value = value or ("" if following.startswith("-") else following)
    name = name.replace("_", "-").lower()
    ours = foreign_words().get(name, f"--{name} {{}}").split(" | ")
    said = next((each for each in ours if each.split()[0] in flags or each[0] != "-"), None)
    if said is None:
        flag, typed = ours[0].split()[0], ours[0].replace("{}", value).strip()
        having = [name for name, parser in commands().items() if flag in parser.flags()]
        if {"--predict", flag} <= {*words} and words[0] == "guide" and "predict" in having:
            return _predicted_apart(words)
        return f"leave `--{name}` out: {typed} is for {listed(having)}" if having else None
    if said[0] != "-":
        return said.replace("{}", value)
    setting = said.split()[0].lstrip("-").replace("-", "_")
    choices = DECLARED[setting].choices if setting in DECLARED else ()
    if choices and value and value not in choices:
        value = meant_word(setting, value, choices) or value
        if " " in value:
            return value
    return f"use `{said.replace('{}', value).strip()}`"


def _predicted_apart(words: Sequence[str]) -> str:
    """Hint for settings of ``predict`` typed for a guide: the prediction as a file of its own."""
    typed, flag = dict[str, list[str]](), ""
    for word in words:
        flag = word if word.startswith("-") else flag
        typed.setdefault(flag, []).append(word)
    model, gpus = typed["--predict"][1:2], typed.get("--gpus", [])[:2]
    others = {"", "--predict", "--gpus", "-o", "--output", "--json"}
    flags = [word for flag, own in typed.items() if flag not in others for word in own]
    command = shlex.join(("highwater", "predict", *model, *gpus, *flags, "--json"))
    return f"`{command} > p.json`, then `highwater guide p.json`"


class CommandHelp(Record, frozen=True, kw_only=True):
    """What the help says about one command: its group, its sentence, its examples."""

    group: str
    """The heading of ``highwater --help`` that it stands below."""
    help: str
    examples: tuple[str, ...]
    """Commands for the end of the help; hints show the first, too."""
    first: tuple[str, ...] = ()
    """Flags of its short help; empty: one help lists all its flags."""


COMMANDS = packaged("cli/commands.json", dict[str, CommandHelp])
"""Every command by its name, in the order of the help."""
_PREDICTED: Mapping[str, tuple[Topic, ...]] = {
    "settings": ("trial",),
    "lengths": ("lengths", "search"),
}
_NUMBERS: Mapping[str, tuple[Topic, ...]] = {
    "the optimizer, which changes no memory": ("optimizer",),
    "what --objective grpo, ppo and dpo weigh and clip, which changes no memory": ("objective",),
}
_TOPICS: Mapping[str, Mapping[str, tuple[Topic, ...]]] = {
    **dict.fromkeys(("predict", "recommend", "emit"), _PREDICTED),
    "find": {
        "a trial": ("trial",),
        "the search": ("lengths", "search"),
        "where trials run": ("machines",),
        **_NUMBERS,
    },
    "try": {"the trial": ("trial",), **_NUMBERS},
    "train": {"the step": ("trial",), "several machines": ("machines",), **_NUMBERS},
}
"""Headings of a command's help, with the topics of a request's settings that stand below each."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line after ``highwater``; UsageError with the nearest valid word."""
    parser = grammar()
    commands = parser.commands
    if words and words[0] == "help":
        words = [*words[1:], "--help"]
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise UsageError(f"there is no command {words[0]!r}", hint=_with_command(words))
    own = commands.get(words[0], parser) if words else parser
    words = _in_one_word(words)
    spelled = _spelled(words) if "--lora-base" in own.flags() else words
    arguments = parse_strictly(own, spelled, whole=parser)
    arguments.typed = ("highwater", *words)
    arguments.command_line = hidden_words(arguments.typed)  # what is shown and recorded
    return arguments


def _in_one_word(words: Sequence[str]) -> list[str]:
    """The words, with a size after a flag that is pasted in two words, ``18.55 GiB.``, as one."""
    joined: list[str] = []
    for word in words:
        flag, number = ("", "", *joined)[-2:]
        size = re.fullmatch(r"(--[\w-]+=)?\d[\d.,]*", number)
        is_after_flag = size is not None and (size[1] or flag.startswith("--"))
        if is_after_flag and re.fullmatch(r"[KMGT]i?B[.,]?", word, re.IGNORECASE):
            joined[-1] += word.rstrip(".,")
        else:
            joined.append(word)
    return joined


def _spelled(words: Sequence[str]) -> list[str]:
    """The words with ``--qlora 32`` as ``--lora-base nf4 --lora 32``; 16 is the usual rank. And a
    lone ``--liger``, a switch as in its own trainers, as the chunked loss that it switches on.
    """
    spelled, flags = [], [word.partition("=")[0] for word in words]
    is_ranked, has_loss = "--lora" in flags, "--loss" in flags
    for word, following in zip(words, (*words[1:], "--"), strict=True):
        name, _, rank = word.partition("=")
        if name == "--qlora":
            spelled[1:1] = ["--lora-base", "nf4"]
            if rank or following.isdigit():
                spelled.append(word.replace("--qlora", "--lora"))
            elif not is_ranked:
                spelled += ["--lora", "16"]
        elif word == "--lora" and re.match(r"-?\d", following) is None:
            spelled += ["--lora", "16"]
        elif word == "--liger" and following.startswith("-"):
            spelled += ["--liger", "all"] if has_loss else ["--loss", "chunked"]
        else:
            spelled.append(word)
    return spelled


def _with_command(words: Sequence[str]) -> str:
    """Hint for words that begin with no command: the same words after the probable command."""
    is_model = catalog_model(words[0]) is not None or is_hub_id(words[0])
    near = None if is_model else nearest(words[0], tuple(COMMANDS))
    if near is None and not is_model and not any(word.startswith("-") for word in words[1:2]):
        return "`highwater --help` lists the commands"
    meant = hidden_words(("highwater", *((near, *words[1:]) if near else ("predict", *words))))
    typed = COMMANDS[near].examples[0] if near and not words[1:] else shlex.join(meant)
    return f"use `{typed}`"


def commands() -> Mapping[str, Parser]:
    """The parser of each command, by its name."""
    return grammar().commands


def groups() -> dict[str, list[str]]:
    """Names of the commands by the group under which the help lists them."""
    names: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        names.setdefault(command.group, []).append(name)
    return names


@cache
def grammar() -> Parser:
    """The parser of ``highwater`` itself."""
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
        described = f"{name}: {command.help}"
        own = subparsers.add_parser(
            *(name,),
            help=command.help,
            description=described,
            examples=command.examples,
            first=command.first,
        )
        _add_flags(own, name, _own_flags(name))
        for section, heading, rows in _sections(name):
            own.sections[section] = own.add_argument_group(heading)
            _add_flags(own.sections[section], name, rows)
    return parser


def _own_flags(command: str) -> Iterator[Setting]:
    """Yield a command's settings outside its topics: the model, its own flags; for ``bench``, which
    makes no request, a request's of an attention pattern.
    """
    yield from (DECLARED["model"],) if command in DECLARED["model"].commands else ()
    yield from (row for row in CommandFlags.declared if command in row.commands)
    for row in map(DECLARED.__getitem__, PATTERN_FIELDS if command == "bench" else ()):
        read: dict[str, Any] = {"type": str, "default": None, "choices": ()}
        yield replace(row, metavar=_metavar(row), **read)


def _sections(command: str) -> Iterator[tuple[str, str, list[Setting]]]:
    """Each section of a command's help: its name in ``--help=``, its heading, and its settings."""
    if command == "train":
        rows = [replace(row, sets=TRAINING + row.name) for row in TrainingRequest.declared]
        for heading in dict.fromkeys(row.topic for row in rows):
            yield heading.split()[-1], heading, [row for row in rows if row.topic == heading]
    for heading, topics in _TOPICS.get(command, {}).items():
        rows = [row for topic in topics for row in TOPICS[topic]]
        yield topics[-1], heading, [row for row in rows if command in row.commands]


def _add_flags(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage] -- or a heading
    command: str,
    rows: Iterable[Setting],
) -> None:
    """Add flags for these settings to a command's parser, or to a group of its help.

    A setting's ``name`` is its flag, and ``sets`` the attribute of the parsed arguments. They
    differ where a request has a setting of that name, with another meaning: ``--gpus`` of
    ``predict`` is the field ``cluster`` of ``CommandFlags``, and is read as ``arguments.cluster``.
    A setting with ``nargs`` is no flag: the model is typed alone, and sets ``arguments.model``.
    """
    for row in rows:
        # by identity: a flag of a command alone may have the name of a request's setting
        is_of_a_request = row is DECLARED.get(row.name) and not row.nargs
        options = _read_by_a_request(row) if is_of_a_request else _read_here(row)
        options["help"] = _help(row, command)
        if row.kind is SWITCH:
            options["action"] = "store_true"
        elif "choices" not in options:
            options["metavar"] = _metavar(row)
        names = (row.sets,) if row.nargs else (*filter(None, (row.short,)), row.flag)
        parser.add_argument(*names, **options)


def _read_by_a_request(row: Setting) -> dict[str, Any]:
    """Argparse options of a request's setting: absent if not typed, as a file may name it."""
    options: dict[str, Any] = {"dest": row.name, "default": argparse.SUPPRESS}
    if row.is_list:
        options["nargs"] = "+"
    elif row.stands_alone:
        options |= {"nargs": "?", "const": True}
    return options


def _read_here(row: Setting) -> dict[str, Any]:
    """Options of an argument that is not part of a request, by its field's type. Those of a
    training have no default: ``training_request_of`` reports missing ones.
    """
    if row.kind is SWITCH:
        return {"dest": row.sets}
    is_required = row.default is REQUIRED
    is_left = row.sets.startswith(TRAINING)
    options: dict[str, Any] = {"default": None if is_required or is_left else row.default}
    if get_origin(row.type) is tuple:
        options |= {"default": [], "nargs": "+", "action": "store" if row.nargs else "extend"}
    if not row.nargs:
        options |= {"dest": row.sets, "required": is_required and not is_left}
    elif row.nargs != "1":
        options["nargs"] = row.nargs
    types = (row.type, *get_args(row.type))
    if row.read is not None or (int in types and str not in types):
        options["type"] = row.read or int
    if row.kind is None and row.choices:
        options |= {"choices": row.choices} | ({"metavar": row.metavar} if row.metavar else {})
    return options


def _metavar(row: Setting) -> str | None:
    if row.kind is None and row.choices:
        return f"{{{','.join(row.choices)}}}"
    return row.metavar or (row.kind and row.kind.metavar)


def _help(row: Setting, command: str) -> str:
    """The setting's help, with its default unless that is nothing, or in the text already."""
    default, said, named = row.default, row.helps.get(command, row.help), row.defaults.get(command)
    if named is None and (default in (None, False, 0, "0", (), REQUIRED) or "default" in said):
        shown = ""
    else:
        values = default if isinstance(default, tuple) else (default,)
        shown = f" (default: {named or ' '.join(map(str, values))})"
    return f"{said}{shown}".replace("%", "%%")
