"""Block attention: fused attention of some queries over some keys, with the log-sum-exp that merges
blocks, forward and backward, by the kernel of the hardware.

PyTorch's public attention does not return the log-sum-exp; the operators beneath it, used here, do.

Shapes:  B documents  Q queries  L keys  H query heads  K key/value heads  D head size

Outputs can be kept for a layer's recomputation. Each attention with an autograd function of its own
asks ``attended`` before it computes, so the operators of ``torch.utils.checkpoint`` need not list
the fused kernels inside these functions; PyTorch's own asks within ``asking_keeper``.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from highwater.nouns.hardware import Kernel

_VECTOR = 8
"""Flash attention on a GPU needs head sizes that are a multiple of this; others are padded."""
aten: Any = torch.ops.aten
_OPERATORS = [
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operators that PyTorch's dense attention may end in, on GPUs and on the CPU."""


class Block(NamedTuple):
    """One kernel call: queries that all see the same keys and values, causally or fully."""

    query_BHQD: Tensor
    key_BKLD: Tensor
    value_BKLD: Tensor
    is_causal: bool
    """True if a query sees only the keys up to its own position; else it sees all of them."""
    scaling: float
    kernel: Kernel

    @property
    def _operator(self) -> Kernel | None:
        """Library whose operators run; None on the CPU. Flash replaces cuDNN for a single key."""
        if self.query_BHQD.device.type == "cpu":
            return None
        return self.kernel if self.key_BKLD.shape[2] > 1 else "flash"

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, BHQD, and each query's log-sum-exp, BHQ, in float32 or wider."""
        match self._operator:
            case "cudnn":
                output, log_sums_BHQ1, *_ = aten._scaled_dot_product_cudnn_attention(
                    *self[:3], None, True, 0.0, self.is_causal, False, scale=self.scaling
                )
                return output, log_sums_BHQ1.squeeze(-1)
            case "flash":
                size = self.query_BHQD.shape[-1]
                padded = [_padded(tensor) for tensor in self[:3]]
                output, log_sums_BHQ, *_ = aten._scaled_dot_product_flash_attention(
                    *padded, 0.0, self.is_causal, False, scale=self.scaling
                )
                return output[..., :size], log_sums_BHQ
            case None:
                key, value = (_for_every_head(t, self.query_BHQD) for t in self[1:3])
                return aten._scaled_dot_product_flash_attention_for_cpu(
                    self.query_BHQD, key, value, 0.0, self.is_causal, scale=self.scaling
                )

    def backward(
        self, gradient_BHQD: Tensor, output_BHQD: Tensor, log_sums_BHQ: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, BHQD, keys and values, BKLD, from this block's share of the
        softmax. ``output`` and ``log_sums`` are those over all keys, of this and other blocks.
        """
        match self._operator:
            case "cudnn":
                # PyTorch caches cuDNN's plans by the strides of queries, keys and values alone: it
                # would reuse a plan that was made for other strides of the sums.
                sums_BHQ1 = log_sums_BHQ.contiguous()[..., None]
                return aten._scaled_dot_product_cudnn_attention_backward(
                    *(gradient_BHQD, *self[:3], output_BHQD, sums_BHQ1),
                    *(*_no_dropout(self.query_BHQD), None, *self._lengths),
                    *(0.0, self.is_causal),
                    scale=self.scaling,
                )
            case "flash":
                size = self.query_BHQD.shape[-1]
                tensors = (gradient_BHQD, *self[:3], output_BHQD)
                found = aten._scaled_dot_product_flash_attention_backward(
                    *(*(_padded(tensor) for tensor in tensors), log_sums_BHQ.contiguous()),
                    *(*self._lengths, 0.0, self.is_causal, *_no_dropout(self.query_BHQD)),
                    scale=self.scaling,
                )
                query, key, value = (tensor[..., :size] for tensor in found)
                return query, key, value
            case None:
                return self._backward_on_cpu(gradient_BHQD, output_BHQD, log_sums_BHQ)

    @property
    def _lengths(self) -> tuple[None, None, int, int]:
        """Length arguments of equal documents: no cumulative lengths, then the longest."""
        return None, None, self.query_BHQD.shape[2], self.key_BKLD.shape[2]

    def _backward_on_cpu(
        self, gradient_BHQD: Tensor, output_BHQD: Tensor, log_sums_BHQ: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.key_BKLD.shape[1]
        key, value = (_for_every_head(t, self.query_BHQD) for t in self[1:3])
        query_gradient, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient_BHQD, self.query_BHQD, key, value, output_BHQD, log_sums_BHQ),
            *(0.0, self.is_causal),
            scale=self.scaling,
        )
        key_gradient, value_gradient = (t.unflatten(1, (heads, -1)).sum(dim=2) for t in others)
        return query_gradient, key_gradient, value_gradient


class WindowedBlock(NamedTuple):
    """Sliding-window attention of documents of equal length on a GPU, by flash attention.

    Whether the kernel computes windows right is checked in engine/attention/kernel_proof.
    """

    query_BHSD: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    scaling: float
    window_tokens: int

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the attention output, BHSD, and the log-sum-exp of each query, BHS, in float32."""
        size = self.query_BHSD.shape[-1]
        output_BSHD, log_sums_BHS, *_ = aten._flash_attention_forward(
            *_by_tokens(self[:3]), *(*self._lengths, 0.0, True, False), **self._window
        )
        return output_BSHD.transpose(1, 2)[..., :size], log_sums_BHS

    def backward(
        self, gradient_BHSD: Tensor, output_BHSD: Tensor, log_sums_BHS: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, BHSD, keys and values, BKSD, from these keys' share of the
        softmax. ``output`` and ``log_sums`` include everything in the softmax, such as sinks.
        """
        size = self.query_BHSD.shape[-1]
        found = aten._flash_attention_backward(
            *_by_tokens((gradient_BHSD, *self[:3], output_BHSD)),
            log_sums_BHS.contiguous(),
            *(*self._lengths, 0.0, True, *_no_dropout(self.query_BHSD)),
            **self._window,
        )
        query, key, value = (tensor.transpose(1, 2)[..., :size] for tensor in found)
        return query, key, value

    @property
    def _lengths(self) -> tuple[None, None, int, int]:
        return None, None, self.query_BHSD.shape[2], self.key_BKSD.shape[2]

    @property
    def _window(self) -> dict[str, Any]:
        # the kernel does not count the token's own key in its window
        left = self.window_tokens - 1
        return {"scale": self.scaling, "window_size_left": left, "window_size_right": 0}


class VariedBlock(NamedTuple):
    """Attention of each document's last queries over all its keys, in one call of flash attention.

    Shapes:  q queries of all documents  k keys of all documents  n documents
    """

    query_qHD: Tensor
    key_kKD: Tensor
    value_kKD: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    scaling: float
    is_causal: bool = True
    """True if a query sees only the keys up to its own position; else it sees all of them."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, qHD, and log-sum-exps: Hq on a GPU; 1Hk, not causal 1Hq, on a CPU."""
        if self.query_qHD.device.type == "cpu":
            outputs, sums = zip(*(each.forward() for each in self._documents()), strict=True)
            return torch.cat(self._last(outputs)), torch.cat(sums, dim=-1)
        size = self.query_qHD.shape[-1]
        output_qHD, log_sums, *_ = aten._flash_attention_forward(
            *(_padded(tensor) for tensor in self[:3]),
            *(*self._borders, 0.0, self.is_causal, False),
            scale=self.scaling,
        )
        return output_qHD[..., :size], log_sums

    def backward(
        self, gradient_qHD: Tensor, output_qHD: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, keys and values: qHD, kKD and kKD."""
        if self.query_qHD.device.type == "cpu":
            return self._backward_on_cpu(gradient_qHD, output_qHD, log_sums)
        size = self.query_qHD.shape[-1]
        found = aten._flash_attention_backward(
            *(_padded(tensor) for tensor in (gradient_qHD, *self[:3], output_qHD)),
            log_sums,
            *(*self._borders, 0.0, self.is_causal, *_no_dropout(self.query_qHD)),
            scale=self.scaling,
        )
        query, key, value = (tensor[..., :size] for tensor in found)
        return query, key, value

    @property
    def _borders(self) -> tuple[Tensor, Tensor, int, int]:
        device = self.query_qHD.device
        both = self.query_lengths, self.key_lengths
        query_n, key_n = (_borders_of(lengths, device) for lengths in both)
        return query_n, key_n, max(self.query_lengths), max(self.key_lengths)

    def _backward_on_cpu(
        self, gradient_qHD: Tensor, output_qHD: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums_BHk = log_sums.flatten(0, -2)[None]
        each = zip(
            self._documents(),
            self._behind_zeros(gradient_qHD),
            self._behind_zeros(output_qHD),
            sums_BHk.split(self.key_lengths if self.is_causal else self.query_lengths, dim=-1),
            strict=True,
        )
        found = [block.backward(*tensors) for block, *tensors in each]
        queries, *others = zip(*found, strict=True)
        key, value = (torch.cat([t[0].transpose(0, 1) for t in tensors]) for tensors in others)
        return torch.cat(self._last(queries)), key, value

    def _documents(self) -> list[Block]:
        """Return a block for each document; causal ones have zeros for missing queries."""
        each = zip(
            self._behind_zeros(self.query_qHD),
            self.key_kKD.split(self.key_lengths),
            self.value_kKD.split(self.key_lengths),
            strict=True,
        )
        how = (self.is_causal, self.scaling, "flash")
        return [
            Block(query, key.transpose(0, 1)[None], value.transpose(0, 1)[None], *how)
            for query, key, value in each
        ]

    def _behind_zeros(self, tensor_qHD: Tensor) -> list[Tensor]:
        lengths = zip(tensor_qHD.split(self.query_lengths), self.key_lengths, strict=True)
        return [
            F.pad(part.transpose(0, 1), (0, 0, keys - len(part) if self.is_causal else 0, 0))[None]
            for part, keys in lengths
        ]

    def _last(self, tensors_BHkD: Iterable[Tensor]) -> list[Tensor]:
        lengths = zip(tensors_BHkD, self.query_lengths, strict=True)
        return [tensor[0].transpose(0, 1)[-count:] for tensor, count in lengths]


@lru_cache(maxsize=1024)
def _borders_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the offset of each document's first token, then their total length; int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def merge_(
    output_XD: Tensor, log_sums_X: Tensor, found: tuple[Tensor, Tensor], *, is_first: bool = False
) -> None:
    """Merge ``found``, a partial output and log-sum-exp over further keys, into ``output`` and
    ``log_sums`` in place.

    With ``is_first`` both are overwritten: they may be uninitialised.
    """
    partial, its_sums = found
    if is_first:
        output_XD.copy_(partial)
        log_sums_X.copy_(its_sums)
        return
    both = torch.logaddexp(log_sums_X, its_sums)
    output_XD.mul_((log_sums_X - both).exp_()[..., None])
    output_XD.addcmul_(partial, (its_sums - both).exp_()[..., None])
    log_sums_X.copy_(both)


def _by_tokens(tensors_BXSD: Iterable[Tensor]) -> list[Tensor]:
    """Pad and transpose tensors to BSXD, as flash attention's own operators take them."""
    return [_padded(tensor).transpose(1, 2) for tensor in tensors_BXSD]


def _padded(tensor_BXSD: Tensor) -> Tensor:
    """Pad each head with zeros to a size that flash attention takes."""
    rest = -tensor_BXSD.shape[-1] % _VECTOR
    return F.pad(tensor_BXSD, (0, rest)) if rest else tensor_BXSD


def _for_every_head(tensor_BKLD: Tensor, query_BHQD: Tensor) -> Tensor:
    """Repeat keys or values for every query head, BHLD: the CPU's operator has no head groups."""
    repeats = query_BHQD.shape[1] // tensor_BKLD.shape[1]
    return tensor_BKLD.repeat_interleave(repeats, dim=1)


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty seed and an empty offset for dropout, which is 0."""
    none = torch.empty(0, dtype=torch.long, device=query.device)
    return none, none


class KeptByLayer(Protocol):
    """What a layer keeps tensors in for its backward pass; see engine/activations/host."""

    def keep(self, tensors: Sequence[Any]) -> None:
        """Keep one group of tensors for the backward pass."""
        ...

    def take(self) -> Sequence[Any]:
        """Return the oldest group of tensors, and remove it."""
        ...


Attended = tuple[Tensor, ...]
"""Attention output, and the log-sum-exps of the queries."""
Keeping = Callable[[Callable[[], Attended]], Attended]
"""Function that takes an attention call and returns its result, computed now or kept before."""
_KEPT: ContextVar[Keeping | None] = ContextVar("kept in recompute", default=None)


def attended(attend: Callable[[], Attended]) -> Attended:
    """Result of ``attend``; in a recomputation the one that the forward pass kept, if any."""
    kept = _KEPT.get()
    return attend() if kept is None else kept(attend)


class _AsksKeeper(TorchDispatchMode):
    """Dispatch mode that makes PyTorch's own dense attention operators call ``attended``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if func not in _OPERATORS:
            return call()
        found: tuple[Any, ...] = attended(call)  # lengths and seeds are kept too
        # detached, as autograd makes the returned tensors its own
        return tuple(t.detach() if isinstance(t, Tensor) else t for t in found)


def asking_keeper() -> AbstractContextManager[Any]:
    """A context for one call of PyTorch's attention, whose outputs a layer may keep. It encloses
    only that call: everything inside costs several times as much CPU time.
    """
    return nullcontext() if _KEPT.get() is None else _AsksKeeper()


def kept_in_recompute(
    layer: KeptByLayer,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts for ``torch.utils.checkpoint``, for a layer's forward pass and
    recomputation: attention outputs are kept in the first and given back in the second.
    """
    return keeping(layer.keep), giving(lambda: tuple(layer.take()))


@contextmanager
def keeping(keep: Callable[[Attended], None]) -> Generator[None]:
    """Context manager: pass attention outputs to ``keep``. If there is an outer context, it also
    keeps the outputs, or provides them.
    """
    outer = _KEPT.get()

    def kept(attend: Callable[[], Attended]) -> Attended:
        found = attend() if outer is None else outer(attend)
        keep(found)
        return found

    with _set(kept):
        yield


def giving(take: Callable[[], Attended]) -> AbstractContextManager[None]:
    """Context manager: attention outputs come from ``take``, and are not computed."""
    return _set(lambda _: take())


@contextmanager
def _set(kept: Keeping) -> Generator[None]:
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
