"""Machine readings: memory that libraries take at first use, in the allocator and outside.

``python -m highwater.engine.training.machine_readings FILE`` runs on as many ranks as there are
GPUs; rank 0 writes the largest readings. Each stage uses one library and leaves no tensor behind;
the rise in used memory belongs to that stage.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from highwater.engine.attention.dense import attend, select_kernel
from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.kernels import rows as row_kernels
from highwater.engine.parallel import fsdp2
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.memory_profiler import outside_allocator_bytes
from highwater.nouns.hardware import Constants, Reading
from highwater.nouns.layout import Layout

WIDTH = 1024
TOKENS = 2048


def main() -> None:
    """Take the readings of all stages; rank 0 writes them to the file of the first argument."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    stages = Stages(device)
    stages.take("context", lambda: torch.zeros(1, device=device))
    for name, stage in _OF_ONE_GPU.items():
        stages.take(name, lambda stage=stage: stage(device))
    gpus = int(os.environ["WORLD_SIZE"])
    if gpus > 1:
        stages.take("NCCL group", lambda: process_mesh.join(device))
        _of_several(stages, gpus, device)
    else:
        process_mesh.join(device)
    stages.take("FSDP2", lambda: _sharded_step(process_mesh.shard_mesh(Layout(gpus=gpus), device)))
    readings = stages.fullest() if gpus > 1 else tuple(stages.readings)
    if dist.get_rank() == 0:
        found = Constants(
            device_name=torch.cuda.get_device_name(),
            gpus=gpus,
            versions=process_mesh.versions(),
            readings=readings,
        )
        Path(sys.argv[1]).write_bytes(msgspec.json.encode(found))
    process_mesh.leave()


class Stages:
    """Measures what libraries take when they are first used, one stage after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[Reading] = []
        self._outside = 0
        self._allocated = 0

    def take(self, name: str, use: Callable[[], object]) -> None:
        """Call ``use``, drop its result, and record how much memory use has risen by, in bytes."""
        use()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        outside = outside_allocator_bytes(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        more = (outside - self._outside, allocated - self._allocated)
        self.readings.append(Reading(name=name, outside_bytes=more[0], allocator_bytes=more[1]))
        self._outside, self._allocated = outside, allocated

    def fullest(self) -> tuple[Reading, ...]:
        """Return every reading, each figure the maximum over ranks."""
        numbers = [[reading.outside_bytes, reading.allocator_bytes] for reading in self.readings]
        largest = torch.tensor(numbers, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return tuple(
            Reading(name=reading.name, outside_bytes=a, allocator_bytes=b)
            for reading, (a, b) in zip(self.readings, largest.tolist(), strict=True)
        )


def _matrix(device: torch.device) -> torch.Tensor:
    return torch.ones(WIDTH, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)


def _products(device: torch.device) -> None:
    with torch.no_grad():
        torch.mm(_matrix(device), _matrix(device))


def _products_backward(device: torch.device) -> None:
    a = _matrix(device)
    (a @ a).sum().backward()


def _products_with_bias(device: torch.device) -> None:
    a = _matrix(device)
    F.linear(a, a, a[0]).sum().backward()


def _products_in_float32(device: torch.device) -> None:
    a = _matrix(device).detach().float()
    torch.mm(a, a)


def _attention(device: torch.device) -> None:
    heads, size, dtype = 16, 128, torch.bfloat16
    kernel = select_kernel(device, dtype, query_heads=heads, kv_heads=heads, head_dim=size)
    q = torch.ones(1, heads, TOKENS, size, device=device, dtype=dtype, requires_grad=True)
    attend(q, q, q, document_lengths=[TOKENS], scaling=1.0, kernel=kernel).sum().backward()


def _fused_kernels(device: torch.device) -> None:
    gate, up, gradient = (_matrix(device).detach() for _ in range(3))
    gate_kernels.product_(gate, up)
    gate_kernels.backward_(gate, up, gradient)
    labels = torch.zeros(WIDTH, device=device, dtype=torch.long)
    ones = torch.ones(WIDTH, device=device)
    row_kernels.backward_(gate, labels, row_kernels.statistics(gate, labels), ones, ones)


def _sharded_step(mesh: dist.device_mesh.DeviceMesh) -> None:
    with torch.device(mesh.device_type):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fsdp2.shard(model, list(model), mesh=mesh, compute_dtype=torch.bfloat16)
    model(torch.ones(8, WIDTH, device=mesh.device_type, dtype=torch.bfloat16)).sum().backward()
    model.zero_grad(set_to_none=True)


def _of_several(stages: Stages, gpus: int, device: torch.device) -> None:
    """Take NCCL's readings: the group of all ranks, then a second group of the same ranks."""
    world = dist.group.WORLD
    assert world is not None, "joined above"
    part, full = torch.ones(1, device=device), torch.ones(gpus, device=device)

    def all_to_all(group: dist.ProcessGroup) -> None:
        dist.all_to_all_single(torch.empty_like(full), full, group=group)

    stages.take("NCCL collectives", lambda: process_mesh.gather_and_reduce(full, part, world))
    stages.take("NCCL all-to-all", lambda: all_to_all(world))
    second = dist.new_group(list(range(gpus)), device_id=device)
    assert isinstance(second, dist.ProcessGroup), "every rank is in it"
    stages.take("second NCCL group", lambda: process_mesh.gather_and_reduce(full, part, second))
    stages.take("its all-to-all", lambda: all_to_all(second))


_OF_ONE_GPU: dict[str, Callable[[torch.device], object]] = {
    "cuBLAS": _products,
    "cuBLAS, backward": _products_backward,
    "cuBLASLt": _products_with_bias,
    "cuBLAS, float32": _products_in_float32,
    "attention": _attention,
    "fused kernels": _fused_kernels,
}


if __name__ == "__main__":
    main()
