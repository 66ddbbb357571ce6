"""One process of a group: every objective with LoRA, sharded, against its plain implementation on a
model that has the adapters merged in.

By the chain rule: of ``W + scale * B A`` with a gradient G, A's is ``scale * B^T G`` and B's is
``scale * G A^T``. The reference is the policy without its adapters.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cover_cases import (
    LENGTH_TOKENS,
    LOSS_SCALE,
    Case,
    batches,
    gradients,
    lift_float32_casts,
    reference,
)
from lora_cases import adapter_values, fill_adapters
from rank_steps import each, place_of
from reference import SHAPE
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from engine_models import built
from highwater.engine.models.adapters import A, B
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.mesh import total
from highwater.engine.training.step import Training, backward_of
from highwater.nouns.objective import Lora

LORA = Lora(rank=3, alpha=6)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


OBJECTIVES: dict[str, dict[str, str]] = {
    "grpo": {"estimator": "k3", "entropy": "full"},
    "dpo": {},
    "rw": {},
    "ppo critic": {"entropy": "none"},
}


def cases_for(processes: int) -> list[Case]:
    usual = dict.fromkeys(("loss", "entropy", "estimator", "groups"), "-") | {
        "strategy": "fsdp2",
        "offload": "no",
        "recompute": "layer",
        "micro-batches": "2",
        "model": "merged",
        "trained": "everywhere",
        "sampled": "all",
        "numbers": "changed",
    }
    return [
        Case(values=usual | {"objective": objective, "ranks": ranks} | own)
        for ranks in {1: ("1",), 2: ("2", "2 ulysses 2")}[processes]
        for objective, own in OBJECTIVES.items()
    ]


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    scalar = Qwen3Config(**SHAPE, num_labels=1, pad_token_id=0)
    for name, merged, model in (
        ("reference", ("merged",), Qwen3ForCausalLM(Qwen3Config(**SHAPE)).double()),
        ("alone", ("scalar merged", "critic"), Qwen3ForSequenceClassification(scalar).double()),
    ):
        model.save_pretrained(folder / name)
        merge(model)
        for other in merged:
            model.save_pretrained(folder / other)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if is_adapted(name):
            a, b = (values(adapter, tuple(weight.shape)) for adapter in adapters_of(name))
            weight += LORA.scale * (b @ a)


def is_adapted(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEAR


def adapters_of(name: str) -> tuple[str, str]:
    layer = name.removesuffix("weight")
    return layer + A, layer + B


def values(name: str, weight_shape: tuple[int, ...]) -> Tensor:
    outputs, inputs = weight_shape
    shape = (LORA.rank, inputs) if name.endswith(A) else (outputs, LORA.rank)
    return adapter_values(name, shape)


def results(folder: str) -> dict[str, Any]:
    return each(cases_for(dist.get_world_size()), lambda case: run(case, Path(folder)))


def run(case: Case, folder: Path) -> dict[str, float | str]:
    mesh, shared = place_of(case.layout)
    own, every = batches(case, shared)

    def model(name: str, loss: Any) -> Decoder:
        how = {"shared": shared, "loss": loss, "lora": LORA, "length_tokens": LENGTH_TOKENS}
        made = built(folder / name, mesh, torch.float64, **how)
        lift_float32_casts(made)
        fill_adapters(made, name_in_files)
        return made

    policy = model("alone", None) if case.objective == "rw" else model("reference", "full")
    critic = model("alone", None) if case.settings.critic else None
    training = Training(
        policy=policy,
        optimizer=sgd(policy),
        mesh=mesh,
        sequence=shared and shared.every,
        objective=case.settings.objective,
        entropy=case["entropy"] == "full",
        critic=critic,
        critic_optimizer=None if critic is None else sgd(critic),
        reference=policy if case.settings.traits.has_reference else None,
        hyperparameters=case.hyperparameters,
    )
    loss = float(total(backward_of(training, own), mesh))
    ours = {
        kind: gradients(trained, case.layout)
        for kind, trained in (("policy", policy), ("critic", critic))
        if trained is not None
    }
    if dist.get_rank():
        return {}
    expected_loss, expected = reference(case, folder, every)
    off = {
        f"{kind}.{name}": value
        for kind, found in ours.items()
        for name, value in deviations(found, expected[kind]).items()
    }
    worst = max(off, key=off.__getitem__)
    loss_off = abs(loss - expected_loss) / max(abs(expected_loss), LOSS_SCALE)
    return {"loss": loss_off, "gradient": off[worst], "worst": worst}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad])


def deviations(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of every trained parameter's gradient: adapters', and a number's in the vocabulary's
    place.
    """
    expected = {name: gradient for name, gradient in wanted.items() if name == "score.weight"}
    for name, gradient in wanted.items():
        if is_adapted(name):
            of_a, of_b = adapters_of(name)
            a, b = (values(adapter, tuple(gradient.shape)) for adapter in (of_a, of_b))
            expected |= {of_a: LORA.scale * b.T @ gradient, of_b: LORA.scale * gradient @ a.T}
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))
    return {
        name: float((found[name] - each.flatten()).norm() / each.norm())
        for name, each in expected.items()
    }
