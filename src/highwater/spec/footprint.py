"""Footprint: what one training step keeps in memory, in closed form. The first guess of a search and simulated trials share it."""

from collections.abc import Mapping

from highwater.spec.model import STATE_BYTES_PER_PARAMETER, ModelShape
from highwater.spec.settings import Settings
from highwater.spec.trial import Device
from highwater.units import MIB

ENGINE_LOGITS_BYTES = 2.0
"""Per token x vocabulary, ``full``: bf16 logits, overwritten by their own gradient. Source: engine/loss.py."""
GATHERED_BYTES_PER_EMBEDDING = 4
"""Embedding and head, whole on every GPU while in use. Fitted to the published A100 tables."""
FIXED_BYTES: Mapping[Device, int] = {"cuda": 2_500_000_000, "cpu": 512 * MIB}
"""Besides states and gathered weights, context included: fitted to the published A100 tables; on the CPU, Python with torch."""


def state_bytes(shape: ModelShape, settings: Settings) -> int:
    """Parameters, gradients and optimizer states of every trained model, unsharded, on the GPUs; 0 where they are offloaded.

    A reward model and a critic have a number in the place of the vocabulary: less by a head where it is not the embedding.
    """
    return 0 if settings.offload else STATE_BYTES_PER_PARAMETER * shape.parameters * settings.trained_models


def gathered_bytes(shape: ModelShape) -> int:
    """Embedding and head while they are gathered."""
    return GATHERED_BYTES_PER_EMBEDDING * shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)


def layer_input_bytes(shape: ModelShape) -> int:
    """Per token: the inputs of all layers in bf16, what recomputation keeps."""
    return 2 * shape.hidden_size * shape.layers


def layer_bytes(shape: ModelShape) -> int:
    """Per token: one decoder layer's activations in bf16: norms and residuals, q, k, v and the output, the MLP's three products.

    q to output twice: before and after rotation or transposition. For Qwen3-0.6B with layer inputs 101 KiB a token,
    where Hugging Face with a fused loss was measured at 107.
    """
    attention = 2 * shape.head_dim * (shape.query_heads + shape.kv_heads)
    mlp = 4 * shape.intermediate_size * shape.experts_per_token
    return 2 * (4 * shape.hidden_size + attention + mlp)
