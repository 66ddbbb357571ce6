"""A setting is declared once, at its field: default, help, label, and the commands that take it.
Parser, completion, schema, labels and errors are generated from that. Also here: how a setting is
spelled as a flag, as a key of a file or as a keyword, and how a value is refused.

Bounds: the largest counts that are accepted, far above any real training. Counts are listed,
multiplied and drawn: without a bound one huge count would take all memory, or never end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from highwater.errors import UsageError
from highwater.nouns.codec import Record, packaged

T = TypeVar("T")
ALIKE = 0.75
"""Least similarity (0 to 1) of a word or name to another that is offered for it."""
REQUIRED: Any = msgspec.NODEFAULT
"""The default of a setting that has to be named."""

CommandName = Literal["find", "try", "predict", "recommend", "emit", "train"]
"""Commands that take settings of a request."""
Topic = Literal["model", "trial", "lengths", "search", "machines", "optimizer", "objective"]
"""Topic of a setting: a heading of a help has the settings of one topic, or of several."""

TRIAL_COMMANDS: tuple[CommandName, ...] = ("find", "try")
"""Commands that run trials: for settings on which no prediction depends, and for ``gpus`` and
``memory``, for which predictions have flags of their own."""
TRAINED: tuple[CommandName, ...] = ("find", "try", "train")
"""The same, and the command that trains."""
PREDICTING_COMMANDS: tuple[CommandName, ...] = ("find", "try", "predict")
PAPER: tuple[CommandName, ...] = ("predict", "recommend", "emit")
"""Commands that only predict, for settings that no trial has."""
IN_A_STEP: tuple[CommandName, ...] = ("find", "try", "predict", "recommend", "emit")
"""Commands about a trial's step; a training has settings of its own."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """How values of a setting are read and named in a help, if they are not a fixed list."""

    expected: str
    """The kind in words, for an error."""
    metavar: str | None
    """Placeholder for the value in a help; None for a switch."""
    example: Any
    """A value that works, for a hint; None where the setting's default works."""
    _: KW_ONLY
    is_list: bool = False
    """True if the value is a list, for which its only element may stand."""
    stands_alone: bool = False
    """True if the flag without a value means true."""

    def __call__(
        self, default: T, help_: str, commands: str | tuple[str, ...] = (), **more: Any
    ) -> T:
        """Declare a setting with values of this kind; the arguments are those of ``setting``."""
        return setting(default, help_, self, commands=commands, **more)


COUNT = ValueKind("a whole number", "N", 1)
COUNTS = ValueKind("a whole number, or a list of them", "N", [1], is_list=True)
NUMBER = ValueKind("a number", "NUMBER", None)
LENGTH = ValueKind("a length in tokens", "TOKENS", "4k")
TOKENS = ValueKind("a number of tokens", "TOKENS", "16k")
SIZE = ValueKind("a size", "SIZE", "80GiB")
TIME = ValueKind("a time", "TIME", "40m")
MODEL = ValueKind("a directory, an id of the Hub or a catalog name", "MODEL", "Qwen3-0.6B")
SHARE = ValueKind("a share above 0 and up to 1, or adaptive", "SHARE", 0.05)
NAMES = ValueKind("names with commas between them", "NAMES", "q_proj,v_proj")
FILE = ValueKind("a file", "FILE", "study.jsonl")
DIRECTORY = ValueKind("a directory", "DIR", "./logs")
ADDRESS = ValueKind("the address of a cluster's head", "HOST:PORT", "10.0.0.1:6379")
COMMAND = ValueKind("a command", "COMMAND", "python train.py --max-len {length} --steps {steps}")
PATTERN = ValueKind("a regular expression", "REGEX", "step (?P<step>[0-9]+) done")
FUNCTION = ValueKind("module:function", "MODULE:FUNCTION", "my_package.batches:packed")
PREDICTION = ValueKind("formula, trace or a file", "{formula,trace,FILE}", "formula")
STEPS = ValueKind("steps, `0,1`, or profile_steps, max_entries and ranks of them", "STEPS", "0,1")
SWITCH = ValueKind("true or false", None, True)
OFFLOAD = ValueKind("true, false or states", "{states,false}", True, stands_alone=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that a user can name."""

    help: str
    """One line, for ``--help`` and for the schema of configuration files."""
    kind: ValueKind | None = None
    """Kind of the value; None: one of a fixed list, the ``Literal`` that is its field's type."""
    _: KW_ONLY
    name: str = ""
    """Name in ``Request``, in a file and as a keyword; with dashes the flag. Empty: the field's."""
    topic: str = "trial"
    """A ``Topic`` of a request's settings, or a heading of the help."""
    commands: tuple[str, ...] = (*IN_A_STEP, "train")
    """Commands that take the setting."""
    metavar: str | None = None
    """Placeholder for the value in a help; None: the kind's."""
    example: Any = None
    """A value that works, for a hint; None: the kind's."""
    sets: str = ""
    """Name of what it sets: a field of ``Settings``, a property of ``Request`` that parses it
    (``memory_bytes``), or a name in argparse's namespace. Empty: the field where it stands."""
    typed: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Values as a user types them, where they differ: ``{True: 2}`` for ``--micro-batches``."""
    helps: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its help by command, for commands to which it is something else."""
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """The default in words, by command, where it is not the field's."""
    labels: Mapping[Any, str] = field(default_factory=dict[Any, str])
    """The part of a rung's label for each value that has one."""
    other_label: str = ""
    """The part of a rung's label for any other value, for which ``{}`` stands."""
    told: Mapping[Any, tuple[str, str]] = field(default_factory=dict[Any, tuple[str, str]])
    """A value's words in a table and at a sentence's end, where its label is too short; under
    ``...`` those for any value with a label, for which ``{}`` stands."""
    says_what: bool = False
    """True if it says what is trained; False: how, or where."""
    moves_loss: bool = False
    """True if a training's loss depends on it."""
    range: Any = None
    """Bounds of a number, a ``NumberRange`` (nouns/hyperparameters.py); None: none are set here."""
    part: Any = None
    """The ``LossPart`` that a number belongs to (nouns/hyperparameters.py); None: none."""
    any_other: str = ""
    """The choice for everything that has no choice of its own."""
    short: str = ""
    """Another spelling of the flag: ``-o``."""
    nargs: str = ""
    """Number of words, if it is positional and no flag: ``?``, ``*``, ``+`` or ``1``."""
    read: Callable[[str], Any] | None = None
    """Reads what is typed; None: the type does."""
    type: Any = None
    default: Any = None
    """Type and default of the field."""
    choices: tuple[str, ...] = ()
    """The values of a fixed list, or the words among the values of another kind."""

    @property
    def flag(self) -> str:
        """The flag of the setting: ``--mlp-tiles``."""
        return flag_of(self.name)

    @property
    def words(self) -> str:
        """The name of the setting in words: ``mlp tiles``."""
        return self.name.replace("_", " ")

    @property
    def is_list(self) -> bool:
        """True if the value is a list; its only element may then be given instead of a list."""
        return self.kind is not None and self.kind.is_list

    @property
    def stands_alone(self) -> bool:
        """True if the flag's value may be left out, which means true."""
        return self.kind is not None and self.kind.stands_alone

    def typed_for(self, value: Any) -> Any:
        """The word that a user types for this value; most values are typed as they are."""
        return self.typed.get(value, value)

    def label_of(self, value: Any) -> str:
        """Words for the value in a label, as ``chunked loss``; empty for the default."""
        if value == self.default:
            return ""
        return self.labels[value] if value in self.labels else self.other_label.format(value)


def setting(
    default: T,
    help_: str,
    kind: ValueKind | None = None,
    *,
    commands: str | tuple[str, ...] = (),
    **more: Any,
) -> T:
    """Declare a field of a ``DeclaredRecord``: its default, and the fields of ``Setting``.
    ``commands``: names of the commands that take it, ``"find try"``; empty: the usual ones.
    """
    named = tuple(commands.split()) if isinstance(commands, str) else commands
    more |= {"commands": named} if named else {}
    return cast("T", Setting(help_, kind, default=default, **more))


class _Declaring(msgspec.StructMeta):
    """Metaclass that replaces each ``setting(...)`` by its default and keeps it in ``declared``."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> type:
        rows = {each: row for each, row in namespace.items() if isinstance(row, Setting)}
        defaults = {each: row.default for each, row in rows.items()}
        namespace = {**namespace, **defaults}
        namespace.pop("__slots__", None)  # msgspec.defstruct names them, and every Struct has them
        noun = cast("type[DeclaredRecord]", super().__new__(cls, name, bases, namespace, **options))
        noun.declared = tuple(
            replace(
                rows[each.name],
                name=rows[each.name].name or each.name,
                sets=rows[each.name].sets or each.name,
                type=each.type,
                choices=choices_of(each.type),
            )
            for each in msgspec.structs.fields(noun)
            if each.name in rows
        )
        return noun


class DeclaredRecord(Record, frozen=True, kw_only=True, metaclass=_Declaring):
    """Base of nouns whose fields are settings."""

    declared: ClassVar[tuple[Setting, ...]]
    """The settings of the class's own fields, without those of its bases."""


def choices_of(kind: Any) -> tuple[str, ...]:
    """Values that a ``Literal`` type, or a union with some, allows, as texts; else none."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(dict.fromkeys(name for inner in get_args(kind) for name in choices_of(inner)))


def flag_of(name: str) -> str:
    """The flag that sets a field: ``--mlp-tiles``."""
    return f"--{name.replace('_', '-')}"


def words_of(values: Mapping[str, object]) -> list[str]:
    """Command-line words that set these fields: each flag, then its value unless that is True."""
    words: list[str] = []
    for name, value in values.items():
        words.append(flag_of(name))
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words


class RefusedError(UsageError):
    """Error for a setting's value; ``{}`` in the hint becomes the setting with ``example``."""

    def __init__(self, name: str, problem: str, *, hint: str, example: Any = None) -> None:
        super().__init__(problem, hint=hint)
        self.name = name
        self.example = example


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How a user names settings: as flags, as keys of a file, or as keywords in Python."""

    setting: Callable[[str, Any], str]
    """Spells a setting with a value."""
    where: str = ""
    """Text before a problem: the file."""
    is_typed: bool = False

    def name(self, setting: str) -> str:
        """The setting's name as a user gives it here: ``--mlp-tiles`` or ``mlp_tiles``."""
        return flag_of(setting) if self.is_typed else setting

    def refused(self, error: RefusedError) -> UsageError:
        """Rewrite an error to name the setting in this spelling; typed flags are named anyway."""
        is_named = self.is_typed or error.problem.startswith(error.name)
        problem = error.problem if is_named else f"{error.name}: {error.problem}"
        hint = error.hint.replace("{}", self.setting(error.name, error.example))
        return UsageError(f"{self.where}{problem}", hint=hint)


def in_file(path: str) -> Spelling:
    """The spelling of a configuration file's keys."""
    return Spelling(
        setting=lambda name, value: f"{name}: {'true' if value is True else value}",
        where=f"{path}: ",
    )


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name most similar to ``name``; None if no known name is similar."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=ALIKE)), None)


def word_hint(
    name: str, value: str, words: Sequence[str], *, typed: Callable[[str], str], listed: str
) -> str:
    """Hint for a value of setting ``name`` that is not in ``words``: the word that was probably
    meant, spelled by ``typed``, or a sentence about another trainer's word for it; else ``listed``.
    """
    meant = meant_word(name, value, words)
    if meant is None:
        return f"name one of them; {listed}"
    return meant if " " in meant else f"use `{typed(meant)}`"


def meant_word(name: str, value: str, words: Sequence[str]) -> str | None:
    """The word of ``words`` that a value of setting ``name`` means, or a sentence about it."""
    said = foreign_values().get(name, {}).get(value.lower().replace("_", "-"), "")
    return said if said in words or " " in said else nearest(value.lower(), words)


@cache
def foreign_values() -> Mapping[str, Mapping[str, str]]:
    """Other trainers' values of each setting, mapped to our value or to a sentence about it."""
    return packaged("nouns/catalog/foreign_values.json", dict[str, dict[str, str]])


def _as_flag(name: str, value: Any) -> str:
    if value is True:
        return flag_of(name)
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{flag_of(name)} {shown}".rstrip()


TYPED = Spelling(setting=_as_flag, is_typed=True)
KEYWORDS = Spelling(setting=lambda name, value: f"{name}={value!r}")


MOST_GPUS = 65_536
"""Most GPUs of one trial. The largest published jobs had 16,384 (Llama 3 405B) to 24,576."""
USUAL_GPUS_OF_A_MACHINE = 8
"""GPUs that each of several machines mostly has."""
MOST_GPUS_OF_A_MACHINE = 16
"""Most GPUs of one machine."""
MOST_GPUS_PREDICTED = 1_024
"""Most GPUs of one prediction."""
MOST_NAMED = 256
"""Most numbers of GPUs, or degrees, that one search names."""
MOST_LENGTHS = 1 << 20
"""Most lengths of one grid: every token up to 1,048,576."""
MOST_SEQUENCES = 1 << 20
"""Most sequences of a micro-batch, and tiles of an MLP: one for each of so many tokens."""
MOST_STEPS = 1_000_000
"""Most steps of a trial, and micro-batches of a step."""
MOST_REPEATS = 1_000
"""Most repeats that confirm an edge."""
