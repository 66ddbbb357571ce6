"""Trials of LLaMA-Factory. Names: as in ``trainers/llamafactory.py``."""

from collections.abc import Mapping
from typing import Any

from highwater.trainers.accelerate import FILE as LAUNCHER
from highwater.trainers.emitted import nested
from highwater.trainers.finetuner_files import (
    COUNTED,
    DOCUMENTS,
    Finetuner,
    FinetunerFiles,
    FinetunerTrial,
    OwnFile,
)
from highwater.trainers.llamafactory import (
    FILE,
    llamafactory_launcher,
    llamafactory_values,
    refuse_untrainable,
)

_DATASET = "documents"
_DATASETS = "dataset_info.json"
"""The file in which it looks for what a dataset is."""
_BY_FSDP = "leave it out: a trial shares states by FSDP, which accelerate's file says"


def _refuse(launched: FinetunerTrial) -> None:
    refuse_untrainable(launched.cell)


def _own(launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    spec, place = launched.spec, launched.place
    return {
        "model_name_or_path": str(place.model_directory),
        "stage": "sft",
        "do_train": True,
        "dataset": _DATASET,
        "dataset_dir": str(place.folder),
        "cutoff_len": spec.length_tokens,
        "per_device_train_batch_size": spec.settings.sequences_per_micro_batch,
        "gradient_accumulation_steps": spec.micro_batches,
        "max_steps": spec.steps,
        "output_dir": str(place.output),
        "use_cpu": launched.is_on_cpu,
        f"include_{COUNTED}": True,
    }


def _settled(launched: FinetunerTrial, config: dict[str, Any], base: OwnFile) -> FinetunerFiles:  # noqa: ARG001
    """The data's description, and on GPUs accelerate's file, beside the configuration."""
    config.setdefault("template", "empty")
    described = {_DATASET: {"file_name": DOCUMENTS, "columns": {"response": "text"}}}
    beside: dict[str, Any] = {_DATASETS: described}
    if not launched.is_on_cpu:
        launcher = nested(llamafactory_launcher(launched.cell))
        if config.get("quantization_bit"):
            launcher["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
        # 0: a free port, not that of a trial beside this one
        beside[LAUNCHER] = launcher | {"main_process_port": 0, "use_cpu": False}
    return FinetunerFiles(config, beside)


def _start(launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
    """Its own command on the CPU; on GPUs accelerate's, as its examples with FSDP have it."""
    file = str(launched.place.folder / FILE)
    if launched.is_on_cpu:
        return (*words, "train", file)
    launcher = str(launched.place.folder / LAUNCHER)
    starts = ("accelerate", "launch", "--config_file", launcher, "-m", "llamafactory.launcher")
    return (*words[:-1], *starts, file)


def _environment(launched: FinetunerTrial) -> Mapping[str, str]:  # noqa: ARG001
    return {}


LLAMAFACTORY = Finetuner(
    name="llamafactory",
    program="llamafactory-cli",
    package="llamafactory",
    subcommand="train",
    file=FILE,
    values=llamafactory_values,
    refuse=_refuse,
    own=_own,
    settled=_settled,
    start=_start,
    environment=_environment,
    left_out=(
        *("dataset", "eval_dataset", "dataset_dir", "media_dir", "tokenized_path", "streaming"),
        *("mix_strategy", "interleave_probs", "max_samples", "val_size", "eval_on_each_dataset"),
        *("num_train_epochs", "save_steps", "eval_steps", "resume_from_checkpoint", "hub_*"),
        *("overwrite_output_dir", "run_name", "swanlab_*", "trackio_*"),
    ),
    ends={
        "do_eval": False,
        "do_predict": False,
        "predict_with_generate": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "plot_loss": False,
        "use_swanlab": False,
        "report_to": "none",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "auto_find_batch_size": False,
    },
    refused={"deepspeed": _BY_FSDP, "fsdp": _BY_FSDP, "fsdp_config": _BY_FSDP},
    trains={"stage": "sft"},
    by_setting={
        "optimizer": ("optim",),
        "recompute": ("disable_gradient_checkpointing", "use_reentrant_gc"),
        "lora": ("finetuning_type", "lora_*", "quantization_*", "double_quantization"),
    },
    attention="flash_attn",
    without_flash={"flash_attn": "sdpa", "neat_packing": None},
    multiple=8,
    more_tokens=64,
)
"""How a trial of LLaMA-Factory is written and started."""
