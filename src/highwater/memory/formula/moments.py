"""Moments: what a layer takes while it goes backward, at each moment that may be its peak, of
families whose layers are not those of memory/formula/layer_bytes.

A moment is bytes for each product of sizes: so many for each of T x E numbers, of T x F, of E x F.
They are learned from traces of small models (tests/numeric/learn_moments.py), whose events are the
same whatever the sizes are, and kept in ``moments.json``.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from highwater.spec.codec import Record, from_json
from highwater.spec.layer_kind import AttentionKind, LayerKind
from highwater.spec.working_sizes import stretch

FILE = Path(__file__).with_name("moments.json")
MomentBytes = Mapping[str, int]
"""Bytes for each product of sizes, by its name in ``products``."""


class LayerMoments(Record, frozen=True, kw_only=True):
    """What layers of one kind take."""

    kept: MomentBytes
    """Kept until the backward pass."""
    moments: tuple[MomentBytes, ...]
    """Alive besides while a layer goes backward, its weights and the head's gradient aside."""


class FamilyMoments(Record, frozen=True, kw_only=True):
    """What the layers of a family take."""

    has_tiles: bool
    """Its MLP goes in tiles where layers are recomputed."""
    layers: Mapping[str, LayerMoments]
    """By ``kind_name``."""


@cache
def families() -> Mapping[str, FamilyMoments]:
    """Families that were learned, by model type."""
    return from_json(FILE.read_bytes(), dict[str, FamilyMoments])


def kind_name(*, is_windowed: bool, is_capped: bool, is_recomputed: bool) -> str:
    """The name of layers of a kind that keep their input alone, or all that they need."""
    attention = f"{'capped ' if is_capped else ''}{'window' if is_windowed else 'full'}"
    return f"{attention}, {'recomputed' if is_recomputed else 'kept'}"


def bytes_of(moment: MomentBytes, products: Mapping[str, int]) -> int:
    """Bytes of a moment for these products of sizes, and of what it has of no others."""
    return sum(count * products[name] for name, count in moment.items() if name in products)


def products(
    kind: LayerKind, *, tokens: int, attended_key: int, tile: int | None
) -> Mapping[str, int]:
    """Products of the sizes of a layer, in numbers: T ``tokens``, E hidden size, Q and K numbers of
    query and key heads, G those of query heads where they share keys, H and h heads, D head size, F
    width; k experts of a token, X experts.

    ``attended_key``: K as the attention takes them. ``tile``: numbers of one product of the MLP,
    where it goes in tiles.
    """
    attention, mlp, hidden = kind.attention, kind.mlp, kind.hidden_size
    query = attention.query_size
    per_token = {
        "T": 1,
        "T*D": attention.head_dim,
        "T*E": hidden,
        "T*Q": query,
        "T*K": attended_key,
        "T*G": query if query != attended_key else 0,
        "T*H": attention.query_heads,
        "T*h": attention.kv_heads,
    }
    of_weights = {"E*Q": hidden * query, "E*K": hidden * attention.key_size}
    if mlp.experts > 1:
        per_token |= {
            "T*k": mlp.experts_per_token,
            "T*X": mlp.experts,
            "T*k*E": mlp.experts_per_token * hidden,
            "T*k*F": mlp.experts_per_token * mlp.width,
        }
        of_weights |= {"X*E*F": mlp.experts * hidden * mlp.width}
    else:
        of_weights |= {
            "E*F": hidden * mlp.width,
            "T*F": tokens * mlp.width if tile is None else tile,
        }
    return {name: tokens * count for name, count in per_token.items()} | of_weights


def capped_products(
    attention: AttentionKind, *, documents: int, length_tokens: int, attended_key: int, degree: int
) -> Mapping[str, int]:
    """Products of what attention of capped scores takes at a time, in numbers, each in float32: r
    rows of queries and l keys of every document; nothing of other attention.

    ``degree``: ranks among which the heads are divided.
    """
    if attention.soft_cap is None:
        return {}
    heads = documents * attention.query_heads // degree
    rows, keys = stretch(length_tokens, attention.window_tokens, heads)
    return {
        "r*l": rows * keys,
        "r*l*H": rows * keys * heads,
        "r*Q": rows * heads * attention.head_dim,
        "r*H": rows * heads,
        "l*K": keys * documents * attended_key // degree,
    }
