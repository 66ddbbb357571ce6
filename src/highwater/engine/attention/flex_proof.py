"""Proofs that FlexAttention does, on small input, what gathered keys do: a compiled kernel is used
where one has passed.

Shapes:  H query heads  K key/value heads  S tokens  D head size
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

AttendAndSum = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of queries BHSD, keys and values BKSD: the output and each query's log-sum-exp."""
PROVEN_BLOCKS = 32
"""Blocks of a sequence that a kernel is proven on, which are one too many for it."""
_DIGITS = 16
"""Roundings of a number that a proven kernel may be off by, norm-relative."""


class ProofSizes(NamedTuple):
    """Of the input that a proof is made with: one sequence, two key/value heads."""

    groups: int
    """Query heads of each."""
    tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def flaw(deviations: Callable[[], Iterator[float]], sizes: ProofSizes) -> str | None:
    """Why what was compared is not the same, or does not run, in words; None where it is.

    Who asks may be within a layer that is recomputed, whose hooks would take the proof's tensors
    for the layer's, or under autocast: a thread of its own has none of that.
    """
    found: list[str | None] = []
    current = torch.cuda.current_device() if sizes.device.type == "cuda" else None

    def prove() -> None:
        if current is not None:
            torch.cuda.set_device(current)
        try:
            off = max(deviations())
        except Exception as error:  # noqa: BLE001 -- whatever a compiler raises, there is another way
            reason = str(error).partition("\n")[0] or type(error).__name__
            found.append(f"FlexAttention does not run here: {reason}")
            return
        is_exact = off < _DIGITS * torch.finfo(sizes.dtype).eps
        found.append(None if is_exact else f"FlexAttention is off by {off:.1e} in {sizes.dtype}")

    thread = threading.Thread(target=prove, name="proof of FlexAttention")
    thread.start()
    thread.join()
    return found[0]


def deviations_of(one: AttendAndSum, other: AttendAndSum, sizes: ProofSizes) -> Iterator[float]:
    """How far one attention is from the other, norm-relative: output, log-sum-exp, gradients of
    queries, keys and values.
    """
    random = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn((1, heads, sizes.tokens, sizes.head_dim), generator=random)
        .to(sizes.device, sizes.dtype)
        .requires_grad_()
        for heads in (2 * sizes.groups, 2, 2)
    ]
    found: list[Sequence[Tensor]] = []
    for attend in (one, other):
        outputs = attend(*inputs)
        random.manual_seed(1)
        upstream = [
            torch.randn(t.shape, generator=random).to(sizes.device, t.dtype) for t in outputs
        ]
        found.append((*outputs, *torch.autograd.grad(outputs, inputs, upstream)))
    for mine, theirs in zip(*found, strict=True):
        mine, theirs = mine.detach().double(), theirs.detach().double()
        yield float((mine - theirs).norm() / theirs.norm())
