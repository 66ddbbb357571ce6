"""Float64 throughout: transformers' casts to float32 compute in float64 instead."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from inspect import getsource
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

THEIRS = "transformers."


class float32_casts_lifted(TorchFunctionMode):  # noqa: N801 - read as `with float32_casts_lifted():`
    """Every ``float32`` that transformers' code asks for is ``float64``: norms, rotary angles,
    softmax of attention and router.

    Without it a "float64" model is accurate to 1e-7 only, and a fault of that size cannot be told
    from a rounding. What other code casts to float32 stays float32, and shows.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not asks_for_float32(func, args, kwargs) or not _is_asked_by_transformers():
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        return func(
            *args,
            **{
                name: torch.float64 if value is torch.float32 else value
                for name, value in kwargs.items()
            },
        )


def lift_float32_casts(model: nn.Module) -> None:
    """The same in every module of transformers that casts, for good: a backward pass leaves all
    modes, and recomputation needs this one. A mode is asked about each call of PyTorch's.
    """
    for module in model.modules():
        if _casts(type(module)):
            module.forward = _lifted(module.forward)


@cache
def _casts(kind: type[nn.Module]) -> bool:
    of_theirs = (base for base in kind.__mro__ if base.__module__.startswith(THEIRS))
    return any("float" in getsource(base.forward) for base in of_theirs if "forward" in vars(base))


def _lifted(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        modes = _get_current_function_mode_stack()
        if any(isinstance(mode, float32_casts_lifted) for mode in modes):
            return forward(*args, **kwargs)  # a mode in each module would be asked once for each
        with float32_casts_lifted():
            return forward(*args, **kwargs)

    return wide


def asks_for_float32(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call casts to float32. Plain loops, as it is asked of every call of PyTorch's."""
    for value in args:
        if value is torch.float32:
            return True
    for value in kwargs.values():
        if value is torch.float32:
            return True
    return func is torch.Tensor.float


def _is_asked_by_transformers() -> bool:
    """Whether the nearest code that is not PyTorch's own, nor this file's, is transformers'."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        _module(frame) == __name__ or _module(frame).partition(".")[0] == "torch"
    ):
        frame = frame.f_back
    return _module(frame).startswith(THEIRS)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
