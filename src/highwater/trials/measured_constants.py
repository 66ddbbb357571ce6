"""Constants of this machine's GPUs, as trials meet them.

The processes that read them run under the reaper, in the environment that trials have.
"""

import subprocess
from pathlib import Path

from highwater.errors import MachineError
from highwater.nouns.codec import from_json
from highwater.nouns.hardware import Constants
from highwater.trials.probe import (
    INSTALL_HINT,
    package_obstacles,
    probe,
    refuse_busy_gpus,
    refuse_torch_without_gpu,
)
from highwater.trials.ranks import RankShare
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import clean_environment, last_words, private_folder

_TIMEOUT_S = 300.0
_TRY_A_TRIAL = "`highwater try tiny --length 1k` says whether trials run"


def read_constants(gpus: int) -> Constants:
    """Read the constants of ``gpus`` GPUs of this machine, a process for each; half a minute.

    Raises MachineError where nothing is read.
    """
    machine = probe()
    obstacles = package_obstacles(machine)
    if obstacles:
        raise MachineError("; ".join(obstacles), hint=INSTALL_HINT)
    refuse_torch_without_gpu(machine)
    refuse_busy_gpus(machine, count=gpus)
    with private_folder() as folder:
        target, log = folder / "constants.json", folder / "log"
        readings = module("highwater.engine.training.machine_readings", str(target))
        command = under_reaper(readings, inherit=[folder], ranks=RankShare(gpus, folder))
        status = _run(command, gpus, log)
        if not target.is_file():
            problem = f"nothing was read on {gpus} GPUs: {last_words(log, status)}"
            raise MachineError(problem, hint=_TRY_A_TRIAL)
        return from_json(target.read_bytes(), Constants)


def _run(command: list[str], gpus: int, log: Path) -> int:
    """Run a command to its end, what it says in the log, and return its exit status; raises
    MachineError when time is up.
    """
    environment = clean_environment("expandable")
    with (
        log.open("w") as talk,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk, env=environment
        ) as process,
    ):
        try:
            return process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            problem = f"reading {gpus} GPUs took more than {_TIMEOUT_S:.0f} s"
            raise MachineError(problem, hint=_TRY_A_TRIAL) from error
        finally:
            process.terminate()
