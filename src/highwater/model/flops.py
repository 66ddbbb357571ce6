"""Model FLOPs of a training step, for MFU. Recomputation is not counted: it is overhead, not model
work.
"""

from highwater.model.layer_kind import AttentionKind
from highwater.model.model import ModelShape
from highwater.nouns.lora import adapter_parameters
from highwater.nouns.settings import Settings
from highwater.nouns.sparse_pattern import SparsePatternConfig, kept_pairs


def step_flops(shape: ModelShape, *, length_tokens: int, sequences: int, settings: Settings) -> int:
    """FLOPs of a step over ``sequences`` documents of ``length_tokens`` each, causal attention.

    Forward and backward of every trained model, and the passes that the objective asks for
    beforehand: the reference's, the critic's values; each a third of them.

    6 per matmul weight and token, of which a frozen one has 4: its own gradient is not computed;
    and the attention of every layer and document. Source: Chowdhery et al., PaLM, appendix B, with
    the causal half counted, as FlashAttention does.
    """
    forward = 2 * shape.matmul_parameters
    linear = 3 * forward
    if settings.adapters is not None:
        linear = 2 * forward + 6 * adapter_parameters(shape, settings.adapters)
    attention = sum(
        run.count * _attention_flops(run.kind.attention, length_tokens, settings.pattern)
        for run in shape.runs
    )
    beforehand = settings.traits.has_reference + settings.critic
    trained = settings.trained_models * (linear * length_tokens + attention)
    return sequences * (trained + beforehand * (forward * length_tokens + attention // 3))


def _attention_flops(
    attention: AttentionKind, length_tokens: int, pattern: SparsePatternConfig | None
) -> int:
    """FLOPs of one layer's attention over one document, forward and backward.

    Q.K and P.V are 2 FLOPs per product, and the backward pass has them twice: 3 x 2 x 2 x head_dim
    x query_heads for each pair of a token and one that it reads. Those pairs are half of length²,
    the causal triangle; with a window half of what is left of length² once the smaller triangle,
    of tokens further back than the window, is cut off. With a pattern they are what it keeps.
    """
    if pattern is not None:
        return 3 * 2 * 2 * kept_pairs(pattern, length_tokens) * attention.query_size
    further_back = 0
    if attention.window_tokens is not None:
        further_back = max(0, length_tokens - attention.window_tokens)
    twice_the_pairs = length_tokens**2 - further_back**2
    return 3 * 2 * twice_the_pairs * attention.query_size
