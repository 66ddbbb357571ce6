"""One process of a group: every case of sharded training against the unsharded reference. Started by torchrun.

``torchrun --nproc-per-node N cases.py WEIGHTS RESULT``: writes, as rank 0, one JSON object {case name: deviations}.
"""

import json
import sys
import traceback
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from reference import Documents, reference_gradients, reference_training
from torch import Tensor
from torch.distributed.tensor import DTensor

from highwater.attention.dense import register
from highwater.engine.data import Batch, Document, pack, shard
from highwater.engine.model import LanguageModel, build, read_config
from highwater.engine.recompute import PREFIX
from highwater.engine.step import Trainer, make_optimizer, train_step
from highwater.parallel import mesh as process_mesh
from highwater.spec.layout import Layout

MICRO_BATCHES = 2
VOCABULARY = 97


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train the same thing."""

    model: str
    dtype: str
    loss: str
    recompute: str
    batch: str
    ulysses: int = 1
    compute: str | None = None
    """The dtype of the compute copies; None: the master's."""

    @property
    def name(self) -> str:
        sharded = f" ulysses={self.ulysses}" if self.ulysses > 1 else ""
        sharded += f" computed in {self.compute}" if self.compute else ""
        return f"{self.model} {self.dtype} {self.loss} recompute={self.recompute} {self.batch}{sharded}"


CASES = [
    Case(model=model, dtype=dtype, loss=loss, recompute=recompute, batch=batch)
    for (model, dtype), (loss, recompute), batch in product(
        product(("dense", "tied", "moe"), ("float64", "float32")),
        (("full", "layer"), ("chunked", "none"), ("chunked", "layer")),
        ("packed", "untrained-rank"),
    )
] + [Case(model=model, dtype="float64", loss="full", recompute="layer", batch="three-steps") for model in ("dense", "tied", "moe")]
CASES += [
    Case(model=model, dtype=dtype, loss=loss, recompute="layer", batch=batch, ulysses=ulysses)
    for (model, dtype), (loss, batch), ulysses in product(
        (("dense", "float64"), ("dense", "float32"), ("tied", "float64"), ("moe", "float64")),
        (("full", "packed"), ("chunked", "untrained-rank")),
        (2, 4),
    )
]
CASES.append(Case(model="dense", dtype="float32", loss="chunked", recompute="layer", batch="packed", compute="bfloat16"))


def cases_for(processes: int) -> list[Case]:
    """The cases that this many processes can run."""
    return [case for case in CASES if processes % case.ulysses == 0]


class RecordGradients(torch.optim.SGD):
    """An optimizer that keeps what it was given."""

    def step(self, closure: None = None) -> None:
        self.gradients: list[Tensor] = [p.grad.clone() for group in self.param_groups for p in group["params"]]


def main() -> None:
    weights, result = Path(sys.argv[1]), Path(sys.argv[2])
    device = torch.device("cpu")
    torch.set_num_threads(1)
    process_mesh.join(device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = process_mesh.shard_mesh(Layout(gpus=world), device)
    results = {}
    for case in cases_for(world):
        try:
            results[case.name] = run(case, weights / case.model, mesh, rank, world)
        except Exception:  # noqa: BLE001 -- one case's failure is its result, and the others go on
            results[case.name] = {"error": traceback.format_exc()}
    if rank == 0:
        result.write_text(json.dumps(results))
    process_mesh.leave()


def run(case: Case, directory: Path, mesh: torch.distributed.DeviceMesh, rank: int, world: int) -> dict[str, float | str]:
    """Norm-relative deviations of one case: loss, gradient norm, and the worst parameter's gradient."""
    dtype = getattr(torch, case.dtype)
    batches = [[documents(case.batch, r, m) for m in range(MICRO_BATCHES)] for r in range(world // case.ulysses)]
    layout = Layout(gpus=world, ulysses_degree=case.ulysses)
    own = [
        shard(pack([Document(*pair) for pair in b]), degree=case.ulysses, rank=rank % case.ulysses)
        for b in batches[rank // case.ulysses]
    ]
    model = build(
        read_config(str(directory), length_tokens=64, rope="auto"),
        directory=str(directory),
        mesh=mesh,
        attention=register("flash", group=process_mesh.sequence_group(layout, mesh)),
        loss=case.loss,
        recompute=case.recompute,
        compute_dtype=getattr(torch, case.compute or case.dtype),
        master_dtype=dtype,
    )
    if case.batch == "three-steps":
        return _three_steps(model, directory, own, batches, mesh)
    optimizer = RecordGradients(model.parameters(), lr=0.0)
    loss, norm = train_step(Trainer(policy=model, optimizer=optimizer, mesh=mesh), own)
    assert {g.dtype for g in optimizer.gradients} == {dtype}, "gradients are reduced and kept in the master's dtype"
    gradients = _by_name(model, optimizer.gradients)
    reference_loss, reference_norm, expected = reference_gradients(
        directory, dtype, [documents for of_rank in batches for documents in of_rank]
    )
    missing = set(expected) ^ set(gradients)
    assert not missing, f"parameters without a partner: {missing}"
    deviations = {name: float((gradients[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    worst = max(deviations, key=deviations.__getitem__)
    return {
        "loss": abs(float(loss) / float(reference_loss) - 1),
        "norm": abs(float(norm) / float(reference_norm) - 1),
        "gradient": deviations[worst],
        "worst": worst,
    }


def _three_steps(
    model: LanguageModel,
    directory: Path,
    micro_batches: list[Batch],
    batches: list[list[Documents]],
    mesh: torch.distributed.DeviceMesh,
) -> dict[str, float | str]:
    """Deviation of what three optimizer steps changed, the states allocated before the first as in a trial."""
    before = _by_name(model, [p.detach().clone() for p in model.parameters()])
    optimizer = make_optimizer(model)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), _by_name(model, list(model.parameters())).values(), strict=True))
    for _ in range(3):
        loss, norm = train_step(Trainer(policy=model, optimizer=optimizer, mesh=mesh), micro_batches)
    after = _by_name(model, [p.detach() for p in model.parameters()])
    everything = [documents for of_rank in batches for documents in of_rank]
    reference_loss, reference_norm, expected = reference_training(directory, torch.float64, everything, steps=3)
    changes = {name: float((after[name] - before[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    worst = max(changes, key=changes.__getitem__)
    return {
        "loss": abs(float(loss) / float(reference_loss) - 1),
        "norm": abs(float(norm) / float(reference_norm) - 1),
        "gradient": changes[worst],
        "worst": worst,
    }


def documents(kind: str, rank: int, micro_batch: int) -> Documents:
    """Documents of odd lengths, equal ones beside each other, a single token among them; prompts are not trained on."""
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


def _by_name(model: LanguageModel, gradients: list[Tensor]) -> dict[str, Tensor]:
    names = [name.replace(PREFIX, "").removeprefix("causal_lm.") for name, _ in model.named_parameters()]
    full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return dict(zip(names, full, strict=True))


if __name__ == "__main__":
    main()
