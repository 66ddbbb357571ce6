"""Constants of this machine's GPUs: the processes that read them, under the leash, from the environment that trials have."""

import subprocess

from highwater.errors import MachineError
from highwater.launch.leash import module, on_leash
from highwater.launch.local import clean_environment
from highwater.launch.private_folder import private_folder
from highwater.launch.probe import INSTALL_HINT, package_obstacles, probe, refuse_busy_gpus, refuse_torch_without_gpu
from highwater.spec.codec import from_json
from highwater.spec.constants import Constants

_TIMEOUT_S = 300.0
_TAIL_LINES = 3


def read_constants(gpus: int) -> Constants:
    """What one process for each of ``gpus`` GPUs of this machine reads; half a minute. Raises MachineError where nothing is."""
    machine = probe()
    obstacles = package_obstacles(machine)
    if obstacles:
        raise MachineError("; ".join(obstacles), hint=INSTALL_HINT)
    refuse_torch_without_gpu(machine)
    refuse_busy_gpus(machine, count=gpus)
    with private_folder() as folder:
        target, log = folder / "constants.json", folder / "log"
        command = on_leash(module("highwater.engine.constants", str(target)), inherit=[folder], ranks=(gpus, folder))
        with (
            log.open("w") as talk,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk, env=clean_environment("expandable")
            ) as process,
        ):
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                problem = f"reading {gpus} GPUs took more than {_TIMEOUT_S:.0f} s"
                raise MachineError(problem, hint="`highwater try tiny --length 1k` says whether trials run") from error
            finally:
                process.terminate()
        if not target.is_file():
            tail = " / ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:])
            raise MachineError(
                f"nothing was read on {gpus} GPUs: {tail}", hint="`highwater try tiny --length 1k` says whether trials run"
            )
        return from_json(target.read_bytes(), Constants)
