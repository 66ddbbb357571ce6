"""AdamW with low-bit moments, in float32 arithmetic: 8 bits as torchao keeps them (codes with a
scale for each block of 256 elements), or bfloat16.

Only what is written back is rounded, at every update: each moment, and a parameter in bfloat16. An
8-bit moment is rounded to the nearest of 256 values times the largest of its block. A bfloat16
moment is rounded stochastically to one of its two neighbours, so that it is right on average:
rounded to the nearest, a mean of squares could only grow, since a step subtracts 0.1 % of it and
two neighbours are 0.4 % apart or more. A bfloat16 parameter is updated in float32, and rounded
stochastically too: on average no update is lost, however small.

The random numbers of an update follow from the step, the parameter and the shard, and no generator
is left changed: all that the next update depends on is in a checkpoint, and copies of a shard
(HSDP) stay equal. On a GPU the update is compiled; on the CPU there may be no compiler.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import disable_cache_limit
from torch.distributed.tensor import DTensor
from torchao.optim.quant_utils import (
    _fp32_to_bf16_sr,  # pyright: ignore[reportPrivateUsage] -- it has no other name
)
from torchao.optim.subclass_8bit import OptimState8bit

from highwater.engine.parallel.fsdp2 import local_shard
from highwater.nouns.objective import LEAST_QUANTIZED, PIECE, QUANTIZED_BLOCK, OptimizerTraits

MEAN, SQUARES = "exp_avg", "exp_avg_sq"
"""Names in ``torch.optim.AdamW`` of the running means of gradients and of their squares."""


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW whose moments are stored in fewer bits than it computes with."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        traits: OptimizerTraits,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._traits = traits

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None, "the gradients are there"
        every = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (parameter, group) in enumerate(every):
            if parameter.grad is not None:
                self._update(number, parameter, group)

    def _update(self, number: int, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in (MEAN, SQUARES):
                state[name] = self._zeros(parameter, is_signed=name == MEAN)
        state["step"] += 1
        own = local_shard(parameter.detach())
        if not own.numel():  # with more ranks than rows some shards are empty
            return
        assert parameter.grad is not None
        step, (beta1, beta2), rate = int(state["step"]), group["betas"], group["lr"]
        # Numbers that change with the step are tensors: plain ones would compile anew each time.
        correction = (1 - beta2**step) ** 0.5
        changing = (1 - rate * group["weight_decay"], rate / (1 - beta1**step), correction)
        shard = 0  # the number of this rank's shard, the same in every copy
        if isinstance(parameter, DTensor):
            shard = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
        with seeded(own.device, step, number, shard):
            update(
                own,
                local_shard(parameter.grad),
                local_shard(state[MEAN]),
                local_shard(state[SQUARES]),
                *map(torch.tensor, changing),
                beta1=beta1,
                beta2=beta2,
                epsilon=group["eps"],
            )

    def _zeros(self, parameter: Tensor, *, is_signed: bool) -> Tensor:
        """Return a moment of zeros, sharded like the parameter."""
        own = local_shard(parameter.detach())
        numbers = own.numel()
        moment: Tensor
        if not self._traits.is_quantized:
            moment = torch.zeros_like(own, dtype=torch.bfloat16)
        elif numbers >= LEAST_QUANTIZED and numbers % QUANTIZED_BLOCK == 0:
            moment = OptimState8bit.zeros(
                own.shape, is_signed, QUANTIZED_BLOCK, own.device, dtype=torch.float32
            )
        else:
            moment = torch.zeros_like(own, dtype=torch.float32)
        if not isinstance(parameter, DTensor):
            return moment
        return DTensor.from_local(
            moment,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments without a cast; PyTorch would cast them to the parameters' dtype."""
        super().load_state_dict(state_dict)
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        theirs = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for parameter, number in zip(own, theirs, strict=True):
            for name in (MEAN, SQUARES):
                if name in state_dict["state"].get(number, {}):
                    moment = state_dict["state"][number][name]
                    self.state[parameter][name] = moment.to(device=parameter.device)


def _update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    squares: Tensor,
    kept: Tensor,
    rate: Tensor,
    correction: Tensor,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """Run AdamW's update on one shard in place, in float32.

    ``kept`` is the factor by which decay multiplies a parameter, ``rate`` the learning rate divided
    by the mean's bias correction, ``correction`` the root of the squares' bias correction.
    """
    wide = gradient.float()
    mean_now = mean.float().lerp(wide, 1 - beta1)
    squares_now = squares.float().lerp(wide.square(), 1 - beta2)
    _write(mean, mean_now)
    _write(squares, squares_now)
    moved = rate * mean_now / (squares_now.sqrt() / correction + epsilon)
    _write(parameter, parameter.float() * kept - moved)


def _write(target: Tensor, number: Tensor) -> None:
    is_narrow = target.dtype is torch.bfloat16 and not isinstance(target, OptimState8bit)
    target.copy_(_fp32_to_bf16_sr(number) if is_narrow else number)


compiled = torch.compile(_update, fullgraph=True, dynamic=False)
"""Compiled ``_update``; each size of a piece has its own program."""


def update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    squares: Tensor,
    *changing: Tensor,
    **numbers: float,
) -> None:
    """Run ``_update`` on one shard, in pieces of ``PIECE`` elements."""
    with (
        torch.compiler.set_stance("default" if parameter.is_cuda else "force_eager"),
        disable_cache_limit(),
    ):
        for start in range(0, parameter.numel(), PIECE):
            end = start + PIECE  # of the last piece it may be behind the end
            pieces = (_piece(each, start, end) for each in (parameter, gradient, mean, squares))
            compiled(*pieces, *changing, **numbers)


def _piece(tensor: Tensor, start: int, end: int) -> Tensor:
    """Return a range of a tensor's flat elements, as a view if possible."""
    if not isinstance(tensor, OptimState8bit):
        return tensor.reshape(-1)[start:end]
    blocks = slice(start // QUANTIZED_BLOCK, end // QUANTIZED_BLOCK)
    codes, scales = tensor.codes.view(-1)[start:end], tensor.scale[blocks]
    return OptimState8bit(codes, scales, tensor.qmap, tensor.signed, dtype=torch.float32)


@contextmanager
def seeded(device: torch.device, *numbers: int) -> Generator[None]:
    """Context manager: seed a device's generator from ``numbers``, and restore it afterwards."""
    # The CPU's generator reads only the lower half of a seed: hash all numbers into that.
    seed = int.from_bytes(blake2b(repr(numbers).encode(), digest_size=4).digest())
    # For the CPU alone, as torch.manual_seed keeps a stack trace for each device that is not there.
    is_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_gpu else []):
        (torch if is_gpu else torch.default_generator).manual_seed(seed)
        yield
