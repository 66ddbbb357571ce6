"""The flags of the command line: one table for all commands. A flag is a field of ``Request`` and says what that field says."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from msgspec import Meta
from msgspec.structs import fields

from highwater.spec.request import Request, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: ``--name`` sets ``field``. Values stay text here; ``request_from`` reads them, and a file's, alike."""

    name: str
    metavar: str | None = None
    """What stands for the value in the help; None for a switch, and for a setting with fixed choices."""
    several: bool = False
    switch: bool = False

    @property
    def field(self) -> str:
        """The field of ``Request`` that it sets."""
        return self.name.replace("-", "_")


TRIAL_FLAGS = (
    Flag(name="gpus", metavar="N", several=True),
    Flag(name="ulysses", metavar="N", several=True),
    Flag(name="memory", metavar="SIZE"),
    Flag(name="loss"),
    Flag(name="allocator"),
    Flag(name="recompute"),
    Flag(name="mlp-tiles", metavar="N"),
    Flag(name="strategy"),
    Flag(name="offload", switch=True),
    Flag(name="objective"),
    Flag(name="critic", switch=True),
    Flag(name="entropy"),
    Flag(name="checkpoint"),
    Flag(name="save-hf"),
    Flag(name="rope"),
    Flag(name="sequences-per-micro-batch", metavar="N"),
    Flag(name="token-budget", metavar="TOKENS"),
    Flag(name="timeout", metavar="TIME"),
    Flag(name="steps", metavar="N"),
    Flag(name="micro-batches", metavar="N"),
    Flag(name="data", metavar="MODULE:FUNCTION"),
    Flag(name="device"),
    Flag(name="log-dir", metavar="DIR"),
    Flag(name="checkpoint-dir", metavar="DIR"),
    Flag(name="allow-busy", switch=True),
    Flag(name="dry-run", switch=True),
)
"""What one trial depends on: flags of ``find`` and ``try``."""

OPTIMIZER_FLAGS = (
    Flag(name="learning-rate", metavar="RATE"),
    Flag(name="adam-beta1", metavar="BETA"),
    Flag(name="adam-beta2", metavar="BETA"),
    Flag(name="adam-epsilon", metavar="EPSILON"),
    Flag(name="weight-decay", metavar="RATE"),
    Flag(name="max-grad-norm", metavar="NORM"),
)
OBJECTIVE_FLAGS = (
    Flag(name="clip-ratio-low", metavar="SHARE"),
    Flag(name="clip-ratio-high", metavar="SHARE"),
    Flag(name="dual-clip", metavar="RATIO"),
    Flag(name="kl-estimator"),
    Flag(name="kl-coefficient", metavar="WEIGHT"),
    Flag(name="entropy-coefficient", metavar="WEIGHT"),
    Flag(name="value-clip", metavar="CHANGE"),
    Flag(name="value-coefficient", metavar="WEIGHT"),
    Flag(name="discount", metavar="SHARE"),
    Flag(name="gae-lambda", metavar="SHARE"),
)
"""With the optimizer's, the hyperparameters: a trial's loss depends on them, its memory does not."""

SEARCH_FLAGS = (
    Flag(name="start-length", metavar="TOKENS"),
    Flag(name="resolution", metavar="TOKENS"),
    Flag(name="max-length", metavar="TOKENS"),
    Flag(name="method"),
    Flag(name="proof"),
    Flag(name="prediction", metavar="{formula,trace,FILE}"),
    Flag(name="confirm", metavar="K"),
    Flag(name="margin", metavar="SIZE"),
    Flag(name="study", metavar="FILE"),
    Flag(name="retry-crashed", switch=True),
)
"""What only a search has."""

SINGLE_FLAGS = (Flag(name="attention-depth", metavar="N"),)
"""What only ``try`` has: a search chooses it."""


_OF_A_RUN = (
    *("gpus", "memory", "checkpoint", "save-hf", "timeout", "steps", "micro-batches", "data", "device", "log-dir"),
    *("checkpoint-dir", "allow-busy", "dry-run", "method", "proof", "prediction", "confirm", "study", "retry-crashed"),
)
PREDICT_FLAGS = tuple(flag for flag in (*TRIAL_FLAGS, *SEARCH_FLAGS) if flag.name not in _OF_A_RUN)
"""What a prediction depends on, besides the GPUs."""


RECOMMEND_FLAGS = tuple(
    flag for flag in PREDICT_FLAGS if flag.name not in ("token-budget", "start-length", "resolution", "max-length")
)
"""What a recommendation depends on: it is about one length, and names the token budget itself."""


def add_flags(
    parser: argparse.ArgumentParser, flags: tuple[Flag, ...], *, group: str, defaults: Mapping[str, str] | None = None
) -> None:
    """Give the parser these flags; one that is not typed leaves no trace in the namespace.

    ``defaults``: by field, in words, what a command takes that is not ``Request``'s default.
    """
    section = parser.add_argument_group(group)
    for flag in flags:
        options: dict[str, Any] = {
            "dest": flag.field,
            "default": argparse.SUPPRESS,
            "help": _help(flag, (defaults or {}).get(flag.field)),
        }
        if flag.switch:
            options["action"] = "store_true"
        else:
            options["metavar"] = flag.metavar or f"{{{','.join(choices(flag.field))}}}"
            if flag.several:
                options["nargs"] = "+"
        section.add_argument(f"--{flag.name}", **options)


def typed_values(arguments: argparse.Namespace) -> dict[str, object]:
    """What was typed, by the field of ``Request`` that it sets."""
    typed = {name: value for name, value in vars(arguments).items() if name in Request.__struct_fields__ and value is not None}
    for flag in TRIAL_FLAGS:
        values = typed.get(flag.field)
        if flag.several and values and "model" not in typed and not values[-1].lstrip("-").isdecimal():
            typed |= {"model": values[-1], flag.field: values[:-1]}  # `--gpus 1 2 MODEL`: argparse gives all three to the flag
    return typed


def words_of(values: Mapping[str, object]) -> list[str]:
    """The words that set these fields."""
    words: list[str] = []
    for name, value in values.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words


def _help(flag: Flag, default: str | None) -> str:
    field = next(field for field in fields(Request) if field.name == flag.field)
    description = next(extra.description or "" for extra in get_args(field.type) if isinstance(extra, Meta))
    is_silent = field.default in (None, False, 0) or "default" in description
    shown = "" if default is None and is_silent else f" (default: {default or _spelled(field.default)})"
    return f"{description}{shown}".replace("%", "%%")


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
