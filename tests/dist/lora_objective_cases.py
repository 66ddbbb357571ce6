"""One process of a group: every objective with LoRA, sharded, against its plain implementation on a
model that has the adapters merged in.

By the chain rule: of ``W + scale * B A`` with a gradient G, A's is ``scale * B^T G`` and B's is
``scale * G A^T``. The reference is the policy without its adapters.

``torchrun --nproc-per-node N lora_objective_cases.py RESULT FOLDER``: writes, as rank 0, one JSON
object {case name: deviations}.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lora_cases import adapter_values, fill_adapters
from objective_cases import MICRO_BATCHES, documents, gradients
from plain_objectives import plain
from rank_steps import built, each, place_of, results_in
from reference import SHAPE
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from highwater.engine.data.batches import pack, share_of
from highwater.engine.models.adapters import A, B
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.mesh import total
from highwater.engine.training.step import Training, backward_of
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.lora import Lora
from highwater.nouns.objective import TRAITS

LORA = Lora(rank=3, alpha=6)
NUMBERS = Hyperparameters(kl_coefficient=0.5)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One objective, on ranks that share sequences or do not."""

    objective: str
    critic: bool = False
    entropy: bool = False
    ulysses: int = 1

    @property
    def name(self) -> str:
        parts = [self.objective, f"ulysses={self.ulysses}"]
        return " ".join([*parts, *["critic"] * self.critic, *["entropy"] * self.entropy])

    @property
    def numbers(self) -> Hyperparameters:
        return NUMBERS if self.objective == "grpo" else Hyperparameters()


def cases_for(processes: int) -> list[Case]:
    """Every objective, and each degree that divides the processes."""
    return [
        Case(**asked, ulysses=ulysses)
        for ulysses in (1, 2)
        if processes % ulysses == 0
        for asked in (
            {"objective": "grpo", "entropy": True},
            {"objective": "dpo"},
            {"objective": "rw"},
            {"objective": "ppo", "critic": True},
        )
    ]


def save_models(folder: Path) -> None:
    """A causal LM and a model of scalars, as they were and with adapters merged in."""
    torch.manual_seed(0)
    sizes = {**SHAPE, "intermediate_size": 48, "tie_word_embeddings": False}
    scalar = Qwen3Config(**sizes, num_labels=1, pad_token_id=0)
    for name, model in (
        ("reference", Qwen3ForCausalLM(Qwen3Config(**sizes)).double()),
        ("scalar_alone", Qwen3ForSequenceClassification(scalar).double()),
    ):
        model.save_pretrained(folder / name)
        merge(model)
        model.save_pretrained(folder / ("merged" if name == "reference" else "scalar"))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter to the weight that it stands beside."""
    for name, weight in model.named_parameters():
        if is_adapted(name):
            a, b = (values(adapter, tuple(weight.shape)) for adapter in adapters_of(name))
            weight += LORA.scale * (b @ a)


def is_adapted(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEAR


def adapters_of(name: str) -> tuple[str, str]:
    """Names of the adapter's matrices beside a weight."""
    layer = name.removesuffix("weight")
    return layer + A, layer + B


def values(name: str, weight_shape: tuple[int, ...]) -> Tensor:
    """Values of A or B beside a weight of this shape."""
    outputs, inputs = weight_shape
    shape = (LORA.rank, inputs) if name.endswith(A) else (outputs, LORA.rank)
    return adapter_values(name, shape)


def main() -> None:
    result, folder = sys.argv[1], Path(sys.argv[2])
    with results_in(result) as results:
        results |= each(cases_for(dist.get_world_size()), lambda case: run(case, folder))


def run(case: Case, folder: Path) -> dict[str, float | str]:
    """Norm-relative deviations: loss, and the worst gradient of policy and critic."""
    world = dist.get_world_size()
    layout = Layout(gpus=world, ulysses_degree=case.ulysses)
    mesh, shared = place_of(layout)
    ranks = [
        [documents(r, m, "sampled") for m in range(MICRO_BATCHES)]
        for r in range(world // case.ulysses)
    ]
    own = [share_of(pack(batch), shared) for batch in ranks[dist.get_rank() // case.ulysses]]

    def model(name: str, loss: Any) -> Decoder:
        made = built(folder / name, mesh, torch.float64, shared=shared, loss=loss, lora=LORA)
        fill_adapters(made, name_in_files)
        return made

    is_scalar = case.objective == "rw"
    policy = model("scalar_alone", None) if is_scalar else model("reference", "full")
    critic = model("scalar_alone", None) if case.critic else None
    training = Training(
        policy=policy,
        optimizer=sgd(policy),
        mesh=mesh,
        sequence=shared and shared.every,
        objective=case.objective,
        entropy=case.entropy,
        critic=critic,
        critic_optimizer=None if critic is None else sgd(critic),
        reference=policy if TRAITS[case.objective].has_reference else None,
        hyperparameters=case.numbers,
    )
    loss = total(backward_of(training, own), mesh)
    expected = plain(
        case.objective,
        folder,
        "merged",
        ranks,
        critic=case.critic,
        entropy=case.entropy,
        numbers=case.numbers,
    )
    off = {
        f"{kind}.{name}": value
        for kind, model_, wanted in (
            ("policy", policy, expected.policy),
            ("critic", critic, expected.critic),
        )
        if model_ is not None
        for name, value in deviations(model_, wanted).items()
    }
    worst = max(off, key=off.__getitem__)
    return {
        "loss": abs(float(loss) / float(expected.loss) - 1),
        "gradient": off[worst],
        "worst": worst,
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad])


def deviations(model: nn.Module, wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of every trained parameter's gradient: adapters', and a number's in the vocabulary's
    place.
    """
    expected = {name: gradient for name, gradient in wanted.items() if name == "score.weight"}
    for name, gradient in wanted.items():
        if is_adapted(name):
            of_a, of_b = adapters_of(name)
            a, b = (values(adapter, tuple(gradient.shape)) for adapter in (of_a, of_b))
            expected |= {of_a: LORA.scale * b.T @ gradient, of_b: LORA.scale * gradient @ a.T}
    found = gradients(model)
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))
    return {
        name: float((found[name] - each.flatten()).norm() / each.norm())
        for name, each in expected.items()
    }


if __name__ == "__main__":
    main()
