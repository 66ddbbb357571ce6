"""Small parameters: biases, norms of heads and whatever else a family has besides its matrices and
two norms a layer, so that a model has the very number of parameters of its own class. A family's
row says which parts it has, and the fields of a config that switch some on or off.

Source: ``modeling_*.py`` of transformers 5.23; tests/unit/test_small_parameters.py builds every
family, each field either way, and compares whole numbers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from highwater.model.families import family_row
from highwater.model.layer_kind import LayerKind, LayerRun


def _qkv_biases(kind: LayerKind) -> int:
    return kind.attention.query_size + 2 * kind.attention.key_size


def _mlp_biases(kind: LayerKind) -> int:
    """Biases of one MLP, or of all experts and of their router."""
    mlp = kind.mlp
    of_one = (mlp.matrices - 1) * mlp.width + kind.hidden_size
    return of_one if mlp.experts == 1 else mlp.experts * (of_one + 1)


def _plain_mlp_biases(kind: LayerKind) -> int:
    """Biases of MLPs that every token goes through, where a family's experts have none."""
    mlp = kind.mlp
    width = mlp.width if mlp.experts == 1 else mlp.shared_width
    return (mlp.matrices - 1) * width + kind.hidden_size * (width > 0)


_PARTS: Mapping[str, Callable[[LayerKind], int]] = {
    "number": lambda _: 1,
    "norm": lambda kind: kind.hidden_size,
    "inner_norm": lambda kind: kind.mlp.width,  # of what goes into the MLP's last matrix
    "head_norms": lambda kind: 2 * kind.attention.head_dim,  # which all heads share
    "wide_norms": lambda kind: kind.attention.query_size + kind.attention.key_size,
    "qkv_biases": _qkv_biases,
    "output_bias": lambda kind: kind.hidden_size,
    "attention_biases": lambda kind: _qkv_biases(kind) + kind.hidden_size,
    "mlp_biases": _mlp_biases,
    "plain_mlp_biases": _plain_mlp_biases,
    "expert_biases": lambda kind: kind.mlp.experts if kind.mlp.experts > 1 else 0,
    "lone_router": lambda kind: kind.hidden_size if kind.mlp.experts == 1 else 0,
    "shared_gate": lambda kind: kind.hidden_size if kind.mlp.experts > 1 else 0,
    "head_gates": lambda kind: kind.hidden_size * kind.attention.query_heads,
    "wide_gates": lambda kind: kind.hidden_size * kind.attention.query_size,
}
"""Parameters that one layer of a kind has of each part that rows name."""


def small_parameters(
    family: str,
    runs: Iterable[LayerRun],
    *,
    hidden_size: int,
    native_length_tokens: int,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Parameters of a model besides its matrices, two norms a layer and the last norm. They follow
    the switches of ``config``; without one, or where it leaves them out, its class.
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
    """Positions that a model of the family has an embedding of; 0 where they are not learned."""
    more = family_row(family).more_positions
    return 0 if more is None else native_length_tokens + more
