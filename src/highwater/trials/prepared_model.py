"""Prepared models: the directory that a foreign trainer opens in a trial, made by a process of the
data plane where the model's own has no weights or no tokenizer.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from threading import Event

import msgspec

from highwater.errors import HighwaterError, MachineError
from highwater.model.model import load_model
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.preparation import (
    ORDER_FILE,
    PREPARED_FILE,
    DocumentOrder,
    PreparationOrder,
    Prepared,
    missing_files,
    prepared_name,
)
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import (
    ON_THE_CPU,
    clean_environment,
    exit_code_of,
    failed,
    private_folder,
)
from highwater.units import format_bytes

_PREPARATION = "highwater.engine.training.trainer_inputs"
_PREPARE_S = 3600.0
"""Longest time of a preparation: random weights of 70 billion parameters take minutes to write."""
_BF16_BYTES = 2


def prepared_model(
    spec: TrialSpec,
    folder: Path,
    ended: Event,
    on_phase: OnPhase,
    *,
    documents: DocumentOrder | None = None,
) -> Path:
    """The directory to train from, after the documents are written, if any are asked for. No
    process is started where it is there already and none are.

    Raises what the preparation refused, and MachineError where it failed.
    """
    there = _there(spec)
    if there is not None and documents is None:
        return there
    order = PreparationOrder(
        model_directory=spec.model_directory,
        cache_directory=str(model_cache(os.environ)),
        scratch_directory="",
        documents=documents,
        seed=spec.seed,
    )
    return Path(_prepared(order, folder, ended, on_phase).model_directory)


def model_cache(environment: Mapping[str, str]) -> Path:
    """The folder of directories that were made to train from: ``$XDG_CACHE_HOME/highwater/models``,
    by default in ``~/.cache``.
    """
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "highwater", "models")


def refuse_full_disk(spec: TrialSpec) -> None:
    """Raise MachineError where random weights would have to be written and there is no room."""
    if not missing_files(Path(spec.model_directory)).weights or _there(spec) is not None:
        return
    cache = model_cache(os.environ)
    needed_bytes = _BF16_BYTES * load_model(spec.model_directory).shape.parameters
    place = next(each for each in (cache, *cache.parents) if each.is_dir())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise MachineError(
            f"{spec.model_name} has no weights here: random ones take "
            f"{format_bytes(needed_bytes)}, and {cache} has {format_bytes(free_bytes)} free",
            hint="name a folder with room: `export XDG_CACHE_HOME=/path`",
        )


def _there(spec: TrialSpec) -> Path | None:
    """The model's own directory where nothing is missing, or what was made of it; None: neither."""
    source = Path(spec.model_directory)
    missing = missing_files(source)
    if not any(missing):
        return source
    made = model_cache(os.environ) / prepared_name(source, spec.seed, missing)
    return made if made.is_dir() else None


def _prepared(order: PreparationOrder, folder: Path, ended: Event, on_phase: OnPhase) -> Prepared:
    cache = Path(order.cache_directory)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with private_folder(cache, kind="model-") as scratch:
            order = msgspec.structs.replace(order, scratch_directory=str(scratch))
            (folder / ORDER_FILE).write_text(to_json(order), encoding="utf-8")
            _run(folder, scratch, ended, on_phase)
    except OSError as error:
        raise MachineError(
            f"the model to train from could not be prepared: {error}",
            hint="make room there, or name another folder: `export XDG_CACHE_HOME=/path`",
        ) from error
    prepared = from_json((folder / PREPARED_FILE).read_bytes(), Prepared)
    if prepared.refused is not None:
        raise HighwaterError(prepared.refused.problem, hint=prepared.refused.hint)
    return prepared


def _run(folder: Path, scratch: Path, ended: Event, on_phase: OnPhase) -> None:
    """Run the preparation to its end; nothing of it runs any more when this returns or raises."""
    log = folder / "preparation.log"
    with log.open("wb") as talk:
        process = subprocess.Popen(
            under_reaper(module(_PREPARATION, str(folder)), inherit=[scratch]),
            env=clean_environment("native") | ON_THE_CPU,
            stdin=subprocess.DEVNULL,
            stdout=talk,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = exit_code_of(
            process, timeout_s=_PREPARE_S, ended=ended, tell=lambda: on_phase("preparing")
        )
    if status != 0:
        raise failed("what is trained on could not be prepared", log, status)
