"""A launcher that trains nothing: it tells which GPUs of which node it was given."""

import os
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from highwater.nouns.request import Request
from highwater.nouns.trial import Launch, OnPhase, Outcome, TrialEndedError, TrialResult

GO = "go"
"""File in the folder of ``FAULTS``: the trials end once it is there."""


@dataclass(frozen=True, kw_only=True)
class ToldGpus:
    log_directory: Path

    def launch(
        self, launch: Launch, *, gpus: tuple[str, ...] | None, ended: Event, on_phase: OnPhase
    ) -> TrialResult:
        on_phase("held")
        while not Path(os.environ["FAULTS"], GO).exists():
            if ended.wait(0.05):
                raise TrialEndedError
        node = os.getppid()
        return TrialResult(outcome=Outcome.FIT, reason=f"{node}:{','.join(gpus or ())}")


def told(_: Request) -> type[ToldGpus]:
    return ToldGpus
