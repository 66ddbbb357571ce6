"""``highwater models`` and ``highwater gpus``: what the catalog has, for a name to type and its
source.
"""

import argparse
from collections.abc import Sequence

from highwater.cli import console
from highwater.errors import EXIT_ANSWERED, UsageError
from highwater.model.model import ModelShape, load_model
from highwater.model.model_place import CatalogModel, model_catalog
from highwater.nouns.codec import Record
from highwater.nouns.hardware import GpuKind, Host, gpu_catalog, host_catalog, lacking
from highwater.pages.table import TextTable
from highwater.units import counted, format_bytes, format_tokens

_BILLION = 1e9


class ListedModel(Record, frozen=True, kw_only=True):
    """One model of the catalog, with its shape."""

    model: CatalogModel
    parameters: int
    """Parameters as its shape has them."""
    shape: ModelShape


class ModelList(Record, frozen=True, kw_only=True):
    """The document that ``highwater models --json`` prints."""

    schema_version: int = 1
    models: tuple[ListedModel, ...]


class GpuList(Record, frozen=True, kw_only=True):
    """The document that ``highwater gpus --json`` prints."""

    schema_version: int = 1
    gpus: tuple[GpuKind, ...]
    hosts: tuple[Host, ...] = ()
    """Machines with these GPUs, whose host memory is taken where nobody names another."""


def models(arguments: argparse.Namespace) -> int:
    """Print the models of the catalog, all or those whose names have the words that were typed."""
    rows = [each for each in model_catalog() if _has(arguments.words, each.name, *each.hub_ids)]
    _refuse_none(rows, arguments.words, what="model", command="models")
    listed = tuple(_listed(row) for row in rows)
    if arguments.json:
        console.answer_json(ModelList(models=listed))
        return EXIT_ANSWERED
    console.answer_table(_model_table(listed))
    console.next_command(f"highwater predict {listed[0].model.name} --gpus 4xA100-80GB")
    return EXIT_ANSWERED


def gpus(arguments: argparse.Namespace) -> int:
    """Print the kinds of GPUs, all or those whose names have the words that were typed."""
    kinds = tuple(each for each in gpu_catalog() if _has(arguments.words, each.name, each.match))
    _refuse_none(kinds, arguments.words, what="kind of GPU", command="gpus")
    if arguments.json:
        names = {kind.name for kind in kinds}
        hosts = tuple(host for host in host_catalog() if host.kind in names)
        console.answer_json(GpuList(gpus=kinds, hosts=hosts))
        return EXIT_ANSWERED
    console.answer_table(_gpu_table(kinds))
    usual = [kind.name for kind in kinds if kind.usable_bytes is not None and not lacking(kind)]
    console.next_command(
        f"highwater predict Qwen3-8B --gpus 4x{usual[0]}" if usual else "highwater gpus"
    )
    return EXIT_ANSWERED


def _has(words: Sequence[str], *names: str) -> bool:
    """Whether each word is part of one of the names, in any case."""
    return all(any(word.lower() in name.lower() for name in names) for word in words)


def _refuse_none(found: Sequence[object], words: Sequence[str], *, what: str, command: str) -> None:
    """Raise UsageError where no row has the words."""
    if not found:
        raise UsageError(
            f"no {what} of the catalog has {' and '.join(map(repr, words))} in its name",
            hint=f"`highwater {command}` lists them all",
        )


def _listed(row: CatalogModel) -> ListedModel:
    shape = load_model(row.name).shape
    return ListedModel(model=row, parameters=shape.parameters, shape=shape)


def _model_table(listed: Sequence[ListedModel]) -> TextTable:
    return TextTable(
        title=f"{counted(len(listed), 'model')} in the catalog; any other is named by its "
        "directory, or by its id on the Hub",
        columns=(
            *("name", "on the Hub", "family", "parameters, billions", "native length"),
            *("layers", "heads, query/key"),
        ),
        rows=tuple(
            (
                each.model.name,
                each.model.hub_id or "-",
                each.shape.model_type,
                f"{each.parameters / _BILLION:.2f}",
                format_tokens(each.shape.native_length_tokens),
                str(each.shape.layers),
                f"{each.shape.query_heads}/{each.shape.kv_heads}",
            )
            for each in listed
        ),
        footnotes=("tuned models of the same shape, and the source of each: `--json`",),
    )


def _gpu_table(kinds: Sequence[GpuKind]) -> TextTable:
    return TextTable(
        title=f"{counted(len(kinds), 'kind')} of GPUs in the catalog; of any other `--gpu-memory` "
        "says the memory",
        columns=(
            *("name", "memory, as its driver has it", "bf16 TFLOPS, dense", "trains"),
            "host memory by default, GiB",
        ),
        rows=tuple(
            (
                kind.name,
                format_bytes(kind.usable_bytes),
                "-" if kind.bf16_dense_tflops is None else f"{kind.bf16_dense_tflops:g}",
                "no" if lacking(kind) else "yes",
                _host_memory(kind),
            )
            for kind in kinds
        ),
        footnotes=(
            "host memory of one machine, where nobody says what it has; fewer GPUs: their share",
            *(f"{kind.name}: {kind.source}" for kind in kinds),
            *(
                f"{kind.name}, host memory: "
                + "; ".join(f"{host.machine} ({host.source})" for host in hosts)
                for kind in kinds
                if (hosts := [host for host in host_catalog() if host.kind == kind.name])
            ),
        ),
        left_columns=1,
    )


def _host_memory(kind: GpuKind) -> str:
    """``2,048 for 8``: host memory of each machine that has GPUs of this kind."""
    hosts = [host for host in host_catalog() if host.kind == kind.name]
    return (
        ", ".join(
            f"{host.host_gib:,} for {host.gpus}" if host.is_divided else f"{host.host_gib:,}"
            for host in hosts
        )
        or "-"
    )
