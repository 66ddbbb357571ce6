"""One process of a group: every case of sharded training against the unsharded reference."""

from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rank_steps import Fields, Place, Step, deviations, each, first_step, on_host, place_of, values
from reference import Documents, reference_gradients, reference_training
from torch import nn

from combinatorial import in_pairs
from engine_models import built, on_meta
from highwater.engine.data.batches import Batch, Document, pack, share_of
from highwater.engine.models import random_weights
from highwater.engine.models.build import read_config
from highwater.engine.models.decoder import LanguageModel
from highwater.engine.models.fill import Fill
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.fsdp1 import shard_flat
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout

MICRO_BATCHES = 2
VOCABULARY = 97
COVER = "cover"
"""Cases in which every value of one field meets every value of any other field."""
BUILD = "FSDP1 is built unit by unit"
FILLED = "filled"
"""No cases: random weights, and those of a family that makes parameters off meta."""
PRODUCTS = ("fsdp", "fsdp offload", "fsdp2", "fsdp2 offload")
"""Every combination of the other fields, activations on the device."""
ON_HOST = ("layer on host", "all-but-attention on host")


@dataclass(frozen=True, kw_only=True)
class Case(Fields):
    strategy: str
    offload: bool
    model: str
    precision: str
    """Dtype of everything; ``bfloat16``: of the compute copies of float32 shards."""
    loss: str
    recompute: str
    """With `` on host`` behind it, what layers keep is in host memory."""
    batch: str
    ulysses: int
    mlp_tiles: int | None
    head_groups: int

    @property
    def master(self) -> str:
        return "float32" if self.precision == "bfloat16" else self.precision

    @property
    def divides_heads(self) -> bool:
        """Groups are those of a layer that is recomputed; ranks share the query heads of each."""
        return self.head_groups == 1 or (
            self.recompute != "none" and self.head_groups * self.ulysses <= 4
        )

    @property
    def is_told_by_its_result(self) -> bool:
        """Not, where rounding alone may change it."""
        if self.batch == "two-steps":
            return self.precision == "float64"
        return not (self.precision == "bfloat16" and self.model == "moe")


VALUES = {
    "strategy": ("fsdp", "fsdp2"),
    "offload": (False, True),
    "model": ("dense", "tied", "moe"),
    "precision": ("float64", "float32", "bfloat16"),
    "loss": ("full", "chunked"),
    "recompute": ("layer", "none", "all-but-attention", *ON_HOST),
    "batch": ("packed", "untrained-rank", "two-steps"),
    "ulysses": (1, 2, 4),
    "mlp_tiles": (None, 3),
    "head_groups": (1, 2),
}


def cases_for(processes: int, part: str) -> list[Case]:
    every = [Case(**dict(zip(VALUES, values, strict=True))) for values in product(*VALUES.values())]
    possible = [
        case
        for case in every
        if processes % case.ulysses == 0 and case.is_told_by_its_result and case.divides_heads
    ]
    if part == COVER:
        return _pairwise(possible)
    if part == FILLED:
        return []
    strategy, _, offload = part.partition(" ")
    return [
        case
        for case in possible
        if (case.strategy, case.offload) == (strategy, bool(offload))
        and case.recompute not in ON_HOST
    ]


def _pairwise(cases: list[Case]) -> list[Case]:
    """Few of the cases, in which every pair of two fields' values is found that is found in all."""
    bits: dict[Any, int] = {}
    pairs = [
        sum(
            1 << bits.setdefault(pair, len(bits))
            for pair in combinations(((f.name, getattr(case, f.name)) for f in fields(case)), 2)
        )
        for case in cases
    ]
    missing, chosen = (1 << len(bits)) - 1, list[Case]()
    while missing:
        best = max(range(len(cases)), key=lambda index: (pairs[index] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~pairs[best]
    return chosen


def results(path: str, part: str) -> dict[str, Any]:
    weights, world = Path(path), dist.get_world_size()
    places = {
        u: place_of(Layout(gpus=world, ulysses_degree=u)) for u in (1, 2, 4) if world % u == 0
    }
    found: dict[str, Any] = each(
        cases_for(world, part), lambda case: run(case, weights / case.model, places[case.ulysses])
    )
    if part == COVER:
        found[BUILD] = build_unit_by_unit(weights / "tied", places[1][0])
    if part == FILLED:
        found["random"] = random_everywhere(weights, places[1][0])
        found["saved"] = made_elsewhere(weights / "diffllama", places[min(2, world)])
    return found


def run(case: Case, directory: Path, place: Place) -> dict[str, float | str]:
    mesh, shared = place
    master, data_rank = getattr(torch, case.master), dist.get_rank() // case.ulysses
    own = [
        share_of(pack([Document(*pair) for pair in documents(case.batch, data_rank, m)]), shared)
        for m in range(MICRO_BATCHES)
    ]
    model = built(
        directory,
        mesh,
        getattr(torch, case.precision),
        shared=shared,
        strategy=case.strategy,
        offload=case.offload,
        loss=case.loss,
        recompute=case.recompute.removesuffix(" on host"),
        host=on_host() if case.recompute in ON_HOST else None,
        mlp_tiles=case.mlp_tiles,
        head_groups=case.head_groups,
        master_dtype=master,
    )
    if case.batch == "two-steps":
        found = _two_steps(model, own, mesh)
    else:
        found = first_step(model, place, own)
        kept = {gradient.dtype for gradient in found[2].values()}
        assert kept == {master}, "gradients are kept in the master's dtype"
    data_ranks = mesh.size() // case.ulysses
    return deviations(found, lambda: _expected(directory, master, case.batch, data_ranks))


def _two_steps(model: LanguageModel, micro_batches: list[Batch], mesh: dist.DeviceMesh) -> Step:
    """Loss and norm of the last of two steps."""
    before = values(model)
    optimizer = make_optimizer(model, Hyperparameters())
    unchanged = values(model)
    assert all(torch.equal(before[name], unchanged[name]) for name in before)
    for _step in range(2):
        loss, (norm, *_) = train_step(
            Training(policy=model, optimizer=optimizer, mesh=mesh), micro_batches
        )
    after = values(model)
    return loss, norm, {name: after[name] - before[name] for name in after}


@cache
def _expected(directory: Path, dtype: torch.dtype, kind: str, data_ranks: int) -> Step:
    everything = [documents(kind, r, m) for r in range(data_ranks) for m in range(MICRO_BATCHES)]
    if kind == "two-steps":
        return reference_training(directory, dtype, everything, steps=2)
    return reference_gradients(directory, dtype, everything)


def build_unit_by_unit(directory: Path, mesh: dist.DeviceMesh) -> dict[str, float]:
    """FSDP1's random model against the unsharded one."""
    config = read_config(str(directory), length_tokens=64, rope="auto")
    plain, model = on_meta(config), on_meta(config)
    Fill(plain, None, device=torch.device("cpu"), seed=7).one_unit(plain)
    fill = Fill(model, None, device=torch.device("cpu"), seed=7)
    layers, held = list(model.layers), []

    def materialise(unit: nn.Module) -> None:
        fill.one_unit(unit)
        storages = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for p in model.parameters()
            if not p.is_meta
        }
        held.append(sum(storages.values()))

    wrapped = shard_flat(
        model, model.layers, mesh=mesh, compute_dtype=torch.float32, materialise=materialise
    )
    whole = values(wrapped)
    expected = {name_in_files(name): p.detach().flatten() for name, p in plain.named_parameters()}
    assert set(whole) == set(expected)
    in_layers = [4 * sum(p.numel() for p in layer.parameters()) for layer in plain.layers]
    everything = 4 * plain.parameter_count
    largest = max(*in_layers, everything - sum(in_layers))
    assert len(held) == len(layers) + 1
    return {
        "random": max(float((whole[name] - expected[name]).abs().max()) for name in expected),
        "held": max(held) / (everything / mesh.size() + largest),
    }


def random_ways() -> list[tuple[Any, ...]]:
    return in_pairs(("tied", "moe", "diffllama"), ("fsdp", "fsdp2"), (False, True), ("full", None))


def random_everywhere(weights: Path, mesh: dist.DeviceMesh) -> dict[str, float]:
    """By strategy and offload, how far random weights are from the unsharded model's."""
    random_weights.CHUNK_NUMBERS = 1000  # several to a parameter, whose rows they cut anywhere
    deviations = {}
    for name, strategy, offload, loss in random_ways():
        config = read_config(str(weights / name), length_tokens=64, rope="auto")
        plain = on_meta(config, loss=loss)
        Fill(plain, None, device=torch.device("cpu"), seed=7).one_unit(plain)
        wanted = {name_in_files(name): p.detach().flatten() for name, p in plain.named_parameters()}
        with TemporaryDirectory() as empty:
            model = built(
                empty,
                mesh,
                torch.float32,
                config=config,
                strategy=strategy,
                offload=offload,
                loss=loss,
                recompute="none",
                seed=7,
            )
        whole = values(model)
        assert set(whole) == set(wanted)
        deviations[f"{name} {strategy} {offload} {loss}"] = max(
            float((whole[n] - wanted[n]).abs().max()) for n in wanted
        )
    return deviations


def made_elsewhere(directory: Path, place: Place) -> dict[str, float]:
    """By strategy and offload, the worst deviation of saved weights that are trained on."""
    ulysses = min(2, dist.get_world_size())
    how = {
        "precision": "float64",
        "loss": "chunked",
        "recompute": "layer",
        "batch": "packed",
        "mlp_tiles": None,
        "head_groups": 1,
    }
    worst = {}
    for strategy, offload in product(("fsdp", "fsdp2"), (False, True)):
        case = Case(model="diffllama", strategy=strategy, offload=offload, ulysses=ulysses, **how)
        found = run(case, directory, place)
        numbers = (found[what] for what in ("loss", "norm", "gradient") if found)
        worst[f"{strategy} {offload}"] = max(numbers, default=0.0)
    return worst


def documents(kind: str, rank: int, micro_batch: int) -> Documents:
    """Documents of odd lengths, equal ones beside each other, a single token among them."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    packed = []
    for length in (7, 7, 1, 13 + rank, 5):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        if kind == "untrained-rank" and rank == 0:
            labels[:] = -100
        packed.append((ids, labels))
    if kind == "untrained-rank" and rank == 0 and micro_batch == 1:
        # A single data-parallel rank has to train on something.
        packed[-1][1][1:] = packed[-1][0][1:]
    return packed
