"""Formula: peak memory of one training step of our engine in closed form: named terms, a function each, and a maximum over phases.

No single sum: the logits are gone when a layer is recomputed. Terms are of one GPU, the one with the most trained tokens.

What a layer takes is prediction/layers.py's.

In the functions:  T tokens of that GPU's micro-batch  N trained ones of them  E hidden size  V vocabulary
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from highwater.errors import ModelError
from highwater.prediction.cached import cached_bytes
from highwater.prediction.constants import (
    CONTEXT_BYTES,
    CONTEXT_OF_SEVERAL_BYTES,
    CPU_PROCESS_BYTES,
    CUBLAS_WORKSPACES_BYTES,
    FILLED_SHARE,
    LIKELY_FILLED_SHARE,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_BYTES,
    NCCL_SECOND_GROUP_BYTES,
    PAGE_TABLE_BYTES,
    PAGE_TABLE_COVERS_BYTES,
    MachineConstants,
)
from highwater.prediction.layers import Step, busiest_step, kept_bytes, layer_parameters, working_set_bytes
from highwater.prediction.terms import WORKSPACES, Footprint, Phase, Term, present
from highwater.spec.footprint import (
    PROCESS_BYTES,
    device_state_bytes,
    host_state_bytes,
    pinned_state_bytes,
    staged_gradient_bytes,
)
from highwater.spec.layout import Layout
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, Model, ModelShape
from highwater.spec.settings import Settings
from highwater.spec.trial import Device
from highwater.units import MIB

FAMILIES = ("llama", "ministral", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose layers are what the terms say: attention over grouped heads, a gated MLP or experts that are one."""
CHUNK_BYTES: Mapping[Device, int] = {"cuda": 512 * MIB, "cpu": 32 * MIB}
"""Logits of one chunk where they are never whole. Source: engine/loss.py."""
_ID_BYTES = 8
_IDS = 5
"""Per token: ids, positions, labels, positions trained on, and a copy on their way to the GPU."""
_ROW_NUMBERS = 8
"""Float32 numbers per trained token: its log-probability, entropy and normaliser, their gradients, and the objective's own."""


def refuse_unknown_family(model: Model) -> None:
    """Raise ModelError for a model whose layers the formula does not know."""
    if model.shape.model_type not in FAMILIES:
        raise ModelError(
            f"{model.name} is of the family {model.shape.model_type}; predictions know {', '.join(FAMILIES)}",
            hint="a model of these can be predicted, for example `highwater predict Llama-3.1-8B --gpus 4xH100-80GB`",
        )


class Formula(Protocol):
    """A trainer in closed form."""

    def __call__(
        self,
        shape: ModelShape,
        settings: Settings,
        layout: Layout,
        *,
        length_tokens: int,
        device: Device = "cuda",
        state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER,
    ) -> Footprint:
        """What a step takes on synthetic sequences of this length; of one GPU, the fullest."""
        ...


def footprint(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    *,
    length_tokens: int,
    device: Device = "cuda",
    state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER,
) -> Footprint:
    """What a step of our engine takes on synthetic sequences of this length.

    ``state_bytes_per_parameter`` scales parameters, gradients and optimizer states together, for optimizers that are not ours,
    wherever they lie; not what is on its way between them.
    """
    step = busiest_step(shape, settings, layout, length_tokens, device)
    states_bytes = device_state_bytes(shape, settings, device=device) // layout.shard_degree
    states = Term(name="states", bytes=states_bytes * state_bytes_per_parameter // STATE_BYTES_PER_PARAMETER)
    # Offloaded by FSDP1, all that is left of them on a GPU are gradients, which come as the inputs of their layers go.
    is_late = settings.offload and settings.strategy == "fsdp" and device == "cuda"
    always = (
        Term(name="process", bytes=CPU_PROCESS_BYTES if device == "cpu" else 0),
        Term(name=WORKSPACES, bytes=sum(CUBLAS_WORKSPACES_BYTES) if device == "cuda" else 0),
        Term(name="ids, cosines and sines", bytes=_batch(step)),
    )
    root = Term(name="embedding and head, gathered", bytes=step.element * _root_parameters(step))
    # A single layer is the last one: no other goes backward with one input less, nor while one is reduced.
    layers_before, reduced = (shape.layers - 1, layer_parameters(shape)) if shape.layers > 1 else (1, 0)
    held = Term(name="states", bytes=states.bytes * (shape.layers - 1) // shape.layers) if is_late else states
    last = (*(() if is_late else (states,)), *always, root, _kept_term(step, shape.layers))
    before = (held, *always, root, _kept_term(step, 1 if is_late else layers_before))
    phases = (
        Phase(name="loss", terms=present(*last, *_loss_terms(step))),
        Phase(name="backward of the last layer", terms=present(*last, *_layer_terms(step))),
        Phase(name="backward of a layer", terms=present(*before, *_layer_terms(step), _reduction(reduced))),
        Phase(name="reduction of embedding and head", terms=present(states, *always, *_root_terms(step))),
    )
    peak_bytes = max(phase.bytes for phase in phases)
    late_bytes = max(phase.bytes for phase in phases[:2]) + states.bytes - peak_bytes if is_late else 0
    return Footprint(
        phases=phases,
        outside=outside_terms(shape, settings, layout, device, state_bytes_per_parameter=state_bytes_per_parameter),
        host=present(*_host_terms(shape, settings, layout, state_bytes_per_parameter)) if device == "cuda" else (),
        filled_share=FILLED_SHARE[settings.allocator] if device == "cuda" else 1.0,
        cached_bytes=cached_bytes(shape, settings, layout, passing_bytes=peak_bytes - states.bytes, late_bytes=max(0, late_bytes))
        if device == "cuda"
        else 0,
    )


def likely_footprint(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    *,
    length_tokens: int,
    device: Device = "cuda",
    state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER,
) -> Footprint:
    """The same as often too much as too little, where ``footprint`` is to be enough: what intervals lie around, and what a search
    begins with.
    """
    enough = footprint(
        shape, settings, layout, length_tokens=length_tokens, device=device, state_bytes_per_parameter=state_bytes_per_parameter
    )
    if device == "cpu":
        return enough
    return msgspec.structs.replace(enough, filled_share=LIKELY_FILLED_SHARE[settings.allocator])


def _batch(step: Step) -> int:
    """``T`` ids, and for all layers T x head size of cosines and of sines."""
    return step.tokens * (_IDS * _ID_BYTES + 2 * step.rotation_element * step.shape.head_dim)


def _root_parameters(step: Step) -> int:
    """Embedding and head, V x E each, or once if tied or if a number stands in the place of the vocabulary: gathered from the first
    layer to the last gradient.
    """
    has_own_head = not step.shape.tied_embeddings and step.settings.objective != "rw"
    return step.table * (2 if has_own_head else 1)


def _kept_term(step: Step, layers: int) -> Term:
    """Of so many layers."""
    name = "activations of all layers" if step.settings.recompute == "none" else "kept by recompute"
    return Term(name=name, bytes=step.tokens * layers * kept_bytes(step))


def _loss_terms(step: Step) -> tuple[Term, ...]:
    """The last layer's output, hidden states of trained tokens and their gradient, logits, the head's gradient; a layer gathered
    ahead.
    """
    hidden = step.element * step.shape.hidden_size
    is_ahead = step.layout.shard_degree > 1 or step.settings.strategy == "fsdp"
    ahead = Term(name="layers, gathered", bytes=step.element * layer_parameters(step.shape) if is_ahead else 0)
    if step.settings.objective == "rw":
        return (Term(name="hidden states", bytes=hidden * step.tokens), ahead)
    logits = step.element * step.shape.vocab_size * step.trained
    head_gradient = step.element * step.table
    if not step.settings.holds_logits:
        one, two = (min(logits, count * CHUNK_BYTES[step.device]) for count in (1, 2))
        # Summed over chunks in float32; rounded beside the last one's logits. A chunk's are there until the next one's are.
        logits, head_gradient = one, 4 * step.table + max(head_gradient, two - one)
    return (
        Term(name="hidden states", bytes=hidden * (step.tokens + 2 * step.trained)),
        Term(name="logits", bytes=logits),
        Term(name="statistics of tokens", bytes=4 * _ROW_NUMBERS * step.trained),
        Term(name="gradient of the head", bytes=head_gradient),
        ahead,
    )


def _layer_terms(step: Step) -> tuple[Term, ...]:
    """A layer recomputed and going backward; its weights, and the next one's if they come from other GPUs."""
    gathered = layer_parameters(step.shape) * (2 if step.layout.shard_degree > 1 else 1)
    # The head's is the embedding's, too, where they are tied; what else the embedding has comes after the layers.
    head = 0 if step.settings.objective == "rw" else step.table
    return (
        Term(name="one layer going backward", bytes=working_set_bytes(step)),
        Term(name="layers, gathered", bytes=step.element * gathered),
        Term(name="gradient of the head", bytes=step.element * head),
    )


def _reduction(parameters: int) -> Term:
    """Gradients of one unit in float32, on their way to the shards while the next one goes backward."""
    return Term(name="gradient reduction", bytes=4 * parameters)


def _root_terms(step: Step) -> tuple[Term, ...]:
    """One gradient as it was computed, V x E; those of embedding and head in float32, and this GPU's share of their sum."""
    parameters, degree = _root_parameters(step), step.layout.shard_degree
    share = parameters // degree if degree > 1 else 0
    return (
        Term(name="gradient of embedding or head", bytes=step.element * step.table),
        _reduction(parameters + share),
    )


def context_bytes(device: Device, *, gpus: int) -> int:
    """What a rank's process takes of its GPU besides the allocator and NCCL."""
    return (CONTEXT_BYTES if gpus == 1 else CONTEXT_OF_SEVERAL_BYTES)[device]


def outside_terms(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    device: Device,
    own: MachineConstants | None = None,
    *,
    state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER,
) -> tuple[Term, ...]:
    """Device memory that the allocator does not hold: by own readings, where there are some of as many GPUs or more."""
    if device == "cpu":
        return present(Term(name="context", bytes=context_bytes(device, gpus=layout.gpus)))
    if own is None:
        context, nccl, all_to_all = context_bytes(device, gpus=layout.gpus), NCCL_BYTES, NCCL_ALL_TO_ALL_BYTES
    else:
        context = _next_larger(own.context_bytes, layout.gpus)
        nccl, all_to_all = NCCL_BYTES | own.nccl_bytes, NCCL_ALL_TO_ALL_BYTES | own.nccl_all_to_all_bytes
    return present(
        Term(name="context", bytes=context),
        Term(name="page tables of pinned memory", bytes=_page_table_bytes(shape, settings, layout, state_bytes_per_parameter)),
        *(() if layout.gpus == 1 else _nccl_terms(layout, nccl, all_to_all)),
    )


def _page_table_bytes(shape: ModelShape, settings: Settings, layout: Layout, state_bytes_per_parameter: int) -> int:
    """For what a rank has of pinned host memory."""
    gpus = layout.gpus
    states = pinned_state_bytes(shape, settings, gpus=gpus, state_bytes_per_parameter=state_bytes_per_parameter)
    pinned = states + staged_gradient_bytes(shape, settings, gpus=gpus)
    return -(-pinned // (gpus * PAGE_TABLE_COVERS_BYTES)) * PAGE_TABLE_BYTES


def _nccl_terms(layout: Layout, nccl: Mapping[int, int], all_to_all: Mapping[int, int]) -> tuple[Term, ...]:
    """One communicator for all GPUs; a second where fewer share a sequence. Between the sizes that were read, the next larger."""
    own_group = 1 < layout.ulysses_degree < layout.gpus
    group_bytes = _next_larger(nccl, layout.gpus) + (NCCL_SECOND_GROUP_BYTES if own_group else 0)
    terms = (Term(name="NCCL", bytes=group_bytes),)
    if layout.ulysses_degree == 1:
        return terms
    return (*terms, Term(name="NCCL, all-to-all", bytes=_next_larger(all_to_all, layout.ulysses_degree)))


def _next_larger(by_gpus: Mapping[int, int], gpus: int) -> int:
    return by_gpus[min((count for count in by_gpus if count >= gpus), default=max(by_gpus))]


def _host_terms(shape: ModelShape, settings: Settings, layout: Layout, state_bytes_per_parameter: int) -> tuple[Term, ...]:
    states = host_state_bytes(shape, settings, gpus=layout.gpus, state_bytes_per_parameter=state_bytes_per_parameter)
    return (
        Term(name="offloaded states and reference", bytes=states),
        Term(name="gradients on their way there", bytes=staged_gradient_bytes(shape, settings, gpus=layout.gpus)),
        Term(name="processes", bytes=layout.gpus * PROCESS_BYTES),
    )
