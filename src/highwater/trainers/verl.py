"""verl: a recommendation as its Hydra overrides, in a shell script.

verl turns expandable segments on by itself after each exchange of weights
(``verl/workers/engine_workers.py``); in the environment they would end vLLM's sleep mode, whose
memory pool refuses them (https://github.com/pytorch/pytorch/issues/147851).

With LoRA the rollout loads the model from its own files (``load_format``), and is sent only the
adapters; else the actor would gather the whole model once. FSDP2 sends them without
``layered_summon``, which is for FSDP1's flat pieces (``collect_lora_params`` in
``verl/utils/fsdp_utils.py``).

Source of the names: ``_generated_ppo_trainer.yaml`` of verl 0.9.1.
"""

import re
import shlex

from highwater.errors import UsageError
from highwater.memory.formula.rollout import ON_PAPER
from highwater.nouns.environment import ENV_IN_WORDS
from highwater.nouns.objective import Lora
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.trainers.emitted import Dialect, Emitted, Value, literal, model_lies, yarn_lines
from highwater.trainers.targets import OF_ALL, OF_LORA, OF_ROLLOUT, EmitTarget
from highwater.trainers.user_file import FILE_WORDS

VERSION = "0.9.1"
_WORDS = Dialect("verl", "verl", VERSION)
MODEL_PATH = "$MODEL_PATH"
"""Stand-in for the model's path, if it is not known."""
_PROGRAM = "python3 -m verl.trainer.main_ppo"
_PATH = "actor_rollout_ref.model.path"
_MOST_RANK = 512
"""The highest rank that vLLM serves (``get_vllm_max_lora_rank`` in verl)."""


def verl(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Make overrides for a length. Raises UsageError for rollout GPUs or impossible adapters."""
    if found.rollout_gpus:
        raise UsageError(
            "verl's actor and rollout share their GPUs: none are set aside",
            hint="leave `--rollout-gpus` out, and `--reserved 10GiB` for what the rollout keeps "
            "while the actor trains",
        )
    values = _values(found, chosen, model_path or MODEL_PATH)
    settings = chosen.cell.settings
    said = [
        "what the rollout keeps on the GPU while the actor trains is not in it: `--rollout vllm` "
        "predicts it, or `--reserved` says how much"
    ]
    if found.rollout is not None:
        said = [f"vLLM is on the same GPUs. {ON_PAPER}"]
    if settings.allocator == "expandable":
        said.append(
            "expandable segments: verl turns them on after each exchange of weights; "
            f"{ENV_IN_WORDS} would end vLLM's sleep mode"
        )
    if settings.lora is not None:
        said.append(_WORDS.one_dtype("fsdp_config.model_dtype"))
    why = "no override reaches rope parameters, which are a mapping in the model's config"
    said += [
        *model_lies(model_path),
        *yarn_lines(found, why=why),
        f"data.max_prompt_length and data.max_response_length together: {found.length_tokens}",
    ]
    words = [f"  {_override(name, value)} \\\n" for name, value in values.items()]
    command = f'{_PROGRAM} \\\n{"".join(words)}  "$@"'
    return _WORDS.emitted(
        found,
        chosen,
        said,
        values,
        command=command,
        start="",
        text=lambda comments: f"#!/usr/bin/env bash\n{comments}{command}\n",
    )


def _values(found: Recommendation, chosen: Candidate, model_path: str) -> dict[str, Value]:
    settings, rollout = chosen.cell.settings, found.rollout
    told: dict[str, Value] = {
        "objective": settings.objective,
        "gpus": found.gpus,
        "model": model_path,
        **({"activations": True} if settings.activations == "host" else {}),
        "strategy": settings.strategy,
        "ulysses": chosen.cell.layout.ulysses_degree,
        "token_budget": chosen.token_budget_tokens,
        "offload": settings.offloads_model,
        "rollout": "vllm",
        "length": found.length_tokens,
    }
    if rollout is not None:
        names = ("gpu_memory_utilization", "rollout_tensor_parallel", "rollout_sequences")
        told |= {"sleep_level": True, **{name: getattr(rollout, name) or 0 for name in names}}
    told |= _lora_values(settings.adapters)
    words = FILE_WORDS["verl"].words.items()
    named = ((n, told.get(word) if isinstance(word, str) else word) for n, word in words)
    return {name: value for name, value in named if value is not None}


def _lora_values(lora: Lora | None) -> dict[str, Value]:
    """Adapters by field, with layers as Hydra's list. Raises UsageError for too high a rank."""
    if lora is None:
        return {}
    if lora.rank > _MOST_RANK:
        raise UsageError(
            f"verl's rollout serves adapters up to rank {_MOST_RANK}, not {lora.rank}",
            hint=f"use `--lora {_MOST_RANK}`",
        )
    return {
        "lora": lora.rank,
        "lora_alpha": _WORDS.whole_alpha(lora),
        "lora_targets": f"[{','.join(lora.names)}]" if lora.names else lora.targets,
        "adapters_dtype": "fp32",
        "load_format": "safetensors",
    }


def _override(name: str, value: Value) -> str:
    """One override as a shell argument; a path is quoted for Hydra first, then for the shell."""
    if name != _PATH:
        return shlex.quote(f"{name}={value}")
    if value == MODEL_PATH:  # a variable, which the shell has to expand
        return f"{name}=\"'{value}'\""
    return shlex.quote(f"{name}={_quoted(str(value))}")


def _quoted(text: str) -> str:
    r"""Quote text so that Hydra takes it literally.

    Within quotes ``"`` becomes ``\"``, and each backslash before a quote is doubled. Source:
    Hydra's override grammar, checked with 1.3.2.
    """
    within = re.sub(
        r'(\\*)("|\Z)', lambda found: found[1] * 2 + (r"\"" if found[2] else ""), literal(text)
    )
    return f'"{within}"'


TARGET = EmitTarget(
    file="verl.sh",
    emit=verl,
    yours=("data and reward, as words after `./launch.sh`: `data.train_files=...`",),
    predicted_for="trinity",
    knows=OF_ALL | OF_LORA | {"activations"} | (OF_ROLLOUT - {"sleep_level"}),
)
