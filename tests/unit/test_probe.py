"""The probe: which GPUs a trial will see, and which of them cannot or should not be used."""

import os
import subprocess
import sys

import msgspec
import pytest
from places import H200, machine_with

from highwater.errors import MachineError
from highwater.launch.probe import busy_gpus, probe, refuse_busy_gpus, refuse_unfit_gpu, visible_indices
from highwater.units import GIB

UUIDS = ("GPU-aaa1", "GPU-aab2", "GPU-ccc3")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("1", (1,)),
        ("2,0", (2, 0)),
        ("0,9,1", (0,)),  # CUDA stops at the first that names none
        ("-1", ()),
        ("GPU-ccc", (2,)),
        ("GPU-aa", ()),  # two begin so: it names none
        ("GPU-aab2, 0", (1, 0)),
    ],
)
def test_the_gpus_seen_are_those_that_cuda_would_show(visible: str | None, seen: tuple[int, ...]) -> None:
    assert visible_indices(UUIDS, visible) == seen


def test_this_machine_can_be_probed_and_knows_its_versions() -> None:
    machine = probe()
    assert machine.cpu_cores >= 1
    assert 0 < machine.host_memory_available_bytes <= machine.host_memory_total_bytes
    assert machine.versions["python"] == sys.version.split()[0]
    assert "highwater" in machine.versions


def test_with_every_gpu_hidden_none_is_seen() -> None:
    code = "from highwater.launch.probe import probe; print(len(probe().gpus))"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout == "0\n"


def test_what_a_driver_keeps_on_an_empty_card_does_not_make_it_busy() -> None:
    assert busy_gpus(machine_with(2).gpus) == ()


def test_a_gpu_in_use_is_reported_with_bytes_and_processes_and_a_free_one_is_offered() -> None:
    machine = machine_with(3)
    used = msgspec.structs.replace(H200, memory_used_bytes=20 * GIB, processes=(4711,))
    machine = msgspec.structs.replace(machine, gpus=(used, *machine.gpus[1:]))
    with pytest.raises(MachineError, match=r"GPU 0 is in use: 20.00 GiB by process 4711") as refusal:
        refuse_busy_gpus(machine, count=2)
    assert "`CUDA_VISIBLE_DEVICES=1,2`" in refusal.value.hint
    assert "--allow-busy" in refusal.value.hint
    refuse_busy_gpus(msgspec.structs.replace(machine, gpus=machine.gpus[1:]), count=2)


def test_when_no_gpu_is_free_the_hint_is_to_wait() -> None:
    with pytest.raises(MachineError) as refusal:
        refuse_busy_gpus(machine_with(1, processes=(1,)), count=1)
    assert "wait" in refusal.value.hint


@pytest.mark.parametrize(("name", "capability"), [("Tesla V100-SXM2-32GB", (7, 0)), ("Tesla T4", (7, 5))])
def test_a_gpu_without_bf16_and_flash_is_refused_by_name(name: str, capability: tuple[int, int]) -> None:
    with pytest.raises(MachineError, match=name):
        refuse_unfit_gpu(msgspec.structs.replace(H200, name=name, compute_capability=capability))


def test_a_modern_gpu_is_not_refused_even_if_nobody_knows_its_name() -> None:
    refuse_unfit_gpu(msgspec.structs.replace(H200, name="NVIDIA X1000"))
