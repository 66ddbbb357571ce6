"""Axolotl: its configuration file for supervised training, for a recommendation and for a trial.

Its context parallelism is ring-flash-attn's, beside FSDP2: keys and values of a few heads are
gathered if sequences are packed, and passed round a ring if not. Its FSDP2 trains parameters in the
dtype that they are loaded in, bfloat16.

Source of the names: ``utils/schemas`` of axolotl 0.19.0; of their effects: ``utils/trainer.py``,
``monkeypatch/accelerate/fsdp2.py`` and ``monkeypatch/ring_attn``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from highwater.errors import UsageError
from highwater.nouns.environment import allocator_environment
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import OF_FINETUNERS, SHARED, ForeignTraits
from highwater.trainers.accelerate import layout_obstacle
from highwater.trainers.emitted import (
    ATTENTIONS,
    CUT_CROSS_ENTROPY,
    DATASET,
    LIGER,
    OPTIMIZERS,
    Dialect,
    Value,
    exports,
    fused_attention,
    is_fused,
    listed,
    model_lies,
    to_replace,
    yarn_values,
)
from highwater.trainers.files import (
    DOCUMENTS,
    Finetuner,
    FinetunerTrial,
    FineTuning,
    of_recomputation,
    trial_start,
)
from highwater.trainers.foreign import TRIAL_FIELDS, OwnFile, TrialFiles, mapping_in
from highwater.trainers.targets import OF_LORA, OF_THE_ENGINE, EmitTarget

VERSION = "0.19.0"
FILE = "axolotl.yaml"
_LIGER = "axolotl.integrations.liger.LigerPlugin"
_OF_LIGER = (
    *("liger_rope", "liger_rms_norm", "liger_glu_activation"),
    "liger_fused_linear_cross_entropy",
)
"""Liger's kernels: the predicted step has all of them, as one switch does in other trainers."""
_CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_NARROW = (
    "parameters in float32: with FSDP2 it has them, their gradients and both moments in bfloat16, "
    "which takes less, and loses updates below 0.2 % of a number; `--strategy fsdp` keeps float32"
)
_RING = (
    "sequences shared among GPUs need the package ring-flash-attn: pip install "
    "'axolotl[ring-flash-attn]'"
)
_LOSSES = {
    _LIGER: "the chunked loss and the kernels of layers are Liger's: its log says `Applying LIGER`",
    _CUT: "the chunked loss is Cut Cross Entropy, of Axolotl's own fork: where it is missing, the "
    "error says how to install it",
}
_FIRST: Mapping[str, Value] = {"use_orig_params": True, "sync_module_states": True}
"""Further keys for FSDP1, which shards everything by default."""
_MESH = ("dp_replicate_size", "dp_shard_size", "context_parallel_size")
_RECOMPUTES = "gradient_checkpointing"
_ON_HOST: Mapping[str, Value] = {_RECOMPUTES: True, "activation_offloading": "hidden_states"}
_SHARDING = (
    *("reshard_after_forward", "use_orig_params", "sync_module_states", "state_dict_type"),
    *("final_state_dict_type", "version", "sharding_strategy"),
)
"""FSDP's keys that a trial always sets: sharding, and how the model is saved at the end."""
_SFT = "leave it out: trials are of its supervised training"
_BY_COMMAND = (
    "leave it out, or start it yourself: `--trainer command --command 'axolotl train base.yaml "
    "--sequence-len {length} --max-steps {steps} --output-dir {output}'`"
)


class _Axolotl(Finetuner):
    name = "axolotl"
    words = Dialect("axolotl", "Axolotl", VERSION)
    program = package = "axolotl"
    subcommand = "train"
    file = FILE
    unknown = "for this family, which neither of its plugins knows"
    left_out = tuple(TRIAL_FIELDS["axolotl"])
    ends: ClassVar = TRIAL_FIELDS["axolotl, ends"]
    refused: ClassVar = {
        **dict.fromkeys(("rl", "reward_model", "process_reward_model"), _SFT),
        **dict.fromkeys(("deepspeed", "use_ray"), _BY_COMMAND),
        **dict.fromkeys(("tensor_parallel_size", "expert_parallel_size"), _BY_COMMAND),
    }
    by_setting: ClassVar = {
        "optimizer": ("optimizer",),
        "recompute": (),
        "lora": ("adapter", "lora_*", "load_in_4bit"),
    }
    attention = "attn_implementation"
    without_flash: ClassVar = {"attn_implementation": "sdpa"}
    multiple = 64
    has_copies = True

    def obstacle(self, layout: Layout) -> str | None:
        return layout_obstacle(layout, None, self.words)

    def fuses(self, training: FineTuning) -> bool:
        return bool(_fused_values(training))

    def variables(self, settings: Settings) -> dict[str, str]:
        # Axolotl turns expandable segments on by itself if the environment says nothing
        return allocator_environment(settings.allocator)

    def command(self, training: FineTuning) -> str:
        elsewhere = "" if training.model_path else ' --base_model="$MODEL_PATH"'
        start = f"torchrun --nproc_per_node={training.cell.layout.gpus} -m axolotl.cli.train"
        return f"{start} {FILE}{elsewhere}"

    def said(self, training: FineTuning) -> list[str]:
        settings, fused = training.cell.settings, _fused_values(training)
        return [
            *model_lies(training.model_path),
            *exports(self.variables(settings)),
            to_replace("datasets", "learning_rate", settings=settings),
            *filter(None, (ATTENTIONS.get(fused_attention(training.shape)),)),
            *((_RING,) if training.cell.layout.context_degree > 1 else ()),
            *((_LOSSES[str(fused["plugins.0"])],) if fused else ()),
        ]

    def cannot(self, training: FineTuning) -> list[str]:
        cell, settings, layout = training.cell, training.cell.settings, training.cell.layout
        said: list[str] = []
        if layout.context_degree > 1:
            how = "Ulysses" if layout.ring_degree == 1 else "a ring"
            does = "gather keys and values of a few heads" if _packs(cell) else "pass them on"
            said.append(
                f"{how}: {layout.context_degree} GPUs share each sequence by context parallelism, "
                f"where they {does}"
            )
        if not _packs(cell):
            said.append(
                f"packed sequences, {settings.sequences_per_micro_batch} in a micro-batch that "
                "GPUs share: batches are padded"
            )
        if _is_second(cell) and settings.strategy == "fsdp":
            said.append("FSDP1 with shared sequences or copies: they are FSDP2's")
        if _is_second(cell) and settings.lora is None:
            said.append(_NARROW)
        return said

    def values(self, training: FineTuning) -> dict[str, Value]:
        cell, model_path, settings = training.cell, training.model_path, training.cell.settings
        values: dict[str, Value] = {"base_model": model_path} if model_path else {}
        return values | {
            "sequence_len": training.length_tokens,
            "sample_packing": _packs(cell),
            **({"pad_to_sequence_len": True} if _packs(cell) else {}),
            "micro_batch_size": settings.sequences_per_micro_batch,
            "gradient_accumulation_steps": 1,
            "bf16": True,
            "attn_implementation": fused_attention(training.shape),
            "optimizer": OPTIMIZERS[settings.optimizer],
            "learning_rate": 1e-5,
            **self._lora_values(settings),
            **yarn_values(training.yarn, "overrides_of_model_config"),
            **_fused_values(training),
            # by Axolotl's own recomputation, in place of FSDP's
            **({} if settings.activations == "gpu" else _ON_HOST),
            **_sharding(cell),
            "datasets.0.path": DATASET,
            "datasets.0.type": "chat_template",
        }

    def _lora_values(self, settings: Settings) -> dict[str, Value]:
        """Fields of peft's adapters; NF4 is bitsandbytes', with quantized scales."""
        lora = settings.adapters
        if lora is None:
            return {}
        values: dict[str, Value] = {"adapter": "qlora" if lora.base == "nf4" else "lora"}
        values |= {"load_in_4bit": True} if lora.base == "nf4" else {}
        values |= {"lora_r": lora.rank, "lora_alpha": self.words.whole_alpha(lora)}
        values["lora_dropout"] = 0.0
        if lora.names is None:
            return values | {"lora_target_linear": True}
        return values | listed("lora_target_modules", lora.names)

    def shared_otherwise(self, launched: FinetunerTrial) -> UsageError | None:
        layout = launched.spec.layout
        if layout.ulysses_degree == 1:
            return None
        return UsageError(
            "Axolotl shares sequences by its context parallelism alone, which is a ring here",
            hint=f"use `--ulysses 1 --ring {layout.context_degree}`",
        )

    def own(self, launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:
        spec, place = launched.spec, launched.place
        documents = str(place.folder / DOCUMENTS)
        is_shared = spec.layout.context_degree > 1
        return {
            "base_model": str(place.model_directory),
            "sequence_len": spec.length_tokens,
            "micro_batch_size": spec.settings.sequences_per_micro_batch,
            "gradient_accumulation_steps": spec.micro_batches,
            "max_steps": spec.steps,
            "num_epochs": 1,
            "datasets": [
                {"path": documents, "ds_type": "json", "type": "completion", "field": "text"}
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

    def settled(
        self, launched: FinetunerTrial, config: dict[str, Any], base: OwnFile
    ) -> TrialFiles:
        """FSDP's section merged with the user's, with only one recomputation; none on the CPU."""
        recomputes = of_recomputation(launched, base)
        if launched.is_on_cpu:
            own = dict.fromkeys(("fsdp_version", "fsdp_config", *_MESH))
            return TrialFiles({**config, **own, "bf16": False, _RECOMPUTES: recomputes})
        named = launched.spec.settings.named
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
        meant += ["offload_params"] if "offload" in named else []
        if recomputes or "recompute" in named:
            meant.append("activation_checkpointing")
        kept = {name: value for name, value in theirs.items() if name not in meant}
        own = {"fsdp_config": {**ours, **kept}}
        # the user's value stays, which may be a mode of Axolotl's own
        own |= {_RECOMPUTES: config[_RECOMPUTES] if recomputes else None}
        return TrialFiles({**config, **own})

    def start(self, launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
        """Axolotl's own command to start a trial: accelerate would read the user's default file."""
        told = (*words, "train", str(launched.place.folder / FILE), "--launcher")
        if launched.is_on_cpu:
            return (*told, "python")
        gpus = f"--nproc_per_node={launched.spec.layout.gpus}"
        return (*told, "torchrun", "--", "--standalone", gpus)

    def environment(self, launched: FinetunerTrial) -> Mapping[str, str]:  # noqa: ARG002
        return {"AXOLOTL_DO_NOT_TRACK": "1"}


AXOLOTL = _Axolotl()


def _is_second(cell: Cell) -> bool:
    """True if FSDP2 shards the states, which copies and shared sequences also need."""
    layout = cell.layout
    is_alone = layout.context_degree == layout.replicate_degree == 1
    return cell.settings.strategy == "fsdp2" or not is_alone


def _packs(cell: Cell) -> bool:
    """True if sequences are packed: among GPUs that share sequences, only a single row may be."""
    settings = cell.settings
    return cell.layout.context_degree == 1 or settings.sequences_per_micro_batch == 1


def _fused_values(training: FineTuning) -> dict[str, Value]:
    """Fields of a fused loss, for known families only: Axolotl patches other families wrongly."""
    if is_fused(training.cell, training.shape, LIGER):
        return {"plugins.0": _LIGER, **dict.fromkeys(_OF_LIGER, True)}
    if is_fused(training.cell, training.shape, CUT_CROSS_ENTROPY):
        return {"plugins.0": _CUT, "cut_cross_entropy": True}
    return {}


def _sharding(cell: Cell) -> dict[str, Value]:
    """Fields of FSDP, with its recomputation, and the degrees above 1."""
    settings, layout, is_second = cell.settings, cell.layout, _is_second(cell)
    fsdp: dict[str, Value] = {
        "offload_params": settings.offloads_model,
        "activation_checkpointing": settings.recompute != "none" and settings.activations == "gpu",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        # Axolotl refuses True with a model in four bits
        "cpu_ram_efficient_loading": settings.lora_base != "nf4",
        **({"reshard_after_forward": True} if is_second else _FIRST),
    }
    degrees = {
        "dp_replicate_size": layout.replicate_degree,
        "dp_shard_size": layout.shard_degree // layout.context_degree,
        "context_parallel_size": layout.context_degree,
    }
    is_shared = layout.context_degree * layout.replicate_degree > 1
    return {
        "fsdp_version": 2 if is_second else 1,
        **{f"fsdp_config.{name}": value for name, value in fsdp.items()},
        **({name: n for name, n in degrees.items() if n > 1} if is_shared else {}),
    }


TRIED = ForeignTraits(settings=OF_FINETUNERS | SHARED | {"strategy", "rope"}, has_run_on_gpus=False)
TRIAL = trial_start(AXOLOTL)
TARGET = EmitTarget(
    file="axolotl.yaml",
    is_in_guides=False,
    emit=AXOLOTL.emit,
    yours=(
        "`datasets` in axolotl.yaml, whose path is a stand-in",
        "learning rate and `gradient_accumulation_steps` there",
    ),
    predicted_for="axolotl",
    knows=OF_THE_ENGINE | OF_LORA | {"lora_base", "optimizer", "activations"},
)
