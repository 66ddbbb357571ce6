"""Training worker: one rank's process in a training run, like engine/training/worker.py in a
trial.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from highwater.engine.training.worker import run_rank
from highwater.nouns.protocols import OnPhase
from highwater.nouns.training import TrainingSpec

if TYPE_CHECKING:
    from highwater.engine.training.rank_run import RankRun


def main() -> None:
    """Run one rank: ``python -m highwater.engine.training.training_worker SPEC REPORTS``."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrainingSpec)

    def made(on_phase: OnPhase) -> "RankRun":
        from highwater.engine.training.training_run import TrainingRun

        return TrainingRun(spec, on_phase=on_phase)

    run_rank(spec.trial, made, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
