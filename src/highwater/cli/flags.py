"""The flags of every command, and what was typed. A flag is written from its declaration: at a
field of ``Request``, of ``TrainingRequest``, or of a noun below, for what a command alone has.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from highwater.errors import UsageError
from highwater.nouns import declaration as kinds
from highwater.nouns.attention_bench import IMPLEMENTATIONS, BenchDtype, Direction
from highwater.nouns.declaration import (
    COUNT,
    LENGTH,
    REQUIRED,
    SIZE,
    SWITCH,
    DeclaredRecord,
    Setting,
    flag_of,
    nearest,
    setting,
    words_of,
)
from highwater.nouns.request import DECLARED, PACKINGS, Request, request_from
from highwater.nouns.settings import PATTERN_FIELDS, TRAINED_OTHERWISE
from highwater.nouns.trainer import (
    FOREIGN,
    OURS,
    TRAINERS,
    AnyTrainer,
    Target,
    TrainerName,
    trainer_title,
)
from highwater.nouns.training import TrainingRequest, training_request_from
from highwater.nouns.trial import Device

Shell = Literal["bash", "zsh", "fish"]
_Texts = tuple[str, ...]
_WholeNumbers = tuple[int, ...]
_KIND = "[[M x] N x]KIND"
_TRAINING = "training_"
"""What the names of a training's flags begin with in a namespace: a trial has some of them too."""


def add_flags(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage] -- or a heading
    command: str,
    rows: Iterable[Setting],
) -> None:
    """Give a command's parser, or a heading of its help, the flags of these settings."""
    for row in rows:
        is_of_a_request = row is DECLARED.get(row.name) and not row.place
        options = _read_by_a_request(row) if is_of_a_request else _read_here(row)
        options["help"] = _help(row, command)
        if row.kind is SWITCH:
            options["action"] = "store_true"
        elif "choices" not in options:
            options["metavar"] = _metavar(row)
        names = (row.rung_field,) if row.place else (*filter(None, (row.short,)), row.flag)
        parser.add_argument(*names, **options)


def _read_by_a_request(row: Setting) -> dict[str, Any]:
    """A flag that is not typed leaves no trace in the namespace: a file may say it."""
    options: dict[str, Any] = {"dest": row.name, "default": argparse.SUPPRESS}
    if row.is_list:
        options["nargs"] = "+"
    elif row.stands_alone:
        options |= {"nargs": "?", "const": True}
    return options


def _read_here(row: Setting) -> dict[str, Any]:
    """How argparse reads a flag by the type of its field. A training's request says itself what is
    lacking.
    """
    if row.kind is SWITCH:
        return {"dest": row.rung_field}
    is_required = row.default is REQUIRED
    is_left = row.rung_field.startswith(_TRAINING)
    options: dict[str, Any] = {"default": None if is_required or is_left else row.default}
    if get_origin(row.type) is tuple:
        options |= {"default": [], "nargs": "+", "action": "store" if row.place else "extend"}
    if not row.place:
        options |= {"dest": row.rung_field, "required": is_required and not is_left}
    elif row.place != "1":
        options["nargs"] = row.place
    types = (row.type, *get_args(row.type))
    if row.read is not None or (int in types and str not in types):
        options["type"] = row.read or int
    if row.kind is None and row.choices:
        options |= {"choices": row.choices} | ({"metavar": row.metavar} if row.metavar else {})
    return options


def _metavar(row: Setting) -> str | None:
    if row.kind is None and row.choices:
        return f"{{{','.join(row.choices)}}}"
    return row.metavar or (row.kind and row.kind.metavar)


def _help(row: Setting, command: str) -> str:
    """What the setting is, and its default unless that is nothing, or said already."""
    default, said, named = row.default, row.helps.get(command, row.help), row.defaults.get(command)
    if named is None and (default in (None, False, 0, "0", (), REQUIRED) or "default" in said):
        shown = ""
    else:
        shown = f" (default: {named or _spelled(default)})"
    return f"{said}{shown}".replace("%", "%%")


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


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


_NEWEST = "a study's file; default: the newest one"
_ELSEWHERE = ("predict", "recommend", "emit")
"""Commands about GPUs that need not be here."""
_GPUS = (
    "or 2x8xH100-80GB of two machines; default: this machine's; `highwater gpus` lists the kinds"
)
_BENCH: dict[str, Any] = {"commands": ("bench",)}
_PREDICT: dict[str, Any] = {"commands": ("predict",)}
_GUIDE: dict[str, Any] = {"commands": ("guide",)}


class CommandFlags(DeclaredRecord, frozen=True, kw_only=True):
    """What commands are told besides the settings of a request and of a training."""

    for_: Target = setting(REQUIRED, "whose configuration", name="for", commands=("emit",))
    config: str | None = setting(
        None,
        "YAML file of settings; flags override it",
        kinds.FILE,
        commands=("find", "try", "train"),
    )
    subject: Literal["attention"] = setting(
        REQUIRED, "what is measured: attention", place="1", metavar="SUBJECT", **_BENCH
    )
    shell: Shell = setting(
        REQUIRED,
        ", ".join(get_args(Shell)),
        place="1",
        metavar="SHELL",
        commands=("completion",),
    )
    words: _Texts = setting(
        (),
        "list those whose names have it; default: all",
        place="*",
        metavar="WORD",
        commands=("models", "gpus"),
    )
    paths: _Texts = setting(
        REQUIRED,
        "a snapshot that `torch.cuda.memory._dump_snapshot` wrote, a timeline of "
        "`highwater predict --exact`, or a folder of ranks' snapshots, of which the fullest is "
        "shown; two: side by side",
        place="+",
        metavar="PATH",
        commands=("profile",),
    )
    shown: _Texts = setting(
        (), _NEWEST, place="*", metavar="STUDY", rung_field="studies", commands=("show",)
    )
    study: str | None = setting(None, _NEWEST, place="?", metavar="STUDY", commands=("report",))
    sources: _Texts = setting(
        (),
        "a study's file, a CSV of known capacities (gpu, settings, gpus, sp, model, "
        "max_model_len; 0: nothing fits, empty: unknown), or the .json of `highwater predict "
        "--json`",
        place="*",
        metavar="SOURCE",
        **_GUIDE,
    )
    as_: Literal["table", "published", "lines", "json"] = setting(
        "table", "how to show it", name="as", commands=("show",)
    )
    measure: bool = setting(
        False,
        "read on the GPUs what libraries take of their memory, half a minute each count",
        SWITCH,
        commands=("doctor",),
    )
    html: str | None = setting(
        None,
        "write a page into a new file: timeline and flame graph",
        kinds.FILE,
        commands=("profile",),
    )
    folder: str | None = setting(
        None,
        "write all files into a folder, with a script that starts the training and a page of "
        "what to check; nothing that is there is written over",
        kinds.DIRECTORY,
        name="output",
        rung_field="output",
        short="-o",
        commands=("emit",),
    )
    predict: _Texts = setting(
        (), "models whose capacities are predicted by formula", metavar="MODEL", **_GUIDE
    )
    output: str | None = setting(
        None,
        "write it into a new file: .html, .md, .csv or .json; default: print Markdown",
        kinds.FILE,
        short="-o",
        commands=("report", "guide"),
        helps={
            "guide": "write it into a new file: a page (.html), or Markdown (.md); default: print "
            "it"
        },
    )
    json: bool = setting(
        False,
        "print one JSON document",
        SWITCH,
        commands=(
            *(*_ELSEWHERE, "find", "try", "train", "guide", "report", "profile"),
            *("models", "gpus", "doctor", "bench"),
        ),
        helps={"guide": "print its rows as one JSON document"},
    )
    log_dir: str = setting(
        "./logs",
        "where to look for the newest study",
        kinds.DIRECTORY,
        commands=("show", "report"),
    )
    print_config: bool = setting(
        False, "print the configuration that asks the same, and exit", SWITCH, commands=("find",)
    )
    print_sbatch: bool = setting(
        False,
        "print the script that asks the same as a job of Slurm, and exit",
        SWITCH,
        commands=("find",),
    )
    tried_length: str = setting(
        REQUIRED,
        "tokens of one sequence, for example 32k",
        LENGTH,
        name="length",
        rung_field="length",
        commands=("try",),
    )
    cluster: str | None = setting(
        None, f"for example 4xA100-80GB, {_GPUS}", name="gpus", metavar=_KIND, commands=_ELSEWHERE
    )
    clusters: _Texts = setting(
        (),
        f"for example 4xA100-80GB 8xH100-80GB, {_GPUS}",
        name="gpus",
        rung_field="cluster",
        metavar=_KIND,
        **_GUIDE,
    )
    gpu_memory: str | None = setting(
        None,
        "memory of one GPU as its driver reports it, for a kind of no catalog",
        SIZE,
        commands=(*_ELSEWHERE, "guide"),
    )
    host_memory: str | None = setting(
        None,
        "a machine's memory; default: this machine's, or what machines with such GPUs usually have",
        SIZE,
        commands=_ELSEWHERE,
    )
    reserved: str = setting(
        "0", "what others take of each GPU, for example 20GiB", SIZE, commands=_ELSEWHERE
    )
    predicted_for: TrainerName = setting(
        OURS,
        "whose step is predicted",
        name="trainer",
        read=_predicted,
        commands=("predict", "guide"),
    )
    any_trainer: AnyTrainer = setting(
        OURS,
        "whose step is predicted; of others their studies answer",
        name="trainer",
        rung_field="predicted_for",
        commands=("recommend",),
    )
    length: str | None = setting(
        None,
        "tokens of one sequence, for example 64k",
        LENGTH,
        commands=_ELSEWHERE,
        helps={"predict": "turn it round: which rungs fit this length"},
    )
    rollout_gpus: int = setting(
        0,
        "of the GPUs, those that roll out: the others are the trainer's",
        COUNT,
        metavar="K",
        commands=("recommend", "emit"),
    )
    studies: _Texts = setting(
        (),
        "studies that `highwater find` wrote: what they measured is taken, the rest predicted",
        name="study",
        rung_field="studies",
        metavar="STUDY",
        commands=("recommend", "emit"),
    )
    list_: bool = setting(
        False,
        "all settings that fit, with what each costs",
        SWITCH,
        name="list",
        commands=("recommend",),
    )
    exact: bool = setting(
        False,
        "trace the engine's own steps on fake tensors, minutes instead of milliseconds",
        SWITCH,
        **_PREDICT,
    )
    timeline: str | None = setting(
        None,
        "with --exact: write every allocation for PyTorch's viewer, https://pytorch.org/memory_viz",
        kinds.FILE,
        **_PREDICT,
    )
    calibrate: _Texts = setting(
        (),
        "studies that `highwater find` wrote: intervals are learned from their trials too",
        metavar="STUDY",
        **_PREDICT,
    )
    constants: str | None = setting(
        None,
        "what `highwater doctor --measure --json` printed on such GPUs: context, cuBLAS and "
        "NCCL as read there",
        kinds.FILE,
        **_PREDICT,
    )
    explain: bool = setting(
        False,
        "what ends each row, how good such predictions were, and bytes by term at the peak; "
        "with --exact tensors by operator",
        SWITCH,
        commands=("predict", "recommend"),
        helps={
            "recommend": "what the answer is drawn from, how good such answers were, and what is "
            "not in it"
        },
    )
    against: str | None = setting(
        None,
        "compare with known capacities: gpu, settings, gpus, sp, model, max_model_len",
        metavar="CSV",
        **_PREDICT,
    )
    sequences_per_micro_batch: int | None = setting(
        None, "what is predicted is of so many; default: as `predict`", COUNT, **_GUIDE
    )
    ulysses: _WholeNumbers = setting(
        (), "what is predicted has these ulysses degrees; default: as `predict`", COUNT, **_GUIDE
    )
    ring: _WholeNumbers = setting(
        (), "what is predicted has these ring degrees; default: no ring", COUNT, **_GUIDE
    )
    copies: _WholeNumbers = setting(
        (), "what is predicted has so many copies of the states; default: one", COUNT, **_GUIDE
    )
    device: Device | None = setting(None, "where; default: cuda where there is a GPU", **_BENCH)
    memory: str | None = setting(
        None,
        "memory of each GPU, or of each process on the CPU, its runtime included: 8GiB on a "
        "big card stands in for a small one; default: all, on the CPU what is free",
        SIZE,
        **_BENCH,
    )
    gpus: int = setting(
        1, "from 2 on also DataParallel, ring and Ulysses; on the CPU processes", COUNT, **_BENCH
    )
    heads: int = setting(2, "query heads", COUNT, **_BENCH)
    kv_heads: int | None = setting(None, "key and value heads; default: as many", COUNT, **_BENCH)
    head_dim: int = setting(32, "size of a head", COUNT, **_BENCH)
    dtype: BenchDtype | None = setting(
        None, "default: bf16, on the CPU fp32, on GPUs without bf16 fp16", **_BENCH
    )
    same_qkv: bool = setting(
        False,
        "queries, keys and values are one tensor, counted once: the published setting",
        SWITCH,
        **_BENCH,
    )
    lengths: _Texts = setting(
        (),
        "measure at these lengths alone; default: doubling, then bisection to the longest",
        LENGTH,
        **_BENCH,
    )
    max_length: str | None = setting(
        None, "longest length to try; default: 16m tokens, on the CPU 4k", LENGTH, **_BENCH
    )
    implementations: _Texts = setting(
        (),
        "who takes part, by name, family or published class: "
        f"{', '.join(IMPLEMENTATIONS)}; default: all",
        metavar="NAME",
        **_BENCH,
    )
    segment_lengths: _Texts = setting(
        (),
        "dilated and block_sparse_ring_dilated: tokens of a segment of each branch; default: "
        "half the length and all of it",
        LENGTH,
        **_BENCH,
    )
    dilation_rates: _WholeNumbers = setting(
        (),
        "a rate for each of them, 2 for every second token; default: 1 2, and 4, 8, ... for "
        "more segments",
        COUNT,
        **_BENCH,
    )
    only: Direction | None = setting(None, "one direction; default: both", **_BENCH)
    timeout: str | None = setting(
        None, "longest time of one pass; default: 60s, on the CPU 10s", kinds.TIME, **_BENCH
    )
    out: str | None = setting(
        None,
        "folder of the report, JSON and Markdown; default: a new one below ./logs/attention",
        kinds.DIRECTORY,
        **_BENCH,
    )
    allow_busy: bool = setting(False, "also on GPUs that somebody else uses", SWITCH, **_BENCH)


_BORROWED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "bench": (PATTERN_FIELDS, ""),
    "guide": (TRAINED_OTHERWISE, "what is predicted is trained so: "),
}
"""Settings of a request that a command has which makes none, and what their help begins with."""
TRAINING = tuple(
    replace(row, rung_field=f"{_TRAINING}{row.name}") for row in TrainingRequest.declared
)


def own_flags(command: str) -> Iterator[Setting]:
    """The flags of a command that no request reads."""
    yield from (DECLARED["model"],) if command in DECLARED["model"].commands else ()
    yield from (row for row in CommandFlags.declared if command in row.commands)
    names, what_for = _BORROWED.get(command, ((), ""))
    for name in names:
        row = DECLARED[name]
        yield replace(
            row,
            help=f"{what_for}{row.help}",
            metavar=_metavar(row),
            type=str,
            default=None,
            choices=(),
        )


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


def words_without(words: Sequence[str], *flags: str) -> list[str]:
    """What was typed, without a flag, by any of its spellings, and its value."""
    kept = list(words)
    joined = tuple(f"{flag}=" if flag.startswith("--") else flag for flag in flags)
    for at, word in enumerate(kept):
        if word in flags or word.startswith(joined):
            del kept[at : at + (2 if word in flags else 1)]
            break
    return kept


_AGAIN = {
    "--gpus": "cluster",
    "--length": "length",
    "--rollout-gpus": "rollout_gpus",
    "--trainer": "predicted_for",
    "--study": "studies",
    "--gpu-memory": "gpu_memory",
    "--host-memory": "host_memory",
    "--reserved": "reserved",
}
"""Flags that the next command has too, with their names in a namespace."""


def words_again(
    arguments: argparse.Namespace, *, drop: tuple[str, ...] = (), **changed: str
) -> list[str]:
    """What was typed, for a prediction or a recommendation, as flags, with changes."""
    named = {name: getattr(arguments, field, None) for name, field in _AGAIN.items()}
    typed: dict[str, object] = {
        name: value for name, value in named.items() if value not in (0, "0", OURS, [])
    }
    settings = {name: value for name, value in typed_values(arguments).items() if name != "model"}
    typed |= {flag_of(name): value for name, value in settings.items()}
    kept: Mapping[str, object] = {
        name: value for name, value in typed.items() if value is not None and name not in drop
    }
    return words_of(
        {name.removeprefix("--"): value for name, value in ({**kept, **changed}).items()}
    )


def training_request_of(arguments: argparse.Namespace) -> TrainingRequest:
    """The training request that was typed; raises UsageError for what has to be named."""
    typed = {
        row.name: tuple(value) if isinstance(value, list) else value
        for row in TRAINING
        if (value := getattr(arguments, row.rung_field)) not in (None, [])
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
