"""A process that is all of a group, and its mesh; the trials of a module, and their traces."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import DeviceMesh
from traces import Traces, trial

from highwater.engine.parallel import mesh as process_mesh
from highwater.nouns.layout import Layout
from highwater.nouns.trial import TrialSpec

CPU = torch.device("cpu")
torch.set_num_threads(1)  # products this small are slower on several, and others use the cores


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with process_mesh.alone(CPU):
        yield


@pytest.fixture(scope="module")
def mesh(alone: None) -> DeviceMesh:
    return process_mesh.shard_mesh(Layout(), CPU)


@pytest.fixture(scope="module")
def specs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TrialSpec]:
    """A module's ``TRIALS``, each its ``USUAL`` but for what it says."""
    root, module = tmp_path_factory.mktemp("trials"), request.module
    return {
        name: trial(root / name, **{**module.USUAL, **own}) for name, own in module.TRIALS.items()
    }


@pytest.fixture(scope="module")
def logs(specs: dict[str, TrialSpec], tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return Traces(specs, tmp_path_factory.mktemp("traces"))
