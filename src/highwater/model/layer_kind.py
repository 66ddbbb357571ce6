"""LayerKind: the parts of one decoder layer; a model's layers are runs of such kinds.

Bytes and FLOPs are sums over runs, ``count`` times those of one layer of the kind, or maxima over
kinds if one layer decides.

Besides matrices and two norms a layer has the small parameters of its family's row: biases, norms
of heads and others, so that the number of parameters equals that of the family's own class.

Windows: the layers of a family that attend within ``sliding_window``, as transformers builds them.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.23; test_families.py and
test_small_parameters.py below tests/unit compare every family with those that are installed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, cast

from highwater.errors import ModelError
from highwater.model.families import Window, family_row, value_of
from highwater.nouns.codec import Record

Config = Mapping[str, Any]
"""A parsed ``config.json``."""


class Matrices(NamedTuple):
    """Parameter tensors of equal size: how many, their rows, and the numbers in a row."""

    number: int
    """Number of these tensors."""
    rows: int
    """Rows of one tensor, which FSDP2 divides among GPUs."""
    row_size: int
    """Numbers in one row."""

    def beyond_even(self, shards: int) -> int:
        """Elements added if each of ``shards`` GPUs had as many rows as the first, the fullest."""
        return self.number * (-self.rows % shards) * self.row_size


class DeltaKind(Record, frozen=True, kw_only=True):
    """A gated delta rule instead of softmax attention: heads with a recurrent state along the
    sequence, after a short convolution.
    """

    key_head_dim: int
    """Head size of queries and keys."""
    taps: int
    """Number of tokens that the convolution reads."""
    joins_gate: bool = False
    """True if one product gives queries, keys, values and gates; else the gates have their own."""


class AttentionKind(Record, frozen=True, kw_only=True):
    """Attention of one layer: its heads, its window, and its variants.

    With ``delta``, ``query_heads`` counts the heads of values, and ``kv_heads`` those of keys and
    queries, which have another size, ``key_head_dim``.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    """Window: number of tokens that a token reads, itself included; None: all earlier tokens."""
    has_sinks: bool = False
    """True if a learned number for each query head joins the keys' scores in the softmax."""
    soft_cap: float | None = None
    """Bound of a score's magnitude; None: no cap."""
    is_gated: bool = False
    """True if the query projection also gives gates, of the same size, for the output."""
    delta: DeltaKind | None = None
    """The gated delta rule; None for softmax attention."""
    values_are_keys: bool = False
    """True if values are the keys before their norm and RoPE, without their own projection."""
    reads_earlier_keys: bool = False
    """True if keys and values come from the last earlier layer of this kind that has its own."""

    @property
    def query_size(self) -> int:
        """Numbers per token in all query heads; with a delta rule in all value heads."""
        return self.query_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers per token in all key heads; without a delta rule in all value heads as well."""
        return self.kv_heads * (self.head_dim if self.delta is None else self.delta.key_head_dim)

    @property
    def channels(self) -> int:
        """Elements per token of queries, keys and values together."""
        query, key = self.query_size, self.key_size
        return query + 2 * key  # with a delta rule, queries are sized as keys, values as outputs

    @property
    def matrices(self) -> tuple[tuple[int, bool], ...]:
        """Projections beside the hidden size: their other size, and True if that is the input."""
        query, key, delta = self.query_size, self.key_size, self.delta
        if delta is None:
            into = ((query * (1 + self.is_gated), False), (key, False), (key, False))
            own = 0 if self.reads_earlier_keys else 1 if self.values_are_keys else 2
            return (*into[: 1 + own], (query, True))
        rates = (2 * self.query_heads,) if delta.joins_gate else (self.query_heads,) * 2
        inner = (self.channels + query,) if delta.joins_gate else (self.channels, query)
        return (*((each, False) for each in (*inner, *rates)), (query, True))

    @property
    def small_parameters(self) -> int:
        """Parameters besides the projections: sinks; with a delta rule the convolution, two values
        per head, and the norm that all heads share.
        """
        if self.delta is None:
            return self.query_heads if self.has_sinks else 0
        return self.channels * self.delta.taps + 2 * self.query_heads + self.head_dim


class MlpKind(Record, frozen=True, kw_only=True):
    """MLP of one layer: one MLP for all tokens, or experts, to a few of which each token goes."""

    width: int
    """Width of the MLP, or of one expert."""
    matrices: int = 3
    """Weight matrices of the MLP, or of one expert: gate, up and down; 2 without a gate."""
    experts: int = 1
    experts_per_token: int = 1
    shared_width: int = 0
    """Width of the shared MLP, which every token goes through besides its experts; 0: none."""

    @property
    def is_routed(self) -> bool:
        """True if the MLP has experts, even a single one beside a shared MLP."""
        return self.experts > 1 or self.shared_width > 0

    @property
    def plain_width(self) -> int:
        """Width of the MLP that every token passes; 0 if tokens go to experts alone."""
        return self.shared_width if self.is_routed else self.width


class LayerKind(Record, frozen=True, kw_only=True):
    """One layer of a decoder: its attention, its MLP and its norms."""

    hidden_size: int
    attention: AttentionKind
    mlp: MlpKind
    embedding_size: int = 0
    """Size of the layer's own embedding of a token, which it reads through a gate; 0: none."""

    @property
    def parameters(self) -> int:
        """Parameters of the layer: matrices, both norms and sinks, without biases or head norms."""
        return _parameters(self)

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied by in the layer, of the experts only its own."""
        mlp = self.mlp
        widths = mlp.width * mlp.experts_per_token + mlp.shared_width
        attention = sum(size for size, _ in self.attention.matrices)
        into_layer = 2 * self.embedding_size
        return self.hidden_size * (attention + mlp.matrices * widths + into_layer)

    @property
    def matrices(self) -> tuple[Matrices, ...]:
        """Sizes of the layer's parameter matrices."""
        return _matrices(self)

    def beyond_even(self, shards: int) -> int:
        """Elements of padding if each of ``shards`` GPUs had as many rows as the first has."""
        return _beyond_even(self, shards)


@cache
def _parameters(kind: LayerKind) -> int:
    mlp = kind.mlp
    widths = mlp.width * mlp.experts + mlp.shared_width
    router = mlp.experts if mlp.experts > 1 else 0
    norms = 2
    attention = sum(size for size, _ in kind.attention.matrices)
    per_hidden = attention + mlp.matrices * widths + router + norms + 2 * kind.embedding_size
    return kind.hidden_size * per_hidden + kind.attention.small_parameters


@cache
def _beyond_even(kind: LayerKind, shards: int) -> int:
    return sum(each.beyond_even(shards) for each in kind.matrices)


@cache
def _matrices(kind: LayerKind) -> tuple[Matrices, ...]:
    hidden, attention = kind.hidden_size, kind.attention
    sizes = (
        (hidden, size) if is_output else (size, hidden) for size, is_output in attention.matrices
    )
    delta = attention.delta
    convolution = () if delta is None else (Matrices(1, attention.channels, delta.taps),)
    counted = Counter(sizes).items()
    of_attention = (Matrices(number, *size) for size, number in counted)
    size = kind.embedding_size
    of_embedding = (Matrices(1, size, hidden), Matrices(1, hidden, size)) if size else ()
    return (*of_attention, *convolution, *_mlp_matrices(kind), *of_embedding)


def _mlp_matrices(kind: LayerKind) -> tuple[Matrices, ...]:
    hidden, mlp = kind.hidden_size, kind.mlp
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
    """Consecutive layers of one kind."""

    count: int
    kind: LayerKind


def runs_of(layers: Iterable[tuple[int, LayerKind]]) -> tuple[LayerRun, ...]:
    """Make runs of layers from counts and kinds in order; equal neighbours are merged."""
    return tuple(
        LayerRun(count=count, kind=kind)
        for kind, group in groupby(layers, key=lambda layer: layer[1])
        if (count := sum(each for each, _ in group))
    )


def _qkv_biases(kind: LayerKind) -> int:
    return _softmax(kind) * sum(
        size for size, leads_out in kind.attention.matrices if not leads_out
    )


def _softmax(kind: LayerKind) -> bool:
    """True for softmax attention, False for a delta rule, without biases and head norms."""
    return kind.attention.delta is None


def _mlp_biases(kind: LayerKind) -> int:
    """Biases of one MLP, or of all experts and of their router."""
    mlp = kind.mlp
    of_one = (mlp.matrices - 1) * mlp.width + kind.hidden_size
    return of_one if mlp.experts == 1 else mlp.experts * (of_one + 1)


def _plain_mlp_biases(kind: LayerKind) -> int:
    """Biases of the MLP that every token goes through, in families whose experts have none."""
    mlp = kind.mlp
    width = mlp.width if mlp.experts == 1 else mlp.shared_width
    return (mlp.matrices - 1) * width + kind.hidden_size * (width > 0)


_PARTS: Mapping[str, Callable[[LayerKind], int]] = {
    "number": lambda _: 1,
    "norm": lambda kind: kind.hidden_size,
    "inner_norm": lambda kind: kind.mlp.width,  # of what goes into the MLP's last matrix
    "head_norms": lambda kind: 2 * kind.attention.head_dim * _softmax(kind),  # all heads share it
    "own_head_norms": lambda kind: (
        kind.attention.head_dim * (1 if kind.attention.reads_earlier_keys else 2)
    ),
    "embedding_norm": lambda kind: kind.hidden_size if kind.embedding_size else 0,
    "wide_norms": lambda kind: kind.attention.query_size + kind.attention.key_size,
    "qkv_biases": _qkv_biases,
    "output_bias": lambda kind: kind.hidden_size,
    "attention_biases": lambda kind: _qkv_biases(kind) + kind.hidden_size * _softmax(kind),
    "mlp_biases": _mlp_biases,
    "plain_mlp_biases": _plain_mlp_biases,
    "expert_biases": lambda kind: kind.mlp.experts if kind.mlp.experts > 1 else 0,
    "lone_router": lambda kind: kind.hidden_size if kind.mlp.experts == 1 else 0,
    "beside_mlp": lambda kind: (  # three norms, the router's scales by number and by expert
        4 * kind.hidden_size + kind.mlp.experts if kind.mlp.experts > 1 else 0
    ),
    "shared_gate": lambda kind: kind.hidden_size if kind.mlp.experts > 1 else 0,
    "head_gates": lambda kind: kind.hidden_size * kind.attention.query_heads,
    "wide_gates": lambda kind: kind.hidden_size * kind.attention.query_size,
}
"""Number of parameters of one layer in each part, by the names in ``Family.parts``."""


def small_parameters(
    family: str,
    runs: Iterable[LayerRun],
    *,
    hidden_size: int,
    native_length_tokens: int,
    config: Config | None = None,
) -> int:
    """Parameters of a model besides its matrices, two norms per layer and the last norm, by the
    switches of ``config``; for switches that it leaves out, by the defaults of the class.
    """
    row, stated = family_row(family), config or {}
    parts = Counter(row.parts)
    for field, switched in row.switches.items():
        names = (field, row.other_names.get(field, field))
        values = (stated[name] for name in names if stated.get(name) is not None)
        if next(values, field in row.switched_on):
            parts.update(switched)
    in_layers = sum(
        run.count * sum(number * _PARTS[name](run.kind) for name, number in parts.items())
        for run in runs
    )
    outside = row.parts_outside + learned_positions(family, native_length_tokens)
    return in_layers + outside * hidden_size


def learned_positions(family: str, native_length_tokens: int) -> int:
    """Number of positions with a learned embedding in the family; 0 if it learns none."""
    more = family_row(family).more_positions
    return 0 if more is None else native_length_tokens + more


def slides(config: Config, layer: int) -> bool:
    """True if a layer, counted from 0, attends within ``sliding_window`` (if that is set)."""
    window, kinds = family_row(config["model_type"]).window, config.get("layer_types")
    if window is None or (window.ends_full and layer + 1 == config["num_hidden_layers"]):
        return False
    if window.reads_layer_types and isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "sliding_attention"
    return not _is_switched_off(config, window) and _RULES[window.layers](config, layer, window)


def refuse_missing_window(config: Config, source: str, *, some_slide: bool) -> None:
    """Raise ModelError for a config without the window that its layers or its class need.

    transformers either cannot build such a model, or its results depend on the attention kernel.
    """
    family, kinds = config["model_type"], config.get("layer_types")
    window = family_row(family).window
    off, is_null = _is_switched_off(config, window), value_of(config, "sliding_window") is None
    is_named = isinstance(kinds, list) and "sliding_attention" in kinds
    # A family whose layers all have the window has full attention if the window is null.
    by_layer = window is not None and window.reads_layer_types
    is_masked = by_layer and not (window and window.has_mask_if_layers_slide)
    is_needed = is_named or (by_layer and some_slide)
    if (is_needed and (off or is_null)) or (is_masked and is_null and not off):
        switch = " and use_sliding_window to true" if off else ""
        why = "use_sliding_window is not true" if off else "sliding_window is null or missing"
        other = ", or name full_attention alone in layer_types"
        raise ModelError(
            f"{source}, of the family {family}, has no window for sliding attention: {why}",
            hint=f"set sliding_window to a number of tokens{switch}"
            + (other if is_named and not is_masked else ""),
        )


def _is_switched_off(config: Config, window: Window | None) -> bool:
    return window is not None and window.is_switched and not config.get("use_sliding_window")


def _all_but_every(config: Config, layer: int, every: int | str | None) -> bool:
    """True for all layers except every n-th one; ``every``: n, or the config field of n."""
    number = value_of(config, every) if isinstance(every, str) else every
    # transformers builds no model if this is no number; here every layer then has the window.
    return not isinstance(number, (int, float)) or number <= 0 or (layer + 1) % number != 0


def _of_cohere_mixture(config: Config, layer: int, _: Window) -> bool:
    """True for all layers except every n-th one; the leading dense layers count by themselves."""
    before = config.get("first_k_dense_replace")
    before = before if isinstance(before, int) else 0
    if layer < before:
        return _all_but_every(config, layer, "prefix_dense_sliding_window_pattern")
    return _all_but_every(config, layer - before, "sliding_window_pattern")


def _from_max_window_layers(config: Config, layer: int, _: Window) -> bool:
    first = value_of(config, "max_window_layers")
    has_window = value_of(config, "sliding_window") is not None
    return has_window and (not isinstance(first, int) or layer >= first)


def _even_up_to_max_window_layers(config: Config, layer: int, _: Window) -> bool:
    end = value_of(config, "max_window_layers")
    return layer % 2 == 0 and (not isinstance(end, int) or layer < end)


def _without_rope(config: Config, layer: int, _: Window) -> bool:
    rotated, interval = config.get("no_rope_layers"), value_of(config, "no_rope_layer_interval")
    if value_of(config, "sliding_window") is None:
        return False
    if isinstance(rotated, list):
        return layer < len(rotated) and rotated[layer] == 0
    return isinstance(interval, int) and (interval == 0 or (layer + 1) % interval == 0)


_RULES: Mapping[str, Callable[[Config, int, Window], bool]] = {
    "all": lambda _, __, ___: True,
    "none": lambda _, __, ___: False,
    "all_but_every": lambda config, layer, window: _all_but_every(config, layer, window.every),
    "all_but_first_of": lambda _, layer, window: layer % cast(int, window.every) != 0,
    "of_cohere_mixture": _of_cohere_mixture,
    "from_max_window_layers": _from_max_window_layers,
    "even_up_to_max_window_layers": _even_up_to_max_window_layers,
    "without_rope": _without_rope,
}
"""Rules by their names in a family's row: True if a layer, counted from 0, has the window."""
