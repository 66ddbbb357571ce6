"""The flags of ``highwater train`` that no trial has."""

import argparse
from typing import Any, get_args

from highwater.errors import UsageError
from highwater.nouns.corpus import LongDocuments, TrainedTokens
from highwater.nouns.training import ScheduleName
from highwater.nouns.training_request import TrainingRequest, training_request_from

_FIELDS = {
    "training_data": "data",
    "length": "length",
    "training_steps": "steps",
    "output": "output",
    "settings_from": "settings",
    "eval_data": "eval_data",
    "rows": "rows",
    "schedule": "schedule",
    "warmup_steps": "warmup_steps",
    "eval_every": "eval_every",
    "save_every": "save_every",
    "long_documents": "long_documents",
    "train_on": "train_on",
    "reward": "reward",
    "resume_from": "resume_from",
    "seed": "seed",
}
"""Fields of a training request by the names of their parsed flags, which differ where a search's
flag of that name means something else."""


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser what is trained on, for how long, and where it goes."""
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    data = parser.add_argument_group("the data")
    data.add_argument(
        "--data",
        dest="training_data",
        metavar="PATH",
        help="files to train on (.jsonl, .parquet, .txt, .md), folders of them, or what `datasets` "
        "saved",
        **several,
    )
    data.add_argument(
        "--eval-data", metavar="PATH", help="evaluated, and never trained on", **several
    )
    data.add_argument(
        "--length", metavar="TOKENS", help="tokens of the longest sequence, for example 32k"
    )
    data.add_argument(
        "--long-documents",
        choices=get_args(LongDocuments),
        help="what becomes of a longer document: its beginning is trained, or all of it in pieces, "
        "or nothing is (default: truncate)",
    )
    data.add_argument(
        "--train-on",
        choices=get_args(TrainedTokens),
        help="tokens that are trained on: responses, where documents have prompts, or all "
        "(default: responses)",
    )
    data.add_argument(
        "--reward",
        metavar="MODULE:FUNCTION",
        help="--objective grpo, ppo: gives the reward of a response; default: the data has it",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--steps", dest="training_steps", metavar="N", type=int, help="optimizer steps in all"
    )
    run.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="the run's folder: checkpoints, statistics, log, and the model; the same command goes "
        "on after the last checkpoint in it",
    )
    run.add_argument(
        "--settings",
        dest="settings_from",
        metavar="{recommended,STUDY}",
        help="whose settings: those recommended for the length, or those that a study of "
        "`highwater find` measured; default: those that are named, and "
        "recommended ones where none is",
    )
    run.add_argument(
        "--rows",
        metavar="N",
        type=int,
        help="rows of up to --length tokens in a step, over all GPUs (the global batch; default: 2 "
        "for each GPU, or group of GPUs that share a sequence)",
    )
    run.add_argument(
        "--resume-from",
        metavar="CHECKPOINT",
        help="go on from this one, for example step-000100; default: the latest",
    )
    run.add_argument(
        "--schedule",
        choices=get_args(ScheduleName),
        help="course of the learning rate (default: constant)",
    )
    for name, what in (
        ("warmup-steps", "steps over which the learning rate rises (default: none)"),
        ("eval-every", "steps between evaluations (default: before the first and after the last)"),
        ("save-every", "steps between checkpoints (default: after the last)"),
        ("seed", "seed of the data's order, of dropout and of weights that are not there"),
    ):
        run.add_argument(f"--{name}", metavar="N", type=int, help=what)


def training_request_of(arguments: argparse.Namespace) -> TrainingRequest:
    """The training request that was typed; raises UsageError for what has to be named."""
    typed = {
        field: tuple(value) if isinstance(value, list) else value
        for name, field in _FIELDS.items()
        if (value := getattr(arguments, name)) not in (None, [])
    }
    for field, flag, what in (
        ("data", "--data data.jsonl", "nothing to train on is named"),
        ("length", "--length 8k", "no length is named"),
        ("steps", "--steps 100", "no number of steps is named"),
        ("output", "--output ./run", "no folder for the run is named"),
    ):
        if field not in typed:
            raise UsageError(what, hint=f"add it, for example `{flag}`")
    return training_request_from(typed)
