"""Python code in a process of its own that need not import PyTorch anew."""

import json
import subprocess
from pathlib import Path
from typing import Any

from fork_server import ForkServer
from highwater.trials.trial_process import ON_THE_CPU

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SERVER = ForkServer(
    *("layer", "highwater.engine.tracer.tracer"),
    "highwater.engine.bench.attention.contenders",
    environment={
        **ON_THE_CPU,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(BENCHMARKS),
    },
)
WITHIN_S = 280


def forked(code: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run code as ``python -c`` does, with the variables of what is measured on the CPU."""
    return SERVER.run(f"-c{code}", *words, within_s=WITHIN_S)


def answer(code: str, *words: str) -> Any:
    """The JSON that code prints last; it fails with what the code said if it does not end well."""
    done = forked(code, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
