"""A recommendation as Trinity-RFT's YAML.

Its trainer is verl's actor. In version 0.6.0 ``model.rope_scaling`` reaches the rollout alone: the
trainer reads the model's own ``config.json`` (``trinity/trainer/verl/config.py``), so YaRN has to
be in both.

With LoRA it writes every checkpoint's adapters for its rollout, and under FSDP2 trains them in
bfloat16 (``_maybe_patch_lora_fsdp2`` and ``_save_lora`` in ``trinity/trainer/verl/workers.py``).

Source of the names: ``trinity/common/config.py`` of trinity-rft 0.6.0.
"""

from highwater.errors import UsageError
from highwater.nouns.objective import ALL_LINEAR, Lora
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.trainers.emitted import (
    Dialect,
    Emitted,
    Value,
    environment,
    exports,
    lora_words,
    model_lies,
    yaml_path,
    yarn_lines,
)

VERSION = "0.6.0"
_WORDS = Dialect("trinity", "Trinity-RFT", VERSION)
_COMMAND = "trinity run --config trinity.yaml"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can be told of, ``MaxLoRARanks`` in its ``config/lora.py``: Trinity-RFT tells it
the adapters' own."""
_NARROW_ADAPTERS = (
    "adapters in float32: with FSDP2 it trains them in bf16, where updates below 0.2 % of a number "
    "are lost; the frozen model is in float32"
)


def trinity(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Write the sections that a length depends on.

    Raises UsageError for adapters that it cannot have.
    """
    values = _values(found, chosen, yaml_path(model_path))
    variables = environment(chosen.cell.settings)
    why = "model.rope_scaling reaches the rollout alone, the trainer reads the model itself"
    said = [
        *exports(variables, before="`ray start`"),
        *model_lies(model_path, before="`ray start`"),
        *yarn_lines(found, why=why),
    ]
    if found.rollout_gpus:
        said.append(
            f"{found.rollout_gpus} rollout engines of one GPU each: how they are divided is not "
            "part of the recommendation"
        )
    cannot = () if chosen.cell.settings.lora is None else (_NARROW_ADAPTERS,)
    return _WORDS.emitted(
        found, chosen, said, values, command=_COMMAND, environment=variables, cannot=cannot
    )


def _values(found: Recommendation, chosen: Candidate, model_path: str) -> dict[str, Value]:
    values: dict[str, Value] = {
        "mode": "both" if found.rollout_gpus else "train",
        "model.model_path": model_path,
        "model.max_model_len": found.length_tokens,
    }
    if found.yarn is not None:
        scaling = dict(found.yarn.rope_parameters)
        theta = scaling.pop("rope_theta", None)
        values |= {f"model.rope_scaling.{name}": value for name, value in scaling.items()}
        if theta is not None:
            values["model.rope_theta"] = float(theta)
    lora = chosen.cell.settings.adapters
    values |= {} if lora is None else _lora_values(lora, is_served=found.rollout_gpus > 0)
    values |= {"cluster.node_num": 1, "cluster.gpu_per_node": found.gpus + found.rollout_gpus}
    if found.rollout_gpus:
        values |= {
            "explorer.rollout_model.engine_num": found.rollout_gpus,
            "explorer.rollout_model.tensor_parallel_size": 1,
        }
    return values | {
        "trainer.trainer_type": "verl",
        "trainer.trainer_strategy": chosen.cell.settings.strategy,
        "trainer.ulysses_sequence_parallel_size": chosen.cell.layout.ulysses_degree,
        "trainer.use_dynamic_bsz": True,
        "trainer.use_remove_padding": True,
        "trainer.max_token_len_per_gpu": chosen.token_budget_tokens,
        "trainer.offload_policy": chosen.cell.settings.offloads_model,
    }


def _lora_values(lora: Lora, *, is_served: bool) -> dict[str, Value]:
    """Adapters on every linear layer: names would have to be one pattern, which it saves letter by
    letter in the adapters' configuration.
    """
    if lora.targets != ALL_LINEAR:
        raise UsageError(
            f"Trinity-RFT has no adapters on layers by their names, such as {lora.targets}",
            hint=f"leave `--lora-targets {lora.targets}` out; of a model with experts leave "
            f"`{lora_words(lora)}` out",
        )
    if is_served and lora.rank not in _RANKS:
        served = min((rank for rank in _RANKS if rank > lora.rank), default=_RANKS[-1])
        raise UsageError(
            f"vLLM, Trinity-RFT's rollout, has no adapters of rank {lora.rank}",
            hint=f"use `--lora {served}`",
        )
    return {
        "model.lora_configs.0.name": "lora",
        "model.lora_configs.0.lora_rank": lora.rank,
        "model.lora_configs.0.lora_alpha": _WORDS.whole_alpha(lora),
        "model.lora_configs.0.target_modules": lora.targets,
        "synchronizer.sync_method": "checkpoint",
    }
