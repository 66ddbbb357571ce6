"""Requirements: what a family has to be like for the engine to train it, and the errors that say
so.
"""

from typing import cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from highwater.errors import ModelError
from highwater.model.trained_families import ATTENTION_LAYERS


def refuse_shared_parameters(causal_lm: PreTrainedModel) -> None:
    """Refuse a parameter with several places, but for the embedding in the head's: FSDP would train
    each place by itself.
    """
    first: dict[nn.Parameter, str] = {}
    head = cast(nn.Linear, causal_lm.get_output_embeddings()).weight
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        if parameter in first and parameter is not head:
            raise ModelError(
                f"{causal_lm.config.model_type} has one parameter as {first[parameter]} and as "
                f"{name}, which is not supported",
                hint="use a family whose layers share nothing, for example Qwen3 or Llama",
            )
        first.setdefault(parameter, name)


def refuse_other_mixing(causal_lm: PreTrainedModel) -> None:
    """Refuse layers that carry anything along the sequence but attention, or attend in a way of
    their own.
    """
    config = causal_lm.config
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if kinds:
        raise not_by_attention(config, f"it has layers of {', '.join(sorted(kinds))}")
    if getattr(causal_lm, "_is_stateful", False) or any(
        isinstance(m, nn.Conv1d) for m in causal_lm.modules()
    ):
        raise not_by_attention(
            config, "its layers carry a state or a convolution along the sequence"
        )
    if not getattr(causal_lm, "_supports_attention_backend", False):
        raise not_by_attention(config, "it does not take one from outside")


def not_by_attention(config: PreTrainedConfig, why: str) -> ModelError:
    """The error of a model that something else than our attention mixes along the sequence."""
    return ModelError(
        f"{config.model_type} cannot be trained with the attention that keeps packed sequences "
        f"apart: {why}",
        hint="use a family of full attention in every layer, for example Qwen3, Llama or Qwen3-MoE",
    )
