"""The command, versions and GPU that every JSON document of a benchmark begins with."""

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch


def environment() -> dict[str, object]:
    """Command, versions and GPU of this process."""
    is_file = sys.argv[0].endswith(".py")
    found: dict[str, object] = {
        "command": ["python", *(_module(sys.argv) if is_file else ("-m", *sys.argv))],
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


def _module(argv: list[str]) -> list[str]:
    """The arguments with a module's file as ``-m`` names it: no path of this machine is told."""
    name = argv[0].rpartition("/highwater/")[2].removesuffix(".py").replace("/", ".")
    return ["-m", f"highwater.{name}", *argv[1:]]
