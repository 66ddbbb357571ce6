"""Exact causal attention over packed documents, by the fastest fused kernel of the hardware.

Documents are known by their lengths on the host, and a run of equal lengths becomes one batched
kernel call. Packed documents therefore never see each other, no mask is ever built, and nothing
quadratic is ever stored.

In a memory-only trial all layers but the last ones attend within short pieces: the same kernel, the
same buffers, linear time (docs/decisions/006).

Shapes:  B 1  S packed tokens  H query heads  K key/value heads  D head size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from highwater.attention.ulysses import attend_sharded
from highwater.errors import MachineError, ModelError
from highwater.parallel.sequence_layout import SequenceLayout
from highwater.spec.hardware import Kernel, kernels
from highwater.spec.pieces import pieces

_numbers = count(1)
"""Numbers for the names of registrations: two models in one process keep their calls apart."""
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
    """Causal attention of each document over itself, shape BSHD.

    Only ``kernel`` may run: where it cannot, PyTorch raises RuntimeError instead of taking the
    quadratic path. ``in_pieces`` is for memory alone: the kernel runs on the same tokens as a batch
    of short pieces. It allocates what it would for the whole documents, and its output means
    nothing. Documents that cannot be cut stay whole.
    """
    assert query_BHSD.shape[0] == 1, "documents are packed into one row"
    assert sum(document_lengths) == query_BHSD.shape[2], (
        "the documents' lengths add up to the packed tokens"
    )
    outputs: list[Tensor] = []
    start = 0
    for length, run in groupby(document_lengths):
        documents = len(list(run))
        stop = start + documents * length
        parts = _cut(stop - start, documents, query_BHSD.device) if in_pieces else documents
        q, k, v = (_as_batch(t, start, stop, parts) for t in (query_BHSD, key_BKSD, value_BKSD))
        # cuDNN refuses a single key: documents of one token go through flash.
        with sdpa_kernel([_BACKENDS[kernel if length > 1 else "flash"]]):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(out.transpose(1, 2).reshape(1, stop - start, *out.shape[1::2]))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def select_kernel(
    device: torch.device, dtype: torch.dtype, *, query_heads: int, kv_heads: int, head_dim: int
) -> Kernel:
    """Choose the kernel that a small forward and backward pass shows to run: cuDNN or flash.

    From Hopper on cuDNN is tried first.

    Raises MachineError where neither runs: the quadratic kernel is never an answer.
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
    """Run a small forward and backward pass; RuntimeError where the kernel does not run."""
    shapes = [(1, heads, 128, head_dim) for heads in (query_heads, kv_heads, kv_heads)]
    q, k, v = (
        torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
    )
    attend(q, k, v, document_lengths=[128], scaling=1.0, kernel=kernel).sum().backward()


@dataclass(frozen=True, slots=True)
class Attention:
    """Our attention as transformers knows it, with the modules that have called it."""

    name: str
    """The value of ``attn_implementation`` to build the model with."""
    callers: set[nn.Module]
    """The attention modules that came through here: one for each layer.

    With fewer, the model mixes tokens in some other way too.
    """
    group: dist.ProcessGroup | None = None
    """The ranks that share each sequence; None where every rank has sequences of its own."""

    @property
    def rank(self) -> int:
        """This rank's number among those that share a sequence."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def layout_of(self, document_lengths: Sequence[int]) -> SequenceLayout:
        """How those ranks share a packed row of these documents."""
        degree = 1 if self.group is None else dist.get_world_size(self.group)
        return SequenceLayout(tuple(document_lengths), ulysses_degree=degree)


def register(
    kernel: Kernel, *, group: dist.ProcessGroup | None = None, depth: int | None = None
) -> Attention:
    """Register ``attend`` with transformers for this process.

    With a ``group`` its ranks share each sequence by Ulysses; ``document_lengths`` stay those of
    the whole sequence. With a ``depth`` only the last ``depth`` layers attend over whole documents,
    the others in pieces.
    """
    callers: set[nn.Module] = set()

    def interface(
        module: nn.Module,
        query_BHSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        document_lengths: Sequence[int] | None = None,
        **features: Any,
    ) -> tuple[Tensor, None]:
        callers.add(module)
        if document_lengths is None:
            raise _unsupported(module, "no word of the documents, which would see each other")
        if attention_mask is not None:
            raise _unsupported(module, f"a mask of its own, of shape {tuple(attention_mask.shape)}")
        _refuse_features(module, features, longest=max(document_lengths))
        scale = query_BHSD.shape[-1] ** -0.5 if scaling is None else scaling
        in_pieces = depth is not None and _layers_from_the_end(module) > depth
        ours = partial(
            attend,
            document_lengths=document_lengths,
            scaling=scale,
            kernel=kernel,
            in_pieces=in_pieces,
        )
        if group is None:
            return ours(query_BHSD, key_BKSD, value_BKSD), None
        return attend_sharded(query_BHSD, key_BKSD, value_BKSD, group=group, attend=ours), None

    name = f"highwater_dense_{next(_numbers)}"
    AttentionInterface.register(name, interface)
    return Attention(name, callers, group)


def _cut(tokens: int, documents: int, device: torch.device) -> int:
    """Pieces that stand for a run of documents; ``documents`` itself where these cannot be cut.

    A run that is short already stays as it is too.
    """
    assert device.type in ("cuda", "cpu")
    return max(documents, pieces(tokens, device.type) or 1)


def _as_batch(tensor_BHSD: Tensor, start: int, stop: int, documents: int) -> Tensor:
    """View a run of equal documents as a batch of shape (documents, heads, length, head size)."""
    # A slice of everything would be indexing still, whose gradient fills a tensor of zeros.
    row_HSD = tensor_BHSD.squeeze(0)
    if stop - start < tensor_BHSD.shape[2]:
        row_HSD = row_HSD[:, start:stop]
    return row_HSD.transpose(0, 1).unflatten(0, (documents, -1)).transpose(1, 2)


def _layers_from_the_end(module: nn.Module) -> int:
    """Position of the module's layer counted from the last one, which is 1.

    Raises ModelError for a module that does not know its layer.
    """
    index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
    if not isinstance(index, int) or config is None:
        raise ModelError(
            f"{type(module).__name__} does not know its layer, so that none can be the one with "
            f"the whole attention",
            hint="leave `--attention-depth` and `--proof` out",
        )
    return config.num_hidden_layers - index


def _refuse_features(module: nn.Module, features: dict[str, Any], *, longest: int) -> None:
    """Raise ModelError for a feature that this attention does not compute."""
    # A family that does not hand its window on has put it into the mask, which it was not asked
    # for. There 0 means no window.
    own = getattr(getattr(module, "config", None), "sliding_window", None) or None
    window = features.get("sliding_window", own)
    if window is not None and window < longest:
        raise _unsupported(
            module, f"a sliding window of {window} tokens, too few for documents of {longest}"
        )
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if features.get(name) is not None:
            raise _unsupported(module, name)
    if features.get("dropout"):
        raise _unsupported(module, "dropout")
    if features.get("is_causal") is False:
        raise _unsupported(module, "no causal order")


def _unsupported(module: nn.Module, feature: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} attends with {feature}, which is not supported",
        hint="use a family of full attention in every layer, for example Qwen3, Llama or Qwen3-MoE",
    )
