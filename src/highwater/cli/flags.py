"""The flags of every command: those of a request are written from the settings' declarations."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from highwater.errors import UsageError
from highwater.nouns.attention_bench import DIRECTIONS, IMPLEMENTATIONS, BenchDtype
from highwater.nouns.corpus import LongDocuments, TrainedTokens
from highwater.nouns.declaration import SWITCH, CommandName, Setting, Topic, flag_of, words_of
from highwater.nouns.request import DECLARED, PACKINGS, TOPICS, Request, request_from
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


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give the parser ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_output(parser: argparse.ArgumentParser, forms: str) -> None:
    """Give the parser ``-o``, the new file that an answer goes to in one of these forms."""
    parser.add_argument("-o", "--output", metavar="FILE", help=f"write it into a new file: {forms}")


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
            if value == values and value not in row.choices and "model" not in typed:
                # `--offload MODEL`: argparse gives it to the flag
                typed["model"], value = values, True
            typed[row.name] = value
    return typed


def request_of(arguments: argparse.Namespace) -> Request:
    """The request in the file of ``--config``, if any, and the flags over it. Raises UsageError for
    a file that cannot be read, and for settings that cannot be.
    """
    typed, from_file = typed_values(arguments), dict[str, Any]()
    if arguments.config is not None:
        from highwater.cli.config import settings_in  # without a file nobody waits for YAML

        from_file = settings_in(arguments.config, typed.get("model"))
    return layered(from_file, typed)


def layered(*layers: Mapping[str, Any]) -> Request:
    """The request of settings, each layer over those before it."""
    values: dict[str, Any] = {}
    for named in layers:
        overridden = PACKINGS if any(name in named for name in PACKINGS) else ()
        values = {name: values[name] for name in values if name not in overridden} | {**named}
    return request_from(values)


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
        return f"{{{','.join(row.choices)}}}"
    return row.metavar or row.kind.metavar


def _help(row: Setting, command: CommandName) -> str:
    """What the setting is, and its default unless that is nothing, or said already."""
    default, named = row.default, row.defaults.get(command)
    said = row.helps.get(command, row.help)
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


def show_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater show``."""
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="a study's file; default: the newest one"
    )
    parser.add_argument(
        "--as",
        dest="as_",
        choices=("table", "published", "lines", "json"),
        default="table",
        help="how to show it",
    )
    _add_newest_study(parser)


def report_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater report``."""
    parser.add_argument(
        "study", nargs="?", metavar="STUDY", help="a study's file; default: the newest one"
    )
    add_output(parser, ".html, .md, .csv or .json; default: print Markdown")
    add_json(parser)
    _add_newest_study(parser)


def profile_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater profile``."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a snapshot that `torch.cuda.memory._dump_snapshot` wrote, a timeline of "
        "`highwater predict --exact`, or a folder of ranks' snapshots, of which the fullest is "
        "shown; two: side by side",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page into a new file: timeline and flame graph"
    )
    add_json(parser)


def _add_newest_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        default="./logs",
        help="where to look for the newest study (default: ./logs)",
    )


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater bench``, but ``--json``, which every command has."""
    add = parser.add_argument
    add("subject", choices=("attention",), metavar="SUBJECT", help="what is measured: attention")
    add("--device", choices=get_args(Device), help="where; default: cuda where there is a GPU")
    add(
        "--memory",
        metavar="SIZE",
        help="memory of each GPU, or of each process on the CPU, its runtime included: 8GiB on a "
        "big card stands in for a small one; default: all, on the CPU what is free",
    )
    add(
        "--gpus",
        metavar="N",
        type=int,
        default=1,
        help="from 2 on also DataParallel, ring and Ulysses; on the CPU processes (default: 1)",
    )
    add("--heads", metavar="N", type=int, default=2, help="query heads (default: 2)")
    add("--kv-heads", metavar="N", type=int, help="key and value heads; default: as many")
    add("--head-dim", metavar="N", type=int, default=32, help="size of a head (default: 32)")
    add(
        "--dtype",
        choices=get_args(BenchDtype),
        help="default: bf16, on the CPU fp32, on GPUs without bf16 fp16",
    )
    add(
        "--same-qkv",
        action="store_true",
        help="queries, keys and values are one tensor, counted once: the published setting",
    )
    add(
        "--lengths",
        metavar="TOKENS",
        nargs="+",
        help="measure at these lengths alone; default: doubling, then bisection to the longest",
    )
    add(
        "--max-length",
        metavar="TOKENS",
        help="longest length to try; default: 16m tokens, on the CPU 4k",
    )
    add(
        "--implementations",
        metavar="NAME",
        nargs="+",
        default=[],
        help="who takes part, by name, family or published class: "
        f"{', '.join(IMPLEMENTATIONS)}; default: all",
    )
    add_trained(parser, PATTERN_FIELDS, what_for="")
    add(
        "--segment-lengths",
        metavar="TOKENS",
        nargs="+",
        help="dilated and block_sparse_ring_dilated: tokens of a segment of each branch; default: "
        "half the length and all of it",
    )
    add(
        "--dilation-rates",
        metavar="N",
        nargs="+",
        type=int,
        help="a rate for each of them, 2 for every second token; default: 1 2, and 4, 8, ... for "
        "more segments",
    )
    add("--only", choices=DIRECTIONS, help="one direction; default: both")
    add("--timeout", metavar="TIME", help="longest time of one pass; default: 60s, on the CPU 10s")
    add(
        "--out",
        metavar="DIR",
        help="folder of the report, JSON and Markdown; default: a new one below ./logs/attention",
    )
    add("--allow-busy", action="store_true", help="also on GPUs that somebody else uses")
