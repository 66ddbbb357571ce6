"""What a job measures of this machine: constants of its GPUs, as trials meet them, and attentions,
a line for each thing that is known.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from highwater.errors import MachineError
from highwater.nouns.attention_bench import BenchLine, BenchOrder
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.hardware import Constants
from highwater.trials.job import Job, end_reaper, failed, start
from highwater.trials.probe import (
    INSTALL_HINT,
    package_obstacles,
    probe,
    refuse_busy_gpus,
    refuse_torch_without_gpu,
)
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import ON_THE_CPU, clean_environment, private_folder

_BENCHMARK = "highwater.engine.bench.attention.benchmark"
_HINT = "`highwater doctor` says what this machine lacks"


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
    job = Job(
        module="highwater.engine.training.machine_readings",
        report=Constants,
        ranks=gpus,
        environment=clean_environment("expandable"),
        timeout_s=300.0,
        failure=f"nothing was read on {gpus} GPUs",
        late=f"reading {gpus} GPUs",
        hint="`highwater try tiny --length 1k` says whether trials run",
    )
    with private_folder() as folder:
        return job.run(folder)


@contextmanager
def bench_lines(order: BenchOrder) -> Generator[Iterator[BenchLine]]:
    """What is measured, thing by thing, while the block runs; nothing of it runs any more after it.

    Raises MachineError where nothing can be measured, or the process failed.
    """
    obstacles = package_obstacles(probe())
    if obstacles:
        raise MachineError("; ".join(obstacles), hint=INSTALL_HINT)
    environment = clean_environment("expandable")
    environment["OMP_NUM_THREADS"] = str(order.threads)
    if order.device == "cpu":
        environment |= ON_THE_CPU
    with private_folder() as folder:
        path, log = folder / "order.json", folder / "log"
        path.write_text(to_json(order), encoding="utf-8")
        command = under_reaper(module(_BENCHMARK, str(path)), inherit=[folder])
        with log.open("wb") as talk:
            process = start(command, environment, talk, is_read=True)
            try:
                yield _read(process.stdout)
                if (status := process.wait()) != 0:
                    raise failed("the benchmark failed", log, status, hint=_HINT)
            finally:
                end_reaper(process)


def _read(pipe: IO[bytes] | None) -> Iterator[BenchLine]:
    """Each line as it comes. Raises MachineError for a refusal, and for what is no line."""
    for text in pipe or ():
        try:
            line = from_json(text, BenchLine)
        except msgspec.MsgspecError as error:
            problem = f"the benchmark said what is no line of it: {error}"
            raise MachineError(problem, hint=_HINT) from error
        if line.refusal is not None:
            raise MachineError(line.refusal.problem, hint=line.refusal.hint)
        yield line
