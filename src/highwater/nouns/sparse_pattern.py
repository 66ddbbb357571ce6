"""Sparse patterns: which keys the tokens of a sequence keep, in blocks, and what share of them.

Attention is causal: shares are of the pairs of a token and one that is not after it.

Source: the published ``SparsePatternConfig`` and its lengths; ``dilated_sparse`` keeps blocks at
equal distances back from a row's own; ``strided`` half so, and half a row's last blocks, as
Child et al. do by token, https://arxiv.org/abs/1904.10509; ``random`` draws them, spread evenly.
Pairs that are kept are exact; ``engine/attention/block_table`` counts the same in its tables.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.declaration import word_hint

PatternType = Literal[
    "local_window", "global_local", "dilated_sparse", "strided", "random", "block_top_k"
]
SparsityRatio = float | Literal["adaptive"] | None
WINDOWED: tuple[PatternType, ...] = ("local_window", "global_local")
"""Patterns that a window defines, and no ratio."""
READ_BY: dict[str, tuple[PatternType, ...]] = {
    "local_window_size": WINDOWED,
    "global_tokens": ("global_local",),
}
"""Fields that only some patterns read, and these patterns."""
DEFAULT_RATIO = 0.1
MOST_BLOCK_TOKENS = 4096
"""Most tokens of a block: the scores of a pair of blocks are all in memory at once."""
SPARSE_KERNEL_BLOCK = 64
"""On GPUs a block is a multiple of so many tokens. Source: the kernels of FlexAttention."""
ADAPTIVE = ((65_536, 0.05), (131_072, 0.02), (None, 0.01))
"""The published shares: 5 % up to 65,536 tokens, 2 % up to 131,072, 1 % above."""


_LEAST = {"block_size": 1, "local_window_size": 1, "global_tokens": 0, "seed": 0}


def check_word(name: str, value: object, words: tuple[str, ...]) -> None:
    """Raise UsageError if ``value`` is not in ``words``; the hint has the most similar word."""
    if value in words:
        return
    listed = "`highwater schema` lists every setting"
    hint = word_hint(name, str(value), words, typed=f'{name}="{{}}"'.format, listed=listed)
    raise UsageError(f"{name} {value!r} is none of {', '.join(words)}", hint=hint)


def is_count(value: object, *, least: int = 1) -> bool:
    """True if a value is a whole number, and at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def refuse_branches(lengths: Sequence[int], rates: Sequence[int]) -> None:
    """Raise UsageError for invalid segment lengths and dilation rates of dilated attention."""
    if len(lengths) != len(rates) or not lengths:
        raise UsageError(
            f"{len(lengths)} segment lengths and {len(rates)} dilation rates",
            hint="give a rate for each segment length",
        )
    for what, counts in (("segment lengths", lengths), ("dilation rates", rates)):
        if not all(map(is_count, counts)):
            raise UsageError(f"{what} {list(counts)}", hint="use whole numbers of 1 or more")


class SparsePatternConfig(Record, frozen=True, repr_omit_defaults=True):
    """The earlier keys that each query attends to, in blocks: how they are chosen, and how many."""

    pattern_type: PatternType = "dilated_sparse"
    sparsity_ratio: SparsityRatio = None
    """Share of the earlier key blocks that each block of queries KEEPS, its own among them: above
    0, up to 1. ``adaptive``: the less, the longer the sequence. None: 0.1; in a windowed pattern
    what its window gives, which no other ratio may contradict."""
    block_size: int = 128
    """Tokens of a block, of queries and of keys."""
    local_window_size: int = 512
    """Tokens that a token sees in a windowed pattern: itself and those before it."""
    global_tokens: int = 64
    """First tokens of the sequence, which ``global_local`` lets every later token see."""
    seed: int = 0
    """Seed of ``random``'s draws."""

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown pattern, and for a field out of its range."""
        check_word("pattern_type", self.pattern_type, get_args(PatternType))
        ratio: Any = self.sparsity_ratio
        if ratio == "adaptive" and self.is_windowed:
            raise UsageError(
                f"sparsity_ratio adaptive: the window of {self.pattern_type} says what is kept",
                hint='leave `sparsity_ratio` out, or use `pattern_type="dilated_sparse"`',
            )
        is_number = isinstance(ratio, float | int) and not isinstance(ratio, bool)
        if ratio not in (None, "adaptive") and not (is_number and 0 < ratio <= 1):
            raise UsageError(
                f"sparsity_ratio {ratio!r}: it is the share of key blocks that are kept",
                hint='use a number above 0 and up to 1, for example 0.05, or "adaptive"',
            )
        for name, least in _LEAST.items():
            value: object = getattr(self, name)
            if not is_count(value, least=least):
                raise UsageError(
                    f"{name} is {value!r}", hint=f"use a whole number, {least} or more"
                )
        if self.block_size > MOST_BLOCK_TOKENS:
            raise UsageError(
                f"block_size is {self.block_size}, and {MOST_BLOCK_TOKENS} is the most",
                hint=f"use {MOST_BLOCK_TOKENS} or less",
            )

    @property
    def is_windowed(self) -> bool:
        """True if the pattern is defined by a window of tokens."""
        return self.pattern_type in WINDOWED

    @property
    def follows_content(self) -> bool:
        """True if the kept keys depend on the values of queries and keys, and differ by head."""
        return self.pattern_type == "block_top_k"

    def at(self, length_tokens: int) -> "SparsePatternConfig":
        """Return the pattern for a document of ``length_tokens``: an adaptive ``sparsity_ratio``
        becomes the share of key blocks kept at that length (0 to 1).
        """
        if self.sparsity_ratio != "adaptive":
            return self
        return self.replace(sparsity_ratio=self.ratio_at(length_tokens))

    def ratio_at(self, length_tokens: int) -> float:
        """Share of the key blocks that each row of blocks keeps, in a pattern without a window."""
        if self.sparsity_ratio == "adaptive":
            return next(
                share for longest, share in ADAPTIVE if longest is None or length_tokens <= longest
            )
        return DEFAULT_RATIO if self.sparsity_ratio is None else self.sparsity_ratio


_CONTRADICTED = 0.1
"""Relative difference from which a window's share contradicts the ratio that was asked for."""


def causal_pairs(length_tokens: int) -> int:
    """Number of pairs of a token and itself or an earlier token: L (L + 1) / 2."""
    return length_tokens * (length_tokens + 1) // 2


def kept_pairs(pattern: SparsePatternConfig, length_tokens: int) -> int:
    """Number of query-key pairs that are computed, in one head and one document. By a ratio, each
    row of blocks keeps whole earlier blocks and its own, which is causal; by a window, each token
    keeps the tokens within the window and the global tokens before it.
    """
    if pattern.is_windowed:
        window = min(pattern.local_window_size, length_tokens)
        further = length_tokens - window
        pairs = causal_pairs(window) + further * window
        # of the tokens further back, those that every token sees
        held = min(pattern.global_tokens if pattern.pattern_type == "global_local" else 0, further)
        return pairs + causal_pairs(held) + (further - held) * held
    size, pairs = pattern.block_size, 0
    for row, count in enumerate(_counts(pattern, length_tokens)):
        tokens = min(size, length_tokens - row * size)
        pairs += (count - 1) * tokens * size + causal_pairs(tokens)
    return pairs


def kept_share(pattern: SparsePatternConfig, length_tokens: int) -> float:
    """Share of causal pairs that a pattern keeps; UsageError if ratio and window contradict."""
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
    """Pairs of one document that the branches of dilated attention keep, over all heads."""
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
    """Yield each block row's number of kept blocks, its own included: the ratio, rounded up."""
    ratio = pattern.ratio_at(length_tokens)
    for row in range(-(-length_tokens // pattern.block_size)):
        # a whole number but for its last bits is one
        yield max(1, math.ceil(ratio * (row + 1) - 1e-9))
