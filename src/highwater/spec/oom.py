"""Every spelling of "out of memory" that PyTorch and the libraries under it use, for exceptions and for logs."""

import re
from typing import Literal

from highwater.spec.trial import Device

Exhausted = Literal["device_memory", "host_memory"]

_DEVICE = re.compile(
    r"CUDA out of memory"
    r"|HIP out of memory"
    r"|(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
    r"|Allocation on device \d+ would exceed allowed memory"
    r"|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublas(?:Lt)?Create"
    r"|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|Cuda failure (?:2 )?'?out of memory"
    r"|Failed to CUDA (?:calloc|malloc)"
    r"|cuMem(?!Host|AllocHost)[A-Z]\w*.{0,80}out[ _]of[ _]memory",
    re.IGNORECASE,
)
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory"
    r"|std::bad_alloc"
    r"|\bMemoryError\b"
    r"|Cannot allocate memory"
    r"|cudaHostAlloc.{0,80}(?:out of memory|failed)"
    r"|cuMem(?:Host|AllocHost).{0,80}out[ _]of[ _]memory"
    r"|Failed to CUDA host alloc"
    r"|Thread creation failed: Resource temporarily unavailable"
    r"|can't start new thread"
    r"|failed to map segment from shared object",
    re.IGNORECASE,
)


def exhausted_memory(text: str, *, device: Device) -> Exhausted | None:
    """Which memory ran out, by an error's text; None when the text speaks of neither.

    On the CPU there is one memory, and it is the device's.
    """
    if device == "cuda" and _DEVICE.search(text):
        return "device_memory"
    if _HOST.search(text):
        return "device_memory" if device == "cpu" else "host_memory"
    return None
