"""Logits of another trainer's loss: which families have one that never holds them whole, and what
they take of a GPU where it does.

The loss of Hugging Face's models, and torchtitan's, makes a copy of all logits in float32, whose
gradient is as large. A fused loss makes a few at a time, and is written for some families alone.

Sources: ``MODEL_TYPE_TO_APPLY_LIGER_FN`` of liger-kernel 0.8.1 and 0.8.5, but granite, whose patch
refuses the fused loss; ``integrations/cut_cross_entropy/README.md`` of axolotl 0.19.0;
``ForCausalLMLoss`` in ``loss/loss_utils.py`` of transformers 5.6.0.
"""

from collections.abc import Collection

from highwater.model.model import ModelShape
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import Cell

LIGER: frozenset[str] = frozenset(
    (
        *("exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3"),
        *("qwen2", "qwen3", "qwen3_moe", "smollm3"),
    )
)
"""Families that train here and whose loss Liger fuses."""
CUT_CROSS_ENTROPY: frozenset[str] = frozenset(
    (
        *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "exaone_moe", "glm"),
        *("glm4_moe", "granite", "granitemoe", "granitemoeshared", "minimax_m2", "ministral3"),
        *("olmo", "olmoe", "qwen2_moe", "seed_oss"),
    )
)
"""Families that train here and whose loss Axolotl fuses by Cut Cross Entropy, and not by Liger."""
_ELEMENT_BYTES = 2 + 4 + 4
"""Bytes of a logit: in bfloat16 as the head made it, its copy in float32 and its gradient."""


def is_fused(cell: Cell, shape: ModelShape | None, families: Collection[str] = LIGER) -> bool:
    """Whether a chunked loss was asked for, of one of these families or an unknown model."""
    is_known = shape is None or shape.model_type in families
    return is_known and not cell.settings.holds_logits


def unfused(cell: Cell, why: str) -> tuple[str, ...]:
    """What a trainer cannot express of a chunked loss that was asked for, and why not."""
    return () if cell.settings.holds_logits else (f"--loss chunked {why}: its logits are whole",)


def whole_logits_bytes(chosen: Candidate, shape: ModelShape | None) -> int | None:
    """Bytes of a GPU that the logits of its share of a micro-batch take, whole; None of a model
    that is not here, and of an objective without any.
    """
    if shape is None or chosen.cell.settings.traits.gives_scalars:
        return None
    return _ELEMENT_BYTES * shape.vocab_size * chosen.token_budget_tokens


def bytes_with_logits(found: Recommendation, chosen: Candidate, logits_bytes: int) -> int:
    """Bytes of a GPU that a trainer's whole logits take together with the rest of the predicted
    step's, which of those 10 bytes has the 2 of bfloat16 where its logits are whole, too. Where
    nobody knows the rest, the logits' alone.
    """
    if chosen.headroom_bytes is None:
        return logits_bytes
    used_bytes = found.device_bytes - found.reserved_bytes - chosen.headroom_bytes
    own_bytes = logits_bytes // 5 if chosen.cell.settings.holds_logits else 0
    return used_bytes + logits_bytes - own_bytes
