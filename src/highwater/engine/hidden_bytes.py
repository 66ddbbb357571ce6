"""Hidden bytes: what a kernel takes of the allocator for itself, and gives back before it returns. No fake tensor shows it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten: Any = torch.ops.aten


def nothing(_: Sequence[Any]) -> list[int]:
    """Most operators."""
    return []


def _in_flash_backward(args: Sequence[Any]) -> list[int]:
    """Q's gradient in float32; where query heads share keys, k's and v's for every one of them. Source: docs/results/layer."""
    query, key = args[1], args[2]
    shared = query.shape[1] != key.shape[1]
    return [4 * query.numel()] + ([query.element_size() * query.numel()] * 2 if shared else [])


def _in_cudnn_backward(args: Sequence[Any]) -> list[int]:
    """One workspace for all of it and a float32 number per token and query head. Source: docs/results/predict/histories.json.gz."""
    query = args[1]
    return [sum(_in_flash_backward(args)) + 4 * query.numel() // query.shape[-1] + 256]


def in_embedding_backward(args: Sequence[Any]) -> list[int]:
    """Past 3,072 tokens: float32 sums of ten sorted rows each. Source: ATen/native/cuda/EmbeddingBackwardKernel.cu."""
    gradient, tokens, vocabulary = args[0], args[1].numel(), args[2]
    width = -(-gradient.shape[-1] // 32) * 32
    return [4 * width * (tokens // 10 + min(tokens, vocabulary))] if tokens > 3072 else []


HIDDEN: dict[Any, Callable[[Sequence[Any]], list[int]]] = {
    aten.embedding_dense_backward.default: in_embedding_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _in_cudnn_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _in_flash_backward,
}
"""Bytes that an operator takes for itself and gives back before it returns, by operator."""
