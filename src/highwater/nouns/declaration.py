"""The declaration of a setting, which stands at its field: what the value is, which commands take
it, its help, its label. Parser, completion, schema, labels and refusals are written from it. Beside
it: how its name is spelled as a flag, a key of a file or a keyword, and how a value is refused.

Bounds: the most of each count that is read, far above what anybody trains. Counts are listed,
multiplied and drawn: without a bound one number too long takes all memory, or never ends.
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
"""Similarity (0 to 1) from which a word or a name is offered for another: less is another one."""
REQUIRED: Any = msgspec.NODEFAULT
"""The default of a setting that has to be named."""

CommandName = Literal["find", "try", "predict", "recommend", "emit", "train"]
"""Commands that take settings of a request."""
Topic = Literal["model", "trial", "lengths", "search", "machines", "optimizer", "objective"]
"""Topic of a setting: a heading of a help has those of one topic, or of several."""

TRIAL_COMMANDS: tuple[CommandName, ...] = ("find", "try")
"""Commands that run trials, for settings that no prediction depends on, and for ``gpus`` and
``memory``, in the place of which predictions have flags of their own."""
TRAINED: tuple[CommandName, ...] = ("find", "try", "train")
"""The same, where a whole training has them too."""
PREDICTING_COMMANDS: tuple[CommandName, ...] = ("find", "try", "predict")
PAPER: tuple[CommandName, ...] = ("predict", "recommend", "emit")
"""Commands about what is known on paper alone, and no trial has."""
IN_A_STEP: tuple[CommandName, ...] = ("find", "try", "predict", "recommend", "emit")
"""All that are about a trial's step; a training has settings of its own."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The kind of a value that is none of a fixed list."""

    expected: str
    """The kind of value in words, for who typed something else."""
    metavar: str | None
    """Placeholder for the value in a help; None for a switch."""
    example: Any
    """A value that works, for a hint; None where the setting's default works."""
    _: KW_ONLY
    is_list: bool = False
    """True if the value is a list, which may be given as its only element."""
    stands_alone: bool = False
    """True if a flag without a value says true."""

    def __call__(
        self, default: T, help_: str, commands: str | tuple[str, ...] = (), **more: Any
    ) -> T:
        """Declare a setting of this kind; the rest is as ``setting`` has it."""
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
    """Kind of the value; None: one of a fixed list, which is the type of the setting's field."""
    _: KW_ONLY
    name: str = ""
    """Field of ``Request``, key of a file, keyword; with dashes the flag. Empty: its own name."""
    topic: str = "trial"
    """A ``Topic`` of a request's settings, or a heading of the help."""
    commands: tuple[str, ...] = (*IN_A_STEP, "train")
    """Commands that take the setting."""
    metavar: str | None = None
    """Placeholder in the place of the kind's; None: the kind's."""
    example: Any = None
    """Example in the place of the kind's; None: the kind's."""
    sets: str = ""
    """The field of ``Settings`` that it sets, or the property of ``Request`` that reads a text with
    a unit, ``memory_bytes``. Empty: the field where it stands."""
    typed: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """The value that names a rung's, by the rung's, where it is another one."""
    helps: Mapping[str, str] = field(default_factory=dict[str, str])
    """Commands to which it is something else, with the line that their help has."""
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """The default in words, by command, for commands whose default is not the field's."""
    labels: Mapping[Any, str] = field(default_factory=dict[Any, str])
    """A value's part of a rung's label, by the value."""
    other_label: str = ""
    """The part of a rung's label for every other value, which ``{}`` stands for."""
    told: Mapping[Any, tuple[str, str]] = field(default_factory=dict[Any, tuple[str, str]])
    """A value in a column and at a sentence's end, for values that a label is too short for; under
    ``...`` any value that has a label, as ``{}``."""
    says_what: bool = False
    """True if it says what is trained; else how, or where."""
    moves_loss: bool = False
    """True if the loss of a training's steps depends on it."""
    range: Any = None
    """Bounds of a number (nouns/hyperparameters.py); None: nothing is bounded here."""
    part: Any = None
    """The part of the loss that a number belongs to (nouns/hyperparameters.py); None: none."""
    any_other: str = ""
    """The choice that stands for what has no name among the choices."""
    short: str = ""
    """Another spelling of the flag: ``-o``."""
    nargs: str = ""
    """It is no flag but a word of the command, so many of them: ``?``, ``*`` or ``1``."""
    read: Callable[[str], Any] | None = None
    """Reads what is typed, in the place of the type."""
    type: Any = None
    default: Any = None
    """Type and default of the field."""
    choices: tuple[str, ...] = ()
    """The values, where they are of a fixed list; for another kind those that are words."""

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
        """True if the value is a list, which may be given as its only element."""
        return self.kind is not None and self.kind.is_list

    @property
    def stands_alone(self) -> bool:
        """True if its flag may have a value, and without one says true."""
        return self.kind is not None and self.kind.stands_alone

    def typed_for(self, value: Any) -> Any:
        """The value that a user names for this one of a rung."""
        return self.typed.get(value, value)

    def label_of(self, value: Any) -> str:
        """The part of a rung's label for this value; empty where a label says nothing of it."""
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
    """The default of a field of a ``DeclaredRecord``, and what ``Setting`` says of it;
    ``commands``: those that take it, ``find try``, if not all.
    """
    named = tuple(commands.split()) if isinstance(commands, str) else commands
    more |= {"commands": named} if named else {}
    return cast("T", Setting(help_, kind, default=default, **more))


class _Declaring(msgspec.StructMeta):
    """Leaves the defaults of the fields where ``setting`` stood."""

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
    """The settings that stand at the fields of the noun, without those of its bases."""


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values that a type lists, as they are typed."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(dict.fromkeys(name for inner in get_args(kind) for name in choices_of(inner)))


def flag_of(name: str) -> str:
    """The flag that sets a field: ``--mlp-tiles``."""
    return f"--{name.replace('_', '-')}"


def words_of(values: Mapping[str, object]) -> list[str]:
    """The words that set these fields, as they are typed."""
    words: list[str] = []
    for name, value in values.items():
        words.append(flag_of(name))
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words


class RefusedError(UsageError):
    """A refused value; ``{}`` in the hint is the setting with ``example``, as one spells it."""

    def __init__(self, name: str, problem: str, *, hint: str, example: Any = None) -> None:
        super().__init__(problem, hint=hint)
        self.name = name
        self.example = example


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """The way settings are given: typed as flags, written in a file, or passed from Python."""

    setting: Callable[[str, Any], str]
    """A setting with a value."""
    where: str = ""
    """Text before a problem: the file."""
    is_typed: bool = False

    def name(self, setting: str) -> str:
        """A setting without a value."""
        return flag_of(setting) if self.is_typed else setting

    def refused(self, error: RefusedError) -> UsageError:
        """The refusal as it is told: with the setting's name, which a command line has anyway."""
        is_named = self.is_typed or error.problem.startswith(error.name)
        problem = error.problem if is_named else f"{error.name}: {error.problem}"
        hint = error.hint.replace("{}", self.setting(error.name, error.example))
        return UsageError(f"{self.where}{problem}", hint=hint)


def in_file(path: str) -> Spelling:
    """The keys of a configuration file."""
    return Spelling(
        setting=lambda name, value: f"{name}: {'true' if value is True else value}",
        where=f"{path}: ",
    )


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant; None where none is like it."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=ALIKE)), None)


def word_hint(
    name: str, value: str, words: Sequence[str], *, typed: Callable[[str], str], listed: str
) -> str:
    """The hint for a value of setting ``name`` that is none of ``words``: the one that was meant,
    as ``typed`` spells it, or what is said of a word of others; else ``listed``, what lists them.
    """
    meant = meant_word(name, value, words)
    if meant is None:
        return f"name one of them; {listed}"
    return meant if " " in meant else f"use `{typed(meant)}`"


def meant_word(name: str, value: str, words: Sequence[str]) -> str | None:
    """The one of ``words`` that a value of setting ``name`` means, or a sentence about it."""
    said = foreign_values().get(name, {}).get(value.lower().replace("_", "-"), "")
    return said if said in words or " " in said else nearest(value, words)


@cache
def foreign_values() -> Mapping[str, Mapping[str, str]]:
    """What others call the values of a setting, each with our word, or a sentence about it."""
    return packaged("nouns/catalog/foreign_values.json", dict[str, dict[str, str]])


def _as_flag(name: str, value: Any) -> str:
    if value is True:
        return flag_of(name)
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{flag_of(name)} {shown}".rstrip()


TYPED = Spelling(setting=_as_flag, is_typed=True)
KEYWORDS = Spelling(setting=lambda name, value: f"{name}={value!r}")


MOST_GPUS = 65_536
"""GPUs of one trial. The largest published jobs had 16,384 (Llama 3 405B) to 24,576."""
MOST_GPUS_OF_A_MACHINE = 16
"""GPUs of one machine at the most."""
MOST_GPUS_PREDICTED = 1_024
"""GPUs that one prediction is about: copies of what some machines hold."""
MOST_NAMED = 256
"""Numbers of GPUs, or degrees, that one search names."""
MOST_LENGTHS = 1 << 20
"""Lengths of one grid: every token up to 1,048,576."""
MOST_SEQUENCES = 1 << 20
"""Sequences of a micro-batch, and tiles of an MLP: as a micro-batch of that many tokens has."""
MOST_STEPS = 1_000_000
"""Steps of a trial, and micro-batches of a step."""
MOST_REPEATS = 1_000
"""Repeats that confirm an edge."""
