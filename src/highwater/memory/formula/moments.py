"""Moments (points in time, not AdamW's): the memory of a layer at each point of its backward pass
that may be a peak, for families without closed-form terms in memory/formula/layers.

A moment is a sum of terms: a product of sizes, times bytes per element. It is learned from traces
of small models (tools/learn_moments.py), whose events are the same for all sizes.
"""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from highwater.model.families import family_row
from highwater.model.layer_kind import AttentionKind, LayerKind, MlpKind
from highwater.nouns.codec import Record, from_json
from highwater.nouns.events import RESIDENT_THREADS, column_sums
from highwater.nouns.layout import (
    DELTA_CHUNK_TOKENS,
    DELTA_GROUP_TOKENS,
    WIDE_SCORES_AT_HAND,
    WIDEST_FUSED_HEAD,
    stretch,
)

FILE = Path(__file__).with_name("moments.json")
MomentBytes = Mapping[str, int]
"""One moment: bytes for each product of sizes, by its name in ``products``."""


class LayerMoments(Record, frozen=True, kw_only=True):
    """Bytes that one kind of layer keeps and holds in its backward pass, learned from traces."""

    kept: MomentBytes
    """Memory that a layer keeps until its backward pass."""
    moments: tuple[MomentBytes, ...]
    """Further memory in a layer's backward pass, without its weights and the head's gradient."""
    is_divided: bool = False
    """True if the moments were learned on ranks that share a sequence by Ulysses."""


class FamilyMoments(Record, frozen=True, kw_only=True):
    """Bytes that layers of a model family hold at the points of the backward pass that may be the
    peak (moments), learned from traces of small models.
    """

    has_tiles: bool
    """True if MLPs that every token goes through are computed in tiles if layers are recomputed."""
    layers: Mapping[str, LayerMoments]
    """Moments of each kind of layers, by ``kind_name``."""

    def layer(
        self,
        family: str,
        kind: LayerKind,
        is_recomputed: bool,
        *,
        is_divided: bool = False,
        is_frozen: bool = False,
    ) -> LayerMoments | None:
        """Moments of a kind of layers. ``is_divided``: ranks share a sequence by Ulysses;
        ``is_frozen``: only adapters are trained. If this kind was not learned, those of a kind that
        differs in these, in a window, or in a shared MLP beside the experts; None if there is no
        such kind. If layers differ within a model (``form_name``), each form has its own moments.
        """
        is_windowed, mlp = kind.attention.window_tokens is not None, mlp_name(family, kind.mlp)
        name = partial(
            kind_name,
            is_capped=kind.attention.soft_cap is not None,
            is_recomputed=is_recomputed,
            is_delta=kind.attention.delta is not None,
            form=form_name(family, kind),
        )
        is_unlike = family_row(family).has_unlike_layers
        names = (
            name(is_windowed=windowed, mlp=each, is_divided=divided, is_frozen=frozen)
            for each in (mlp, mlp or SHARED)
            for windowed in (is_windowed, is_windowed and is_unlike)
            for divided in (is_divided, False)
            for frozen in (is_frozen, False)
        )
        return next((self.layers[name] for name in names if name in self.layers), None)


@cache
def families() -> Mapping[str, FamilyMoments]:
    """Memory of each family's layers, by model type, as ``moments.json`` has it from traces."""
    return from_json(FILE.read_bytes(), dict[str, FamilyMoments])


DENSE, SHARED = "dense", "shared"


def mlp_name(family: str, mlp: MlpKind) -> str:
    """Name of a layer's MLPs within its family: ``dense`` in place of experts, ``shared`` beside
    experts; empty for experts alone, and in families without experts.
    """
    usual = family_row(family).experts
    if usual is not None and usual.switch is None and not mlp.is_routed:
        return DENSE
    return SHARED if mlp.shared_width else ""


def kind_name(
    *,
    is_windowed: bool,
    is_capped: bool,
    is_recomputed: bool,
    is_delta: bool = False,
    is_divided: bool = False,
    is_frozen: bool = False,
    mlp: str = "",
    form: str = "",
) -> str:
    """Name of a kind of layers; ``mlp``: from ``mlp_name``, ``form``: from ``form_name``."""
    attends = "delta" if is_delta else "window" if is_windowed else "full"
    attention = f"{'capped ' if is_capped else ''}{attends}"
    layer = f"{attention} {mlp}".rstrip() + form
    layer += ", divided" * is_divided + ", frozen" * is_frozen
    return f"{layer}, {'recomputed' if is_recomputed else 'kept'}"


def form_name(family: str, kind: LayerKind) -> str:
    """Name of a layer's form, in families whose layers differ within a model; else empty."""
    attention = kind.attention
    if not family_row(family).has_unlike_layers:
        return ""
    return (
        ", wide" * (attention.head_dim > WIDEST_FUSED_HEAD)
        + ", values are keys" * attention.values_are_keys
        + ", earlier keys" * attention.reads_earlier_keys
        + ", embedded" * (kind.embedding_size > 0)
    )


def bytes_of(moment: MomentBytes, products: Mapping[str, int]) -> int:
    """Bytes of a moment: the sum of its terms, by sizes in ``products``; missing ones count 0."""
    return sum(count * products[name] for name, count in moment.items() if name in products)


WEIGHTS = ("E*Q", "E*K", "E*F", "E*S", "E*P", "X*E*F")
"""Products of the sizes of weights: their gradients, which a frozen model does not have."""


def products(
    kind: LayerKind, *, tokens: int, attended_key: int, tile: int | None, degree: int = 1
) -> Mapping[str, int]:
    """Products of the sizes of a layer, in elements: T ``tokens``, E hidden size, Q and K size of
    all query and of all key heads, G of query heads if they share keys, H and h query and key
    heads, D head size, F width; k experts per token, X experts, S width of the shared MLP; P size
    of the layer's own embedding.

    ``attended_key``: K as the attention takes it; J as projected. ``tile``: elements of one product
    of the MLP that every token goes through, if tiled. ``degree``: ranks that divide the heads.
    """
    attention, mlp, hidden = kind.attention, kind.mlp, kind.hidden_size
    query = attention.query_size
    per_token = {
        "T": 1,
        "T*D": attention.head_dim,
        "T*E": hidden,
        "T*Q": query,
        "T*K": attended_key,
        "T*J": attention.key_size,
        "T*G": query if query != attended_key else 0,
        "T*H": attention.query_heads,
        "T*h": attention.kv_heads,
    }
    of_weights = {"E*Q": hidden * query, "E*K": hidden * attention.key_size}
    if kind.embedding_size:
        per_token |= {"T*P": kind.embedding_size}
        of_weights |= {"E*P": hidden * kind.embedding_size}
    plain = tokens * mlp.plain_width if tile is None else tile
    if mlp.is_routed:
        per_token |= {
            "T*k": mlp.experts_per_token,
            "T*X": mlp.experts,
            "T*k*E": mlp.experts_per_token * hidden,
            "T*k*F": mlp.experts_per_token * mlp.width,
        }
        of_weights |= {"X*E*F": mlp.experts * hidden * mlp.width}
        if mlp.shared_width:
            of_weights |= {"E*S": hidden * mlp.shared_width, "T*S": plain}
    else:
        of_weights |= {"E*F": hidden * mlp.width, "T*F": plain}
    of_group = _group_products(attention, tokens * degree, degree)
    return {name: tokens * count for name, count in per_token.items()} | of_weights | of_group


def _group_products(attention: AttentionKind, tokens: int, degree: int) -> dict[str, int]:
    """Products of sizes in a gated delta rule for a group of tokens, in elements of one rank: g
    tokens of a group, P of a token's keys, one for each value head, s of a state, N groups, n
    chunks of a group; empty for other attention. ``tokens``: of the row of all ranks.
    """
    if attention.delta is None:
        return {}
    group, heads = min(tokens, DELTA_GROUP_TOKENS), attention.query_heads // degree
    state = heads * attention.head_dim * attention.delta.key_head_dim
    return {
        "g": group,
        "g*Q": group * heads * attention.head_dim,
        "g*K": group * attention.key_size // degree,
        "g*P": group * heads * attention.delta.key_head_dim,
        "g*H": group * heads,
        "s": state,
        "n*s": -(-group // DELTA_CHUNK_TOKENS) * state,
        "N*s": -(-tokens // DELTA_GROUP_TOKENS) * state,
    }


def columns(kind: LayerKind) -> Mapping[str, int]:
    """Columns of the tensors that a layer sums over its tokens, mostly for bias gradients, by the
    name of the sum's temporary buffers (nouns/events.py), which exist only during the sum.
    """
    sizes = {
        "E": kind.hidden_size,
        "F": kind.mlp.width,
        "Q": kind.attention.query_size,
        "K": kind.attention.key_size,
        "Q+2K": kind.attention.query_size + 2 * kind.attention.key_size,
    }
    return {f"sum({name})": size for name, size in sizes.items()}


def bytes_of_sums(moment: MomentBytes, kind: LayerKind, *, tokens: int) -> int:
    """Bytes of scratch memory that a moment's sums over ``tokens`` tokens take."""
    return sum(
        column_sums(tokens, size, resident_threads=RESIDENT_THREADS).partial_bytes
        for name, size in columns(kind).items()
        if name in moment
    )


def score_products(
    attention: AttentionKind, *, documents: int, length_tokens: int, attended_key: int, degree: int
) -> Mapping[str, int]:
    """Products of sizes in attention without a fused kernel (capped scores or wide heads), in
    elements of the same width on every device: r rows of queries and l keys of every document at a
    time; empty for other attention. ``degree``: ranks that divide the heads.
    """
    is_wide = attention.head_dim > WIDEST_FUSED_HEAD
    if attention.soft_cap is None and not is_wide:
        return {}
    heads = documents * attention.query_heads // degree
    at_hand = WIDE_SCORES_AT_HAND if is_wide and attention.soft_cap is None else None
    rows, keys = stretch(length_tokens, attention.window_tokens, heads, at_hand=at_hand)
    return {
        "r*l": rows * keys,
        "r*l*H": rows * keys * heads,
        "r*Q": rows * heads * attention.head_dim,
        "r*H": rows * heads,
        "l*K": keys * documents * attended_key // degree,
    }
