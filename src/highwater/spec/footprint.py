"""Footprint: what a trial keeps while it runs, on devices, on the host and on disk. Its peak is prediction/formula.py's."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from highwater.spec.model import STATE_BYTES_PER_PARAMETER, ModelShape
from highwater.spec.settings import Settings
from highwater.spec.trial import Device
from highwater.units import MIB

PROCESS_BYTES = 512 * MIB
"""Host memory of one process, Python with torch."""
STAGED_LAYERS = 3
"""Layers whose offloaded gradients have pinned blocks at a time: of one the copy runs, of one it is awaited, and the last one's
blocks are given out again when the GPU has come to where they were let go."""
SHARDED_BYTES_PER_PARAMETER = 12
"""On disk: float32 weights and both moments of AdamW."""
HF_BYTES_PER_PARAMETER: Mapping[Device, int] = {"cuda": 2, "cpu": 4}
"""On disk: Hugging Face weights in the dtype that the device computes in, bfloat16 or float32."""


class CheckpointBytes(NamedTuple):
    """What one trial has on disk at the most, over all ranks."""

    sharded_bytes: int
    hf_bytes: int


def checkpoint_bytes(shape: ModelShape, settings: Settings, device: Device) -> CheckpointBytes:
    """What a trial writes. Hugging Face weights count once: those of a step overwrite those of the step before."""
    return CheckpointBytes(
        sharded_bytes=SHARDED_BYTES_PER_PARAMETER * shape.parameters * settings.trained_models * (settings.checkpoint == "sharded"),
        hf_bytes=HF_BYTES_PER_PARAMETER[device] * shape.parameters if settings.save_hf != "never" else 0,
    )


def device_state_bytes(shape: ModelShape, settings: Settings, *, device: Device) -> int:
    """Parameters, gradients and both moments of every trained model at the peak, over all devices that share them.

    Offloaded, FSDP2 leaves nothing; FSDP1 a float32 gradient until the backward pass ends (parallel/fsdp1.py). On the CPU there
    is nowhere else. A reward model has a number in the place of the vocabulary, and no head where that is not the embedding; a
    critic, too, though here it counts as whole.
    """
    per_parameter = STATE_BYTES_PER_PARAMETER
    if settings.offload and device == "cuda":
        per_parameter = 4 if settings.strategy == "fsdp" else 0
    policy = shape.parameters
    if settings.objective == "rw" and not shape.tied_embeddings:
        policy -= shape.vocab_size * shape.hidden_size
    return per_parameter * policy * settings.trained_models


def host_state_bytes(
    shape: ModelShape, settings: Settings, *, gpus: int, state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER
) -> int:
    """Host memory that models take, over all ranks of the machine: offloaded states, and GRPO's reference.

    Besides what is pinned: gradients and both moments with FSDP2, with FSDP1 the moments and the sum of the gradients.
    ``state_bytes_per_parameter`` scales all states together, as on a device, and leaves the reference as it is.
    """
    ordinary = 12 * settings.trained_models * shape.parameters if settings.offload else 0
    pinned = pinned_state_bytes(shape, settings, gpus=gpus, state_bytes_per_parameter=state_bytes_per_parameter)
    return pinned + ordinary * state_bytes_per_parameter // STATE_BYTES_PER_PARAMETER


def pinned_state_bytes(
    shape: ModelShape, settings: Settings, *, gpus: int, state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER
) -> int:
    """The part of it in pinned memory.

    Offloaded with FSDP2 parameters, one block for each tensor's shard; with FSDP1 parameters and the latest gradient, one block for
    each layer's shard. The reference is a bfloat16 model under FSDP2. PyTorch rounds a pinned block up to a power of two
    (https://github.com/pytorch/pytorch/pull/171662); norms, a few KiB each, are left out of that.
    """
    reference = _pinned_matrices_bytes(shape, gpus=gpus, bytes_per_element=2) if settings.objective == "grpo" else 0
    if not settings.offload:
        return reference
    if settings.strategy == "fsdp2":
        pinned = _pinned_matrices_bytes(shape, gpus=gpus, bytes_per_element=4, state_bytes_per_parameter=state_bytes_per_parameter)
    else:
        outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2) + shape.hidden_size
        layer = (shape.parameters - outside) // shape.layers
        shards = (4 * -(-size // gpus) for size in (layer, outside))
        of_layer, of_rest = (_pinned_bytes(size * state_bytes_per_parameter // STATE_BYTES_PER_PARAMETER) for size in shards)
        pinned = 2 * gpus * (shape.layers * of_layer + of_rest)
    return reference + settings.trained_models * pinned


def staged_gradient_bytes(shape: ModelShape, settings: Settings, *, gpus: int) -> int:
    """Host memory that FSDP2's offloaded gradients pass through, over all ranks of the machine, besides that of the states.

    A pinned block for each tensor's shard in float32, of a few layers, of the embedding and of the head; a critic's gradients
    pass through the same blocks. Where some layers have experts and others none, each kind has its own.
    Source: parallel/offload.py; tests/gpu/test_gradient_offload.py compares.
    """
    if not settings.offload or settings.strategy != "fsdp2":
        return 0
    dense = min(STAGED_LAYERS, shape.dense_layers)
    layers = dense + min(STAGED_LAYERS, shape.layers - shape.dense_layers)
    few = msgspec.structs.replace(shape, layers=layers, dense_layers=dense)
    return _pinned_matrices_bytes(few, gpus=gpus, bytes_per_element=4)


def _pinned_matrices_bytes(
    shape: ModelShape, *, gpus: int, bytes_per_element: int, state_bytes_per_parameter: int = STATE_BYTES_PER_PARAMETER
) -> int:
    shards = ((count, bytes_per_element * -(-rows // gpus) * columns) for count, rows, columns in matrices(shape))
    scaled = ((count, size * state_bytes_per_parameter // STATE_BYTES_PER_PARAMETER) for count, size in shards)
    return gpus * sum(count * _pinned_bytes(size) for count, size in scaled)


def matrices(shape: ModelShape) -> tuple[tuple[int, int, int], ...]:
    """Every parameter of two dimensions or more: how many of it, its rows, which are what FSDP2 cuts, and the size of a row."""
    hidden, layers, mixed = shape.hidden_size, shape.layers, shape.layers - shape.dense_layers
    query, key = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    into = shape.mlp_matrices - 1  # the last one leads out of the MLP

    def mlps(count: int, width: int) -> tuple[tuple[int, int, int], ...]:
        return ((into * count, width, hidden), (count, hidden, width)) if count and width else ()

    if shape.experts > 1:  # fused: a row is an expert
        width = shape.intermediate_size
        routed = (
            (mixed, shape.experts, into * width * hidden),
            (mixed, shape.experts, hidden * width),
            (mixed, shape.experts, hidden),
        )
    else:
        routed = mlps(mixed, shape.intermediate_size)
    in_mlps = (*routed, *mlps(mixed, shape.shared_expert_size), *mlps(shape.dense_layers, shape.dense_intermediate_size))
    embeddings = (1 if shape.tied_embeddings else 2, shape.vocab_size, hidden)
    return ((layers, query, hidden), (2 * layers, key, hidden), (layers, hidden, query), *in_mlps, embeddings)


def _pinned_bytes(requested: int) -> int:
    return 1 << (max(1, requested) - 1).bit_length()


def layer_input_bytes(shape: ModelShape) -> int:
    """Per token: the inputs of all layers in bf16, what recomputation keeps."""
    return 2 * shape.hidden_size * shape.layers
