"""Trials of Axolotl. Names: as in ``trainers/axolotl.py``."""

from collections.abc import Mapping
from typing import Any

from highwater.errors import UsageError
from highwater.nouns.settings import Settings
from highwater.trainers.accelerate_files import mapping_in
from highwater.trainers.axolotl import FILE, axolotl_values, refuse_untrainable
from highwater.trainers.finetuner_files import (
    DOCUMENTS,
    Finetuner,
    FinetunerFiles,
    FinetunerTrial,
    OwnFile,
    of_recomputation,
)

_MESH = ("dp_replicate_size", "dp_shard_size", "context_parallel_size")
_RECOMPUTES = "gradient_checkpointing"
_SHARDING = (
    *("reshard_after_forward", "use_orig_params", "sync_module_states", "state_dict_type"),
    *("final_state_dict_type", "version", "sharding_strategy"),
)
"""FSDP's keys that are never the user's: how states are sharded, and that no whole model is saved
at the end."""
_SFT = "leave it out: trials are of its supervised training"
_BY_COMMAND = (
    "leave it out, or start it yourself: `--trainer command --command 'axolotl train base.yaml "
    "--sequence-len {length} --max-steps {steps} --output-dir {output}'`"
)


def _refuse(launched: FinetunerTrial) -> None:
    refuse_untrainable(launched.cell)
    layout = launched.spec.layout
    if layout.ulysses_degree > 1:
        raise UsageError(
            "Axolotl shares sequences by its context parallelism alone, which is a ring here",
            hint=f"use `--ulysses 1 --ring {layout.context_degree}`",
        )


def _own(launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:
    spec, place = launched.spec, launched.place
    is_shared = spec.layout.context_degree > 1
    return {
        "base_model": str(place.model_directory),
        "sequence_len": spec.length_tokens,
        "micro_batch_size": spec.settings.sequences_per_micro_batch,
        "gradient_accumulation_steps": spec.micro_batches,
        "max_steps": spec.steps,
        "num_epochs": 1,
        "datasets": [
            {
                "path": str(place.folder / DOCUMENTS),
                "ds_type": "json",
                "type": "completion",
                "field": "text",
            }
        ],
        "dataset_prepared_path": str(place.folder / "prepared"),
        "output_dir": str(place.output),
        "include_tokens_per_second": True,
        "fsdp": None,
        "fsdp_version": emitted["fsdp_version"],
        "fsdp_config": emitted["fsdp_config"],
        **{name: emitted.get(name) for name in _MESH},
        **({"attn_implementation": emitted["attn_implementation"]} if is_shared else {}),
    }


def _settled(launched: FinetunerTrial, config: dict[str, Any], base: OwnFile) -> FinetunerFiles:
    """FSDP's section over the user's own, and one of both that recompute; on the CPU no FSDP."""
    recomputes = of_recomputation(launched, base)
    if launched.is_on_cpu:
        own = dict.fromkeys(("fsdp_version", "fsdp_config", *_MESH))
        return FinetunerFiles({**config, **own, "bf16": False, _RECOMPUTES: recomputes})
    usual, settings = Settings(), launched.spec.settings
    ours: dict[str, Any] = config["fsdp_config"]
    if config.get("load_in_4bit"):
        ours = {**ours, "cpu_ram_efficient_loading": False}
    if recomputes:
        ours = {**ours, "activation_checkpointing": False}
    theirs = {
        name.removeprefix("fsdp_"): value
        for name, value in mapping_in(base.config, "fsdp_config").items()
    }
    meant = [*_SHARDING]
    meant += ["offload_params"] if settings.offload != usual.offload else []
    if recomputes or launched.has_named_recomputation:
        meant.append("activation_checkpointing")
    kept = {name: value for name, value in theirs.items() if name not in meant}
    own = {"fsdp_config": {**ours, **kept}}
    # as the user's file has it: a mode of Axolotl's own, too
    own |= {_RECOMPUTES: config[_RECOMPUTES] if recomputes else None}
    return FinetunerFiles({**config, **own})


def _start(launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
    """Its own command, without the launcher's file that ``accelerate config`` may have left."""
    told = (*words, "train", str(launched.place.folder / FILE), "--launcher")
    if launched.is_on_cpu:
        return (*told, "python")
    return (
        *told,
        "torchrun",
        "--",
        "--standalone",
        f"--nproc_per_node={launched.spec.layout.gpus}",
    )


def _environment(launched: FinetunerTrial) -> Mapping[str, str]:  # noqa: ARG001
    return {"AXOLOTL_DO_NOT_TRACK": "1"}


AXOLOTL = Finetuner(
    name="axolotl",
    program="axolotl",
    package="axolotl",
    subcommand="train",
    file=FILE,
    values=axolotl_values,
    refuse=_refuse,
    own=_own,
    settled=_settled,
    start=_start,
    environment=_environment,
    left_out=(
        *("datasets", "test_datasets", "pretraining_dataset", "streaming", "batch_size"),
        *("val_set_size", "dataset_prepared_path", "skip_prepare_dataset", "dataset_shard_*"),
        *("push_dataset_to_hub", "excess_length_strategy", "min_sample_len"),
        *("eval_*", "evals_per_epoch", "evaluation_strategy", "do_causal_lm_eval"),
        *("do_bench_eval", "save_steps", "saves_per_epoch", "save_total_limit"),
        *("early_stopping_patience", "generate_samples", "resume_from_checkpoint"),
        *("auto_resume_from_checkpoints", "hub_*", "wandb_*", "use_wandb", "mlflow_*"),
        *("use_mlflow", "hf_mlflow_*", "comet_*", "use_comet", "trackio_*", "use_trackio"),
        *("use_tensorboard", "otel_*", "use_otel_metrics", "sequence_parallel_degree"),
        *("metric_for_best_model", "greater_is_better"),
    ),
    ends={
        "val_set_size": 0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "logging_steps": 1,
        "auto_find_batch_size": False,
    },
    refused={
        "rl": _SFT,
        "reward_model": _SFT,
        "process_reward_model": _SFT,
        "deepspeed": _BY_COMMAND,
        "use_ray": _BY_COMMAND,
        "tensor_parallel_size": _BY_COMMAND,
        "expert_parallel_size": _BY_COMMAND,
    },
    by_setting={
        "optimizer": ("optimizer",),
        "recompute": (),
        "lora": ("adapter", "lora_*", "load_in_4bit"),
    },
    attention="attn_implementation",
    without_flash={"attn_implementation": "sdpa"},
    multiple=64,
)
"""How a trial of Axolotl is written and started."""
