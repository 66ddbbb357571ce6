"""A recommendation as TRL's configuration file. Source of the names: ``trl/trainer/*_config.py``
and ``model_config.py`` of trl 1.16.0.

``trl sft --config trl.yaml`` starts its processes through accelerate, by the file that
``accelerate_config`` names: sharding, offload and shared sequences are there
(``trainers/accelerate.py``). Its losses never hold whole logits.
"""

from collections.abc import Mapping
from typing import NamedTuple

from highwater.errors import UsageError
from highwater.memory.formula.rollout import ON_PAPER
from highwater.model.model import ModelShape
from highwater.nouns.environment import ENV_IN_WORDS
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Objective, generation_micro_batches
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.trainers.accelerate import (
    FILE,
    accelerate,
    attention,
    instead,
    layout_obstacle,
    padded_to,
    sharing_of,
)
from highwater.trainers.emitted import (
    ATTENTIONS,
    WHOLE_SHARDS,
    Dialect,
    Emitted,
    Value,
    environment,
    listed,
    model_lies,
    other_optimizer,
    refuse_obstacle,
    shape_here,
    yarn_values,
)
from highwater.trainers.files import FineTuning

VERSION = "1.16.0"
_WORDS = Dialect("trl", "TRL", VERSION)


class Subcommand(NamedTuple):
    """A subcommand of ``trl``."""

    name: str
    packs: bool = False
    """True if sequences are packed into one row, which several GPUs may share; else padded."""
    generates: bool = False
    """True if the policy generates completions, of which whole groups are a batch."""
    precomputes: bool = False
    """True if the reference runs before training, and so takes no memory later."""


COMMANDS: Mapping[Objective, Subcommand] = {
    "sft": Subcommand("sft", packs=True),
    "grpo": Subcommand("grpo", generates=True),
    "rw": Subcommand("reward"),
    "dpo": Subcommand("dpo", precomputes=True),
}
"""TRL's subcommands, by objective; there are none for other objectives."""
_PRECOMPUTED = (
    "precompute_ref_log_probs: the reference runs over the whole dataset before training, and then "
    "takes no memory; highwater's runs before each step, from host memory"
)
_ATTENTION = {
    "flash_attention_2": (
        "flash_attention_2 needs the package flash-attn, or use a kernel of the Hub: "
        "kernels-community/flash-attn2",
    ),
    "flex_attention": (ATTENTIONS["flex_attention"],),
}
_ELSEWHERE = '--model_name_or_path "$MODEL_PATH"'
"""Flag that names the model if its directory is unknown: TRL's YAML has no variables."""


def trl(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Make the file of one of TRL's commands, and accelerate's. Raises UsageError for an objective
    without a command, sequences shared among GPUs without ``sft``, and optimizers that TRL lacks.
    """
    cell, shape = chosen.cell, shape_here(found, model_path)
    refuse_untrainable(cell, shape, has_ulysses=True)
    training = FineTuning(
        *(cell, found.length_tokens, model_path, found.yarn, shape),
        rollout_gpus=found.rollout_gpus,
        rollout=found.rollout,
    )
    command = COMMANDS[cell.settings.objective]
    said = [
        f"beside it {FILE}: how processes start, recompute layers, and share states and sequences",
        *(_ATTENTION.get(attention(training.sharing, shape), ())),
        *model_lies(model_path),
        *(_about_rollout(found) if command.generates else ()),
        *((_PRECOMPUTED,) if command.precomputes else ()),
    ]
    return _WORDS.emitted(
        found,
        chosen,
        said,
        trl_values(training),
        command=f"trl {command.name} --config trl.yaml{'' if model_path else f' {_ELSEWHERE}'}",
        environment=environment(cell.settings),
        cannot=_inexpressible(training),
        beside={FILE: accelerate(found, chosen, model_path=model_path).text},
    )


def refuse_untrainable(cell: Cell, shape: ModelShape | None, *, has_ulysses: bool) -> None:
    """Raise UsageError for an objective, layout or optimizer that TRL lacks; without
    ``has_ulysses`` also for Ulysses where TRL has a ring.
    """
    settings, layout, sharing = cell.settings, cell.layout, sharing_of(cell.layout, shape)
    is_refused = _obstacle(settings.objective, layout, shape) is not None
    keeps_ulysses = has_ulysses and not (is_refused and shape is not None)

    def obstacle(objective: Objective, layout: Layout) -> str | None:
        unknown = _obstacle(objective, layout, shape)
        if unknown is not None or layout.ulysses_degree == 1 or keeps_ulysses:
            return unknown
        return _by_heads(layout) if sharing_of(layout, shape) == "ring" else None

    is_heads_alone = not is_refused and obstacle(settings.objective, layout) is not None
    if is_heads_alone and settings.strategy == "fsdp2":
        raise UsageError(
            _by_heads(layout), hint=f"use `--ulysses 1 --ring {layout.context_degree}`"
        )
    refuse_obstacle(cell, obstacle)
    _WORDS.refuse_optimizer(settings)
    if sharing == "heads" and other_optimizer(settings):
        raise UsageError(
            "TRL shares heads by DeepSpeed, whose flat shards have other blocks than "
            f"{settings.optimizer}",
            hint=f"use `--ulysses 1`, or leave `--optimizer {settings.optimizer}` out",
        )


def _by_heads(layout: Layout) -> str:
    return (
        "TRL shares this model's sequences by a ring, not by heads: Ulysses over "
        f"{layout.ulysses_degree} GPUs is DeepSpeed's there, with other shards"
    )


def _obstacle(objective: Objective, layout: Layout, shape: ModelShape | None) -> str | None:
    """Reason why TRL cannot train an objective with a layout; None if it can."""
    unknown = _WORDS.other_objective(objective, COMMANDS, is_written=False)
    if unknown is not None:
        return unknown
    if layout.context_degree > 1 and not COMMANDS[objective].packs:
        command = COMMANDS[objective].name
        return f"TRL shares sequences among GPUs in `trl sft` alone, not in `trl {command}`"
    return layout_obstacle(layout, shape, _WORDS)


def _about_rollout(found: Recommendation) -> list[str]:
    said = [f"{found.length_tokens} tokens are prompt and max_completion_length together"]
    if found.rollout_gpus:
        serve = (
            f"trl vllm-serve --data_parallel_size {found.rollout_gpus} --max_model_len "
            f"{found.length_tokens} --model"
        )
        return [
            *said,
            f"before it, on the {found.rollout_gpus} GPUs for rollout: {serve} the model's "
            f"directory",
        ]
    if found.rollout is not None:
        said.append(f"vLLM is on the same GPUs. {ON_PAPER}")
        if found.rollout.sleep_level:
            said.append(f"its sleep mode does not start beside {ENV_IN_WORDS}: take that out")
        return said
    return [*said, "transformers generates; `--rollout vllm` has vLLM on the same GPUs do it"]


def _inexpressible(training: FineTuning) -> tuple[str, ...]:
    """Settings that TRL cannot express, or expresses differently."""
    settings, sharing = training.cell.settings, training.sharing
    command = COMMANDS[settings.objective]
    said: list[str] = []
    if settings.optimizer_traits.is_quantized:
        said.append(WHOLE_SHARDS)
    if settings.holds_logits:
        said.append("whole logits: its losses are computed in tiles, which takes less")
    if sharing == "heads":
        said.append(
            "packed sequences with Ulysses: DeepSpeed's attention expects a row for each "
            "sequence, so batches are padded"
        )
    elif sharing == "ring":
        said.append(
            "packed sequences with a ring: it has no borders inside a row; batches are padded"
        )
    elif not command.packs and settings.sequences_per_micro_batch > 1:
        said.append(f"packed sequences in `trl {command.name}`: batches are padded")
    said += instead(training.cell, sharing)
    return tuple(said)


def trl_values(training: FineTuning) -> dict[str, Value]:
    """TRL's settings by name: all that affect memory, without the data."""
    settings, layout = training.cell.settings, training.cell.layout
    sharing, model_path = training.sharing, training.model_path
    values: dict[str, Value] = {"model_name_or_path": model_path} if model_path else {}
    base = "float32" if settings.lora is None else "bfloat16"
    values |= {
        "dtype": base,
        "attn_implementation": attention(sharing, training.shape),
        "bf16": True,
    }
    values |= _lora_values(settings) | other_optimizer(settings)
    values |= yarn_values(training.yarn, "model_init_kwargs") | _batch_values(training)
    if sharing != "none":
        values["pad_to_multiple_of"] = padded_to(layout, sharing)
    # FSDP recomputes by itself, and refuses the model's own recomputation; DeepSpeed does neither.
    values["gradient_checkpointing"] = sharing == "heads" and settings.recompute != "none"
    values["accelerate_config"] = FILE
    return values | {f"env.{name}": value for name, value in environment(settings).items()}


def _lora_values(settings: Settings) -> dict[str, Value]:
    """Fields of peft's adapters, without the dropout that TRL has by default."""
    lora = settings.adapters
    if lora is None:
        return {}
    values: dict[str, Value] = {"use_peft": True, "lora_r": lora.rank}
    values["lora_alpha"] = _WORDS.whole_alpha(lora)
    values |= listed("lora_target_modules", lora.names or (lora.targets,))
    if lora.base == "nf4":
        values |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
        # accelerate leaves bytes out of FSDP2, which changes bfloat16 that reads as a NaN
        values["bnb_4bit_quant_storage"] = "uint8"
    if settings.traits.gives_scalars:
        values |= {"lora_task_type": "SEQ_CLS", "lora_modules_to_save.0": "score"}
    return values | {"lora_dropout": 0.0}


def _colocated(training: FineTuning) -> dict[str, Value]:
    """Fields for vLLM on the same GPUs; empty if transformers generates."""
    if (rollout := training.rollout) is None:
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": rollout.gpu_memory_utilization or 0,
        "vllm_max_model_length": training.length_tokens,
        "vllm_tensor_parallel_size": rollout.rollout_tensor_parallel,
        "vllm_enable_sleep_mode": rollout.sleep_level != 0,
    }


def _batch_values(training: FineTuning) -> dict[str, Value]:
    """Fields for the rows of a batch (a pair is one row of two sequences) and for their length."""
    settings, layout = training.cell.settings, training.cell.layout
    command = COMMANDS[settings.objective]
    rows = settings.sequences_per_micro_batch // settings.traits.documents_together
    values: dict[str, Value] = {"per_device_train_batch_size": rows}
    if not settings.accumulates:
        values["gradient_accumulation_steps"] = 1
    if command.generates:
        micro_batches = generation_micro_batches(rows, layout.gpus)
        # A generated batch is used in one step, or in as many steps as it has micro-batches.
        name = "gradient_accumulation_steps" if settings.accumulates else "steps_per_generation"
        values[name] = micro_batches
        if settings.entropy != "none":
            values["entropy_coef"] = Hyperparameters().entropy_coefficient
        if training.rollout_gpus:
            return values | {"use_vllm": True, "vllm_mode": "server"}
        return values | _colocated(training)
    values["max_length"] = training.length_tokens
    if command.precomputes:
        values["precompute_ref_log_probs"] = True
    if command.packs:
        is_shared = layout.context_degree > 1
        packed: dict[str, Value] = {"packing": True, "packing_strategy": "bfd"}
        values |= {"packing": False} if is_shared else packed
    return values
