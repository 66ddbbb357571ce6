"""Python code in a process of its own that need not import PyTorch anew: it is forked from one that
has, started by the first test that asks.

Run as a script this is that process. Each line of its stdin is a list, in JSON: the code, what
``sys.argv`` has after its first, the files that get what is printed, and the working directory;
each line of its stdout is the exit status.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path

from highwater.trials.trial_process import ON_THE_CPU


def forked(code: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run code as ``python -c`` does, with the variables of what is measured on the CPU."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        order = [code, words, str(out), str(err), str(Path.cwd())]
        server.stdin.write(f"{json.dumps(order)}\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess([code, *words], status, out.read_text(), err.read_text())


@cache
def _server() -> "subprocess.Popen[str]":
    """One for all tests of this process: it ends with its stdin."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ON_THE_CPU | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


def _serve() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import layer
    from highwater.engine.bench.attention import benchmark, contenders
    from highwater.engine.tracer import tracer

    assert all((layer, benchmark, contenders, tracer)), "nobody has to import them"
    assert threading.active_count() == 1, "a thread would be missing in every child"
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(*order)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _become(code: str, words: list[str], out: str, err: str, folder: str) -> None:
    """Be the process that was asked for: never returns."""
    status = 1
    try:
        for number, path in enumerate((os.devnull, out, err)):
            flags = os.O_RDWR | os.O_CREAT
            os.dup2(os.open(path, flags, 0o600), number)
        os.chdir(folder)
        sys.argv = ["-c", *words]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 -- a test's
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 -- the edge of the process, as an interpreter has it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
