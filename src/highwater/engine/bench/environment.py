"""The command, versions and GPU that every JSON document of a benchmark begins with."""

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from highwater.version import __version__


def environment() -> dict[str, object]:
    """Command, versions and GPU of this process."""
    found: dict[str, object] = {
        "command": ["python", *_words(sys.argv)],
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


def _words(argv: list[str]) -> list[str]:
    """The arguments with a file as it is named from here: no path of this machine is told."""
    if not argv[0].endswith(".py"):
        return ["-m", *argv]
    file = Path(argv[0]).resolve()
    is_below = file.is_relative_to(Path.cwd())
    return [str(file.relative_to(Path.cwd()) if is_below else file.name), *argv[1:]]
