"""The probe: which GPUs a trial will see, and which of them cannot or should not be used."""

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import psutil
import pynvml
import pytest

from highwater.cli.doctor import diagnose
from highwater.errors import MachineError
from highwater.nouns.cluster import cluster
from highwater.nouns.corpus import CorpusOrder
from highwater.nouns.hardware import CPU_SEARCH, Machine, kind_of, unfit_gpu
from highwater.trials import inputs
from highwater.trials.probe import (
    _NEEDED,
    OLDEST,
    busy_gpus,
    package_obstacles,
    probe,
    read_gpus,
    refuse_busy_gpus,
    refuse_unreadable_gpus,
    torch_without_gpu,
    visible_indices,
)
from highwater.units import GIB
from places import H200, NO_GPU, ROOT, machine_with
from tables import table

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
def test_the_gpus_seen_are_those_that_cuda_would_show(visible, seen):
    assert visible_indices(UUIDS, visible) == seen


def test_this_machine_is_probed_bounded_by_its_group_and_without_hidden_gpus():
    machine = probe()
    assert machine.cpu_cores >= 1
    assert 0 < machine.host_memory_available_bytes <= machine.host_memory_total_bytes
    assert machine.versions["python"] == sys.version.split()[0]
    assert "highwater" in machine.versions
    machine = msgspec.structs.replace(machine_with(1), host_memory_total_bytes=64 * GIB)
    for limit, meant in ((16 * GIB, 16), (None, 64), (256 * GIB, 64)):
        bounded = msgspec.structs.replace(machine, control_group_bytes=limit)
        assert cluster(None, gpu_memory_bytes=None, machine=bounded).host_bytes == meant * GIB
    code = "from highwater.trials.probe import probe; print(len(probe().gpus))"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.check_output([sys.executable, "-c", code], env=hidden) == b"0\n"


def test_a_gpu_in_use_is_reported_with_bytes_and_processes_and_a_free_one_is_offered():
    """Not for what a driver keeps on an empty card; where none is free, it is to wait."""
    first, *others = machine_with(3).gpus
    assert busy_gpus((first, *others)) == ()
    used = msgspec.structs.replace(H200, memory_used_bytes=20 * GIB, processes=(4711,))
    machine = msgspec.structs.replace(machine_with(3), gpus=(used, *others))
    with pytest.raises(MachineError, match=r"GPU 0 .* 20\.00 GiB .* 4711") as refusal:
        refuse_busy_gpus(machine, count=2)
    assert "`CUDA_VISIBLE_DEVICES=1,2`" in refusal.value.hint
    assert "--allow-busy" in refusal.value.hint
    refuse_busy_gpus(msgspec.structs.replace(machine, gpus=tuple(others)), count=2)
    with pytest.raises(MachineError) as refusal:
        refuse_busy_gpus(machine_with(1, processes=(1,)), count=1)
    assert "wait" in refusal.value.hint


def test_ranks_that_end_since_their_launcher_was_killed_are_waited_for():
    words = [sys.executable, "-c", "import time; time.sleep(1)", "highwater.engine.training.worker"]
    with subprocess.Popen(words) as rank:
        while words[-1] not in psutil.Process(rank.pid).cmdline():
            time.sleep(0.01)  # it has none for a moment
        refuse_busy_gpus(machine_with(1, processes=(rank.pid,)), count=1)
        assert rank.poll() is not None


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *(("Tesla V100-SXM2-32GB", (7, 0)), ("Tesla T4", (7, 5))),
        *((f"NVIDIA GeForce GTX 1080{ti}", (6, 1)) for ti in ("", " Ti")),
    ],
)
def test_a_gpu_without_bf16_and_flash_is_refused_by_name(name, capability):
    assert name in str(unfit_gpu(name, capability))
    assert unfit_gpu("NVIDIA X1000", (9, 0)) is None  # a modern one whose name nobody knows


@pytest.mark.parametrize(
    ("driver_name", "kind"), table("probe", "a_gpu_is_of_the_kind_that_says_the_most")
)
def test_a_gpu_is_of_the_kind_that_says_the_most_of_its_name(driver_name, kind):
    found = kind_of(driver_name)
    assert (found.name if found else None) == kind


class Nvml:
    """NVIDIA's library as ``pynvml`` wraps it, with four GPUs, some of which fail at a call."""

    NVMLError = pynvml.NVMLError
    ANSWERS: ClassVar[dict[str, Callable[[int], object]]] = {
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
        "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=80 * GIB, used=0),
        "nvmlDeviceGetComputeRunningProcesses": lambda index: [],
        "nvmlDeviceGetCudaComputeCapability": lambda index: (9, 0),
        "nvmlDeviceGetName": lambda index: "NVIDIA H200",
    }
    OF_THE_MACHINE: ClassVar = {"nvmlDeviceGetCount": 4, "nvmlSystemGetDriverVersion": "580"}

    def __init__(self, **failing: dict[int, int]) -> None:
        """``nvmlDeviceGetMemoryInfo={2: code}``: that call fails for GPU 2."""
        self.failing = failing

    def __getattr__(self, call: str) -> Callable[..., object]:
        def answer(index: int | None = None) -> object:
            if index is None:
                return self.OF_THE_MACHINE.get(call)
            if index in self.failing.get(call, {}):
                raise pynvml.NVMLError(self.failing[call][index])
            return self.ANSWERS[call](index)

        return answer


def machine_read_from(nvml: Nvml, visible: str | None = None) -> Machine:
    names = ("gpus", "unreadable_gpus", "driver_version")
    found = dict(zip(names, read_gpus(nvml, visible), strict=True))
    return msgspec.structs.replace(NO_GPU, **found)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (Nvml(nvmlDeviceGetHandleByIndex={1: pynvml.NVML_ERROR_GPU_IS_LOST}), "GPU is lost"),
        (Nvml(nvmlDeviceGetMemoryInfo={1: pynvml.NVML_ERROR_NOT_SUPPORTED}), "Not Supported"),
        (Nvml(nvmlDeviceGetName={1: pynvml.NVML_ERROR_UNKNOWN}), "Unknown Error"),
    ],
)
def test_a_gpu_that_cannot_be_read_hides_no_other_and_is_refused_where_used(nvml, reason):
    machine = machine_read_from(nvml)
    assert [gpu.index for gpu in machine.gpus] == [0, 2, 3]
    refuse_unreadable_gpus(machine, count=1)
    with pytest.raises(MachineError, match=f"GPU 1 cannot be read: {reason}") as refusal:
        refuse_unreadable_gpus(machine, count=2)
    assert "`CUDA_VISIBLE_DEVICES=0,2,3`" in refusal.value.hint
    refuse_unreadable_gpus(machine_read_from(nvml, "0,2,3"), count=3)
    findings = {finding.problem: finding for finding in diagnose(machine).findings}
    assert "CUDA_VISIBLE_DEVICES=0,2,3" in findings[f"GPU 1 cannot be read: {reason}"].hint


def test_where_no_gpu_can_be_read_the_cpu_is_offered_and_untold_processes_are_none():
    lost = Nvml(nvmlDeviceGetMemoryInfo={0: pynvml.NVML_ERROR_NOT_SUPPORTED})
    machine = machine_read_from(lost, "0")
    with pytest.raises(MachineError, match=r"GPU 0 .*: Not Supported") as refusal:
        refuse_unreadable_gpus(machine, count=1)
    assert CPU_SEARCH in refusal.value.hint
    assert not any("no GPU is visible" in finding.problem for finding in diagnose(machine).findings)
    silent = Nvml(nvmlDeviceGetComputeRunningProcesses={0: pynvml.NVML_ERROR_NO_PERMISSION})
    machine = machine_read_from(silent)
    assert (len(machine.gpus), machine.unreadable_gpus) == (4, ())


@pytest.mark.parametrize(
    ("torch", "transformers", "obstacles"),
    table("probe", "versions_that_cannot_run_a_trial_are_named"),
)
def test_versions_that_cannot_run_a_trial_are_named(torch, transformers, obstacles):
    versions = {"torch": torch, "transformers": transformers}
    known = {name: text for name, text in versions.items() if text}
    machine = msgspec.structs.replace(NO_GPU, versions=known)
    assert list(package_obstacles(machine)) == obstacles
    findings = diagnose(machine).findings
    assert [each.problem for each in findings if each.stops_every_trial] == obstacles


def test_without_the_packages_data_is_refused_before_a_process_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(inputs, "probe", lambda: msgspec.structs.replace(NO_GPU, versions={}))
    order = CorpusOrder(data=("/data.jsonl",), objective="sft", length_tokens=64, vocab_size=256)
    with pytest.raises(MachineError, match="tokenised here: torch is not installed") as refused:
        inputs.tokenised(order, parent=tmp_path / "corpora")
    assert "pip install '.[train]'" in str(refused.value.hint)
    assert not list(tmp_path.iterdir())


def test_the_versions_that_work_are_those_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {each for extra in project["optional-dependencies"].values() for each in extra}
    needed = {**_NEEDED, **{name: (first, None) for name, first in OLDEST.items()}}
    for package, (first, end) in needed.items():
        words = f"{package}>={'.'.join(map(str, first))}"
        assert any(each.startswith(words) for each in asked), words
        assert end is None or f"{words},<{'.'.join(map(str, end))}" in asked


@pytest.mark.parametrize(
    ("installed", "problem"), table("probe", "a_torch_that_cannot_use_the_gpus_is_refused")
)
def test_a_torch_that_cannot_use_the_gpus_is_refused(tmp_path, monkeypatch, installed, problem):
    (tmp_path / "torch.py").write_text(installed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    machine = msgspec.structs.replace(machine_with(1), versions={"torch": "2.13.0"})
    error = torch_without_gpu(machine)
    if error is None or problem is None:
        assert error == problem
        return
    assert error.problem == problem
    findings = diagnose(machine, torch_obstacle=error).findings
    assert problem in [finding.problem for finding in findings]
