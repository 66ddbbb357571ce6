"""What sparse and dilated attention keep, by formula: pairs of a token and a key.

Exact; ``engine/attention/block_table`` counts the same of the tables that it makes.
"""

import math
from collections.abc import Iterator, Sequence

from highwater.errors import UsageError
from highwater.nouns.sparse_pattern import SparsePatternConfig

_CONTRADICTED = 0.1
"""Relative difference from which a window's share is another than the ratio that was asked for."""


def causal_pairs(length_tokens: int) -> int:
    """Pairs of a token and one that is not after it."""
    return length_tokens * (length_tokens + 1) // 2


def kept_pairs(pattern: SparsePatternConfig, length_tokens: int) -> int:
    """Pairs of a token and a key that it sees, of one head and one document.

    By a ratio each row of blocks keeps its own block, whose half is causal, and whole earlier ones;
    by a window each token what the window holds, and the global tokens before it.
    """
    if pattern.is_windowed:
        return _pairs_in_window(pattern, length_tokens)
    size, pairs = pattern.block_size, 0
    for row, count in enumerate(_counts(pattern, length_tokens)):
        tokens = min(size, length_tokens - row * size)
        pairs += (count - 1) * tokens * size + causal_pairs(tokens)
    return pairs


def kept_share(pattern: SparsePatternConfig, length_tokens: int) -> float:
    """Share of the causal pairs that a pattern keeps.

    Raises UsageError for a ratio that the pattern's window contradicts.
    """
    share = kept_pairs(pattern, length_tokens) / causal_pairs(length_tokens)
    asked = pattern.sparsity_ratio
    if not pattern.is_windowed or asked is None or asked == "adaptive":
        return share
    if abs(share / asked - 1) > _CONTRADICTED:
        raise UsageError(
            f"a window of {pattern.local_window_size} tokens keeps {share:.2%} of {length_tokens:,}"
            f" tokens' pairs, and {asked:.2%} is asked for",
            hint="leave `sparsity_ratio` out, or set `local_window_size` to what gives it",
        )
    return share


def dilated_pairs(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    length_tokens: int,
    *,
    heads: int,
    pattern: SparsePatternConfig | None = None,
    is_causal: bool = True,
) -> int:
    """Pairs that all heads together keep of one document by dilated attention, in whose segments a
    pattern may hold; of a pair that two branches keep each computes one.
    """
    total = 0
    for segment, rate in zip(segment_lengths, dilation_rates, strict=True):
        whole, rest = divmod(length_tokens, segment)
        for number in range(min(rate, heads)):
            of_heads = len(range(number, heads, rate))
            for segments, tokens in ((whole, segment), (1, rest)):
                row = len(range(number, tokens, rate))
                of_row = row * row
                if pattern is not None:
                    of_row = kept_pairs(pattern.at(length_tokens), row)
                elif is_causal:
                    of_row = causal_pairs(row)
                total += of_heads * segments * of_row
    return total


def _counts(pattern: SparsePatternConfig, length_tokens: int) -> Iterator[int]:
    """Blocks that each row keeps of those up to its own: the ratio, rounded up."""
    ratio = pattern.ratio_at(length_tokens)
    for row in range(-(-length_tokens // pattern.block_size)):
        # what is a whole number but for its last bits is one
        yield max(1, math.ceil(ratio * (row + 1) - 1e-9))


def _global_tokens(pattern: SparsePatternConfig, length_tokens: int) -> int:
    if pattern.pattern_type != "global_local":
        return 0
    return min(pattern.global_tokens, length_tokens)


def _pairs_in_window(pattern: SparsePatternConfig, length_tokens: int) -> int:
    window = min(pattern.local_window_size, length_tokens)
    further = length_tokens - window
    pairs = causal_pairs(window) + further * window
    # of the tokens further back, those that every token sees
    held = min(_global_tokens(pattern, length_tokens), further)
    return pairs + causal_pairs(held) + (further - held) * held
