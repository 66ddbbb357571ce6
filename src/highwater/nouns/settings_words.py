"""Settings and layouts in plain words: in a few for a table's column, in full for a sentence."""

from collections.abc import Sequence

from highwater.nouns.declared_settings import DECLARED, IN_A_LABEL
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.units import counted, format_bytes

NOTHING_SET = "nothing set"
_IN_WORDS = {
    *("allocator", "loss", "entropy", "offload", "recompute"),
    *("lora", "lora_targets", "lora_base", "optimizer", "parameters"),
}
_RECOMPUTE = {"all-but-attention": "attention's outputs kept", "none": "no recomputation"}
_BY_LABEL = tuple(row for row in IN_A_LABEL if row.name not in _IN_WORDS)
_CHUNKED_LOSS, _HOST_STATES, _HOST_MOMENTS = "chunked loss", "states on host", "moments on host"


def short_settings(settings: Settings) -> str:
    """What tells one row of a table from another: ``expandable, chunked loss, states on host``;
    ``nothing set`` where nothing is.
    """
    said = other_training(settings)
    said += ["expandable"] if settings.allocator == "expandable" else []
    said += [_CHUNKED_LOSS] if settings.loss == "chunked" else []
    said += ["chunked entropy"] if settings.entropy == "chunked" else []
    said += [_HOST_STATES] if settings.offloads_model else []
    said += [_HOST_MOMENTS] if settings.offloads_states else []
    said += _others(settings)
    return ", ".join(said) or NOTHING_SET


def settings_in_words(
    settings: Settings,
    layout: Layout | None = None,
    *,
    host_bytes: int | None = None,
    is_lowered: bool = False,
    is_scaled: bool = False,
) -> str:
    """Settings and degrees as the end of a sentence that says "with": ``expandable segments, a
    chunked loss and each sequence shared by 2 GPUs (Ulysses)``.

    ``host_bytes`` is what offload takes of the host's memory; ``is_lowered`` says that a
    micro-batch holds fewer sequences than by default, ``is_scaled`` that YaRN scales the positions.
    """
    said = other_training(settings)
    said += ["expandable segments"] if settings.allocator == "expandable" else []
    said += [f"a {_CHUNKED_LOSS}"] if settings.loss == "chunked" else []
    said += ["a chunked entropy"] if settings.entropy == "chunked" else []
    said += _others(settings)
    takes = "" if host_bytes is None else f" ({format_bytes(host_bytes)} of it)"
    said += [f"all states in host memory{takes}"] if settings.offloads_model else []
    said += [f"the optimizer's moments in host memory{takes}"] if settings.offloads_states else []
    said += [] if layout is None else _of_layout(layout)
    if is_lowered:
        said.append(f"{counted(settings.sequences_per_micro_batch, 'sequence')} a micro-batch")
    said += ["YaRN"] if is_scaled else []
    return listed(said) or NOTHING_SET


def other_training(settings: Settings) -> list[str]:
    """What is trained, and how it is updated, where that is something else than all of a model by
    AdamW in float32: ``LoRA of rank 32 beside a model in NF4``, ``AdamW with moments of 8 bits``.

    Settings for one of these are none for another.
    """
    said: list[str] = []
    if settings.lora is not None:
        base = " beside a model in NF4" if settings.lora_base == "nf4" else ""
        targets = DECLARED["lora_targets"].label_of(settings.lora_targets)
        on = f" on {targets.removeprefix('on-').replace(',', ', ')}" if targets else ""
        said.append(f"LoRA of rank {settings.lora}{on}{base}")
    if not settings.optimizer_traits.is_exact:
        said.append(settings.optimizer_traits.words)
    if settings.parameters == "bf16":
        said.append("parameters in bf16")
    return said


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = words or ("",)
    return f"{', '.join(first)} and {last}" if first else last


def _others(settings: Settings) -> list[str]:
    """What is recomputed, where that is not all of a layer; and by its label what else is set."""
    label = DECLARED["recompute"].label_of(settings.recompute)
    said = [_RECOMPUTE.get(settings.recompute, label)] if label else []
    labels = (row.label_of(getattr(settings, row.rung_field)) for row in _BY_LABEL)
    return said + [label for label in labels if label]


def _of_layout(layout: Layout) -> list[str]:
    said: list[str] = []
    if layout.ulysses_degree > 1:
        said.append(f"each sequence shared by {layout.ulysses_degree} GPUs (Ulysses)")
    if layout.ring_degree > 1:
        said.append(f"a ring of {layout.ring_degree}")
    if layout.replicate_degree > 1:
        said.append(f"{layout.replicate_degree} copies of the states")
    return said
