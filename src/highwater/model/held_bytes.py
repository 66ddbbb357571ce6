"""Held bytes: what a trial holds as long as it runs, on devices, on the host and on disk. The
peak of a step is in memory/formula/formula.py.

Also: model FLOPs of a training step, for MFU, without recomputation, which is overhead.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from typing import NamedTuple

from highwater.model.layer_kind import AttentionKind, LayerKind, Matrices
from highwater.model.model import STATE_BYTES_PER_PARAMETER, ModelShape
from highwater.nouns.layout import DELTA_GROUP_TOKENS, ELEMENT_BYTES, Layout
from highwater.nouns.objective import (
    MOMENTS,
    PIECE,
    STREAMED,
    STREAMED_BUFFERS,
    adapter_matrices,
    adapter_parameters,
    outer_adapter_matrices,
    saved_by_base,
)
from highwater.nouns.settings import Settings
from highwater.nouns.sparse_pattern import SparsePatternConfig, kept_pairs
from highwater.nouns.trial import Device
from highwater.units import MIB

PROCESS_BYTES = 512 * MIB
"""Host memory of one process that runs Python with torch."""
STAGED_LAYERS = 3
"""Layers whose offloaded gradients have pinned blocks at the same time: one is being copied,
another is awaited, and a third's blocks are reused only after the GPU has reached the point where
they were freed."""
GRADIENT_BYTES_PER_PARAMETER = 4
"""Bytes of a float32 gradient, included in ``STATE_BYTES_PER_PARAMETER``."""
MOMENT_BYTES = 4
"""Bytes per number of an AdamW moment in host memory: float32."""
LEAST_PAGED = 100_000
"""Fewest numbers of a tensor whose moments bitsandbytes pages."""
SHARDED_BYTES_PER_PARAMETER = 12
"""Bytes on disk for each parameter: float32 weights and both moments, also float32."""


_SAVED_TENSOR_BYTES, _NAME_BYTES, _CONFIG_BYTES = 3072, 256, 4096
"""Bytes on disk besides the numbers, rounded up from files: of a tensor in a sharded checkpoint
with its metadata; of a tensor in a safetensors file; of an adapter's configuration."""


class CheckpointBytes(NamedTuple):
    """Largest number of bytes that one trial has on disk, over all ranks."""

    sharded_bytes: int
    hf_bytes: int


def checkpoint_bytes(shape: ModelShape, settings: Settings, device: Device) -> CheckpointBytes:
    """Bytes that a trial has on disk; each step overwrites the Hugging Face weights of the last."""
    return CheckpointBytes(
        sharded_bytes=(
            SHARDED_BYTES_PER_PARAMETER
            * (shape.parameters if settings.lora is None else trained_parameters(shape, settings))
            - _saved_by_moments(shape, settings)
            - _saved_by_bf16(1, shape, settings)
            + 3 * _SAVED_TENSOR_BYTES * _adapter_tensors(shape, settings)
        )
        * settings.trained_models
        * (settings.checkpoint == "sharded"),
        hf_bytes=0 if settings.save_hf == "never" else _hf_bytes(shape, settings, device),
    )


def _hf_bytes(shape: ModelShape, settings: Settings, device: Device) -> int:
    """Bytes of weights in Hugging Face format: adapters in float32, or the whole model."""
    if settings.lora is None or settings.lora_merged:
        return ELEMENT_BYTES[device] * shape.parameters
    tensors = _adapter_tensors(shape, settings)
    return 4 * trained_parameters(shape, settings) + _NAME_BYTES * tensors + _CONFIG_BYTES


def _adapter_tensors(shape: ModelShape, settings: Settings) -> int:
    """Number of matrices in all adapters, so small that files' metadata of each counts."""
    return sum(each.number for each in _adapters(shape, settings))


@cache
def device_state_bytes(
    shape: ModelShape, settings: Settings, *, device: Device, shards: int = 1
) -> int:
    """Bytes of parameters, gradients and both moments of every trained model at the peak, over all
    ``shards`` devices that share them, counting each device as if it had as many rows as the first;
    with one micro-batch gradients exist only from the backward pass on.

    With offload, FSDP2 leaves nothing on the device; FSDP1 a float32 gradient until the backward
    pass ends (engine/parallel/fsdp1.py). With offload of states, all but the moments stay. On the
    CPU nothing is offloaded. A reward model outputs one number instead of logits, and has no head
    unless tied to the embedding; a critic also, but it is counted as a whole model here.
    """
    per_parameter = STATE_BYTES_PER_PARAMETER
    if settings.offloads_model and device == "cuda":
        per_parameter = GRADIENT_BYTES_PER_PARAMETER if settings.strategy == "fsdp" else 0
    elif settings.offloads_states and device == "cuda":
        per_parameter -= MOMENTS * MOMENT_BYTES
    frozen = 0
    if settings.adapters is not None and per_parameter:
        element = ELEMENT_BYTES[device]
        is_packed = settings.adapters.base == "nf4"  # bytes, which have no rows
        uneven = 0 if is_packed else _beyond_even(_in_layers(shape), settings, shards)
        frozen = element * (policy_parameters(shape, settings) + uneven)
        frozen -= saved_by_base(shape, settings.adapters, element=element)
    trained = per_parameter * (
        trained_parameters(shape, settings) + _padding(shape, settings, shards)
    )
    saved = _saved_by_bf16(2, shape, settings, shards=shards)
    saved += _saved_by_moments(shape, settings, shards=shards) if per_parameter else 0
    return (frozen + trained - saved) * settings.trained_models


@cache
def trained_parameters(shape: ModelShape, settings: Settings) -> int:
    """Trained parameters of the policy: all; with LoRA the adapters' and a reward model's head."""
    if settings.adapters is None:
        return policy_parameters(shape, settings)
    number = shape.hidden_size if settings.traits.gives_scalars else 0
    return adapter_parameters(shape, settings.adapters) + number


@cache
def gradient_bytes(shape: ModelShape, settings: Settings, *, shards: int = 1) -> int:
    """Bytes of the gradients of every trained model, over all ``shards`` devices that share them,
    counting each device as if it had as many rows as the first.
    """
    parameters = trained_parameters(shape, settings) + _padding(shape, settings, shards)
    saved = _saved_by_bf16(1, shape, settings, shards=shards)
    return (GRADIENT_BYTES_PER_PARAMETER * parameters - saved) * settings.trained_models


def resting_state_bytes(shape: ModelShape, settings: Settings, layout: Layout) -> int:
    """Bytes of parameters and moments on one GPU between steps, when there are no gradients."""
    shards = layout.shard_degree
    states = device_state_bytes(shape, settings, device="cuda", shards=shards)
    return max(0, states - gradient_bytes(shape, settings, shards=shards)) // shards


def _saved_by_bf16(copies: int, shape: ModelShape, settings: Settings, *, shards: int = 1) -> int:
    """Bytes that bf16 saves against float32, for ``copies`` values of each parameter."""
    if settings.parameters != "bf16":
        return 0
    uneven = _beyond_even(_in_layers(shape), settings, shards)
    return 2 * copies * (policy_parameters(shape, settings) + uneven)


def _padding(shape: ModelShape, settings: Settings, shards: int) -> int:
    """Elements of padding in uneven shards of the layers' trained parameters, on all GPUs."""
    trained = _in_layers(shape) if settings.lora is None else _adapters(shape, settings)
    return _beyond_even(trained, settings, shards)


def _beyond_even(every: Iterable[Matrices], settings: Settings, shards: int) -> int:
    """Elements added if each of ``shards`` devices had as many rows of these matrices as the first:
    FSDP2 shards matrices by rows. 0 with FSDP1, which shards one flat tensor.
    """
    if settings.strategy != "fsdp2":
        return 0
    return sum(each.beyond_even(shards) for each in every)


def _saved_by_moments(shape: ModelShape, settings: Settings, *, shards: int = 1) -> int:
    """Bytes that the optimizer's moments save against float32, over all sharing GPUs."""
    traits = settings.optimizer_traits
    if not traits.is_quantized:
        parameters = trained_parameters(shape, settings) + _padding(shape, settings, shards)
        return MOMENTS * (4 - traits.moment_bytes) * parameters
    saved = 0
    for number, rows, row_size in _trained_matrices(shape, settings):
        shard = -(-rows // shards) * row_size
        saved_by_shard = MOMENTS * 4 * shard - traits.moments_bytes(shard)
        saved += number * (saved_by_shard * rows * row_size // shard)
    return saved


def paged_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of the moments, of unsharded tensors, that bitsandbytes' paged optimizers have in
    ``cudaMallocManaged`` memory, outside PyTorch's allocator; scales of 8-bit moments stay inside.
    Source: ``get_state_buffer`` in bitsandbytes/optim/optimizer.py, 0.50.2.
    """
    large = (
        each.number * each.rows * each.row_size
        for each in _trained_matrices(shape, settings)
        if each.rows * each.row_size >= LEAST_PAGED
    )
    return MOMENTS * settings.optimizer_traits.moment_bytes * sum(large) * settings.paged


@cache
def update_bytes(
    shape: ModelShape, settings: Settings, *, shards: int, device: Device = "cuda"
) -> int:
    """Bytes that an optimizer update allocates on one device, for the elements that it processes at
    once, the largest shard or a piece of it: with 8-bit moments, two float32 values each
    (engine/training/low_bit.py); with moments in host memory, the buffers for copying them
    (engine/training/host_states.py). On the CPU, not compiled, each operation makes a tensor.
    """
    every = (-(-rows // shards) * size for _, rows, size in _trained_matrices(shape, settings))
    if settings.offloads_states:
        return STREAMED_BUFFERS * MOMENTS * MOMENT_BYTES * min(STREAMED, max(every))
    piece = min(PIECE, max(every))
    if device == "cpu":
        return settings.optimizer_traits.eager_bytes * piece
    return MOMENTS * 4 * piece if settings.optimizer_traits.is_quantized else 0


def _trained_matrices(shape: ModelShape, settings: Settings) -> tuple[Matrices, ...]:
    """Trained matrices: the policy's, without a reward model's head, or the adapters'."""
    if settings.lora is not None:
        return _adapters(shape, settings)
    every = matrices(shape)
    if settings.traits.gives_scalars and not shape.tied_embeddings:
        return (*every[:-1], every[-1]._replace(number=1))
    return every


_TWO_ATTENTIONS = ("diffllama",)
"""Model types whose layers attend twice, with half of the values each time; both outputs are kept
if attention is not recomputed."""


def kept_by_recompute(
    kind: LayerKind, shape: ModelShape, settings: Settings, *, element: int
) -> int:
    """Bytes per token that a recomputed layer keeps for its backward pass; ``element``: bytes of an
    element. These are its input and, unless recomputed too, its attention's output, with the
    log-sum-exp in float32, or a delta rule's states.
    """
    attention = kind.attention
    kept = element * kind.hidden_size
    if settings.recompute == "layer":
        return kept
    if attention.delta is not None:
        states = attention.query_size * attention.delta.key_head_dim // DELTA_GROUP_TOKENS
        return kept + element * attention.query_size + 4 * states
    attentions = 2 if shape.model_type in _TWO_ATTENTIONS else 1
    return kept + attentions * (element * attention.query_size + 4 * attention.query_heads)


def policy_parameters(shape: ModelShape, settings: Settings) -> int:
    """Parameters of the policy; a reward model has no head unless tied to the embedding."""
    has_no_head = settings.traits.gives_scalars and not shape.tied_embeddings
    return shape.parameters - has_no_head * shape.vocab_size * shape.hidden_size


@cache
def host_state_bytes(shape: ModelShape, settings: Settings, *, layout: Layout) -> int:
    """Bytes of host memory of models, over all ranks of a machine: offloaded states, the reference.

    Besides pinned memory (``pinned_state_bytes``) offload takes ordinary memory: with FSDP2 for
    gradients and both moments, with FSDP1 for the moments and the sum of the gradients. If only
    states are offloaded, all is pinned.
    """
    trained = shape.parameters if settings.lora is None else trained_parameters(shape, settings)
    ordinary = 12 * settings.trained_models * trained if settings.offloads_model else 0
    ordinary = ordinary * layout.machine_gpus // layout.shard_degree
    return pinned_state_bytes(shape, settings, layout=layout) + ordinary


@cache
def pinned_state_bytes(shape: ModelShape, settings: Settings, *, layout: Layout) -> int:
    """Bytes of pinned host memory of models, over all ranks of a machine; in ``host_state_bytes``.

    With FSDP2's offload it holds the parameters, one block for each tensor's shard; with FSDP1's
    the parameters and the latest gradient, one block for each layer's shard. If only states are
    offloaded it holds both moments, one block each for each tensor's shard. The reference is a
    bfloat16 model under FSDP2. PyTorch rounds a pinned block up to a power of two
    (https://github.com/pytorch/pytorch/pull/171662); norms, a few KiB each, are not counted here.
    """
    pinned, whole = partial(pinned_matrices_bytes, layout=layout), matrices(shape)
    reference = pinned(whole, bytes_per_element=2) if settings.has_second_model else 0
    if not (settings.offloads_model or settings.offloads_states):
        return reference
    if settings.offloads_states:
        moment = pinned(_trained_matrices(shape, settings), bytes_per_element=MOMENT_BYTES)
        states = MOMENTS * moment
    elif settings.lora is not None:
        adapters = pinned(_adapters(shape, settings), bytes_per_element=4)
        states = pinned(whole, bytes_per_element=2) + adapters
    elif settings.strategy == "fsdp2":
        states = pinned(whole, bytes_per_element=4)
    else:
        states = _pinned_units_bytes(shape, layout)
    return reference + settings.trained_models * states


def _pinned_units_bytes(shape: ModelShape, layout: Layout) -> int:
    """Bytes of FSDP1's pinned blocks, for parameters and a gradient: of each layer and the rest."""

    def block_bytes(parameters: int) -> int:
        return _pinned_bytes(4 * -(-parameters // layout.shard_degree))

    of_layers = sum(run.count * block_bytes(run.kind.parameters) for run in shape.runs)
    return 2 * layout.machine_gpus * (of_layers + block_bytes(shape.parameters_outside_layers))


@cache
def staged_gradient_bytes(shape: ModelShape, settings: Settings, *, layout: Layout) -> int:
    """Bytes of host memory through which FSDP2 copies offloaded gradients, over all ranks of one
    machine, besides that of the states.

    A float32 pinned block for each tensor's shard of a few layers, of the embedding and of the
    head; a critic's gradients use the same blocks. Layers with tensors of equal sizes share blocks,
    whatever their attention; layers with and without experts do not. Source:
    engine/parallel/offload.py; tests/gpu/test_gradient_offload.py compares.
    """
    if not settings.offloads_model or settings.strategy != "fsdp2":
        return 0
    counts = Counter[tuple[Matrices, ...]]()
    for run in shape.runs:
        trained = run.kind.matrices
        if settings.adapters is not None:
            trained = adapter_matrices(run.kind, shape.model_type, settings.adapters)
        counts[trained] += run.count
    staged = (
        size for layer, count in counts.items() for size in _times(min(STAGED_LAYERS, count), layer)
    )
    tables = (*shape.layer_tables, _tables(shape))
    if settings.adapters is not None:
        tables = outer_adapter_matrices(shape, settings.adapters)
    return pinned_matrices_bytes((*staged, *tables), layout=layout, bytes_per_element=4)


def pinned_matrices_bytes(
    sizes: Iterable[Matrices], *, layout: Layout, bytes_per_element: int
) -> int:
    """Bytes of pinned host memory for the shards of these matrices, each a block of its own."""

    def block_bytes(rows: int, row_size: int) -> int:
        return _pinned_bytes(bytes_per_element * -(-rows // layout.shard_degree) * row_size)

    return layout.machine_gpus * sum(
        number * block_bytes(rows, size) for number, rows, size in sizes
    )


def matrices(shape: ModelShape) -> tuple[Matrices, ...]:
    """Sizes of all parameter matrices of a model: how many alike, rows, and numbers in a row."""
    return (*_in_layers(shape), *shape.layer_tables, _tables(shape))


@cache
def _in_layers(shape: ModelShape) -> tuple[Matrices, ...]:
    return tuple(size for run in shape.runs for size in _times(run.count, run.kind.matrices))


def _adapters(shape: ModelShape, settings: Settings) -> tuple[Matrices, ...]:
    """Sizes of all matrices of a model's adapters."""
    adapters = settings.adapters
    if adapters is None:
        return ()
    in_layers = (
        size
        for run in shape.runs
        for size in _times(run.count, adapter_matrices(run.kind, shape.model_type, adapters))
    )
    return (*in_layers, *outer_adapter_matrices(shape, adapters))


def _times(layers: int, sizes: tuple[Matrices, ...]) -> tuple[Matrices, ...]:
    """Sizes of the matrices of ``layers`` layers that each have ``sizes``."""
    return tuple(Matrices(layers * each.number, each.rows, each.row_size) for each in sizes)


def _tables(shape: ModelShape) -> Matrices:
    """Size of embedding and head: two matrices, or one if they are tied."""
    return Matrices(1 if shape.tied_embeddings else 2, shape.vocab_size, shape.hidden_size)


def _pinned_bytes(requested: int) -> int:
    """Bytes of the pinned block that PyTorch takes for a request: the next power of two."""
    return 1 << (max(1, requested) - 1).bit_length()


def layer_input_bytes(shape: ModelShape) -> int:
    """Bytes per token of all layers' inputs in bfloat16: what recomputation keeps."""
    return sum(2 * run.count * run.kind.hidden_size for run in shape.runs)


def step_flops(shape: ModelShape, *, length_tokens: int, sequences: int, settings: Settings) -> int:
    """Model FLOPs of a step over ``sequences`` documents of ``length_tokens`` each, with causal
    attention. Counts forward and backward of every trained model, and the forward passes that the
    objective needs beforehand (the reference's, the critic's values). Each weight of a matrix
    product takes 6 FLOPs per token, a frozen one 4, as its own gradient is not computed; attention
    of every layer and document is added. Source: Chowdhery et al., PaLM, appendix B, but with only
    the causal half counted, as FlashAttention does.
    """
    forward = 2 * shape.matmul_parameters
    linear = 3 * forward
    if settings.adapters is not None:
        linear = 2 * forward + 6 * adapter_parameters(shape, settings.adapters)
    attention = sum(
        run.count * _attention_flops(run.kind.attention, length_tokens, settings.pattern)
        for run in shape.runs
    )
    beforehand = settings.traits.has_reference + settings.critic
    trained = settings.trained_models * (linear * length_tokens + attention)
    return sequences * (trained + beforehand * (forward * length_tokens + attention // 3))


def _attention_flops(
    attention: AttentionKind, length_tokens: int, pattern: SparsePatternConfig | None
) -> int:
    """FLOPs of one layer's attention over one document, forward and backward. Q.K and P.V take 2
    FLOPs per product, and twice as many in the backward pass: 3 x 2 x 2 x head_dim x query_heads
    for each pair of a token and a key that it reads. The pairs are half of length², the causal
    triangle; a window cuts off the smaller triangle of keys further back than the window. With a
    pattern the pairs are those that it keeps. A gated delta rule counts as its recurrence, with its
    convolution.
    """
    if pattern is not None:
        return 3 * 2 * 2 * kept_pairs(pattern, length_tokens) * attention.query_size
    delta = attention.delta
    if delta is not None:
        # Reading the state by key, updating it and reading it by query: one product each with the
        # D x V numbers of a head's state.
        of_states = 3 * attention.query_size * delta.key_head_dim
        return 3 * 2 * length_tokens * (of_states + attention.channels * delta.taps)
    further_back = 0
    if attention.window_tokens is not None:
        further_back = max(0, length_tokens - attention.window_tokens)
    twice_the_pairs = length_tokens**2 - further_back**2
    return 3 * 2 * twice_the_pairs * attention.query_size
