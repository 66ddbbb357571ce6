"""Host states: AdamW with its moments in host memory, pinned if there is a GPU. Parameters,
gradients and the update stay on the device.

A step copies the moments through the device in pieces: while one piece is updated in a buffer, the
previous one is copied back from the other buffer and the next is copied in: the link is busy both
ways. A piece is updated by the kernel that ``torch.optim.AdamW(fused=True)`` calls for whole
tensors, and copies change no value: parameters and moments equal that optimizer's, bit by bit.

The buffers exist only during the optimizer's step, when there are no activations.
``model/held_bytes.py`` counts them, and the pinned memory. A step returns when all moments are back
on the host, so that code which saves them need not wait.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from highwater.engine.parallel.fsdp2 import local_shard
from highwater.nouns.objective import STREAMED, STREAMED_BUFFERS

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names in ``torch.optim.AdamW`` of the running means of gradients and of their squares."""
VECTOR = 64
"""A piece's size is a multiple of this. The kernel computes whole vectors of numbers, and the rest
of a tensor one by one, which may round differently on the CPU: with such pieces each number is
computed as it would be in the whole tensor."""


class HostStateAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` with moments on the host; state dicts are the same."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        piece: int = STREAMED,
    ) -> None:
        """``piece``: number of elements whose moments a buffer holds, a multiple of ``VECTOR``."""
        assert piece > 0
        assert piece % VECTOR == 0, "a number would be computed as in no whole tensor"
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._piece = piece
        self._link: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        """CUDA streams on which moments come and go; None until the first step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None, "the gradients are there"
        updated = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not updated:
            return
        steps = [self._state_of(parameter)["step"] for parameter, _ in updated]
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateUsage]
        shards = [local_shard(parameter.detach()) for parameter, _ in updated]
        largest = max(shards, key=Tensor.numel)
        if largest.numel():  # else this rank holds no part of any parameter
            numbers = min(self._piece, largest.numel())
            buffers = largest.new_empty(STREAMED_BUFFERS, len(MOMENTS), numbers)
            self._stream(chain.from_iterable(self._cut(*each) for each in updated), buffers)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state; at the first call it is made, of zeros."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: _zeros(parameter) for name in MOMENTS}
        return state

    def _cut(self, parameter: Tensor, group: dict[str, Any]) -> Iterator["_Piece"]:
        """Yield this rank's shard of a parameter in pieces; nothing if the shard is empty."""
        assert parameter.grad is not None
        state = self.state[parameter]
        # Views, except of a gradient with other strides than its parameter, which is only read.
        own = local_shard(parameter.detach()).view(-1)
        gradient = local_shard(parameter.grad).reshape(-1)
        moments = [local_shard(state[name]).view(-1) for name in MOMENTS]
        for start in range(0, own.numel(), self._piece):
            part = slice(start, start + self._piece)
            on_host = [moment[part] for moment in moments]
            yield _Piece(own[part], gradient[part], on_host, state["step"], group)

    def _stream(self, pieces: Iterable["_Piece"], buffers: Tensor) -> None:
        """Update the pieces one after another, each in the next free buffer."""
        coming, here, going = self._streams(buffers.device)
        if coming is not None and here is not None:
            coming.wait_stream(here)  # `here` may still read memory that the buffers now take
        left: list[torch.cuda.Event | None] = [None] * STREAMED_BUFFERS
        for number, piece in enumerate(pieces):
            place = number % STREAMED_BUFFERS
            moments = [buffer[: piece.parameter.numel()] for buffer in buffers[place]]
            on_host = piece.moments
            came = _launch(coming, left[place], _copy, on_host, moments)
            updated = _launch(here, came, _update, piece, moments)
            left[place] = _launch(going, updated, _copy, moments, on_host)
        if going is not None:
            going.synchronize()

    def _streams(
        self, device: torch.device
    ) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None, torch.cuda.Stream | None]:
        """Streams that copy moments in, update them, and copy them back; Nones on the CPU."""
        if device.type != "cuda":
            return None, None, None
        if self._link is None:
            self._link = torch.cuda.Stream(device), torch.cuda.Stream(device)
        coming, going = self._link
        return coming, torch.cuda.current_stream(device), going

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of ``torch.optim.AdamW`` into host memory.
        PyTorch's own method would move all moments to the device.
        """
        own_states = dict(self.state)
        super().load_state_dict({**state_dict, "state": {}})  # loads only the groups
        self.state.update(own_states)
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        theirs = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for parameter, number in zip(own, theirs, strict=True):
            saved = state_dict["state"].get(number)
            if saved:
                state = self._state_of(parameter)
                for name in ("step", *MOMENTS):
                    local_shard(state[name]).copy_(local_shard(torch.as_tensor(saved[name])))


class _Piece(NamedTuple):
    """A flat part of one parameter's shard, with what is needed to update it."""

    parameter: Tensor
    gradient: Tensor
    moments: Sequence[Tensor]
    """Both moments, in host memory."""
    step: Tensor
    group: dict[str, Any]


def _zeros(parameter: Tensor) -> Tensor:
    own = local_shard(parameter.detach())
    moment = torch.zeros(own.shape, dtype=own.dtype, device="cpu")
    if own.device.type == "cuda":
        moment = moment.pin_memory()
    if not isinstance(parameter, DTensor):
        return moment
    # Built as FSDP2 builds shards in host memory: `from_local` would move it to the device.
    loose: Any = parameter
    return DTensor(moment, loose._spec, requires_grad=False)


def _launch(
    stream: torch.cuda.Stream | None,
    after: torch.cuda.Event | None,
    work: Callable[..., None],
    *arguments: Any,
) -> torch.cuda.Event | None:
    """Run work on a stream after an event; returns the event of its end, None without a stream."""
    if stream is None:
        work(*arguments)
        return None
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        work(*arguments)
        done = torch.cuda.Event()
        stream.record_event(done)
        return done


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _update(piece: _Piece, moments: Sequence[Tensor]) -> None:
    """Run AdamW's update on a piece whose moments are on the parameter's device."""
    group, (mean, squares) = piece.group, moments
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage] -- as `torch.optim` calls it
        [piece.parameter],
        [piece.gradient],
        [mean],
        [squares],
        [],
        [piece.step],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
