"""A trial whose ranks share one GPU, over NCCL.

NCCL takes one process a GPU, and knows a GPU by its host's name and its bus: ranks that are given
hosts of their own pass, and talk through sockets of the loopback interface. Kernels, communicators
and what crosses between ranks are those of several GPUs, and so is what each rank allocates; times
mean nothing, and the GPU holds all ranks.

``run`` starts the ranks; the file itself is what each of them runs: ``one_gpu.py SPEC REPORTS``.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from highwater.nouns.codec import to_json
from highwater.nouns.trial import RankReport, TrialSpec
from highwater.trials.engine_trial import read_reports
from highwater.trials.ranks import RankShare, read_left
from highwater.trials.reaper import under_reaper
from highwater.trials.trial_process import trial_environment


def run(spec: TrialSpec, *, timeout_s: float) -> tuple[RankReport, ...]:
    """The report of every rank. Raises RuntimeError with what a rank wrote where one failed, and
    subprocess.TimeoutExpired where they took longer.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        spec_path, reports_path = folder / "spec.json", folder / "reports"
        spec_path.write_text(to_json(spec), encoding="utf-8")
        reports_path.mkdir()
        command = [sys.executable, "-P", str(Path(__file__).resolve()), spec_path, reports_path]
        ranks = spec.layout.gpus
        done = subprocess.run(
            under_reaper(
                [str(word) for word in command], ranks=RankShare(count=ranks, folder=str(folder))
            ),
            env=trial_environment(spec),
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
        reports, damaged = read_reports(reports_path)
        if done.returncode or damaged or len(reports) != ranks:
            said = [exit_.output[-2000:] for exit_ in read_left(folder).exits if exit_.status]
            raise RuntimeError("\n".join((*damaged, *said)) or done.stdout[-2000:])
        return reports


def join_one_gpu() -> None:
    """Be a rank of the first GPU, on a host of its own in NCCL's eyes."""
    os.environ["LOCAL_RANK"] = "0"
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def main() -> None:
    """Be one rank of a trial."""
    join_one_gpu()
    from highwater.engine.training.worker import main as work

    work()


if __name__ == "__main__":
    main()
