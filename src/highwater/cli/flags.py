"""Flags of commands besides a request's settings; requests made from typed arguments."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from highwater.errors import UsageError
from highwater.nouns.attention_bench import IMPLEMENTATIONS, BenchDtype, Direction
from highwater.nouns.declaration import (
    COUNT,
    DIRECTORY,
    FILE,
    LENGTH,
    REQUIRED,
    SIZE,
    SWITCH,
    TIME,
    DeclaredRecord,
    flag_of,
    setting,
    word_hint,
    words_of,
)
from highwater.nouns.request import DECLARED, PACKINGS, Request, request_from
from highwater.nouns.trainer import (
    FOREIGN,
    OURS,
    REGISTRY,
    TRAINERS,
    AnyTrainer,
    Target,
    TrainerName,
    predicted_trainer,
)
from highwater.nouns.training import TrainingRequest, training_request_from
from highwater.nouns.trial import Device

Shell = Literal["bash", "zsh", "fish"]
_Texts = tuple[str, ...]
_WholeNumbers = tuple[int, ...]
_KIND = "[[Mx]Nx]KIND"
TRAINING = "training_"
"""Prefix of a training's flags in a namespace, as a trial has flags of the same names."""


def _trainer(name: str) -> TrainerName:
    """The trainer of this name; raises UsageError for one whose memory is not predicted."""
    if (known := predicted_trainer(name)) is not None:
        return known
    if name in FOREIGN:
        raise UsageError(
            f"the memory of {REGISTRY[name].title} is not predicted: `highwater find --trainer "
            f"{name}` finds its capacity by trials",
            hint=f"leave `--trainer {name}` out",
        )
    listed, names = "`highwater predict --help-all` says more", tuple(TRAINERS)
    hint = word_hint("trainer", name, names, typed="--trainer {}".format, listed=listed)
    raise UsageError(f"trainer {name!r} is not one of {', '.join(names)}", hint=hint)


_NEWEST = "a study's file; default: the newest one"
_ELSEWHERE = "predict recommend emit"
"""Commands about GPUs that need not be in this machine."""
_GPUS = (
    "or 2x8xH100-80GB of two machines; default: this machine's; `highwater gpus` lists the kinds"
)


class CommandFlags(DeclaredRecord, frozen=True, kw_only=True):
    """Flags that commands have besides the settings of a request or a training."""

    for_: Target = setting(REQUIRED, "whose configuration", commands="emit", name="for")
    config: str | None = FILE(None, "YAML file of settings; flags override it", "find try train")
    subject: Literal["attention"] = setting(
        REQUIRED, "what is measured: attention", commands="bench", nargs="1", metavar="SUBJECT"
    )
    shell: Shell = setting(
        REQUIRED, ", ".join(get_args(Shell)), commands="completion", nargs="1", metavar="SHELL"
    )
    words: _Texts = setting(
        (),
        "list those whose names have it; default: all",
        commands="models gpus",
        nargs="*",
        metavar="WORD",
    )
    paths: _Texts = setting(
        REQUIRED,
        "a snapshot that `torch.cuda.memory._dump_snapshot` wrote, a timeline of "
        "`highwater predict --exact`, or a folder of ranks' snapshots, of which the fullest is "
        "shown; two: side by side",
        commands="profile",
        nargs="+",
        metavar="PATH",
    )
    documents: _Texts = setting(
        REQUIRED, "a file of JSON lines, Parquet or text, or a folder", commands="data", nargs="+"
    )
    counted_by: str | None = setting(
        None,
        "folder with the tokenizer that counts; default: 4 bytes a token",
        commands="data",
        name="model",
    )
    shown: _Texts = setting(
        (), _NEWEST, commands="show", nargs="*", metavar="STUDY", sets="studies"
    )
    study: str | None = setting(None, _NEWEST, commands="report", nargs="?", metavar="STUDY")
    sources: _Texts = setting(
        (),
        "a study's file, a CSV of known capacities (gpu, settings, gpus, sp, model, max_model_len; "
        "0: nothing fits, empty: unknown), or the .json of `highwater predict --json`",
        commands="guide",
        nargs="*",
        metavar="SOURCE",
    )
    as_: Literal["table", "published", "lines", "json"] = setting(
        "table", "how to show it", commands="show", name="as"
    )
    measure: bool = SWITCH(
        False,
        "read on the GPUs what libraries take of their memory, half a minute each count",
        "doctor",
    )
    html: str | None = FILE(
        None, "write a page into a new file: timeline and flame graph", "profile"
    )
    folder: str | None = DIRECTORY(
        None,
        "write all files into a folder, with a script that starts the training and a page of "
        "what to check; nothing that is there is written over",
        "emit",
        name="output",
        sets="output",
        short="-o",
    )
    predict: _Texts = setting(
        (), "models whose capacities are predicted by formula", commands="guide", metavar="MODEL"
    )
    output: str | None = FILE(
        None,
        "write it into a new file: .html, .md, .csv or .json; default: print Markdown",
        "report guide",
        short="-o",
        helps={
            "guide": "write it into a new file: a page (.html), or Markdown (.md); default: print "
            "it"
        },
    )
    json: bool = SWITCH(
        False,
        "print one JSON document",
        f"{_ELSEWHERE} find try train guide report profile models gpus doctor bench data",
        helps={"guide": "print its rows as one JSON document"},
    )
    log_dir: str = DIRECTORY("./logs", "where to look for the newest study", "show report")
    print_config: bool = SWITCH(
        False, "print the configuration that asks the same, and exit", "find"
    )
    print_sbatch: bool = SWITCH(
        False, "print the script that asks the same as a job of Slurm, and exit", "find"
    )
    tried_length: str = LENGTH(
        REQUIRED,
        "tokens of one sequence, for example 32k",
        "try",
        name="length",
        sets="length",
    )
    cluster: str | None = setting(
        None,
        f"for example 4xA100-80GB, {_GPUS}",
        commands=_ELSEWHERE,
        name="gpus",
        metavar=_KIND,
        helps={
            "predict": f"for example 4xA100-80GB, {_GPUS}; with --length A100-80GB,H100,B200 asks "
            "for the cheapest",
            "recommend": f"for example 4xA100-80GB, {_GPUS}; how many, and which kind, says "
            "`predict`",
        },
    )
    clusters: _Texts = setting(
        (),
        f"for example 4xA100-80GB 8xH100-80GB, {_GPUS}",
        commands="guide",
        name="gpus",
        sets="cluster",
        metavar=_KIND,
    )
    gpu_memory: str | None = SIZE(
        None,
        "memory of one GPU as its driver reports it, for a kind of no catalog",
        f"{_ELSEWHERE} guide",
    )
    reserved: str = SIZE("0", "what others take of each GPU, for example 20GiB", _ELSEWHERE)
    predicted_for: TrainerName = setting(
        OURS, "whose step is predicted", commands="predict guide", name="trainer", read=_trainer
    )
    any_trainer: AnyTrainer = setting(
        OURS,
        "whose step is predicted; of others their studies answer",
        commands="recommend",
        name="trainer",
        sets="predicted_for",
    )
    length: str | None = LENGTH(
        None,
        "tokens of one sequence, for example 64k",
        _ELSEWHERE,
        helps={"predict": "answer for this length: which settings train it"},
    )
    rollout_gpus: int = COUNT(
        0,
        "of the GPUs, those that roll out: the others are the trainer's",
        "predict recommend emit",
        metavar="K",
    )
    studies: _Texts = setting(
        (),
        "studies that `highwater find` wrote: what they measured is taken, the rest predicted",
        commands="recommend emit",
        name="study",
        sets="studies",
        metavar="STUDY",
    )
    list_: bool = SWITCH(
        False, "all settings that fit, with what each costs", "recommend", name="list"
    )
    fastest: bool = SWITCH(
        False,
        "the fastest settings that train it instead of the simplest; of our own step alone, "
        "without --trainer",
        "recommend",
    )
    lightest: bool = SWITCH(
        False, "the settings that take the least memory of each GPU; likewise", "recommend"
    )
    exact: bool = SWITCH(
        False,
        "trace the engine's own steps on fake tensors, minutes instead of milliseconds",
        "predict",
    )
    timeline: str | None = FILE(
        None,
        "with --exact: write every allocation for PyTorch's viewer, https://pytorch.org/memory_viz",
        "predict",
    )
    calibrate: _Texts = setting(
        (),
        "studies that `highwater find` wrote: intervals are learned from their trials too",
        commands="predict",
        metavar="STUDY",
    )
    constants: str | None = FILE(
        None,
        "what `highwater doctor --measure --json` printed on such GPUs: context, cuBLAS and "
        "NCCL as read there",
        "predict",
    )
    read_data: _Texts = setting(
        (),
        "files to train on: what each length keeps of them, and the time of one pass",
        commands="predict",
        name="data",
        metavar="FILE",
    )
    whole: str | None = setting(
        None,
        "share of the documents that the answer's length holds whole; default: 99%",
        commands="predict data",
        metavar="SHARE",
    )
    tokens: str | None = setting(
        None, "with --length: what training on so many takes, for example 500M", commands="predict"
    )
    price: str | None = setting(
        None,
        "dollars of one GPU for an hour, 2.50: what a million tokens cost, --tokens or a pass over "
        "--data; default: a list price of the catalog, whose date is told",
        commands="predict",
    )
    tried_to_allocate: str | None = SIZE(
        None,
        "with --length: from `CUDA out of memory. Tried to allocate 18.55 GiB`, which tensor that "
        "was, and what shrinks it",
        "predict",
        example="18.55GiB",
    )
    all_: bool = SWITCH(False, "every setting, also those that gain nothing", "predict", name="all")
    explain: bool = SWITCH(
        False,
        "what ends each row, how good such predictions were, and bytes by term at the peak; "
        "with --exact tensors by operator",
        "predict recommend",
        helps={
            "recommend": "what the answer is drawn from, how good such answers were, and what is "
            "not in it"
        },
    )
    device: Device | None = setting(
        None, "where; default: cuda where there is a GPU", commands="bench"
    )
    memory: str | None = SIZE(
        None,
        "memory of each GPU, or of each process on the CPU, its runtime included: 8GiB on a "
        "big card stands in for a small one; default: all, on the CPU what is free",
        "bench",
    )
    gpus: int = COUNT(
        1, "from 2 on also DataParallel, ring and Ulysses; on the CPU processes", "bench"
    )
    heads: int = COUNT(2, "query heads", "bench")
    kv_heads: int | None = COUNT(None, "key and value heads; default: as many", "bench")
    head_dim: int = COUNT(32, "size of a head", "bench")
    dtype: BenchDtype | None = setting(
        None, "default: bf16, on the CPU fp32, on GPUs without bf16 fp16", commands="bench"
    )
    same_qkv: bool = SWITCH(
        False,
        "queries, keys and values are one tensor, counted once: the published setting",
        "bench",
    )
    lengths: _Texts = LENGTH(
        (),
        "measure at these lengths alone; default: doubling, then bisection to the longest",
        "bench",
    )
    max_length: str | None = LENGTH(
        None, "longest length to try; default: 16m tokens, on the CPU 4k", "bench"
    )
    implementations: _Texts = setting(
        (),
        "who takes part, by name, family or published class: "
        f"{', '.join(IMPLEMENTATIONS)}; default: all",
        commands="bench",
        metavar="NAME",
    )
    segment_lengths: _Texts = LENGTH(
        (),
        "dilated and block_sparse_ring_dilated: tokens of a segment of each branch; default: "
        "half the length and all of it",
        "bench",
    )
    dilation_rates: _WholeNumbers = COUNT(
        (),
        "a rate for each of them, 2 for every second token; default: 1 2, and 4, 8, ... for "
        "more segments",
        "bench",
    )
    only: Direction | None = setting(None, "one direction; default: both", commands="bench")
    timeout: str | None = TIME(
        None, "longest time of one pass; default: 60s, on the CPU 10s", "bench"
    )
    out: str | None = DIRECTORY(
        None,
        "folder of the report, JSON and Markdown; default: a new one below ./logs/attention",
        "bench",
    )
    allow_busy: bool = SWITCH(False, "also on GPUs that somebody else uses", "bench")


def typed_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were typed, by the field of ``Request`` that each sets."""
    named = vars(arguments).items()
    typed = {name: value for name, value in named if name in DECLARED and value is not None}
    for row in DECLARED.values():
        values = typed.get(row.name)
        if row.is_list and isinstance(values, list) and values and "model" not in typed:
            if not values[-1].lstrip("-").isdecimal():
                # `--gpus 1 2 MODEL`: argparse gives all three to the flag
                typed |= {"model": values[-1], row.name: values[:-1]}
        elif row.stands_alone and isinstance(values, str) and values:
            value = {"true": True, "false": False}.get(values.lower(), values)
            if value == values and value not in row.choices and "model" not in typed:
                # `--offload MODEL`: argparse gives it to the flag
                typed["model"], value = values, True
            typed[row.name] = value
    return typed


def request_of(arguments: argparse.Namespace) -> Request:
    """The request from ``--config``, if any, overridden by flags. Raises UsageError for a file that
    cannot be read, and for invalid settings.
    """
    typed, from_file = typed_values(arguments), dict[str, Any]()
    if arguments.config is not None:
        from highwater.cli.config import settings_in  # only a file needs YAML

        from_file = settings_in(arguments.config, typed.get("model"))
    return layered(from_file, typed)


def layered(*layers: Mapping[str, Any]) -> Request:
    """Make a request of several sets of settings; a later one wins over an earlier one."""
    values: dict[str, Any] = {}
    for named in layers:
        overridden = PACKINGS if any(name in named for name in PACKINGS) else ()
        values = {name: values[name] for name in values if name not in overridden} | {**named}
    return request_from(values)


def named_model(
    arguments: argparse.Namespace, others: list[str], *, example: str
) -> tuple[str, dict[str, Any]]:
    """The model and the other typed settings, which are also written into ``arguments``.
    ``others``: values of a list flag before the model: argparse takes the model for their last.
    Raises UsageError if no model was typed.
    """
    if arguments.model is None and len(others) > 1:
        arguments.model = others.pop()
    settings = typed_values(arguments)
    vars(arguments).update(settings)
    model = settings.pop("model", None)
    if model is None and "trainer_config" in settings:
        from highwater.trainers.user_file import model_in  # only a file needs YAML

        model = arguments.model = model_in(Path(settings["trainer_config"]))
    if model is None:
        raise UsageError(
            "no model is named",
            hint=f"name a directory, an id of the Hub or a catalog model: `{example}`",
        )
    return str(model), settings


def typed_place(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags for GPUs, memory and trainer, as keywords of ``predict`` and ``recommend``."""
    named = {"gpus": arguments.cluster, "trainer": arguments.predicted_for}
    alike = ("rollout_gpus", "gpu_memory", "reserved")
    return {**named, **{name: getattr(arguments, name) for name in alike}}


def told_notes(arguments: argparse.Namespace, notes: Sequence[str]) -> list[str]:
    """An answer's notes, without those on skipped layouts unless ``--ulysses``, ``--all`` or
    ``--explain`` was typed; with ``--ring`` or ``--copies`` without those on Ulysses above 1.
    """
    typed = vars(arguments)
    is_whole = any(typed.get(name) for name in ("ulysses", "all_", "explain"))
    hidden = r"Ulysses (?!1\b).*" if typed.get("ring") or typed.get("copies") else ".*"
    return [each for each in notes if is_whole or not re.match(f"{hidden} is skipped: ", each)]


def trial_limits(arguments: argparse.Namespace) -> list[str]:
    """Flags that hold a trial to the GPU and host memory that a prediction was about."""
    limits = {
        "memory": arguments.gpu_memory,
        "host_memory": typed_values(arguments).get("host_memory"),
    }
    return words_of({name: size for name, size in limits.items() if size is not None})


def words_without(words: Sequence[str], *flags: str) -> list[str]:
    """The typed words without one flag, in any of its spellings ``flags``, and its value."""
    kept = list(words)
    joined = tuple(f"{flag}=" if flag.startswith("--") else flag for flag in flags)
    for at, word in enumerate(kept):
        if word in flags or word.startswith(joined):
            del kept[at : at + (2 if word in flags else 1)]
            break
    return kept


_AGAIN = {
    "gpus": "cluster",
    "length": "length",
    "rollout-gpus": "rollout_gpus",
    "trainer": "predicted_for",
    "study": "studies",
    "gpu-memory": "gpu_memory",
    "reserved": "reserved",
}
"""Flags that the next command repeats, with their names in a namespace."""


def words_again(
    arguments: argparse.Namespace, *, drop: tuple[str, ...] = (), **changed: str
) -> list[str]:
    """The typed flags to ask again with, without those in ``drop``; ``changed`` replaces some."""
    named = {name: getattr(arguments, field, None) for name, field in _AGAIN.items()}
    typed = {name: value for name, value in named.items() if value not in (0, "0", OURS, [])}
    typed |= {name: v for name, v in typed_values(arguments).items() if name != "model"}
    typed = {flag_of(name): value for name, value in typed.items() if value is not None}
    again = {name: value for name, value in typed.items() if name not in drop} | changed
    return words_of({name.removeprefix("--"): value for name, value in again.items()})


_UNNAMED = {
    "data": "nothing to train on is named",
    "length": "no length is named",
    "steps": "no number of steps is named",
    "output": "no folder for the run is named",
}
"""Problem of each field that a training needs, where it was not typed."""


def training_request_of(arguments: argparse.Namespace) -> TrainingRequest:
    """The training request as typed; raises UsageError if a required flag is missing."""
    typed = {
        row.name: tuple(value) if isinstance(value, list) else value
        for row in TrainingRequest.declared
        if (value := getattr(arguments, f"{TRAINING}{row.name}")) not in (None, [])
    }
    for row in TrainingRequest.declared:
        if row.name in _UNNAMED and row.name not in typed:
            raise UsageError(_UNNAMED[row.name], hint=f"add it, for example `{row.example}`")
    return training_request_from(typed)
