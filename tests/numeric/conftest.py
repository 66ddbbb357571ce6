"""A process that is all of a group, and its mesh."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import DeviceMesh

from highwater.engine.parallel import mesh as process_mesh
from highwater.nouns.layout import Layout

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with process_mesh.alone(CPU):
        yield


@pytest.fixture(scope="module")
def mesh(alone: None) -> DeviceMesh:
    return process_mesh.shard_mesh(Layout(), CPU)
