"""One process of a group: statistics and an evaluation, beside plain PyTorch over the documents."""

import json
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collective_log import CollectiveLog
from cover_cases import ALONE, VOCABULARY, Case, _ours, _plain_model, save_models, train
from rank_steps import each, of_all, place_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from combinatorial import Box, cover
from highwater.engine.data import batches as data
from highwater.engine.models.decoder import LanguageModel
from highwater.engine.models.loss import LogitRange
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.statistics import Group, Quantity, Statistics
from highwater.engine.training.step import train_step
from highwater.engine.training.training_run import evaluate
from highwater.nouns.layout import Layout
from references import objectives as plain
from references.advantages import generalised, standardised_in_groups, whitened
from references.documents import Document, predictions
from references.policy import divergence
from references.wide import float32_casts_lifted

__all__ = ["save_models"]


def count_for(processes: int) -> int:
    return 12 if processes % 3 == 0 else 4


LAYOUTS = {
    1: ("1",),
    2: ("2", "2 ulysses 2", "2 ring 2", "2 copies 2"),
    3: ("3", "3 ring 3"),
    4: (
        *("4", "4 ulysses 2", "4 ring 4", "4 ring 2 copies 2"),
        *("4 ulysses 2 ring 2", "4 ulysses 2 ring 2 copies 2"),
    ),
    6: ("6", "6 ulysses 2", "6 ring 2", "6 ring 3", "6 ulysses 2 ring 3", "6 ring 3 copies 2"),
    8: ("8 ulysses 2", "8 ring 4", "8 ulysses 2 ring 4", "8 ulysses 2 ring 2 copies 2"),
}
"""By processes: the degrees by which they share sequences, and the copies of the shards; of 4 with
copies that split one sequence."""
WITH_COPIES_ONLY = ("4 ulysses 2 ring 2",)
"""Layouts that in pairs stand there with copies alone, which change no group of a statistic."""
OBJECTIVES = ("sft", "grpo", "ppo", "dpo", "rw")
TRAINED = ("everywhere", "in the last micro-batch")
"""Where the step trains: in the last micro-batch alone, most ranks have no valid token."""
OVERRIDDEN: dict[str, Group] = {"nll": "context", "entropy": "rank", "n_valid_tokens": "data"}
OWN = {
    "label_sum": Quantity(how="sum", is_count=True),
    "label_mean": Quantity(how="mean", per="n_valid_tokens"),
    "label_min": Quantity(how="min"),
    "label_max": Quantity(how="max"),
    "squared_nll": Quantity(how="mean", per="n_valid_tokens"),
    "labels_of_a_document": Quantity(how="mean", per="n_documents"),
    "reward": Quantity(how="mean", per="n_documents", group="data"),
    "rewarded": Quantity(how="sum", group="data", is_count=True),
    "reward_of_rewarded": Quantity(how="mean", per="rewarded", group="data"),
    "labels_of_rewarded": Quantity(how="mean", per="rewarded"),
    "reward_of_a_token": Quantity(how="mean", per="n_tokens", group="data"),
    "reward_max": Quantity(how="max", group="data"),
    "never": Quantity(how="min"),
    "nan_sum": Quantity(how="sum"),
    "nan_mean": Quantity(how="mean", per="n_valid_tokens"),
    "nan_min": Quantity(how="min"),
    "nan_max": Quantity(how="max"),
    "nan_reward": Quantity(how="max", group="data"),
    "infinite_min": Quantity(how="min"),
    "infinite_max": Quantity(how="max"),
    "least_or_infinite": Quantity(how="min"),
}
"""Quantities of a caller's own: of a rank's share of the tokens, and of documents, which ranks that
share them have alike; each over what is shared, and over what ranks have alike."""


@dataclass(frozen=True, kw_only=True)
class StatisticsCase:
    """One objective, one loss, one way to share sequences."""

    objective: str
    loss: str
    trained: str
    ranks: str

    @property
    def name(self) -> str:
        return f"{self.objective}, {self.loss}, trained {self.trained}, ranks {self.ranks}"

    @property
    def layout(self) -> Layout:
        return self.plain.layout

    @property
    def plain(self) -> Case:
        has_ratios = self.objective in ("grpo", "ppo")
        return Case(
            values={
                "ranks": self.ranks,
                "strategy": "fsdp2",
                "offload": "no",
                "recompute": "layer",
                "model": "dense",
                "objective": self.objective,
                "loss": "-" if self.objective == "rw" else self.loss,
                "entropy": "none" if has_ratios else "-",
                "estimator": "k3" if self.objective == "grpo" else "-",
                "numbers": "changed" if has_ratios else "default",
            }
        )


def cases_for(processes: int, extent: str) -> list[StatisticsCase]:
    boxes: list[Box] = [
        {"objective": OBJECTIVES[:-1], "loss": ("full", "chunked")},
        {"objective": ("rw",), "loss": ("full",)},
    ]
    left_out = () if extent == "all" else WITH_COPIES_ONLY
    layouts = tuple(layout for layout in LAYOUTS[processes] if layout not in left_out)
    boxes = [{**box, "trained": TRAINED, "ranks": layouts} for box in boxes]
    if extent == "pairs" and processes > 2:  # every objective in one layout, every layout with two
        boxes = [
            {**boxes[0], "objective": ("grpo", "ppo")},
            *({**box, "ranks": layouts[-1:]} for box in boxes),
        ]
    every = [dict(zip(box, row, strict=True)) for box in boxes for row in product(*box.values())]
    chosen = every if extent == "all" else cover(boxes, strength=2, seed=0)
    return [StatisticsCase(**case) for case in chosen]


def results(weights: str, extent: str) -> dict[str, Any]:
    cases = cases_for(dist.get_world_size(), extent)
    places = {layout: place_of(layout) for layout in dict.fromkeys(c.layout for c in cases)}

    def compared(case: StatisticsCase) -> dict[str, Any]:
        found: dict[str, Any] = {"ranks": of_all(run(case, Path(weights), *places[case.layout]))}
        if dist.get_rank() == 0:
            count = count_for(dist.get_world_size())
            path = Path(weights, f"{case.objective} {case.trained} {count}.json")
            if not path.exists():
                found_once = expected(case.objective, case.trained, Path(weights), count)
                path.write_text(json.dumps(found_once))
            found["expected"] = json.loads(path.read_text())
        return found

    return each(cases, compared)


def run(
    case: StatisticsCase,
    weights: Path,
    mesh: dist.DeviceMesh,
    shared: process_mesh.SequenceGroups | None,
) -> dict[str, Any]:
    """What this rank exports of a step, and once more with groups of its own."""
    sharing, data_ranks = case.layout.context_degree, case.layout.data_parallel_degree
    what, count = (case.objective, case.trained), count_for(dist.get_world_size())
    own = [
        data.share_of(data.pack([*map(_ours, documents(*what, number, count))]), shared)
        for number in range(dist.get_rank() // sharing, count, data_ranks)
    ]
    training = train(case.plain, weights, mesh, shared)
    if isinstance(training.policy, LanguageModel):
        training.policy.logit_range = training.record.logit_range = LogitRange()
    evaluated = evaluate(training, own)
    loss, (norm, *_) = train_step(training, own)
    exported: list[dict[str, Any]] = []
    sent: list[tuple[list[tuple[str, int]], int]] = []
    for groups in ({}, OVERRIDDEN):
        statistics = Statistics(mesh, shared and shared.every, groups=groups, quantities=OWN)
        statistics.add("loss", float(loss))
        statistics.add("gradient_norm", float(norm))
        training.record.add_to(statistics, training.hyperparameters)
        add_own(statistics, own)
        for of in training.record.tokens:
            statistics.add("squared_nll", float(of.logprobs_N.square().sum()))
        most = training.record.most_documents
        with CollectiveLog() as log:
            exported.append(dict(statistics.export(most_documents=most)))
        sent.append(([(each.operator, each.numbers) for each in log.begun], statistics.width(most)))
    of_the_parts = {
        "n_valid_tokens": sum(len(batch.labels_N) for batch in own),
        "nll": sum(-float(of.logprobs_N.sum()) for of in training.record.tokens),
        "entropy": sum(float(of.entropies_N.sum()) for of in training.record.tokens),
    }
    return {
        "exported": exported[0] | {"evaluation": evaluated.loss, "evaluated": evaluated.counted},
        "overridden": exported[1],
        "parts": of_the_parts,
        "sent": sent,
    }


def add_own(statistics: Statistics, own: list[data.Batch]) -> None:
    """Add this rank's share of the labels, and the rewards of its documents, one by one."""
    for batch in own:
        for label in batch.labels_N.tolist():
            for name in ("sum", "mean", "min", "max"):
                statistics.add(f"label_{name}", label)
            for how in ("sum", "mean", "min", "max"):
                statistics.add(f"nan_{how}", math.nan if is_odd_one(label) else label)
            statistics.add("infinite_min", math.inf)
            statistics.add("infinite_max", -math.inf)
            statistics.add("least_or_infinite", math.inf if label % 2 else label)
            statistics.add("labels_of_a_document", label)
            statistics.add("labels_of_rewarded", label)
        for reward in batch.rewards:
            for name in ("reward", "reward_of_a_token", "reward_max"):
                statistics.add(name, reward)
            statistics.add("nan_reward", reward if reward > 0 else math.nan)
            statistics.add("rewarded", reward > 0)
            statistics.add("reward_of_rewarded", max(0.0, reward))


def is_odd_one(label: int) -> bool:
    """Whether a label counts as NaN: in every step some do, of few ranks."""
    return label % 11 == 3


def documents(objective: str, trained: str, number: int, count: int) -> list[Document]:
    """A micro-batch of three documents of odd lengths, or of two pairs."""
    generator = torch.Generator().manual_seed(number)
    lengths = (7 + number, 1, 13, 6) if objective in ("rw", "dpo") else (7 + number, 1, 12)
    packed = []
    for index, length in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        labels[length // 2 : length // 2 + 2] = -100
        if trained != "everywhere" and number < count - 1:
            labels[:] = -100
        sampled = -4.5 + torch.randn(length, generator=generator, dtype=torch.float64)
        packed.append(
            Document(
                ids=ids,
                labels=labels,
                reward=float(torch.randn((), generator=generator)),
                group=ALONE if (number, index) == (3, 0) else index % 2,
                old_logprobs=None if index % 3 else sampled[1:][labels[1:] != -100],
            )
        )
    return packed


def expected(objective: str, trained: str, weights: Path, count: int) -> dict[str, Any]:
    """Every number of the step, from documents that run alone through plain models."""
    step = [one for m in range(count) for one in documents(objective, trained, m, count)]
    numbers = StatisticsCase(
        objective=objective, loss="full", trained=trained, ranks="1"
    ).plain.numbers
    found: dict[str, Any] = {
        "n_tokens": sum(len(one.ids) for one in step),
        "n_valid_tokens": sum(len(one.trained) for one in step),
        "n_documents": len(step),
        "n_valid_documents": sum(bool(len(one.trained)) for one in step),
    }
    found["prompt_tokens"] = found["n_tokens"] - found["n_valid_tokens"]
    labels = torch.cat([one.ids[one.trained] for one in step]).double()
    rewards = torch.tensor([one.reward for one in step], dtype=torch.float64)
    found |= {
        "label_sum": int(labels.sum()),
        "label_mean": float(labels.mean()),
        "label_min": float(labels.min()),
        "label_max": float(labels.max()),
        "squared_nll": 0.0,
        "labels_of_a_document": float(labels.sum()) / len(step),
        "reward": float(rewards.mean()),
        "rewarded": int((rewards > 0).sum()),
        "reward_of_rewarded": float(rewards[rewards > 0].mean()),
        "labels_of_rewarded": float(labels.sum() / (rewards > 0).sum()),
        "reward_of_a_token": float(rewards.sum()) / found["n_tokens"],
        "reward_max": float(rewards.max()),
        "never": None,
        "nan_reward": math.nan,
        "infinite_min": math.inf,
        "infinite_max": -math.inf,
        "least_or_infinite": float(labels[labels % 2 == 0].min()),
    }
    assert any(map(is_odd_one, labels.int().tolist()))
    found |= {f"nan_{how}": math.nan for how in ("sum", "mean", "min", "max")}
    if objective == "rw":
        model = _plain_model(AutoModelForSequenceClassification, weights / "scalar dense")
        pairs = list(zip(step[::2], step[1::2], strict=True))
        found |= _with_gradient(plain.pairwise(model, pairs), model)
        return found | {"evaluation": found["loss"], "evaluated": len(pairs)}
    model = _plain_model(AutoModelForCausalLM, weights / "dense")
    frozen = _plain_model(AutoModelForCausalLM, weights / "reference")
    loss = {
        "sft": lambda: plain.supervised(model, step),
        "grpo": lambda: plain.group_relative(model, frozen, step, estimator="k3", numbers=numbers),
        "ppo": lambda: plain.proximal(model, None, step, numbers=numbers)[0],
        "dpo": lambda: plain.preference(
            model, frozen, list(zip(step[::2], step[1::2], strict=True))
        ),
    }[objective]()
    found |= _with_gradient(loss, model)
    with torch.no_grad():
        predicted = [predictions(model, one) for one in step]
        logprobs = torch.cat([of.logprobs for of in predicted])
        found["nll"] = -float(logprobs.mean())
        found["entropy"] = float(torch.cat([of.entropies for of in predicted]).mean())
        perplexities = [float((-of.logprobs.mean()).exp()) for of in predicted if len(of.logprobs)]
        found["ppl_avg"] = sum(perplexities) / len(perplexities)
        found["ppl_min"], found["ppl_max"] = min(perplexities), max(perplexities)
        logits = torch.cat([_logits(model, one) for one in step if len(one.trained)])
        found["logit_min"], found["logit_max"] = float(logits.min()), float(logits.max())
        found["logit_min_avg"] = float(logits.amin(1).mean())
        found["logit_max_avg"] = float(logits.amax(1).mean())
        found["squared_nll"] = float(logprobs.square().mean())
        found["evaluation"] = found["loss"] if objective == "dpo" else found["nll"]
        found["evaluated"] = len(step) / 2 if objective == "dpo" else len(logprobs)
        if objective in ("grpo", "dpo"):
            held = torch.cat([predictions(frozen, one).logprobs for one in step])
            estimator = "k3" if objective == "grpo" else "k2"
            found["kl_reference"] = float(divergence(logprobs, held, estimator=estimator).mean())
    if objective in ("grpo", "ppo"):
        found |= _ratios(objective, step, [of.logprobs for of in predicted], numbers)
    return found


def _with_gradient(loss: Tensor, model: torch.nn.Module) -> dict[str, float]:
    loss.backward(retain_graph=True)
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return {"loss": float(loss), "gradient_norm": float(torch.stack(norms).norm())}


def _logits(model: Any, document: Document) -> Tensor:
    with float32_casts_lifted():
        return model(input_ids=document.ids[None], use_cache=False).logits[0, document.trained - 1]


def _ratios(
    objective: str, step: list[Document], logprobs: list[Tensor], numbers: plain.Numbers
) -> dict[str, float]:
    """As verl's compute_policy_loss has ``pg_clipfrac``, ``pg_clipfrac_lower`` and ``ppo_kl``."""
    if objective == "grpo":
        grouped = standardised_in_groups([one.reward for one in step], [one.group for one in step])
        advantages = torch.cat(
            [a.expand(len(one.trained)) for a, one in zip(grouped, step, strict=True)]
        )
    else:
        advantages = whitened(
            torch.cat(
                [
                    generalised(
                        torch.zeros(len(one.trained), dtype=torch.float64),
                        one.reward,
                        discount=numbers.discount,
                        decay=numbers.decay,
                    )
                    for one in step
                ]
            )
        )
    new = torch.cat(logprobs)
    old = torch.cat(
        [
            of if one.old_logprobs is None else one.old_logprobs
            for one, of in zip(step, logprobs, strict=True)
        ]
    )
    ratio = torch.exp(new - old)
    losses1 = -advantages * ratio
    losses2 = -advantages * torch.clamp(ratio, 1 - numbers.clip_low, 1 + numbers.clip_high)
    clipped = torch.maximum(losses1, losses2)
    losses3 = -advantages * numbers.dual_clip
    lower = torch.gt(clipped, losses3) * (advantages < 0)
    return {
        "clip_fraction": float(torch.gt(losses2, losses1).double().mean()),
        "dual_clip_fraction": float(lower.double().mean()),
        "kl_old": float((old - new).mean()),
    }
