"""ms-swift: its configuration file for supervised training, for a recommendation and for a trial.

FSDP2 is configured by a second file, in JSON. Its sequence parallelism shares key heads among as
many GPUs as divide them, and such groups of GPUs pass keys and values round a ring.

Source of the names: ``arguments`` of ms-swift 4.6.0, ``config/fsdp2.json`` and ``cli/main.py``; of
their effects: ``sequence_parallel/sequence_parallel.py`` and ``trainers/seq2seq_trainer.py``.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from highwater.errors import UsageError
from highwater.model.model import ModelShape
from highwater.model.model_place import catalog_model, is_hub_id
from highwater.nouns.environment import ALLOCATOR_VARIABLES
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import OF_FINETUNERS, ForeignTraits
from highwater.trainers.accelerate import ENDS
from highwater.trainers.emitted import (
    ATTENTIONS,
    DATASET,
    OPTIMIZERS,
    Dialect,
    Value,
    environment,
    fused_attention,
    is_fused,
    listed,
    model_lies,
    to_replace,
)
from highwater.trainers.files import (
    COUNTED,
    DOCUMENTS,
    Finetuner,
    FinetunerTrial,
    FineTuning,
    is_ddp,
    of_recomputation,
    trial_start,
)
from highwater.trainers.foreign import TRIAL_FIELDS, OwnFile, TrialFiles, mapping_in
from highwater.trainers.targets import OF_LORA, OF_THE_ENGINE, EmitTarget

VERSION = "4.6.0"
FILE = "ms-swift.yaml"
SHARDING = "fsdp.json"
_FLASH = "attn_impl: flash_attention_2 needs the package flash-attn, and packing needs it"
_KIND = (
    "a directory that is not called as the model on the Hub wants to be told what it is: "
    "`--model_type qwen3 --template qwen3`, for example; the error lists those that it may be"
)
_FUSED_LOSS = "use_liger_kernel is the chunked loss, and needs the package liger-kernel"
_DDP = "DDP: each GPU has a copy of the model in NF4"
_RECOMPUTES = "gradient_checkpointing"
_VARIABLES = "ENV"
_PROCESSES = "NPROC_PER_NODE"
_OF_A_LAUNCH = (_PROCESSES, "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_BY_COMMAND = (
    "leave it out, or start it yourself: `--trainer command --command 'swift sft base.yaml "
    "--max_length {length} --max_steps {steps} --output_dir {output}'`"
)


class _MsSwift(Finetuner):
    name = "ms-swift"
    words = Dialect("ms-swift", "ms-swift", VERSION)
    program = "swift"
    package = "ms-swift"
    subcommand = "sft"
    file = FILE
    yarn = "the model is read from there"
    unknown = "for this family, which Liger does not know"
    left_out = tuple(TRIAL_FIELDS["ms-swift"])
    ends: ClassVar = {**ENDS, "create_checkpoint_symlink": False}
    refused: ClassVar = dict.fromkeys(("deepspeed", "device_map", "use_ray"), _BY_COMMAND)
    by_setting: ClassVar = {
        "optimizer": ("optim",),
        "recompute": (),
        "lora": ("tuner_type", "lora_*", "target_modules", "quant_*", "bnb_*"),
    }
    attention = "attn_impl"
    without_flash: ClassVar = {"attn_impl": "sdpa", "packing": None}
    more_tokens = 64

    def fuses(self, training: FineTuning) -> bool:
        # with shared sequences, Liger's loss would have no effect
        cell = training.cell
        return cell.layout.context_degree == 1 and is_fused(cell, training.shape)

    def command(self, training: FineTuning) -> str:
        # ms-swift's YAML has no variables
        return f"swift sft {FILE}" + ("" if training.model_path else ' --model "$MODEL_PATH"')

    def beside(self, training: FineTuning) -> Mapping[str, str]:
        if is_ddp(training.cell):
            return {}
        return {SHARDING: json.dumps(_sharding(training.cell.settings), indent=2) + "\n"}

    def said(self, training: FineTuning) -> list[str]:
        path = training.model_path
        return [
            _DDP
            if is_ddp(training.cell)
            else f"beside it {SHARDING}: how it is sharded, and recomputed",
            *model_lies(path),
            to_replace("dataset", "learning_rate", settings=training.cell.settings),
            *(() if path and is_hub_id(path) else (_KIND,)),
            ATTENTIONS.get(fused_attention(training.shape), _FLASH),
            *((_FUSED_LOSS,) if self.fuses(training) else ()),
        ]

    def why_unfused(self, layout: Layout) -> str:
        return "with shared sequences" if layout.context_degree > 1 else self.unknown

    def cannot(self, training: FineTuning) -> list[str]:
        cell, shape = training.cell, training.shape
        settings, layout = cell.settings, cell.layout
        said: list[str] = []
        by_heads = _sharing_heads(layout, shape)
        if by_heads != layout.ulysses_degree:
            ring = layout.context_degree // by_heads
            rest = f", and {ring} such groups pass keys and values on" if ring > 1 else ""
            said.append(
                f"{layout.suffix.removeprefix(', ')}: {by_heads} GPUs share heads{rest}, as the "
                "number of key heads has it"
            )
        if settings.strategy == "fsdp":
            said.append("FSDP1: it is written for FSDP2")
        return said

    def values(self, training: FineTuning) -> dict[str, Value]:
        cell, model_path = training.cell, training.model_path
        settings, layout = cell.settings, cell.layout
        values: dict[str, Value] = {"model": model_path} if model_path else {}
        # by default, ms-swift looks for an id on ModelScope
        values |= {"use_hf": True} if model_path is None or is_hub_id(model_path) else {}
        variables: dict[str, Value] = {_PROCESSES: layout.gpus, **environment(settings)}
        return values | {
            **_trained_values(settings),
            "dataset.0": DATASET,
            "torch_dtype": "bfloat16",
            "bf16": True,
            "attn_impl": fused_attention(training.shape),
            "max_length": training.length_tokens,
            "packing": True,
            "per_device_train_batch_size": settings.sequences_per_micro_batch,
            "gradient_accumulation_steps": 1,
            "sequence_parallel_size": layout.context_degree,
            _RECOMPUTES: is_ddp(cell) and settings.recompute != "none",
            **({} if is_ddp(cell) else {"fsdp": SHARDING}),
            "optim": OPTIMIZERS[settings.optimizer],
            "learning_rate": 1e-5,
            **({"use_liger_kernel": True} if self.fuses(training) else {}),
            **{f"ENV.{name}": value for name, value in variables.items()},
        }

    def shared_otherwise(self, launched: FinetunerTrial) -> UsageError | None:
        layout = launched.spec.layout
        by_heads = _sharing_heads(layout, launched.shape)
        if by_heads == layout.ulysses_degree:
            return None
        return UsageError(
            f"ms-swift shares heads among {by_heads} of {layout.context_degree} GPUs, as the "
            f"model's {launched.shape.kv_heads} key heads have it",
            hint=f"use `--ulysses {by_heads} --ring {layout.context_degree // by_heads}`",
        )

    def own(self, launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:
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

    def settled(
        self, launched: FinetunerTrial, config: dict[str, Any], base: OwnFile
    ) -> TrialFiles:
        """The files, with one for FSDP2, and only one recomputation; on the CPU without FSDP."""
        recomputes = of_recomputation(launched, base)
        left = (*ALLOCATOR_VARIABLES, *_OF_A_LAUNCH)
        theirs = mapping_in(base.config, _VARIABLES)
        variables: dict[str, Any] = {n: value for n, value in theirs.items() if n not in left}
        own: dict[str, Any] = {_VARIABLES: variables, _RECOMPUTES: recomputes}
        notes = _known_by(launched, base)
        if launched.is_on_cpu:
            return TrialFiles({**config, **own, "fsdp": None}, notes=notes)
        sharding = _sharding(launched.spec.settings)
        section = mapping_in(sharding, "fsdp_config")
        section["activation_checkpointing"] = section["activation_checkpointing"] and not recomputes
        if config.get("quant_bits") == 4:
            section["cpu_ram_efficient_loading"] = False
        variables[_PROCESSES] = launched.spec.layout.gpus
        beside = {SHARDING: {**sharding, "fsdp_config": section}}
        return TrialFiles({**config, **own}, beside, notes)

    def start(self, launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
        return (*words, "sft", str(launched.place.folder / FILE))

    def environment(self, launched: FinetunerTrial) -> Mapping[str, str]:
        """Variable for the number of processes, which the user's shell may set differently."""
        return {} if launched.is_on_cpu else {_PROCESSES: str(launched.spec.layout.gpus)}


MS_SWIFT = _MsSwift()


def _sharing_heads(layout: Layout, shape: ModelShape | None) -> int:
    """Number of GPUs that share a sequence by heads in ms-swift; a ring joins such groups."""
    key_heads = layout.ulysses_degree if shape is None else shape.kv_heads
    return math.gcd(key_heads, layout.context_degree)


def _trained_values(settings: Settings) -> dict[str, Value]:
    """Fields for training the whole model, or adapters; NF4 is bitsandbytes'."""
    lora = settings.adapters
    if lora is None:
        return {"tuner_type": "full"}
    values: dict[str, Value] = {
        "tuner_type": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": float(lora.alpha),
        "lora_dropout": 0.0,
        **listed("target_modules", lora.names or (lora.targets,)),
    }
    if lora.base == "nf4":
        values |= {
            "quant_method": "bnb",
            "quant_bits": 4,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "bfloat16",
        }
    return values


def _sharding(settings: Settings) -> dict[str, object]:
    """Content of FSDP2's file, with its recomputation, as in ms-swift's ``config/fsdp2.json``."""
    offload = " offload" if settings.offloads_model else ""
    return {
        "fsdp": f"full_shard auto_wrap{offload}",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": settings.lora_base != "nf4",
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": settings.recompute != "none",
        },
    }


def _known_by(launched: FinetunerTrial, base: OwnFile) -> tuple[str, ...]:
    """Note on how ms-swift recognises the model, if its directory's name may not be enough."""
    name = launched.spec.model_name
    if "model_type" in base.config or catalog_model(name) is not None or is_hub_id(name):
        return ()
    return (
        "ms-swift tells a model by its directory's name: where that is not as on the Hub, "
        "`model_type` and `template` in `--trainer-config` say what it is",
    )


TRIED = ForeignTraits(settings=OF_FINETUNERS | {"ulysses", "ring"}, has_run_on_gpus=False)
TRIAL = trial_start(MS_SWIFT)
TARGET = EmitTarget(
    file="ms-swift.yaml",
    is_in_guides=False,
    emit=MS_SWIFT.emit,
    yours=(
        "`dataset` in ms-swift.yaml, which is a stand-in",
        "learning rate and `gradient_accumulation_steps` there",
    ),
    predicted_for="ms-swift",
    knows=OF_THE_ENGINE | OF_LORA | {"lora_base", "optimizer"},
)
