"""Accelerate's configuration file, for a recommendation and for a trial.

Accelerate is a launcher: it shards, offloads, recomputes and shares sequences, and does not know
model, length or batch. It has two ways to share a sequence. Torch's context parallelism passes keys
and values round a ring (with ``alltoall``), and FSDP2 shards the states as predicted: this is
chosen if every layer has plain causal attention. Ulysses is DeepSpeed's, with ZeRO-3 for the
states: it is chosen for models with windows (docs/decisions/019).

Source of the names: ``commands/config/config_args.py`` and ``launch.py`` of accelerate 1.15.0; of
what a ring refuses: ``_attach_context_parallel_hooks`` in its ``big_modeling.py``.

In a trial's file the user's fields stay, except for the number and place of processes, and named
settings. A way to share states other than FSDP also stays the user's (docs/decisions/059).
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from highwater.errors import UsageError
from highwater.model.model import ModelShape, load_model
from highwater.nouns.foreign_request import filled_command, launched_command, placeholders_of
from highwater.nouns.layout import Layout
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import FROM_OUTSIDE, SHARED, ForeignTrainer, ForeignTraits
from highwater.nouns.trial import TrialSpec
from highwater.trainers.emitted import (
    Dialect,
    Emitted,
    Value,
    environment,
    exports,
    fused_attention,
    is_fused,
    nested,
    refuse_kept_attention,
    refuse_obstacle,
    shape_here,
    whole_logits_bytes,
)
from highwater.trainers.foreign import (
    OUTPUT,
    TRIAL_FIELDS,
    ForeignCommand,
    TrialFiles,
    TrialHome,
    TrialStart,
    fsdp_keys,
    mapping_in,
    own_file,
    told_of,
    write_files,
)
from highwater.trainers.targets import OF_LORA, OF_THE_ENGINE, EmitTarget

VERSION = "1.15.0"
WORDS = Dialect("accelerate", "accelerate", VERSION)
FILE = "accelerate.yaml"
_FUSED_LOSS = ", where Liger fuses it: `use_liger_kernel=True` of transformers' TrainingArguments"
_COMMAND = f"accelerate launch --config_file {FILE} train.py"
SequenceSharing = Literal["none", "ring", "heads"]
"""How GPUs share a sequence: not at all, by FSDP2's ring, or by DeepSpeed's Ulysses."""


def accelerate(
    found: Recommendation, chosen: Candidate, *, model_path: str | None = None
) -> Emitted:
    """Configure processes and sharing. Raises UsageError for layouts that neither backend has."""
    cell, shape = chosen.cell, shape_here(found, model_path)
    refuse_obstacle(cell, lambda _, layout: layout_obstacle(layout, shape, WORDS))
    settings, sharing = cell.settings, sharing_of(cell.layout, shape)
    variables, dtype = environment(settings), "float32" if settings.lora is None else "bfloat16"
    model = model_path or found.model_name
    said = [
        *exports(variables),
        f"the script loads {model} in {dtype}, with {attention(sharing, shape)}",
    ]
    if sharing != "none":
        needs = "needs deepspeed 0.18.2 or newer; " if sharing == "heads" else ""
        multiple = padded_to(cell.layout, sharing)
        said.append(f"{needs}each batch is padded to a multiple of {multiple}")
    return WORDS.emitted(
        found,
        chosen,
        said,
        launched_values(cell, sharing),
        command=_COMMAND,
        environment=variables,
        cannot=(
            *_of_the_script(found, chosen, sharing, shape),
            *instead(cell, sharing),
        ),
        yarn="the model is the script's",
        logits_bytes=None if is_fused(cell, shape) else whole_logits_bytes(chosen, shape),
    )


def layout_obstacle(layout: Layout, shape: ModelShape | None, words: Dialect) -> str | None:
    """Reason why neither DeepSpeed nor FSDP2 in accelerate takes a layout; None if one does."""
    if layout.context_degree > 1 and shape is not None and not shape.has_plain_attention:
        if layout.ring_degree > 1:
            return (
                f"{words.name}'s ring needs layers that read every earlier token, and "
                f"{shape.model_type} has others"
            )
        if layout.replicate_degree > 1:
            return f"{words.name} shares heads by DeepSpeed, whose ZeRO-3 has no copies"
        if fused_attention(shape) != "flash_attention_2":
            kind = "neither sinks nor wide heads"
            return f"{words.name} shares heads by DeepSpeed, whose attention takes {kind}"
    elif 1 < layout.context_degree == layout.shard_degree < layout.gpus:
        return f"{words.name} has no copies of one ring: it wants two rings in each"
    return words.shared_copies(layout)


def sharing_of(layout: Layout, shape: ModelShape | None) -> SequenceSharing:
    """How a layout's sequences are shared: by a ring if FSDP2 can, whatever was predicted."""
    if layout.context_degree == 1:
        return "none"
    return "ring" if shape is None or shape.has_plain_attention else "heads"


def padded_to(layout: Layout, sharing: SequenceSharing) -> int:
    """Tokens to whose multiple a row is padded; each rank of a ring has two chunks."""
    return layout.context_degree * (2 if sharing == "ring" else 1)


def attention(sharing: SequenceSharing, shape: ModelShape | None) -> str:
    """Name in transformers of the attention: torch's context parallelism supports only ``sdpa``."""
    return "sdpa" if sharing == "ring" else fused_attention(shape)


def instead(cell: Cell, sharing: SequenceSharing) -> tuple[str, ...]:
    """Sentences on how accelerate shares sequences where it differs from the prediction."""
    strategy, layout = cell.settings.strategy, cell.layout
    if sharing == "heads":
        return (
            f"Ulysses with {strategy}: it is DeepSpeed's, and ZeRO-3 shards the states, with "
            "buffers of its own",
        )
    said: list[str] = []
    if sharing == "ring" and layout.ulysses_degree > 1:
        said.append(
            f"Ulysses with {strategy}: {layout.context_degree} GPUs pass keys and values round a "
            "ring instead, by FSDP2's context parallelism, which shards the states as predicted"
        )
    elif sharing == "ring" and strategy == "fsdp":
        said.append("a ring with fsdp: it is FSDP2's")
    return tuple(said)


def _of_the_script(
    found: Recommendation, chosen: Candidate, sharing: SequenceSharing, shape: ModelShape | None
) -> tuple[str, ...]:
    settings, degree = chosen.cell.settings, chosen.cell.layout.context_degree
    shared = f", over {degree} GPUs" if degree > 1 else ""
    entropy = "" if settings.entropy == "none" else f" and {settings.entropy} entropy"
    critic = ", and a critic that is trained along" if settings.critic else ""
    tokens = f"{settings.sequences_per_micro_batch} x {found.length_tokens} tokens{shared}"
    alone = "" if settings.accumulates else ", and updates after each: gradients are not added up"
    said = [
        f"the token budget of {chosen.token_budget_tokens} a GPU: the script makes micro-batches, "
        f"of {tokens}{alone}",
        f"the objective {settings.objective} with {settings.loss} loss{entropy}{critic}: they are "
        f"the script's{_FUSED_LOSS if is_fused(chosen.cell, shape) else ''}",
    ]
    if settings.lora is not None:
        base = ", and the model is packed in NF4" if settings.lora_base == "nf4" else ""
        said.append(f"LoRA of rank {settings.lora}: adapters are put on{base} by the script")
    if settings.optimizer != "adamw":
        said.append(f"{settings.optimizer_traits.words}: the script makes the optimizer")
    if sharing == "heads" and settings.recompute != "none":
        said.append(
            "recomputation with DeepSpeed: the script calls the model's "
            "gradient_checkpointing_enable()"
        )
    return tuple(said)


def launched_values(cell: Cell, sharing: SequenceSharing) -> dict[str, Value]:
    """Keys for the start of processes, and for sharing states and sequences."""
    layout, settings = cell.layout, cell.settings
    has_fsdp2 = sharing == "ring" or settings.strategy == "fsdp2"  # even if FSDP1 was predicted
    if settings.activations == "host" and (sharing == "heads" or not has_fsdp2):
        # Source: `FullyShardedDataParallelPlugin` of accelerate 1.15.0
        is_heads = sharing == "heads"
        raise UsageError(
            "accelerate puts activations in host memory with FSDP2 alone",
            hint=f"use `--ring {layout.context_degree}`" if is_heads else "use `--strategy fsdp2`",
        )
    values: dict[str, Value] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if sharing == "heads" else "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": layout.gpus,
    }
    if sharing == "heads":
        return values | _deepspeed(cell)
    fsdp: dict[str, Value] = {
        "version": 2 if has_fsdp2 else 1,
        "reshard_after_forward": True if has_fsdp2 else "FULL_SHARD",
        **({} if has_fsdp2 else {"use_orig_params": True}),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "offload_params": settings.offloads_model,
        "activation_checkpointing": settings.recompute != "none",
        **({"activation_checkpointing_offload": True} if settings.activations == "host" else {}),
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return (
        values | {f"fsdp_config.fsdp_{name}": value for name, value in fsdp.items()} | _mesh(layout)
    )


def _deepspeed(cell: Cell) -> dict[str, Value]:
    """Keys of DeepSpeed: ZeRO-3 for the states, Ulysses for the sequences."""
    where = "cpu" if cell.settings.offloads_model else "none"
    zero: dict[str, Value] = {
        "zero_stage": 3,
        "offload_param_device": where,
        "offload_optimizer_device": where,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    }
    shares: dict[str, Value] = {
        "dp_replicate_size": 1,
        "dp_shard_size": cell.layout.data_parallel_degree,
        "sp_size": cell.layout.ulysses_degree,
        "sp_backend": "deepspeed",
        "sp_seq_length_is_variable": True,
        "sp_attn_implementation": "flash_attention_2",
    }
    return {f"deepspeed_config.{name}": value for name, value in zero.items()} | {
        f"parallelism_config.parallelism_config_{name}": value for name, value in shares.items()
    }


def _mesh(layout: Layout) -> dict[str, Value]:
    """Keys for FSDP2's copies and rings; empty without both."""
    copies, ring = layout.replicate_degree, layout.context_degree
    if copies == ring == 1:
        return {}
    shares: dict[str, Value] = {
        "dp_replicate_size": copies,
        "dp_shard_size": layout.shard_degree // ring,
        "cp_size": ring,
        **({"cp_backend": "torch", "cp_comm_strategy": "alltoall"} if ring > 1 else {}),
    }
    return {f"parallelism_config.parallelism_config_{name}": n for name, n in shares.items()}


ON_THE_CPU: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": True,
}
"""Fields of a trial on the CPU."""
SHARDING = ("fsdp_version", "fsdp_reshard_after_forward", "fsdp_use_orig_params")
"""FSDP's keys for the sharding of states."""
_ONE_MACHINE: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,  # a free one: not that of a trial beside this one
    "gpu_ids": "all",
    "use_cpu": False,
}
"""Fields of every trial on GPUs, whose processes are on its own GPUs alone."""
_OF_A_CLUSTER = (
    *("main_process_ip", "rdzv_backend", "same_network", "mpirun_config"),
    *("command_file", "commands", "tpu_name", "tpu_zone", "tpu_vm", "tpu_env"),
    *("tpu_use_cluster", "tpu_use_sudo"),
)
"""The user's fields about several machines, which a trial leaves out."""
_SHARED = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
"""Sections on how several processes share states and sequences."""
_KEPT_MODES = ("NO", "MULTI_GPU", "DEEPSPEED", "MEGATRON_LM")
"""Values of ``distributed_type``, besides FSDP, that a trial keeps from the user's file."""
_BY_COMMAND = (
    "start accelerate yourself: `--trainer command --command 'accelerate launch --config_file "
    "accelerate.yaml --num_processes {gpus} train.py --max-len {length}'`"
)


ENDS: Mapping[str, Any] = TRIAL_FIELDS["ends"]
"""Last fields of every trial by transformers' trainer: no other output, no shrinking batch."""


def refuse_unlaunched(spec: TrialSpec, *, name: str) -> None:
    """Raise UsageError for settings that accelerate, or the trainer ``name``, cannot launch."""
    settings, layout = spec.settings, spec.layout
    if layout.ring_degree > 1 and settings.strategy == "fsdp":
        raise UsageError(f"{name}'s ring is FSDP2's, not FSDP's", hint="use `--strategy fsdp2`")
    refuse_kept_attention(name, settings)
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
) -> TrialFiles:
    """Accelerate's file for a trial, on the user's (``base``, of ``source``). Raises UsageError."""
    refuse_unlaunched(spec, name="accelerate")
    if spec.layout.ulysses_degree > 1:
        raise UsageError(
            "accelerate's Ulysses is DeepSpeed's, with other shards: a trial shares sequences by "
            "FSDP2's ring",
            hint=f"use `--ulysses 1 --ring {spec.layout.context_degree}`",
        )
    cell = Cell(settings=spec.settings, layout=spec.layout)
    refuse_obstacle(cell, lambda _, layout: layout_obstacle(layout, shape, WORDS))
    if spec.device == "cuda":
        _refuse_base(spec, base, source)
    kept = {name: value for name, value in base.items() if name not in _OF_A_CLUSTER}
    if spec.device == "cpu":  # one process, which shares nothing; the user's other fields stay
        kept = {name: value for name, value in kept.items() if name not in _SHARED}
        fixed = {name: value for name, value in ON_THE_CPU.items() if name != "mixed_precision"}
        return TrialFiles(
            {**ON_THE_CPU, **kept, **fixed},
            notes=(
                "on the CPU accelerate starts one process: FSDP and its recomputation are on GPUs",
            ),
        )
    own: dict[str, Any] = {**_ONE_MACHINE, "num_processes": spec.layout.gpus}
    theirs = kept.get("distributed_type") or "FSDP"
    if theirs != "FSDP":
        kept.pop("parallelism_config", None)
        note = f"states are shared by {source}'s {theirs}, not by FSDP"
        values = {**kept, **own}
        return TrialFiles(values, notes=(note, *_changed(base, values, source)))
    for name in _SHARED:
        kept.pop(name, None)
    ours: dict[str, Any] = nested(launched_values(cell, sharing_of(spec.layout, shape)))
    fsdp = fsdp_keys(base)
    is_theirs = ours["fsdp_config"]["fsdp_version"] == int(fsdp.get("fsdp_version") or 1)
    ours["fsdp_config"] = over_fsdp(
        fsdp, ours["fsdp_config"], spec.settings, ours_always=SHARDING[: 1 if is_theirs else None]
    )
    values = {**ours, **kept, **own}
    notes = [*_changed(base, values, source)]
    if values["fsdp_config"]["fsdp_activation_checkpointing"]:
        notes.append(
            "accelerate recomputes each layer, by FSDP's activation checkpointing: `--recompute "
            "none` where the script does it by itself"
        )
    if fsdp and not is_theirs and "strategy" not in spec.settings.named:
        notes.append(f"FSDP2 shards, where {source} has FSDP1: `--strategy fsdp` keeps that")
    return TrialFiles(values, notes=tuple(notes))


def over_fsdp(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    settings: Settings,
    *,
    ours_always: Collection[str],
) -> dict[str, Any]:
    """FSDP's keys of a trial: ours where a setting is named, or always; else the user's."""
    meant = {*ours_always}
    meant |= {"fsdp_offload_params"} if "offload" in settings.named else set()
    meant |= {"fsdp_activation_checkpointing"} if "recompute" in settings.named else set()
    return {**ours, **theirs, **{name: ours[name] for name in ours if name in meant}}


def _refuse_base(spec: TrialSpec, base: Mapping[str, Any], source: str) -> None:
    """Raise UsageError for a file for other machines, or with ways to share that no trial has, and
    for flags that need FSDP where the file has another mode.
    """
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
    if mode == "FSDP":
        return
    named, layout = spec.settings.named, spec.layout
    flags = {
        "--ring": layout.ring_degree > 1,
        "--copies": layout.replicate_degree > 1,
        **{f"--{name}": name in named for name in ("strategy", "recompute", "offload")},
    }
    flag = next((flag for flag, is_named in flags.items() if is_named), None)
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
    """Notes naming the user's fields, but for the number of processes, that the trial changes."""
    before, after = ({**each, **fsdp_keys(each)} for each in (base, values))
    changed = (name for name, value in before.items() if value and after.get(name) != value)
    return told_of(source, [*{*changed} - {"fsdp_config", "num_processes"}])


def _prepare(spec: TrialSpec, foreign: ForeignTrainer, home: TrialHome) -> ForeignCommand:
    """Write accelerate's file into a trial's folder, and return the command that launches it."""
    found = _launcher_file(spec, foreign)
    write_files({FILE: found.config}, found.notes, home.folder)
    model = home.prepared(None) if _opens_model(foreign) else None
    program, words = launched_command(foreign.command)
    filled = filled_command((program, *words), spec, home.folder / OUTPUT, model=model)
    return ForeignCommand(
        words=(filled[0], "launch", "--config_file", str(home.folder / FILE), *filled[1:])
    )


def _launcher_file(spec: TrialSpec, foreign: ForeignTrainer) -> TrialFiles:
    own = own_file(foreign, "name the file that `accelerate config` wrote")
    shape = load_model(spec.model_directory).shape
    return launcher_file(spec, shape, own.config, source=own.source if own.config else FILE)


def _opens_model(foreign: ForeignTrainer) -> bool:
    """True if the command has a placeholder for the model's directory."""
    return "model" in placeholders_of(foreign.command)


TRIED = ForeignTraits(
    is_typed=True,
    is_launched=True,
    settings=FROM_OUTSIDE
    | SHARED
    | {"command", "trainer_config", "strategy", "recompute", "offload"},
)
TRIAL = TrialStart(
    _prepare, lambda spec, foreign, _: _launcher_file(spec, foreign).notes, _opens_model
)
TARGET = EmitTarget(
    file=FILE,
    emit=accelerate,
    yours=("train.py beside it: the script, which makes the micro-batches that CHECK.md names",),
    predicted_for="accelerate",
    knows=OF_THE_ENGINE | OF_LORA | {"lora_base", "critic", "optimizer", "activations"},
)
