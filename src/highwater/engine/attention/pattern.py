"""Pattern: what the attention of one layer is, beside causal within each document.

Shapes:  H query heads, or this rank's share of them
"""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Attention of one layer: what scores are multiplied by, which keys are read, what else is in
    the softmax.
    """

    scaling: float
    window_tokens: int | None = None
    """Tokens that a token reads, itself and those before it; None: all of its document."""
    soft_cap: float | None = None
    """What no score exceeds either way: ``cap * tanh(score / cap)``; None: no cap."""
    sinks_H: Tensor | None = None
    """A number for each query head that takes part in the softmax, beside the keys."""

    def cuts(self, length_tokens: int) -> bool:
        """Whether a document of this length has tokens that the last one does not read."""
        return self.window_tokens is not None and self.window_tokens < length_tokens

    def is_fused_up_to(self, length_tokens: int) -> bool:
        """Whether the hardware's own kernel computes documents up to this length, sinks aside."""
        return self.soft_cap is None and not self.cuts(length_tokens)

    def is_dense_up_to(self, length_tokens: int) -> bool:
        """Whether of documents up to this length it is full attention, which fused kernels
        compute.
        """
        return self.sinks_H is None and self.is_fused_up_to(length_tokens)

    def of_heads(self, rank: int, degree: int) -> "Pattern":
        """The pattern of one rank's heads, where ``degree`` ranks have equal shares, in order."""
        sinks = self.sinks_H
        return self if sinks is None else replace(self, sinks_H=sinks.chunk(degree)[rank])

    def without_sinks(self) -> "Pattern":
        """The same keys, alone in the softmax."""
        return replace(self, sinks_H=None)
