"""The grammar of ``highwater``: which command takes which flags; cli/flags writes them."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from highwater.cli.flags import (
    add_bench_flags,
    add_json,
    add_output,
    add_settings,
    add_train_flags,
    add_trained,
    profile_flags,
    report_flags,
    show_flags,
)
from highwater.cli.parser import COMMANDS, SHELLS, Parser, groups, parse_strictly
from highwater.errors import UsageError
from highwater.nouns.declaration import CommandName, nearest
from highwater.nouns.foreign_trainer import FOREIGN
from highwater.nouns.request import DECLARED
from highwater.nouns.secrets import hidden_words
from highwater.nouns.settings import TRAINED_OTHERWISE
from highwater.nouns.trainer import OURS, TRAINERS, Target, TrainerName, trainer_title
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


def _find_flags(parser: Parser) -> None:
    _model_and_config(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the configuration that asks the same, and exit",
    )
    parser.add_argument(
        "--print-sbatch",
        action="store_true",
        help="print the script that asks the same as a job of Slurm, and exit",
    )
    add_settings(parser, "find", "trial", heading="a trial")
    add_settings(parser, "find", "lengths", "search", heading="the search")
    add_settings(parser, "find", "machines", heading="where trials run")
    _hyperparameters(parser, "find")


def _try_flags(parser: Parser) -> None:
    _model_and_config(parser)
    parser.add_argument(
        "--length", metavar="TOKENS", required=True, help="tokens of one sequence, for example 32k"
    )
    add_settings(parser, "try", "trial", heading="the trial")
    _hyperparameters(parser, "try")


def _train_flags(parser: Parser) -> None:
    _model_and_config(parser)
    add_train_flags(parser)
    add_settings(parser, "train", "trial", heading="the step")
    add_settings(parser, "train", "machines", heading="several machines")
    _hyperparameters(parser, "train")


def _hyperparameters(parser: Parser, command: CommandName) -> None:
    add_settings(parser, command, "optimizer", heading="the optimizer, which changes no memory")
    add_settings(
        parser,
        command,
        "objective",
        heading="what --objective grpo, ppo and dpo weigh and clip, which changes no memory",
    )


def _predict_flags(parser: Parser) -> None:
    _gpus_that_need_not_be_here(parser)
    _trainer(parser)
    parser.add_argument(
        "--length", metavar="TOKENS", help="turn it round: which rungs fit this length"
    )
    _basis_flags(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="what ends each row, how good such predictions were, and bytes by term at the peak; "
        "with --exact tensors by operator",
    )
    parser.add_argument(
        "--against",
        metavar="CSV",
        help="compare with known capacities: gpu, settings, gpus, sp, model, max_model_len",
    )
    add_settings(parser, "predict", "trial", "lengths", "search", heading="settings and lengths")


def _basis_flags(parser: Parser) -> None:
    """What a prediction is made from, besides the formula."""
    parser.add_argument(
        "--exact",
        action="store_true",
        help="trace the engine's own steps on fake tensors, minutes instead of milliseconds",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="with --exact: write every allocation for PyTorch's viewer, "
        "https://pytorch.org/memory_viz",
    )
    parser.add_argument(
        "--calibrate",
        metavar="STUDY",
        nargs="+",
        action="extend",
        default=[],
        help="studies that `highwater find` wrote: intervals are learned from their trials too",
    )
    parser.add_argument(
        "--constants",
        metavar="FILE",
        help="what `highwater doctor --measure --json` printed on such GPUs: context, cuBLAS and "
        "NCCL as read there",
    )


def _guide_flags(parser: Parser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a study's file, a CSV of known capacities (gpu, settings, gpus, sp, model, "
        "max_model_len; 0: nothing fits, empty: "
        "unknown), or the .json of `highwater predict --json`",
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument(
        "--predict",
        metavar="MODEL",
        help="models whose capacities are predicted by formula",
        **several,
    )
    _kind_of_gpus(parser, "4xA100-80GB 8xH100-80GB", **several)
    _trainer(parser)
    parser.add_argument(
        "--sequences-per-micro-batch",
        metavar="N",
        type=int,
        help="what is predicted is of so many; default: as `predict`",
    )
    for name, what, default in (
        ("ulysses", "these ulysses degrees", "as `predict`"),
        ("ring", "these ring degrees", "no ring"),
        ("copies", "so many copies of the states", "one"),
    ):
        text = f"what is predicted has {what}; default: {default}"
        parser.add_argument(f"--{name}", metavar="N", type=int, help=text, **several)
    add_trained(parser, TRAINED_OTHERWISE)
    add_output(parser, "a page (.html), or Markdown (.md); default: print it")
    parser.add_argument("--json", action="store_true", help="print its rows as one JSON document")


def _recommend_flags(parser: Parser) -> None:
    _gpus_that_need_not_be_here(parser)
    _trainer(parser, and_tried=True)
    _length_and_rollout(parser)
    _studies(parser)
    parser.add_argument(
        "--list",
        dest="list_",
        action="store_true",
        help="all settings that fit, with what each costs",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="what the answer is drawn from, how good such answers were, and what is not in it",
    )
    add_settings(parser, "recommend", "trial", "lengths", "search", heading="settings")


def _emit_flags(parser: Parser) -> None:
    parser.add_argument(
        "--for", dest="for_", choices=get_args(Target), required=True, help="whose configuration"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write all files into a folder, with a script that starts the training and a page of "
        "what to check; nothing that is there is written over",
    )
    _gpus_that_need_not_be_here(parser)
    _length_and_rollout(parser)
    _studies(parser)
    add_settings(parser, "emit", "trial", "lengths", "search", heading="settings")


def _studies(parser: Parser) -> None:
    parser.add_argument(
        "--study",
        dest="studies",
        metavar="STUDY",
        nargs="+",
        action="extend",
        default=[],
        help="studies that `highwater find` wrote: what they measured is taken, the rest predicted",
    )


def _length_and_rollout(parser: Parser) -> None:
    parser.add_argument(
        "--length", metavar="TOKENS", help="tokens of one sequence, for example 64k"
    )
    parser.add_argument(
        "--rollout-gpus",
        metavar="K",
        type=int,
        default=0,
        help="of the GPUs, those that roll out: the others are the trainer's",
    )


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
    for tried in FOREIGN:
        if name == tried:
            raise UsageError(
                f"the memory of {trainer_title(tried)} is not predicted: `highwater find --trainer "
                f"{name}` finds its capacity by trials",
                hint=f"leave `--trainer {name}` out",
            )
    near = nearest(name, tuple(TRAINERS)) or OURS
    raise UsageError(
        f"trainer {name!r} is not one of {', '.join(TRAINERS)}", hint=f"use `--trainer {near}`"
    )


def _gpus_that_need_not_be_here(parser: Parser) -> None:
    _model(parser)
    add_json(parser)
    _kind_of_gpus(parser, "4xA100-80GB")
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="a machine's memory; default: this machine's, or what machines with such GPUs usually "
        "have",
    )
    parser.add_argument(
        "--reserved",
        metavar="SIZE",
        default="0",
        help="what others take of each GPU, for example 20GiB",
    )


def _kind_of_gpus(parser: Parser, example: str, **several: Any) -> None:
    text = (
        f"for example {example}, or 2x8xH100-80GB of two machines; default: this machine's; "
        "`highwater gpus` lists the kinds"
    )
    parser.add_argument("--gpus", dest="cluster", metavar="[[M x] N x]KIND", help=text, **several)
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one GPU as its driver reports it, for a kind of no catalog",
    )


def _model_and_config(parser: Parser) -> None:
    _model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags override it")
    add_json(parser)


def _model(parser: Parser) -> None:
    model = DECLARED["model"]
    parser.add_argument(model.name, nargs="?", metavar="MODEL", help=model.help)


def _catalog_flags(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="list those whose names have it; default: all"
    )
    add_json(parser)


def _doctor_flags(parser: Parser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="read on the GPUs what libraries take of their memory, half a minute each count",
    )
    add_json(parser)


def _completion_flags(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _bench_flags(parser: Parser) -> None:
    add_bench_flags(parser)
    add_json(parser)


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
    "models": _catalog_flags,
    "gpus": _catalog_flags,
    "doctor": _doctor_flags,
    "completion": _completion_flags,
    "bench": _bench_flags,
}
"""The function that adds the flags of each command, by the command's name; ``schema`` has none."""
