"""What a program that measures ran on: its command, versions and GPU."""

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from highwater.version import __version__


def environment() -> dict[str, object]:
    """Return command, versions and GPU, with which every JSON document of a benchmark begins."""
    file, words = Path(sys.argv[0]).resolve(), ["-m", *sys.argv]
    if sys.argv[0].endswith(".py"):  # a relative path: no path of this machine is revealed
        is_below = file.is_relative_to(Path.cwd())
        words = [str(file.relative_to(Path.cwd()) if is_below else file.name), *sys.argv[1:]]
    found: dict[str, object] = {
        "command": ["python", *words],
        "highwater": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    with suppress(PackageNotFoundError):
        found["liger-kernel"] = version("liger-kernel")
    if not torch.cuda.is_available():
        return found
    from torch.cuda.nccl import version as nccl_version

    return found | {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(str(part) for part in nccl_version()),
        "gpu": torch.cuda.get_device_name(),
        "gpu_total_bytes": torch.cuda.mem_get_info()[1],
    }
