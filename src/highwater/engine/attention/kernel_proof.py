"""Kernel proofs: compare compiled kernels with the plain path on small input before they are used:
flash attention's sliding windows, and FlexAttention against gathered keys.

Shapes:  H query heads  K key/value heads  S tokens  D head size
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention.block_attention import WindowedBlock
from highwater.engine.attention.plain_block import PlainBlock

_QUERY_HEADS, _KV_HEADS, _WINDOW = 4, 2, 37
_LENGTHS = (131, 258)
"""Lengths tested: partly filled tiles of queries and keys, both beyond the window."""
PROOF_TOLERANCE = 0.02
"""Norm-relative error allowed in bfloat16 and float16: one rounding of each probability. A window
that is off by one token gives 0.1."""


@lru_cache(maxsize=64)
def computes_windows(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if flash attention computes windows of this head size correctly on this device.

    The output and every gradient are compared. If False, the plain path computes windows.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        return all(_equals_plain(device, dtype, head_dim, length) for length in _LENGTHS)
    except RuntimeError:  # the kernel refuses: the card is too old, or heads are too large
        return False


def _equals_plain(device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def tensor(heads: int) -> Tensor:
        shape = (2, length, heads, head_dim)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        return drawn.to(device, dtype).transpose(1, 2)

    query, upstream = tensor(_QUERY_HEADS), tensor(_QUERY_HEADS)
    key, value = tensor(_KV_HEADS), tensor(_KV_HEADS)
    scaling = head_dim**-0.5
    flash = WindowedBlock(query, key, value, scaling, _WINDOW)
    plain = PlainBlock(query.float(), key.float(), value.float(), scaling, _WINDOW)
    output, log_sums = flash.forward()
    wanted_output, wanted_sums = plain.forward()
    ours = (output, log_sums, *flash.backward(upstream, output, log_sums))
    gradients = plain.backward(upstream.float(), wanted_output, wanted_sums)
    wanted = (wanted_output, wanted_sums, *gradients)
    return all(
        bool((mine.float() - other).norm() <= PROOF_TOLERANCE * other.norm())
        for mine, other in zip(ours, wanted, strict=True)
    )


AttendAndSum = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of queries, BHSD, over keys and values, BKSD: output and each query's log-sum-exp."""
PROVEN_BLOCKS = 32
"""Whole blocks in the sequence that a kernel is proven on; the sequence has one token more."""
_DIGITS = 16
"""Norm-relative error allowed to a proven kernel, in units of the dtype's rounding (eps)."""


class ProofSizes(NamedTuple):
    """Sizes of the small input on which a kernel is compared with plain attention."""

    groups: int
    """Query heads of each key/value head."""
    tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def flaw(deviations: Callable[[], Iterator[float]], sizes: ProofSizes) -> str | None:
    """Reason why two attentions differ, or why one fails to run; None if they agree.

    The caller may be inside a recomputed layer, whose hooks would take the proof's tensors for the
    layer's, or under autocast. So the proof runs in a new thread, without either.
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
    """Yield norm-relative errors of output, log-sum-exp, and gradients of each input."""
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
