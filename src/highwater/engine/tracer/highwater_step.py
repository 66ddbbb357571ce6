"""The traced step of this package's engine, as its worker runs it, and code that all traced steps
share. Other trainers' steps are in files beside this one, named after them (nouns/trainer.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from highwater.engine.attention.dense import prove
from highwater.engine.data.batches import Batch
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.engine.training.rank_context import RankContext, compute_dtype
from highwater.engine.training.rank_run import assemble, rehearse
from highwater.engine.training.statistics import Statistics, summed
from highwater.engine.training.step import Training, train_step
from highwater.model.model import load_model
from highwater.nouns.events import ReleaseCached
from highwater.nouns.trial import OnPhase, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrainer:
    """How the tracer sets up and runs one trainer's step."""

    set_up: Callable[[AllocationRecorder, RankContext], None] = lambda *_: None
    """Tells the recorder about the trainer, before anything is allocated."""
    begin: Callable[[TrialSpec, RankContext, Batch, AllocationRecorder], Any]
    """Builds the models, makes the recorder follow the policy, and does all else that precedes the
    first step. The batch is a trial's rehearsal."""
    before_step: Callable[[AllocationRecorder], None] = lambda _: None
    """Called before every step."""
    after_step: Callable[[Training, Sequence[Batch]], None] = lambda *_: None
    """Called after every step, with its micro-batches."""
    step: Callable[[Any, Sequence[Batch], OnPhase], object] = lambda training, batches, enter: (
        train_step(training, batches, enter=enter)
    )
    """Runs one step of what ``begin`` returned; default: our engine's step."""
    needs_peft: bool = False
    """True if peft is imported whatever is trained."""


_LENT_BY_FSDP1 = 4
"""Most allocations that FSDP1 may have lent without waiting for them. With several ranks it gathers
at most two units ahead: their gathered parameters, and the shards that these came from. Not
compared with any trial yet."""


def _set_up(recorder: AllocationRecorder, context: RankContext) -> None:
    """Set how far FSDP1 may gather ahead in the recorder."""
    if context.mesh.size() > 1:
        recorder.most_awaited = _LENT_BY_FSDP1


def _begin(
    spec: TrialSpec, context: RankContext, rehearsal: Batch, recorder: AllocationRecorder
) -> Training:
    """Prove the kernel, build the models, rehearse one short step and empty the cache."""
    shape = load_model(spec.model_directory).shape
    # as a rank does before it builds a model: its freed blocks stay in the allocator
    prove(
        *(context.kernel, context.device, compute_dtype(context.device)),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    training = assemble(spec, context)
    recorder.follow(training.policy)
    recorder.enter("rehearsal")
    rehearse(training, rehearsal)
    recorder.events.append(ReleaseCached())
    return training


def _after_step(training: Training, micro_batches: Sequence[Batch]) -> None:
    """Allocate as the statistics of a step do: sum a tensor of their size over the ranks."""
    documents = sum(len(batch.rewards) for batch in micro_batches)
    width = Statistics(training.mesh, training.sequence).width(documents)
    summed(torch.zeros(width, dtype=torch.float64), training.mesh)


TRACED = TracedTrainer(set_up=_set_up, begin=_begin, after_step=_after_step)
