"""Export: write the trained model as a directory for other programs, whole or not at all.

transformers loads it, or peft if it has adapters alone. Tokenizer and chat templates are in it.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from highwater.engine.models.pretrained import COPIED
from highwater.engine.training.checkpoint import save_pretrained
from highwater.engine.training.rank_context import agreed, compute_dtype
from highwater.engine.training.run_checkpoints import NO_SPACE, PARTIAL, in_the_way, is_ours
from highwater.engine.training.step import Training
from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import CONFIG_BYTES, make_durable, read_file
from highwater.units import format_bytes

TEMPLATES = "additional_chat_templates"
"""Folder of chat templates other than the first."""
_OF_MODEL = "generation_config.json"
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_OWN_FILE = re.compile(
    r"model(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json"
    r"|adapter_model\.safetensors|adapter_config\.json|README\.md"
    rf"|{TEMPLATES}/[^/]+|" + "|".join(map(re.escape, COPIED))
)
"""Names of files that an export writes: a partial folder of these alone may be removed."""


def export(training: Training, directory: Path, *, source: Path, merged: bool = False) -> int:
    """Write the policy to ``directory``, in the dtype that the config at ``source`` names, else in
    its compute dtype; returns the bytes on disk, on all ranks.

    For a model with adapters only these are written, in their own dtype; with ``merged`` the model
    plus its adapters. ``source`` is the directory that the model came from. The export is written
    under another name and renamed at the end.

    On all ranks: UsageError for a directory that is not empty, MachineError if the disk is full.
    """
    mesh, is_first = training.mesh, dist.get_rank() == 0
    partial = directory.with_name(directory.name + PARTIAL)
    with agreed(mesh):
        if is_first:
            if directory.is_symlink() or (
                directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
            ):
                name = shlex.quote(str(directory))
                raise UsageError(
                    f"{directory} is there already, and a model is not written over anything",
                    hint=f"`mv {name} {name}.before`",
                )
            _remove_partial(partial)
    failure: OSError | None = None
    try:
        save_pretrained(
            training.policy,
            partial,
            mesh=mesh,
            dtype=_dtype_of(source) or compute_dtype(training.device),
            source=source,
            merged=merged,
        )
    except OSError as error:
        failure = error
    with agreed(mesh):
        try:
            if failure is not None:
                raise failure
            if is_first:
                _copy_beside(partial, source)
                _settle(partial, directory)
        except OSError as error:
            _remove_partial(partial)
            raise _refusal(directory, error) from error
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _remove_partial(partial: Path) -> None:
    """Remove the folder of an interrupted export; UsageError if it has files of another origin."""
    if not partial.exists():
        return
    if not is_ours(partial, _OWN_FILE.fullmatch):
        raise in_the_way(partial, "a model")
    shutil.rmtree(partial)


def _dtype_of(source: Path) -> torch.dtype | None:
    """Return the dtype that a model's config names; None if it names none that weights can have."""
    config: dict[str, Any] = json.loads(read_file(source / "config.json", most_bytes=CONFIG_BYTES))
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))


def _copy_beside(partial: Path, source: Path) -> None:
    """Copy the tokenizer's files into the export."""
    for name in COPIED:
        if name != _OF_MODEL and (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    if (source / TEMPLATES).is_dir():
        (partial / TEMPLATES).mkdir()
        for template in (source / TEMPLATES).glob("*.jinja"):
            shutil.copyfile(template, partial / TEMPLATES / template.name)


def _settle(partial: Path, directory: Path) -> None:
    """Flush every file to the disk, then rename the directory to its final name."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        make_durable(folder)
    partial.rename(directory)  # this also replaces an empty directory
    make_durable(directory.parent)


def _refusal(directory: Path, error: OSError) -> MachineError:
    parent = directory.parent
    why = str(error.strerror)
    if error.errno in NO_SPACE:
        why = f"there is no space left: {format_bytes(shutil.disk_usage(parent).free)} are free"
    return MachineError(
        f"the model cannot be written to {directory}: {why}",
        hint=f"make room (`df -h {shlex.quote(str(parent))}`), and start the run again: it goes on "
        "from its last checkpoint",
    )
