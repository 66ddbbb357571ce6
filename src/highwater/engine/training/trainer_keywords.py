"""Trainer keywords: those of ``highwater.run_trial`` that concern a step, made into a TrialSpec and
checked on this process, whose GPU represents every rank's. Also a process of its own that prepares
models and documents for another trainer: ``python -m highwater.engine.training.trainer_keywords
ORDER.json REPORT.json``.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

from highwater.engine.data.text_tokens import exact_texts
from highwater.engine.models.pretrained import openable_directory
from highwater.engine.training.rank_context import device_of
from highwater.errors import HighwaterError, UsageError
from highwater.model.families import family_row
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.cluster import Cluster
from highwater.nouns.corpus import PreparationOrder, Prepared
from highwater.nouns.environment import SETTING, SNAPSHOTS, SnapshotOrder, refuse_profiling
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import plan_trial
from highwater.nouns.request import DECLARED, TOPICS, Request, request_from
from highwater.nouns.trial import Device, TrialSpec, serve
from highwater.units import format_tokens

_RUNG = ("memory", "token_budget", "device", "logit_range", SETTING, "log_dir")
"""Settings of a trial that concern a step although ``emit`` does not take them."""
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?: ([^\s`-][^\s`]*))?")
_FLAGS = re.compile(rf"`((?:{_FLAG.pattern} ?)+)`")
_NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")
KEYWORDS = tuple(
    row.name
    for topic, rows in TOPICS.items()
    for row in rows
    if topic in ("optimizer", "objective")
    or (topic == "trial" and ("emit" in row.commands or row.name in _RUNG))
)
"""Settings that a Trainer takes, besides model, length and seed."""


def trial_of(
    model: str, length_tokens: int, settings: Mapping[str, Any], *, seed: int
) -> tuple[TrialSpec, Request]:
    """Return the trial whose step a Trainer takes, and the request that asks for it.

    Raises HighwaterError, with keywords in its hint, for settings that no step can have.
    """
    try:
        if settings.get("activations") == "auto":
            raise UsageError(
                "activations are placed by predictions of a whole trial, and a Trainer makes none",
                hint="use `--activations gpu`, or `--activations host`",
            )
        for name in settings:
            if name == "gpus":
                raise UsageError(
                    "gpus: a Trainer is on one GPU, and its loop runs once for each",
                    hint="leave `gpus` out, and start as many processes: `python -m "
                    "highwater.engine.ranks --nproc 2 loop.py`",
                )
            is_unheard = name == "log_dir" and SETTING not in settings
            if is_unheard or (name in DECLARED and name not in KEYWORDS):
                raise UsageError(
                    f"{name} is a setting of searches and trials, and says nothing about a step",
                    hint=f"leave `{name}` out",
                )
        device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        request = request_from({"model": model, "device": device, **settings}, keywords=True)
        device, ranks = request.device or device, int(os.environ.get("WORLD_SIZE", "1"))
        request = request.replace(gpus=(ranks,), device=device, allow_busy=True)
        loaded = load_model(request.model)
        if not family_row(loaded.shape.model_type).saves_yarn and yarn(
            loaded, length_tokens=length_tokens, rope=request.settings.rope
        ):
            native = loaded.shape.native_length_tokens
            raise UsageError(
                f"{loaded.shape.model_type} in transformers takes no YaRN from its config: what is "
                f"saved of {loaded.name} after training with it could not be loaded",
                hint=f"use `length={native}`, the {format_tokens(native)} tokens that it was made "
                "for, or less, and leave `rope` out",
            )
        profiling, snapshots = request.memory_profiler, None
        refuse_profiling(profiling, device=device)
        spec = plan_trial(request, _machine(device, ranks), length_tokens)
    except HighwaterError as error:
        error.hint = in_keywords(error.hint)
        raise
    if profiling is not None:  # a loop has no log for snapshots to lie beside
        directory = Path(request.log_dir).resolve() / SNAPSHOTS
        snapshots = SnapshotOrder(directory=str(directory), profiling=profiling)
    return spec.replace(seed=seed, memory_snapshots=snapshots), request


def in_keywords(hint: str) -> str:
    """Rewrite a command line's hint with Python keywords instead of flags."""
    return _FLAGS.sub(_as_keywords, hint)


def _as_keywords(flags: re.Match[str]) -> str:
    """Rewrite flags as keywords: ``ulysses=4, ring=2``; a flag without value becomes its name."""
    found = _FLAG.findall(flags[1])
    spelled = (
        f"{name.replace('-', '_')}={value if _NUMBER.fullmatch(value) else repr(value)}"
        if value
        else name.replace("-", "_")
        for name, value in found
    )
    return f"`{', '.join(spelled)}`"


def _machine(device: Device, ranks: int) -> Machine:
    """Describe the machine to plan with: this host, and a GPU like this process's for each rank."""
    memory, here = psutil.virtual_memory(), Cluster(gpus=0, device_name=device, device_bytes=0)
    if device == "cuda" and torch.cuda.is_available():
        own = device_of(device)
        here = Cluster(
            gpus=ranks,
            device_name=torch.cuda.get_device_name(own),
            device_bytes=torch.cuda.get_device_properties(own).total_memory,
            compute_capability=torch.cuda.get_device_capability(own),
        )
    return here.machine().replace(
        cpu_cores=len(os.sched_getaffinity(0)),
        host_memory_total_bytes=memory.total,
        host_memory_available_bytes=memory.available,
    )


def prepare(order: PreparationOrder, scratch: Path) -> Prepared:
    """Return a model directory that any trainer opens, made by way of ``scratch`` if the model's
    own lacks files; write the ordered documents.

    Raises HighwaterError if such a directory cannot be made.
    """
    directory = openable_directory(
        Path(order.model_directory), Path(order.cache_directory), scratch, seed=order.seed
    )
    if (wanted := order.documents) is not None:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        texts = exact_texts(
            tokenizer,
            length_tokens=wanted.length_tokens,
            count=wanted.count,
            seed=order.seed,
            end=(wanted.end or str(tokenizer.eos_token)) if wanted.kind == "text" else "",
        )
        lines = "".join(json.dumps({wanted.kind: text}) + "\n" for text in texts)
        Path(wanted.path).write_text(lines, encoding="utf-8")
    return Prepared(model_directory=str(directory))


if __name__ == "__main__":
    serve(PreparationOrder, prepare)
