"""Rotary attention: a decoder layer's attention with norm and rotation in one fused pass.

Projections are the family's own, and the attention function is the one that the config names.

Shapes:  B 1  T tokens  H query heads  K key/value heads  D head size  E hidden size
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from highwater.engine.kernels import rotary as rotary_kernels
from highwater.engine.models.fused.adapted_linear import parts_of
from highwater.engine.models.fused.head_groups import attention_in_groups
from highwater.engine.parallel.sequence_layout import SequenceLayout

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MOST_NUMBERS = 2**31
"""One call's queries must have fewer numbers: some kernels count offsets in 32 bits, and no test
shows that all kernels are right beyond. An 8B model has as many in 524,288 tokens."""
NORMS = ("q_norm", "k_norm")
"""Norms of the query and key heads; a family has both or none."""


class RotaryAttention(nn.Module):
    """Attention with a family's parameter names; decoder layers call it like their own."""

    def __init__(self, theirs: nn.Module, features: dict[str, Any]) -> None:
        """Use the children of ``theirs``, and copy the attributes that attention functions read.

        ``features``: keywords that ``theirs`` passes to its attention function, except dropout.
        """
        super().__init__()
        own: Any = theirs
        for name, child in theirs.named_children():
            self.add_module(name, child)
        self.config = own.config
        self.layer_idx: int = own.layer_idx
        self.head_dim: int = own.head_dim
        self.num_key_value_groups: int = own.num_key_value_groups
        self.attention_dropout: float = own.attention_dropout
        self.is_causal = True
        self.features = features
        self.groups = 1
        """Groups of key/value heads that are computed one after the other (head_groups.py)."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **features: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, (B, T, E), and attention weights if the function gives any."""
        if past_key_values is not None:
            raise RuntimeError(
                "training keeps no keys and values from one forward pass to the next"
            )
        own: Any = self
        groups = self._groups(hidden_states.shape[1], features.get("sequence_layout"))
        if groups > 1:
            how = {**features, "attention_mask": attention_mask, "asks_keeper": True}
            return self._in_groups(groups, hidden_states, position_embeddings, how), None
        query, key = (
            self._rotated(
                getattr(own, f"{name}_proj")(hidden_states),
                getattr(own, f"{name}_norm", None),
                *position_embeddings,
            )
            for name in ("q", "k")
        )
        value = own.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]  # pyright: ignore[reportPrivateUsage]
        told = {"dropout": self.attention_dropout if self.training else 0.0, **self.features}
        out, weights = attend(self, query, key, value, attention_mask, **told, **features)
        return own.o_proj(out.flatten(2)), weights

    def _in_groups(
        self, groups: int, hidden: Tensor, positions: tuple[Tensor, Tensor], how: dict[str, Any]
    ) -> Tensor:
        """Return the output, (B, T, E), by groups of heads; ``how``: more attention keywords."""
        own: Any = self
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]  # pyright: ignore[reportPrivateUsage]
        told = {"dropout": self.attention_dropout if self.training else 0.0, **self.features}

        def attend_group(*heads_TO: Tensor) -> Tensor:
            """Return attention's output for queries, keys, values and the norms' weights."""
            *heads_TXD, value_TKD = (
                each.unflatten(-1, (-1, self.head_dim)) for each in heads_TO[:3]
            )
            rotated_TXD = (
                _Rotate.apply(each, weight, 0.0 if norm is None else norm.eps, *positions_TD)
                for each, weight, norm in zip(heads_TXD, heads_TO[3:], norms, strict=True)
            )
            by_heads = (each.transpose(0, 1)[None] for each in (*rotated_TXD, value_TKD))
            # With an index instead of squeeze, the backward pass would fill a tensor of zeros.
            return attend(self, *by_heads, **told, **how)[0].flatten(2).squeeze(0)

        norms = [getattr(own, name, None) for name in NORMS]
        positions_TD = [each[0] for each in positions]
        weights = [None if norm is None else norm.scale for norm in norms]
        projections = [getattr(own, name) for name in PROJECTIONS]
        return attention_in_groups(hidden, weights, projections, attend_group, groups=groups)

    def _groups(self, tokens: int, layout: SequenceLayout | None) -> int:
        """Return the number of head groups: ``self.groups``, or the next larger number at which a
        group's queries have fewer than MOST_NUMBERS elements, if there is one.
        """
        keys = parts_of(self.k_proj)[0].out_features
        shared = 1 if layout is None else layout.ulysses_degree
        heads, numbers = keys // self.head_dim // shared, tokens * keys * self.num_key_value_groups
        works = (
            groups
            for groups in range(self.groups, heads + 1)
            if heads % groups == 0 and numbers < groups * MOST_NUMBERS
        )
        return next(works, self.groups)

    def _rotated(self, projected: Tensor, norm: Any, cosines: Tensor, sines: Tensor) -> Tensor:
        """Normalise and rotate a projection's heads: (B, T, heads * D) to (B, heads, T, D)."""
        assert len(projected) == 1, "documents are packed into one row"
        assert cosines.shape[-1] == self.head_dim, "the whole head is rotated"
        heads_THD = projected[0].unflatten(-1, (-1, self.head_dim))
        eps = 0.0 if norm is None else cast(float, norm.eps)
        rotated: Tensor = _Rotate.apply(
            heads_THD, None if norm is None else norm.scale, eps, cosines[0], sines[0]
        )
        return rotated.transpose(0, 1)[None]


class _Rotate(torch.autograd.Function):
    """Autograd function of engine/kernels/rotary.py; for a norm keeps input and 1 value a head."""

    @staticmethod
    def forward(
        ctx: Any,
        x_THD: Tensor,
        weight_D: Tensor | None,
        eps: float,
        cosines_TD: Tensor,
        sines_TD: Tensor,
    ) -> Tensor:
        out_THD, scales_TH = rotary_kernels.rotate(x_THD, weight_D, eps, cosines_TD, sines_TD)
        # Without a norm the gradient needs no input, only its shape, which the gradient has too.
        kept = (x_THD, weight_D, scales_TH) if weight_D is not None else (None, None, None)
        ctx.save_for_backward(*kept, cosines_TD, sines_TD)
        return out_THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_THD, weight_D, scales_TH, cosines_TD, sines_TD = ctx.saved_tensors
        # The kernels need a dense last dimension; an attention's gradient may have other strides.
        gradient_THD = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        x_THD = gradient_THD if x_THD is None else x_THD
        gradient, weight_gradient = rotary_kernels.backward(
            gradient_THD, x_THD, weight_D, scales_TH, cosines_TD, sines_TD
        )
        return gradient, weight_gradient, None, None, None
