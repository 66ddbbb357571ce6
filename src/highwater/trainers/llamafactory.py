"""LLaMA-Factory: its configuration for supervised training, for a recommendation and for a trial.

FSDP is accelerate's, in a second file. Recomputation is LLaMA-Factory's own, so that FSDP's stays
off. It loads a model in bfloat16, and converts trained parameters to float32. It does not share a
sequence among GPUs.

Source of the names: ``hparams`` of llamafactory 0.9.5; of their effects: ``model/adapter.py``,
``model/model_utils`` and ``launcher.py``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import OF_FINETUNERS, ForeignTraits
from highwater.trainers.accelerate import ENDS, launched_values
from highwater.trainers.accelerate import FILE as LAUNCHER
from highwater.trainers.emitted import (
    ATTENTIONS,
    DATASET,
    LIGER,
    Dialect,
    Value,
    comment,
    exports,
    fused_attention,
    is_fused,
    model_lies,
    nested,
    other_optimizer,
    to_replace,
    yaml_text,
)
from highwater.trainers.files import (
    COUNTED,
    DOCUMENTS,
    Finetuner,
    FinetunerTrial,
    FineTuning,
    is_ddp,
    trial_start,
)
from highwater.trainers.foreign import TRIAL_FIELDS, OwnFile, TrialFiles
from highwater.trainers.targets import OF_LORA, OF_THE_ENGINE, EmitTarget

VERSION = "0.9.5"
FILE = "llamafactory.yaml"
_FLASH = "flash_attn: fa2 needs the package flash-attn; without it another attention is taken"
_SINKS = {
    "flex_attention": "sinks: whatever flash_attn says, kernels-community/vllm-flash-attn3 is taken"
}
FUSED = LIGER - {
    *("exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "olmo3", "smollm3")
}
"""Families whose loss it fuses by Liger (``model/model_utils/liger_kernel.py``)."""
_FUSED_LOSS = "enable_liger_kernel is the chunked loss, and needs the package liger-kernel"
_DDP = "DDP, a copy for each GPU"
_DATASET = "documents"
_DATASETS = "dataset_info.json"
"""File in which it looks up descriptions of datasets."""
_BY_FSDP = "leave it out: a trial shares states by FSDP, which accelerate's file says"


class _LlamaFactory(Finetuner):
    name = "llamafactory"
    words = Dialect("llamafactory", "LLaMA-Factory", VERSION)
    program = "llamafactory-cli"
    package = "llamafactory"
    subcommand = "train"
    file = FILE
    yarn = "its rope_scaling has whole factors alone"
    unknown = "for this family, which its Liger kernel does not know"
    left_out = tuple(TRIAL_FIELDS["llamafactory"])
    ends: ClassVar = {
        "do_eval": False,
        "do_predict": False,
        "predict_with_generate": False,
        "plot_loss": False,
        "use_swanlab": False,
        **ENDS,
    }
    refused: ClassVar = dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _BY_FSDP)
    trains: ClassVar = {"stage": "sft"}
    by_setting: ClassVar = {
        "optimizer": ("optim",),
        "recompute": ("disable_gradient_checkpointing", "use_reentrant_gc"),
        "lora": ("finetuning_type", "lora_*", "quantization_*", "double_quantization"),
    }
    attention = "flash_attn"
    without_flash: ClassVar = {"flash_attn": "sdpa", "neat_packing": None}
    multiple = 8
    more_tokens = 64

    def obstacle(self, layout: Layout) -> str | None:
        if layout.context_degree > 1:
            return f"LLaMA-Factory {VERSION} shares no sequence among GPUs"
        return None

    def fuses(self, training: FineTuning) -> bool:
        return is_fused(training.cell, training.shape, FUSED)

    def command(self, training: FineTuning) -> str:
        elsewhere = "" if training.model_path else ' "model_name_or_path=$MODEL_PATH"'
        start = f"accelerate launch --config_file {LAUNCHER} -m llamafactory.launcher"
        return f"{start} {FILE}{elsewhere}"

    def beside(self, training: FineTuning) -> Mapping[str, str]:
        said = comment([f"how accelerate starts {FILE}, which recomputes by itself"])
        return {LAUNCHER: said + yaml_text(_launcher(training.cell))}

    def said(self, training: FineTuning) -> list[str]:
        settings = training.cell.settings
        return [
            f"beside it {LAUNCHER}: " + (_DDP if is_ddp(training.cell) else "how it is sharded"),
            *model_lies(training.model_path),
            *exports(self.variables(settings)),
            to_replace("dataset", "template", "output_dir", "learning_rate", settings=settings),
            (ATTENTIONS | _SINKS).get(fused_attention(training.shape), _FLASH),
            *((_FUSED_LOSS,) if self.fuses(training) else ()),
        ]

    def values(self, training: FineTuning) -> dict[str, Value]:
        settings, model_path = training.cell.settings, training.model_path
        values: dict[str, Value] = {"model_name_or_path": model_path} if model_path else {}
        return values | {
            "stage": "sft",
            "do_train": True,
            **self._trained_values(settings),
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
            **({"enable_liger_kernel": True} if self.fuses(training) else {}),
            **other_optimizer(settings),
        }

    def _trained_values(self, settings: Settings) -> dict[str, Value]:
        """Fields for training the whole model, or adapters; NF4 is bitsandbytes'."""
        lora = settings.adapters
        if lora is None:
            return {"finetuning_type": "full"}
        values: dict[str, Value] = {
            "finetuning_type": "lora",
            "lora_rank": lora.rank,
            "lora_alpha": self.words.whole_alpha(lora),
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

    def own(
        self,
        launched: FinetunerTrial,
        emitted: Mapping[str, Any],  # noqa: ARG002
    ) -> dict[str, Any]:
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

    def settled(
        self,
        launched: FinetunerTrial,
        config: dict[str, Any],
        base: OwnFile,  # noqa: ARG002
    ) -> TrialFiles:
        """The configuration, a description of the data and, on GPUs, accelerate's file."""
        config.setdefault("template", "empty")
        described = {_DATASET: {"file_name": DOCUMENTS, "columns": {"response": "text"}}}
        beside: dict[str, Any] = {_DATASETS: described}
        if not launched.is_on_cpu:
            launcher = nested(_launcher(launched.cell))
            if config.get("quantization_bit"):
                launcher["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
            # 0: a free port, not that of a trial beside this one
            beside[LAUNCHER] = launcher | {"main_process_port": 0, "use_cpu": False}
        return TrialFiles(config, beside)

    def start(self, launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
        """LLaMA-Factory's command on the CPU; on GPUs accelerate's, as in its FSDP examples."""
        file = str(launched.place.folder / FILE)
        if launched.is_on_cpu:
            return (*words, "train", file)
        launcher = str(launched.place.folder / LAUNCHER)
        starts = ("accelerate", "launch", "--config_file", launcher, "-m", "llamafactory.launcher")
        return (*words[:-1], *starts, file)


LLAMAFACTORY = _LlamaFactory()


def _launcher(cell: Cell) -> dict[str, Value]:
    """Accelerate's settings by name, for FSDP without its recomputation, or for DDP."""
    values = launched_values(cell, "none")
    if is_ddp(cell):
        shared = ("fsdp_config.", "parallelism_config.")
        kept = {name: value for name, value in values.items() if not name.startswith(shared)}
        return kept | {"distributed_type": "MULTI_GPU"}
    return values | {"fsdp_config.fsdp_activation_checkpointing": False}


TRIED = ForeignTraits(settings=OF_FINETUNERS | {"strategy"}, has_run_on_gpus=False)
TRIAL = trial_start(LLAMAFACTORY)
TARGET = EmitTarget(
    file="llamafactory.yaml",
    is_in_guides=False,
    emit=LLAMAFACTORY.emit,
    yours=(
        "`dataset` in llamafactory.yaml, which is a stand-in, with its `template` and "
        "`dataset_dir`",
        "learning rate, `output_dir` and `gradient_accumulation_steps` there",
    ),
    predicted_for="llamafactory",
    knows=OF_THE_ENGINE | OF_LORA | {"lora_base", "optimizer"},
)
