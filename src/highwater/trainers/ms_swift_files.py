"""Trials of ms-swift. Names: as in ``trainers/ms_swift.py``."""

from collections.abc import Mapping
from typing import Any

from highwater.errors import UsageError
from highwater.model.hub import is_hub_id
from highwater.model.model_catalog import catalog_model
from highwater.nouns.allocator_variables import ALLOCATOR_VARIABLES
from highwater.trainers.accelerate_files import mapping_in
from highwater.trainers.finetuner_files import (
    COUNTED,
    DOCUMENTS,
    Finetuner,
    FinetunerFiles,
    FinetunerTrial,
    OwnFile,
    of_recomputation,
)
from highwater.trainers.ms_swift import (
    FILE,
    SHARDING,
    ms_swift_sharding,
    ms_swift_values,
    refuse_untrainable,
    sharing_heads,
)

_RECOMPUTES = "gradient_checkpointing"
_VARIABLES = "ENV"
_PROCESSES = "NPROC_PER_NODE"
_OF_A_LAUNCH = (_PROCESSES, "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_BY_COMMAND = (
    "leave it out, or start it yourself: `--trainer command --command 'swift sft base.yaml "
    "--max_length {length} --max_steps {steps} --output_dir {output}'`"
)


def _refuse(launched: FinetunerTrial) -> None:
    refuse_untrainable(launched.cell)
    layout = launched.spec.layout
    by_heads = sharing_heads(layout, launched.shape)
    if by_heads != layout.ulysses_degree:
        raise UsageError(
            f"ms-swift shares heads among {by_heads} of {layout.context_degree} GPUs, as the "
            f"model's {launched.shape.kv_heads} key heads have it",
            hint=f"use `--ulysses {by_heads} --ring {layout.context_degree // by_heads}`",
        )


def _own(launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:
    spec, place = launched.spec, launched.place
    is_shared = spec.layout.context_degree > 1
    return {
        "model": str(place.model_directory),
        "dataset": [str(place.folder / DOCUMENTS)],
        "max_length": spec.length_tokens,
        "truncation_strategy": "right",
        "per_device_train_batch_size": spec.settings.sequences_per_micro_batch,
        "gradient_accumulation_steps": spec.micro_batches,
        "max_steps": spec.steps,
        "output_dir": str(place.output),
        "add_version": False,
        "sequence_parallel_size": spec.layout.context_degree,
        "fsdp": str(place.folder / SHARDING),
        "fsdp_config": None,
        "use_cpu": launched.is_on_cpu,
        f"include_{COUNTED}": True,
        **({"attn_impl": emitted["attn_impl"]} if is_shared else {}),
    }


def _settled(launched: FinetunerTrial, config: dict[str, Any], base: OwnFile) -> FinetunerFiles:
    """FSDP2's file, and one of both that recompute; on the CPU one process without FSDP."""
    recomputes = of_recomputation(launched, base)
    left = (*ALLOCATOR_VARIABLES, *_OF_A_LAUNCH)
    theirs = mapping_in(base.config, _VARIABLES)
    variables: dict[str, Any] = {n: value for n, value in theirs.items() if n not in left}
    own: dict[str, Any] = {_VARIABLES: variables, _RECOMPUTES: recomputes}
    notes = _known_by(launched, base)
    if launched.is_on_cpu:
        return FinetunerFiles({**config, **own, "fsdp": None}, notes=notes)
    sharding = ms_swift_sharding(launched.spec.settings)
    section = mapping_in(sharding, "fsdp_config")
    section["activation_checkpointing"] = section["activation_checkpointing"] and not recomputes
    if config.get("quant_bits") == 4:
        section["cpu_ram_efficient_loading"] = False
    variables[_PROCESSES] = launched.spec.layout.gpus
    beside = {SHARDING: {**sharding, "fsdp_config": section}}
    return FinetunerFiles({**config, **own}, beside, notes)


def _known_by(launched: FinetunerTrial, base: OwnFile) -> tuple[str, ...]:
    """How ms-swift gets to know what the model is, where its name may not say it."""
    name = launched.spec.model_name
    if "model_type" in base.config or catalog_model(name) is not None or is_hub_id(name):
        return ()
    return (
        "ms-swift tells a model by its directory's name: where that is not as on the Hub, "
        "`model_type` and `template` in `--trainer-config` say what it is",
    )


def _start(launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
    return (*words, "sft", str(launched.place.folder / FILE))


def _environment(launched: FinetunerTrial) -> Mapping[str, str]:
    """Its number of processes, which the user's shell may say, too."""
    return {} if launched.is_on_cpu else {_PROCESSES: str(launched.spec.layout.gpus)}


MS_SWIFT = Finetuner(
    name="ms-swift",
    program="swift",
    package="ms-swift",
    subcommand="sft",
    file=FILE,
    values=ms_swift_values,
    refuse=_refuse,
    own=_own,
    settled=_settled,
    start=_start,
    environment=_environment,
    left_out=(
        *("dataset", "val_dataset", "cached_dataset", "cached_val_dataset", "eval_dataset"),
        *("split_dataset_ratio", "columns", "streaming", "interleave_prob"),
        *("stopping_strategy", "custom_dataset_info", "model_name", "model_author"),
        *("packing_length", "num_train_epochs", "max_epochs", "save_steps", "eval_steps"),
        *("save_total_limit", "resume_from_checkpoint", "metric_for_best_model"),
        *("greater_is_better", "hub_*", "swanlab_*", "run_name", "logging_dir"),
    ),
    ends={
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "create_checkpoint_symlink": False,
        "push_to_hub": False,
        "report_to": "none",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "auto_find_batch_size": False,
    },
    refused={"deepspeed": _BY_COMMAND, "device_map": _BY_COMMAND, "use_ray": _BY_COMMAND},
    by_setting={
        "optimizer": ("optim",),
        "recompute": (),
        "lora": ("tuner_type", "lora_*", "target_modules", "quant_*", "bnb_*"),
    },
    attention="attn_impl",
    without_flash={"attn_impl": "sdpa", "packing": None},
    more_tokens=64,
)
"""How a trial of ms-swift is written and started."""
