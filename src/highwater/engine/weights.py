"""Weights from safetensors, each rank reading its own rows and nothing else."""

import json
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from highwater.errors import ModelError

Rows = Callable[[str, int, int], Tensor]
"""Reads rows ``start:stop`` of a named tensor."""

_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def load(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    directory: str,
    *,
    optional: AbstractSet[str] = frozenset(),
) -> AbstractSet[str]:
    """Fill the shards, and the buffers that were saved, from the safetensors in ``directory``; names of the parameters filled.

    None where there are no files. Raises ModelError for parameters that the files lack, unless they are ``optional``, and for
    shapes that differ from the config's.
    """
    files = _files(Path(directory))
    if not files:
        return frozenset()
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(file, framework="pt"))
            where |= dict.fromkeys(handle.keys(), handle)

        def rows(name: str, start: int, stop: int) -> Tensor:
            return where[name].get_slice(name)[start:stop]

        wanted = {name: p for name, p in parameters.items() if name in where or name not in optional}
        for name, parameter in wanted.items():
            start, stop = _own_rows(parameter)
            if start < stop:
                _copy(parameter, _read(name, start, stop, rows, where, directory), name, directory)
        for name, buffer in buffers.items():
            if name in where:
                buffer.copy_(where[name].get_tensor(name))
    return wanted.keys()


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return [directory / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(directory.glob("*.safetensors"))


def _own_rows(parameter: nn.Parameter) -> tuple[int, int]:
    """Rows of the whole parameter that this rank's shard holds: FSDP2 shards dimension 0 in chunks of equal size."""
    total = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return 0, total
    chunk = -(-total // parameter.device_mesh.size())
    start = min(parameter.device_mesh.get_local_rank() * chunk, total)
    return start, min(start + chunk, total)


def _read(name: str, start: int, stop: int, rows: Rows, where: Mapping[str, Any], directory: str) -> Tensor:
    if name in where:
        return rows(name, start, stop)
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is None:
        raise ModelError(f"the weights in {directory} lack {name}", hint="use weights that belong to the config beside them")
    # One row of a fused expert parameter is one expert, whose matrices the files keep apart.
    parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    experts: list[Tensor] = []
    for expert in range(start, stop):
        names = [f"{fused[1]}.{expert}.{part}.weight" for part in parts]
        missing = [n for n in names if n not in where]
        if missing:
            raise ModelError(f"the weights in {directory} lack {missing[0]}", hint="use weights that belong to the config")
        experts.append(torch.cat([where[n].get_tensor(n) for n in names]))
    return torch.stack(experts)


def _copy(parameter: nn.Parameter, rows: Tensor, name: str, directory: str) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape != rows.shape:
        raise ModelError(
            f"{name} in {directory} has rows of shape {tuple(rows.shape)}, the config asks for {tuple(local.shape)}",
            hint="use weights that belong to the config beside them",
        )
    local.detach().copy_(rows)
