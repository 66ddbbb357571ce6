"""Float64 throughout: model code that casts to float32 inside computes in float64 instead."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class float32_casts_lifted(TorchFunctionMode):  # noqa: N801 - read as `with float32_casts_lifted():`
    """Every ``float32`` that model code asks for is ``float64``: norms, rotary angles, softmax of attention and router.

    Without it a "float64" model is accurate to 1e-7 only, and a fault of that size cannot be told from a rounding.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
