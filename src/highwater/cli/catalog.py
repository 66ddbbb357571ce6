"""``highwater models``, ``gpus`` and ``completion``: names of the catalogs with their sources, and
the script by which a shell completes ``highwater`` commands.

shtab writes the script from the grammar: commands, flags, and values that are one of a list. The
names of models and of kinds of GPUs (also after ``4x``) are added here. A completion starts no
Python, and no other command imports shtab.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from highwater.cli import console
from highwater.cli.flags import Shell
from highwater.cli.grammar import grammar
from highwater.errors import EXIT_ANSWERED, ModelError, UsageError
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.model.families import TRAINED, WRAPPERS
from highwater.model.model import ModelShape, load_model
from highwater.model.model_place import CatalogModel, model_catalog
from highwater.nouns.hardware import GpuKind, gpu_catalog, host_catalog, lacking, runs_trials
from highwater.nouns.request import DECLARED
from highwater.pages.table import TextTable, table_of
from highwater.units import counted, format_tokens

_BILLION = 1e9


def models(arguments: argparse.Namespace) -> int:
    """Print the catalog's models: all, or those whose names contain the typed words."""
    rows = [each for each in model_catalog() if _has(arguments.words, each.name, *each.hub_ids)]
    _refuse_none(rows, arguments.words, what="model", command="models")
    listed = [(row, load_model(row.name).shape) for row in rows]
    if arguments.json:
        found = [
            {"model": row, "parameters": shape.parameters, "shape": shape} for row, shape in listed
        ]
        return console.answer_json({"schema_version": 1, "models": found})
    console.answer_table(_model_table(listed, is_whole=not arguments.words))
    command = f"highwater find {rows[0].name}"
    with suppress(ModelError):  # a family that is not predicted
        refuse_unknown_family(load_model(rows[0].name))
        command = f"highwater predict {rows[0].name} --gpus 4xA100-80GB"
    console.next_command(command)
    return EXIT_ANSWERED


def gpus(arguments: argparse.Namespace) -> int:
    """Print the kinds of GPUs whose names contain the typed words; as JSON with their machines."""
    kinds = [each for each in gpu_catalog() if _has(arguments.words, each.name, each.match)]
    _refuse_none(kinds, arguments.words, what="kind of GPU", command="gpus")
    if arguments.json:
        hosts = [host for host in host_catalog() if host.kind in {kind.name for kind in kinds}]
        return console.answer_json({"schema_version": 1, "gpus": kinds, "hosts": hosts})
    console.answer_table(_gpu_table(kinds))
    usual = [kind.name for kind in kinds if kind.usable_bytes is not None and not lacking(kind)]
    console.next_command(
        f"highwater predict Qwen3-8B --gpus 4x{usual[0]}" if usual else "highwater gpus"
    )
    return EXIT_ANSWERED


def _has(words: Sequence[str], *names: str) -> bool:
    """True if each word is contained in one of the names, in any case."""
    return all(any(word.lower() in name.lower() for name in names) for word in words)


def _refuse_none(found: Sequence[object], words: Sequence[str], *, what: str, command: str) -> None:
    if not found:
        raise UsageError(
            f"no {what} of the catalog has {' and '.join(map(repr, words))} in its name",
            hint=f"`highwater {command}` lists them all",
        )


def _model_table(listed: Sequence[tuple[CatalogModel, ModelShape]], *, is_whole: bool) -> TextTable:
    families = f"families that train: {', '.join(sorted(TRAINED))}; their text models: "
    return table_of(
        f"{counted(len(listed), 'model')} in the catalog; any other is named by its "
        "directory, or by its id on the Hub",
        listed,
        ("name", lambda each: each[0].name),
        ("on the Hub", lambda each: each[0].hub_id or "-"),
        ("family", lambda each: each[1].model_type),
        ("parameters, billions", lambda each: f"{each[1].parameters / _BILLION:.2f}"),
        ("native length", lambda each: format_tokens(each[1].native_length_tokens)),
        ("layers", lambda each: str(each[1].layers)),
        ("heads, query/key", lambda each: f"{each[1].query_heads}/{each[1].kv_heads}"),
        footnotes=(
            "tuned models of the same shape, and the source of each: `--json`",
            *([f"{families}{', '.join(sorted(WRAPPERS))}"] if is_whole else []),
        ),
    )


def _gpu_table(kinds: Sequence[GpuKind]) -> TextTable:
    def trains(kind: GpuKind) -> str:
        can = "yes" if runs_trials(kind.name) else "predictions only"
        return "no" if lacking(kind) else can

    hosts_with = {k.name: [host for host in host_catalog() if host.kind == k.name] for k in kinds}

    def host_memory(kind: GpuKind) -> str:
        hosts = hosts_with[kind.name]
        each = (f"{host.host_gib:,}{f' for {host.gpus}' * host.is_divided}" for host in hosts)
        return ", ".join(each) or "-"

    return table_of(
        f"{counted(len(kinds), 'kind')} of GPUs in the catalog; of any other `--gpu-memory` "
        "says the memory",
        kinds,
        ("name", "name"),
        ("memory, as its driver has it", "usable_bytes"),
        (
            "bf16 TFLOPS, dense",
            lambda kind: "-" if kind.bf16_dense_tflops is None else f"{kind.bf16_dense_tflops:g}",
        ),
        ("trains", trains),
        ("host memory by default, GiB", host_memory),
        footnotes=(
            "host memory of one machine, where nobody says what it has; fewer GPUs: their share",
            *(f"{kind.name}: {kind.source}" for kind in kinds),
            *(
                f"{kind.name}, host memory: "
                + "; ".join(f"{host.machine} ({host.source})" for host in hosts)
                for kind in kinds
                if (hosts := hosts_with[kind.name])
            ),
        ),
        names=1,
    )


_MODELS, _GPUS = "_highwater_model_or_dir", "_highwater_gpus"
"""Functions of the script. ``_dir`` in a name tells shtab that it may complete a directory."""
_FILES = {"FILE", "CSV", "STUDY", "SOURCE", "PATH"}
_FOLDERS = {"DIR"}


def completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell, and no next command: shells read all of it."""
    console.answer_exactly(script(arguments.shell).rstrip("\n"))
    return EXIT_ANSWERED


def script(shell: str) -> str:
    """The script that completes ``highwater`` in a shell."""
    from shtab import complete

    whole = grammar()
    parsers = (whole, *whole.commands.values())
    for action in (action for parser in parsers for action in parser.arguments):
        if isinstance(action.metavar, str):  # zsh takes a colon for the end of it
            action.metavar = action.metavar.replace(":", " ")
        what = _value(action)
        if what is not None:
            vars(action)["complete"] = what  # shtab reads it
        elif action.dest in DECLARED and DECLARED[action.dest].kind is None:
            action.choices = DECLARED[action.dest].choices
    rows = model_catalog()
    models = (*(row.name for row in rows), *(name for row in rows for name in row.hub_ids))
    names = {
        "models": _MODELS,
        "gpus": _GPUS,
        "model_names": " ".join(dict.fromkeys(models)),
        "gpu_kinds": " ".join(kind.name for kind in gpu_catalog()),
    }
    # these functions match names in any case, as the catalogs do
    functions = Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    return complete(whole, shell=shell, preamble=functions.format(**names))


def _value(action: argparse.Action) -> object:
    """The completion of a value, in shtab's terms; None if it has none."""
    if action.metavar == "MODEL" or action.dest == "cluster":
        name = _MODELS if action.metavar == "MODEL" else _GPUS
        called: dict[str, Callable[[str], str]] = {"fish": "({})".format}
        return {shell: called.get(shell, str)(name) for shell in get_args(Shell)}
    if action.metavar in _FILES:
        return "file"
    return "directory" if action.metavar in _FOLDERS else None
