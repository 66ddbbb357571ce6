"""Float64 all the way: casts to float32 that models make, lifted, each listed where it stands."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from references.wide import asks_for_float32

_READS_BYTES = {torch.Tensor.view, torch.frombuffer, torch.asarray}
"""What files are read with: a dtype that says what bytes are, no cast."""
_PACKAGES = ("transformers", "highwater")
_ROUNDS = "nf4.py:"
"""Where numbers of four bits are made of float32, and float32 of them, whatever the dtype."""


class Lifted(TorchFunctionMode):
    """Within it what asks for float32 gets float64, and plain numbers become float64 tensors.

    Not in what a backward pass recomputes: that runs outside of any mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: set[str] = set()
        """``file:function`` of every cast that was lifted, of the package's code nearest to it."""

    def __enter__(self) -> "Lifted":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        asks = asks_for_float32(function, arguments, keywords)
        if not asks or function in _READS_BYTES or (place := _place()).startswith(_ROUNDS):
            return function(*arguments, **keywords)
        self.casts.add(place)
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        keywords = {name: _wide(value) for name, value in keywords.items()}
        return function(*map(_wide, arguments), **keywords)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if (file := _file_in_packages(frame.f_code.co_filename)) is not None:
            return f"{file}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _file_in_packages(path: str) -> str | None:
    parts = Path(path).parts
    return parts[-1] if any(package in parts for package in _PACKAGES) else None
