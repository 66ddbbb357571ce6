"""Trials and groups of ranks that run on this machine's GPUs, and the kernels there are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from highwater.nouns.environment import Profiling
from highwater.nouns.hardware import Kernel
from highwater.nouns.trial import Outcome, RankReport, TrialResult, TrialSpec
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner


def tried(
    spec: TrialSpec, logs: Path, *, timeout_s: float = 280, profiling: Profiling | None = None
) -> TrialResult:
    launcher = EngineLauncher(log_directory=logs, timeout_s=timeout_s, profiling=profiling)
    return LocalRunner(launcher).run(spec)


def fitting(spec: TrialSpec, logs: Path) -> RankReport:
    """The first rank's report of a trial that has to fit."""
    result = tried(spec, logs)
    assert result.outcome is Outcome.FIT, result.reason
    return result.ranks[0]


def reports_of(ranks: int, script: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    """What each rank of a script of this folder writes into ``folder``."""
    group = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name(script), *words, folder],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for rank in group:
        _, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors[-3000:]
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(reports) == ranks
    return reports


def kernels() -> list[Kernel]:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return ["cudnn", "flash"] if hopper else ["flash"]
