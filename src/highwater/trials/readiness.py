"""Checks, before the first trial, for faults that would make all fail; features of packages."""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from highwater.errors import UsageError
from highwater.model.held_bytes import checkpoint_bytes
from highwater.model.model import load_model
from highwater.nouns.codec import Record
from highwater.nouns.environment import refuse_profiling
from highwater.nouns.foreign_request import LAUNCHED_EXAMPLE as EXAMPLE
from highwater.nouns.foreign_request import launched_command, program_of, split_words
from highwater.nouns.hardware import Machine, unfit_gpu
from highwater.nouns.objective import RolloutRequest
from highwater.nouns.plan import SHORTEST_TIMEOUT_S
from highwater.nouns.request import Request
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import FOREIGN, OURS, foreign_name
from highwater.nouns.trial import REPORTERS, Device
from highwater.nouns.trial_hardware import used_gpus
from highwater.store.directory import check_checkpoint_directory, check_log_directory
from highwater.trials.probe import (
    OLDEST,
    package_obstacles,
    refuse_busy_gpus,
    refuse_missing_package,
    refuse_package_obstacles,
    refuse_unreadable_gpus,
    release_of,
    torch_without_gpu,
    versions_of,
)
from highwater.units import format_seconds


def check_request(request: Request, machine: Machine, *, steps: int) -> None:
    """Raise UsageError or MachineError for a request that no trial on its device can serve."""
    device: Device = request.device or (
        "cuda" if machine.gpus or machine.unreadable_gpus else "cpu"
    )
    if request.rollout_request != RolloutRequest():
        raise UsageError(
            "no trial has a rollout beside it: what one takes is predicted, on paper",
            hint="leave `rollout` out, and what belongs to it",
        )
    floor_s = SHORTEST_TIMEOUT_S[device]
    if request.timeout_s < floor_s:
        raise UsageError(
            f"a timeout of {format_seconds(request.timeout_s)} ends a trial before it has started",
            hint=f"use `--timeout {floor_s:.0f}s` or more; the default is `--timeout 40m`",
        )
    refuse_profiling(request.memory_profiler, device=device, is_dry=request.dry_run, steps=steps)
    if device == "cuda" and not request.dry_run:
        refuse_unreadable_gpus(machine, count=max(request.gpus or (1,)))


def check_machine(
    request: Request, machine: Machine, settings: Settings, device: Device, *, gpus: int
) -> None:
    """Raise if a trial lacks packages, its data function or free GPUs; skipped in a dry run."""
    if request.dry_run:
        return
    if request.on_ray:  # nodes were checked when read; busy GPUs are, at launch
        if request.trainer == OURS:
            refuse_missing_package(settings, machine.versions)
        return
    if request.trainer == OURS:
        refuse_package_obstacles(machine)
        if request.data is not None:
            _refuse_no_function(request.data)
        refuse_missing_package(settings)
        for gpu in used_gpus(machine, device=device, count=gpus):
            if (unfit := unfit_gpu(gpu.name, gpu.compute_capability)) is not None:
                raise unfit
    else:  # another trainer's packages are its own affair
        program, trainer = program_of(request), foreign_name(request.trainer)
        is_launched = trainer is not None and FOREIGN[trainer].is_launched
        if program is not None and shutil.which(program) is None:
            raise UsageError(
                f"the command's program {program!r} is not found, or cannot be run",
                hint="`pip install accelerate`, or say where it is: `--command "
                f"'/path/to/accelerate launch {EXAMPLE}'`"
                if is_launched
                else "give its whole path, or a program in PATH: `--command 'python ...'`",
            )
        words = split_words(request.command) if is_launched and request.command else None
        script = None if words is None else launched_command(words).script
        if script is not None and not script.is_file():
            raise UsageError(
                f"the command's script {script} is not a file here",
                hint="give its whole path, or go where it is; a module is `--command '-m PACKAGE "
                "...'`",
            )
    if device == "cuda":
        refuse_unreadable_gpus(machine, count=gpus)
        if not request.allow_busy:
            refuse_busy_gpus(machine, count=gpus)
        if request.trainer == OURS and (error := torch_without_gpu(machine)) is not None:
            raise error


def check_directories(request: Request, settings: Settings, device: Device) -> None:
    """Raise unless logs and checkpoints can be written; skipped in a dry run."""
    if request.dry_run:
        return
    check_log_directory(Path(request.log_dir))
    if request.on_ray or request.trainer != OURS:
        return
    # Equal for every rung and layout, and one trial saves at a time.
    needed = checkpoint_bytes(load_model(request.model).shape, settings, device)
    if any(needed):
        check_checkpoint_directory(Path(request.checkpoint_dir or request.log_dir), needed)


def _refuse_no_function(source: str) -> None:
    """Raise UsageError for a data function that a trial would not find; its module is never run."""
    module, _, name = source.partition(":")
    assert module and name, "refused where the trial is made"  # noqa: S101, PT018
    whole, *inner = module.split(".")
    spec = None
    with suppress(ValueError):  # a name that no module can have
        spec = find_spec(whole) or PathFinder.find_spec(whole, [str(Path.cwd())])
    for part in inner:
        whole = f"{whole}.{part}"
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else PathFinder.find_spec(whole, list(places))
    hint = "check the name, and that it is in this folder, or that PYTHONPATH has its folder"
    if spec is None:
        raise UsageError(f"data source {source!r}: there is no module {module!r}", hint=hint)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    text = Path(spec.origin).read_text(errors="replace")
    if not re.search(rf"\b{re.escape(name)}\b|import \*|__getattr__|globals|setattr|exec", text):
        raise UsageError(f"data source {source!r}: {spec.origin} has no {name!r}", hint=hint)


class Feature(Record, frozen=True, kw_only=True):
    """Commands or flags that need the same packages, and what is missing for them."""

    what: str
    """The commands or flags, as they are typed."""
    extras: tuple[str, ...] = ()
    """Extras of pyproject.toml that bring the packages; empty: nothing more is needed."""
    obstacles: tuple[str, ...] = ()
    """One line for each missing or unfit package; empty: the feature works."""

    @property
    def works(self) -> bool:
        """True if no package is missing or unfit."""
        return not self.obstacles

    @property
    def install(self) -> str:
        """Command that mends all obstacles, to be typed in the checkout of highwater."""
        return f"pip install '.[{','.join(self.extras)}]'"


_FREE = "predict, recommend, guide, emit, show, report, profile"
_TRIALS = "find, try, train, bench attention, predict --exact"
_HUB = "models by any id of the Hub, where the network reaches it"
_OF_TRIALS = (
    ("find, try and train --lora", "lora", ("peft",)),
    ("find, try and train --lora-base nf4", "qlora", ("peft", "bitsandbytes")),
    ("find, try and train --optimizer adamw-8bit, adamw-bf16", "low-bit", ("torchao",)),
    *((f"train --report-to {name}", name, (name,)) for name in REPORTERS),
    ("train on Parquet and saved datasets", "data", ("datasets",)),
    ("find and try --runner ray", "ray", ("ray",)),
)
"""Features of trials that need one or two more packages: flags, extra, packages."""


def features(machine: Machine) -> tuple[Feature, ...]:
    """Features of this installation, working or not; those without further packages first."""
    lacking = package_obstacles(machine)
    beside = ("train",) if lacking else ()
    return (
        Feature(what=_FREE),
        Feature(what=_HUB, extras=("hub",), obstacles=_obstacles(("huggingface_hub",))),
        Feature(what=_TRIALS, extras=("train",), obstacles=lacking),
        *(
            Feature(
                what=what,
                extras=(*beside, extra),
                obstacles=(*(("trials do not work",) if lacking else ()), *_obstacles(packages)),
            )
            for what, extra, packages in _OF_TRIALS
        ),
    )


def _obstacles(packages: Sequence[str]) -> tuple[str, ...]:
    """One line for each of ``packages`` that is missing or too old."""
    installed = versions_of(packages)
    found: list[str] = []
    for package in packages:
        version = installed.get(package)
        oldest = OLDEST.get(package)
        if version is None:
            found.append(f"{package} is not installed")
        elif oldest is not None and release_of(version) < oldest:
            found.append(f"{package} {version} is too old")
    return tuple(found)
