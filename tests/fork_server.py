"""Processes that need not import anew what takes seconds: they are forked from one that has.

A ``ForkServer`` is the tests' end. Run as a script, with the names of modules, this file is the
process that forks. Each line of its stdin is an order in JSON, of one process or of a group; each
line of its stdout says how all of them ended. Where one of a group fails, the others are ended:
they wait for it.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Streams = tuple[str, str, str]
"""Paths of what a process reads, and of what it prints to."""


class ForkServer:
    """A process that has imported ``modules``, started when the first order comes."""

    def __init__(self, *modules: str, environment: Mapping[str, str] = {}) -> None:
        """``environment``: what is special of the environment in which modules are imported."""
        self._words = [sys.executable, "-P", __file__, *modules]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        program: str,
        *words: str,
        folder: Path,
        within_s: float,
        cwd: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """What ``subprocess.run`` gives of a command; its streams are files of the folder."""
        out, err = folder / "stdout", folder / "stderr"
        for stream in (out, err):
            stream.write_text("")
        streams = (os.devnull, str(out), str(err))
        environments = [self._environment if environment is None else environment]
        self.start(program, words, environments, streams=streams, cwd=cwd)
        try:
            if not self.is_over(within_s):
                raise subprocess.TimeoutExpired(words, within_s)
            (status,) = self.statuses()
        except BaseException:  # also a test's own timeout: the next one reads no answer of this
            self.end()
            raise
        return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())

    def start(
        self,
        program: str,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        streams: Streams,
        cwd: str | Path | None = None,
    ) -> None:
        """Start a process for each environment. ``program``: a script, ``module:function``, or
        code behind ``-c``.
        """
        order = {
            "program": program,
            "words": words,
            "environments": environments,
            "streams": streams,
            "cwd": str(cwd or Path.cwd()),
        }
        server = self._started()
        assert server.stdin is not None
        server.stdin.write(f"{json.dumps(order)}\n")
        server.stdin.flush()

    def is_over(self, within_s: float) -> bool:
        """Whether what was started ends in time."""
        assert self._process is not None
        return bool(select.select([self._process.stdout], [], [], within_s)[0])

    def statuses(self) -> list[int]:
        """Wait for the end; each process's exit status."""
        assert self._process is not None
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """End the process, and what it may be running."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        return self._process


def serve(modules: Sequence[str]) -> None:
    """Start what is ordered until stdin ends."""
    for name in modules:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread would be missing in every child"
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        numbers: dict[int, int] = {}
        for number, environment in enumerate(order["environments"]):
            child = os.fork()
            if child == 0:
                _become(order, environment)
            numbers[child] = number
        sys.stdout.write(f"{json.dumps(_ended(numbers))}\n")
        sys.stdout.flush()


def _ended(numbers: dict[int, int]) -> list[int]:
    """Wait for all."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(numbers):
        child, status = os.wait()
        statuses[numbers[child]] = os.waitstatus_to_exitcode(status)
        if status:
            for other, number in numbers.items():
                if number not in statuses:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
    return [statuses[number] for number in range(len(numbers))]


def _become(order: dict[str, Any], environment: dict[str, str]) -> None:
    """Be the process that was ordered, with streams as an interpreter opens them: never returns."""
    status = 1
    try:
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(environment)
        own = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in own if folder and folder not in sys.path]
        for descriptor, path in enumerate(order["streams"]):
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
            opened = os.open(path, how, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        status = _run(order["program"], order["words"])
        sys.stdout.flush()
    except SystemExit as leaving:
        sys.stdout.flush()
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 -- the edge of the process, as an interpreter has it
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _run(program: str, words: list[str]) -> int:
    if program.startswith("-c"):
        sys.argv = ["-c", *words]
        code = compile(program.removeprefix("-c"), "<string>", "exec")
        exec(code, {"__name__": "__main__"})  # noqa: S102 -- a test's
        return 0
    if program.endswith(".py"):
        sys.argv, folder = [program, *words], Path(program).parent
        sys.path[:0] = [str(folder), str(folder.parent)]
        runpy.run_path(program, run_name="__main__")
        return 0
    module, _, function = program.partition(":")
    sys.argv = [words[0], *words[1:]]
    return getattr(importlib.import_module(module), function)() or 0


if __name__ == "__main__":
    serve(sys.argv[1:])
