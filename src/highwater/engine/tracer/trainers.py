"""The step of each trainer that is traced: a row for each, by the names of nouns/trainer.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from highwater.engine.data.batches import Batch
from highwater.engine.tracer import engine_step, trinity_step
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.engine.training.rank_context import RankContext
from highwater.engine.training.step import Training
from highwater.nouns.trainer import TrainerName
from highwater.nouns.trial import TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrainer:
    """What a trace of one trainer has besides the steps, which are ours for each."""

    set_up: Callable[[AllocationRecorder, RankContext], None]
    """Tells the recorder what it has to know of the trainer, before anything is allocated."""
    begin: Callable[[TrialSpec, RankContext, Batch, AllocationRecorder], Training]
    """Builds the models, has the recorder follow the policy, and does all that comes before the
    first step. The batch is a trial's rehearsal."""
    before_step: Callable[[AllocationRecorder], None]
    """Happens before every step."""
    after_step: Callable[[Training, Sequence[Batch]], None]
    """Happens after every step of these micro-batches."""


TRACED: Mapping[TrainerName, TracedTrainer] = {
    "highwater": TracedTrainer(
        set_up=engine_step.set_up,
        begin=engine_step.begin,
        before_step=engine_step.before_step,
        after_step=engine_step.after_step,
    ),
    "trinity": TracedTrainer(
        set_up=trinity_step.set_up,
        begin=trinity_step.begin,
        before_step=trinity_step.before_step,
        after_step=trinity_step.after_step,
    ),
}
"""The traced step of each trainer, by the name that ``--trainer`` takes."""
