"""Machines on which a trial cannot run: every command still answers."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import SIMULATED, following, offered, refusal

from highwater.errors import EXIT_MACHINE
from highwater.store.journal import read_study
from places import FOUND

PYNVML = """
class NVMLError(Exception): pass
class Memory: total, used = 80 << 30, 0
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "580"
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return "GPU-0"
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetComputeRunningProcesses(handle): return []
def nvmlDeviceGetMemoryInfo(handle): return Memory
"""
LOST = PYNVML + "def nvmlDeviceGetMemoryInfo(handle): raise NVMLError('GPU is lost')\n"
CPU = ("find", "Qwen3-0.6B", "--device", "cpu", "--memory", "2GiB")


@pytest.fixture
def libraries(tmp_path: Path) -> dict[str, str]:
    """The environment in which modules written to ``tmp_path`` stand for installed ones."""
    return {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}


def test_a_gpu_that_cannot_be_read_stops_only_who_would_use_it(highwater, tmp_path, libraries):
    (tmp_path / "pynvml.py").write_text(LOST)
    document = json.loads(highwater("doctor", "--json", **libraries).stdout)
    (lost,) = (each["problem"] for each in document["findings"] if "GPU 0" in each["problem"])
    assert lost.endswith("GPU is lost")
    assert highwater("find", "Qwen3-0.6B", *SIMULATED, **libraries).returncode == 0
    assert highwater(*CPU, "--dry-run", **libraries).returncode in (0, 1)
    for words in ((), ("--gpus", "1"), ("--device", "cuda")):
        problem, hint = refusal(highwater("find", "Qwen3-0.6B", *words, **libraries), 3)
        assert problem == lost
    assert highwater(*offered(hint)[0][1:], "--dry-run", **libraries).returncode == 0


def test_a_torch_without_cuda_is_refused_first_and_by_the_doctor(highwater, tmp_path, libraries):
    (tmp_path / "pynvml.py").write_text(PYNVML)
    (tmp_path / "torch.py").write_text(
        "class version: cuda = None\nclass cuda: is_available = staticmethod(lambda: False)\n"
    )
    for words in (("find", "Qwen3-0.6B"), ("try", "Qwen3-0.6B", "--length", "8k")):
        problem, _ = refusal(highwater(*words, **libraries), 3)
        assert "without CUDA" in problem
        assert highwater(*words, "--dry-run", **libraries).returncode == 0
    assert list(tmp_path.glob("logs/**/*.log")) == []
    doctor = highwater("doctor", **libraries)
    assert problem in doctor.stdout
    assert "--device cpu" in doctor.stderr


def hidden_packages(folder: Path, *names: str) -> None:
    """Have the interpreter find no such package, as where none was installed."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nfind = m.version\ndef version(name):\n"
        f"    if name in {names!r}: raise m.PackageNotFoundError(name)\n"
        "    return find(name)\nm.version = version\n"
    )


def test_on_a_laptop_without_torch_the_doctor_says_what_works_first(highwater, tmp_path):
    hidden_packages(tmp_path, "torch", "transformers", "peft")
    laptop = {"PYTHONPATH": str(tmp_path)}
    done = highwater("doctor", **laptop)
    assert done.returncode == 0
    sentence, _, _title, _, _columns, *table = done.stdout.splitlines()
    works, _, does_not = sentence.partition("; ")
    assert all(f"`{name}`" in works for name in ("predict", "recommend", "guide", "emit"))
    assert "torch is not installed" in does_not
    rows = [line.split("  ")[0] for line in table[: table.index("")]]
    states = [" yes" in line for line in table[: table.index("")]]
    assert states == sorted(states, reverse=True), "what works comes first"
    assert rows[0].startswith("predict, recommend, guide, emit")
    (trials,) = (line for line in table if line.startswith("find, try, train, bench"))
    assert trials.endswith("pip install '.[train]'")
    (lora,) = (line for line in table if line.startswith("find, try and train --lora "))
    assert lora.endswith("pip install '.[train,lora]'")
    assert highwater(*following(done), **laptop).returncode == 0
    asked = {
        ("find", "Qwen3-0.6B"): 2,
        ("data", str(tmp_path)): 3,
        (*following(done), "--exact"): 3,
    }
    for words, code in asked.items():
        first = offered(refusal(highwater(*words, **laptop), code)[1])[0]
        assert first[:2] == ["highwater", "predict"]
        assert highwater(*first[1:], **laptop).returncode == 0
    on_the_cpu = ("--device", "cpu", "--memory", "1GiB")
    assert highwater("find", "tiny", *on_the_cpu, **laptop).returncode == EXIT_MACHINE
    document = json.loads(highwater("doctor", "--json", **laptop).stdout)
    assert {finding["problem"] for finding in document["findings"]} == {
        "torch is not installed",
        "transformers is not installed",
        "no GPU is visible",
    }


def test_a_package_that_is_missing_is_a_fault_and_metadata_is_not(highwater, tmp_path, libraries):
    hidden_packages(tmp_path, "transformers")
    done = highwater("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == EXIT_MACHINE
    assert "transformers is not installed" in done.stdout.splitlines()[0]
    assert done.stderr.startswith("next: pip install")
    hidden_packages(tmp_path, "highwater")
    done = highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "s.jsonl", **libraries)
    assert done.returncode == 0, done.stderr


def typed_again(study: Path) -> tuple[str, ...]:
    """The command of a study of docs/results/find, about a copy of its file."""
    return (*read_study(study).command[1:], "--study", study.name)


@pytest.mark.parametrize("name", ["qwen3-4b-card-full", "long-8b-2"])
@pytest.mark.parametrize("device", [(), ("--device", "cuda")])
def test_a_study_that_has_every_answer_needs_no_gpu_to_give_them(highwater, tmp_path, name, device):
    copy = Path(shutil.copy(FOUND / f"{name}.jsonl", tmp_path))
    before = copy.read_bytes()
    done = highwater(*typed_again(copy), *device)
    assert (done.returncode, done.stdout) == (0, highwater("show", copy.name).stdout)
    note, _ = done.stderr.splitlines()
    assert note.startswith("note: ")
    assert copy.name in note
    assert highwater(*following(done)).returncode == 0
    assert copy.read_bytes() == before
    assert list(tmp_path.iterdir()) == [copy]


def test_an_unfinished_study_is_shown_where_there_is_no_gpu_to_finish_it(highwater, tmp_path):
    lines = (FOUND / "qwen3-0.6b-79gib-full.jsonl").read_text().splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if '"kind":"cell_answered"' in line)
    begun = tmp_path / "my study.jsonl"
    begun.write_text("".join(lines[:last]))
    problem, hint = refusal(highwater(*typed_again(begun)), EXIT_MACHINE)
    assert problem.startswith("no GPU is visible")
    assert begun.name in problem
    assert " 1 of 2 cells " in problem
    assert highwater(*offered(hint)[0][1:]).returncode == 0


def test_with_more_time_than_its_answers_had_a_study_is_not_finished(highwater, tmp_path):
    copy = Path(shutil.copy(FOUND / "long-8b-2.jsonl", tmp_path))
    limit_s = read_study(copy).question.timeout_s or 0.0
    problem, hint = refusal(
        highwater(*typed_again(copy), "--timeout", f"{2 * limit_s:g}s"), EXIT_MACHINE
    )
    assert copy.name in problem
    assert " 1 of 1 cells " in problem
    assert highwater(*offered(hint)[0][1:]).returncode == 0
    done = highwater(*typed_again(copy), "--timeout", f"{limit_s / 2:g}s")
    assert (done.returncode, done.stdout) == (0, highwater("show", copy.name).stdout)


def test_a_study_of_something_else_answers_nothing_where_there_is_no_gpu(highwater, tmp_path):
    copy = Path(shutil.copy(FOUND / "qwen3-0.6b-79gib-full.jsonl", tmp_path))
    problem, _ = refusal(
        highwater(*typed_again(copy), "--confirm", "1", "--device", "cuda"), EXIT_MACHINE
    )
    assert "no GPU" in problem
