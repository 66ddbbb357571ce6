"""Model FLOPs of a training step, for MFU. Recomputation is not counted: it is overhead, not model work."""

from highwater.spec.model import ModelShape
from highwater.spec.settings import Settings


def step_flops(shape: ModelShape, *, length_tokens: int, sequences: int, settings: Settings) -> int:
    """FLOPs of a step over ``sequences`` documents of ``length_tokens`` each, causal attention.

    Forward and backward of every trained model, and the passes that the objective asks for beforehand: GRPO's reference, the
    critic's values; each a third of them.

    6 per matmul weight and token, plus 3 x (2 x length² x head_dim x query_heads) per layer and document:
    Q.K and P.V are 2 FLOPs per product, and the causal mask halves them.
    Source: Chowdhery et al., PaLM, appendix B, with the causal half counted, as FlashAttention does.
    """
    linear = 6 * shape.matmul_parameters * length_tokens
    attention = 3 * 2 * length_tokens**2 * shape.head_dim * shape.query_heads * shape.layers
    beforehand = (settings.objective == "grpo") + settings.critic
    return sequences * (linear + attention) * (3 * settings.trained_models + beforehand) // 3
