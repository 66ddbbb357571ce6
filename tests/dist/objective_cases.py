"""One process of a group: every objective, sharded, against its plain implementation. Started by
``rank_groups.py`` or torchrun.

``torchrun --nproc-per-node N objective_cases.py RESULT WEIGHTS EXTENT``: writes, as rank 0, one
JSON object {case name: deviations}.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from plain_objectives import Plain, plain
from rank_steps import built, each, gradients, place_of, results_in
from torch import Tensor

from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Document, pack, share_of
from highwater.engine.models.build import read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel.mesh import total
from highwater.engine.tracer import trinity_step
from highwater.engine.training.step import Training, backward_of
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import TRAITS

MICRO_BATCHES = 2
VOCABULARY = 97


@dataclass(frozen=True, kw_only=True)
class Case:
    """One objective, one way to compute it."""

    objective: str
    loss: str = "full"
    critic: bool = False
    entropy: bool = False
    ulysses: int = 1
    ring: int = 1
    dtype: str = "float64"
    model: str = "dense"
    strategy: str = "fsdp2"
    offload: bool = False
    trainer: str = "highwater"
    documents: str = "sampled"
    numbers: Hyperparameters = field(default_factory=Hyperparameters)

    @property
    def sharing(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses * self.ring

    @property
    def name(self) -> str:
        parts = [
            self.objective,
            self.model,
            self.dtype,
            self.loss,
            self.strategy,
            f"ulysses={self.ulysses}",
            self.trainer,
        ]
        parts += [f"ring={self.ring}"] * (self.ring > 1)
        parts += ["critic"] * self.critic + ["entropy"] * self.entropy + ["offload"] * self.offload
        return " ".join(
            [
                *parts,
                *([] if self.documents == "sampled" else [self.documents]),
                *self.numbers.flags,
            ]
        )


_PLAINLY = [
    Case(objective="grpo", entropy=True),
    Case(objective="grpo", entropy=True, loss="chunked", model="moe"),
    Case(objective="ppo", loss="chunked"),
    Case(objective="ppo", critic=True, entropy=True),
    Case(objective="rw"),
    Case(objective="dpo", loss="chunked"),
    Case(objective="dpo", model="moe"),
]
CASES = [replace(case, ulysses=ulysses) for case in _PLAINLY for ulysses in (1, 2, 4)]
CASES += [replace(case, dtype="float32", offload=True) for case in _PLAINLY]
CASES += [replace(case, strategy="fsdp", offload=case.critic) for case in _PLAINLY]
_TRINITY = Case(
    objective="grpo", entropy=True, strategy="fsdp", trainer="trinity", dtype="float32"
)  # as Hugging Face's norms are
CASES += [replace(_TRINITY, ulysses=ulysses) for ulysses in (1, 2)]
CASES += [
    Case(
        objective="grpo",
        documents="unlike",
        numbers=Hyperparameters(kl_estimator="k1", kl_coefficient=0.5),
    ),
    Case(
        objective="grpo",
        documents="unlike",
        numbers=Hyperparameters(kl_estimator="k3", kl_coefficient=0.5, dual_clip=0),
        ulysses=2,
    ),
    Case(objective="dpo", documents="unlike", numbers=Hyperparameters(dpo_beta=0.7), ulysses=2),
    Case(
        objective="ppo",
        critic=True,
        entropy=True,
        documents="unlike",
        numbers=Hyperparameters(
            clip_ratio_low=0.1,
            clip_ratio_high=0.28,
            dual_clip=5.0,
            entropy_coefficient=0.1,
            value_clip=0.01,
            value_coefficient=2.0,
            discount=0.9,
            gae_lambda=0.8,
        ),
    ),
]
RINGS = ((1, 2), (1, 3), (2, 2))
"""Degrees of Ulysses and of the ring, of all processes."""


def cases_for(processes: int, extent: str) -> list[Case]:
    """The cases that this many processes can run.

    ``sliced``: without a ring. ``rings``: in float32, every objective and loss in one that all
    processes share; ``all rings``: in each of them.
    """
    if extent == "sliced":
        return [case for case in CASES if processes % case.ulysses == 0]
    every = [
        replace(case, dtype="float32", ulysses=ulysses, ring=ring)
        for index, case in enumerate(_PLAINLY)
        for number, (ulysses, ring) in enumerate(RINGS)
        if extent == "all rings" or index % len(RINGS) == number
    ]
    return [case for case in every if case.sharing == processes]


def main() -> None:
    result, weights, extent = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with results_in(result) as results:
        results |= each(cases_for(dist.get_world_size(), extent), lambda case: run(case, weights))


def run(case: Case, weights: Path) -> dict[str, float | str]:
    """Norm-relative deviations of one case: loss, and the worst gradient of policy and critic."""
    world = dist.get_world_size()
    ranks = [
        [documents(r, m, case.documents) for m in range(MICRO_BATCHES)]
        for r in range(world // case.sharing)
    ]
    layout = Layout(gpus=world, ulysses_degree=case.ulysses, ring_degree=case.ring)
    mesh, shared = place_of(layout)
    own = [share_of(pack(b), shared) for b in ranks[dist.get_rank() // case.sharing]]

    def model(name: str, loss: str | None) -> Decoder:
        return built(
            weights / name,
            mesh,
            getattr(torch, case.dtype),
            shared=shared,
            loss=loss,
            strategy="fsdp2" if name == "reference" else case.strategy,
            offload=case.offload or name == "reference",
        )

    if case.trainer == "trinity":
        policy = trinity_actor(case, weights / case.model, mesh, shared)
    else:
        policy = model("scalar", None) if case.objective == "rw" else model(case.model, case.loss)
    critic = model("scalar", None) if case.critic else None
    training = Training(
        policy=policy,
        optimizer=torch.optim.SGD(policy.parameters()),
        mesh=mesh,
        sequence=shared and shared.every,
        objective=case.objective,
        entropy=case.entropy,
        critic=critic,
        critic_optimizer=torch.optim.SGD(critic.parameters()) if critic is not None else None,
        reference=model("reference", "full").requires_grad_(False)
        if TRAITS[case.objective].has_reference
        else None,
        hyperparameters=case.numbers,
    )
    loss = total(backward_of(training, own), mesh)
    expected = plain(
        case.objective,
        weights,
        case.model,
        ranks,
        critic=case.critic,
        entropy=case.entropy,
        numbers=case.numbers,
    )
    return deviations(loss, training, expected)


def trinity_actor(case: Case, folder: Path, mesh: dist.DeviceMesh, shared: object) -> Decoder:
    """The reference system's model; its parameters keep their names, so that they can be
    compared.
    """
    dtype = getattr(torch, case.dtype)
    config = read_config(str(folder), length_tokens=64, rope="auto")
    actor = trinity_step.actor_on_meta(
        config, attention=register("flash", shared=shared), dtype=dtype
    )
    return trinity_step.on_fsdp1(
        actor, directory=str(folder), mesh=mesh, compute_dtype=dtype, use_orig_params=True
    )


def deviations(loss: Tensor, training: Training, expected: Plain) -> dict[str, float | str]:
    """Of the loss, and of the parameter that is furthest off."""
    found = {"loss": abs(float(loss) / float(expected.loss) - 1), "gradient": 0.0, "worst": ""}
    for kind, model, wanted in (
        ("policy", training.policy, expected.policy),
        ("critic", training.critic, expected.critic),
    ):
        ours = gradients(model) if model is not None else {}
        assert set(ours) == set(wanted), f"parameters without a partner: {set(ours) ^ set(wanted)}"
        for name, gradient in ours.items():
            off = float((gradient - wanted[name].flatten()).norm() / wanted[name].norm())
            if off >= found["gradient"]:
                found |= {"gradient": off, "worst": f"{kind}.{name}"}
    return found


def documents(rank: int, micro_batch: int, kind: str) -> list[Document]:
    """Four documents of odd lengths, in groups that go over ranks and micro-batches; one of them
    has nothing to train on.

    ``sampled``: all of them by some other policy. ``unlike``: ranks have different numbers of
    documents, some nobody knows the policy of, some are from a policy that is nothing like this
    one, and one is the only one of its group.
    """
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    lengths = (7, 13 + rank, 5, 9)
    if kind == "unlike":
        lengths = (*lengths, 11, 6)[: 4 + 2 * (rank == 0)]
    packed = []
    for index, length in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        if index == 2 and rank == 0:
            labels[:] = -100
        reward = float(torch.randn((), generator=generator))
        sampled = -4.5 + torch.randn(length, generator=generator)
        group = index % 2
        if kind == "unlike":
            sampled = (
                None if index == 1 + micro_batch else sampled + (-90, 0, 0, 90, -1.5, 1.5)[index]
            )
            group = -(2**63) if (rank, micro_batch, index) == (0, 1, 0) else 10**12 + group
        packed.append(Document(ids, labels, reward=reward, group=group, old_logprobs_L=sampled))
    return packed


if __name__ == "__main__":
    main()
