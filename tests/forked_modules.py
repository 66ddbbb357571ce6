"""A process that imports this, or is forked from one that has, starts modules of ours as forks of
itself: they are processes as ever, with their own streams, groups and limits, but for the seconds
that PyTorch takes to be imported.

Not where a test looks at a process's words or environment from outside: they are its parent's.
"""

import atexit
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NoReturn

from highwater.trials import ranks

PRELOADED = (
    *("highwater.engine.training.rank_run", "highwater.engine.training.training_run"),
    *("highwater.engine.training.trainer_keywords", "highwater.engine.data.tokenise"),
    *("highwater.engine.bench.attention.benchmark", "highwater.engine.models.pretrained"),
    *("highwater.trials.reaper", "transformers.models.qwen3.modeling_qwen3"),
)
"""Modules that take long to import, which what is started needs."""


class Forked(subprocess.Popen[bytes]):
    """A process that is forked where it is one of this interpreter's modules."""

    def _execute_child(self, args: Any, *named: Any) -> None:
        words = [os.fspath(word) for word in args]
        if words[:3] != [sys.executable, "-P", "-m"]:
            return super()._execute_child(args, *named)  # pyright: ignore[reportAttributeAccessIssue]
        _, prepare, _, keeps, cwd, environment, _, _, _, *others = named
        pipes, is_apart = others[:6], others[11]
        assert cwd is None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(words[3:], environment, pipes, keeps, prepare, is_apart=is_apart)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]
        return None


def _become(
    words: list[str], environment: Any, pipes: Any, keeps: Any, prepare: Any, *, is_apart: bool
) -> NoReturn:
    """Be ``python -P -m`` of these words, in the order in which ``subprocess`` makes a process."""
    status = 1
    try:
        stdin, _, _, stdout, _, stderr = pipes
        given = [os.dup(own) if own != -1 else None for own in (stdin, stdout, stderr)]
        for number, own in enumerate(given):
            if own is not None:
                os.dup2(own, number)
        first = 3
        for kept in sorted(keeps):
            os.closerange(first, kept)
            os.set_inheritable(kept, True)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        if environment is not None:
            environment = dict(environment)  # it may be this process's own
            os.environ.clear()
            os.environ.update(environment)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_apart:
            os.setsid()
        if prepare is not None:
            prepare()
        _run(words)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 -- the edge of the process, as an interpreter has it
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status & 0xFF)


def _run(words: list[str]) -> None:
    atexit._clear()  # pyright: ignore[reportPrivateUsage]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        open(number, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        for number in (1, 2)
    )
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in own if folder and folder not in sys.path]
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


for name in PRELOADED:
    importlib.import_module(name)
# From now on this process, and what it forks, start modules of ours as forks.
setattr(ranks, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))  # noqa: B010
