"""Dense attention: exact causal attention over packed documents, by the fastest fused kernel.

Document lengths are known on the host, and a run of equal lengths becomes one batched kernel call:
no document sees another, no mask is built, and nothing quadratic is stored. In a memory-only trial
all but the last layers attend within short pieces of documents: the same kernel, the same buffers,
linear time (docs/decisions/006).

Sinks are learned scalars, one for each query head. They take part in the softmax beside the keys
but add no value, so the output is multiplied by the keys' share of the sum. In the backward pass a
kernel needs no change: it is given the output and the log-sum-exp with the sink included.

Shapes:  B documents, or 1  S packed tokens  H query heads  K key/value heads  D head size
Source: Xiao et al., https://arxiv.org/abs/2309.17453; OpenAI, gpt-oss, whose sink is a score of a
        key without a value
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from highwater.engine.attention.block_attention import asking_keeper
from highwater.engine.attention.mixed_lengths import attend_mixed
from highwater.errors import MachineError
from highwater.nouns.corpus import pieces
from highwater.nouns.hardware import Kernel, kernels
from highwater.nouns.layout import WIDEST_FUSED_HEAD

_BACKENDS: dict[Kernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


def attend(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    document_lengths: Sequence[int],
    scaling: float,
    kernel: Kernel,
    in_pieces: bool = False,
) -> Tensor:
    """Return causal attention of each document over itself, shape BSHD.

    Only ``kernel`` may run: if it cannot, PyTorch raises RuntimeError instead of taking the
    quadratic path. ``in_pieces`` is for memory-only trials: the kernel runs on the same tokens as a
    batch of short pieces. It allocates as much as for whole documents, and its output is
    meaningless. Documents that cannot be cut into pieces stay whole.
    """
    assert query_BHSD.shape[0] == 1, "documents are packed into one row"
    assert sum(document_lengths) == query_BHSD.shape[2], (
        "the documents' lengths add up to the packed tokens"
    )
    has_one_size = query_BHSD.shape[-1] == value_BKSD.shape[-1] <= WIDEST_FUSED_HEAD
    if query_BHSD.device.type == "cuda" and has_one_size and len({*document_lengths}) > 1:
        return attend_mixed(
            query_BHSD,
            key_BKSD,
            value_BKSD,
            document_lengths=document_lengths,
            scaling=scaling,
            kernel=kernel,
            in_pieces=in_pieces,
        )
    outputs: list[Tensor] = []
    start = 0
    for length, run in groupby(document_lengths):
        documents = len(list(run))
        stop = start + documents * length
        parts = pieces_of(stop - start, documents, query_BHSD.device) if in_pieces else documents
        q, k, v = (_as_batch(t, start, stop, parts) for t in (query_BHSD, key_BKSD, value_BKSD))
        # cuDNN refuses a single key: documents of one token go through flash.
        with sdpa_kernel([_BACKENDS[kernel if length > 1 else "flash"]]), asking_keeper():
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(out.transpose(1, 2).reshape(1, stop - start, *out.shape[1::2]))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def select_kernel(
    device: torch.device, dtype: torch.dtype, *, query_heads: int, kv_heads: int, head_dim: int
) -> Kernel:
    """Choose cuDNN or flash by running a small forward and backward pass; cuDNN first from Hopper
    on.

    Raises MachineError if neither runs: the quadratic kernel is never used.
    """
    reasons: list[str] = []
    for kernel in (
        kernels(torch.cuda.get_device_capability(device)) if device.type == "cuda" else ("flash",)
    ):
        try:
            prove(kernel, device, dtype, query_heads, kv_heads, head_dim)
        except RuntimeError as error:
            reasons.append(f"{kernel}: {str(error).splitlines()[0]}")
        else:
            return kernel
    raise MachineError(
        f"no fused attention kernel runs here for {query_heads} heads of size {head_dim} in "
        f"{dtype} ({'; '.join(reasons)})",
        hint="use a GPU of compute capability 8.0 or newer; `highwater doctor` lists what is here",
    )


def prove(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Run a small forward and backward pass; raises RuntimeError if the kernel does not run."""
    shapes = [(1, heads, 128, head_dim) for heads in (query_heads, kv_heads, kv_heads)]
    q, k, v = (
        torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
    )
    attend(q, k, v, document_lengths=[128], scaling=1.0, kernel=kernel).sum().backward()


def pieces_of(tokens: int, documents: int, device: torch.device) -> int:
    """Number of equal pieces for documents of ``tokens`` in all; ``documents`` if uncuttable."""
    assert device.type in ("cuda", "cpu")
    return max(documents, pieces(tokens, device.type) or 1)


def _as_batch(tensor_BHSD: Tensor, start: int, stop: int, documents: int) -> Tensor:
    """View a run of equal documents as a batch of shape (documents, heads, length, head size)."""
    # Even a slice of everything counts as indexing, whose gradient fills a tensor of zeros.
    row_HSD = tensor_BHSD.squeeze(0)
    if stop - start < tensor_BHSD.shape[2]:
        row_HSD = row_HSD[:, start:stop]
    return row_HSD.transpose(0, 1).unflatten(0, (documents, -1)).transpose(1, 2)


_PRODUCTS_AT_HAND = 2**22
"""Elements of gradient times output that are summed at once; at least one token's."""


def join_sinks_(output_BHSD: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Scale an output in place to the keys' share; return log-sum-exps with sinks, BHS."""
    joint_BHS = torch.logaddexp(log_sums_BHS, sinks_H.to(log_sums_BHS.dtype)[:, None])
    output_BHSD.mul_((log_sums_BHS - joint_BHS).exp_()[..., None])
    return joint_BHS


def sink_gradient(
    gradient_BHSD: Tensor, output_BHSD: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor | None
) -> Tensor | None:
    """Gradient of the sinks, H; None without sinks. ``output`` and ``log_sums`` include the sinks.

    A score's gradient is its weight times its value less the mean value (both times the output's
    gradient). A sink's value is 0, and the mean value is the output.
    """
    if sinks_H is None:
        return None
    wide = log_sums_BHS.dtype
    batch, heads, _, size = output_BHSD.shape
    at_once = max(1, _PRODUCTS_AT_HAND // (batch * heads * size))
    sum_H = torch.zeros(heads, dtype=wide, device=sinks_H.device)
    rows = (tensor.split(at_once, dim=2) for tensor in (gradient_BHSD, output_BHSD, log_sums_BHS))
    for gradient_BHrD, output_BHrD, log_sums_BHr in zip(*rows, strict=True):
        mean_BHr = (gradient_BHrD.to(wide) * output_BHrD).sum(-1)
        weight_BHr = (sinks_H.to(wide)[:, None] - log_sums_BHr).exp_()
        sum_H -= (weight_BHr * mean_BHr).sum((0, 2))
    return sum_H.to(sinks_H.dtype)
