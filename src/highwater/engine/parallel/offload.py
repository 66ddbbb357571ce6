"""Offload: add up gradients that FSDP2 offloads, on the host, while the GPU goes on computing.

FSDP2 copies a layer's reduced gradient into pinned memory, beside the computation, only if the
parameter has no gradient yet; else it waits for the copy, into newly allocated memory, and the GPU
stands still. So here no parameter has a gradient while a backward pass runs. Each gradient that
FSDP2 leaves is removed two layers later, when its copy is done, and added to a separate sum until
the pass ends: the same values, in the same order (docs/decisions/005). The pinned memory is
PyTorch's: it holds a few layers' gradients, and at the end the embedding's and the head's
(``model/held_bytes.py`` counts them).

FSDP2's records of a parameter (its shard, and the event behind the copy) are private: read in torch
2.11 and 2.13. Hooks on parameters would say when a copy begins, but torch 2.13 waits for the copy
of a parameter that has one.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from highwater.engine.parallel.fsdp1 import OffloadedFsdp1

LAYERS_BEHIND = 1
"""Layers whose copies may still run when the next layer's backward pass is launched."""


@contextmanager
def adding_up(model: nn.Module) -> Generator[None]:
    """Context manager for a micro-batch's backward pass: add its gradients to the earlier ones.

    With offload, FSDP1 alone would overwrite those, and FSDP2 would make the GPU wait for copies.
    Without offload this changes nothing: PyTorch adds gradients up.
    """
    sums = getattr(model, _NAME, None)
    if isinstance(sums, HostGradients):
        sums.set_aside()
    try:
        yield
        if isinstance(sums, HostGradients):
            sums.add_up()
    finally:  # even after a failed pass, so that another can begin
        if isinstance(sums, HostGradients):
            sums.give_back()
    if isinstance(model, OffloadedFsdp1):
        model.add_up()


def add_up_on_host(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Prepare a model that FSDP2 shards and offloads for use within ``adding_up``."""
    loose: Any = model
    setattr(loose, _NAME, HostGradients(model, layers))


class HostGradients:
    """Gradients of a model's shards, between two backward passes and during one."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._units = [_shards(unit) for unit in (*layers, model)]
        self._sums: dict[Any, DTensor] = {}
        """Sums by shard during a backward pass; otherwise they are the parameters' gradients."""
        self._pending: deque[list[_Fresh]] = deque()
        self._is_running = False
        for index, layer in enumerate(layers[:-1]):
            layer.register_forward_hook(partial(self._listen, index + 1))

    def set_aside(self) -> None:
        """Begin a backward pass: remove gradients from parameters, as FSDP2 requires."""
        assert not self._is_running, "one backward pass at a time"
        self._is_running = True
        for shard in self._all():
            if shard.sharded_param.grad is not None:
                self._sums[shard], shard.sharded_param.grad = shard.sharded_param.grad, None

    def add_up(self) -> None:
        """End a successful backward pass: add up all gradients that are still to be added."""
        for unit in self._units:
            self._take(unit)
        self._add(until=0)

    def give_back(self) -> None:
        """Set the parameters' gradients to the sums, after a backward pass."""
        self._pending.clear()
        for shard in self._all():
            shard.sharded_param.grad = self._sums.pop(shard, None)
        self._is_running = False

    def _listen(self, following: int, _module: nn.Module, _inputs: object, output: object) -> None:
        """Hook the gradient of this layer's output: at that moment the next layer is reduced."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._after, following))

    def _after(self, layer: int, _gradient: Tensor) -> None:
        if self._is_running:
            self._take(self._units[layer])
            self._add(until=LAYERS_BEHIND)

    def _take(self, unit: Sequence[Any]) -> None:
        fresh = [
            _Fresh(shard, shard.sharded_param.grad, shard.grad_offload_event) for shard in unit
        ]
        fresh = [each for each in fresh if each.gradient is not None]
        for each in fresh:
            each.shard.sharded_param.grad = None
        if fresh:
            self._pending.append(fresh)

    @torch.no_grad()
    def _add(self, *, until: int) -> None:
        """Add gradients to their sums, the oldest unit first, until ``until`` units remain."""
        while len(self._pending) > until:
            for shard, gradient, copied in self._pending.popleft():
                if copied is not None:
                    copied.synchronize()
                if shard in self._sums:
                    self._sums[shard].to_local().add_(gradient.to_local())
                else:  # a copy: FSDP2's own memory is pinned, or belongs to the whole unit
                    self._sums[shard] = gradient.clone()

    def _all(self) -> list[Any]:
        return [shard for unit in self._units for shard in unit]


class _Fresh(NamedTuple):
    """Gradient that FSDP2 left on one shard in one backward pass, and its copy's event."""

    shard: Any
    gradient: Any
    copied: Any
    """Event behind the copy to pinned memory; None if nothing is copied."""


_NAME = "_gradients_on_the_host"


def _shards(unit: nn.Module) -> list[Any]:
    """Return FSDP2's own records of the parameters that it shards with this module."""
    loose: Any = unit
    group = loose._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params
