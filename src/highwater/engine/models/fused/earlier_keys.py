"""Layers that read keys and values of earlier layers, and embeddings of their own (Gemma 4): how a
backbone passes both from layer to layer, so that a step keeps only tensors that layers read.

Of each kind of layer, the last one that computes keys stores them, and all later layers read them.
They stay on the GPU from that layer's forward pass until its recomputation, and their gradients, to
which all readers add, from the last layer's backward pass until that layer's. Without recomputation
autograd keeps them, as it keeps all keys. A recomputation stores equal keys again, in a graph of
its own: these are dropped.

The embeddings of all layers are one tensor. Its gradient is joined once from all layers' gradients;
slices would instead fill, for each layer, a tensor of zeros as large as all embeddings.

Shapes:  B 1  T tokens  L layers  P numbers of a layer's embedding  E hidden size
"""

from collections import UserDict
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast


def hand_over_earlier_keys(causal_lm: PreTrainedModel) -> None:
    """Change the class of a backbone whose layers read earlier layers' keys, in place: it then
    keeps only keys that a later layer reads. Parameters keep their names, results stay equal.
    """
    backbone: Any = getattr(causal_lm, causal_lm.base_model_prefix)
    if hasattr(backbone, "project_per_layer_inputs"):
        kind = type(backbone)
        backbone.__class__ = type(kind.__name__, (_HandsOver, kind), {})


class _HandsOver:
    """Methods that override those of the family's own backbone class."""

    def forward(self, **inputs: Any) -> BaseModelOutputWithPast:
        """Run the layers with a new mapping for the keys and values that they share."""
        return cast(Any, super()).forward(**inputs, shared_kv_states=_earlier_keys())

    def project_per_layer_inputs(
        self, inputs_embeds: Tensor, per_layer_inputs: Tensor | None = None
    ) -> "_ByLayer":
        """Return the embeddings of the tokens as one tensor for each layer."""
        joint_BTLP: Tensor = cast(Any, super()).project_per_layer_inputs(
            inputs_embeds, per_layer_inputs
        )
        return _ByLayer(joint_BTLP.unbind(2))

    def _maybe_slice_kv_shared_inputs(self, *of_tokens: Any, **_: Any) -> tuple[Any, ...]:
        """Return hidden states, embeddings, positions and masks unsliced: slicing them, even to all
        tokens, would copy their gradient. transformers before 5.23 slices nothing.
        """
        return of_tokens[:4]


class _ByLayer:
    """Embeddings of the tokens for each layer, indexed like the tensor of all layers, BTLP."""

    def __init__(self, layers_BTP: tuple[Tensor, ...]) -> None:
        self._layers_BTP = layers_BTP

    def __getitem__(self, place: tuple[Any, ...]) -> Tensor:
        _, _, layer, _ = place
        return self._layers_BTP[layer]


def _earlier_keys() -> Any:
    """Return a mapping of keys and values by kind of layer; storing again removes the entry."""
    # transformers before 5.23 hands over any UserDict, later ones their own kind
    kind: Any = getattr(cache_utils, "KVSharingDict", UserDict)

    class EarlierKeys(kind):
        def __setitem__(self, kind: str, tensors: tuple[Tensor, ...]) -> None:
            if kind in self:  # its layer is recomputed: all layers that read it have gone backward
                del self[kind]
            else:
                super().__setitem__(kind, tensors)

    return EarlierKeys()
