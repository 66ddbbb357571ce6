"""LayerKind: what one layer of a decoder is made of; a model's layers are runs of such kinds.

Whoever counts bytes or FLOPs sums over runs, ``count`` times what one layer of the kind has, and
takes the most over kinds where one layer decides.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from highwater.nouns.codec import Record


class Matrices(NamedTuple):
    """Parameters of two dimensions or more that have one size."""

    number: int
    """The number of these parameters."""
    rows: int
    """Rows of one parameter, which FSDP2 cuts among GPUs."""
    row_size: int
    """Numbers in one row."""

    def beyond_even(self, shards: int) -> int:
        """Numbers that so many GPUs would have more if each had as many rows as the first one: it
        has a row more where the rows are no multiple of the GPUs, and a row where they are fewer.
        """
        return self.number * (-self.rows % shards) * self.row_size


class AttentionKind(Record, frozen=True, kw_only=True):
    """Attention of one layer: its heads, and how far back it reads."""

    query_heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    """Tokens that a token reads, itself and those before it; None where it reads all of them."""
    has_sinks: bool = False
    """A learned number for each query head takes part in the softmax, beside the keys."""
    soft_cap: float | None = None
    """What no score exceeds either way; None: no cap."""

    @property
    def query_size(self) -> int:
        """Numbers of all query heads, per token."""
        return self.query_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers of all key heads, and of all value heads, per token."""
        return self.kv_heads * self.head_dim


class MlpKind(Record, frozen=True, kw_only=True):
    """MLP of one layer: one for all tokens, or experts of which each token goes to a few."""

    width: int
    """Width of the MLP, or of one expert where there are several."""
    matrices: int = 3
    """Weight matrices of the MLP, or of one expert: gate, up and down, or 2 where there is no
    gate."""
    experts: int = 1
    experts_per_token: int = 1
    shared_width: int = 0
    """Width of the MLP that every token goes through beside its experts; 0 where there is none."""

    @property
    def is_routed(self) -> bool:
        """Whether it has experts, be it one beside a shared MLP."""
        return self.experts > 1 or self.shared_width > 0

    @property
    def plain_width(self) -> int:
        """Width of the MLP that every token goes through; 0 where there are experts alone."""
        return self.shared_width if self.is_routed else self.width


class LayerKind(Record, frozen=True, kw_only=True):
    """One layer: attention and MLP around a residual stream, a norm before or after each."""

    hidden_size: int
    attention: AttentionKind
    mlp: MlpKind

    @property
    def parameters(self) -> int:
        """Parameters of the layer: matrices, both norms and sinks; biases and norms of heads are
        not counted.
        """
        mlp = self.mlp
        widths = mlp.width * mlp.experts + mlp.shared_width
        router = mlp.experts if mlp.experts > 1 else 0
        norms, sinks = 2, self.attention.query_heads if self.attention.has_sinks else 0
        per_hidden = self._attention_columns + mlp.matrices * widths + router + norms
        return self.hidden_size * per_hidden + sinks

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: those of its own experts only, routers not."""
        mlp = self.mlp
        widths = mlp.width * mlp.experts_per_token + mlp.shared_width
        return self.hidden_size * (self._attention_columns + mlp.matrices * widths)

    @property
    def _attention_columns(self) -> int:
        """Columns of E numbers in the weights of q, k, v and the output."""
        return 2 * (self.attention.query_size + self.attention.key_size)

    @property
    def matrices(self) -> tuple[Matrices, ...]:
        """Every parameter of two dimensions or more."""
        hidden, query, key = self.hidden_size, self.attention.query_size, self.attention.key_size
        return (
            Matrices(1, query, hidden),
            Matrices(2, key, hidden),
            Matrices(1, hidden, query),
            *self._mlp_matrices(),
        )

    def _mlp_matrices(self) -> tuple[Matrices, ...]:
        hidden, mlp = self.hidden_size, self.mlp
        into = mlp.matrices - 1  # the last one leads out of the MLP

        def one_mlp(width: int) -> tuple[Matrices, ...]:
            return (Matrices(into, width, hidden), Matrices(1, hidden, width)) if width else ()

        if mlp.experts == 1:
            return (*one_mlp(mlp.width), *one_mlp(mlp.shared_width))
        return (  # fused: a row is an expert, in the router too
            Matrices(1, mlp.experts, into * mlp.width * hidden),
            Matrices(1, mlp.experts, hidden * mlp.width),
            Matrices(1, mlp.experts, hidden),
            *one_mlp(mlp.shared_width),
        )


class LayerRun(Record, frozen=True, kw_only=True):
    """Layers of one kind that follow one another."""

    count: int
    kind: LayerKind


def runs_of(layers: Iterable[tuple[int, LayerKind]]) -> tuple[LayerRun, ...]:
    """Runs of these layers, counts of a kind in their order; neighbours of one kind are one run."""
    return tuple(
        LayerRun(count=count, kind=kind)
        for kind, group in groupby(layers, key=lambda layer: layer[1])
        if (count := sum(each for each, _ in group))
    )
