"""The gated delta rule by its definition, token by token, and inputs for it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.engine.attention.gated_delta import DeltaHeads

HEADS = DeltaHeads(key_heads=2, value_heads=4, key_size=6, value_size=5)
TAPS, EPSILON = 4, 1e-6


def inputs(tokens: int, *, decay: float = 1.0, heads: DeltaHeads = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels, value_heads = sum(heads.channels), heads.value_heads
    found = [
        numbers(tokens, channels),
        numbers(tokens, value_heads, heads.value_size),
        -decay * numbers(tokens, value_heads).exp(),
        numbers(tokens, value_heads).sigmoid(),
        numbers(channels, TAPS) / 2,
        1 + numbers(heads.value_size) / 4,
    ]
    return [each.requires_grad_() for each in found]


def defined(leaves: list[Tensor], heads: DeltaHeads) -> Tensor:
    """One document's outputs, by the definition: S ← exp(g) S, then the part of S that answers k is
    moved by beta towards v, then S answers q.
    """
    qkv, gate, log_decay, beta, convolution, norm = leaves
    before = torch.cat((qkv.new_zeros(TAPS - 1, qkv.shape[1]), qkv))
    convolved = sum(before[tap : tap + len(qkv)] * convolution[:, tap] for tap in range(TAPS))
    query, key, value = F.silu(convolved).split(heads.channels, dim=1)
    per_key = heads.value_heads // heads.key_heads
    outputs = []
    for head in range(heads.value_heads):
        of_keys = slice(head // per_key * heads.key_size, (head // per_key + 1) * heads.key_size)
        of_values = slice(head * heads.value_size, (head + 1) * heads.value_size)
        state = qkv.new_zeros(heads.key_size, heads.value_size)
        rows = []
        for token in range(len(qkv)):
            q, k = (
                each[token, of_keys] / (each[token, of_keys].square().sum() + 1e-6).sqrt()
                for each in (query, key)
            )
            state = state * log_decay[token, head].exp()
            wrong = value[token, of_values] - k @ state
            state = state + beta[token, head] * torch.outer(k, wrong)
            rows.append((q / heads.key_size**0.5) @ state)
        outputs.append(torch.stack(rows))
    out = torch.stack(outputs, dim=1)
    normed = out / (out.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return normed * norm * F.silu(gate)


def by_documents(leaves: list[Tensor], lengths: tuple[int, ...], heads: DeltaHeads) -> Tensor:
    documents = zip(*[each.split(lengths) for each in leaves[:4]], strict=True)
    return torch.cat([defined([*document, *leaves[4:]], heads) for document in documents])
