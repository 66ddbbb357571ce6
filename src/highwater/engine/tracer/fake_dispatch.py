"""Fake tensors at two thirds of their cost: the answers that PyTorch keeps for an operator are
found by a key that is faster made.

What it overrides is private to PyTorch: where a version does not ask for it, nothing is answered
otherwise, only later.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _DispatchCacheKey,  # pyright: ignore[reportPrivateUsage]
)

aten: Any = torch.ops.aten
_WRITE_OVER = (aten.addmm.dtype_out, aten.mm.out)
"""Answered with the tensor that they are given to write to, which has the right shape wherever the
engine gives one."""
_PLAIN = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
)


class QuickFakeMode(FakeTensorMode):
    """``FakeTensorMode``, answering the same."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled: no frame has to be kept from it at every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITE_OVER and type(kwargs["out"]) is FakeTensor:
            return kwargs["out"]
        return self.dispatch(func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> _DispatchCacheKey:
        values: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if _is_flattened(args, values) and _is_flattened(kwargs.items(), values):
            return _DispatchCacheKey(tuple(values))
        return super()._cache_key(state, func, args, kwargs)


def _is_flattened(arguments: Iterable[Any], values: list[object]) -> bool:
    """Add all that an answer may depend on to the values; False where it may depend on something
    else.
    """
    for argument in arguments:
        kind = type(argument)
        if kind is FakeTensor:
            if (
                argument.constant is not None
                or argument.layout is not torch.strided
                or argument.dtype.is_complex
            ):
                return False
            shape = (argument.shape, argument.stride(), argument.storage_offset())
            values += (kind, argument.dtype, *shape, argument.fake_device, argument.requires_grad)
        elif kind in _PLAIN:
            values += (kind, argument)
        elif kind is list or kind is tuple:
            values += (kind, len(argument))
            if not _is_flattened(argument, values):
                return False
        else:
            return False
    return True
