"""The engine's own trial, as its worker goes about it: what a trace has of it besides its steps."""

from collections.abc import Sequence

import torch

from highwater.engine.attention.dense import prove
from highwater.engine.data.batches import Batch
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.engine.training.rank_context import RankContext, compute_dtype
from highwater.engine.training.rank_run import assemble, rehearse
from highwater.engine.training.statistics import Statistics, summed
from highwater.engine.training.step import Training
from highwater.model.model import load_model
from highwater.nouns.events import ReleaseCached
from highwater.nouns.trial import TrialSpec

_LENT_BY_FSDP1 = 4
"""The most allocations that FSDP1 may have lent and not waited for. Among several ranks it gathers
two units ahead at the most: their gathered parameters, and the shards that these came from.
Compared with no trial yet."""


def set_up(recorder: AllocationRecorder, context: RankContext) -> None:
    """Tell the recorder how far FSDP1 may gather ahead."""
    if context.mesh.size() > 1:
        recorder.most_awaited = _LENT_BY_FSDP1


def begin(
    spec: TrialSpec, context: RankContext, rehearsal: Batch, recorder: AllocationRecorder
) -> Training:
    """The kernel proven, the models built, one short step rehearsed and the cache given back."""
    _prove_kernel(spec, context)
    training = assemble(spec, context)
    recorder.follow(training.policy)
    recorder.enter("rehearsal")
    rehearse(training, rehearsal)
    recorder.events.append(ReleaseCached())
    return training


def before_step(recorder: AllocationRecorder) -> None:
    """Nothing happens between two steps."""


def after_step(training: Training, micro_batches: Sequence[Batch]) -> None:
    """Sum the numbers of a step's statistics over the ranks."""
    documents = sum(len(batch.rewards) for batch in micro_batches)
    width = Statistics(training.mesh, training.sequence).width(documents)
    summed(torch.zeros(width, dtype=torch.float64), training.mesh)


def _prove_kernel(spec: TrialSpec, context: RankContext) -> None:
    """What a rank does before it has a model: a native allocator goes on in what this leaves."""
    shape = load_model(spec.model_directory).shape
    heads = {
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }
    prove(context.kernel, context.device, compute_dtype(context.device), **heads)
