"""Trials of other trainers, and what the logs of one say whose GPU ran out."""

from pathlib import Path
from typing import Any

import msgspec

from highwater.nouns.foreign_request import config_digest
from highwater.nouns.trainer import ForeignName, ForeignTrainer
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.trials.foreign_classify import ForeignEnding, classify_foreign
from places import question_of

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 1.20 GiB is free."
)
FRAMES = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    x @ y\n'
RAN_OUT = f"{FRAMES}{OOM}\n"
QUESTION = question_of(loss="full", allocator="native")


def trainer_of(
    name: ForeignName, config: Path | None = None, command: tuple[str, ...] = ()
) -> ForeignTrainer:
    """A trainer by its name, with the user's own file as it is now."""
    return ForeignTrainer(
        trainer=name,
        command=command,
        base_config_path=None if config is None else str(config),
        base_config_digest=None if config is None else config_digest(config),
    )


def typed_trial(device: str = "cuda", pattern: str | None = None, steps: int = 2) -> TrialSpec:
    """A trial of a typed command, whose steps the pattern finds in its log."""
    foreign = ForeignTrainer(trainer="command", command=("train", "{length}"), done_pattern=pattern)
    spec = QUESTION.trial(QUESTION.cells[0], 4096)
    spec = msgspec.structs.replace(spec, foreign=foreign, steps=steps)
    if device == "cpu":
        spec = msgspec.structs.replace(spec, device="cpu", memory_budget_bytes=2**30)
    return spec


def outcome(log: str, exit_code: int | None = 1, **fields: Any) -> Outcome:
    """What such a trial is judged; without an exit code it was stopped for its time."""
    named = {name: fields.pop(name) for name in ("device", "pattern", "steps") if name in fields}
    if exit_code is None:
        fields.setdefault("ended_for", "timeout")
    ending = ForeignEnding(exit_code=exit_code, timeout_s=60.0, log=log, **fields)
    return classify_foreign(typed_trial(**named), ending).outcome
