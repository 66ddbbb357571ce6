"""The process that a benchmark of attentions measures in, and what it tells as it goes."""

import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from highwater.errors import MachineError
from highwater.nouns.attention_bench import BenchLine, BenchOrder
from highwater.nouns.codec import from_json, to_json
from highwater.trials.probe import INSTALL_HINT, package_obstacles, probe
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import (
    ON_THE_CPU,
    clean_environment,
    end_reaper,
    last_words,
    private_folder,
)

_BENCHMARK = "highwater.engine.bench.attention.benchmark"


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
        with log.open("wb") as talk:
            process = subprocess.Popen(
                under_reaper(module(_BENCHMARK, str(path)), inherit=[folder]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=talk,
                # Ctrl-C in a terminal reaches the command alone, which then ends this in order.
                start_new_session=True,
            )
            try:
                yield _read(process.stdout)
                if (status := process.wait()) != 0:
                    problem = f"the benchmark failed: {last_words(log, status)}"
                    raise MachineError(
                        problem, hint="`highwater doctor` says what this machine lacks"
                    )
            finally:
                end_reaper(process)


def _read(pipe: IO[bytes] | None) -> Iterator[BenchLine]:
    """Each line as it comes. Raises MachineError for a refusal, and for what is no line."""
    for text in pipe or ():
        try:
            line = from_json(text, BenchLine)
        except msgspec.MsgspecError as error:
            raise MachineError(
                f"the benchmark said what is no line of it: {error}",
                hint="`highwater doctor` says what this machine lacks",
            ) from error
        if line.refusal is not None:
            raise MachineError(line.refusal.problem, hint=line.refusal.hint)
        yield line
