"""A recommendation as accelerate's configuration file.

Accelerate is a launcher: it shards, offloads, recomputes and shares sequences, and knows neither
model nor length nor batch. FSDP has no Ulysses there. DeepSpeed has, so a sequence shared by heads
is sharded by ZeRO-3 instead; one shared by a ring is FSDP2's, by torch's context parallelism, which
passes keys and values on where it is told ``alltoall``.

Source of the names: ``commands/config/config_args.py`` and ``launch.py`` of accelerate 1.15.0.
"""

from highwater.emit.emitted import (
    Emitted,
    Value,
    emitted,
    engine_alone,
    environment,
    exports,
    heading,
    refusals,
    refuse_obstacle,
    shared_copies,
    yarn_lines,
)
from highwater.spec.layout import Layout
from highwater.spec.recommendation import Candidate, Recommendation

VERSION = "1.15.0"
FILE = "accelerate.yaml"
_COMMAND = f"accelerate launch --config_file {FILE} train.py"


def accelerate(
    found: Recommendation, chosen: Candidate, *, model_path: str | None = None
) -> Emitted:
    """Configure how processes start and how they share states and sequences.

    The rest is the script's, and is said in the text. Raises UsageError for layouts that neither
    DeepSpeed nor FSDP2 has there.
    """
    refuse_obstacle(chosen, lambda _, layout: layout_obstacle(layout, name="accelerate"))
    cell, settings = chosen.cell, chosen.cell.settings
    variables, cannot = environment(chosen), (*_of_the_script(found, chosen), *instead(chosen))
    cannot += tuple(engine_alone(settings, name="accelerate"))
    said = heading(found, chosen, name="accelerate", version=VERSION)
    said += exports(variables, before="it starts")
    dtype = "float32" if chosen.cell.settings.lora is None else "bfloat16"
    said.append(
        f"the script loads {model_path or found.model_name} in {dtype}, with {attention(chosen)}"
    )
    if is_ulysses(chosen):
        said.append(
            "needs deepspeed 0.18.2 or newer; each batch is padded to a multiple of "
            f"{padded_to(cell.layout)}"
        )
    elif is_ring(chosen):
        said.append(f"each batch is padded to a multiple of {padded_to(cell.layout)}")
    said += refusals(cannot, name="accelerate")
    said += yarn_lines(found, why="the model is the script's")
    said.append(f"start: {_COMMAND}")
    values = _values(chosen)
    return emitted(
        "accelerate", VERSION, said, values, command=_COMMAND, environment=variables, cannot=cannot
    )


def layout_obstacle(layout: Layout, *, name: str) -> str | None:
    """Why neither DeepSpeed nor FSDP2 has a layout in accelerate, in words; None where one has."""
    ulysses, ring, copies = layout.ulysses_degree, layout.ring_degree, layout.replicate_degree
    if ulysses > 1 and ring > 1:
        return f"{name} shares a sequence by heads or by a ring, not by both"
    if ulysses > 1 and copies > 1:
        return f"{name} shares heads by DeepSpeed, whose ZeRO-3 has no copies"
    if 1 < ring == layout.shard_degree < layout.gpus:
        return f"{name} has no copies of one ring: it wants two rings in each"
    return shared_copies(layout, name=name)


def is_ulysses(chosen: Candidate) -> bool:
    """Whether GPUs share sequences by heads."""
    return chosen.cell.layout.ulysses_degree > 1


def is_ring(chosen: Candidate) -> bool:
    """Whether GPUs share sequences by a ring."""
    return chosen.cell.layout.ring_degree > 1


def padded_to(layout: Layout) -> int:
    """Tokens of which a row's length is a multiple: a ring's ranks hold two chunks of it each."""
    return layout.ulysses_degree * (2 * layout.ring_degree if layout.ring_degree > 1 else 1)


def attention(chosen: Candidate) -> str:
    """The attention that transformers is told to use: torch's context parallelism has one alone."""
    return "sdpa" if is_ring(chosen) else "flash_attention_2"


def instead(chosen: Candidate) -> tuple[str, ...]:
    """What replaces the strategy where GPUs share sequences; nothing where they do not."""
    strategy = chosen.cell.settings.strategy
    if is_ulysses(chosen):
        return (
            f"Ulysses with {strategy}: it is DeepSpeed's, and ZeRO-3 shards the states, with "
            "buffers of its own",
        )
    if is_ring(chosen) and strategy == "fsdp":
        return ("a ring with fsdp: it is FSDP2's",)
    return ()


def _of_the_script(found: Recommendation, chosen: Candidate) -> tuple[str, ...]:
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
        "the script's",
    ]
    if settings.lora is not None:
        base = ", and the model is packed in NF4" if settings.lora_base == "nf4" else ""
        said.append(f"LoRA of rank {settings.lora}: adapters are put on{base} by the script")
    if settings.optimizer != "adamw":
        said.append(f"{settings.optimizer_traits.words}: the script makes the optimizer")
    if is_ulysses(chosen) and settings.recompute != "none":
        said.append(
            "recomputation with DeepSpeed: the script calls the model's "
            "gradient_checkpointing_enable()"
        )
    return tuple(said)


def _values(chosen: Candidate) -> dict[str, Value]:
    layout = chosen.cell.layout
    values: dict[str, Value] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if is_ulysses(chosen) else "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": layout.gpus,
    }
    if not is_ulysses(chosen):
        fsdp = {f"fsdp_config.fsdp_{name}": value for name, value in _fsdp(chosen).items()}
        return values | fsdp | _mesh(layout)
    return values | _deepspeed(chosen)


def _deepspeed(chosen: Candidate) -> dict[str, Value]:
    """ZeRO-3 for the states, Ulysses for the sequences."""
    where = "cpu" if chosen.cell.settings.offloads_model else "none"
    zero: dict[str, Value] = {
        "zero_stage": 3,
        "offload_param_device": where,
        "offload_optimizer_device": where,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    }
    shares: dict[str, Value] = {
        "dp_replicate_size": 1,
        "dp_shard_size": chosen.cell.layout.data_parallel_degree,
        "sp_size": chosen.cell.layout.ulysses_degree,
        "sp_backend": "deepspeed",
        "sp_seq_length_is_variable": True,
        "sp_attn_implementation": "flash_attention_2",
    }
    return {f"deepspeed_config.{name}": value for name, value in zero.items()} | {
        f"parallelism_config.parallelism_config_{name}": value for name, value in shares.items()
    }


def _mesh(layout: Layout) -> dict[str, Value]:
    """Copies and rings of FSDP2; nothing where there are none."""
    copies, ring = layout.replicate_degree, layout.ring_degree
    if copies == ring == 1:
        return {}
    shares: dict[str, Value] = {
        "dp_replicate_size": copies,
        "dp_shard_size": layout.shard_degree // ring,
        "cp_size": ring,
        **({"cp_backend": "torch", "cp_comm_strategy": "alltoall"} if ring > 1 else {}),
    }
    return {f"parallelism_config.parallelism_config_{name}": n for name, n in shares.items()}


def _fsdp(chosen: Candidate) -> dict[str, Value]:
    """Keys of FSDP1 or FSDP2, which call the same thing by two types."""
    settings = chosen.cell.settings
    is_second = settings.strategy == "fsdp2" or is_ring(chosen)
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
