"""Formula: peak memory of one training step of our engine in closed form: named terms, a function
each, and a maximum over phases. Terms are those of the GPU with the most trained tokens.

In the functions:  T tokens of that GPU's micro-batch  E hidden size  V vocabulary
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from highwater.errors import ModelError
from highwater.memory.formula.constants import (
    CPU_PROCESS_BYTES,
    CUBLAS_WORKSPACES_BYTES,
    FILLED_SHARE,
    HOST_ACTIVATIONS,
    LIKELY_FILLED_SHARE,
    LOSS,
    WORKSPACES,
    Footprint,
    MachineConstants,
    Phase,
    Term,
    outside_terms,
    phase,
    present,
)
from highwater.memory.formula.layers import (
    NUMBER_BYTES,
    OUTPUT_NORMS,
    Backward,
    Step,
    backwards,
    handed_bytes,
    host_activation_bytes,
    kept_bytes_before,
    working_set_bytes,
)
from highwater.memory.formula.moments import families
from highwater.model.families import family_row
from highwater.model.footprint import (
    PROCESS_BYTES,
    device_state_bytes,
    gradient_bytes,
    host_state_bytes,
    staged_gradient_bytes,
    trained_parameters,
    update_bytes,
)
from highwater.model.layer_kind import LayerKind
from highwater.model.model import Model
from highwater.nouns.layout import CHUNK_BYTES

FAMILIES = (
    *("granite", "granite_swa", "llama", "ministral", "ministral3", "mistral", "mixtral"),
    *("olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)
"""Model types whose layers are what the terms say: attention over grouped heads, a gated MLP or
experts that are one. Layers of others are learned (memory/formula/moments)."""
_NORM_BYTES = {"olmo": 4, **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), 10), "nanochat": 6}
_NORM_BACKWARD_BYTES, _LESS_BACKWARD_BYTES = 14, 4
"""Bytes for each of the hidden states' numbers that the last norm keeps in the loss, where it is no
kernel of its own: a copy in float32, and what it is multiplied by; and besides while it goes
backward, which is where a step peaks if no layer is recomputed: of some families a copy of the
gradient alone. Source: traces."""
_LESS_BACKWARD = ("cohere2_moe", "olmo")
_ID_BYTES = 8
_IDS = 5
"""Per token: ids, positions, labels, positions trained on, and a copy on their way to the GPU."""
_ROW_NUMBERS = 8
"""Float32 numbers per trained token: three, their gradients, and the objective's own."""


def refuse_unknown_family(model: Model) -> None:
    """Raise ModelError for a model whose layers the formula does not know."""
    family, learned = model.shape.model_type, families()
    known, kinds = sorted({*FAMILIES, *learned}), (run.kind for run in model.shape.runs)
    if family in learned and not all(learned[family].layer(family, kind, True) for kind in kinds):
        raise ModelError(
            f"{model.name} has layers that train, and whose memory no prediction knows in the "
            f"family {family}: no trace was read of their form",
            hint="measure it on a GPU: highwater find needs no prediction",
        )
    if family not in known:
        raise ModelError(
            f"{model.name} is of the family {family}, which trains, and whose "
            f"memory no prediction knows; predictions know {', '.join(known)}",
            hint="measure it on a GPU: highwater find needs no prediction; a model of the others "
            "can be predicted, for example `highwater predict Llama-3.1-8B --gpus 4xH100-80GB`",
        )


Formula = Callable[[Step], Footprint]
"""The formula of a trainer: what its step takes of the fullest GPU, in closed form."""


def footprint(step: Step) -> Footprint:
    """Memory that a step of our engine takes, in doubt rather too much than too little."""
    states = _states(step)
    phases = _phases(step, states)
    is_gpu = step.device == "cuda"
    return Footprint(
        phases=phases,
        outside=outside_terms_of(step),
        host=present(*_host_terms(step)) if is_gpu else (),
        filled_share=FILLED_SHARE[step.settings.allocator] if is_gpu else 1.0,
        cached_bytes=_cached_bytes(step, states, phases) if is_gpu else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """Parameters, gradients and moments that a GPU keeps in the course of a step."""

    lasting_bytes: int
    """Bytes that are there throughout."""
    coming_bytes: int
    """Bytes of all gradients that come as the layers go backward, and are gone before."""
    parameters: int
    """Parameters that those are the gradients of."""

    def terms(self, backward_parameters: int = 0) -> tuple[Term, ...]:
        """Terms of the states once so many parameters have their gradients."""
        come_bytes = self.coming_bytes * backward_parameters // self.parameters
        return (Term("states", self.lasting_bytes), Term("gradients that have come", come_bytes))


def _states(step: Step) -> _States:
    """The states on one GPU. Gradients of one micro-batch come late, and FSDP1's offloaded ones;
    of a policy and a critic one's at a time, since each is updated before the other goes forward.
    """
    settings = step.settings
    shards = step.layout.shard_degree
    states_bytes = device_state_bytes(step.shape, settings, device=step.device, shards=shards)
    whole_bytes = states_bytes // shards
    is_offloaded = settings.offloads_model and step.device == "cuda"
    all_bytes = 0
    if is_offloaded and settings.strategy == "fsdp":
        all_bytes = whole_bytes
    elif not settings.keeps_gradients:
        all_bytes = gradient_bytes(step.shape, settings, shards=shards) // shards
    return _States(
        lasting_bytes=whole_bytes - all_bytes,
        coming_bytes=all_bytes // settings.trained_models,
        parameters=trained_parameters(step.shape, settings),
    )


def _phases(step: Step, states: _States) -> tuple[Phase, ...]:
    """Moments of a step that may be its peak, in their order."""
    is_gpu = step.device == "cuda"
    always = (
        Term("process", 0 if is_gpu else CPU_PROCESS_BYTES),
        Term(WORKSPACES, sum(CUBLAS_WORKSPACES_BYTES) if is_gpu else 0),
        Term("ids, cosines and sines", _batch_bytes(step)),
    )
    root_bytes = step.element * (_root_parameters(step) + step.beside_tokens) if step.gathers else 0
    beside_layers = (*always, Term("embedding and head, gathered", root_bytes))
    plan, layers = step.settings.activation_plan(step.shape.layers), step.shape.layers
    kinds, before = {run.kind for run in step.shape.runs}, kept_bytes_before(step)
    working = {kind: working_set_bytes(step.layer(kind)) for kind in kinds}
    held = (*states.terms(), *beside_layers)
    tokens, is_whole = step.tokens, step.settings.recompute == "none"
    keeps = "activations of all layers" if is_whole else "kept by recompute"

    def kept_on_gpu(first: int, end: int) -> Term:
        return Term(keeps, tokens * max(0, before[end] - before[first]))

    def handed(end: int) -> Term:
        return Term("handed from layer to layer", tokens * handed_bytes(step, end))

    kept = kept_on_gpu(plan.layers_on_host, layers)
    kept_at_the_end = kept_on_gpu(plan.first_on_gpu(layers - 1), layers)
    at_the_end = (*states.terms(states.parameters), *always)
    # of the layers that went backward before, what is trained has gradients
    every = sum(run.count * run.kind.parameters for run in step.shape.runs)
    trained = sum(run.count * step.trained_of(run.kind) for run in step.shape.runs)
    # A single layer is the last one: nothing else goes backward, or is reduced meanwhile.
    *others, last = backwards(step.shape.runs)
    middle = (
        phase(
            "backward of a layer",
            *states.terms(trained * each.parameters_behind // every),
            *beside_layers,
            kept_on_gpu(plan.first_on_gpu(each.kept_layers - 1), each.kept_layers),
            handed(each.kept_layers),
            *_layer_terms(step, each, working),
            _reduction(step, _parameters_on_their_way(step, each.reduced)),
        )
        for each in others or (last,)
    )
    phases = [
        phase(LOSS, *held, kept, handed(layers), *_loss_terms(step, last.kind)),
        phase(
            "backward of the last layer",
            *(*held, kept_at_the_end, handed(layers)),
            *_layer_terms(step, last, working),
        ),
        max(middle, key=lambda each: each.bytes),
        phase("reduction of embedding and head", *at_the_end, _root_reduction(step, states)),
    ]
    if step.is_frozen and step.layout.shard_degree > 1:
        # Several GPUs have embedding, head and the first layer as they came and as they are used:
        # a peak where no gradients of both are kept, which are larger.
        root = _root_parameters(step) + step.beside_tokens
        came = step.element * (root + 2 * step.gathered(step.shape.runs[0].kind))
        terms = (*states.terms(), *beside_layers, Term("gathered, as it came", came))
        phases.insert(0, phase("gathering of embedding and head", *terms))
    shards = step.layout.shard_degree
    made = update_bytes(step.shape, step.settings, device=step.device, shards=shards)
    if made:
        phases.append(phase("update", *at_the_end, Term("update", made)))
    return tuple(phases)


_WEIGHT, _GRADIENT, _MASTER = 2, 4, 4
"""Bytes of an element: gathered in bfloat16, reduced in float32, on the host float32 if trained."""
_HOLE_FROM = 7 / 3
"""Times as large as the root's float32 gradients that activations leave a hole for them.

The gradients themselves are 1; the root as it was gathered and its gradients in bfloat16, which cut
what activations left into holes, half of that each; the rest is what lies between. Source: traces
in docs/results/lab/breakdown.json; of 8B there is a new block at 49,152 tokens on 4 GPUs and none
at 65,536, on 8 GPUs at 65,536 and none at 131,072.
"""


def _cached_bytes(step: Step, states: _States, phases: tuple[Phase, ...]) -> int:
    """Bytes that the allocator keeps reserved beside the peak, until memory runs short.

    FSDP gathers and reduces on streams of its own, whose blocks serve no other, and on the main
    stream a block serves no request longer than itself. So the largest unit, the root (embedding
    and head), stays reserved after its one use a micro-batch; it is given back before the allocator
    gives up, and decides no capacity. Source: the traces of the trials in docs/results/find.
    """
    peak_bytes = max(each.bytes for each in phases)
    late_bytes = 0  # of gradients that come, on a stream of their own, where activations go
    if states.coming_bytes:
        before_they_come = max(each.bytes for each in phases[:2])
        late_bytes = max(0, before_they_come + states.coming_bytes - peak_bytes)
    if step.settings.strategy == "fsdp":
        return _of_fsdp1(step) * step.settings.trained_models + late_bytes
    passing_bytes = peak_bytes - states.lasting_bytes - states.coming_bytes
    return _of_other_streams(step, late_bytes) + _too_long_for_a_hole(step, passing_bytes)


def _too_long_for_a_hole(step: Step, passing_bytes: int) -> int:
    """Bytes of a block kept for the root's float32 gradients, unless activations left a hole;
    ``passing_bytes``: the most alive besides the states.
    """
    whole = _GRADIENT * _root(step, has_head=not step.settings.traits.gives_scalars)
    has_gradients = step.layout.shard_degree > 1 and not step.is_frozen
    return whole if has_gradients and passing_bytes < _HOLE_FROM * whole else 0


def _of_other_streams(step: Step, late_bytes: int) -> int:
    """Bytes on FSDP2's streams: what it gathers, and of the sums the root's, which come late."""
    settings, degree = step.settings, step.layout.shard_degree
    policy = _root(step, has_head=not settings.traits.gives_scalars)
    trained = policy + (_root(step, has_head=False) if settings.trained_models > 1 else 0)
    # the reference is another model under FSDP2
    gathered = trained + (policy if settings.has_second_model else 0)
    summed = 0 if step.is_frozen else trained
    # a shard on its way in and what is gathered of it; one GPU gathers nothing
    gathering = 0 if degree == 1 else _WEIGHT * (gathered + gathered // degree)
    return max(_GRADIENT * summed // degree, late_bytes) + gathering + _from_host(step)


def _from_host(step: Step) -> int:
    """Bytes of this GPU's shard of embedding or head in float32 as it comes from the host: both
    pass through one block, and one GPU takes it on the main stream. Source: the gathering stream in
    traces of the trials long-8b-2-offload and long-8b-4-offload, 1.16 and 0.58 GiB.
    """
    degree = step.layout.shard_degree
    if not step.settings.offloads_model or degree == 1:
        return 0
    size = _WEIGHT if step.is_frozen else _MASTER
    return size * _root(step, has_head=False) * step.settings.trained_models // degree


def _of_fsdp1(step: Step) -> int:
    """Bytes of units that FSDP1 lends to another stream (alone on a GPU its host runs ahead by a
    whole pass, else it waits after two units, the root and the largest layer), and of the root's
    float32 gradients with this GPU's share of their sum, a state where states are offloaded.
    """
    shape, degree = step.shape, step.layout.shard_degree
    if degree == 1:
        return _WEIGHT * shape.parameters
    largest_layer = max(run.kind.parameters for run in shape.runs)
    of_the_last_norm = shape.hidden_size // shape.layers  # which is gathered with them, in parts
    lent = _WEIGHT * (_root(step, has_head=True) + largest_layer + of_the_last_norm)
    root = _root(step, has_head=not step.settings.traits.gives_scalars)
    return lent + _GRADIENT * (root if step.settings.offloads_model else root + root // degree)


def _root(step: Step, *, has_head: bool) -> int:
    """Parameters of embedding and head; of the embedding alone where they are tied. Every layer's
    own embeddings count along.
    """
    own = sum(each.rows * each.row_size for each in step.shape.layer_tables)
    return step.table * (2 if has_head and not step.shape.tied_embeddings else 1) + own


def outside_terms_of(step: Step, own: MachineConstants | None = None) -> tuple[Term, ...]:
    """Device memory that the allocator does not hold, as ``outside_terms``."""
    return outside_terms(
        *(step.shape, step.settings, step.layout, step.device, own),
        pinned_activation_bytes=host_activation_bytes(step),
    )


def likely_footprint(step: Step) -> Footprint:
    """Memory that a step takes most likely: as often too much as too little, where ``footprint`` is
    to be enough. Intervals lie around it, and a search begins with it.
    """
    enough = footprint(step)
    if step.device == "cpu":
        return enough
    share = LIKELY_FILLED_SHARE[step.settings.allocator]
    return msgspec.structs.replace(enough, filled_share=share)


def _batch_bytes(step: Step) -> int:
    """Bytes of T ids, and of T x head size of cosines and sines, once for each size and RoPE."""
    row = family_row(step.shape.model_type)
    by_layer = row.has_rope_by_layer
    kinds = {
        (attention.head_dim, by_layer and attention.window_tokens is not None)
        for attention in (run.kind.attention for run in step.shape.runs)
        if attention.delta is None
    }
    head_sizes = sum(head_dim for head_dim, _ in kinds)
    if row.delta is not None:  # other families that rotate a part have the rest in what was learned
        head_sizes = round(head_sizes * row.defaults["partial_rotary_factor"])
    element = NUMBER_BYTES if step.shape.model_type in OUTPUT_NORMS else step.element
    return step.tokens * (_IDS * _ID_BYTES + 2 * element * head_sizes)


def _root_parameters(step: Step) -> int:
    """Parameters of embedding and head: V x E each, once if tied or without a vocabulary's head."""
    has_own_head = not step.shape.tied_embeddings and not step.settings.traits.gives_scalars
    return step.table * (2 if has_own_head else 1)


def _loss_terms(step: Step, last: LayerKind) -> tuple[Term, ...]:
    """Terms of the loss: the last layer's output, hidden states of trained tokens and their
    gradient, what the last norm keeps, logits, the head's gradient; the last layer, gathered ahead.
    """
    hidden = step.element * step.shape.hidden_size
    is_ahead = step.layout.shard_degree > 1 or step.settings.strategy == "fsdp"
    ahead = Term("layers, gathered", step.element * step.gathered(last) if is_ahead else 0)
    kept = _NORM_BYTES.get(step.shape.model_type, 0)
    if kept and step.settings.recompute == "none":
        takes_less = step.shape.model_type in _LESS_BACKWARD
        kept += _LESS_BACKWARD_BYTES if takes_less else _NORM_BACKWARD_BYTES
    norm = Term("the last norm", kept * step.tokens * step.shape.hidden_size)
    if step.settings.traits.gives_scalars:
        return (Term("hidden states", hidden * step.tokens), norm, ahead)
    logits = step.element * step.shape.vocab_size * step.trained
    head_gradient = step.element * step.table
    if not step.settings.holds_logits:
        one, two = (min(logits, count * CHUNK_BYTES[step.device]) for count in (1, 2))
        # Summed over chunks in float32; rounded beside the last one's logits. A chunk's are there
        # until the next one's are.
        logits, head_gradient = one, 4 * step.table + max(head_gradient, two - one)
        if step.is_frozen:
            head_gradient = two - one
    elif step.is_frozen:
        head_gradient = 0
    return (
        Term("hidden states", hidden * (step.tokens + 2 * step.trained)),
        norm,
        Term("logits", logits),
        Term("statistics of tokens", 4 * _ROW_NUMBERS * step.trained),
        Term("gradient of the head", head_gradient),
        ahead,
    )


def _layer_terms(
    step: Step, backward: Backward, working: Mapping[LayerKind, int]
) -> tuple[Term, ...]:
    """Terms of a layer going backward: what a kind takes, its weights, a gathered next one's."""
    following = backward.gathered_ahead if step.layout.shard_degree > 1 else None
    ahead = 0 if following is None else step.gathered(following)
    gathered = step.gathered(backward.kind) + ahead
    # The head's gradient is the embedding's, too, where they are tied; what else the embedding has
    # of it comes after the layers.
    head = 0 if step.settings.traits.gives_scalars or step.is_frozen else step.table
    return (
        Term("one layer going backward", working[backward.kind]),
        Term("layers, gathered", step.element * gathered),
        Term("gradient of the head", step.element * head),
    )


def _parameters_on_their_way(step: Step, reduced: LayerKind | None) -> int:
    """Parameters whose gradients go to the shards meanwhile: a layer's; with copies, of two."""
    layers = 2 if step.layout.replicate_degree > 1 else 1
    if reduced is None:
        return 0
    return layers * (step.trained_of(reduced) + (0 if step.is_frozen else step.uneven(reduced)))


def _reduction(step: Step, parameters: int) -> Term:
    """The term of a unit's gradients on their way to the shards while the next goes backward."""
    return Term("gradient reduction", _reduced_element(step) * parameters)


def _reduced_element(step: Step) -> int:
    """Bytes of a number on its way to the shards: float32, but bfloat16 that stays on one GPU."""
    return 2 if step.settings.parameters == "bf16" and step.layout.gpus == 1 else 4


def _root_reduction(step: Step, states: _States) -> Term:
    """The term of embedding and head once the layers are done: their gradients in float32, this
    GPU's share of the sum unless that is a state that comes, and what is left as computed: before
    the sum the gradients of both, or of two uses with the root and the first layer's reduction;
    beside it, on several GPUs, a head's own. Source: traces.
    """
    if step.is_frozen:
        return _reduction(step, 0)
    parameters = _root_parameters(step)
    is_one, parameters = parameters == step.table, parameters + step.beside_tokens
    share = parameters // step.layout.shard_degree
    before = step.element * parameters
    if is_one and not step.settings.traits.gives_scalars:
        before += _reduction(step, step.shape.runs[0].kind.parameters).bytes
    beside = 0 if is_one or share == parameters else step.element * step.table
    left = max(beside, before - _reduced_element(step) * share)
    is_rounded = step.settings.parameters == "bf16" and step.layout.gpus > 1
    reduced = _reduction(step, parameters + (share if is_rounded or not states.coming_bytes else 0))
    return Term(reduced.name, reduced.bytes + left)


def _host_terms(step: Step) -> tuple[Term, ...]:
    """Terms of the host's memory, over all GPUs of one machine."""
    shape, settings, layout = step.shape, step.settings, step.layout
    staged_bytes = staged_gradient_bytes(shape, settings, layout=layout)
    return (
        Term("offloaded states and reference", host_state_bytes(shape, settings, layout=layout)),
        Term("gradients on their way there", staged_bytes),
        Term(HOST_ACTIVATIONS, layout.machine_gpus * host_activation_bytes(step)),
        Term("processes", layout.machine_gpus * PROCESS_BYTES),
    )
