"""A trial as accelerate's configuration file: how processes start and share, by the trial's layout
and settings, over the fields of the user's own file.

A field of the user's stays unless it says how many processes there are and where, or a setting that
was named. How states are shared is the user's too, if it is not by FSDP (docs/decisions/059).
Names: as in ``trainers/accelerate.py``.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from highwater.errors import UsageError
from highwater.model.model import ModelShape
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import launched_values, layout_obstacle, sharing_of
from highwater.trainers.emitted import nested, refuse_obstacle

ON_THE_CPU: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": True,
}
"""The file of a trial on the CPU."""
SHARDING = ("fsdp_version", "fsdp_reshard_after_forward", "fsdp_use_orig_params")
"""FSDP's keys that say how states are sharded."""
_ONE_MACHINE: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,  # a free one: not that of a trial beside this one
    "gpu_ids": "all",
    "use_cpu": False,
}
"""What every trial on GPUs says of its processes: those of its own GPUs, and no others."""
_OF_A_CLUSTER = (
    *("main_process_ip", "rdzv_backend", "same_network", "mpirun_config"),
    *("command_file", "commands", "tpu_name", "tpu_zone", "tpu_vm", "tpu_env"),
    *("tpu_use_cluster", "tpu_use_sudo"),
)
"""The user's fields about machines that a trial has not."""
_SHARED = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
"""Sections about how several processes share."""
_KEPT_MODES = ("NO", "MULTI_GPU", "DEEPSPEED", "MEGATRON_LM")
"""Ways to share states, or none, that stay where the user's file says them."""
_BY_COMMAND = (
    "start accelerate yourself: `--trainer command --command 'accelerate launch --config_file "
    "accelerate.yaml --num_processes {gpus} train.py --max-len {length}'`"
)


class LauncherFile(NamedTuple):
    """Accelerate's file for one trial, and what a reader should know of it."""

    values: dict[str, Any]
    notes: tuple[str, ...] = ()


def refuse_unlaunched(spec: TrialSpec, *, name: str) -> None:
    """Raise UsageError for settings that accelerate, or ``name`` above it, does not launch with."""
    settings, layout = spec.settings, spec.layout
    if layout.ring_degree > 1 and settings.strategy == "fsdp":
        raise UsageError(f"{name}'s ring is FSDP2's, not FSDP's", hint="use `--strategy fsdp2`")
    if settings.recompute == "all-but-attention":
        raise UsageError(
            f"{name} recomputes whole layers: it keeps no attention",
            hint="use `--recompute layer`",
        )
    if settings.offloads_states:
        raise UsageError(
            "accelerate offloads states with parameters and gradients, not alone",
            hint="use `--offload`, or leave it out",
        )
    if spec.device == "cpu" and (layout.gpus > 1 or settings.offloads_model):
        raise UsageError(
            "accelerate shards and offloads nothing on the CPU: one process trains there",
            hint="use `--gpus 1`, and leave `--offload` out",
        )
    pieces = 2 * layout.ring_degree
    if spec.length_tokens % pieces and layout.ring_degree > 1:
        near_tokens = max(pieces, spec.length_tokens // pieces * pieces)
        raise UsageError(
            f"a ring of {layout.ring_degree} cuts a sequence into {pieces} pieces, and "
            f"{spec.length_tokens} tokens are not a multiple",
            hint=f"use `--length {near_tokens}`; of a search `--start-length {near_tokens} "
            f"--resolution {pieces * 512}`",
        )


def launcher_file(
    spec: TrialSpec, shape: ModelShape, base: Mapping[str, Any], *, source: str
) -> LauncherFile:
    """Accelerate's file for one trial, over the fields of the user's own, which is called
    ``source``.

    Raises UsageError for what accelerate cannot be told, and for a file that says otherwise.
    """
    refuse_unlaunched(spec, name="accelerate")
    if spec.layout.ulysses_degree > 1:
        raise UsageError(
            "accelerate's Ulysses is DeepSpeed's, with other shards: a trial shares sequences by "
            "FSDP2's ring",
            hint=f"use `--ulysses 1 --ring {spec.layout.context_degree}`",
        )
    cell = Cell(settings=spec.settings, layout=spec.layout)
    refuse_obstacle(cell, lambda _, layout: layout_obstacle(layout, shape, name="accelerate"))
    if spec.device == "cuda":
        _refuse_base(base, source)
    kept = {name: value for name, value in base.items() if name not in _OF_A_CLUSTER}
    if spec.device == "cpu":
        return _on_the_cpu(kept)
    own: dict[str, Any] = {**_ONE_MACHINE, "num_processes": spec.layout.gpus}
    theirs = kept.get("distributed_type") or "FSDP"
    if theirs != "FSDP":
        _refuse_without_fsdp(spec, theirs, source)
        kept.pop("parallelism_config", None)
        note = f"states are shared by {source}'s {theirs}, not by FSDP"
        values = {**kept, **own}
        return LauncherFile(values, (note, *_changed(base, values, source)))
    for name in _SHARED:
        kept.pop(name, None)
    ours: dict[str, Any] = nested(launched_values(cell, sharing_of(spec.layout, shape)))
    fsdp = fsdp_keys(base)
    is_theirs = ours["fsdp_config"]["fsdp_version"] == int(fsdp.get("fsdp_version") or 1)
    ours["fsdp_config"] = over_fsdp(
        fsdp, ours["fsdp_config"], spec.settings, ours_always=SHARDING[: 1 if is_theirs else None]
    )
    values = {**ours, **kept, **own}
    notes = [*_changed(base, values, source), *_recomputed(values["fsdp_config"])]
    if fsdp and not is_theirs and spec.settings.strategy == Settings().strategy:
        notes.append(f"FSDP2 shards, where {source} has FSDP1: `--strategy fsdp` keeps that")
    return LauncherFile(values, tuple(notes))


def over_fsdp(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    settings: Settings,
    *,
    ours_always: Collection[str],
) -> dict[str, Any]:
    """FSDP's keys: the user's where a setting is at its default, ours where it was named, and those
    that are ours in any case.
    """
    usual, meant = Settings(), {*ours_always}
    meant |= {"fsdp_offload_params"} if settings.offload != usual.offload else set()
    meant |= {"fsdp_activation_checkpointing"} if settings.recompute != usual.recompute else set()
    return {**ours, **theirs, **{name: ours[name] for name in ours if name in meant}}


def fsdp_keys(base: Mapping[str, Any]) -> dict[str, Any]:
    """FSDP's keys of the user's, with the prefix that accelerate adds where it is not there."""
    section = mapping_in(base, "fsdp_config")
    return {
        name if name.startswith("fsdp") else f"fsdp_{name}": each for name, each in section.items()
    }


def mapping_in(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The section of this name; empty where there is none."""
    value = base.get(name)
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {}


def _on_the_cpu(kept: Mapping[str, Any]) -> LauncherFile:
    """The file of one process, which shares nothing; what else the user has stays."""
    kept = {name: value for name, value in kept.items() if name not in _SHARED}
    fixed = {name: value for name, value in ON_THE_CPU.items() if name != "mixed_precision"}
    return LauncherFile(
        {**ON_THE_CPU, **kept, **fixed},
        ("on the CPU accelerate starts one process: FSDP and its recomputation are on GPUs",),
    )


def _refuse_base(base: Mapping[str, Any], source: str) -> None:
    """Raise UsageError for a file of another machine, or of shares that no trial has."""
    where = base.get("compute_environment") or "LOCAL_MACHINE"
    mode = base.get("distributed_type") or "FSDP"
    if where != "LOCAL_MACHINE" or mode not in ("FSDP", *_KEPT_MODES):
        what = where if where != "LOCAL_MACHINE" else mode
        raise UsageError(
            f"{source} is for {what}, and a trial runs on GPUs of one machine",
            hint="leave `compute_environment` and `distributed_type` out of it",
        )
    for name, size in mapping_in(base, "parallelism_config").items():
        if name.endswith(("tp_size", "sp_size")) and int(size or 1) > 1:
            raise UsageError(
                f"{source} has {name}, and a trial shares by a ring, by copies and by shards",
                hint=_BY_COMMAND,
            )


def _refuse_without_fsdp(spec: TrialSpec, mode: str, source: str) -> None:
    """Raise UsageError for what FSDP alone has, where the user's file has something else."""
    usual, settings, layout = Settings(), spec.settings, spec.layout
    named = {
        "--ring": layout.ring_degree > 1,
        "--copies": layout.replicate_degree > 1,
        "--strategy": settings.strategy != usual.strategy,
        "--recompute": settings.recompute != usual.recompute,
        "--offload": settings.offload != usual.offload,
    }
    flag = next((flag for flag, is_named in named.items() if is_named), None)
    if flag is not None:
        raise UsageError(
            f"{flag} is FSDP's, and {source} has distributed_type {mode}",
            hint=f"leave `{flag}` out, or `distributed_type` out of {source}",
        )
    if mode == "NO" and layout.gpus > 1:
        raise UsageError(
            f"{source} has distributed_type NO: one process, and {layout.gpus} GPUs are asked for",
            hint=f"use `--gpus 1`, or leave `distributed_type` out of {source}",
        )


def _changed(base: Mapping[str, Any], values: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Which of the user's fields say something else in the trial, or nothing; the number of
    processes is the trial's anyway.
    """
    before, after = ({**each, **fsdp_keys(each)} for each in (base, values))
    changed = sorted(
        name
        for name, value in before.items()
        if name not in ("fsdp_config", "num_processes") and after.get(name) != value and value
    )
    return (f"the trial's own in {source}: {', '.join(changed)}",) if changed else ()


def _recomputed(fsdp: Mapping[str, Any]) -> tuple[str, ...]:
    if not fsdp["fsdp_activation_checkpointing"]:
        return ()
    return (
        "accelerate recomputes each layer, by FSDP's activation checkpointing: `--recompute none` "
        "where the script does it by itself",
    )
