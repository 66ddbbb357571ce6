"""Kernel workspaces: what a kernel takes of the allocator for itself, and gives back before it
returns. No fake tensor shows it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from highwater.nouns.events import column_sums

aten: Any = torch.ops.aten


def _in_flash_backward(args: Sequence[Any]) -> list[int]:
    """A float32 number per token and query head, q's gradient in float32, of heads as large as a
    multiple of 32; where query heads share keys, k's and v's for every one of them. Source:
    docs/results/layer; what H200s recorded in docs/results/lab/trinity_trials.json; tests/gpu.
    """
    per_row, of_query, *every_head = _in_backward(args)
    head = args[1].shape[-1]
    return [per_row, of_query // head * (-(-head // 32) * 32), *every_head]


def _in_windowed_backward(args: Sequence[Any]) -> list[int]:
    """As flash attention's, of tensors whose heads come behind their tokens."""
    assert args[1].ndim == 4, "trials have no rows of unlike documents"
    by_heads = [tensor.transpose(1, 2) for tensor in args[:3]]
    return _in_flash_backward(by_heads)


def _in_cudnn_backward(args: Sequence[Any]) -> list[int]:
    """Bytes of one workspace for all that flash attention takes piece by piece, of heads as they
    are, and 256 more. Source: docs/results/lab/histories.json.gz.
    """
    return [sum(_in_backward(args)) + 256]


def _in_backward(args: Sequence[Any]) -> list[int]:
    query, key = args[1], args[2]
    repeats = query.shape[1] // key.shape[1]
    every_head = [key.element_size() * repeats * key.numel()] * 2 if repeats > 1 else []
    return [4 * query.numel() // query.shape[-1], 4 * query.numel(), *every_head]


def _in_embedding_backward(args: Sequence[Any]) -> list[int]:
    """Bytes of float32 sums of ten sorted rows each, past 3,072 tokens. Source:
    ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    gradient, tokens, vocabulary = args[0], args[1].numel(), args[2]
    width = -(-gradient.shape[-1] // 32) * 32
    return [4 * width * (tokens // 10 + min(tokens, vocabulary))] if tokens > 3072 else []


def in_column_sums(args: Sequence[Any], *, resident_threads: int) -> list[int]:
    """Bytes that sums over all dimensions but the last take: nouns/events.py."""
    inputs = args[0]
    if inputs.ndim < 2 or not inputs.numel() or inputs.stride(-1) != 1:
        return []
    if {dim % inputs.ndim for dim in args[1] or range(inputs.ndim)} != set(range(inputs.ndim - 1)):
        return []
    rows, columns = prod(inputs.shape[:-1]), inputs.shape[-1]
    taken = column_sums(rows, columns, resident_threads=resident_threads)
    return list(taken) if taken.partial_bytes else []


WORKSPACES: dict[Any, Callable[[Sequence[Any]], list[int]]] = {
    aten.embedding_dense_backward.default: _in_embedding_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _in_cudnn_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _in_flash_backward,
    aten._flash_attention_backward.default: _in_windowed_backward,
}
"""Bytes that an operator takes for itself and gives back before it returns, by operator."""
