"""A recommendation as accelerate's configuration file.

Accelerate is a launcher: it shards, offloads, recomputes and shares sequences, and knows neither
model nor length nor batch. It has two ways to share a sequence. Torch's context parallelism passes
keys and values round a ring, where it is told ``alltoall``, and FSDP2 shards the states as they are
predicted: it is taken wherever it can be, which is where every layer reads all earlier tokens.
Ulysses is DeepSpeed's, with ZeRO-3 for the states: it is left for models with windows
(docs/decisions/019).

Source of the names: ``commands/config/config_args.py`` and ``launch.py`` of accelerate 1.15.0; of
what a ring refuses: ``_attach_context_parallel_hooks`` in its ``big_modeling.py``.
"""

from typing import Literal

from highwater.model.model import ModelShape
from highwater.nouns.layout import Layout
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import Cell
from highwater.trainers.emitted import (
    Emitted,
    Value,
    emitted,
    engine_alone,
    environment,
    exports,
    heading,
    refusals,
    refuse_obstacle,
    shape_here,
    shared_copies,
    yarn_lines,
)
from highwater.trainers.logits import is_fused, whole_logits_bytes

VERSION = "1.15.0"
FILE = "accelerate.yaml"
_FUSED_LOSS = ", where Liger fuses it: `use_liger_kernel=True` of transformers' TrainingArguments"
_COMMAND = f"accelerate launch --config_file {FILE} train.py"
SequenceSharing = Literal["none", "ring", "heads"]
"""How accelerate shares a sequence: not at all, by FSDP2's ring, or by DeepSpeed's heads."""


def accelerate(
    found: Recommendation, chosen: Candidate, *, model_path: str | None = None
) -> Emitted:
    """Configure how processes start and how they share states and sequences.

    The rest is the script's, and is said in the text. Raises UsageError for layouts that neither
    DeepSpeed nor FSDP2 has there.
    """
    shape = shape_here(found, model_path)
    refuse_obstacle(
        chosen.cell, lambda _, layout: layout_obstacle(layout, shape, name="accelerate")
    )
    cell, settings, sharing = (
        chosen.cell,
        chosen.cell.settings,
        sharing_of(chosen.cell.layout, shape),
    )
    variables = environment(chosen.cell.settings)
    cannot = (*_of_the_script(found, chosen, sharing, shape), *instead(cell, sharing))
    cannot += tuple(engine_alone(settings, name="accelerate"))
    has_fused = is_fused(cell, shape)
    logits_bytes = None if has_fused else whole_logits_bytes(chosen, shape)
    said = heading(
        found, chosen, "accelerate", name="accelerate", version=VERSION, logits_bytes=logits_bytes
    )
    said += exports(variables, before="it starts")
    dtype = "float32" if chosen.cell.settings.lora is None else "bfloat16"
    said.append(
        f"the script loads {model_path or found.model_name} in {dtype}, with {attention(sharing)}"
    )
    if sharing != "none":
        needs = "needs deepspeed 0.18.2 or newer; " if sharing == "heads" else ""
        said.append(
            f"{needs}each batch is padded to a multiple of {padded_to(cell.layout, sharing)}"
        )
    said += refusals(cannot, name="accelerate")
    said += yarn_lines(found, why="the model is the script's")
    said.append(f"start: {_COMMAND}")
    values = launched_values(cell, sharing)
    return emitted(
        "accelerate",
        VERSION,
        said,
        values,
        command=_COMMAND,
        environment=variables,
        cannot=cannot,
        logits_bytes=logits_bytes,
    )


def layout_obstacle(layout: Layout, shape: ModelShape | None, *, name: str) -> str | None:
    """Why neither DeepSpeed nor FSDP2 has a layout in accelerate, in words; None where one has."""
    if layout.context_degree > 1 and shape is not None and not reads_everything(shape):
        if layout.ring_degree > 1:
            return (
                f"{name}'s ring needs layers that read every earlier token, and "
                f"{shape.model_type} has others"
            )
        if layout.replicate_degree > 1:
            return f"{name} shares heads by DeepSpeed, whose ZeRO-3 has no copies"
    elif 1 < layout.context_degree == layout.shard_degree < layout.gpus:
        return f"{name} has no copies of one ring: it wants two rings in each"
    return shared_copies(layout, name=name)


def reads_everything(shape: ModelShape | None) -> bool:
    """Whether every layer reads all earlier tokens, as torch's ring does. None, of a model that is
    not here, does.
    """
    return shape is None or shape.reads_everything


def sharing_of(layout: Layout, shape: ModelShape | None) -> SequenceSharing:
    """How a sequence is shared: what was predicted by heads is passed round a ring, too, where that
    keeps FSDP2.
    """
    if layout.context_degree == 1:
        return "none"
    return "ring" if reads_everything(shape) else "heads"


def padded_to(layout: Layout, sharing: SequenceSharing) -> int:
    """Tokens of which a row's length is a multiple: a ring's ranks hold two chunks of it each."""
    return layout.context_degree * (2 if sharing == "ring" else 1)


def attention(sharing: SequenceSharing) -> str:
    """The attention that transformers is told to use: torch's context parallelism has one alone."""
    return "sdpa" if sharing == "ring" else "flash_attention_2"


def instead(cell: Cell, sharing: SequenceSharing) -> tuple[str, ...]:
    """What replaces what was predicted where GPUs share sequences; nothing where they do not."""
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
    """How processes start, and share states and sequences."""
    layout = cell.layout
    values: dict[str, Value] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if sharing == "heads" else "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": layout.gpus,
    }
    if sharing == "heads":
        return values | _deepspeed(cell)
    fsdp = _fsdp(cell, is_second=sharing == "ring")
    return (
        values | {f"fsdp_config.fsdp_{name}": value for name, value in fsdp.items()} | _mesh(layout)
    )


def _deepspeed(cell: Cell) -> dict[str, Value]:
    """ZeRO-3 for the states, Ulysses for the sequences."""
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
    """Copies and rings of FSDP2; nothing where there are none."""
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


def _fsdp(cell: Cell, *, is_second: bool) -> dict[str, Value]:
    """Keys of FSDP1 or FSDP2, which call the same thing by two types; ``is_second``: of FSDP2
    whatever was predicted.
    """
    settings = cell.settings
    is_second |= settings.strategy == "fsdp2"
    return {
        "version": 2 if is_second else 1,
        "reshard_after_forward": True if is_second else "FULL_SHARD",
        **({} if is_second else {"use_orig_params": True}),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "offload_params": settings.offloads_model,
        "activation_checkpointing": settings.recompute != "none",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
