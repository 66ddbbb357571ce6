"""Out of memory, told from every other failure.

It is told by an exception's type first, then by its text, and by an abort's last words. Text alone
proves nothing: a file may be called MemoryError, a cache may have caught its own. So a text is read
only where its type says that PyTorch, or a library under it, wrote it; and where one text has
several causes, memory itself is asked.
"""

import errno
import re
from collections.abc import Callable
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
    r"|\Astd::bad_alloc"
    r"|\Aunable to mmap \d+ bytes from file <.*>: Cannot allocate memory"
    r"|cudaHostAlloc.{0,80}(?:out of memory|failed)"
    r"|cuMem(?:Host|AllocHost).{0,80}out[ _]of[ _]memory"
    r"|Failed to CUDA host alloc",
    re.IGNORECASE,
)
_MAYBE_HOST = re.compile(r"can't start new thread|failed to map segment from shared object")
"""Texts about a thread's stack or a library's data for which there is no room.

Or threads are limited, or the library's disk is mounted noexec.
"""
_ABORT = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^']*)'(?P<text>.*)", re.DOTALL
)
"""The last words of a process whose C++ exception nobody caught."""


_HOST_TYPES = ("MemoryError", "_ArrayMemoryError")
_SYSTEM_TYPES = ("OSError", "BlockingIOError")
_JAX_TYPES = ("XlaRuntimeError", "JaxRuntimeError")
_LIBRARY_TYPES = ("RuntimeError", "AcceleratorError", "DistBackendError", "DeferredCudaCallError")
"""Names of exceptions that PyTorch, or a library under it, has raised for want of memory."""


def exhausted_memory(
    error: BaseException, *, device: Device, is_spent: Callable[[], bool] = lambda: False
) -> Exhausted | None:
    """Which memory ran out, by an exception; None when it is about something else.

    ``is_spent`` is asked where the text alone does not tell: whether this process gets no more host
    memory. On the CPU there is one memory, and it is the device's.
    """
    host: Exhausted = "device_memory" if device == "cpu" else "host_memory"
    text = _text(error)
    match error:
        case MemoryError():
            return host
        case OSError(errno=errno.ENOMEM):
            return host
        case RuntimeError() | ImportError() | OSError() if _MAYBE_HOST.search(text):
            return host if is_spent() else None
        case RuntimeError():
            if _is_of_torch(error, "OutOfMemoryError"):
                return "device_memory"
            return _by_text(text, device)
        case _:
            return None


def memory_aborted(output: str, *, device: Device) -> Exhausted | None:
    """Which memory ran out, by the end of what an aborted process wrote.

    None when it aborted for something else.
    """
    words = _ABORT.match(output, max(0, output.rfind("terminate called after throwing")))
    if words is None:
        return None
    if words["type"] == "std::bad_alloc":
        return "device_memory" if device == "cpu" else "host_memory"
    return _by_text(words["text"].strip().removeprefix("what():").strip(), device)


def logged_memory(kind: str, text: str, *, device: Device) -> Exhausted | None:
    """Which memory ran out, by an exception as a log shows it: its type's name, with its module,
    and its text. None when it is about something else.

    A type that anybody may have made, RuntimeError above all, is judged by its text.
    """
    host: Exhausted = "device_memory" if device == "cpu" else "host_memory"
    module, _, name = kind.rpartition(".")
    if name in _HOST_TYPES or (name in _SYSTEM_TYPES and text.startswith("[Errno 12]")):
        return host
    if name == "OutOfMemoryError":
        if module.startswith("ray"):  # a task that Ray ended: the node had no memory left
            return host
        is_named = bool(module) or _DEVICE.search(text) is not None
        return "device_memory" if device == "cuda" and is_named else None
    if name in _JAX_TYPES:
        is_exhausted = device == "cuda" and text.startswith("RESOURCE_EXHAUSTED")
        return "device_memory" if is_exhausted else None
    return _by_text(text, device) if name in _LIBRARY_TYPES else None


def _by_text(text: str, device: Device) -> Exhausted | None:
    if device == "cuda" and _DEVICE.search(text):
        return "device_memory"
    if _HOST.search(text):
        return "device_memory" if device == "cpu" else "host_memory"
    return None


def _is_of_torch(error: BaseException, name: str) -> bool:
    """Whether an exception is torch's of this name.

    torch is not imported here, and may itself be what did not fit.
    """
    return any(
        kind.__name__ == name and kind.__module__.split(".")[0] == "torch"
        for kind in type(error).__mro__
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- somebody's own exception, whose text is broken
        return ""
