"""A recommendation as TRL's configuration file. Names: ``trl/trainer/*_config.py`` and ``model_config.py`` of trl 1.16.0.

``trl sft --config trl.yaml`` starts its processes through accelerate, by the file that ``accelerate_config`` names: sharding,
offload and shared sequences are there (``emit/accelerate.py``). Its losses never hold whole logits.
"""

import math
from collections.abc import Mapping

from highwater.emit.accelerate import FILE, accelerate, is_ulysses, zero_instead
from highwater.emit.emitted import (
    Emitted,
    Value,
    emitted,
    engine_alone,
    environment,
    heading,
    model_lies,
    refusals,
    refuse_other_objectives,
)
from highwater.errors import UsageError
from highwater.spec.recommendation import Candidate, Recommendation
from highwater.spec.settings import Objective

VERSION = "1.16.0"
COMMANDS: Mapping[Objective, str] = {"sft": "sft", "grpo": "grpo", "rw": "reward"}
"""By objective, the subcommand of ``trl``."""
GENERATIONS = 8
"""``num_generations`` of GRPOConfig: a generation batch is a multiple of it."""
_ELSEWHERE = '--model_name_or_path "$MODEL_PATH"'
"""Where nobody said where the model lies: its YAML knows no variables."""


def trl(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """The file of one of TRL's commands, and accelerate's beside it.

    Raises UsageError for an objective that it has no command for, and for sequences shared among GPUs in others than ``sft``.
    """
    settings = chosen.cell.settings
    refuse_other_objectives(chosen, COMMANDS, name="TRL")
    if is_ulysses(chosen) and settings.objective != "sft":
        raise UsageError(
            f"TRL shares sequences among GPUs in `trl sft` alone, not in `trl {COMMANDS[settings.objective]}`",
            hint="use `--ulysses 1`, or leave `--objective` out",
        )
    cannot = (*_cannot(chosen), *zero_instead(chosen), *engine_alone(settings, name="TRL"))
    command = " ".join(("trl", COMMANDS[settings.objective], "--config trl.yaml", *([] if model_path else [_ELSEWHERE])))
    said = heading(found, chosen, target="trl", name="TRL", version=VERSION)
    said.append(f"beside it {FILE}: the same words after `highwater emit --for accelerate`")
    said.append("flash_attention_2 needs the package flash-attn, or use a kernel of the Hub: kernels-community/flash-attn2")
    said += model_lies(model_path, before="it starts")
    said += _about_rollout(found) if settings.objective == "grpo" else []
    said += refusals(cannot, name="TRL")
    said.append(f"start: {command}")
    values = _values(found, chosen, model_path)
    beside = {FILE: accelerate(found, chosen, model_path=model_path).text}
    variables = environment(chosen)
    return emitted("trl", VERSION, said, values, command=command, environment=variables, cannot=cannot, beside=beside)


def _about_rollout(found: Recommendation) -> list[str]:
    said = [f"{found.length_tokens} tokens are prompt and max_completion_length together"]
    if found.rollout_gpus:
        serve = f"trl vllm-serve --data_parallel_size {found.rollout_gpus} --max_model_len {found.length_tokens} --model"
        return [*said, f"before it, on the {found.rollout_gpus} GPUs for rollout: {serve} the model's directory"]
    return [*said, "what generates keeps memory of the same GPUs, which is not in it: `--reserved` says how much"]


def _cannot(chosen: Candidate) -> tuple[str, ...]:
    settings = chosen.cell.settings
    said: list[str] = []
    if settings.holds_logits:
        said.append("whole logits: its losses are computed in tiles, which takes less")
    if is_ulysses(chosen):
        said.append("packed sequences with Ulysses: DeepSpeed's attention expects a row for each sequence, so batches are padded")
    elif settings.objective != "sft" and settings.sequences_per_micro_batch > 1:
        said.append(f"packed sequences in `trl {COMMANDS[settings.objective]}`: batches are padded")
    return tuple(said)


def _values(found: Recommendation, chosen: Candidate, model_path: str | None) -> dict[str, Value]:
    settings, layout = chosen.cell.settings, chosen.cell.layout
    rows = settings.sequences_per_micro_batch // (2 if settings.objective == "rw" else 1)
    values: dict[str, Value] = {"model_name_or_path": model_path} if model_path else {}
    values |= {"dtype": "float32", "attn_implementation": "flash_attention_2", "bf16": True}
    if found.yarn is not None:
        kwargs = found.yarn.block
        values |= {f"model_init_kwargs.rope_parameters.{name}": value for name, value in kwargs.pop("rope_parameters").items()}
        values |= {f"model_init_kwargs.{name}": value for name, value in kwargs.items()}
    values["per_device_train_batch_size"] = rows
    if settings.objective == "grpo":
        together = rows * layout.gpus
        values["gradient_accumulation_steps"] = math.lcm(GENERATIONS, together) // together
        values |= {"use_vllm": True, "vllm_mode": "server"} if found.rollout_gpus else {}
    else:
        values["max_length"] = found.length_tokens
    if settings.objective == "sft":
        values |= {"packing": False} if is_ulysses(chosen) else {"packing": True, "packing_strategy": "bfd"}
    if is_ulysses(chosen):
        values["pad_to_multiple_of"] = layout.ulysses_degree
    # FSDP recomputes by itself, and refuses to have it asked of the model too; DeepSpeed does not.
    values["gradient_checkpointing"] = is_ulysses(chosen) and settings.recompute != "none"
    values["accelerate_config"] = FILE
    return values | {f"env.{name}": value for name, value in environment(chosen).items()}
