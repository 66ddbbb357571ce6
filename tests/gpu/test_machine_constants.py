"""What ``highwater doctor --measure`` reads on a GPU: plausible sizes."""

import json
import subprocess
import sys

import pytest

from highwater.trials.measurements import read_constants
from highwater.trials.probe import probe
from highwater.units import GIB, MIB


def test_one_gpu_has_a_context_and_a_workspace_and_no_nccl():
    found = read_constants(1)
    names = [reading.name for reading in found.readings]
    assert names[:2] == ["context", "cuBLAS"]
    assert not any("NCCL" in name for name in names)
    assert 256 * MIB < found.outside_bytes("context") < 2 * GIB
    assert all(reading.outside_bytes >= 0 for reading in found.readings)
    workspaces = [reading.allocator_bytes for reading in found.readings if "cuBLAS" in reading.name]
    assert sum(workspaces) in range(8 * MIB, 129 * MIB)


def test_two_gpus_have_communicators_whose_all_to_all_costs_more():
    if len(probe().gpus) < 2:
        pytest.skip("needs 2 GPUs")
    found = read_constants(2)
    assert found.outside_bytes("NCCL group", "NCCL collectives") > 256 * MIB
    assert found.outside_bytes("NCCL all-to-all") > 64 * MIB


def test_the_command_prints_a_document():
    command = [sys.executable, "-m", "highwater.cli.app", "doctor", "--measure", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["constants"][0]["gpus"] == 1
