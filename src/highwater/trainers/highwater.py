"""This package's engine, as a trainer whose memory is predicted."""

from highwater.memory.formula.formula import likely_footprint
from highwater.memory.interval.residuals import bundled_residuals, study_residuals
from highwater.memory.trainers import TrainerMemory
from highwater.nouns.trainer import TrainerTraits

PREDICTED = TrainerTraits(
    step="highwater's own engine, with its tiles, chunks and kernels",
    is_run=True,
    traces="made",
    shards_packed=True,
    offloads_states=True,
)
MEMORY = TrainerMemory(
    formula=likely_footprint,
    accuracy="its constants were fitted to some of the trials that come with its interval, "
    "which may be too narrow for others; of 84 trials that were held out (SFT and GRPO with "
    "FSDP2, one to four H200s) 4 took more than the upper end; `--calibrate` learns from "
    "trials of your own (docs/results/predict)",
    residuals=bundled_residuals,
    learn=study_residuals,
    is_timed=True,
)
