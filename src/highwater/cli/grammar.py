"""The grammar of ``highwater``: its commands and their flags. Those that set a request are written
from the settings' declarations.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_args

from highwater.cli.flags import (
    JSON,
    SEVERAL,
    Row,
    add_bench_flags,
    add_flags,
    add_settings,
    add_train_flags,
    add_trained,
    output_row,
    profile_flags,
    report_flags,
    show_flags,
)
from highwater.cli.parser import COMMANDS, SHELLS, Parser, groups, parse_strictly
from highwater.errors import UsageError
from highwater.nouns.declaration import CommandName
from highwater.nouns.declared_settings import DECLARED
from highwater.nouns.foreign_trainer import FOREIGN
from highwater.nouns.refusals import nearest
from highwater.nouns.secrets import hidden_words
from highwater.nouns.settings import TRAINED_OTHERWISE
from highwater.nouns.trainer import OURS, TRAINERS, Target, TrainerName
from highwater.version import __version__


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
        if name in _FLAGS:
            _FLAGS[name](subparser)
    return parser


_MODEL: Row = (DECLARED["model"].name, "MODEL", DECLARED["model"].help, {"nargs": "?"})
_LENGTH: Row = ("--length", "TOKENS", "tokens of one sequence, for example 64k")
_ROLLOUT: Row = (
    *("--rollout-gpus", "K", "of the GPUs, those that roll out: the others are the trainer's"),
    {"default": 0},
)
_STUDIES: Row = (
    *("--study", "STUDY"),
    "studies that `highwater find` wrote: what they measured is taken, the rest predicted",
    {"dest": "studies", **SEVERAL},
)
_CATALOG: tuple[Row, ...] = (
    ("words", "WORD", "list those whose names have it; default: all", {"nargs": "*"}),
    JSON,
)


def _find_flags(parser: Parser) -> None:
    _model_and_config(parser)
    add_flags(
        parser,
        ("--print-config", "", "print the configuration that asks the same, and exit"),
        ("--print-sbatch", "", "print the script that asks the same as a job of Slurm, and exit"),
    )
    add_settings(parser, "find", "trial", heading="a trial")
    add_settings(parser, "find", "lengths", "search", heading="the search")
    add_settings(parser, "find", "machines", heading="where trials run")
    _hyperparameters(parser, "find")


def _try_flags(parser: Parser) -> None:
    _model_and_config(parser)
    length = "tokens of one sequence, for example 32k"
    add_flags(parser, ("--length", "TOKENS", length, {"required": True}))
    add_settings(parser, "try", "trial", heading="the trial")
    _hyperparameters(parser, "try")


def _train_flags(parser: Parser) -> None:
    _model_and_config(parser)
    add_train_flags(parser)
    add_settings(parser, "train", "trial", heading="the step")
    add_settings(parser, "train", "machines", heading="several machines")
    _hyperparameters(parser, "train")


def _model_and_config(parser: Parser) -> None:
    config = "YAML file of settings; flags override it"
    add_flags(parser, _MODEL, ("--config", "FILE", config), JSON)


def _hyperparameters(parser: Parser, command: CommandName) -> None:
    add_settings(parser, command, "optimizer", heading="the optimizer, which changes no memory")
    heading = "what --objective grpo, ppo and dpo weigh and clip, which changes no memory"
    add_settings(parser, command, "objective", heading=heading)


def _predict_flags(parser: Parser) -> None:
    _gpus_that_need_not_be_here(parser)
    _trainer(parser)
    add_flags(
        parser,
        ("--length", "TOKENS", "turn it round: which rungs fit this length"),
        (
            *("--exact", ""),
            "trace the engine's own steps on fake tensors, minutes instead of milliseconds",
        ),
        (
            *("--timeline", "FILE"),
            "with --exact: write every allocation for PyTorch's viewer, "
            "https://pytorch.org/memory_viz",
        ),
        (
            *("--calibrate", "STUDY"),
            "studies that `highwater find` wrote: intervals are learned from their trials too",
            SEVERAL,
        ),
        (
            *("--constants", "FILE"),
            "what `highwater doctor --measure --json` printed on such GPUs: context, cuBLAS and "
            "NCCL as read there",
        ),
        (
            *("--explain", ""),
            "what ends each row, how good such predictions were, and bytes by term at the peak; "
            "with --exact tensors by operator",
        ),
        (
            *("--against", "CSV"),
            "compare with known capacities: gpu, settings, gpus, sp, model, max_model_len",
        ),
    )
    add_settings(parser, "predict", "trial", "lengths", "search", heading="settings and lengths")


def _guide_flags(parser: Parser) -> None:
    add_flags(
        parser,
        (
            *("sources", "SOURCE"),
            "a study's file, a CSV of known capacities (gpu, settings, gpus, sp, model, "
            "max_model_len; 0: nothing fits, empty: unknown), or the .json of "
            "`highwater predict --json`",
            {"nargs": "*"},
        ),
        ("--predict", "MODEL", "models whose capacities are predicted by formula", SEVERAL),
        *_kind_of_gpus("4xA100-80GB 8xH100-80GB", SEVERAL),
    )
    _trainer(parser)
    of_so_many = "what is predicted is of so many; default: as `predict`"
    add_flags(
        parser,
        ("--sequences-per-micro-batch", "N", of_so_many),
        *(
            (f"--{name}", "N", f"what is predicted has {what}; default: {default}", SEVERAL)
            for name, what, default in (
                ("ulysses", "these ulysses degrees", "as `predict`"),
                ("ring", "these ring degrees", "no ring"),
                ("copies", "so many copies of the states", "one"),
            )
        ),
    )
    add_trained(parser, TRAINED_OTHERWISE)
    output = output_row("a page (.html), or Markdown (.md); default: print it")
    add_flags(parser, output, ("--json", "", "print its rows as one JSON document"))


def _recommend_flags(parser: Parser) -> None:
    _gpus_that_need_not_be_here(parser)
    _trainer(parser, and_tried=True)
    add_flags(
        parser,
        *(_LENGTH, _ROLLOUT, _STUDIES),
        ("--list", "", "all settings that fit, with what each costs", {"dest": "list_"}),
        (
            *("--explain", ""),
            "what the answer is drawn from, how good such answers were, and what is not in it",
        ),
    )
    add_settings(parser, "recommend", "trial", "lengths", "search", heading="settings")


def _emit_flags(parser: Parser) -> None:
    whose = {"dest": "for_", "choices": get_args(Target), "required": True}
    add_flags(
        parser,
        ("--for", "", "whose configuration", whose),
        (
            *("-o --output", "DIR"),
            "write all files into a folder, with a script that starts the training and a page of "
            "what to check; nothing that is there is written over",
        ),
    )
    _gpus_that_need_not_be_here(parser)
    add_flags(parser, _LENGTH, _ROLLOUT, _STUDIES)
    add_settings(parser, "emit", "trial", "lengths", "search", heading="settings")


def _trainer(parser: Parser, *, and_tried: bool = False) -> None:
    """``--trainer``; ``and_tried``: those too that are not predicted, whose studies answer."""
    studies = "; of others their studies answer" if and_tried else ""
    parser.add_argument(
        "--trainer",
        dest="predicted_for",
        choices=tuple(dict.fromkeys((*TRAINERS, *FOREIGN))) if and_tried else tuple(TRAINERS),
        type=str if and_tried else _predicted,
        default=OURS,
        help=f"whose step is predicted{studies} (default: {OURS})",
    )


def _predicted(name: str) -> TrainerName:
    """The trainer of this name; raises UsageError for one whose memory nobody predicts."""
    for known in TRAINERS:
        if name == known:
            return known
    for tried, traits in FOREIGN.items():
        if name == tried:
            raise UsageError(
                f"the memory of {traits.title} is not predicted: `highwater find --trainer "
                f"{name}` finds its capacity by trials",
                hint=f"leave `--trainer {name}` out",
            )
    near = nearest(name, tuple(TRAINERS)) or OURS
    raise UsageError(
        f"trainer {name!r} is not one of {', '.join(TRAINERS)}", hint=f"use `--trainer {near}`"
    )


def _gpus_that_need_not_be_here(parser: Parser) -> None:
    add_flags(
        parser,
        *(_MODEL, JSON, *_kind_of_gpus("4xA100-80GB")),
        (
            *("--host-memory", "SIZE"),
            "a machine's memory; default: this machine's, or what machines with such GPUs usually "
            "have",
        ),
        (
            *("--reserved", "SIZE", "what others take of each GPU, for example 20GiB"),
            {"default": "0"},
        ),
    )


def _kind_of_gpus(
    example: str, several: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Row, Row]:
    return (
        (
            *("--gpus", "[[M x] N x]KIND"),
            f"for example {example}, or 2x8xH100-80GB of two machines; default: this machine's; "
            "`highwater gpus` lists the kinds",
            {"dest": "cluster", **several},
        ),
        (
            *("--gpu-memory", "SIZE"),
            "memory of one GPU as its driver reports it, for a kind of no catalog",
        ),
    )


_FLAGS: Mapping[str, Callable[[Parser], None]] = {
    "find": _find_flags,
    "try": _try_flags,
    "train": _train_flags,
    "predict": _predict_flags,
    "guide": _guide_flags,
    "recommend": _recommend_flags,
    "emit": _emit_flags,
    "show": show_flags,
    "report": report_flags,
    "profile": profile_flags,
    "models": lambda parser: add_flags(parser, *_CATALOG),
    "gpus": lambda parser: add_flags(parser, *_CATALOG),
    "doctor": lambda parser: add_flags(
        parser,
        (
            *("--measure", ""),
            "read on the GPUs what libraries take of their memory, half a minute each count",
        ),
        JSON,
    ),
    "completion": lambda parser: add_flags(
        parser, ("shell", "SHELL", ", ".join(SHELLS), {"choices": SHELLS})
    ),
    "bench": add_bench_flags,
}
"""The function that adds the flags of each command, by the command's name; ``schema`` has none."""
