"""The flags of every command: those of a request are written from the settings' declarations."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from msgspec.structs import fields

from highwater.errors import UsageError
from highwater.nouns.attention_bench import DIRECTIONS, IMPLEMENTATIONS, BenchDtype
from highwater.nouns.corpus import LongDocuments, TrainedTokens
from highwater.nouns.declaration import SWITCH, CommandName, Setting, flag_of, words_of
from highwater.nouns.declared_settings import DECLARED, TOPICS, Topic
from highwater.nouns.request import Request, choices
from highwater.nouns.settings import PATTERN_FIELDS
from highwater.nouns.trainer import OURS
from highwater.nouns.training import ScheduleName, TrainingRequest, training_request_from
from highwater.nouns.trial import Device


def add_settings(
    parser: argparse.ArgumentParser, command: CommandName, *topics: Topic, heading: str
) -> None:
    """Give the parser the flags of these topics that a command takes; one that is not typed leaves
    no trace in the namespace.
    """
    section = parser.add_argument_group(heading)
    for row in (row for topic in topics for row in TOPICS[topic] if command in row.commands):
        options: dict[str, Any] = {
            "dest": row.name,
            "default": argparse.SUPPRESS,
            "help": _help(row, command),
        }
        if row.kind is SWITCH:
            options["action"] = "store_true"
        else:
            options["metavar"] = _metavar(row)
            if row.is_list:
                options["nargs"] = "+"
            elif row.stands_alone:
                options |= {"nargs": "?", "const": True}
        section.add_argument(row.flag, **options)


def add_trained(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    what_for: str = "what is predicted is trained so: ",
) -> None:
    """Give the parser flags of settings that say what is trained, None where they are not typed."""
    for row in (DECLARED[name] for name in names):
        what = f"{what_for}{row.help}".replace("%", "%%")
        parser.add_argument(row.flag, dest=row.name, metavar=_metavar(row), help=what)


Row = tuple[str, str, str] | tuple[str, str, str, dict[str, Any]]
"""A flag: its names, its metavar, its help, and what else argparse is told of it."""
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
JSON: Row = ("--json", "", "print one JSON document")


def add_flags(parser: argparse.ArgumentParser, *rows: Row, heading: str | None = None) -> None:
    """Give the parser these flags. One without a metavar has choices, or is a switch; N and K are
    whole numbers.
    """
    section = parser if heading is None else parser.add_argument_group(heading)
    for names, metavar, said, *more in rows:
        options: dict[str, Any] = {"metavar": metavar} if metavar else {}
        options |= {"type": int} if metavar in ("N", "K") else {}
        options |= more[0] if more else {}
        options |= {} if metavar or "choices" in options else {"action": "store_true"}
        section.add_argument(*names.split(), help=said, **options)


def typed_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was typed, by the field of ``Request`` that it sets."""
    typed = {
        name: value
        for name, value in vars(arguments).items()
        if name in DECLARED and value is not None
    }
    for row in DECLARED.values():
        values = typed.get(row.name)
        if (
            row.is_list
            and isinstance(values, list)
            and values
            and "model" not in typed
            and not values[-1].lstrip("-").isdecimal()
        ):
            # `--gpus 1 2 MODEL`: argparse gives all three to the flag
            typed |= {"model": values[-1], row.name: values[:-1]}
        if row.stands_alone and isinstance(values, str) and values:
            value = {"true": True, "false": False}.get(values.lower(), values)
            if value == values and value not in choices(row.name) and "model" not in typed:
                # `--offload MODEL`: argparse gives it to the flag
                typed["model"], value = values, True
            typed[row.name] = value
    return typed


def named_model(
    arguments: argparse.Namespace, others: list[str], *, example: str
) -> tuple[str, dict[str, Any]]:
    """The model that was typed, and the settings; raises UsageError without a model. ``others`` are
    the values of a flag before the model, which argparse takes for one more of them.
    """
    if arguments.model is None and len(others) > 1:
        arguments.model = others.pop()
    settings = typed_values(arguments)
    vars(arguments).update(settings)
    model = settings.pop("model", None)
    if model is None:
        raise UsageError(
            "no model is named",
            hint=f"name a directory, an id of the Hub or a catalog model: `{example}`",
        )
    return str(model), settings


def typed_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The memory that GPUs and their machine have for training, as keywords of ``predict``."""
    names = ("gpu_memory", "host_memory", "reserved")
    return {name: getattr(arguments, name) for name in names}


def words_again(
    arguments: argparse.Namespace, *, drop: tuple[str, ...] = (), **changed: str
) -> list[str]:
    """What was typed, for a prediction or a recommendation, as flags, with changes."""
    typed: dict[str, object] = {
        "--gpus": arguments.cluster,
        "--length": arguments.length,
        "--rollout-gpus": getattr(arguments, "rollout_gpus", 0) or None,
        "--trainer": None if arguments.predicted_for == OURS else arguments.predicted_for,
        "--study": getattr(arguments, "studies", ()) or None,
        "--gpu-memory": arguments.gpu_memory,
        "--host-memory": arguments.host_memory,
        "--reserved": None if arguments.reserved == "0" else arguments.reserved,
    }
    settings = {name: value for name, value in typed_values(arguments).items() if name != "model"}
    typed |= {flag_of(name): value for name, value in settings.items()}
    kept: Mapping[str, object] = {
        name: value for name, value in typed.items() if value is not None and name not in drop
    }
    return words_of(
        {name.removeprefix("--"): value for name, value in ({**kept, **changed}).items()}
    )


def _metavar(row: Setting) -> str | None:
    if row.kind is None:
        return f"{{{','.join(choices(row.name))}}}"
    return row.metavar or row.kind.metavar


def _help(row: Setting, command: CommandName) -> str:
    """What the setting is, and its default unless that is nothing, or said already."""
    default = next(field.default for field in fields(Request) if field.name == row.name)
    said = row.helps.get(command, row.help)
    named = row.defaults.get(command)
    if named is None and (default in (None, False, 0) or "default" in said):
        shown = ""
    else:
        shown = f" (default: {named or _spelled(default)})"
    return f"{said}{shown}".replace("%", "%%")


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


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
    add_flags(
        parser,
        (
            *("--data", "PATH"),
            "files to train on (.jsonl, .parquet, .txt, .md), folders of them, or what `datasets` "
            "saved",
            {"dest": "training_data", **SEVERAL},
        ),
        ("--eval-data", "PATH", "evaluated, and never trained on", SEVERAL),
        ("--length", "TOKENS", "tokens of the longest sequence, for example 32k"),
        (
            *("--long-documents", ""),
            "what becomes of a longer document: its beginning is trained, or all of it in pieces, "
            "or nothing is (default: truncate)",
            {"choices": get_args(LongDocuments)},
        ),
        (
            *("--train-on", ""),
            "tokens that are trained on: responses, where documents have prompts, or all "
            "(default: responses)",
            {"choices": get_args(TrainedTokens)},
        ),
        (
            *("--reward", "MODULE:FUNCTION"),
            "--objective grpo, ppo: gives the reward of a response; default: the data has it",
        ),
        heading="the data",
    )
    add_flags(
        parser,
        ("--steps", "N", "optimizer steps in all", {"dest": "training_steps"}),
        (
            *("-o --output", "DIR"),
            "the run's folder: checkpoints, statistics, log, and the model; the same command goes "
            "on after the last checkpoint in it",
        ),
        (
            *("--settings", "{recommended,STUDY}"),
            "whose settings: those recommended for the length, or those that a study of "
            "`highwater find` measured; default: those that are named, and recommended ones where "
            "none is",
            {"dest": "settings_from"},
        ),
        (
            *("--rows", "N"),
            "rows of up to --length tokens in a step, over all GPUs (the global batch; default: 2 "
            "for each GPU, or group of GPUs that share a sequence)",
        ),
        (
            *("--resume-from", "CHECKPOINT"),
            "go on from this one, for example step-000100; default: the latest",
        ),
        (
            *("--schedule", "", "course of the learning rate (default: constant)"),
            {"choices": get_args(ScheduleName)},
        ),
        ("--warmup-steps", "N", "steps over which the learning rate rises (default: none)"),
        (
            *("--eval-every", "N"),
            "steps between evaluations (default: before the first and after the last)",
        ),
        ("--save-every", "N", "steps between checkpoints (default: after the last)"),
        ("--seed", "N", "seed of the data's order, of dropout and of weights that are not there"),
        heading="the run",
    )


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


_A_STUDY = "a study's file; default: the newest one"
_NEWEST: Row = (
    *("--log-dir", "DIR", "where to look for the newest study (default: ./logs)"),
    {"default": "./logs"},
)


def show_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater show``."""
    forms = ("table", "published", "lines", "json")
    as_ = {"dest": "as_", "choices": forms, "default": "table"}
    add_flags(
        parser,
        ("studies", "STUDY", _A_STUDY, {"nargs": "*"}),
        ("--as", "", "how to show it", as_),
        _NEWEST,
    )


def report_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater report``."""
    add_flags(
        parser,
        ("study", "STUDY", _A_STUDY, {"nargs": "?"}),
        output_row(".html, .md, .csv or .json; default: print Markdown"),
        *(JSON, _NEWEST),
    )


def output_row(forms: str) -> Row:
    """``-o``, the new file that an answer goes to in one of these forms."""
    return "-o --output", "FILE", f"write it into a new file: {forms}"


def profile_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater profile``."""
    add_flags(
        parser,
        (
            *("paths", "PATH"),
            "a snapshot that `torch.cuda.memory._dump_snapshot` wrote, a timeline of "
            "`highwater predict --exact`, or a folder of ranks' snapshots, of which the fullest is "
            "shown; two: side by side",
            {"nargs": "+"},
        ),
        ("--html", "FILE", "write a page into a new file: timeline and flame graph"),
        JSON,
    )


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater bench``."""
    add_flags(
        parser,
        (
            *("subject", "SUBJECT", "what is measured: attention"),
            {"choices": ("attention",)},
        ),
        (
            *("--device", "", "where; default: cuda where there is a GPU"),
            {"choices": get_args(Device)},
        ),
        (
            *("--memory", "SIZE"),
            "memory of each GPU, or of each process on the CPU, its runtime included: 8GiB on a "
            "big card stands in for a small one; default: all, on the CPU what is free",
        ),
        (
            *("--gpus", "N"),
            "from 2 on also DataParallel, ring and Ulysses; on the CPU processes (default: 1)",
            {"default": 1},
        ),
        ("--heads", "N", "query heads (default: 2)", {"default": 2}),
        ("--kv-heads", "N", "key and value heads; default: as many"),
        ("--head-dim", "N", "size of a head (default: 32)", {"default": 32}),
        (
            *("--dtype", "", "default: bf16, on the CPU fp32, on GPUs without bf16 fp16"),
            {"choices": get_args(BenchDtype)},
        ),
        (
            *("--same-qkv", ""),
            "queries, keys and values are one tensor, counted once: the published setting",
        ),
        (
            *("--lengths", "TOKENS"),
            "measure at these lengths alone; default: doubling, then bisection to the longest",
            {"nargs": "+"},
        ),
        (
            *("--max-length", "TOKENS"),
            "longest length to try; default: 16m tokens, on the CPU 4k",
        ),
        (
            *("--implementations", "NAME"),
            "who takes part, by name, family or published class: "
            f"{', '.join(IMPLEMENTATIONS)}; default: all",
            {"nargs": "+", "default": []},
        ),
    )
    add_trained(parser, PATTERN_FIELDS, what_for="")
    add_flags(
        parser,
        (
            *("--segment-lengths", "TOKENS"),
            "dilated and block_sparse_ring_dilated: tokens of a segment of each branch; default: "
            "half the length and all of it",
            {"nargs": "+"},
        ),
        (
            *("--dilation-rates", "N"),
            "a rate for each of them, 2 for every second token; default: 1 2, and 4, 8, ... for "
            "more segments",
            {"nargs": "+"},
        ),
        ("--only", "", "one direction; default: both", {"choices": DIRECTIONS}),
        ("--timeout", "TIME", "longest time of one pass; default: 60s, on the CPU 10s"),
        (
            *("--out", "DIR"),
            "folder of the report, JSON and Markdown; default: a new one below ./logs/attention",
        ),
        ("--allow-busy", "", "also on GPUs that somebody else uses"),
        JSON,
    )
