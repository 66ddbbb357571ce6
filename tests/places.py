"""Machines, models, questions, scripts and commands that tests of the control plane share."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import msgspec

from highwater.nouns.hardware import Gpu, Machine
from highwater.nouns.plan import plan
from highwater.nouns.request import request_from
from highwater.nouns.study import Question
from highwater.units import GIB

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
RESULTS = ROOT / "docs" / "results"
FOUND = RESULTS / "find"


def examples(usual: int) -> int:
    """So many examples of a property as the profile asks for, where it has 100 by default."""
    return max(1, usual * hypothesis.settings().max_examples // 100)


def script(path: Path) -> ModuleType:
    """A script of the results' pages, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # what it declares looks for its own module there
    spec.loader.exec_module(module)
    return module


def captured(command: Sequence[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
    """What a command says on both streams, and how it ends."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    fill: Mapping[str, int] | None = None,
) -> Path:
    """A file of tensors of these dtypes and shapes, all bytes 0 or as ``fill`` says."""
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * int(re.sub(r"^[A-Z]+(\d+).*", r"\1", dtype)) // 8
        offsets = [len(data), len(data) + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += bytes([(fill or {}).get(name, 0)]) * size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


H200 = Gpu(
    index=0,
    name="NVIDIA H200",
    memory_total_bytes=139 * GIB,
    memory_used_bytes=GIB // 2,
    compute_capability=(9, 0),
    processes=(),
)
NO_GPU = Machine(
    gpus=(),
    driver_version=None,
    cpu_cores=2,
    host_memory_total_bytes=24 * GIB,
    host_memory_available_bytes=20 * GIB,
    versions={},
)


def machine_with(count: int, **changes: Any) -> Machine:
    """A machine with this many H200s."""
    gpus = tuple(msgspec.structs.replace(H200, index=index, **changes) for index in range(count))
    return msgspec.structs.replace(NO_GPU, gpus=gpus, driver_version="580")


def question_of(**settings: Any) -> Question:
    """A question about Qwen3-0.6B on a simulated GPU with 80 GiB."""
    usual = {"model": "Qwen3-0.6B", "device": "cuda", "memory": "80GiB", "dry_run": True}
    return plan(request_from(usual | settings), NO_GPU).question
