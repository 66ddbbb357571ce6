"""A search as a file: its configuration in YAML (unknown keys are errors, flags override it), and
the script of a job of Slurm.

The job's command runs on the first machine, and starts the ranks of all of them by ``srun``. Slurm
signals the job before its time is up; a job that is submitted again resumes the study. Source:
sbatch(1), srun(1) of Slurm.
"""

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from highwater.errors import UsageError
from highwater.nouns.codec import SETTINGS_BYTES, read_file, to_builtins
from highwater.nouns.request import DECLARED, Request, request_from
from highwater.nouns.trainer import FOREIGN, foreign_name
from highwater.trainers.foreign import yaml_value

SCHEMA_ID = "urn:highwater:schema:study"


def settings_in(config: str | None, model: str | None) -> dict[str, Any]:
    """Settings of a file, if any, and the typed model; UsageError if it cannot be read."""
    if config is None:
        return {}
    from_file = _read_yaml(Path(config))
    if model is not None:
        from_file["model"] = model
    read = to_builtins(request_from(from_file, config_file=config))
    return {name: read[name] for name in from_file}


def to_yaml(request: Request) -> str:
    """YAML configuration of a request, with every setting that its trainer takes."""
    settings = {name: value for name, value in to_builtins(request).items() if value is not None}
    foreign = foreign_name(request.trainer)
    if foreign is not None:
        told = FOREIGN[foreign].settings
        settings = {name: value for name, value in settings.items() if name in told}
    if request.token_budget is not None:
        settings.pop("sequences_per_micro_batch", None)
    settings = {
        name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
    }
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=False).rstrip()


def as_key(name: str, value: object) -> str:
    """A setting as a line of a configuration file."""
    text = yaml.safe_dump(to_builtins(value), default_flow_style=True, width=10_000)
    shown = text.strip().removesuffix("...").rstrip()
    return f"{name}: {shown}"


def config_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file. No key is required: a flag may name the model."""
    schema = msgspec.json.schema(Request)
    request = schema["$defs"]["Request"]
    del request["required"]
    request["description"] = " ".join(request["description"].split())
    settings = request["properties"]
    for name, value in settings.items():
        row = DECLARED[name]
        if row.is_list:
            several = value.pop("anyOf", None) or [
                {key: value.pop(key) for key in ("type", "items")}
            ]
            value["anyOf"] = [{"type": "integer"}, *several]
        settings[name] = {"description": row.help, **value}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}


def _read_yaml(path: Path) -> dict[str, object]:
    # os.path never raises
    name = "study.yaml" if os.path.exists(path) and not os.path.isfile(path) else str(path)  # noqa: PTH110, PTH113
    example = (
        f"`highwater find Qwen3-0.6B --print-config > {shlex.quote(name)}` writes one that works"
    )
    try:
        written = read_file(path, most_bytes=SETTINGS_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=example) from error
    content = yaml_value(written, path, hint=example)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path} is not a list of settings, `name: value`", hint=example)
    return content


_USUAL_S = 4 * 3600
"""Seconds of a job without a budget: the next job goes on with what is not found then."""
_START_S = 600
"""Seconds of a job besides the search's: machines start one after another, trials end in order."""
_WARNED_S = 120
_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def sbatch_script(request: Request, words: Sequence[str]) -> str:
    """Script of a Slurm job that runs ``words``, a ``highwater find`` command.

    Raises UsageError if no number of GPUs is named, and for a word with a line end.
    """
    words = [word for word in words if word != "--print-sbatch"]
    if request.nodes > 1 and request.launcher is None:
        one_each = f"--nodes {request.nodes} --ntasks-per-node 1"
        words += ["--launcher", f"srun {one_each} --kill-on-bad-exit"]
    if request.nodes > 1 and request.rendezvous is None:
        words += ["--rendezvous", str(Path(request.log_dir, "rendezvous", "ranks"))]
    for word in words:
        if len(f"{word}.".splitlines()) > 1:
            raise UsageError(
                f"a job of Slurm has its command in one line, and {word!r} has several",
                hint="name a file without a line end, or `--config find.yaml` with what it says",
            )
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(request)), ""]
    said = "# Finished trials are kept in the study: submit this again, and it goes on."
    return "\n".join((*lines, said, f"exec {shlex.join(words)}"))


def _options(request: Request) -> list[str]:
    name = _NOT_OF_A_NAME.sub("-", request.model.rstrip("/").rpartition("/")[2])
    options = [f"--job-name=highwater-{name}"]
    options += [f"--nodes={request.nodes}", "--ntasks-per-node=1"]
    if request.device != "cpu":
        if request.gpus is None:
            raise UsageError(
                "a job of Slurm asks for a number of GPUs, and none is named",
                hint=f"use `--gpus {8 * request.nodes}`",
            )
        options.append(f"--gpus-per-node={math.ceil(max(request.gpus) / request.nodes)}")
    minutes = math.ceil((_START_S + (request.budget_s or _USUAL_S)) / 60)
    options.append(f"--time={minutes // 60:02d}:{minutes % 60:02d}:00")
    options.append(f"--signal=B:TERM@{_WARNED_S}")
    return [*options, "--output=highwater-%j.log"]  # Slurm makes no directory for it
