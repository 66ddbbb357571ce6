"""A recommendation as accelerate's configuration file.

Accelerate is a launcher: it shards, offloads, recomputes and shares sequences, and knows neither
model nor length nor batch. FSDP has no Ulysses there. DeepSpeed has, so a sequence shared by heads
is sharded by ZeRO-3 instead; FSDP2's context parallelism, which gathers keys and values, would keep
FSDP2 and take other memory than was predicted.

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
    yarn_lines,
)
from highwater.spec.recommendation import Candidate, Recommendation

VERSION = "1.15.0"
FILE = "accelerate.yaml"
_COMMAND = f"accelerate launch --config_file {FILE} train.py"


def accelerate(
    found: Recommendation, chosen: Candidate, *, model_path: str | None = None
) -> Emitted:
    """Configure how processes start and how they share states and sequences.

    The rest is the script's, and is said in the text.
    """
    cell, settings = chosen.cell, chosen.cell.settings
    variables, cannot = environment(chosen), (*_of_the_script(found, chosen), *zero_instead(chosen))
    cannot += tuple(engine_alone(settings, name="accelerate"))
    said = heading(found, chosen, name="accelerate", version=VERSION)
    said += exports(variables, before="it starts")
    said.append(
        f"the script loads {model_path or found.model_name} in float32, with flash_attention_2"
    )
    if is_ulysses(chosen):
        said.append(
            "needs deepspeed 0.18.2 or newer; each batch is padded to a multiple of "
            f"{cell.layout.ulysses_degree}"
        )
    said += refusals(cannot, name="accelerate")
    said += yarn_lines(found, why="the model is the script's")
    said.append(f"start: {_COMMAND}")
    values = _values(chosen)
    return emitted(
        "accelerate", VERSION, said, values, command=_COMMAND, environment=variables, cannot=cannot
    )


def is_ulysses(chosen: Candidate) -> bool:
    """Whether GPUs share sequences."""
    return chosen.cell.layout.ulysses_degree > 1


def zero_instead(chosen: Candidate) -> tuple[str, ...]:
    """What replaces the strategy where GPUs share sequences; nothing where they do not."""
    if not is_ulysses(chosen):
        return ()
    return (
        f"Ulysses with {chosen.cell.settings.strategy}: it is DeepSpeed's, and ZeRO-3 shards the "
        "states, with buffers of its own",
    )


def _of_the_script(found: Recommendation, chosen: Candidate) -> tuple[str, ...]:
    settings, degree = chosen.cell.settings, chosen.cell.layout.ulysses_degree
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
    if degree > 1 and settings.recompute != "none":
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
        return values | {f"fsdp_config.fsdp_{name}": value for name, value in _fsdp(chosen).items()}
    return values | _deepspeed(chosen)


def _deepspeed(chosen: Candidate) -> dict[str, Value]:
    """ZeRO-3 for the states, Ulysses for the sequences."""
    where = "cpu" if chosen.cell.settings.offload else "none"
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


def _fsdp(chosen: Candidate) -> dict[str, Value]:
    """Keys of FSDP1 or FSDP2, which call the same thing by two types."""
    settings = chosen.cell.settings
    is_second = settings.strategy == "fsdp2"
    return {
        "version": 2 if is_second else 1,
        "reshard_after_forward": True if is_second else "FULL_SHARD",
        **({} if is_second else {"use_orig_params": True}),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "offload_params": settings.offload,
        "activation_checkpointing": settings.recompute != "none",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
