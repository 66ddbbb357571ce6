"""A recommendation as LLaMA-Factory's configuration file, for its supervised training.

FSDP is accelerate's, whose file lies beside it. Recomputation is LLaMA-Factory's own, so that
FSDP's stays off. It loads a model in bfloat16, and has what is trained of it in float32. A sequence
is not shared among GPUs there.

Source of the names: ``hparams`` of llamafactory 0.9.5; of what they do: ``model/adapter.py``,
``model/model_utils`` and ``launcher.py``.

Trials of LLaMA-Factory. Names: as in ``trainers/llamafactory.py``.
"""

from collections.abc import Mapping
from typing import Any

from highwater.nouns.layout import Layout
from highwater.nouns.objective import Objective
from highwater.nouns.optimizer import OptimizerName
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.trainers.accelerate import FILE as LAUNCHER
from highwater.trainers.accelerate import launched_values
from highwater.trainers.emitted import (
    DATASET,
    WHOLE_SHARDS,
    Emitted,
    Value,
    emitted,
    engine_alone,
    environment,
    exports,
    heading,
    model_lies,
    nested,
    other_objective,
    refusals,
    refuse_obstacle,
    refuse_optimizer,
    to_replace,
    yaml_text,
    yarn_lines,
)
from highwater.trainers.finetuner_files import (
    COUNTED,
    DOCUMENTS,
    Finetuner,
    FinetunerFiles,
    FinetunerTrial,
    FineTuning,
    OwnFile,
    whole_alpha,
)
from highwater.trainers.logits import LIGER, is_fused, unfused, whole_logits_bytes

VERSION = "0.9.5"
FILE = "llamafactory.yaml"
OPTIMIZERS: Mapping[OptimizerName, str | None] = {
    "adamw": None,  # the default, torch's AdamW in the parameters' dtype
    "adamw-8bit": "adamw_torch_8bit",
}
"""``optim`` by optimizer: the other is torchao's, which FSDP shards."""
_FLASH = "flash_attn: fa2 needs the package flash-attn; without it another attention is taken"
FUSED = LIGER - {
    *("exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "olmo3", "smollm3"),
}
"""Families that it has Liger fuse the loss of (``model/model_utils/liger_kernel.py``)."""
_FUSED_LOSS = "enable_liger_kernel is the chunked loss, and needs the package liger-kernel"


def llamafactory(
    found: Recommendation, chosen: Candidate, *, model_path: str | None = None
) -> Emitted:
    """The file of ``llamafactory-cli train``, and accelerate's beside it.

    Raises UsageError for an objective other than ``sft``, for sequences shared among GPUs and for
    copies, for an optimizer that it does not have, and for an alpha that is no whole number.
    """
    settings = chosen.cell.settings
    refuse_untrainable(chosen.cell)
    training = FineTuning.of(found, chosen, model_path)
    has_fused = is_fused(chosen.cell, training.shape, FUSED)
    logits_bytes = None if has_fused else whole_logits_bytes(chosen, training.shape)
    cannot = [WHOLE_SHARDS] if settings.optimizer_traits.is_quantized else []
    if not has_fused:
        cannot += unfused(chosen.cell, "for this family, which its Liger kernel does not know")
    cannot += engine_alone(settings, name="LLaMA-Factory")
    variables = environment(chosen.cell.settings)
    elsewhere = "" if model_path else ' "model_name_or_path=$MODEL_PATH"'
    command = (
        f"accelerate launch --config_file {LAUNCHER} -m llamafactory.launcher {FILE}{elsewhere}"
    )
    said = [
        *heading(
            found,
            chosen,
            "llamafactory",
            name="LLaMA-Factory",
            version=VERSION,
            logits_bytes=logits_bytes,
        ),
        f"beside it {LAUNCHER}: how it is sharded",
        *model_lies(model_path, before="it starts"),
        *exports(variables, before="it starts"),
        to_replace("dataset", "template", "output_dir", "learning_rate", settings=settings),
        _FLASH,
        *((_FUSED_LOSS,) if has_fused else ()),
        *refusals(cannot, name="LLaMA-Factory"),
        *yarn_lines(found, why="its rope_scaling has whole factors alone"),
        f"start: {command}",
    ]
    return emitted(
        "llamafactory",
        VERSION,
        said,
        llamafactory_values(training),
        command=command,
        environment=variables,
        cannot=cannot,
        logits_bytes=logits_bytes,
        beside={LAUNCHER: _launcher(chosen.cell)},
    )


def refuse_untrainable(cell: Cell) -> None:
    """Raise UsageError for an objective, layout or optimizer that LLaMA-Factory does not have."""
    refuse_obstacle(cell, _obstacle)
    refuse_optimizer(cell.settings, OPTIMIZERS, name="LLaMA-Factory")


def _obstacle(objective: Objective, layout: Layout) -> str | None:
    """Why LLaMA-Factory's file is not written for an objective in a layout; None where it is."""
    unknown = other_objective(objective, ("sft",), name="LLaMA-Factory", is_written=True)
    if unknown is not None:
        return unknown
    if layout.context_degree > 1:
        return f"LLaMA-Factory {VERSION} shares no sequence among GPUs"
    if layout.replicate_degree > 1:
        return "LLaMA-Factory's states are sharded among all GPUs, without copies"
    return None


def _launcher(cell: Cell) -> str:
    said = [f"how accelerate starts {FILE}, which recomputes by itself"]
    return yaml_text(said, llamafactory_launcher(cell))


def llamafactory_launcher(cell: Cell) -> dict[str, Value]:
    """Accelerate's settings by name, which leave recomputation to LLaMA-Factory."""
    return launched_values(cell, "none") | {"fsdp_config.fsdp_activation_checkpointing": False}


def llamafactory_values(training: FineTuning) -> dict[str, Value]:
    """LLaMA-Factory's settings by name: what holds memory, and stand-ins for what is learned."""
    settings, model_path = training.cell.settings, training.model_path
    values: dict[str, Value] = {"model_name_or_path": model_path} if model_path else {}
    optimizer = OPTIMIZERS[settings.optimizer]
    return values | {
        "stage": "sft",
        "do_train": True,
        **_trained_values(settings),
        "dataset": DATASET,
        "cutoff_len": training.length_tokens,
        "neat_packing": True,
        "output_dir": "output",
        "per_device_train_batch_size": settings.sequences_per_micro_batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-5,
        "bf16": True,
        "flash_attn": "fa2",
        "disable_gradient_checkpointing": settings.recompute == "none",
        "use_reentrant_gc": False,
        **({"enable_liger_kernel": True} if is_fused(training.cell, training.shape, FUSED) else {}),
        **({} if optimizer is None else {"optim": optimizer}),
    }


def _trained_values(settings: Settings) -> dict[str, Value]:
    """All of the model, or adapters; a model in NF4 is bitsandbytes'."""
    lora = settings.adapters
    if lora is None:
        return {"finetuning_type": "full"}
    values: dict[str, Value] = {
        "finetuning_type": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": whole_alpha(lora, name="LLaMA-Factory"),
        "lora_dropout": 0.0,
        "lora_target": ",".join(lora.names or ("all",)),
    }
    if lora.base == "nf4":
        values |= {
            "quantization_method": "bnb",
            "quantization_bit": 4,
            "quantization_type": "nf4",
            "double_quantization": True,
        }
    return values


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
