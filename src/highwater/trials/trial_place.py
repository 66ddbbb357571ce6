"""The place of one trial on this machine: GPUs that are free before it and after it, and files that
can be written.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from highwater.errors import MachineError
from highwater.nouns.trial import TrialSpec
from highwater.trials.probe import busy_gpus, probe, refuse_busy_gpus

_RELEASE_S = 60.0


@contextmanager
def trial_place(
    spec: TrialSpec,
    gpus: tuple[str, ...] | None,
    *,
    allow_busy: bool,
    log_directory: Path,
    flag: str = "--log-dir",
) -> Generator[None]:
    """The place of a trial that runs within the block; ``gpus`` as for ``Launcher.launch``, and
    ``flag`` names the directory in a hint.

    Raises MachineError where somebody else uses its GPUs, unless ``allow_busy``, where the driver
    does not take their memory back, and for files that could not be written.
    """
    is_watched = spec.device == "cuda" and not allow_busy
    if is_watched:
        refuse_busy_gpus(probe(gpus), count=spec.layout.machine_gpus)
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"the ranks could not be started, or what they say not recorded: {error}",
            hint=f"make room and check the rights of {log_directory}, or use another `{flag}`",
        ) from error
    if is_watched:
        await_release(gpus, spec.layout.machine_gpus)


def await_release(gpus: tuple[str, ...] | None, count: int) -> None:
    """Wait until the driver has taken the trial's memory back; MachineError when it does not."""
    deadline = time.monotonic() + _RELEASE_S
    while busy_gpus((machine := probe(gpus)).gpus[:count]):
        if time.monotonic() > deadline:
            refuse_busy_gpus(machine, count=count)
        time.sleep(0.2)
