"""Formula: peak memory of one training step of our engine in closed form: named terms, a function
each, and a maximum over phases. Terms are those of the GPU with the most trained tokens; they make
a ``Footprint`` (constants.py). The root is FSDP's root unit: embedding, head, other tables.

In the functions:  T tokens of that GPU's micro-batch  E hidden size  V vocabulary
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from highwater.model.held_bytes import (
    PROCESS_BYTES,
    device_state_bytes,
    gradient_bytes,
    host_state_bytes,
    staged_gradient_bytes,
    trained_parameters,
    update_bytes,
)
from highwater.model.layer_kind import LayerKind, learned_positions
from highwater.model.model import Model
from highwater.nouns.layout import CHUNK_BYTES
from highwater.nouns.objective import saved_outside

FAMILIES = (
    *("granite", "granite_swa", "llama", "ministral", "ministral3", "mistral", "mixtral"),
    *("olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)
"""Model types whose layers have closed-form terms: attention over grouped heads, and a gated MLP or
gated experts. Layers of other types are learned from traces (memory/formula/moments)."""
_NORM_BYTES = {"olmo": 4, **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), 10), "nanochat": 6}
_NORM_BACKWARD_BYTES, _LESS_BACKWARD_BYTES = 14, 4
"""Bytes per number of the hidden states that the last norm keeps during the loss, in families
without a kernel for it: a copy in float32, and the factor. Further bytes during its backward pass,
where a step peaks if no layer is recomputed; of the families in ``_LESS_BACKWARD`` only a copy of
the gradient. Source: traces."""
_LESS_BACKWARD = ("cohere2_moe", "olmo")
_ID_BYTES = 8
_IDS = 5
"""Numbers per token: id, position, label, trained position, and a copy on its way to the GPU."""
_ROW_NUMBERS = 8
"""Float32 numbers per trained token: three statistics, their gradients, and the objective's own."""


def refuse_unknown_family(model: Model) -> None:
    """Raise ModelError for a model whose layers have neither terms nor learned moments."""
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
"""The formula of a trainer: memory of its step on the fullest GPU, in closed form."""


def upper_footprint(step: Step) -> Footprint:
    """Upper estimate of a step's memory: ``likely_footprint`` with another ``filled_share``."""
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
    """Parameters, gradients and optimizer states on one GPU, and how they grow during a step."""

    lasting_bytes: int
    """Bytes that are alive throughout the step."""
    coming_bytes: int
    """Bytes of the gradients that are allocated during the backward pass, and not alive before."""
    parameters: int
    """Number of parameters whose gradients ``coming_bytes`` has."""

    def terms(self, backward_parameters: int = 0) -> tuple[Term, ...]:
        """Terms of the states once ``backward_parameters`` parameters have their gradients."""
        come_bytes = self.coming_bytes * backward_parameters // self.parameters
        return (Term("states", self.lasting_bytes), Term("gradients that have come", come_bytes))


def _states(step: Step) -> _States:
    """The states on one GPU. With ``Settings.keeps_gradients`` (two micro-batches or more, which is
    the default, or an offloaded model) their gradients last throughout the step. Else, and with
    FSDP1's offload, the backward pass allocates them; those of policy and critic one model at a
    time, each updated before the other's.
    """
    settings = step.settings
    shards = step.layout.shard_degree
    states_bytes = device_state_bytes(step.shape, settings, device=step.device, shards=shards)
    own_bytes = states_bytes // shards
    is_offloaded = settings.offloads_model and step.device == "cuda"
    late_bytes = 0
    if is_offloaded and settings.strategy == "fsdp":
        late_bytes = own_bytes
    elif not settings.keeps_gradients:
        late_bytes = gradient_bytes(step.shape, settings, shards=shards) // shards
    return _States(
        lasting_bytes=own_bytes - late_bytes,
        coming_bytes=late_bytes // settings.trained_models,
        parameters=trained_parameters(step.shape, settings),
    )


def _phases(step: Step, states: _States) -> tuple[Phase, ...]:
    """Phases of a step in which its memory may peak, in order of time."""
    is_gpu = step.device == "cuda"
    always = (  # in every phase
        Term("process", 0 if is_gpu else CPU_PROCESS_BYTES),
        Term(WORKSPACES, sum(CUBLAS_WORKSPACES_BYTES) if is_gpu else 0),
        Term("ids, cosines and sines", _batch_bytes(step)),
    )
    root_bytes = _root_bytes(step)
    # the root stays gathered until all layers have gone backward
    always_and_root = (*always, Term("embedding and head, gathered", root_bytes * step.gathers))
    before_gradients = (*states.terms(), *always_and_root)
    with_all_gradients = (*states.terms(states.parameters), *always)
    layers = step.shape.layers
    plan = step.settings.activation_plan(layers)
    kept_before = kept_bytes_before(step)
    kinds = {run.kind for run in step.shape.runs}
    working = {kind: working_set_bytes(step.layer(kind)) for kind in kinds}
    is_whole = step.settings.recompute == "none"
    keeps = "activations of all layers" if is_whole else "kept by recompute"

    def kept_on_gpu(first: int, end: int) -> Term:
        """What layers ``first`` to ``end - 1`` (from 0) keep for their backward pass."""
        return Term(keeps, step.tokens * max(0, kept_before[end] - kept_before[first]))

    def handed(end: int) -> Term:
        return Term("handed from layer to layer", step.tokens * handed_bytes(step, end))

    # trained parameters of the layers whose backward pass is done have gradients
    in_layers = sum(run.count * run.kind.parameters for run in step.shape.runs)
    trained_in_layers = sum(run.count * step.trained_of(run.kind) for run in step.shape.runs)
    # A single layer is the last one: no other layer goes backward or is reduced meanwhile.
    *others, last = backwards(step.shape.runs)
    middle = (
        phase(
            "backward of a layer",
            *states.terms(trained_in_layers * each.parameters_behind // in_layers),
            *always_and_root,
            kept_on_gpu(plan.first_on_gpu(each.kept_layers - 1), each.kept_layers),
            handed(each.kept_layers),
            *_layer_terms(step, each, working),
            _reduction(step, _parameters_on_their_way(step, each.reduced)),
        )
        for each in others or (last,)
    )
    phases = [
        phase(
            LOSS,
            *before_gradients,
            kept_on_gpu(plan.layers_on_host, layers),
            handed(layers),
            *_loss_terms(step, last.kind),
        ),
        phase(
            "backward of the last layer",
            *before_gradients,
            kept_on_gpu(plan.first_on_gpu(layers - 1), layers),
            handed(layers),
            *_layer_terms(step, last, working),
        ),
        max(middle, key=lambda each: each.bytes),
        phase(
            "reduction of embedding and head", *with_all_gradients, _root_reduction(step, states)
        ),
    ]
    if step.is_frozen and step.layout.shard_degree > 1:
        # Several GPUs hold embedding, head and the first layer twice, as gathered and as used: a
        # peak only if both have no gradients, which are larger.
        first_layers = 2 * step.gathered_bytes(step.shape.runs[0].kind)
        came = Term("gathered, as it came", root_bytes + first_layers)
        phases.insert(0, phase("gathering of embedding and head", *before_gradients, came))
    shards = step.layout.shard_degree
    made = update_bytes(step.shape, step.settings, device=step.device, shards=shards)
    if made:
        phases.append(phase("update", *with_all_gradients, Term("update", made)))
    return tuple(phases)


_WEIGHT, _GRADIENT, _MASTER = 2, 4, 4
"""Bytes of an element: gathered in bfloat16, reduced in float32, on the host float32 if trained."""
_HOLE_FROM = 7 / 3
"""Size of the activations, as a multiple of the root's float32 gradients, from which they leave a
free block that these gradients fit into.

The gradients themselves are 1; the gathered root and its gradients in bfloat16, which split the
freed memory, are a half each; the rest lies between them. Source: traces in
docs/results/lab/breakdown.json; an 8B model takes a new block at 49,152 tokens on 4 GPUs and none
at 65,536, on 8 GPUs at 65,536 and none at 131,072.
"""


def _cached_bytes(step: Step, states: _States, phases: tuple[Phase, ...]) -> int:
    """Bytes that the allocator keeps reserved in addition to the peak, until it runs out of memory.

    FSDP gathers and reduces on its own streams, whose blocks no other stream can use, and on the
    main stream a block serves no request longer than itself. So the largest unit, the root, stays
    reserved after its one use a micro-batch; it is given back before the allocator fails, and so
    does not change the capacity. Source: the traces of the trials in docs/results/find.
    """
    peak_bytes = max(each.bytes for each in phases)
    late_bytes = 0  # of gradients on their own stream, which cannot use what activations leave
    if states.coming_bytes:
        loss, last_backward = phases[:2]  # or, frozen on several GPUs, the gathering and the loss
        before_they_come = max(loss.bytes, last_backward.bytes)
        late_bytes = max(0, before_they_come + states.coming_bytes - peak_bytes)
    if step.settings.strategy == "fsdp":
        return _of_fsdp1(step) * step.settings.trained_models + late_bytes
    passing_bytes = peak_bytes - states.lasting_bytes - states.coming_bytes
    return _of_other_streams(step, late_bytes) + _too_long_for_a_hole(step, passing_bytes)


def _too_long_for_a_hole(step: Step, passing_bytes: int) -> int:
    """Bytes of a block kept for the root's float32 gradients; 0 if freed activations leave a block
    for them. ``passing_bytes``: the peak of all memory but the states.
    """
    whole = _GRADIENT * _root_tables(step, has_head=not step.settings.traits.gives_scalars)
    has_gradients = step.layout.shard_degree > 1 and not step.is_frozen
    return whole if has_gradients and passing_bytes < _HOLE_FROM * whole else 0


def _of_other_streams(step: Step, late_bytes: int) -> int:
    """Bytes kept on FSDP2's own streams: gathered weights, and the root's reduced gradients."""
    settings, degree = step.settings, step.layout.shard_degree
    policy = _root_tables(step, has_head=not settings.traits.gives_scalars)
    trained = policy + (_root_tables(step, has_head=False) if settings.trained_models > 1 else 0)
    # the reference is another model under FSDP2
    gathered = trained + (policy if settings.has_second_model else 0)
    summed = 0 if step.is_frozen else trained
    # a GPU's shard before the gathering, and the gathered whole; one GPU gathers nothing
    gathering = 0 if degree == 1 else _WEIGHT * (gathered + gathered // degree)
    return max(_GRADIENT * summed // degree, late_bytes) + gathering + _from_host(step)


def _from_host(step: Step) -> int:
    """Bytes of the float32 block through which FSDP copies this GPU's shards of embedding and head
    from the host in turn; 0 on one GPU, which copies on the main stream. Source: the gathering
    stream in traces of the trials long-8b-2-offload and long-8b-4-offload, 1.16 and 0.58 GiB.
    """
    degree = step.layout.shard_degree
    if not step.settings.offloads_model or degree == 1:
        return 0
    size = _WEIGHT if step.is_frozen else _MASTER
    return size * _root_tables(step, has_head=False) * step.settings.trained_models // degree


def _of_fsdp1(step: Step) -> int:
    """Bytes that FSDP1 keeps reserved: units used on another stream (on one GPU all units of a
    pass, as the host runs ahead; else the root and the largest layer), and the root's float32
    gradients with this GPU's shard of their sum, which counts as a state if states are offloaded.
    """
    shape, degree = step.shape, step.layout.shard_degree
    if degree == 1:
        return _WEIGHT * shape.parameters
    largest_layer = max(run.kind.parameters for run in shape.runs)
    of_the_last_norm = shape.hidden_size // shape.layers  # which is gathered with them, in parts
    lent = _WEIGHT * (_root_tables(step, has_head=True) + largest_layer + of_the_last_norm)
    root = _root_tables(step, has_head=not step.settings.traits.gives_scalars)
    return lent + _GRADIENT * (root if step.settings.offloads_model else root + root // degree)


def _root_bytes(step: Step) -> int:
    """Bytes of FSDP's root unit, gathered."""
    adapters, element = step.settings.adapters, step.element_bytes
    saved = 0 if adapters is None else saved_outside(step.shape, adapters, element=element)
    return element * _root_parameters(step) - saved


def _root_parameters(step: Step) -> int:
    """Parameters of FSDP's root unit: its tables, and learned positions."""
    shape, has_head = step.shape, not step.settings.traits.gives_scalars
    positions = learned_positions(shape.model_type, shape.native_length_tokens)
    return _root_tables(step, has_head=has_head) + positions * shape.hidden_size


def _root_tables(step: Step, *, has_head: bool) -> int:
    """Parameters of the root's tables: the embedding and, if ``has_head``, a head that is not tied
    to it, V x E each; and layers' own embeddings. Blocks kept reserved count these alone.
    """
    of_layers = sum(each.rows * each.row_size for each in step.shape.layer_tables)
    return step.table_size * (2 if has_head and not step.shape.tied_embeddings else 1) + of_layers


def outside_terms_of(step: Step, own: MachineConstants | None = None) -> tuple[Term, ...]:
    """Terms of a step's memory that PyTorch's allocator does not hold: context, NCCL, others."""
    place = step.shape, step.settings, step.layout, step.device
    return outside_terms(*place, own, pinned_activation_bytes=host_activation_bytes(step))


def likely_footprint(step: Step) -> Footprint:
    """The most likely memory of a step, as often too high as too low: ``upper_footprint`` with
    another ``filled_share``. Intervals are around this one, and a search starts from it.
    """
    upper = upper_footprint(step)
    if step.device == "cpu":
        return upper
    return upper.replace(filled_share=LIKELY_FILLED_SHARE[step.settings.allocator])


def _batch_bytes(step: Step) -> int:
    """Bytes of ids (T), and of cosines and sines (T x head size) for each head size and RoPE."""
    row = family_row(step.shape.model_type)
    by_layer = row.has_rope_by_layer
    kinds = {
        (attention.head_dim, by_layer and attention.window_tokens is not None)
        for attention in (run.kind.attention for run in step.shape.runs)
        if attention.delta is None
    }
    head_sizes = sum(head_dim for head_dim, _ in kinds)
    if row.delta is not None:  # of other families with partial rotation the moments have the rest
        head_sizes = round(head_sizes * row.defaults["partial_rotary_factor"])
    element = NUMBER_BYTES if step.shape.model_type in OUTPUT_NORMS else step.element_bytes
    return step.tokens * (_IDS * _ID_BYTES + 2 * element * head_sizes)


def _loss_terms(step: Step, last: LayerKind) -> tuple[Term, ...]:
    """Terms of the loss phase: the last layer's output, hidden states of trained tokens and their
    gradient, the last norm's copies, logits, the head's gradient, the last layer gathered ahead.
    """
    hidden = step.element_bytes * step.shape.hidden_size
    is_ahead = step.layout.shard_degree > 1 or step.settings.strategy == "fsdp"
    ahead = Term("layers, gathered", step.gathered_bytes(last) if is_ahead else 0)
    kept = _NORM_BYTES.get(step.shape.model_type, 0)
    if kept and step.settings.recompute == "none":
        takes_less = step.shape.model_type in _LESS_BACKWARD
        kept += _LESS_BACKWARD_BYTES if takes_less else _NORM_BACKWARD_BYTES
    norm = Term("the last norm", kept * step.tokens * step.shape.hidden_size)
    if step.settings.traits.gives_scalars:
        return (Term("hidden states", hidden * step.tokens), norm, ahead)
    logits = step.element_bytes * step.shape.vocab_size * step.trained_tokens
    head_gradient = step.element_bytes * step.table_size
    if not step.settings.holds_logits:
        one, two = (min(logits, count * CHUNK_BYTES[step.device]) for count in (1, 2))
        # The head's gradient is summed over chunks in float32, and rounded beside the last chunk's
        # logits. A chunk's logits live until the next chunk's are computed.
        logits, head_gradient = one, 4 * step.table_size + max(head_gradient, two - one)
        if step.is_frozen:
            head_gradient = two - one
    elif step.is_frozen:
        head_gradient = 0
    return (
        Term("hidden states", hidden * (step.tokens + 2 * step.trained_tokens)),
        norm,
        Term("logits", logits),
        Term("statistics of tokens", 4 * _ROW_NUMBERS * step.trained_tokens),
        Term("gradient of the head", head_gradient),
        ahead,
    )


def _layer_terms(
    step: Step, backward: Backward, working: Mapping[LayerKind, int]
) -> tuple[Term, ...]:
    """Terms of a layer's backward pass: its working set, its weights, the next's gathered ahead."""
    next_backward = backward.gathered_ahead if step.layout.shard_degree > 1 else None
    ahead = 0 if next_backward is None else step.gathered_bytes(next_backward)
    # The head's gradient is also the embedding's if they are tied; the embedding's own part comes
    # after the layers.
    head = 0 if step.settings.traits.gives_scalars or step.is_frozen else step.table_size
    return (
        Term("one layer going backward", working[backward.kind]),
        Term("layers, gathered", step.gathered_bytes(backward.kind) + ahead),
        Term("gradient of the head", step.element_bytes * head),
    )


def _parameters_on_their_way(step: Step, reduced: LayerKind | None) -> int:
    """Parameters whose gradients are on their way to their shards: of one layer, or two."""
    layers = 2 if step.layout.replicate_degree > 1 else 1
    if reduced is None:
        return 0
    return layers * (step.trained_of(reduced) + (0 if step.is_frozen else step.uneven(reduced)))


def _reduction(step: Step, parameters: int) -> Term:
    """Gradients of one unit that are reduced while the next one's backward pass runs."""
    return Term("gradient reduction", _reduced_element(step) * parameters)


def _reduced_element(step: Step) -> int:
    """Bytes per element of gradients in reduction: float32, or bfloat16 if it stays on one GPU."""
    return 2 if step.settings.parameters == "bf16" and step.layout.gpus == 1 else 4


def _root_reduction(step: Step, states: _States) -> Term:
    """The term of the root's gradients, after the layers' backward pass. It has

    - the gradients as they are summed: float32, or bfloat16 on one GPU with such parameters;
    - this GPU's shard of the sum, unless ``states`` count it among the gradients that come;
    - gradients in the compute dtype, at the larger of two moments. Before the sum: those of all
      tables and, if embedding and head are tied, the first layer's reduction, but less the shard of
      the sum, which comes after. During the sum, on several GPUs: those of a separate head.

    It is 0 if only adapters are trained. Source: traces.
    """
    if step.is_frozen:
        return _reduction(step, 0)
    gives_scalars = step.settings.traits.gives_scalars
    has_separate_head = not step.shape.tied_embeddings and not gives_scalars
    parameters = _root_parameters(step)
    shard = parameters // step.layout.shard_degree
    before_sum = step.element_bytes * parameters - _reduced_element(step) * shard
    if not has_separate_head and not gives_scalars:
        before_sum += _reduction(step, step.shape.runs[0].kind.parameters).bytes
    is_shared = step.layout.shard_degree > 1
    during_sum = step.element_bytes * step.table_size if has_separate_head and is_shared else 0
    is_rounded = step.settings.parameters == "bf16" and step.layout.gpus > 1
    own_shard = shard if is_rounded or not states.coming_bytes else 0
    summed = _reduction(step, parameters + own_shard)
    return Term(summed.name, summed.bytes + max(before_sum, during_sum))


def _host_terms(step: Step) -> tuple[Term, ...]:
    """Terms of the host's memory, for all GPUs of one machine."""
    shape, settings, layout = step.shape, step.settings, step.layout
    return (
        Term("offloaded states and reference", host_state_bytes(shape, settings, layout=layout)),
        Term("gradients on their way there", staged_gradient_bytes(shape, settings, layout=layout)),
        Term(HOST_ACTIVATIONS, layout.machine_gpus * host_activation_bytes(step)),
        Term("processes", layout.machine_gpus * PROCESS_BYTES),
    )
