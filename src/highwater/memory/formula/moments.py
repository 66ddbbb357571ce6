"""Moments: what a layer of a family takes at each moment of its backward pass that may be a peak,
where that is not what memory/formula/layers says.

A moment is bytes for each product of sizes, learned from traces of small models
(tools/learn_moments.py), whose events are the same whatever the sizes are.
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
"""Bytes for each product of sizes, by its name in ``products``."""


class LayerMoments(Record, frozen=True, kw_only=True):
    """Memory of the layers of one kind."""

    kept: MomentBytes
    """Kept until the backward pass."""
    moments: tuple[MomentBytes, ...]
    """Alive besides while a layer goes backward, its weights and the head's gradient aside."""
    is_divided: bool = False
    """Learned of ranks that share a sequence by Ulysses."""


class FamilyMoments(Record, frozen=True, kw_only=True):
    """Memory of the layers of a family."""

    has_tiles: bool
    """MLPs that every token goes through go in tiles where layers are recomputed."""
    layers: Mapping[str, LayerMoments]
    """By ``kind_name``."""

    def layer(
        self,
        family: str,
        kind: LayerKind,
        is_recomputed: bool,
        *,
        is_divided: bool = False,
        is_frozen: bool = False,
    ) -> LayerMoments | None:
        """What layers of a kind take, ``is_divided`` if ranks share a sequence by Ulysses,
        ``is_frozen`` if adapters are trained alone. Where those were not learned, what others take
        that differ in this, in a window, or in an MLP beside their experts; None where there are no
        such either. Of layers that differ within a model (``form_name``) each has its own.
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
    """Families that were learned, by model type."""
    return from_json(FILE.read_bytes(), dict[str, FamilyMoments])


DENSE, SHARED = "dense", "shared"


def mlp_name(family: str, mlp: MlpKind) -> str:
    """What the MLPs of a layer are called among others of its family: ``dense`` in the place of
    experts, ``shared`` beside them; nothing of experts alone, and where a family has none.
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
    """Name of a kind of layers, recomputed or kept whole; ``mlp`` is their ``mlp_name``, ``form``
    their ``form_name``.
    """
    attends = "delta" if is_delta else "window" if is_windowed else "full"
    attention = f"{'capped ' if is_capped else ''}{attends}"
    layer = f"{attention} {mlp}".rstrip() + form
    layer += ", divided" * is_divided + ", frozen" * is_frozen
    return f"{layer}, {'recomputed' if is_recomputed else 'kept'}"


def form_name(family: str, kind: LayerKind) -> str:
    """What a layer differs in from others of its family, where they differ within a model."""
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
    """Bytes of a moment for these products of sizes, and of what it has of no others."""
    return sum(count * products[name] for name, count in moment.items() if name in products)


WEIGHTS = ("E*Q", "E*K", "E*F", "E*S", "E*P", "X*E*F")
"""Products that are of weights: their gradients, which a frozen model has none of."""


def products(
    kind: LayerKind, *, tokens: int, attended_key: int, tile: int | None, degree: int = 1
) -> Mapping[str, int]:
    """Products of the sizes of a layer, in numbers: T ``tokens``, E hidden size, Q and K numbers of
    query and key heads, G those of query heads where they share keys, H and h heads, D head size, F
    width; k experts of a token, X experts, S width of the MLP beside them; P of an embedding of the
    layer's own.

    ``attended_key``: K as the attention takes them; J as they are projected. ``tile``: numbers of
    one product of the MLP that every token goes through, where it goes in tiles. ``degree``: ranks
    among which the heads are divided.
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
    """Products of what a gated delta rule takes for a group of tokens, in numbers of one rank: g
    tokens of a group, P numbers of a token's keys, one for each value head, s those of a state, N
    groups, n chunks of one; nothing of other attention. ``tokens``: of the row, whose heads the
    ranks divide.
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
    """Columns of what a layer sums over its tokens, biases' gradients above all, by the name of
    what such a sum takes for itself (nouns/events.py); it comes and goes by itself.
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
    """Bytes that the sums of a moment take for themselves."""
    return sum(
        column_sums(tokens, size, resident_threads=RESIDENT_THREADS).partial_bytes
        for name, size in columns(kind).items()
        if name in moment
    )


def score_products(
    attention: AttentionKind, *, documents: int, length_tokens: int, attended_key: int, degree: int
) -> Mapping[str, int]:
    """Products of what attention without a fused kernel, of capped scores or wide heads, takes at a
    time, in numbers, whatever numbers are elsewhere: r rows of queries and l keys of every
    document; nothing of other attention. ``degree``: ranks among which the heads are divided.
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
