"""Weights from safetensors, each rank reading its own rows and nothing else."""

import json
import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from highwater.errors import ModelError
from highwater.parallel.fsdp import local_shard, own_rows

_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


class SavedWeights:
    """The safetensors of a directory, open: tensors by name, read from disk as they are asked for."""

    def __init__(self, directory: str, where: Mapping[str, Any]) -> None:
        """``where`` has the open file of every tensor."""
        self.directory = directory
        self._where = where

    def has(self, name: str) -> bool:
        """Whether a tensor of this name was saved."""
        return name in self._where

    def fill(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        """Fill this rank's shards of the parameters, whole where they are not sharded, and the buffers that were saved.

        Raises ModelError for parameters that the files lack, and for shapes that differ from the config's.
        """
        for name, parameter in parameters.items():
            start, stop = own_rows(parameter)
            if start < stop:
                _copy(parameter, self._read(name, start, stop), name, self.directory)
        for name, buffer in buffers.items():
            if name in self._where:
                buffer.copy_(self._where[name].get_tensor(name))

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._where:
            return self._where[name].get_slice(name)[start:stop]
        fused = _FUSED_EXPERTS.fullmatch(name)
        if fused is None:
            raise self._lack(name)
        # One row of a fused expert parameter is one expert, whose matrices the files keep apart.
        parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
        experts: list[Tensor] = []
        for expert in range(start, stop):
            names = [f"{fused[1]}.{expert}.{part}.weight" for part in parts]
            missing = [n for n in names if n not in self._where]
            if missing:
                raise self._lack(missing[0])
            experts.append(torch.cat([self._where[n].get_tensor(n) for n in names]))
        return torch.stack(experts)

    def _lack(self, name: str) -> ModelError:
        return ModelError(f"the weights in {self.directory} lack {name}", hint="use weights that belong to the config beside them")


@contextmanager
def opened(directory: str) -> Generator[SavedWeights | None, None, None]:
    """The safetensors in a directory; None when there are none."""
    files = _files(Path(directory))
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(file, framework="pt"))
            where |= dict.fromkeys(handle.keys(), handle)
        yield SavedWeights(directory, where) if files else None


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return [directory / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(directory.glob("*.safetensors"))


def _copy(parameter: nn.Parameter, rows: Tensor, name: str, directory: str) -> None:
    local = local_shard(parameter)
    if local.shape != rows.shape:
        raise ModelError(
            f"{name} in {directory} has rows of shape {tuple(rows.shape)}, the config asks for {tuple(local.shape)}",
            hint="use weights that belong to the config beside them",
        )
    local.detach().copy_(rows)
