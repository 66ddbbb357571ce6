"""Masks of sparse patterns, of all pairs of tokens: from the definition where there is one; which
blocks a ratio keeps is read of the table, and what is seen of them is told here.

Shapes:  B sequences  H query heads  K key/value heads  S tokens  D head size  R blocks
"""

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from highwater.engine.attention.block_table import block_tables
from highwater.nouns.sparse_pattern import SparsePatternConfig


def mask(pattern: SparsePatternConfig, query_BHSD: Tensor, key_BKSD: Tensor) -> Tensor:
    """Which key each token sees, BKSS."""
    length = query_BHSD.shape[2]
    token, other = torch.arange(length)[:, None], torch.arange(length)
    match pattern.pattern_type:
        case "local_window":
            seen = other > token - pattern.local_window_size
        case "global_local":
            seen = (other > token - pattern.local_window_size) | (other < pattern.global_tokens)
        case "block_top_k":
            best = _best_blocks(pattern, query_BHSD, key_BKSD)
            seen = _by_tokens(best, pattern.block_size, length)
        case _:
            (table,) = block_tables(pattern, length, torch.device("cpu"))
            kept_RR = torch.zeros(table.rows, table.rows, dtype=torch.bool)
            kept_RR[table.row_of_entry, table.columns[0].long()] = True
            seen = _by_tokens(kept_RR, pattern.block_size, length)
    return ((other <= token) & seen).expand(*key_BKSD.shape[:2], length, length)


def meetings(
    length: int,
    heads: int,
    branches: tuple[Sequence[int], Sequence[int]],
    seen: Callable[[int], Tensor] = lambda tokens: torch.ones(tokens, tokens).tril(),
) -> Tensor:
    """How many branches have a head's token meet a key, HSS: of each segment those at every
    ``rate``-th token attend, from the head's own offset, as ``seen`` says of as many in a row.
    """
    found = torch.zeros(heads, length, length, dtype=torch.float64)
    for segment, rate in zip(*branches, strict=True):
        for head, start in product(range(heads), range(0, length, segment)):
            attends = torch.arange(length)[start : start + segment][head % rate :: rate]
            found[head, attends[:, None], attends] += seen(len(attends)).double()
    return found


def dense(
    query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, count_XSS: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """One softmax over all keys, each as often as it counts, and the log-sum-exp; of a query that
    meets none they are zeros and minus infinity.
    """
    groups = query_BHSD.shape[1] // key_BKSD.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (key_BKSD, value_BKSD))
    scores = query_BHSD @ keys.mT * scaling + count_XSS.to(query_BHSD.dtype).log()
    has_keys = (count_XSS.sum(-1) > 0).expand(scores.shape[:-1])
    scores = scores.masked_fill(~has_keys[..., None], 0.0)
    output = (scores.softmax(-1) * has_keys[..., None]) @ values
    return output, scores.logsumexp(-1).masked_fill(~has_keys, -math.inf)


def _by_tokens(kept_XRR: Tensor, size: int, length: int) -> Tensor:
    tokens = kept_XRR.repeat_interleave(size, -2).repeat_interleave(size, -1)
    return tokens[..., :length, :length]


def _best_blocks(pattern: SparsePatternConfig, query_BHSD: Tensor, key_BKSD: Tensor) -> Tensor:
    """For each row of blocks its own, and those whose mean keys score highest with its mean query;
    BKRR.
    """
    grouped = query_BHSD.detach().unflatten(1, (key_BKSD.shape[1], -1)).mean(2)
    query_BKRD, key_BKRD = (
        torch.stack([part.mean(2) for part in each.split(pattern.block_size, dim=2)], dim=2)
        for each in (grouped, key_BKSD.detach())
    )
    scores = query_BKRD @ key_BKRD.mT
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row in range(scores.shape[-1]):
        count = max(1, math.ceil(pattern.ratio_at(query_BHSD.shape[2]) * (row + 1) - 1e-9))
        of_row = scores[..., row, : row + 1].clone()
        of_row[..., row] = math.inf
        kept[..., row, :].scatter_(-1, of_row.topk(count, dim=-1).indices, value=True)
    return kept
