"""Refusals of settings: what a value cannot be, and one that works, spelled as its user spells it:
a flag, a key of a file, or a keyword.

Bounds: the most of each count that is read, far above what anybody trains.

Counts come from a user or from a file, and are listed, multiplied and drawn: without a bound one
number too long takes all memory, or never ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from highwater.errors import UsageError
from highwater.nouns.declaration import flag_of


class RefusedError(UsageError):
    """A value that a setting cannot have. ``{}`` in the hint stands for the setting with
    ``example``, as its user spells it.
    """

    def __init__(self, name: str, problem: str, *, hint: str, example: Any = None) -> None:
        super().__init__(problem, hint=hint)
        self.name = name
        self.example = example


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How settings are given: typed as flags, written in a file, or passed from Python."""

    setting: Callable[[str, Any], str]
    """A setting with a value."""
    where: str = ""
    """What stands before a problem: the file."""
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
    return Spelling(setting=_as_key, where=f"{path}: ")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant; None where none is like it."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)


def _as_flag(name: str, value: Any) -> str:
    if value is True:
        return flag_of(name)
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{flag_of(name)} {shown}".rstrip()


def _as_key(name: str, value: Any) -> str:
    return f"{name}: {'true' if value is True else value}"


def _as_keyword(name: str, value: Any) -> str:
    return f"{name}={value!r}"


TYPED = Spelling(setting=_as_flag, is_typed=True)
KEYWORDS = Spelling(setting=_as_keyword)


MOST_GPUS = 65_536
"""GPUs of one trial. The largest jobs that were published had 16,384 (Llama 3 405B) to 24,576
GPUs."""
MOST_GPUS_OF_A_MACHINE = 16
"""GPUs of one machine at the most."""
MOST_GPUS_PREDICTED = 1_024
"""GPUs that one prediction is about: copies of what some machines hold."""
MOST_NAMED = 256
"""Numbers of GPUs, or degrees, that one search names."""
MOST_LENGTHS = 1 << 20
"""Lengths of one grid: every token up to 1,048,576."""
MOST_SEQUENCES = 1 << 20
"""Sequences of one micro-batch, and tiles of an MLP. As many as a micro-batch of that many tokens
could have."""
MOST_STEPS = 1_000_000
"""Steps of a trial, and micro-batches of a step."""
MOST_REPEATS = 1_000
"""Repeats that confirm an edge."""
