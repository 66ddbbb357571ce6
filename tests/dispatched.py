"""Operators, as PyTorch calls each."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Tells of each operator, with what it was given and what it gave."""

    def __init__(self, tell: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._tell(func, args, found)
        return found
