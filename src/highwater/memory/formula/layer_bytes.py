"""Layer bytes: what one decoder layer of our engine keeps for its backward pass, and what it takes
while it goes backward. What is alive when is what traces have at their peaks.

In the functions:  T tokens of a GPU's micro-batch  E hidden size  F intermediate size  K experts a
token goes to  X experts
"""

from collections import Counter

from highwater.memory.formula.layers import (
    FUSED_HEADS,
    NUMBER_BYTES,
    Layer,
    Step,
)
from highwater.memory.formula.moments import LayerMoments
from highwater.model.layer_kind import LayerKind

SCALED_BRANCHES = ("granite", "granite_swa")
"""Model types whose layers multiply what attention and MLP return by a number, whatever it is:
going backward, the gradient so multiplied is one more of T x E."""
_ROUTED_BYTES = 3 * 8 + 4 + 2
"""Per token and expert that it goes to: which one, its place among the sorted and whose row is
there, in 8 bytes each; its weight, in float32 and sorted."""
_MOMENTS = ((0, 6, 1), (1, 3, 2), (2, 1, 3))
"""Moments of an MLP in one piece going backward, as what is alive at once: so many of T x E and of
T x F, and gradients of so many of its three weights.

The products that are kept for it (gate, up, their activation and the product) and the gradients of
activation, product and up; that of gate, while up's is done; that of gate alone. Source: the order
in which autograd comes to them, in traces.
"""
_MOMENTS_OF_EXPERTS = ((5, 4, 0), (2, 5, 1), (1, 6, 1), (2, 2, 3))
"""Moments of experts going backward, in the same way, of T K x E and T K x F.

All that is kept, of T K x E a token's copies and what the experts gave, and three gradients of
that; all but what they gave, the gradients of it, of the product and of the down weights; three
gradients of T K x F as above; those of the copies, and of gate and up, which are one weight.
"""


def kept_bytes_of_layers(step: Step, layers: int) -> int:
    """Bytes per token that the first ``layers`` layers keep until the backward pass."""
    counts, left = Counter[LayerKind](), layers
    for run in step.shape.runs:
        counts[run.kind] += min(run.count, left)
        left -= min(run.count, left)
    return sum(count * kept_bytes(step.layer(kind)) for kind, count in counts.items())


def kept_bytes(layer: Layer) -> int:
    """Bytes per token that a layer keeps until the backward pass: its input (E), and what its
    attention returns if that is kept; without recompute all that its backward pass reads.

    Source: engine/activations/recompute.py.
    """
    settings, element = layer.step.settings, layer.step.element
    hidden, mlp = layer.kind.hidden_size, layer.kind.mlp
    if settings.recompute != "none":
        returned = element * layer.query + NUMBER_BYTES * layer.kind.attention.query_heads
        attentions = 0 if settings.recompute == "layer" else layer.attentions
        return element * hidden + attentions * returned
    if layer.learned is not None:
        return layer.learned_bytes(layer.learned.kept) // layer.step.tokens
    of_mlp = 0 if layer.has_tiles else 4 * mlp.width
    experts = mlp.experts_per_token * (of_mlp + 2 * hidden) if mlp.experts > 1 else of_mlp
    return _attention_kept(layer) + _routing(layer) + element * (hidden + experts)


def working_set_bytes(layer: Layer) -> int:
    """Bytes that a layer takes while it goes backward, besides what it keeps: for its attention,
    after its MLP's gradients, for its MLP, or for its weights on their way from the host, whatever
    takes more.
    """
    # What a layer keeps besides its input is part of what its backward pass reads.
    kept = kept_bytes(layer) - layer.step.element * layer.kind.hidden_size
    if layer.learned is not None:
        return _learned_working_set(layer, layer.learned, kept)
    return max(_attention_working_set(layer, kept), _mlp_working_set(layer, kept))


def _learned_working_set(layer: Layer, learned: LayerMoments, kept: int) -> int:
    """Bytes of a layer of a family that was learned, at the moment that takes the most, with what
    sharing a sequence adds: a copy of what is attended, which those with fused heads have anyway,
    and what a ring passes on.
    """
    step = layer.step
    # learned beside what such a layer keeps, but for the output of its attention
    there = 0 if step.settings.recompute == "none" else step.tokens * kept
    most = max(layer.learned_bytes(moment) for moment in learned.moments) - there
    if step.layout.ulysses_degree > 1 and step.shape.model_type not in FUSED_HEADS:
        most += step.tokens * step.element * layer.query
    if step.layout.ring_degree > 1:
        most += step.tokens * _ring_bytes(layer)
    return max(most + layer.unpacked_bytes, _fetching_bytes(layer))


def _attention_working_set(layer: Layer, kept: int) -> int:
    """Bytes of the attention going backward, beside the gradients of the MLP and of its own output
    projection; ``kept`` of them per token are there already.
    """
    step, hidden = layer.step, layer.kind.hidden_size
    of_output = 0 if step.is_frozen else hidden * layer.query
    gradients = step.element * (layer.trained_mlp_parameters + of_output)
    attention = step.tokens * max(0, _attention_bytes(layer) - kept) + gradients
    if layer.has_output_norms and step.settings.recompute != "none":
        attention = max(attention, step.tokens * _rotation_bytes(layer))
    return max(attention, _fetching_bytes(layer))


def _mlp_working_set(layer: Layer, kept: int) -> int:
    """Bytes of the MLP going backward, in one piece or in tiles; ``kept`` of them per token are
    there already.
    """
    step, hidden = layer.step, layer.kind.hidden_size
    # Beside the MLP: what the attention keeps, and the gradient of what the layer returns.
    beside = _attention_kept(layer) + _routing(layer) + step.element * hidden - kept
    if not layer.has_tiles:
        return max(_mlp_moments(layer, beside))
    tile = step.element * layer.tile
    # The gradients of what the MLP is given and, where that is scaled, of what it returns; a tile's
    # three products; the gradients of the weights, which are summed in float32, and one of the
    # weights that are packed.
    beside += step.element * hidden * (2 if step.shape.model_type in SCALED_BRANCHES else 1)
    weights = NUMBER_BYTES * layer.trained_mlp_parameters + layer.unpacked_bytes
    return step.tokens * max(0, beside) + 3 * tile + weights


def _fetching_bytes(layer: Layer) -> int:
    """Bytes besides the gathered layer, where one GPU alone fetches its weights from the host: the
    gradient of what the layer returns; of the weight before the last a copy in bfloat16, the last
    one in float32 and in bfloat16, and its place still to be made.

    Experts have two weights, of gate and up, and down; other MLPs three. Among several GPUs each
    fetches a share.
    """
    step = layer.step
    if (
        step.device == "cpu"
        or not step.settings.offloads_model
        or step.settings.strategy != "fsdp2"
        or step.layout.shard_degree > 1
    ):
        return 0
    weight = layer.mlp_parameters // 3
    before = 2 * weight if layer.kind.mlp.experts > 1 else weight
    in_bfloat16 = step.tokens * layer.kind.hidden_size + before
    return step.element * in_bfloat16 + NUMBER_BYTES * weight


def _mlp_moments(layer: Layer, beside: int) -> tuple[int, ...]:
    """Bytes of an MLP in one piece going backward, at each moment that may be the peak;
    ``beside``: bytes per token of what else is alive.
    """
    step, hidden, mlp = layer.step, layer.kind.hidden_size, layer.kind.mlp
    moments = _MOMENTS_OF_EXPERTS if mlp.experts > 1 else _MOMENTS
    per_token = (
        mlp.experts_per_token * (of_hidden * hidden + of_width * mlp.width)
        for of_hidden, of_width, _ in moments
    )
    weights = (step.element * count * layer.trained_mlp_parameters // 3 for _, _, count in moments)
    # what is packed is whole for a product of T x E, and not while gates go backward
    whole = (layer.unpacked_bytes if of_hidden else 0 for of_hidden, _, _ in moments)
    return tuple(
        step.tokens * max(0, beside + step.element * numbers) + size + unpacked
        for numbers, size, unpacked in zip(per_token, weights, whole, strict=True)
    )


def _attention_bytes(layer: Layer) -> int:
    """Bytes per token while the attention goes backward, with what its kernel takes for itself.

    The input, where it is normed, and the residual's gradient; q and k before their norm, where
    they have one; q, k, v as the attention takes them; its output and its gradient; the gradients
    of q, k, v; inside cuDNN's kernel q's gradient in float32, and, where query heads share them,
    k's and v's for every query head; and three float32 numbers a head. FlexAttention, which sparse
    attention is on a GPU, takes nothing for itself. Source: docs/results/layer: the tensors of
    three models within 2 %, the kernel's part from Qwen3-0.6B on an H200; docs/results/attention.
    """
    step = layer.step
    query, attended, element = layer.query, layer.attended_key, step.element
    stream = layer.kind.hidden_size * (1 if layer.has_output_norms else 2)
    tensors = element * (stream + layer.before_norm + 2 * (query + 2 * attended) + 2 * query)
    of_heads = 3 * NUMBER_BYTES * layer.kind.attention.query_heads
    is_alone = step.layout.ring_degree == 1
    if step.settings.attention == "block_sparse" and step.device == "cuda" and is_alone:
        return tensors + of_heads
    for_every_head = 2 * element * query if attended != query else 0
    of_call = tensors + NUMBER_BYTES * query + for_every_head + of_heads
    return of_call if is_alone else of_call + _ring_bytes(layer)


def _ring_bytes(layer: Layer) -> int:
    """Bytes per token that a ring takes besides, while its attention goes backward: the sum of q's
    gradients in float32; the keys and values that arrived and, of more than two ranks, those that
    do; their gradients in float32, on their way from one rank and to the next. The last rank's
    kernels read half of the keys, and take half of what they take for every query head.
    """
    keys = 2 * layer.attended_key
    arriving = 2 if layer.step.layout.ring_degree > 2 else 1
    sums = NUMBER_BYTES * (layer.query + 2 * keys) + layer.step.element * arriving * keys
    half = keys // 2 + (layer.query if layer.attended_key != layer.query else 0)
    return sums - layer.step.element * half


def _rotation_bytes(layer: Layer) -> int:
    """Bytes per token while a layer that norms outputs is recomputed: the residual's gradient, q
    and k before and after their norm, v, and in float32 two products and their sum, of q, or of k
    beside the sum of q's.
    """
    query, key = layer.query, layer.key
    tensors = layer.kind.hidden_size + 2 * (query + key) + key
    return layer.step.element * tensors + NUMBER_BYTES * max(3 * query, query + 3 * key)


def _attention_kept(layer: Layer) -> int:
    """Bytes per token that the attention keeps, with the residual stream after it and the MLP's
    input: q, k, v as it takes them, its output and a copy of it, of Ulysses in this GPU's positions
    and of fused heads in their order; numbers of each row and head.

    Where outputs are normed, these and the stream are three of T x E, too.
    """
    query, attention = layer.query, layer.kind.attention
    is_copied = layer.step.layout.ulysses_degree > 1
    is_copied |= layer.step.shape.model_type in FUSED_HEADS
    copy = query if is_copied else 0
    heads = (query + 2 * layer.attended_key) + query + copy
    tensors = 3 * layer.kind.hidden_size + layer.before_norm + heads
    normed_heads = attention.query_heads + attention.kv_heads if layer.before_norm else 0
    numbers = 2 + attention.query_heads + normed_heads
    return layer.step.element * tensors + NUMBER_BYTES * numbers


def _routing(layer: Layer) -> int:
    """Bytes per token that routers keep of all experts, once for the products and once for their
    own loss, if they have one, and of the chosen ones.
    """
    mlp = layer.kind.mlp
    if mlp.experts == 1:
        return 0
    of_all = (1 + layer.step.shape.balanced_experts) * NUMBER_BYTES * mlp.experts
    return of_all + _ROUTED_BYTES * mlp.experts_per_token
