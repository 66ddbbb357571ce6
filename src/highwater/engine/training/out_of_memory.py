"""Out-of-memory reports: live bytes by kind when memory ran out, and the layer that the step was
in. No history is recorded, and a step that succeeds costs nothing extra.

Tensors that persist between steps are counted once. PyTorch's allocator calls an observer before it
raises its error, when the stack is still intact. The observer reads the allocator's counters,
FSDP's buffers, and the loss's frames, which hold the logits. Whatever else the pass has allocated
is activations and temporaries, told as one number: only autograd's graph knows which are saved, and
walking it would run hooks that recompute. "Unattributed" bytes were allocated before the step, by
no known owner.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from highwater.engine.models.fused.adapted_linear import WeightGradient
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.step import Training
from highwater.nouns.trial import AliveMemory

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which FSDP1 and recomputation keep the module that they wrap."""


class LayerWatch:
    """Tracks the phase and decoder layer of a step, by two assignments a layer and pass.

    A layer is entered in the forward pass, and again when it is recomputed. After a recomputation
    it stays the current layer, since its backward pass follows. A backward pass without
    recomputation names no layer.
    """

    def __init__(self, on_change: Callable[[str], None] | None = None) -> None:
        """``on_change`` is called with ``where`` whenever that changes."""
        self.layer: int | None = None
        self.phase = "setup"
        self._on_change = on_change

    @property
    def where(self) -> str:
        """Current phase and layer, like ``backward of layer 27``."""
        return self.phase if self.layer is None else f"{self.phase} of layer {self.layer}"

    def enter(self, phase: str) -> None:
        """Begin a phase, outside any layer."""
        self.phase = phase
        self._move(None)

    def follow(self, layers: Iterable[nn.Module]) -> None:
        """Register hooks on the layers of a model, given in order."""
        for number, layer in enumerate(layers):
            inner = layer
            for name in _WRAPPERS:  # a recomputation calls only the inner module
                inner = getattr(inner, name, inner)
            enter = partial(self._move, number)
            inner.register_forward_pre_hook(lambda *_, enter=enter: enter(), prepend=True)
            inner.register_forward_hook(self._leave)

    def _leave(self, *_: object) -> None:
        if self.phase != "backward":
            self._move(None)

    def _move(self, layer: int | None) -> None:
        self.layer = layer
        if self._on_change is not None:
            self._on_change(self.where)


_INTERPRETER = cast(Any, sys)
"""Untyped ``sys``: the functions that return threads' frames are private."""
_ENGINE = re.compile(r"highwater/engine/(?!training/(out_of_memory|worker)\b)\w+(/\w+)+\.py$")
"""Files of the engine, except this one and the worker."""
_HOLDS_LOGITS = re.compile(r"highwater/engine/(models|kernels)/")
"""Files whose frames are searched for logits and gradients."""
_LOSS = re.compile(r"highwater/engine/(models/loss|kernels/rows\w*)\.py$")
"""Files whose frames hold logits."""
_ASKED_ON_CPU = re.compile(r"you tried to allocate (\d+) bytes")
_PASSES = ("forward", "backward", "experience")
"""Phases in which activations are allocated."""


class OutOfMemoryWatch:
    """Counts what a training keeps, so that the rest is known by kind when memory runs out."""

    def __init__(self, device: torch.device, where: LayerWatch) -> None:
        """Register with the CUDA allocator; on the CPU there is none."""
        self._device = device
        self._where = where
        self._training: Training | None = None
        self._parameters_bytes = self._gradients_bytes = self._optimizer_bytes = 0
        self._lasting: set[int] = set()
        self._besides_bytes: int | None = None
        self._noted: tuple[AliveMemory, str, int | None] | None = None
        if device.type == "cuda":
            attach: Any = torch._C._cuda_attach_out_of_memory_observer  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
            attach(self._note)

    def know(self, training: Training) -> None:
        """Count the tensors that exist for the whole training, all of which are allocated now."""
        self._training = training
        parameters = self._storages(
            chain.from_iterable(model.parameters() for model in _models(training))
        )
        gradients = self._storages(_gradients(training))
        optimizer = self._storages(
            value
            for _, optimizer in training.trained
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        self._parameters_bytes = sum(parameters.values())
        self._gradients_bytes = sum(gradients.values())
        self._optimizer_bytes = sum(optimizer.values())
        self._lasting = {*parameters, *gradients, *optimizer}

    def settle(self) -> None:
        """Record what else is allocated between two steps: workspaces and buffers."""
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            lasting = self._parameters_bytes + self._gradients_bytes + self._optimizer_bytes
            self._besides_bytes = max(0, allocated - lasting)

    def alive(self, error: BaseException) -> tuple[AliveMemory, str, int | None]:
        """Return live memory by kind, phase and layer at the time when ``error`` was raised."""
        return self._noted or (self._unnoted(error), self._where.phase, self._where.layer)

    def _unnoted(self, error: BaseException) -> AliveMemory:
        """Return live memory if the observer was not called: on the CPU, or in a library."""
        asked = _ASKED_ON_CPU.search(str(error))
        every = [frame for frame, _ in walk_tb(error.__traceback__)]
        frames = [frame for frame in every if _HOLDS_LOGITS.search(frame.f_code.co_filename)]
        return AliveMemory(
            parameters_bytes=self._parameters_bytes,
            gradients_bytes=self._gradients_bytes + self._bytes(_weight_gradients(frames)),
            optimizer_states_bytes=self._optimizer_bytes,
            logits_bytes=self._bytes(self._logits(frames)),
            requested_bytes=int(asked[1]) if asked else None,
            requested_by=_place(reversed(every)),
        )

    def _note(self, device: int, requested: int, _limit: int, device_free: int) -> None:
        """Record live memory before the allocator raises its error; must not raise itself."""
        try:
            callers = [frame for frame, _ in walk_stack(_INTERPRETER._getframe())]
            frames = [
                frame
                for each in _INTERPRETER._current_frames().values()
                for frame, _ in walk_stack(each)
                if _HOLDS_LOGITS.search(frame.f_code.co_filename)
            ]
            stats = torch.cuda.memory_stats(device)
            blocks = (
                block["size"]
                for segment in torch.cuda.memory_snapshot()
                if segment["device"] == device
                for block in segment["blocks"]
                if block["state"] == "inactive"
            )
            training = self._training
            found = self._storages(
                chain(_weight_gradients(frames), () if training is None else _gradients(training))
            )
            gradients = max(self._gradients_bytes, sum(found.values()))
            logits = self._bytes(self._logits(frames))
            communication = self._gathered_bytes(besides=found)
            allocated = stats["allocated_bytes.all.current"]
            lasting = self._parameters_bytes + gradients + self._optimizer_bytes
            rest = allocated - lasting - logits - communication
            activations = 0
            if self._where.phase in _PASSES and self._besides_bytes is not None:
                activations = max(0, rest - self._besides_bytes)
            alive = AliveMemory(
                parameters_bytes=self._parameters_bytes,
                gradients_bytes=gradients,
                optimizer_states_bytes=self._optimizer_bytes,
                activations_bytes=activations,
                logits_bytes=logits,
                communication_bytes=communication,
                unattributed_bytes=max(0, rest - activations),
                allocated_bytes=allocated,
                reserved_bytes=stats["reserved_bytes.all.current"],
                largest_free_bytes=max(blocks, default=0),
                requested_bytes=requested,
                requested_by=_place(callers),
                device_free_bytes=device_free,
            )
            self._noted = alive, self._where.phase, self._where.layer
        except Exception as error:  # noqa: BLE001 -- called by the allocator, which goes on to raise
            sys.stderr.write(f"what was alive cannot be told: {type(error).__name__}: {error}\n")

    def _logits(self, frames: Iterable[FrameType]) -> Iterator[Tensor]:
        """Yield logits in the loss's frames: matrices with one column for each vocabulary entry."""
        if self._training is None:
            return
        words = self._training.policy.causal_lm.config.vocab_size
        hidden = self._training.policy.causal_lm.config.hidden_size
        for frame in frames:
            if _LOSS.search(frame.f_code.co_filename):
                for value in list(frame.f_locals.values()):
                    kept = getattr(value, "logits_NV", None)  # the value may be an autograd context
                    found = kept if isinstance(kept, Tensor) else value
                    if (
                        isinstance(found, Tensor)
                        and found.ndim == 2
                        and found.shape[1] == words
                        and found.shape != (hidden, words)
                    ):
                        yield found

    def _gathered_bytes(self, *, besides: Collection[int]) -> int:
        """Bytes that FSDP holds besides shards and ``besides``, gradients that use its buffers."""
        if self._training is None:
            return 0
        found = self._storages(_gathered(self._training))
        counted = {*self._lasting, *besides}
        return sum(size for place, size in found.items() if place not in counted)

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the tensors that are on the device; shared storage counts once."""
        return sum(self._storages(tensors).values())

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Bytes of the storages of the tensors that are on the device, by address."""
        storages: dict[int, int] = {}
        for own in chain.from_iterable(map(stored, tensors)):
            if own.device.type == self._device.type:
                storage = own.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        storages.pop(0, None)
        return storages


def stored(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of this rank's shard; 8-bit moments consist of codes and scales."""
    own: Any = local_shard(tensor)
    if not is_traceable_wrapper_subclass(own):
        yield own
        return
    for name in own.__tensor_flatten__()[0]:
        yield from stored(getattr(own, name))


def _models(training: Training) -> Iterator[nn.Module]:
    yield from (model for model, _ in training.trained)
    if training.reference is not None and training.reference is not training.policy:
        yield training.reference


def _gradients(training: Training) -> Iterator[Tensor]:
    for model, _ in training.trained:
        parameters = chain(
            model.parameters(), (each.sharded_param for each in _fsdp2_parameters(model))
        )
        yield from (parameter.grad for parameter in parameters if parameter.grad is not None)


def _weight_gradients(frames: Iterable[FrameType]) -> Iterator[Tensor]:
    """Yield the sums of weight gradients that these frames accumulate."""
    for frame in frames:
        for value in list(frame.f_locals.values()):
            total = getattr(value, "sum_OI", None) if isinstance(value, WeightGradient) else None
            if total is not None:
                yield total


def _gathered(training: Training) -> Iterator[Tensor]:
    """Yield FSDP's tensors besides shards: gathered parameters, and collectives' buffers."""
    for model in _models(training):
        for parameter in _fsdp2_parameters(model):
            yield from parameter.all_gather_outputs
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in _groups(module):
                    yield from _tensors_in(group._all_gather_result)
                    # HSDP's sums between copies of the shards
                    yield from _tensors_in(getattr(group, "_partial_reduce_output", None))
                    yield from _tensors_in(getattr(group, "_all_reduce_state", None))
                    yield from _tensors_in(getattr(group.comm_ctx, "all_gather_state", None))
                    yield from _tensors_in(getattr(group.comm_ctx, "reduce_scatter_state", None))
                    yield from _tensors_in(getattr(group.comm_ctx, "reduce_scatter_states", None))
            if isinstance(module, FullyShardedDataParallel):
                flat = getattr(getattr(module, "_handle", None), "flat_param", None)
                for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
                    if isinstance(getattr(flat, name, None), Tensor):
                        yield getattr(flat, name)


def _groups(module: FSDPModule) -> Iterable[Any]:
    """Return a module's FSDP2 parameter groups, in torch 2.11 or 2.13."""
    state = cast(Any, module)._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    one = () if several is not None else (state._fsdp_param_group,)
    return [group for group in (several or one) if group is not None]


def _fsdp2_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                yield from group.fsdp_params


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)


def _place(frames: Iterable[FrameType]) -> str | None:
    """Return the innermost line of the engine: ``highwater/engine/models/loss.py:84 forward``."""
    for frame in frames:
        found = _ENGINE.search(frame.f_code.co_filename)
        if found is not None:
            return f"{found[0]}:{frame.f_lineno} {frame.f_code.co_name}"
    return None
