"""Trinity: Trinity-RFT's trainer (verl's actor) in closed form, as its published A100 tables show
it.

``peak = 16 P / shards + 8 T V + 2 T E layers + 4 V E (1 if tied, else 2) + 2.5e9`` bytes, context
included: fitted to those tables, of which it gives 69 of the 80 cells with expandable segments and
30 of the 40 others exactly, the rest within a step of the grid.

T tokens of one GPU's micro-batch  E hidden size  V vocabulary  P parameters

With LoRA its first term is ``(4 P + 16 A) / shards`` for A parameters of adapters. It has one dtype
for all of a model, float32, in which adapters are trained: the frozen model is in that too.
Source: ``_build_lora_module`` in ``verl/workers/engine/fsdp/transformer_impl.py`` of verl 0.9.1.

What the published trials of the reference trainer have in common, as fields of a request.
"""

from collections.abc import Mapping
from typing import Any

from highwater.errors import ModelError
from highwater.memory.formula.constants import Footprint, Phase, Term
from highwater.model.footprint import (
    device_state_bytes,
    host_state_bytes,
    layer_input_bytes,
    policy_parameters,
)
from highwater.model.logit_transform import reads_a_transform
from highwater.model.model import ModelShape
from highwater.nouns.layout import Layout
from highwater.nouns.published import PUBLISHED_SETTINGS
from highwater.nouns.settings import Settings
from highwater.nouns.trial import PROMPT_TOKENS, Device

ACCURACY = (
    "by the closed form, fitted to the published A100 table, of which it has 69 of 80 cells with "
    "expandable segments and 30 of 40 without, the others within one step of the grid"
)
"""What is known of the closed form's errors."""
OF_ADAPTERS = "the table is of whole models: LoRA has other states there, which nobody measured"
"""What is known of them besides, where adapters are trained."""
_LOGITS_BYTES = 8.0
"""Bytes of logits per token x vocabulary in Trinity-RFT and verl, which divide by the temperature
in place through a view. Measured, torch 2.11."""
_FIXED_BYTES = 2_500_000_000
"""Bytes that no length changes, besides states, embedding and head; the context is included. Fitted
to the published A100 tables."""
_EMBEDDING_BYTES = 4
"""Bytes per element of embedding and head, whole on every GPU while in use. Fitted to the published
A100 tables."""
_WIDER_BYTES = 2
"""Bytes per element of a frozen model that float32 takes more than bfloat16, which our own engine
has it in."""
_FILLED_SHARE: Mapping[str, float] = {"expandable": 1.0, "native": 0.86}
"""Share of the allocator's memory that live tensors can fill. Fitted to the published A100 tables,
where the native allocator loses 12 to 14 %."""


def tokens_of_a_gpu(settings: Settings, layout: Layout, length_tokens: int) -> int:
    """Tokens of one GPU in a micro-batch; ranks that share a sequence have equal parts, the last
    one padded.
    """
    sequences = max(1, settings.sequences(length_tokens, context_degree=layout.context_degree))
    return -(-sequences * length_tokens // layout.context_degree)


def footprint(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    *,
    length_tokens: int,
    device: Device = "cuda",
    prompt_tokens: int = PROMPT_TOKENS,  # noqa: ARG001 (it was fitted to trials with prompts)
) -> Footprint:
    """What a step of that trainer takes: two sequences of the length in a micro-batch, unless the
    settings say otherwise.

    Raises ModelError for a family whose own class, which that trainer runs, makes scaled or capped
    logits beside those of its head.
    """
    if reads_a_transform(shape.model_type):
        raise ModelError(
            f"the family {shape.model_type} scales or caps its logits in further buffers of their "
            f"size where that trainer runs it, which nobody measured",
            hint="use a family with plain logits, for example `highwater predict Qwen3-8B --gpus "
            "4xH100-80GB --trainer trinity`",
        )
    tokens = tokens_of_a_gpu(settings, layout, length_tokens)
    wider = 0 if settings.lora is None else _WIDER_BYTES * policy_parameters(shape, settings)
    on_device = device_state_bytes(shape, settings, device=device)
    states = (on_device + (0 if settings.offloads_model else wider)) // layout.shard_degree
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    host = host_state_bytes(shape, settings, layout=layout)
    host += wider * settings.offloads_model * (layout.machine_gpus // layout.shard_degree)
    terms = (
        Term(name="states", bytes=states),
        Term(name="logits", bytes=round(_LOGITS_BYTES * tokens * shape.vocab_size)),
        Term(name="kept by recompute", bytes=tokens * layer_input_bytes(shape)),
        Term(name="embedding and head, gathered", bytes=_EMBEDDING_BYTES * embeddings),
        Term(name="context and the rest", bytes=_FIXED_BYTES),
    )
    return Footprint(
        phases=(Phase(name="loss", terms=terms),),
        outside=(),
        host=(Term(name="offloaded states and reference", bytes=host),),
        filled_share=_FILLED_SHARE[settings.allocator],
    )


_ALWAYS = ("strategy", "objective", "entropy", "loss")


def published_fields(named: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not asked about, where ``named`` are.

    With offload it shards by FSDP2 and has expandable segments: no published rung offloads
    otherwise, and its configuration offloads by FSDP2 alone. With LoRA, of which none was
    published, FSDP2 keeps frozen and trained parameters apart.
    """
    is_offloaded = named.get("offload", False) is not False
    published = PUBLISHED_SETTINGS["env+offload" if is_offloaded else "vanilla"]
    names = (
        *_ALWAYS,
        *(("allocator",) if is_offloaded else ()),
        *(() if "token_budget" in named else ("sequences_per_micro_batch",)),
    )
    fields: dict[str, Any] = {name: getattr(published, name) for name in names}
    fields["prompt_tokens"] = PROMPT_TOKENS
    return fields if named.get("lora") is None else {**fields, "strategy": "fsdp2"}
