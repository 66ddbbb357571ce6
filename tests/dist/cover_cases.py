"""One process of a group: objectives, layouts and settings in combination, by tests/references."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from rank_steps import each, on_host, parts_of_all, place_of
from reference import EXPERTS, SHAPE

from combinatorial import Box, cover
from engine_models import built
from highwater.engine.attention.registry import register
from highwater.engine.data import batches as data
from highwater.engine.models.build import read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.tracer import trinity_step
from highwater.engine.training.step import Training, backward_of
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from references import objectives as plain
from references.documents import Document
from references.wide import lift_float32_casts
from tables import deep

VOCABULARY = 97
LENGTH_TOKENS = 64
LOSS_SCALE = 0.1
"""Deviations of a loss are relative to itself, or to this where it is smaller: one of whitened
advantages is 0 but for rounding."""
ALONE = 1000
FAR = -800.0
"""A log-probability whose ratio to any other overflows."""
NEVER = 1e9
"""A dual clip above every ratio there can be."""
NUMBERS: dict[str, dict[str, float]] = {
    "default": {},
    "changed": {
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.3,
        "dual_clip": 1.5,
        "kl_coefficient": 0.05,
        "entropy_coefficient": 0.02,
        "value_clip": 0.1,
        "value_coefficient": 0.8,
        "discount": 0.9,
        "gae_lambda": 0.7,
        "dpo_beta": 0.6,
    },
    "one clip": {"dual_clip": 0.0},
}
"""What is set of the engine's hyperparameters. Where nothing is, the reference has its own
defaults, whatever ours are."""
THEIRS = {
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "dual_clip": "dual_clip",
    "kl_coefficient": "divergence",
    "entropy_coefficient": "entropy",
    "value_clip": "value_clip",
    "value_coefficient": "value",
    "discount": "discount",
    "gae_lambda": "decay",
    "dpo_beta": "preference",
}
"""What the reference calls them."""
NOWHERE = ("-",)
"""The value of a factor that an objective does not have."""

RANKS = ("1", "2", "2 ulysses 2", "2 ring 2", "4 ulysses 2", "4 ring 2")
"""Processes, and the degrees by which they share sequences."""
COPIED = ("2 copies 2", "4 ulysses 2 copies 2", "4 copies 2", "8 ulysses 2 ring 2 copies 2")
"""With copies of the shards, for FSDP2 alone."""
IN_TRIPLES = (
    *("3 ring 3", "4 ring 4", "4 ulysses 2 ring 2", "6 ulysses 2 ring 3", "8 ulysses 2 ring 2"),
    "8 ulysses 2 ring 4",
)
"""Besides, where every three values meet."""
COPIED_IN_TRIPLES = (
    "4 ring 4 copies 4",
    "6 ring 3 copies 2",
    "6 ulysses 2 ring 3 copies 3",
    "8 ring 4 copies 2",
)
"""The same with copies: in most of these, copies share a sequence."""
_EVERYWHERE: Box = {
    "strategy": ("fsdp", "fsdp2"),
    "ranks": RANKS,
    "offload": ("no", "offload"),
    "recompute": (
        *("none", "layer", "all-but-attention"),
        *("layer on host", "all-but-attention on host"),
    ),
    "micro-batches": ("1", *(deep("3") or ("2",))),
    "model": ("dense", "moe", "moe-balanced"),
    "trained": ("everywhere", "hardly on rank 0"),
}
_LOGITS: Box = {"loss": ("full", "chunked")}
_RATIOS: Box = {
    "entropy": ("none", "full", "chunked"),
    "sampled": ("all", "some", "none"),
    "numbers": tuple(NUMBERS),
}
_GROUPS: Box = {"estimator": ("k1", "k2", "k3"), "groups": ("within",)}
_ABSENT: Box = dict.fromkeys(_LOGITS | _RATIOS | _GROUPS, NOWHERE) | _EVERYWHERE
_SFT: Box = {**_ABSENT, **_LOGITS, "objective": ("sft",)}
_RW: Box = {**_ABSENT, "objective": ("rw",)}
_DPO: Box = {**_ABSENT, **_LOGITS, "objective": ("dpo",), "numbers": ("default", "changed")}
_PPO: Box = {**_ABSENT, **_LOGITS, **_RATIOS, "objective": ("ppo", "ppo critic")}
_GRPO: Box = {**_ABSENT, **_LOGITS, **_RATIOS, **_GROUPS, "objective": ("grpo",)}
_TRINITY: Box = {
    **_GRPO,
    "strategy": ("trinity",),
    "ranks": ("1", "2", "2 ulysses 2"),
    "offload": ("no",),
    "recompute": ("layer",),
    "model": ("dense",),
    "loss": ("full",),
    "entropy": ("full",),
}
"""The reference system's model, by FSDP1."""
_SPLIT: Box = {**_GRPO, "ranks": ("2", "4 ulysses 2", "4 ring 2"), "groups": ("split",)}
_OBJECTIVES = (_SFT, _RW, _DPO, _PPO, _GRPO)
_HEAVY: Box = {
    "strategy": ("fsdp2",),
    "offload": ("no",),
    "recompute": ("layer", "all-but-attention"),
    "micro-batches": ("1",),
    "model": ("dense", "moe-balanced"),
    "trained": ("everywhere",),
}
"""Of what other layouts meet too, the little that those of many processes meet in pairs."""
_HEAVY_RATIOS: Box = {
    **_HEAVY,
    "entropy": ("full", "chunked"),
    "sampled": ("some", "none"),
    "numbers": ("changed",),
}
_BOTH: Box = _HEAVY | {"strategy": ("fsdp", "fsdp2")}
_BOTH_RATIOS: Box = _HEAVY_RATIOS | {"strategy": ("fsdp", "fsdp2"), "estimator": ("k1", "k3")}


def _shared(box: Box, *ranks: str) -> Box:
    return {**box, "strategy": ("fsdp2",), "ranks": ranks}


PAIRED: tuple[Box, ...] = (
    *_OBJECTIVES,
    _SPLIT,
    _TRINITY,
    _shared(_SFT, *COPIED[:2]),
    {**_SFT, **_BOTH, "ranks": ("3 ring 3", "4 ring 4", "4 ulysses 2 ring 2")},
    {
        **_GRPO,
        **_BOTH_RATIOS,
        "ranks": ("4 ulysses 2 ring 2", "6 ulysses 2 ring 3", "8 ulysses 2 ring 2"),
    },
    _shared({**_RW, **_HEAVY}, "4 ring 4 copies 4", "4 copies 2"),
    _shared({**_DPO, **_HEAVY}, "4 ring 4 copies 4", *deep("6 ring 3 copies 2")),
    _shared({**_PPO, **_HEAVY_RATIOS, "objective": ("ppo critic",)}, "6 ulysses 2 ring 3 copies 3"),
    _shared(
        {**_GRPO, **_HEAVY_RATIOS, "estimator": ("k1", "k3")},
        *(deep("8 ring 4 copies 2") or ("4 ulysses 2 copies 2",)),
    ),
    _shared({**_SFT, **_HEAVY}, COPIED[-1], *deep("8 ulysses 2 ring 4")),
)
"""Boxes whose every two values meet."""
WHOLE: tuple[Box, ...] = (
    *({**box, "ranks": (*RANKS, *IN_TRIPLES)} for box in _OBJECTIVES),
    _SPLIT,
    *(_shared(box, *COPIED, *COPIED_IN_TRIPLES) for box in _OBJECTIVES),
)
"""Boxes whose every three values meet: objectives, losses and all layouts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    values: dict[str, str]

    @property
    def name(self) -> str:
        return ", ".join(
            f"{factor} {value}" for factor, value in sorted(self.values.items()) if value != "-"
        )

    def __getitem__(self, factor: str) -> str:
        return self.values[factor]

    @property
    def layout(self) -> Layout:
        gpus, *words = self["ranks"].split()
        degrees = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        return Layout(
            gpus=int(gpus),
            ulysses_degree=degrees.get("ulysses", 1),
            ring_degree=degrees.get("ring", 1),
            replicate_degree=degrees.get("copies", 1),
        )

    @property
    def objective(self) -> str:
        return self["objective"].split()[0]

    @property
    def settings(self) -> Settings:
        given = {
            "strategy": self["strategy"].replace("trinity", "fsdp"),
            "offload": self["offload"] == "offload",
            "recompute": self["recompute"].removesuffix(" on host"),
            "activations": "host" if self["recompute"].endswith("on host") else "gpu",
            "objective": self.objective,
            "critic": self["objective"] == "ppo critic",
            "loss": self["loss"],
            "entropy": self["entropy"],
        }
        return Settings(
            sequences_per_micro_batch=2,
            **{name: value for name, value in given.items() if value != "-"},
        )

    @property
    def hyperparameters(self) -> Hyperparameters:
        estimator = {} if self["estimator"] == "-" else {"kl_estimator": self["estimator"]}
        return Hyperparameters(**NUMBERS.get(self["numbers"], {}), **estimator)

    @property
    def numbers(self) -> plain.Numbers:
        of_ours = NUMBERS[self["numbers"]]
        changed = {THEIRS[name]: value or NEVER for name, value in of_ours.items()}
        entropy = (
            of_ours.get("entropy_coefficient", 0.001) if self.settings.entropy != "none" else 0.0
        )
        return replace(plain.Numbers(**changed), entropy=entropy)


@cache
def cases(strength: int) -> tuple[Case, ...]:
    boxes = PAIRED if strength == 2 else WHOLE
    # of 2,700 seeds the one whose pairs meet in the least processes and models
    return tuple(Case(values=values) for values in cover(boxes, strength=strength, seed=1111))


def cases_for(processes: int, strength: int) -> list[Case]:
    return [case for case in cases(strength) if case.layout.gpus == processes]


def save_models(folder: Path) -> None:
    """Tiny models with random float64 weights: what is trained, what it is held to."""
    balanced = {**EXPERTS, "output_router_logits": True}
    one = {"num_labels": 1}
    torch.manual_seed(20)
    models = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
        "moe-balanced": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **balanced)),
        "reference": Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
        "scalar dense": Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, **one)),
        "scalar moe": Qwen3MoeForSequenceClassification(Qwen3MoeConfig(**SHAPE, **EXPERTS, **one)),
        "scalar moe-balanced": Qwen3MoeForSequenceClassification(
            Qwen3MoeConfig(**SHAPE, **balanced, **one)
        ),
        "critic": Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, **one)),
    }
    for name, model in models.items():
        model.double().save_pretrained(folder / name)


def results(weights: str, strength: str) -> dict[str, Any]:
    cases = cases_for(dist.get_world_size(), int(strength))
    places = {layout: place_of(layout) for layout in dict.fromkeys(c.layout for c in cases)}
    return each(cases, lambda case: run(case, Path(weights), *places[case.layout]))


def run(
    case: Case, weights: Path, mesh: dist.DeviceMesh, shared: process_mesh.SequenceGroups | None
) -> dict[str, float | str]:
    own, every = batches(case, shared)
    training = train(case, weights, mesh, shared)
    loss = float(process_mesh.total(backward_of(training, own), mesh))
    ours = {
        "policy": gradients(training.policy, case.layout),
        "critic": gradients(training.critic, case.layout) if training.critic is not None else {},
    }
    if dist.get_rank() > 0:
        return {}
    expected_loss, expected = reference(case, weights, every)
    found: dict[str, float | str] = {
        "loss": abs(loss - expected_loss) / max(abs(expected_loss), LOSS_SCALE)
    }
    off: dict[str, float] = {}
    for kind, wanted in expected.items():
        assert set(ours[kind]) == set(wanted), (
            f"parameters without a partner: {set(ours[kind]) ^ set(wanted)}"
        )
        for name, gradient in ours[kind].items():
            # where every token is clipped, experts have no gradient: then ours is 0, too
            scale = wanted[name].norm() or 1.0
            off[f"{kind} {name}"] = float((gradient - wanted[name].flatten()).norm() / scale)
    worst = max(off, key=lambda name: inf if isnan(off[name]) else off[name])
    return found | {"gradient": off[worst], "worst": worst, "ours": loss, "expected": expected_loss}


def batches(
    case: Case, shared: process_mesh.SequenceGroups | None
) -> tuple[list[data.Batch], list[Document]]:
    step = [
        [documents(case, data_rank, m) for m in range(int(case["micro-batches"]))]
        for data_rank in range(case.layout.data_parallel_degree)
    ]
    own = step[dist.get_rank() // case.layout.context_degree]
    packed = [data.share_of(data.pack([_ours(one) for one in of]), shared) for of in own]
    return packed, [one for of_rank in step for of in of_rank for one in of]


def train(
    case: Case, weights: Path, mesh: dist.DeviceMesh, shared: process_mesh.SequenceGroups | None
) -> Training:
    """As highwater.engine.training.rank_run does, in float64."""
    settings = case.settings
    loss = "full" if settings.holds_logits else "chunked"

    def model(name: str, **how: Any) -> Decoder:
        made = built(
            weights / name, mesh, torch.float64, shared=shared, length_tokens=LENGTH_TOKENS, **how
        )
        lift_float32_casts(made)
        return made

    trained = partial(
        model,
        strategy=settings.strategy,
        offload=settings.offload,
        recompute=settings.recompute,
        host=on_host() if settings.activations == "host" else None,
    )
    if case.objective == "rw":
        policy = trained(f"scalar {case['model']}", loss=None)
    elif case["strategy"] == "trinity":
        policy = trinity_actor(weights / case["model"], mesh, shared)
    else:
        policy = trained(case["model"], loss=loss)
    critic = trained("critic", loss=None) if settings.critic else None
    frozen = {"loss": "chunked", "recompute": "none", "offload": True}
    return Training(
        policy=policy,
        optimizer=torch.optim.SGD(policy.parameters()),
        mesh=mesh,
        sequence=shared and shared.every,
        objective=settings.objective,
        entropy=settings.entropy != "none",
        critic=critic,
        critic_optimizer=torch.optim.SGD(critic.parameters()) if critic is not None else None,
        reference=model("reference", **frozen).requires_grad_(False)
        if settings.traits.has_reference
        else None,
        hyperparameters=case.hyperparameters,
    )


def trinity_actor(folder: Path, mesh: dist.DeviceMesh, shared: Any) -> Decoder:
    """Its parameters keep their names, so that they can be compared."""
    config = read_config(str(folder), length_tokens=LENGTH_TOKENS, rope="auto")
    actor = trinity_step.actor_on_meta(
        config, attention=register("flash", shared=shared), dtype=torch.float64
    )
    lift_float32_casts(actor)
    how = {"compute_dtype": torch.float64, "use_orig_params": True}
    return trinity_step.on_fsdp1(actor, directory=str(folder), mesh=mesh, **how)


def gradients(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """By the names that files have, put together from the ranks of one copy, flat: either sharding
    cuts what lies one after the other. Every copy has the same to the bit.
    """
    ranks = parts_of_all(p.grad for p in model.parameters())
    names = [name_in_files(name) for name, _ in model.named_parameters()]
    one, *others = (
        ranks[first : first + layout.shard_degree]
        for first in range(0, len(ranks), layout.shard_degree)
    )
    for other in others:
        assert all(
            mine is theirs is None or torch.equal(mine, theirs)
            for pair in zip(one, other, strict=True)
            for mine, theirs in zip(*pair, strict=True)
        ), "copies differ"
    parts = zip(*one, strict=True)
    return {
        name: torch.cat(there)
        for name, of_ranks in zip(names, parts, strict=True)
        if (there := [part for part in of_ranks if part is not None])
    }


def reference(
    case: Case, weights: Path, step: list[Document]
) -> tuple[float, dict[str, dict[str, Tensor]]]:
    judge = None
    if case.objective == "rw":
        policy = _plain_model(
            AutoModelForSequenceClassification, weights / f"scalar {case['model']}"
        )
        loss = plain.pairwise(policy, list(zip(step[::2], step[1::2], strict=True)))
    else:
        policy = _plain_model(AutoModelForCausalLM, weights / case["model"])
        router, config = None, policy.config
        if getattr(config, "output_router_logits", False):
            top_k = config.num_experts_per_tok
            router = plain.Router(coefficient=config.router_aux_loss_coef, top_k=top_k)
        if case.objective == "sft":
            loss = plain.supervised(policy, step, router=router)
        elif case.objective == "dpo":
            held_to = _plain_model(AutoModelForCausalLM, weights / "reference")
            pairs = list(zip(step[::2], step[1::2], strict=True))
            loss = plain.preference(policy, held_to, pairs, numbers=case.numbers, router=router)
        elif case.objective == "grpo":
            held_to = _plain_model(AutoModelForCausalLM, weights / "reference")
            how = {"estimator": case["estimator"], "numbers": case.numbers, "router": router}
            loss = plain.group_relative(policy, held_to, step, **how)
        else:
            judge = (
                _plain_model(AutoModelForSequenceClassification, weights / "critic")
                if case.settings.critic
                else None
            )
            loss, critic = plain.proximal(policy, judge, step, numbers=case.numbers, router=router)
            if critic is not None:
                critic.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    found = {
        "policy": _plain_gradients(policy),
        "critic": _plain_gradients(judge) if judge is not None else {},
    }
    return loss.item(), found


def _plain_model(kind: Any, directory: Path) -> nn.Module:
    model = _read(kind, directory)
    model.zero_grad()
    return model


@cache
def _read(kind: Any, directory: Path) -> nn.Module:
    """A model that says once what it says about a document: its weights stay."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(directory, dtype=torch.float64, local_files_only=True, **eager)
    of_tokens = model if kind is AutoModelForCausalLM else model.model
    of_tokens.forward = _remembered(of_tokens.forward)
    return model


def _remembered(forward: Callable[..., Any]) -> Callable[..., Any]:
    said: dict[tuple[Any, ...], Any] = {}

    def once(*, input_ids: Tensor, **how: Any) -> Any:
        key = (torch.is_grad_enabled(), *input_ids[0].tolist(), *how.items())
        return said[key] if key in said else said.setdefault(key, forward(input_ids, **how))

    return once


def _plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def documents(case: Case, data_rank: int, micro_batch: int) -> list[Document]:
    """Six documents of odd lengths: single tokens and one without anything to train among them,
    three pairs where an objective takes pairs.

    Where rank 0 hardly trains on anything, it does so in one document: of its first micro-batch.
    """
    generator = torch.Generator().manual_seed(100 * data_rank + micro_batch)
    packed = []
    for index, length in enumerate((7, 1, 13 + data_rank, 5, 9, 2)):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        labels[length // 2 : length // 2 + 2] = -100  # what a tool said, amid the response
        if data_rank == 0 and (
            index == 3 or (case["trained"] != "everywhere" and (micro_batch, index) != (0, 2))
        ):
            labels[:] = -100
        sampled = -4.5 + torch.randn(length, generator=generator, dtype=torch.float64)
        sampled[-1] = FAR if (data_rank, micro_batch, index) == (0, 0, 2) else sampled[-1]
        of_tokens = sampled[1:][labels[1:] != -100]
        packed.append(
            Document(
                ids=ids,
                labels=labels,
                reward=float(torch.randn((), generator=generator)),
                group=_group(case, data_rank, micro_batch, index),
                old_logprobs=of_tokens
                if case["sampled"] == "all" or (case["sampled"] == "some" and index % 3 == 2)
                else None,
            )
        )
    return packed


def _group(case: Case, data_rank: int, micro_batch: int, index: int) -> int:
    if index == 4 and micro_batch == 0:
        return ALONE + data_rank
    return index % 3 if case["groups"] == "split" else 10 * data_rank + index % 2


def _ours(document: Document) -> data.Document:
    logprobs = None
    if document.old_logprobs is not None:
        logprobs = torch.zeros(len(document.ids), dtype=torch.float64)
        logprobs[document.trained] = document.old_logprobs
    return data.Document(
        document.ids,
        document.labels,
        reward=document.reward,
        group=document.group,
        old_logprobs_L=logprobs,
    )
