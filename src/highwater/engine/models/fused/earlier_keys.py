"""Layers that read keys and values of earlier layers, and embeddings of their own (Gemma 4): how a
backbone hands both from layer to layer, so that a step keeps no more than the layers read.

Of every kind of layer the last one with keys of its own stores them, and all layers behind it read
them. They stay on the GPU from its forward pass until it is recomputed, and their gradients, which
all readers add to, from the last layer's backward pass until its own. Where no layer is recomputed
autograd keeps them, as it keeps all keys. What the recomputation stores is the same once more, held
by a graph of its own: it is dropped.

The embeddings of all layers are one tensor. Its gradient is joined once from all layers', where a
slice for each layer would fill a tensor of zeros as large as all of them, layer by layer.

Shapes:  B 1  T tokens  L layers  P numbers of a layer's embedding  E hidden size
"""

from collections import UserDict
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast


def hand_over_earlier_keys(causal_lm: PreTrainedModel) -> None:
    """Have a backbone whose layers read keys of earlier ones hand them over as above, in place.

    Parameters keep their names; what is computed stays the same.
    """
    backbone: Any = getattr(causal_lm, causal_lm.base_model_prefix)
    if hasattr(backbone, "project_per_layer_inputs"):
        kind = type(backbone)
        backbone.__class__ = type(kind.__name__, (_HandsOver, kind), {})


class _HandsOver:
    """Part of a backbone's class, before the family's own."""

    def forward(self, **inputs: Any) -> BaseModelOutputWithPast:
        """Run the layers, with a place for what they share that is of this pass alone."""
        return cast(Any, super()).forward(**inputs, shared_kv_states=_earlier_keys())

    def project_per_layer_inputs(
        self, inputs_embeds: Tensor, per_layer_inputs: Tensor | None = None
    ) -> "_ByLayer":
        """Return every layer's embeddings of the tokens, apart."""
        joint_BTLP: Tensor = cast(Any, super()).project_per_layer_inputs(
            inputs_embeds, per_layer_inputs
        )
        return _ByLayer(joint_BTLP.unbind(2))

    def _maybe_slice_kv_shared_inputs(self, *of_tokens: Any, **_: Any) -> tuple[Any, ...]:
        """Keep every token in hidden states, embeddings, positions and masks: a slice of them all
        would copy their gradient. transformers before 5.23 cuts none.
        """
        return of_tokens[:4]


class _ByLayer:
    """Embeddings of the tokens for each layer, indexed as the tensor of them all: BTLP."""

    def __init__(self, layers_BTP: tuple[Tensor, ...]) -> None:
        self._layers_BTP = layers_BTP

    def __getitem__(self, place: tuple[Any, ...]) -> Tensor:
        _, _, layer, _ = place
        return self._layers_BTP[layer]


def _earlier_keys() -> Any:
    """Return a mapping of keys and values by kind of layer, which drops what is stored again."""
    # transformers before 5.23 hands over any UserDict, later ones their own kind
    kind: Any = getattr(cache_utils, "KVSharingDict", UserDict)

    class EarlierKeys(kind):
        def __setitem__(self, kind: str, tensors: tuple[Tensor, ...]) -> None:
            if kind in self:  # its layer is recomputed: all layers that read it have gone backward
                del self[kind]
            else:
                super().__setitem__(kind, tensors)

    return EarlierKeys()
