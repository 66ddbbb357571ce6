"""AdamW whose moments are in host memory, pinned where there is a GPU; parameters and gradients
stay where they are, and so does the update.

A step takes the moments through the device in pieces: while a piece is updated in one buffer, the
piece before it goes back from the other and the next one comes, so that the link is busy both ways.
What updates a piece is the kernel that ``torch.optim.AdamW(fused=True)`` calls for whole tensors,
and a copy changes no number: parameters and moments are the same, bit by bit.

The buffers are made by a step and gone after it, so that no activation is alive beside them.
``model/footprint.py`` counts them, and the pinned memory. A step returns when all moments are back:
whoever reads them, to save them for example, has nothing to wait for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from highwater.engine.parallel.fsdp2 import local_shard
from highwater.nouns.optimizer import STREAMED, STREAMED_BUFFERS

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the running means of gradients and of their squares, as ``torch.optim.AdamW`` has
them."""
VECTOR = 64
"""Numbers that pieces are multiples of. The kernel computes whole vectors, and what is left of a
tensor one by one, which on the CPU may round otherwise: each number stays on the side that it is on
in the whole tensor."""


class HostStateAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` with moments in host memory. Its state dicts are the same,
    and either loads the other's.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        piece: int = STREAMED,
    ) -> None:
        """``piece``: numbers whose moments one buffer holds, a multiple of ``VECTOR``."""
        assert piece > 0
        assert piece % VECTOR == 0, "a number would be computed as in no whole tensor"
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._piece = piece
        self._link: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        """The streams on which moments come and go, once they have been needed."""

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
        if largest.numel():  # else this rank has no rows of any
            numbers = min(self._piece, largest.numel())
            buffers = largest.new_empty(STREAMED_BUFFERS, len(MOMENTS), numbers)
            self._stream(chain.from_iterable(self._cut(*each) for each in updated), buffers)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state, zeros at first."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: _zeros(parameter) for name in MOMENTS}
        return state

    def _cut(self, parameter: Tensor, group: dict[str, Any]) -> Iterator["_Piece"]:
        """This rank's shard of a parameter in pieces; none of an empty one."""
        assert parameter.grad is not None
        state = self.state[parameter]
        # Views, but for a gradient that does not lie as its parameter does, which is only read.
        own = local_shard(parameter.detach()).view(-1)
        gradient = local_shard(parameter.grad).reshape(-1)
        moments = [local_shard(state[name]).view(-1) for name in MOMENTS]
        for start in range(0, own.numel(), self._piece):
            part = slice(start, start + self._piece)
            there = [moment[part] for moment in moments]
            yield _Piece(own[part], gradient[part], there, state["step"], group)

    def _stream(self, pieces: Iterable["_Piece"], buffers: Tensor) -> None:
        """Update the pieces one after another, each in the buffer that is free first."""
        coming, here, going = self._streams(buffers.device)
        if coming is not None and here is not None:
            coming.wait_stream(here)  # which may still read what was in the buffers' place
        left: list[torch.cuda.Event | None] = [None] * STREAMED_BUFFERS
        for number, piece in enumerate(pieces):
            place = number % STREAMED_BUFFERS
            moments = [buffer[: piece.parameter.numel()] for buffer in buffers[place]]
            there = piece.moments
            came = _launch(coming, left[place], _copy, there, moments)
            updated = _launch(here, came, _update, piece, moments)
            left[place] = _launch(going, updated, _copy, moments, there)
        if going is not None:
            going.synchronize()

    def _streams(
        self, device: torch.device
    ) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None, torch.cuda.Stream | None]:
        """The streams on which moments come, are updated and go back; none on the CPU."""
        if device.type != "cuda":
            return None, None, None
        if self._link is None:
            self._link = torch.cuda.Stream(device), torch.cuda.Stream(device)
        coming, going = self._link
        return coming, torch.cuda.current_stream(device), going

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave, of this optimizer or of ``torch.optim.AdamW``, into
        the host's memory: PyTorch would take all moments to the device.
        """
        own_states = dict(self.state)
        super().load_state_dict({**state_dict, "state": {}})  # the groups
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
    """A part of one parameter's shard, flat, and what updates it."""

    parameter: Tensor
    gradient: Tensor
    moments: Sequence[Tensor]
    """Both, in host memory."""
    step: Tensor
    group: dict[str, Any]


def _zeros(parameter: Tensor) -> Tensor:
    """A moment of zeros in host memory, cut as the parameter is."""
    own = local_shard(parameter.detach())
    moment = torch.zeros(own.shape, dtype=own.dtype, device="cpu")
    if own.device.type == "cuda":
        moment = moment.pin_memory()
    if not isinstance(parameter, DTensor):
        return moment
    # As FSDP2 has shards in host memory: `from_local` would take it to the mesh's device.
    loose: Any = parameter
    return DTensor(moment, loose._spec, requires_grad=False)


def _launch(
    stream: torch.cuda.Stream | None,
    after: torch.cuda.Event | None,
    work: Callable[..., None],
    *arguments: Any,
) -> torch.cuda.Event | None:
    """Do work on a stream after an event; returns the event of its end, None without streams."""
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
    """AdamW's update of a piece, whose moments are on its device."""
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
