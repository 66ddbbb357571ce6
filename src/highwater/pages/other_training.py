"""Other training: what is trained, and how it is updated, where that is something else than all of
a model by AdamW in float32; in words.
"""

from highwater.spec.settings import Settings


def other_training(settings: Settings) -> list[str]:
    """``LoRA of rank 32 beside a model in NF4``, ``AdamW with moments of 8 bits``; nothing where
    all is usual. Settings for one of these are none for another.
    """
    said: list[str] = []
    if settings.lora is not None:
        base = " beside a model in NF4" if settings.lora_base == "nf4" else ""
        said.append(f"LoRA of rank {settings.lora}{base}")
    if not settings.optimizer_traits.is_exact:
        said.append(settings.optimizer_traits.words)
    if settings.parameters == "bf16":
        said.append("parameters in bf16")
    return said
