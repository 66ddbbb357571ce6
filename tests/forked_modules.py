"""A process that imports this, or is forked from one that has, starts modules of ours as forks of
itself: they are processes as ever, with their own streams, groups and limits, but for the seconds
that PyTorch takes to be imported.
"""

import importlib
import os
import subprocess
from types import SimpleNamespace

import fork_server
from highwater.trials import ranks

PRELOADED = (
    *("highwater.engine.training.rank_run", "highwater.engine.training.training_run"),
    *("highwater.engine.training.trainer_keywords", "highwater.engine.data.tokenise"),
    *("highwater.engine.bench.attention.benchmark", "highwater.engine.models.pretrained"),
    *("highwater.engine.training.worker", "highwater.engine.tracer.tracer"),
    *("highwater.trials.reaper", "transformers.models.qwen3.modeling_qwen3"),
)


class Forked(fork_server.Forked):
    fork = staticmethod(fork_server.fork_here)


def accelerate() -> None:
    """Accelerate's command; the script that it launches is a fork, too."""
    subprocess.Popen = Forked
    importlib.import_module("accelerate.commands.accelerate_cli").main()


for name in PRELOADED:
    importlib.import_module(name)
# From now on this process, and what it forks, start modules of ours as forks.
setattr(ranks, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))  # noqa: B010
os.execve = fork_server.execute_here
fork_server.COMMANDS["accelerate"] = "forked_modules:accelerate"
