"""Speed: predict how long a step takes, part by part, from its work and a GPU kind's rates.

Parts overlap if trials show that they do: one GPU takes the time of its kernels, or of the host's
launches of them, whichever is longer; exchanges between GPUs are added. Only H200s were measured;
other kinds are assumed to reach the same shares of their data sheets, also in attention: cuDNN's
kernels reach 61 % of an H200's FLOP/s, FlashAttention-2 50 to 73 % of an A100's
(https://arxiv.org/abs/2307.08691).
"""

from functools import cache
from typing import Literal, NamedTuple

from highwater.model.families import family_row
from highwater.model.held_bytes import kept_by_recompute, matrices, trained_parameters
from highwater.model.layer_kind import AttentionKind, LayerKind
from highwater.model.model import ModelShape
from highwater.nouns.codec import Record, packaged
from highwater.nouns.corpus import pieces
from highwater.nouns.hardware import kind_of
from highwater.nouns.layout import (
    TILED_EXPERTS,
    WIDE_SCORES_AT_HAND,
    WIDEST_FUSED_HEAD,
    Layout,
    stretch,
)
from highwater.nouns.objective import (
    adapter_parameters_of_layer,
    outer_adapter_parameters,
    saved_by_base,
)
from highwater.nouns.settings import Settings
from highwater.nouns.sparse_pattern import kept_pairs

Basis = Literal["measured", "scaled", "of_an_operator", "of_wide_heads"]
"""Origin of the rates: measured on this kind; an H200's, scaled by the data sheets' ratios; or
these, with an H200's times of linear attention's operator, or of attention with wide heads."""
MEASURED = "H200-141GB"
_TFLOPS_OF_H200 = 989.0
"""Dense bf16 TFLOP/s of an H200, as in the catalog."""


BASIS_IN_WORDS: dict[Basis, str] = {
    "measured": "a step's time is predicted too, from what H200s do in a second: of 44 trials that "
    "were held out half were within 3 %, 95 % within 16 %; with offload the host decides, and "
    "trials beside others were up to 4 times as slow (docs/results/speed)",
    "scaled": "a step's time is predicted too, from what an H200 does in a second times what the "
    "data sheets differ by: of other kinds eight trials on H100s alone tell: three 3 to 5 % "
    "off, five with offload 1 to 23 % (docs/results/speed)",
    "of_an_operator": "linear attention's own operator was timed on an H200, and the rest is by a "
    "GPU's rates: ten trials on H200s took 1.0 to 1.3 times as long; on other kinds both are "
    "scaled by data sheets; there no trial was timed, around a ring one (docs/results/families)",
    "of_wide_heads": "heads wider than 256 numbers attend by blocks of matrix products, as no "
    "fused kernel takes them; these and windows with heads of 256 were timed on an H200, and the "
    "rest is by a GPU's rates: ten trials on H200s took 0.90 to 1.15 times as long; on other "
    "kinds all are scaled by data sheets (docs/results/families)",
}
"""Accuracy of predicted times, for notes."""


class Sheet(Record, frozen=True, kw_only=True):
    """Rates of a kind of GPU by its data sheet: bytes and links per second, in a catalog file."""

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One way, to the other GPUs of a machine: NVLink, else PCIe."""
    host_bytes_per_s: float
    """One way, to and from pinned host memory: PCIe's nominal rate."""
    source: str


class Rates(NamedTuple):
    """FLOPs and bytes per second that a GPU reaches in a training step of our engine."""

    matmul_flops: float
    attention_flops: float
    """Forward pass over the causal half; only matrix products are counted."""
    attention_backward_flops: float
    memory_bytes: float
    link_bytes: float
    host_bytes: float
    basis: Basis


_OF_H200 = Rates(
    matmul_flops=620e12,
    attention_flops=600e12,
    attention_backward_flops=540e12,
    memory_bytes=3.0e12,
    link_bytes=250e9,
    host_bytes=45e9,
    basis="measured",
)
"""Rates of an H200. Attention, links and host were measured (docs/results/speed); matrix products
and memory were fitted to the trials that docs/results/speed/steps.py marks for fitting."""


@cache
def sheets() -> dict[str, Sheet]:
    """Return the data sheets by the kind's catalog name: ``nouns/catalog/rates.json``."""
    return {each.name: each for each in packaged("nouns/catalog/rates.json", tuple[Sheet, ...])}


def rates_of(device_name: str) -> Rates | None:
    """Return a GPU's rates, by its driver or catalog name; None for a kind without a data sheet."""
    kind, measured = kind_of(device_name), sheets()[MEASURED]
    sheet = None if kind is None else sheets().get(kind.name)
    if kind is None or sheet is None or kind.bf16_dense_tflops is None:
        return None
    if sheet is measured:
        return _OF_H200
    flops = kind.bf16_dense_tflops / _TFLOPS_OF_H200
    return Rates(
        matmul_flops=_OF_H200.matmul_flops * flops,
        attention_flops=_OF_H200.attention_flops * flops,
        attention_backward_flops=_OF_H200.attention_backward_flops * flops,
        memory_bytes=_OF_H200.memory_bytes * sheet.memory_bytes_per_s / measured.memory_bytes_per_s,
        link_bytes=_OF_H200.link_bytes * sheet.link_bytes_per_s / measured.link_bytes_per_s,
        host_bytes=_OF_H200.host_bytes * sheet.host_bytes_per_s / measured.host_bytes_per_s,
        basis="scaled",
    )


USUAL_MICRO_BATCHES = 2
"""Micro-batches of a step by default."""
_DELTA_S, _DELTA_BACKWARD_S = 0.39, 1.05
"""Seconds of the gated delta rule's passes over 262,144 tokens of a layer of Qwen3.5-9B on an H200:
16 times what 16,384 took."""
_DELTA_TOKENS, _DELTA_NUMBERS = 262_144, 4096
"""Tokens of these seconds, and numbers per token of that layer's value heads."""
_DELTA_LAUNCHES = 0.65
"""Least share of these seconds for fewer heads: the host launches as many kernels for them."""
_LAUNCH_S, _SHARDED_LAUNCH_S = 0.009, 0.0135
"""Seconds for the host to launch a layer's passes (forward, recomputed, backward), on one GPU and
on several. Fitted to trials of 8,192 tokens."""


class KernelRates(NamedTuple):
    """FLOP/s that attention reaches on an H200, counting only needed pairs of tokens."""

    forward: float
    backward: float
    half_rows: float = 0
    """Rows of queries, over all heads, at which the kernel has half its full speed."""


_WIDE_HEADS = KernelRates(forward=143e12, backward=181e12, half_rows=260)
"""Rates for heads wider than fused kernels support, by blocks of matrix products. Source, also of
``_WINDOWS``: docs/results/families/gemma_times.ndjson, from 8,192 to 131,072 tokens."""
_WINDOWS = KernelRates(forward=280e12, backward=185e12)
"""Rates for windows with heads of 256 numbers, the most that flash attention supports."""
_UNLIKE_LAUNCHES, _UNLIKE_BYTES = 4.1, 75
"""Gemma 4's layers: launches as a multiple of other layers', from two steps that these decide; and
bytes moved forward per hidden number outside our kernels, from a step of E4B of 32,768 tokens."""
_FLEX_SHARE = 0.5
"""FlexAttention's FLOP/s as a share of the fused kernels'. Source: docs/results/attention."""
_BACKWARD_PRODUCTS = 2.5
"""Matrix products of attention's backward pass, relative to the forward pass: five to two."""
_COPIED_BYTES = 38
"""Bytes moved forward per number of a token's copies for experts: gathered, weighted in float32,
put back in order and summed. Fitted to a step of Gemma 4 26B-A4B; a step of Qwen3.6-35B-A3B takes
0.97 times the time predicted with it, and 1.10 times that without."""
_EMBEDDING_PASSES = 14
"""Number of times that layers' own embeddings are read or written forward: looked up, projected,
both scaled, normed, added and scaled again."""
_UPDATE_BYTES = 40
"""Bytes moved per parameter by clipping, AdamW and zeroing, in float32."""
_CAST_BYTES = 20
"""Bytes moved per parameter and micro-batch: cast from float32 twice, and its gradient back."""
_NARROW_BYTES = 8
"""Bytes moved per parameter instead if parameters are in bfloat16: copied into place, twice."""
_LOW_BIT_TENSOR_S = 0.0009
"""Seconds in which the host updates one tensor with low-bit moments. Source: docs/results/lora."""
_MOMENT_BYTES = 8
"""Bytes of both moments of a parameter, in float32."""
_HOST_UPDATE_BYTES, _HOST_BYTES = 28, 25e9
"""Bytes moved per parameter by AdamW on the host, and per second by the host's cores for each GPU.
Source: what offload added to steps of 8B on two and four GPUs; hosts differ by several times."""


class StepPart(Record, frozen=True, kw_only=True):
    """Seconds that one part of a step takes: products, attention, gathering and so on."""

    name: str
    seconds: float


class PredictedStep(Record, frozen=True, kw_only=True):
    """Seconds of a training step, part by part, and what the prediction rests on."""

    parts: tuple[StepPart, ...]
    step_tokens: int
    """Tokens of the step: of every micro-batch and every data-parallel rank."""
    basis: Basis

    @property
    def time_s(self) -> float:
        """Seconds of the step."""
        return sum(part.seconds for part in self.parts)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all GPUs."""
        return self.step_tokens / self.time_s


class Cost(Record, frozen=True, kw_only=True):
    """Seconds and dollars that training on a number of tokens takes."""

    tokens: int
    time_s: float
    dollars: float | None
    """Price in dollars; None if the price of such a GPU is unknown."""


def cost_of(tokens: int, step: PredictedStep, *, gpus: int, hour_dollars: float | None) -> Cost:
    """The cost of training on ``tokens``; ``hour_dollars``: price of one GPU for an hour."""
    time_s = tokens / step.tokens_per_s
    dollars = None if hour_dollars is None else hour_dollars * gpus * time_s / 3600
    return Cost(tokens=tokens, time_s=time_s, dollars=dollars)


class _Work(NamedTuple):
    """Work of one GPU for one micro-batch, in FLOPs and in bytes of memory traffic."""

    matmul_flops: float = 0
    attention_flops: float = 0
    attention_backward_flops: float = 0
    moved_bytes: float = 0

    def plus(self, other: "_Work", times: float = 1) -> "_Work":
        """Return the sum with the other work, taken ``times`` times."""
        return _Work(*(a + times * b for a, b in zip(self, other, strict=True)))

    def seconds(self, rates: Rates) -> float:
        return (
            self.matmul_flops / rates.matmul_flops
            + self.attention_flops / rates.attention_flops
            + self.attention_backward_flops / rates.attention_backward_flops
            + self.moved_bytes / rates.memory_bytes
        )


def predicted_step(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    *,
    length_tokens: int,
    device_name: str,
    micro_batches: int | None = None,
    attention_depth: int | None = None,
) -> PredictedStep | None:
    """Predict the time of a step; None for a GPU kind with unknown rates. ``attention_depth``: in a
    memory-only trial, the number of layers with full attention; the others attend within pieces.
    """
    rates = rates_of(device_name)
    if rates is None:
        return None
    if micro_batches is None:
        micro_batches = USUAL_MICRO_BATCHES if settings.accumulates else 1
    sequences = max(1, settings.sequences(length_tokens, context_degree=layout.context_degree))
    work = _micro_batch(
        shape,
        settings,
        layout,
        length_tokens=length_tokens,
        sequences=sequences,
        whole=shape.layers if attention_depth is None else attention_depth,
    )
    launches = (_LAUNCH_S if layout.gpus == 1 else _SHARDED_LAUNCH_S) * shape.layers
    launches *= _UNLIKE_LAUNCHES if family_row(shape.model_type).has_unlike_layers else 1
    exchanged = _exchanged_bytes(shape, settings, layout, tokens=sequences * length_tokens)
    each = {
        "kernels, or their launches": max(work.seconds(rates), launches),
        "linear attention": _delta_s(
            *(shape, settings, layout, rates), tokens=sequences * length_tokens
        ),
        "exchanges between GPUs": exchanged / rates.link_bytes,
        "parameters and gradients over PCIe": _over_pcie(shape, settings, layout, rates),
        "activations over PCIe": _late_copies(
            *(shape, settings, rates),
            tokens=sequences * length_tokens / layout.context_degree,
            kernels_s=work.seconds(rates) / settings.trained_models,
        ),
    }
    parts = {name: micro_batches * seconds for name, seconds in each.items()}
    parts["update"] = _update(shape, settings, layout, rates)
    basis = "of_wide_heads" if shape.widest_head > WIDEST_FUSED_HEAD else rates.basis
    return PredictedStep(
        parts=tuple(
            StepPart(name=name, seconds=seconds) for name, seconds in parts.items() if seconds
        ),
        step_tokens=micro_batches * sequences * length_tokens * layout.data_parallel_degree,
        basis="of_an_operator" if shape.delta is not None else basis,
    )


def _delta_s(
    shape: ModelShape, settings: Settings, layout: Layout, rates: Rates, *, tokens: float
) -> float:
    """Seconds of a micro-batch in the operator of linear attention, without its projections, for a
    rank's part of the tokens (ring) and heads (Ulysses). Bound by memory bandwidth. In a ring, each
    pass first computes the states that cross slices, counted as one more forward pass: as on a CPU;
    one ring was timed (docs/results/families).
    """
    forwards, has_ring = 2 if settings.recompute == "layer" else 1, layout.ring_degree > 1
    policy = forwards * _DELTA_S + _DELTA_BACKWARD_S + has_ring * (forwards + 1) * _DELTA_S
    beforehand = (settings.traits.has_reference + settings.critic) * (1 + has_ring) * _DELTA_S
    passes_s = (settings.trained_models * policy + beforehand) / layout.ring_degree
    slower = _OF_H200.memory_bytes / rates.memory_bytes / layout.ulysses_degree / _DELTA_NUMBERS
    layers = sum(
        run.count * max(run.kind.attention.query_size * slower, _DELTA_LAUNCHES)
        for run in shape.runs
        if run.kind.attention.delta is not None
    )
    return passes_s * layers * tokens / _DELTA_TOKENS


def _micro_batch(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    *,
    length_tokens: int,
    sequences: int,
    whole: int,
) -> _Work:
    """Return the work of one GPU: all layers of every trained model, the head, the passes before
    the step, and copies of parameters. Only the last ``whole`` layers attend over whole documents.
    """
    tokens = sequences * length_tokens / layout.context_degree
    attended = _attended(shape, settings, length_tokens, sequences=sequences, whole=whole)
    trained = _Work()
    for kind, count, attention in attended:
        again = attention.attention_flops if settings.recompute == "layer" else 0
        attending = attention.plus(_Work(attention_flops=again))
        own = _layer(shape, kind, settings, tokens).plus(attending, 1 / layout.context_degree)
        trained = trained.plus(own, count)
    # parameters are copied into the compute dtype, and gradients back
    cast_bytes = _NARROW_BYTES if settings.parameters == "bf16" else _CAST_BYTES
    copies = _Work(moved_bytes=shape.parameters * cast_bytes if settings.lora is None else 0)
    trained = trained.plus(_head(shape, settings, tokens)).plus(copies)
    passes = 3
    if settings.adapters is not None:  # a gradient only for adapters on the layers' embeddings
        passes = 1 + (outer_adapter_parameters(shape, settings.adapters) > 0)
    trained = trained.plus(_layer_embeddings(shape, tokens), passes)
    beforehand = _forward_alone(shape, attended, tokens, layout)
    number = settings.traits.has_reference + settings.critic
    return _Work().plus(trained, settings.trained_models).plus(beforehand, number)


def _attended(
    shape: ModelShape, settings: Settings, length_tokens: int, *, sequences: int, whole: int
) -> list[tuple[LayerKind, int, _Work]]:
    """Return each kind of layer, the number of such layers, and the attention of one such layer,
    forward and backward, on all GPUs that share the sequences.
    """
    tokens = sequences * length_tokens
    of_pieces = tokens**2 / (pieces(tokens, "cuda") or 1) / 2
    found: list[tuple[LayerKind, int, _Work]] = []
    above = shape.layers
    for run in shape.runs:
        above -= run.count
        last = min(max(whole - above, 0), run.count)
        attention = run.kind.attention
        pairs = sequences * _pairs(attention, settings, length_tokens)
        forward, backward = _times_as_long(attention, settings, length_tokens, sequences=sequences)
        for count, read in ((last, pairs), (run.count - last, min(pairs, of_pieces))):
            flops = 4 * read * attention.query_size
            work = _Work(
                attention_flops=flops * forward,
                attention_backward_flops=_BACKWARD_PRODUCTS * flops * backward,
            )
            found.append((run.kind, count, work))
    return found


def _times_as_long(
    attention: AttentionKind, settings: Settings, length_tokens: int, *, sequences: int
) -> tuple[float, float]:
    """Cost of a query-key pair relative to fused kernels, forward and backward."""
    is_wide = attention.head_dim > WIDEST_FUSED_HEAD
    has_window = attention.window_tokens is not None and attention.head_dim == WIDEST_FUSED_HEAD
    if settings.pattern is not None or not (is_wide or has_window):
        return 1, 1
    own, slower = _WIDE_HEADS if is_wide else _WINDOWS, 1.0
    if is_wide:
        heads = sequences * attention.query_heads
        rows = stretch(length_tokens, None, heads, at_hand=WIDE_SCORES_AT_HAND).rows
        slower += own.half_rows / (rows * heads)
    return (
        slower * _OF_H200.attention_flops / own.forward,
        slower * _OF_H200.attention_backward_flops / own.backward,
    )


def _pairs(attention: AttentionKind, settings: Settings, length_tokens: int) -> float:
    """Pairs of token and key of one head and document, weighted by their cost relative to fused
    kernels; 0 for linear attention.
    """
    if attention.delta is not None:
        return 0
    if settings.pattern is not None:
        return kept_pairs(settings.pattern, length_tokens) / _FLEX_SHARE
    window = attention.window_tokens or length_tokens
    further_back = max(0, length_tokens - window)
    return (length_tokens**2 - further_back**2) / 2


def _layer(shape: ModelShape, kind: LayerKind, settings: Settings, tokens: float) -> _Work:
    """Work of a layer without attention: forward, recomputed (but its last product), backward."""
    weights = kind.matmul_parameters
    is_recomputed = settings.recompute != "none"
    again = weights - kind.hidden_size * kind.mlp.width * kind.mlp.experts_per_token
    passes = 2 * weights + (2 * again if is_recomputed else 0)
    if settings.attention_head_groups > 1:  # queries, keys and values are projected once more
        passes += 2 * kind.hidden_size * (kind.attention.query_size + 2 * kind.attention.key_size)
    if settings.adapters is None:
        passes += 4 * weights
    else:
        adapters = adapter_parameters_of_layer(kind, shape.model_type, settings.adapters)
        passes += 2 * weights + (8 if is_recomputed else 6) * adapters
    element_passes = 4 if is_recomputed else 3
    return _Work(
        matmul_flops=tokens * passes,
        moved_bytes=element_passes * tokens * _passed_bytes(kind, shape.model_type),
    )


def _passed_bytes(kind: LayerKind, family: str) -> int:
    """Bytes per token that norms, rotations, gates and residuals move in a forward pass, and the
    copies for experts if transformers' own code makes them; a backward pass moves twice as many.
    """
    attention, width = kind.attention, kind.mlp.width * kind.mlp.experts_per_token
    has_copies = kind.mlp.experts > 1 and family not in TILED_EXPERTS
    copied = kind.hidden_size * kind.mlp.experts_per_token * has_copies
    of_heads = 4 * (attention.query_size + attention.key_size)
    of_unlike = _UNLIKE_BYTES * kind.hidden_size * family_row(family).has_unlike_layers
    moved = 2 * (8 * kind.hidden_size + of_heads + 3 * width)
    return moved + of_unlike + _COPIED_BYTES * copied


def _head(shape: ModelShape, settings: Settings, tokens: float) -> _Work:
    """Work for the logits, their entropy and their gradients; a frozen head has no gradient."""
    if settings.traits.gives_scalars:
        return _Work()
    logits = tokens * shape.vocab_size
    products = 2 if settings.adapters is not None else 3
    products += settings.entropy == "chunked"
    passes = 8 + (6 if settings.entropy != "none" else 0)
    return _Work(
        matmul_flops=2 * products * logits * shape.hidden_size, moved_bytes=2 * passes * logits
    )


def _layer_embeddings(shape: ModelShape, tokens: float) -> _Work:
    """Work of a forward pass for all layers' own embeddings: a table, a projection and a norm."""
    return _Work(
        matmul_flops=2 * tokens * sum(p.rows * p.row_size for p in shape.layer_tables[1:]),
        moved_bytes=2 * tokens * _EMBEDDING_PASSES * sum(p.rows for p in shape.layer_tables[1:]),
    )


def _forward_alone(
    shape: ModelShape, attended: list[tuple[LayerKind, int, _Work]], tokens: float, layout: Layout
) -> _Work:
    """Work of a model's forward pass without a backward pass."""
    total = _layer_embeddings(shape, tokens)
    for kind, count, attention in attended:
        layer = _Work(
            matmul_flops=2 * tokens * kind.matmul_parameters,
            attention_flops=attention.attention_flops / layout.context_degree,
            moved_bytes=tokens * _passed_bytes(kind, shape.model_type),
        )
        total = total.plus(layer, count)
    logits = tokens * shape.vocab_size
    return total.plus(_Work(matmul_flops=2 * logits * shape.hidden_size, moved_bytes=6 * logits))


def _exchanged_bytes(
    shape: ModelShape, settings: Settings, layout: Layout, *, tokens: int
) -> float:
    """Bytes that a GPU receives in a micro-batch: parameters twice, in bfloat16 or NF4, and
    gradients once in float32; in every pass heads for Ulysses, and for a ring keys and values, or
    with linear attention a layer's input and output; states, 4 MB, are left out.
    """
    shards, copies = layout.shard_degree, layout.replicate_degree
    trained = trained_parameters(shape, settings)
    gathered = 4 * shape.parameters
    if settings.adapters is None:
        gathered += 4 * trained
    else:
        gathered -= 2 * saved_by_base(shape, settings.adapters, element=2)
    total = settings.trained_models * gathered * (shards - 1) / shards
    total += 8 * trained / shards * (copies - 1) / copies
    own = tokens / layout.context_degree
    passes = 3 if settings.recompute == "layer" else 2.6
    ulysses, ring = layout.ulysses_degree, layout.ring_degree
    for run in shape.runs:
        attention = run.kind.attention
        keys = max(attention.kv_heads, ulysses) * attention.head_dim
        heads = 2 * attention.query_size + 2 * keys
        if attention.delta is not None:  # gates are traded too
            heads = 2 * attention.query_size + attention.channels
        of_ulysses = passes * heads * (ulysses - 1) / ulysses
        of_ring = (passes + 2) * 2 * keys * (ring - 1)
        if attention.delta is not None:
            of_ring = passes * 2 * run.kind.hidden_size * (ring - 1) / ring
        total += run.count * own * 2 * (of_ulysses + of_ring)
    return total


def _over_pcie(shape: ModelShape, settings: Settings, layout: Layout, rates: Rates) -> float:
    """Seconds of a micro-batch for copying parameters from the host and gradients to it."""
    seconds = 0.0
    if settings.offloads_model:
        size = 4 if settings.lora is None else 2
        trained = trained_parameters(shape, settings)
        seconds = (2 * size * shape.parameters + 4 * trained) / layout.shard_degree
    if settings.has_second_model:
        seconds += 2 * shape.parameters / layout.shard_degree
    return seconds / rates.host_bytes


def _late_copies(
    shape: ModelShape, settings: Settings, rates: Rates, *, tokens: float, kernels_s: float
) -> float:
    """Seconds of a micro-batch in which layers wait for copies of activations to the host, or back:
    a quarter of a layer's kernel time hides the copy there, and the rest the copy back.
    """
    plan, seconds = settings.activation_plan(shape.layers), 0.0
    if not plan.layers_on_host:
        return seconds
    layer_s = kernels_s / shape.layers
    for run in shape.runs:
        copied = tokens * kept_by_recompute(run.kind, shape, settings, element=2)
        copy_s = copied / rates.host_bytes
        late = max(0.0, copy_s - layer_s / 4) + max(0.0, copy_s - 3 * layer_s / 4)
        seconds += run.count / shape.layers * plan.layers_on_host * late
    return settings.trained_models * seconds


def _update(shape: ModelShape, settings: Settings, layout: Layout, rates: Rates) -> float:
    """Seconds of the optimizer update, on the device or the host."""
    own = settings.trained_models * trained_parameters(shape, settings) / layout.shard_degree
    if settings.offloads_model:
        return own * _HOST_UPDATE_BYTES / _HOST_BYTES
    seconds = own * _UPDATE_BYTES / rates.memory_bytes
    if settings.offloads_states:  # moments go both ways at once, during the update
        seconds = max(seconds, own * _MOMENT_BYTES / rates.host_bytes)
    if not settings.optimizer_traits.is_exact:
        tensors = sum(each.number for each in matrices(shape))
        seconds += settings.trained_models * tensors * _LOW_BIT_TENSOR_S
    return seconds
