"""Layers: one decoder layer in a step of our engine: its sizes, the bytes saved for its backward
pass, and the bytes allocated during that pass, by the peaks of traces.

A layer has attention over grouped heads, and a gated MLP or gated experts.

In the functions:  T tokens of a GPU's micro-batch  E hidden size  F intermediate size  K experts a
token goes to  V vocabulary  U ``ulysses_degree``
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, starmap

from highwater.memory.formula.moments import (
    WEIGHTS,
    FamilyMoments,
    LayerMoments,
    MomentBytes,
    bytes_of,
    bytes_of_sums,
    families,
    products,
    score_products,
)
from highwater.model.families import family_row
from highwater.model.held_bytes import kept_by_recompute
from highwater.model.layer_kind import LayerKind, LayerRun
from highwater.model.model import ModelShape
from highwater.nouns.layout import (
    DELTA_CHUNK_TOKENS,
    DELTA_GROUP_TOKENS,
    ELEMENT_BYTES,
    TILE_BYTES,
    TILED_EXPERTS,
    Layout,
    expert_tile_tokens,
)
from highwater.nouns.objective import (
    adapter_parameters_of_layer,
    expert_adapter_matrices,
    outer_adapter_parameters,
    saved_in_layer,
)
from highwater.nouns.settings import Settings
from highwater.nouns.trial import PROMPT_TOKENS, Device

HEAD_NORMS = ("olmo2", "olmo3", "qwen3", "qwen3_moe")
"""Model types whose layers norm queries and keys, and keep both as they were before the norm."""
FUSED_HEADS = ("gpt_neox", "phi3")
"""Model types with one product for queries, keys and values, which is kept whole beside the rotated
queries and keys; the attention's output is copied for its projection. Source: traces."""
OUTPUT_NORMS = ("olmo2", "olmo3")
"""Model types whose layers norm the outputs of attention and MLP, not their inputs: those are the
residual stream itself. They rotate queries and keys in float32, by operators of PyTorch's."""
NUMBER_BYTES = 4
"""Bytes of a float32 number of statistics: of normed rows and heads, of attention, of routers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, on the GPU with the most trained tokens: of GPUs that share a sequence, one whose
    part has no prompt.
    """

    shape: ModelShape
    settings: Settings
    layout: Layout
    length_tokens: int
    """Tokens of one sequence."""
    device: Device = "cuda"
    prompt_tokens: int = PROMPT_TOKENS
    """Tokens of a sequence that are not trained; at most half of the sequence counts."""

    @property
    def sequences(self) -> int:
        """Sequences in a micro-batch of the GPUs that share them."""
        degree = self.layout.context_degree
        return max(1, self.settings.sequences(self.length_tokens, context_degree=degree))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU: its part of each sequence, and padding."""
        return -(-self.sequences * self.length_tokens // self.layout.context_degree)

    @property
    def trained_tokens(self) -> int:
        """Tokens on one GPU that count in the loss; in a ring only the first rank has a prompt."""
        layout = self.layout
        prompts = self.sequences // layout.context_degree if layout.ring_degree == 1 else 0
        return self.tokens - min(self.prompt_tokens, self.length_tokens // 2) * prompts

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in the dtype that the device computes in: 2 on GPUs, 4 on the CPU."""
        return ELEMENT_BYTES[self.device]

    @property
    def table_size(self) -> int:
        """Number of parameters of one of embedding and head: vocabulary times hidden size."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def gathers(self) -> bool:
        """True if FSDP gathers the model's parameters: not if each GPU has a frozen copy."""
        is_alone = self.layout.shard_degree == 1 and not self.settings.offloads_model
        return self.settings.lora is None or not is_alone

    @property
    def is_frozen(self) -> bool:
        """True if only adapters are trained, and the model's own parameters have no gradient."""
        return self.settings.lora is not None

    def gathered_bytes(self, kind: LayerKind) -> int:
        """Bytes that FSDP gathers for a layer, with the padding to equal shards."""
        adapters, element = self.settings.adapters, self.element_bytes
        gathered = element * self.adapter_parameters(kind)
        if self.gathers:
            gathered += element * (kind.parameters + self.uneven(kind))
        if self.gathers and adapters is not None:
            gathered -= saved_in_layer(kind, self.shape.model_type, adapters, element=element)
        return gathered

    def uneven(self, kind: LayerKind) -> int:
        """Elements of padding that FSDP2 gathers with a layer whose rows do not divide evenly; the
        bytes of NF4 have no rows.
        """
        if self.settings.strategy != "fsdp2" or self.settings.lora_base == "nf4":
            return 0
        return kind.beyond_even(self.layout.shard_degree)

    def trained_of(self, kind: LayerKind) -> int:
        """Number of a layer's parameters that are trained, and so have a gradient."""
        return self.adapter_parameters(kind) if self.is_frozen else kind.parameters

    def adapter_parameters(self, kind: LayerKind) -> int:
        """Parameters of a layer's adapters."""
        adapters, family = self.settings.adapters, self.shape.model_type
        return 0 if adapters is None else adapter_parameters_of_layer(kind, family, adapters)

    @property
    def outer_adapter_parameters(self) -> int:
        """Parameters of the adapters outside the layers."""
        adapters = self.settings.adapters
        return 0 if adapters is None else outer_adapter_parameters(self.shape, adapters)

    def layer(self, kind: LayerKind) -> "Layer":
        """One layer of a kind in this step."""
        return Layer(self, kind)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a kind, in a step."""

    step: Step
    kind: LayerKind

    @property
    def query(self) -> int:
        """Numbers per token in the queries of all heads."""
        return self.kind.attention.query_size

    @property
    def key(self) -> int:
        """Numbers per token in the keys of all heads."""
        return self.kind.attention.key_size

    @property
    def attended_key(self) -> int:
        """Elements per token of all key heads as the attention takes them: repeated if the Ulysses
        degree exceeds their number, which is never so with a delta rule.
        """
        attention = self.kind.attention
        if attention.delta is not None:
            return self.key
        return max(attention.kv_heads, self.step.layout.ulysses_degree) * attention.head_dim

    @property
    def before_norm(self) -> int:
        """Numbers per token that queries and keys keep from before their norm or rotation."""
        is_kept = self.step.shape.model_type in (*HEAD_NORMS, *FUSED_HEADS)
        return self.query + self.key if is_kept else 0

    @property
    def has_output_norms(self) -> bool:
        """True if the outputs of attention and MLP are normalised, instead of their inputs."""
        return self.step.shape.model_type in OUTPUT_NORMS

    @property
    def has_tiles(self) -> bool:
        """True if the MLP runs in tiles of tokens, even one, and so keeps only its input."""
        settings, learned = self.step.settings, self._family
        return (
            self.kind.mlp.plain_width > 0
            and (settings.recompute != "none" or settings.mlp_tiles is not None)
            and (learned is None or learned.has_tiles)
        )

    @property
    def tile(self) -> int:
        """Numbers in the output of one matrix product of the MLP, in one tile of tokens."""
        step = self.step
        elements, tiles = step.tokens * self.kind.mlp.plain_width, step.settings.mlp_tiles
        if tiles is not None:
            return -(-elements // tiles)
        return min(elements, TILE_BYTES[step.device] // step.element_bytes)

    @property
    def expert_tokens(self) -> int:
        """Tokens that experts process at once; all tokens of the GPU without tiles."""
        step, tiles = self.step, self.step.settings.mlp_tiles
        can = self.kind.mlp.experts > 1 and step.shape.model_type in TILED_EXPERTS
        is_free = step.settings.recompute != "none" or self.adapted_expert_parameters > 0
        if not can or (tiles is None and not is_free):
            return step.tokens
        return expert_tile_tokens(step.tokens, tiles=tiles)

    @property
    def adapted_expert_parameters(self) -> int:
        """Parameters of the adapters on this layer's experts."""
        lora, family = self.step.settings.adapters, self.step.shape.model_type
        if lora is None or self.kind.mlp.experts == 1:
            return 0
        sizes = expert_adapter_matrices(self.kind, family, lora)
        return sum(each.rows * each.row_size for each in sizes)

    @property
    def has_expert_tiles(self) -> bool:
        """True if experts run in tiles of tokens, or in one with adapters, and keep their input."""
        return self.expert_tokens < self.step.tokens or self.adapted_expert_parameters > 0

    @property
    def learned(self) -> LayerMoments | None:
        """Memory of such a layer, learned from traces; None if its family has closed forms."""
        if self._family is None:
            return None
        found = self._family.layer(
            self.step.shape.model_type,
            self.kind,
            is_recomputed=self.step.settings.recompute != "none",
            is_divided=self.step.layout.ulysses_degree > 1,
            is_frozen=self.step.is_frozen,
        )
        assert found is not None  # noqa: S101 - refuse_unknown_family
        return found

    @property
    def is_unlike(self) -> bool:
        """True if layers within a model of this family differ, and share keys and embeddings."""
        return family_row(self.step.shape.model_type).has_unlike_layers

    @property
    def _family(self) -> FamilyMoments | None:
        return families().get(self.step.shape.model_type)

    def learned_bytes(self, *moments: MomentBytes) -> int:
        """Bytes of the largest of ``moments``. They were learned in a GPU's dtype: on the CPU all
        elements but attention scores count as wider, even those that are float32 on a GPU.
        """
        step, tile = self.step, self.tile if self.has_tiles else None
        tokens, is_gpu = step.tokens, step.device == "cuda"
        sizes = products(
            self.kind,
            tokens=tokens,
            attended_key=self.attended_key,
            tile=tile,
            degree=step.layout.ulysses_degree,
        )
        of_scores = score_products(
            self.kind.attention,
            documents=step.sequences,
            length_tokens=step.length_tokens,
            attended_key=self.attended_key,
            degree=step.layout.ulysses_degree,
        )
        if step.is_frozen and (step.shape.delta is not None or self.is_unlike):
            sizes = {name: size for name, size in sizes.items() if name not in WEIGHTS}

        def taken(moment: MomentBytes) -> int:
            numbers = bytes_of(moment, sizes) * step.element_bytes // ELEMENT_BYTES["cuda"]
            of_sums = bytes_of_sums(moment, self.kind, tokens=tokens) if is_gpu else 0
            return numbers + bytes_of(moment, of_scores) + of_sums

        return max(map(taken, moments))

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the gated MLP, or of all its experts."""
        mlp = self.kind.mlp
        return 3 * mlp.experts * self.kind.hidden_size * mlp.width

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of one MLP weight, unpacked from NF4 for a matrix product; 0 without NF4."""
        step, mlp = self.step, self.kind.mlp
        is_packed = step.settings.lora_base == "nf4"
        return step.element_bytes * self.kind.hidden_size * mlp.width if is_packed else 0

    @property
    def trained_mlp_parameters(self) -> int:
        """Trained parameters with a gradient after the MLP; with LoRA all of the layer's."""
        step = self.step
        return step.trained_of(self.kind) if step.is_frozen else self.mlp_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """One layer during its backward pass, with the layer before it and the one after it."""

    kind: LayerKind
    gathered_ahead: LayerKind | None
    """Kind of the layer before, which goes backward next; None for the first layer."""
    reduced: LayerKind | None
    """Kind of the layer behind, whose gradients are being reduced; None for the last layer."""
    kept_layers: int
    """Number of layers whose activations are still alive, from the first up to this one."""
    parameters_behind: int
    """Parameters of all layers behind this one, whose backward pass is done."""


@cache
def backwards(runs: tuple[LayerRun, ...]) -> tuple[Backward, ...]:
    """The layers at which the backward pass may have its peak, from first to last: the ends of each
    run of equal layers. Memory changes linearly within a run, so that one end has the most.
    """
    found: list[Backward] = []
    before: LayerKind | None = None
    passed = 0
    left = sum(run.count * run.kind.parameters for run in runs)
    for run, behind in zip(runs, (*runs[1:], None), strict=True):
        last = run.count - 1
        # The first and the last layer have other neighbours than the layers between.
        for layer in sorted({0, min(1, last), max(0, last - 1), last}):
            backward = Backward(
                kind=run.kind,
                gathered_ahead=run.kind if layer else before,
                reduced=run.kind if layer < last else behind and behind.kind,
                kept_layers=passed + layer + 1,
                parameters_behind=left - (layer + 1) * run.kind.parameters,
            )
            found.append(backward)
        before, passed = run.kind, passed + run.count
        left -= run.count * run.kind.parameters
    return tuple(found)


SCALED_BRANCHES = ("granite", "granite_swa")
"""Model types whose layers scale the outputs of attention and MLP by a constant: in the backward
pass, the scaled gradient is one more tensor of T x E."""
_ROUTED_BYTES = 3 * 8 + 4 + 2
"""Bytes per token and expert it goes to: the expert, the token's place in the sorted order and the
token at that place, 8 bytes each; the expert's weight, in float32 and sorted in bfloat16."""
_ROUTED_TILE_BYTES = 8 + 2 + 2
"""The same with experts in tiles: the expert, its weight, and the weight's gradient."""
_SORTED_BYTES = 3 * 8 + 2
"""Bytes per token of a tile and expert: copy, token, place, 8 bytes each; the expert's weight."""
_MOMENTS = ((0, 6, 1), (1, 3, 2), (2, 1, 3))
"""Moments of an untiled MLP's backward pass, as numbers of tensors alive at once: of T x E, of
T x F, and of gradients of its three weights.

First the products kept for it (gate, up, their activation and the product) and the gradients of
activation, product and up; then that of gate, when up's is done; then that of gate alone. Source:
the order of autograd in traces.
"""
_MOMENTS_OF_EXPERT_TILES = ((1, 4, 0), (1, 3, 1), (2, 1, 0), (0, 0, 2))
"""Moments of the backward pass of a tile of experts, for the tile's tokens, besides the sums of all
weights' gradients in float32: the gradient of the experts' output, gate and up, the product's
gradient and a copy of it; of these and the product four, with one weight's share; two gradients of
the tokens' copies, and one of gate; after the last tile, two weights' gradients rounded. Source:
engine/models/fused/experts.py."""
_MOMENTS_OF_EXPERTS = ((5, 4, 0), (2, 5, 1), (1, 6, 1), (2, 2, 3))
"""Moments of untiled experts in the same way, in T K x E and T K x F: everything kept (of T K x E
the tokens' copies and the experts' output) and three gradients of the output; all but the output,
with the gradients of it, of the product and of the down weights; three gradients of T K x F as
above; the gradients of the copies, and of gate and up, which are one weight."""


def kept_bytes_before(step: Step) -> tuple[int, ...]:
    """Return, for n from 0 to the number of layers, the bytes per token of a GPU's micro-batch that
    the first n layers together keep until their backward pass.
    """
    runs = step.shape.runs
    of_kind = {kind: kept_bytes(step.layer(kind)) for kind in {run.kind for run in runs}}
    layers = (of_kind[run.kind] for run in runs for _ in range(run.count))
    return (0, *accumulate(layers))


def handed_bytes(step: Step, layers: int) -> int:
    """Bytes per token of tensors that layers pass to each other, and that are live during the
    backward pass of layer number ``layers``, from 1. 0 in models whose layers neither have
    embeddings of their own nor read an earlier layer's keys: in all but a few families.
    With embeddings: those of all layers, the tensors that the norm of their projection saves, and
    the gradients of later layers' embeddings. With shared keys: keys and values for later layers,
    until their own layer is recomputed, and their gradients from their last reader on. Source:
    engine/models/fused/earlier_keys.py, traces.
    """
    element, every, found = step.element_bytes, step.shape.layers, 0
    for table in step.shape.layer_tables[1:]:
        behind = table.rows * (every - layers) // every
        of_norm = element * table.rows + NUMBER_BYTES * every
        has_gradient = not step.is_frozen or step.outer_adapter_parameters > 0
        found = element * table.rows
        found += element * behind + of_norm if has_gradient else 0
        # the projection's input, which is the first layer's, stays on the GPU in any plan
        if step.settings.activation_plan(every).layers_on_host and has_gradient:
            found += element * step.shape.hidden_size
    is_unlike = family_row(step.shape.model_type).has_unlike_layers
    for own, reader, keys in _earlier_keys(step.shape.runs) if is_unlike else ():
        is_kept = step.settings.recompute != "none" and own < layers - 1
        found += element * keys * (is_kept + (own <= layers - 1 < reader))
    return found


@cache
def _earlier_keys(runs: tuple[LayerRun, ...]) -> tuple[tuple[int, int, int], ...]:
    """For each kind of layers that read an earlier layer's keys: that earlier layer, the last layer
    that reads them (both from 0), and the elements per token of keys and values.
    """
    kinds = [run.kind.attention for run in runs for _ in range(run.count)]
    own, readers = dict[int | None, int](), dict[int | None, int]()
    for number, each in enumerate(kinds):
        (readers if each.reads_earlier_keys else own)[each.window_tokens] = number
    return tuple((own[each], last, 2 * kinds[own[each]].key_size) for each, last in readers.items())


def host_activation_bytes(step: Step) -> int:
    """Bytes of one GPU's activations in host memory; 0 on the CPU."""
    plan = step.settings.activation_plan(step.shape.layers)
    if step.device == "cpu" or not plan.layers_on_host:
        return 0
    return step.tokens * kept_bytes_before(step)[plan.layers_on_host]


def kept_bytes(layer: Layer) -> int:
    """Bytes per token that a layer keeps until the backward pass: its input (E), and the output of
    its attention if that is kept; without recompute all that its backward pass reads. Source:
    engine/activations/recompute.py.
    """
    settings, element = layer.step.settings, layer.step.element_bytes
    hidden, mlp = layer.kind.hidden_size, layer.kind.mlp
    if settings.recompute != "none":
        return kept_by_recompute(layer.kind, layer.step.shape, settings, element=element)
    if layer.learned is not None:
        is_copied = layer.is_unlike and layer.step.layout.ulysses_degree > 1
        copy = element * layer.query if is_copied else 0  # of what attention returned
        return layer.learned_bytes(layer.learned.kept) // layer.step.tokens + copy
    of_mlp = 0 if layer.has_tiles else 4 * mlp.width
    experts = mlp.experts_per_token * (of_mlp + 2 * hidden) if mlp.experts > 1 else of_mlp
    experts = 0 if layer.has_expert_tiles else experts
    return _attention_saved(layer) + _routing(layer) + element * (hidden + experts)


def working_set_bytes(layer: Layer) -> int:
    """Bytes that a layer's backward pass takes, besides ``kept_bytes``: the maximum over its MLP,
    its attention with the MLP's gradients, and the copies of its weights from the host.
    """
    # The functions below count what the backward pass reads, the layer's input left out. Of that,
    # these bytes per token are kept since the forward pass: in ``kept_bytes``, so not here again.
    kept_besides_input = kept_bytes(layer) - layer.step.element_bytes * layer.kind.hidden_size
    if layer.learned is not None:
        return _learned_working_set(layer, layer.learned, kept_besides_input)
    of_attention = _attention_working_set(layer, kept_besides_input)
    return max(of_attention, _mlp_working_set(layer, kept_besides_input))


def _learned_working_set(layer: Layer, learned: LayerMoments, kept_besides_input: int) -> int:
    """Bytes of a learned layer at its largest moment, with what sequence sharing adds: a copy of
    the attention's input, unless heads are fused, and the tensors that a ring sends.
    """
    step = layer.step
    # moments are learned besides a kept input; an attention's kept output is in them
    there = 0 if step.settings.recompute == "none" else step.tokens * kept_besides_input
    most = layer.learned_bytes(*learned.moments) - there
    is_copied = step.shape.model_type not in FUSED_HEADS and not learned.is_divided
    copied = layer.query if is_copied else 0
    if layer.is_unlike:  # its own keys are traded once; those of earlier layers by each reader
        copied = 2 * layer.attended_key if layer.kind.attention.reads_earlier_keys else 0
    if step.layout.ulysses_degree > 1:
        most += step.tokens * step.element_bytes * copied
    if step.layout.ring_degree > 1:
        of_attention = layer.learned_bytes(*_attention_moments(learned)) - there
        is_delta = layer.kind.attention.delta is not None
        passed = _crossing_bytes(layer) if is_delta else step.tokens * _ring_bytes(layer)
        most = max(most, of_attention + passed)
    return max(most + layer.unpacked_bytes, _fetching_bytes(layer))


def _attention_moments(learned: LayerMoments) -> tuple[MomentBytes, ...]:
    """The moments within the attention: those with more query terms than the moment with the
    fewest, which is in the MLP; all moments if these are equal.
    """
    fewest = min(moment.get("T*Q", 0) for moment in learned.moments)
    found = tuple(each for each in learned.moments if each.get("T*Q", 0) > fewest)
    return found or learned.moments


def _attention_working_set(layer: Layer, kept_besides_input: int) -> int:
    """Bytes that attention allocates in its backward pass, besides what the layer kept."""
    step, hidden = layer.step, layer.kind.hidden_size
    of_output = 0 if step.is_frozen else hidden * layer.query
    gradients = step.element_bytes * (layer.trained_mlp_parameters + of_output)
    read = max(0, _attention_bytes(layer) - kept_besides_input)
    attention = step.tokens * read + gradients
    if layer.has_output_norms and step.settings.recompute != "none":
        attention = max(attention, step.tokens * _rotation_bytes(layer))
    return max(attention, _fetching_bytes(layer))


def _mlp_working_set(layer: Layer, kept_besides_input: int) -> int:
    """Bytes that the MLP allocates in its backward pass, besides what the layer kept."""
    step, hidden = layer.step, layer.kind.hidden_size
    # Besides the MLP: what the attention saved for its own pass, and the layer's output gradient.
    beside = _attention_saved(layer) + _routing(layer) + step.element_bytes * hidden
    beside -= kept_besides_input
    if not layer.has_tiles and not layer.has_expert_tiles:
        return _untiled_mlp_bytes(layer, beside)
    tile = (
        _expert_tile_bytes(layer) if layer.has_expert_tiles else 3 * step.element_bytes * layer.tile
    )
    # The gradient of the MLP's input and, if scaled, of its output; a tile's products, three in a
    # plain MLP; the gradients of the weights, which are summed in float32; one unpacked weight.
    beside += step.element_bytes * hidden * (2 if step.shape.model_type in SCALED_BRANCHES else 1)
    weights = NUMBER_BYTES * layer.trained_mlp_parameters + layer.unpacked_bytes
    return step.tokens * max(0, beside) + tile + weights


def _expert_tile_bytes(layer: Layer) -> int:
    """Bytes of a tile of experts in its backward pass, with weight gradients but not their sums."""
    hidden, mlp = layer.kind.hidden_size, layer.kind.mlp
    parameters = 0 if layer.step.is_frozen else layer.mlp_parameters
    copies = layer.expert_tokens * mlp.experts_per_token
    most = max(
        copies * (of_hidden * hidden + of_width * mlp.width) + count * parameters // 3
        for of_hidden, of_width, count in _MOMENTS_OF_EXPERT_TILES
    )
    return layer.step.element_bytes * most + _SORTED_BYTES * copies


def _fetching_bytes(layer: Layer) -> int:
    """Bytes besides the gathered layer, if a single GPU copies its weights from the host: the
    gradient of the layer's output; a bfloat16 copy of the last weight but one; the last weight in
    both dtypes, and its copy. Experts have two weights (gate and up, down), other MLPs three.
    """
    step = layer.step
    is_fetched = step.settings.offloads_model and step.settings.strategy == "fsdp2"
    if step.device == "cpu" or not is_fetched or step.layout.shard_degree > 1:
        return 0
    weight = layer.mlp_parameters // 3
    before = 2 * weight if layer.kind.mlp.experts > 1 else weight
    in_bfloat16 = step.tokens * layer.kind.hidden_size + before
    return step.element_bytes * in_bfloat16 + NUMBER_BYTES * weight


def _untiled_mlp_bytes(layer: Layer, beside: int) -> int:
    """Bytes of an untiled MLP's backward pass at its peak; ``beside``: other bytes per token."""
    step, hidden, mlp = layer.step, layer.kind.hidden_size, layer.kind.mlp

    def moment_bytes(of_hidden: int, of_width: int, weights: int) -> int:
        elements = mlp.experts_per_token * (of_hidden * hidden + of_width * mlp.width)
        gradients = step.element_bytes * weights * layer.trained_mlp_parameters // 3
        # a packed weight is unpacked for a product of T x E, and not while gates go backward
        unpacked = layer.unpacked_bytes if of_hidden else 0
        return step.tokens * max(0, beside + step.element_bytes * elements) + gradients + unpacked

    return max(starmap(moment_bytes, _MOMENTS_OF_EXPERTS if mlp.experts > 1 else _MOMENTS))


def _attention_bytes(layer: Layer) -> int:
    """Bytes per token of the attention's backward pass, with its kernel's own buffers.

    The input, if it is normed, and the residual's gradient; q and k before their norm, if there is
    one; q, k, v as the attention takes them; its output and its gradient; the gradients of q, k, v;
    inside cuDNN's kernel q's gradient in float32 and, if query heads share keys, k's and v's
    gradients for every query head; and three float32 values per head. FlexAttention, which sparse
    attention is on a GPU, has no such buffers. Source: docs/results/layer: the tensors of three
    models within 2 %, the kernel's part from Qwen3-0.6B on an H200; docs/results/attention.
    """
    step = layer.step
    query, attended, element = layer.query, layer.attended_key, step.element_bytes
    stream = layer.kind.hidden_size * (1 if layer.has_output_norms else 2)
    tensors = element * (stream + layer.before_norm + 2 * (query + 2 * attended) + 2 * query)
    of_heads = 3 * NUMBER_BYTES * layer.kind.attention.query_heads
    if step.settings.attention_head_groups > 1:
        return _grouped_bytes(layer)
    is_alone = step.layout.ring_degree == 1
    if step.settings.attention == "block_sparse" and step.device == "cuda" and is_alone:
        return tensors + of_heads
    for_every_head = 2 * element * query if attended != query else 0
    of_call = tensors + NUMBER_BYTES * query + for_every_head + of_heads
    return of_call if is_alone else of_call + _ring_bytes(layer)


def _grouped_bytes(layer: Layer) -> int:
    """Bytes per token of the attention's backward pass in head groups: the input and the residual's
    gradient; the attention's output; the groups' gradients of q, k and v. Besides, one group has
    its output gradient, q and k before and after their rotation, v, and the kernel's buffers; in
    the end q's gradients are joined, or the input's gradient is there. Ulysses adds a copy of the
    attention's output, and of a group's v and both gradients. Source:
    engine/models/fused/head_groups.py, traces.
    """
    step, hidden, attention = layer.step, layer.kind.hidden_size, layer.kind.attention
    query, attended, element = layer.query, layer.attended_key, step.element_bytes
    heads, is_shared = query + 2 * attended, step.layout.ulysses_degree > 1
    tensors = 2 * query + layer.key + heads + (attended + 2 * query if is_shared else 0)
    for_every_head = 2 * element * query if attended != query else 0
    of_group = element * tensors + NUMBER_BYTES * query + for_every_head
    most = max(of_group // step.settings.attention_head_groups, element * max(hidden, query))
    kept = element * (2 * hidden + (2 if is_shared else 1) * query + heads)
    return kept + most + 3 * NUMBER_BYTES * attention.query_heads


def _crossing_bytes(layer: Layer) -> int:
    """Bytes that a ring adds to linear attention whose heads are shared too, if the peak is in the
    recomputation: a second copy of the layer's input, in the ring's token order, and the buffers
    that send a group's states. A peak in the backward pass gets no more than this.
    """
    step, attention = layer.step, layer.kind.attention
    degree = step.layout.ulysses_degree
    if degree == 1 or attention.delta is None:
        return 0
    chunks = min(step.tokens * degree, DELTA_GROUP_TOKENS) // DELTA_CHUNK_TOKENS
    moving = chunks * attention.query_heads // degree * attention.delta.key_head_dim**2
    return step.element_bytes * step.tokens * layer.kind.hidden_size + NUMBER_BYTES * moving


def _ring_bytes(layer: Layer) -> int:
    """Bytes per token that a ring adds to the backward pass: the sum of q's gradients in float32;
    received keys and values and, with more than two ranks, those being received; their float32
    gradients, received and sent. The last rank's kernels read and take half per query head.
    """
    keys = 2 * layer.attended_key
    arriving = 2 if layer.step.layout.ring_degree > 2 else 1
    sums = NUMBER_BYTES * (layer.query + 2 * keys) + layer.step.element_bytes * arriving * keys
    half = keys // 2 + (layer.query if layer.attended_key != layer.query else 0)
    return sums - layer.step.element_bytes * half


def _rotation_bytes(layer: Layer) -> int:
    """Bytes per token while a layer with output norms is recomputed: the gradient of the residual,
    q and k before and after their norm, v, and three float32 copies of q, or of k with one of q.
    """
    query, key = layer.query, layer.key
    tensors = layer.kind.hidden_size + 2 * (query + key) + key
    return layer.step.element_bytes * tensors + NUMBER_BYTES * max(3 * query, query + 3 * key)


def _attention_saved(layer: Layer) -> int:
    """Bytes per token that the attention's backward pass reads, kept since the forward pass or made
    again by recompute, with the residual stream after it and the MLP's input: q, k, v as the kernel
    takes them, its output, a copy of it (with Ulysses in this GPU's positions, with fused heads in
    their order), and float32 values of each row and head.
    With output norms, the normed outputs and the stream are three of T x E as well.
    """
    query, attention = layer.query, layer.kind.attention
    is_copied = layer.step.layout.ulysses_degree > 1
    is_copied |= layer.step.shape.model_type in FUSED_HEADS
    copy = query if is_copied else 0
    heads = layer.before_norm + (query + 2 * layer.attended_key) + query + copy
    normed_heads = attention.query_heads + attention.kv_heads if layer.before_norm else 0
    if layer.step.settings.attention_head_groups > 1:  # q, k and v are projected again
        heads, normed_heads = query + copy, 0
    tensors = 3 * layer.kind.hidden_size + heads
    numbers = 2 + attention.query_heads + normed_heads
    return layer.step.element_bytes * tensors + NUMBER_BYTES * numbers


def _routing(layer: Layer) -> int:
    """Bytes per token that routers keep: by experts, twice with a loss; and by chosen experts."""
    mlp = layer.kind.mlp
    if mlp.experts == 1:
        return 0
    of_all = (1 + layer.step.shape.balanced_experts) * NUMBER_BYTES * mlp.experts
    of_each = _ROUTED_TILE_BYTES if layer.has_expert_tiles else _ROUTED_BYTES
    return of_all + of_each * mlp.experts_per_token
