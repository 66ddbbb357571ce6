"""How an out-of-memory error is told from every other failure.

By an exception's type first, then by its text, and by the last words of an aborted process. Text
alone proves nothing: a file may be called MemoryError, a cache may have caught its own. So text is
read only if the type says that PyTorch, or a library under it, raised the exception; and where one
text has several causes, the memory still available decides.
"""

import errno
import re
from collections.abc import Callable
from typing import Literal

from highwater.nouns.layout import Device

Exhausted = Literal["device_memory", "host_memory"]

TORCH_SENTENCE = r"(?:CUDA|HIP|XPU) out of memory\.\s+Tried to allocate\s+[\d.]+"
"""Words of PyTorch's allocator when it has no room."""
_DEVICE = re.compile(
    rf"{TORCH_SENTENCE}"
    r"|(?:CUDA error|HIP error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
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
_ANY = re.compile(r".*", re.DOTALL)
_LEVELS = ("error", "critical", "fatal")
_LEAD = re.compile(
    r"(?:\[enforce fail at [^\]]*\][^'\"`]{0,20}|\S+:\d+ in function \S+: "
    r"|(?:CUDA|HIP|cuDNN|cusolver)\w* error: |NCCL error[^'\"`]*|Failed: |Error )?",
    re.IGNORECASE,
)
"""Text that a library puts before such words; after any other text they are a quotation."""
_ALLOCATION = re.compile(
    r"out[\s_-]*of[\s_-]*memory|\bOOM(?:s|ed|ing)?\b|(?:can't|cannot|could not|failed to)"
    r"\s+(?:CUDA\s+)?[cm]?alloc|bad_alloc|ALLOC_FAILED|RESOURCE_EXHAUSTED|\bMemoryError\b"
    r"|alloc\w*\s(?:of\s.{0,40})?fail|(?:not enough|insufficient|exhausted)\s(?:\w+\s)?memory"
    r"|memory\s(?:was\s|is\s)?exhausted|executable batch size|decreasing batch size",
    re.IGNORECASE,
)
_PARTS = ("mem", "alloc", "oom", "exhausted", "batch size", "cublas")
"""One of these is in every text about memory: most lines of a long log have none."""
_NONE_BEFORE = re.compile(
    r"\b(?:no|not|zero|0|never|without|avoid\w*)\W+(?:\w+\W+)?\Z", re.IGNORECASE
)
_NONE_AFTER = re.compile(r"(?: \w+)?\W{0,3}\b(?:0|none|no|false)\b", re.IGNORECASE)
_ADVICE = re.compile(
    r"\b(?:if|when|hint|tip|note|may|might|can|could|helps?|consider|try|avoids?|prevents?)\b",
    re.IGNORECASE,
)
_NO_BATCH = "No executable batch size found, reached zero"
"""accelerate's error after every batch size ran out of memory, down to one."""
_MAYBE_HOST = re.compile(r"can't start new thread|failed to map segment from shared object")
"""Texts that there is no room for a thread's stack or a library's data. They also mean that threads
are limited, or that the library's disk is mounted noexec."""
_ABORT = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[^']*)'(?P<text>.*)", re.DOTALL
)
"""The last words of a process whose C++ exception nobody caught."""


_SYSTEM_TYPES = ("OSError", "BlockingIOError")
_JAX_TYPES = ("XlaRuntimeError", "JaxRuntimeError")
_LIBRARY_TYPES = ("RuntimeError", "AcceleratorError", "DistBackendError", "DeferredCudaCallError")
"""Names of exceptions that PyTorch, or a library under it, has raised for want of memory."""


def exhausted_memory(
    error: BaseException, *, device: Device, is_spent: Callable[[], bool] = lambda: False
) -> Exhausted | None:
    """Which memory ran out, by an exception; None if the exception is about something else.
    ``is_spent`` is called where the text leaves it open, and returns True if this process can get
    no more host memory. On the CPU host memory counts as the device's.
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
            # torch's OutOfMemoryError by its name: torch is not imported here
            kinds = [kind for kind in type(error).__mro__ if kind.__name__ == "OutOfMemoryError"]
            if any(kind.__module__.split(".")[0] == "torch" for kind in kinds):
                return "device_memory"
            return _by_text(text, device)
        case _:
            return None


def memory_aborted(output: str, *, device: Device) -> Exhausted | None:
    """The memory that an aborted process lacked, by the end of its output; None: neither."""
    words = _ABORT.match(output, max(0, output.rfind("terminate called after throwing")))
    if words is None:
        return None
    if words["type"] == "std::bad_alloc":
        return "device_memory" if device == "cpu" else "host_memory"
    return _by_text(words["text"].strip().removeprefix("what():").strip(), device)


def logged_memory(kind: str, text: str, *, device: Device) -> Exhausted | None:
    """Which memory ran out, by an exception in a log: ``kind`` is its type with the module,
    ``text`` its message. None: it is about something else. A type that any code may raise,
    RuntimeError above all, is judged by its text.
    """
    host: Exhausted = "device_memory" if device == "cpu" else "host_memory"
    module, _, name = kind.rpartition(".")
    if name == "MemoryError" and module in ("", "builtins"):
        return host
    if name == "_ArrayMemoryError" or (name in _SYSTEM_TYPES and text.startswith("[Errno 12]")):
        return host
    if name == "OutOfMemoryError":
        if module.startswith("ray"):  # a task that Ray ended: the node had no memory left
            return host
        is_torchs = module.split(".")[0] in ("torch", "c10") or re.match(TORCH_SENTENCE, text)
        return "device_memory" if device == "cuda" and is_torchs else None
    if name in _JAX_TYPES:
        is_exhausted = device == "cuda" and text.startswith("RESOURCE_EXHAUSTED: Out of memory")
        return "device_memory" if is_exhausted else None
    if text.startswith(_NO_BATCH):
        return "device_memory"
    if name.lower() in _LEVELS:  # the log does not say the type
        return "device_memory" if device == "cuda" and re.match(TORCH_SENTENCE, text) else None
    return _by_text(text, device, lead=_LEAD) if name in _LIBRARY_TYPES else None


def tells_of_allocation(text: str, *, may_advise: bool) -> bool:
    """True if a text tells of a failed allocation; with ``may_advise`` not if it is only advice."""
    lowered = text.lower()
    if not any(part in lowered for part in _PARTS):
        return False
    if _DEVICE.search(text) or _HOST.search(text):
        return True
    return not (may_advise and _ADVICE.search(text)) and any(
        not _NONE_BEFORE.search(text, max(0, found.start() - 24), found.start())
        and not _NONE_AFTER.match(text, found.end())
        for found in _ALLOCATION.finditer(text)
    )


def _by_text(text: str, device: Device, *, lead: re.Pattern[str] = _ANY) -> Exhausted | None:
    """Which memory ran out, by a library's message; ``lead``: text that may come before it."""
    found = _DEVICE.search(text) if device == "cuda" else None
    if found is not None and lead.fullmatch(text, 0, found.start()):
        return "device_memory"
    found = _HOST.search(text)
    if found is not None and lead.fullmatch(text, 0, found.start()):
        return "device_memory" if device == "cpu" else "host_memory"
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- somebody's own exception, whose text is broken
        return ""
