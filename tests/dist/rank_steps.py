"""What the cases of ranks share."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from engine_models import packed
from highwater.engine.activations.host import HostActivations
from highwater.engine.data.batches import Batch, share_of
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.out_of_memory import stored
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.units import GIB

CPU = torch.device("cpu")
Step = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Loss, norm before clipping, and every gradient or change by the names that files have, flat."""
Place = tuple[dist.DeviceMesh, process_mesh.SequenceGroups | None]
T = TypeVar("T")


class Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A case whose name says all its fields."""

    @property
    def name(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def each(cases: Iterable[C], run: Callable[[C], T]) -> dict[str, T | dict[str, str]]:
    results: dict[str, T | dict[str, str]] = {}
    for case in cases:
        try:
            results[case.name] = run(case)
        except Exception:  # noqa: BLE001 -- one case's failure is its result, and the others go on
            results[case.name] = {"error": traceback.format_exc()}
    return results


def of_all(own: T) -> list[T]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def parts_of_all(own: Iterable[Tensor | None]) -> list[list[Tensor | None]]:
    """What each rank has of the same tensors, flat. As bytes: a tensor that is pickled is a file
    of its own, which takes ten times as long to open.
    """
    flat = [None if t is None else local_shard(t).detach().flatten() for t in own]
    ranks = of_all([None if t is None else (t.dtype, t.view(torch.uint8).numpy()) for t in flat])
    return [
        [None if part is None else torch.from_numpy(part[1]).view(part[0]) for part in of_rank]
        for of_rank in ranks
    ]


def on_host() -> HostActivations:
    """Host memory for a rank's activations, all but the last layer's."""
    return HostActivations(CPU, layers_on_gpu=1, budget_bytes=GIB)


def place_of(layout: Layout) -> Place:
    mesh = process_mesh.shard_mesh(layout, CPU)
    return mesh, process_mesh.sequence_groups(layout, mesh)


class RecordGradients(torch.optim.SGD):
    """An optimizer that keeps what it was given, by name, and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        super().__init__(self._trained.values(), lr=0.0)

    def step(self, closure: None = None) -> None:
        self.gradients = {
            name: None if p.grad is None else p.grad.clone() for name, p in self._trained.items()
        }


def first_step(
    model: Decoder, place: Place, micro_batches: list[Batch], *, copies: int = 1
) -> Step:
    """Loss, norm and every gradient of a step."""
    mesh, shared = place
    optimizer = RecordGradients(model)
    made = Training(policy=model, optimizer=optimizer, mesh=mesh, sequence=shared and shared.every)
    loss, (norm, *_) = train_step(made, micro_batches)
    return loss, norm, whole(optimizer.gradients, copies=copies)


Lengths = tuple[tuple[int, ...], ...]


def documents(lengths: tuple[int, ...], data_rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * data_rank + sum(lengths))
    return [torch.randint(1, 97, (length,), generator=generator) for length in lengths]


def micro_batches(
    lengths: Lengths, layout: Layout, shared: process_mesh.SequenceGroups | None
) -> list[Batch]:
    """This rank's, every token of which is trained."""
    data_rank = dist.get_rank() // layout.context_degree
    return [share_of(packed(*documents(of, data_rank)), shared) for of in lengths]


def plain_step(
    model: nn.Module,
    lengths: Lengths,
    data_ranks: int,
    *,
    before: Callable[[], object] = lambda: None,
) -> Step:
    """The mean loss over all ranks' documents, each alone; norm; clipped gradients."""
    texts = [ids for rank in range(data_ranks) for of in lengths for ids in documents(of, rank)]
    trained = sum(len(ids) - 1 for ids in texts)
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for ids in texts:
        before()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = loss + nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / trained
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), Hyperparameters().max_grad_norm)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), norm, found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters()})


def load_by_torch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    *,
    strict: bool = True,
    without: str = "",
) -> None:
    """Load weights and moments as torch.distributed.checkpoint's alone, which is not of this
    project; where it is not ``strict``, what is frozen stays, as does the weight that ``without``
    names.
    """
    options = state_dict.StateDictOptions(ignore_frozen_params=not strict, strict=strict)
    weights = state_dict.get_model_state_dict(model, options=options)
    weights.pop(without, None)
    state: dict[str, Any] = {
        "model": weights,
        "optimizer": state_dict.get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=directory, no_dist=dist.get_world_size() == 1)
    of_model = state_dict.StateDictOptions(strict=strict and not without)
    state_dict.set_model_state_dict(model, state["model"], options=of_model)
    state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def states(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: dist.DeviceMesh
) -> dict[str, Tensor]:
    """What is trained, its moments and the step that all ranks are at, whole, in plain numbers."""
    copies = process_mesh.copies(mesh)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = whole({name: p.detach() for name, p in trained.items()}, copies=copies)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        of_key = {name: _plain(optimizer.state.get(p, {}).get(key)) for name, p in trained.items()}
        for name, each in whole(of_key, copies=copies).items():
            found[f"{name} {key}"] = each.unique() if key == "step" else each
    return found


def write_states(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, mesh: Any) -> None:
    found = states(model, optimizer, mesh)
    if dist.get_rank() == 0:
        save_file(found, path)


def _plain(moment: Any) -> Tensor | None:
    """This rank's part of a moment, as numbers where it is kept in few bits."""
    own = None if moment is None else local_shard(moment)
    return own.dequantize() if is_traceable_wrapper_subclass(own) else own


def same_states(one: Training, other: Training, *, models: int | None = None) -> bool:
    """Whether what is trained, moments and steps are the same, bit by bit, in the same dtypes; of
    the first ``models``.
    """
    for (model, optimizer), (other_model, others) in list(
        zip(one.trained, other.trained, strict=True)
    )[:models]:
        for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
            own, their = optimizer.state.get(mine, {}), others.state.get(theirs, {})
            pairs = [(mine.detach(), theirs.detach())] if mine.requires_grad else []
            for a, b in [*pairs, *((own[key], their[key]) for key in own)]:
                parts = zip(stored(a), stored(b), strict=True)
                if not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in parts):
                    return False
    return True


def state_bytes(training: Training) -> int:
    """Bytes of this rank's parameters, gradients and moments, each storage once."""
    tensors = [
        each
        for model, optimizer in training.trained
        for parameter in model.parameters()
        for each in (
            parameter,
            *([] if parameter.grad is None else [parameter.grad]),
            *(state for key, state in optimizer.state.get(parameter, {}).items() if key != "step"),
        )
    ]
    storages = {
        own.untyped_storage().data_ptr(): own.untyped_storage().nbytes()
        for tensor in tensors
        for own in stored(tensor)
    }
    return sum(storages.values())


def values(model: nn.Module, *, copies: int = 1) -> dict[str, Tensor]:
    return whole({name: p.detach() for name, p in model.named_parameters()}, copies=copies)


def whole(tensors: dict[str, Tensor | None], *, copies: int = 1) -> dict[str, Tensor]:
    """By the names that files have, flat, put together from all ranks of the first copy."""
    ranks = parts_of_all(tensors.values())
    parts = zip(*ranks[: len(ranks) // copies], strict=True)
    return {
        name_in_files(name): torch.cat(there)
        for name, of_ranks in zip(tensors, parts, strict=True)
        if (there := [part for part in of_ranks if part is not None])
    }


def deviations(found: Step, expected: Callable[[], Step]) -> dict[str, float | str]:
    """Norm-relative: of the loss, the norm, and the worst parameter's gradient or change."""
    if dist.get_rank():
        return {}
    (loss, norm, ours), (their_loss, their_norm, theirs) = found, expected()
    assert set(ours) == set(theirs), f"without a partner: {sorted(set(ours) ^ set(theirs))}"
    off = {
        name: float((ours[name].view_as(wanted) - wanted).norm() / wanted.norm())
        for name, wanted in theirs.items()
    }
    worst = max(off, key=off.__getitem__)
    return {
        "loss": abs(float(loss) / float(their_loss) - 1),
        "norm": abs(float(norm) / float(their_norm) - 1),
        "gradient": off[worst],
        "worst": worst,
    }
