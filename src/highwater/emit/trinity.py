"""A recommendation as Trinity-RFT's YAML.

Its trainer is verl's actor. In version 0.6.0 ``model.rope_scaling`` reaches the rollout alone: the
trainer reads the model's own ``config.json`` (``trinity/trainer/verl/config.py``), so YaRN has to
be in both.

Source of the names: ``trinity/common/config.py`` of trinity-rft 0.6.0.
"""

from highwater.emit.emitted import (
    Emitted,
    Value,
    emitted,
    environment,
    exports,
    heading,
    model_lies,
    yaml_path,
    yarn_lines,
)
from highwater.spec.recommendation import Candidate, Recommendation

VERSION = "0.6.0"
_COMMAND = "trinity run --config trinity.yaml"


def trinity(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Write the sections that a length depends on."""
    values = _values(found, chosen, yaml_path(model_path))
    variables = environment(chosen)
    said = heading(found, chosen, name="Trinity-RFT", version=VERSION, is_predicted=True)
    said += exports(variables, before="`ray start`")
    said += model_lies(model_path, before="`ray start`")
    said += yarn_lines(
        found,
        why="model.rope_scaling reaches the rollout alone, the trainer reads the model itself",
    )
    if found.rollout_gpus:
        said.append(
            f"{found.rollout_gpus} rollout engines of one GPU each: how they are divided is not "
            "part of the recommendation"
        )
    said.append(f"start: {_COMMAND}")
    return emitted("trinity", VERSION, said, values, command=_COMMAND, environment=variables)


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
