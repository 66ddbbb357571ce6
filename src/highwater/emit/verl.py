"""A recommendation as verl's Hydra overrides, in a shell script.

verl turns expandable segments on by itself after each exchange of weights
(``verl/workers/engine_workers.py``); in the environment they would end vLLM's sleep mode, whose
memory pool refuses them (https://github.com/pytorch/pytorch/issues/147851).

Source of the names: ``_generated_ppo_trainer.yaml`` of verl 0.9.1.
"""

import re
import shlex

from highwater.emit.emitted import (
    Emitted,
    Value,
    comment,
    emitted,
    heading,
    literal,
    model_lies,
    yarn_lines,
)
from highwater.errors import UsageError
from highwater.spec.allocator_variables import ENV_IN_WORDS
from highwater.spec.recommendation import Candidate, Recommendation

VERSION = "0.9.1"
MODEL_PATH = "$MODEL_PATH"
"""The model's path where nobody said where it lies."""
_PROGRAM = "python3 -m verl.trainer.main_ppo"
_PATH = "actor_rollout_ref.model.path"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"


def verl(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Write the overrides that a length depends on.

    Raises UsageError for GPUs set aside: verl's actor and rollout share theirs.
    """
    if found.rollout_gpus:
        raise UsageError(
            "verl's actor and rollout share their GPUs: none are set aside",
            hint="leave `--rollout-gpus` out, and `--reserved 10GiB` for what the rollout keeps "
            "while the actor trains",
        )
    values = _values(found, chosen, model_path or MODEL_PATH)
    said = heading(found, chosen, name="verl", version=VERSION, is_predicted=True)
    said.append(
        "what the rollout keeps on the GPU while the actor trains is not in it: `--reserved` says "
        "how much"
    )
    if chosen.cell.settings.allocator == "expandable":
        said.append(
            "expandable segments: verl turns them on after each exchange of weights; "
            f"{ENV_IN_WORDS} would end vLLM's sleep mode"
        )
    said += model_lies(model_path, before="it starts")
    said += yarn_lines(
        found, why="no override reaches rope parameters, which are a mapping in the model's config"
    )
    said.append(
        f"data.max_prompt_length and data.max_response_length together: {found.length_tokens}"
    )
    words = [f"  {_override(name, value)} \\\n" for name, value in values.items()]
    command = f'{_PROGRAM} \\\n{"".join(words)}  "$@"'
    text = f"#!/usr/bin/env bash\n{comment(said)}{command}\n"
    return emitted("verl", VERSION, said, values, command=command, text=text)


def _values(found: Recommendation, chosen: Candidate, model_path: str) -> dict[str, Value]:
    budget, offload = chosen.token_budget_tokens, chosen.cell.settings.offloads_model
    return {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": found.gpus,
        _PATH: model_path,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{_ACTOR}.strategy": chosen.cell.settings.strategy,
        f"{_ACTOR}.ulysses_sequence_parallel_size": chosen.cell.layout.ulysses_degree,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": budget,
        f"{_ACTOR}.fsdp_config.offload_policy": offload,
        f"{_REF}.log_prob_use_dynamic_bsz": True,
        f"{_REF}.log_prob_max_token_len_per_gpu": budget,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": budget,
        f"{_ROLLOUT}.max_model_len": found.length_tokens,
    }


def _override(name: str, value: Value) -> str:
    """One argument of the shell.

    A path is quoted for Hydra, where ``,`` and ``=`` mean something, then for the shell.
    """
    if name != _PATH:
        return shlex.quote(f"{name}={value}")
    if value == MODEL_PATH:  # a variable, which the shell has to expand
        return f"{name}=\"'{value}'\""
    return shlex.quote(f"{name}={_quoted(str(value))}")


def _quoted(text: str) -> str:
    r"""Quote text for Hydra, which then takes it literally.

    Between its quotes ``"`` is ``\"``, and before a quote each backslash is two. Source: Hydra's
    override grammar, checked with 1.3.2.
    """
    within = re.sub(
        r'(\\*)("|\Z)', lambda found: found[1] * 2 + (r"\"" if found[2] else ""), literal(text)
    )
    return f'"{within}"'
