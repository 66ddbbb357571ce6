"""AReaL: a recommendation as its YAML for GRPO.

AReaL's FSDP engine is FSDP2 with Ulysses, which it calls context parallelism
(``areal/engine/fsdp_engine.py``). A micro-batch is made before sequences are shared, so
``max_tokens_per_mb`` counts the tokens of all GPUs that share a sequence.
SGLang takes adapters only from files: ``disk`` with LoRA (``engine/sglang_remote.py``).

Source of the names: ``areal/api/cli_args.py`` and ``alloc_mode.py`` of areal 1.0.4.
"""

from highwater.errors import UsageError
from highwater.nouns.objective import Lora
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.trainers.emitted import (
    DIVIDED,
    Dialect,
    Emitted,
    Value,
    environment,
    listed,
    model_lies,
    yaml_path,
)
from highwater.trainers.targets import OF_ALL, OF_LORA, EmitTarget

VERSION = "1.0.4"
_WORDS = Dialect("areal", "AReaL", VERSION)
DATASET = "${oc.env:DATASET}"
_COMMAND = "python3 train.py --config areal.yaml"
_UNTESTED = (
    "AReaL calls LoRA with an optimizer_dtype of float32 untested (areal/engine/fsdp_engine.py)"
)
_FSDP1 = "FSDP1: its engine is FSDP2, for which this length was not predicted"
_NAMED = ("actor", "saver", "evaluator", "recover", "stats_logger")
"""Sections that need the names of experiment and trial."""


def areal(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Make a whole file, except for the data. Raises UsageError if no GPUs are set for rollout."""
    if not found.rollout_gpus:
        raise UsageError(
            "AReaL's rollout has GPUs of its own, and none are set aside",
            hint="add `--rollout-gpus 1` or more",
        )
    settings = chosen.cell.settings
    said = [
        *model_lies(model_path),
        "before it starts: export DATASET=where prompts come from; train.py is a script like "
        "examples/math/gsm8k_rl.py",
        "actor.optimizer.lr is to be replaced by yours",
        f"the prompt and gconfig.max_new_tokens together: {found.length_tokens}",
        DIVIDED.format(found.rollout_gpus),
    ]
    if settings.lora is not None:
        said += [_WORDS.one_dtype("actor.optimizer_dtype"), _UNTESTED]
    return _WORDS.emitted(
        found,
        chosen,
        said,
        _values(found, chosen, yaml_path(model_path)),
        command=_COMMAND,
        cannot=(_FSDP1,) if settings.strategy == "fsdp" else (),
        yarn="trainer and rollout read the model itself",
    )


def _values(found: Recommendation, chosen: Candidate, model_path: str) -> dict[str, Value]:
    values: dict[str, Value] = {
        "experiment_name": "highwater",
        "trial_name": "long",
        "cluster.n_nodes": 1,
        "cluster.n_gpus_per_node": found.gpus + found.rollout_gpus,
        "scheduler.type": "local",
        "tokenizer_path": "${actor.path}",
        **_actor(chosen, model_path),
        "rollout.backend": f"sglang:d{found.rollout_gpus}",
        "sglang.model_path": "${actor.path}",
        "sglang.context_length": found.length_tokens,
        **_lora_values(chosen.cell.settings.adapters),
        "train_dataset.path": DATASET,
        "train_dataset.type": "rl",
    }
    for section in _NAMED:
        names = ("experiment_name", "trial_name")
        values |= {f"{section}.{name}": f"${{{name}}}" for name in names}
        values |= {f"{section}.fileroot": "${cluster.fileroot}"} if section != "actor" else {}
    return values


def _lora_values(lora: Lora | None) -> dict[str, Value]:
    """Fields of LoRA, for the actor, and for the rollout that serves its adapters."""
    if lora is None:
        return {}
    return {
        "actor.use_lora": True,
        "actor.peft_type": "lora",
        "actor.lora_rank": lora.rank,
        "actor.lora_alpha": _WORDS.whole_alpha(lora),
        **listed("actor.target_modules", lora.names or (lora.targets,)),
        "actor.weight_update_mode": "disk",
        "rollout.use_lora": True,
        "sglang.enable_lora": True,
        "sglang.max_lora_rank": lora.rank,
    }


def _actor(chosen: Candidate, model_path: str) -> dict[str, Value]:
    layout = chosen.cell.layout
    shared = f"c{layout.ulysses_degree}" if layout.ulysses_degree > 1 else ""
    values: dict[str, Value] = {
        "actor.path": model_path,
        "actor.backend": f"fsdp:d{layout.data_parallel_degree}{shared}",
        "actor.dtype": "bfloat16",
        "actor.optimizer_dtype": "float32",
        "actor.gradient_checkpointing": True,
        "actor.mb_spec.max_tokens_per_mb": chosen.token_budget_tokens * layout.ulysses_degree,
        "actor.fsdp.offload_params": chosen.cell.settings.offloads_model,
        "actor.optimizer.type": "adam",
        "actor.optimizer.lr": 1e-6,
        "actor.scheduling_spec.0.gpu": 1,
        "actor.scheduling_spec.0.cmd": "python3 -m areal.infra.rpc.rpc_server",
    }
    return values | {
        f"actor.scheduling_spec.0.env_vars.{name}": value
        for name, value in environment(chosen.cell.settings).items()
    }


TARGET = EmitTarget(
    file="areal.yaml",
    emit=areal,
    yours=(
        "train.py beside it: a script like its examples/math/gsm8k_rl.py",
        "`actor.optimizer.lr` in areal.yaml",
    ),
    predicted_for="trinity",
    knows=OF_ALL | OF_LORA,
)
