"""Memory of vLLM beside a training: on one GPU while it generates, and while the step trains (two
figures that are never added up), and how many sequences it holds at once. Rules of vLLM:

- vLLM's share is of the whole GPU; context, NCCL and cuBLAS exist before it measures, and are added
  to it. The KV cache gets the share less weights, profile run, CUDA graphs and libraries.
- The profile run computes ``max_num_batched_tokens`` at once, and samples one token of each of
  ``max_num_seqs`` sequences: the larger of the two counts.
- A sequence takes whole blocks. vLLM needs the blocks of one sequence of the length to start.
- Asleep, vLLM keeps context, NCCL, CUDA graphs and libraries. While vLLM generates, the training
  keeps parameters and moments, but no gradients.

Sources, of vLLM 0.33.0: ``request_memory`` in vllm/v1/worker/utils.py, ``init_device`` and
``determine_available_memory`` in v1/worker/gpu_worker.py, ``_dummy_sampler_run`` in
v1/worker/gpu_model_runner.py, ``FullAttentionSpec`` in v1/kv_cache_interface.py,
``get_max_concurrency_for_kv_cache_config`` in v1/core/kv_cache_utils.py, ``CuMemBackend`` in
device_allocator/sleep_mode_backend.py; defaults in config/cache.py. Of the trainers:
trl/generation/vllm_generation.py of trl 1.16.0; config/rollout/rollout.yaml of verl 0.9.1.
"""

import math
from typing import Any

from highwater.errors import UsageError
from highwater.memory.formula.constants import (
    CUBLAS_WORKSPACES_BYTES,
    GENERATION,
    WORKSPACES,
    Footprint,
    RolloutMemory,
    Term,
    context_bytes,
    nccl_bytes,
    present,
)
from highwater.memory.formula.layers import NUMBER_BYTES, Step
from highwater.model.held_bytes import matrices, pinned_matrices_bytes, resting_state_bytes
from highwater.model.layer_kind import LayerKind
from highwater.nouns.codec import to_builtins
from highwater.nouns.layout import Layout
from highwater.nouns.objective import (
    Rollout,
    RolloutTraits,
    generation_micro_batches,
)
from highwater.nouns.request import Request
from highwater.nouns.study import Question
from highwater.units import GIB

ON_PAPER = "On paper, by vLLM 0.33.0's own rule; never measured here."
_ELEMENT = 2
"""Bytes of a number in vLLM's model and KV cache: bfloat16."""
_STANDALONE_SHARE = 0.92
SHARES = tuple(twentieths / 20 for twentieths in range(7, 20))
"""Shares of a GPU that are tried for vLLM."""
BLOCK_TOKENS = 16
_SAMPLED_BYTES = _ELEMENT + 4 * NUMBER_BYTES
"""Bytes per logit while a token is sampled: in bfloat16 as computed, and in float32 the logit, its
log-probability, its probability and the noise that chooses."""
GRAPHS_BYTES = round(0.58 * GIB)
"""vLLM's estimate of CUDA graphs on one of eight GPUs (wtdcode/vllm-backport#34)."""
LIBRARIES_BYTES = round(0.16 * GIB)
"""Memory of vLLM's libraries, read on an H100 (vllm-project/vllm#12126)."""


def rollout_of(
    request: Request, question: Question, traits: RolloutTraits, *, rollout_gpus: int
) -> Rollout:
    """The rollout of a question, on the training's GPUs, or on ``rollout_gpus`` others if above 0.

    Raises UsageError for settings that vLLM or the trainer refuses, or that are not predicted.
    """
    asked = request.rollout_request
    usual: dict[str, Any] = {
        "prompt_tokens": request.prompt_tokens,
        "gpu_memory_utilization": _STANDALONE_SHARE if rollout_gpus else traits.utilization,
        "most_utilization": None if rollout_gpus or asked.gpu_memory_utilization else 0.0,
        "sleep_level": traits.sleep_levels[0],
        "rollout_sequences": traits.sequences,
    }
    named = {name: value for name, value in to_builtins(asked).items() if value is not None}
    found = Rollout(**{**usual, **named}, own_gpus=rollout_gpus, traits=traits)
    shape, cell, degree = question.model.shape, question.cells[0], found.rollout_tensor_parallel
    gpus, kinds = rollout_gpus or cell.layout.gpus, [run.kind.attention for run in shape.runs]
    parts = {gpus, *(each.query_heads for each in kinds)}
    is_right = 0 < (found.gpu_memory_utilization or 0) <= 1 and found.rollout_sequences != 0
    is_right &= found.sleep_level in traits.sleep_levels
    for is_refused, problem, hint in (
        (asked.rollout is None, "settings of a rollout, and no rollout", "add `--rollout vllm`"),
        (
            cell.settings.traits.advantages == "none",
            f"{cell.settings.objective} trains on what is there, and generates nothing",
            "use `--objective grpo`, or leave `--rollout` out",
        ),
        (
            shape.window_tokens is not None or shape.delta is not None,
            f"{shape.model_type} has layers with windows or linear attention, whose cache vLLM "
            "shares out among groups of layers: it is not predicted",
            "leave `--rollout` out, and reserve its share: `--reserved 20GiB`",
        ),
        (
            not is_right,
            "vLLM takes a share above 0 and up to 1 and a sequence or more, and here sleeps at "
            f"level {' or '.join(map(str, sorted(traits.sleep_levels)))}",
            "for example `--gpu-memory-utilization 0.3 --sleep-level 2`",
        ),
        (
            degree < 1 or any(part % degree for part in parts),
            f"{degree} GPUs that share vLLM's model do not divide {gpus} GPUs and its query heads",
            "use `--rollout-tensor-parallel 1`",
        ),
    ):
        if is_refused:
            raise UsageError(problem, hint=hint)
    return found


def with_rollout(
    training: Footprint, step: Step, rollout: Rollout, *, total_bytes: int
) -> Footprint:
    """A training's footprint with the memory of sleeping vLLM, and, in ``rollout``, that of vLLM
    when it generates, on a GPU of ``total_bytes``.
    """
    phases = tuple(each for each in training.phases if each.name != GENERATION)
    found = _generating(training, step, rollout, total_bytes)
    pinned, degree = 0, rollout.rollout_tensor_parallel
    if rollout.sleep_level == 1 and not rollout.own_gpus:
        copies, one = step.layout.machine_gpus // degree, Layout(gpus=degree)
        pinned = copies * pinned_matrices_bytes(
            matrices(step.shape), layout=one, bytes_per_element=_ELEMENT
        )
    return training.replace(
        phases=phases,
        outside=(*training.outside, *found.asleep),
        host=(*training.host, *present(Term("weights of sleeping vLLM, pinned", pinned))),
        rollout=found,
    )


def _generating(
    training: Footprint, step: Step, rollout: Rollout, total_bytes: int
) -> RolloutMemory:
    shape, settings, degree = step.shape, step.settings, rollout.rollout_tensor_parallel
    sequences = rollout.rollout_sequences
    if sequences is None:
        rows = settings.sequences_per_micro_batch
        sequences = rows * generation_micro_batches(rows, step.layout.gpus) * degree
    weights = -(-_ELEMENT * shape.parameters // degree)
    tokens = min(rollout.traits.batched_tokens, sequences * step.length_tokens)
    computed = max(
        _SAMPLED_BYTES * min(sequences, tokens) * shape.vocab_size,
        *(_ELEMENT * tokens * _width(run.kind, degree) for run in shape.runs),
    )
    share = math.ceil(total_bytes * (rollout.gpu_memory_utilization or 0))
    cache = share - weights - computed - GRAPHS_BYTES - LIBRARIES_BYTES
    block = BLOCK_TOKENS * token_bytes(step, degree)
    a_sequence = -(-step.length_tokens // BLOCK_TOKENS)
    has_no_context = rollout.traits.is_in_the_trainer and not rollout.own_gpus
    kept = present(
        Term("context of vLLM", 0 if has_no_context else context_bytes("cuda", gpus=degree)),
        Term("NCCL of vLLM", nccl_bytes(degree)),
        Term("CUDA graphs of vLLM", GRAPHS_BYTES),
        Term("libraries of vLLM", LIBRARIES_BYTES),
    )
    awake = present(
        *kept,
        Term("weights of vLLM", weights),
        Term("profile run of vLLM", computed),
        Term("KV cache", max(0, cache)),
    )
    resting = (
        Term("states without gradients", resting_state_bytes(shape, settings, step.layout)),
        Term(WORKSPACES, sum(CUBLAS_WORKSPACES_BYTES)),
        *training.outside,
    )
    engines = (rollout.own_gpus or step.layout.gpus) // degree
    return RolloutMemory(
        awake=awake,
        resting=() if rollout.own_gpus else present(*resting),
        asleep=() if rollout.own_gpus else kept if rollout.sleep_level else awake,
        engines=engines,
        sequences=engines * min(sequences, max(0, cache) // block // a_sequence),
        lacks_bytes=max(0, block * a_sequence - cache),
    )


def token_bytes(step: Step, degree: int) -> int:
    """Bytes of the KV cache for one token on a GPU, all layers; a GPU has a head at least."""
    kinds = ((run.count, run.kind.attention) for run in step.shape.runs)
    return sum(
        2 * count * max(1, each.kv_heads // degree) * each.head_dim * _ELEMENT
        for count, each in kinds
    )


def _width(kind: LayerKind, degree: int) -> int:
    """Elements per token in the computation of a layer: the residual stream, the MLP's input, and
    the GPU's shard of gate, up and their product.
    """
    mlp = kind.mlp
    routed = mlp.experts_per_token if mlp.experts > 1 else 0
    return (2 + routed) * kind.hidden_size + 3 * (mlp.plain_width + routed * mlp.width) // degree
