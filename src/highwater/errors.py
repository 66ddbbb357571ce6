"""The errors a user can meet, drawn as a tree. Each says the problem, then something to type.

HighwaterError                 exit code 2: the user can fix it
├── UsageError                 a flag, a value or a pair of settings that cannot work
├── ModelError                 no such model, or a config without what training needs
├── StudyError                 a study that cannot be opened, resumed or written
├── SnapshotError              a memory snapshot that cannot be read, or is not plain data
└── MachineError               exit code 3: this machine cannot do it

An error that is none of these is a bug of ours, exit code 70. An ``OSError`` that no code has put
into words becomes a MachineError in cli/app.py.
"""

from functools import partial
from typing import ClassVar

EXIT_ANSWERED = 0
EXIT_ANSWERED_NO = 1
EXIT_USER = 2
EXIT_MACHINE = 3
EXIT_INCONCLUSIVE = 4
EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h: a code that neither an answer nor an error of the user's has."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class HighwaterError(Exception):
    """A problem in the user's words, with the values, and a hint with something to type.

    A test runs each ``hint``.
    """

    exit_code: ClassVar[int] = EXIT_USER

    def __init__(self, problem: str, *, hint: str) -> None:
        super().__init__(f"{problem}\n\nhint: {hint}")
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Let pickle rebuild the error in another process, with its problem and its hint."""
        return partial(type(self), hint=self.hint), (self.problem,)


class UsageError(HighwaterError):
    """A flag, a value or a pair of settings that cannot work."""


class ModelError(HighwaterError):
    """No such model, or a config without the fields that training needs."""


class StudyError(HighwaterError):
    """A study that cannot be opened, resumed or written."""


class SnapshotError(HighwaterError):
    """A memory snapshot that cannot be read, or that is not plain data."""


class MachineError(HighwaterError):
    """A request that this machine cannot meet: no GPU, no memory, a missing package."""

    exit_code = EXIT_MACHINE
