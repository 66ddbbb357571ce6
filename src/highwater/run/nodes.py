"""Trials across machines: the first one searches, each starts its share of the ranks.

The machines meet in a folder that all of them see (node_folder.py); the ranks meet through a file
in it, and then talk to each other as gloo and NCCL do, over the network.
"""

import math
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO

from highwater.errors import HighwaterError, MachineError
from highwater.run.engine_ranks import (
    REPORTS,
    SPEC_FILE,
    RanksEnd,
    phase_teller,
    prepare_folder,
    read_reports,
    start_ranks,
)
from highwater.run.kernel_kills import kernel_kills
from highwater.run.node_folder import LOST_S, Done, Go, NodeFolder, NodeReady, pause
from highwater.run.probe import probe, refuse_busy_gpus
from highwater.run.ranks import RankExit, RankShare, read_exits
from highwater.run.trial_environment import trial_environment
from highwater.run.trial_place import await_release
from highwater.run.trial_process import end_reaper
from highwater.spec.codec import from_json
from highwater.spec.protocols import TOLD_S, OnPhase, TrialEndedError
from highwater.spec.trial import Device, TrialSpec
from highwater.version import __version__

COME_S = 600.0
"""Seconds in which every machine has to have come: a cluster starts them one after another."""
_LAST_WORDS_S = 2.0
"""Seconds that other machines' ranks have, after one's have failed, to report on their own."""
_ENDED_S = 30.0
"""Seconds in which every machine's ranks are ended."""


def ready_here(
    *, device: Device, gpus: int, config_digest: str, allow_busy: bool = False
) -> NodeReady:
    """What this machine is, and whether ``gpus`` of its GPUs can run trials."""
    machine, problem = probe(), None
    if device == "cuda":
        if len(machine.gpus) < gpus:
            problem = f"{gpus} GPUs are asked for, and {len(machine.gpus)} are present"
        elif not allow_busy:
            try:
                refuse_busy_gpus(machine, count=gpus)
            except HighwaterError as error:
                problem = error.problem
    return NodeReady(
        host=socket.gethostname(),
        highwater_version=__version__,
        device_name=machine.gpus[0].name if device == "cuda" and machine.gpus else "CPU",
        config_digest=config_digest,
        problem=problem,
    )


def await_nodes(folder: NodeFolder, ready: NodeReady, *, within_s: float = COME_S) -> None:
    """Enter the folder as the machine that searches, and wait until all have come.

    Raises MachineError where one has not, or is not like this one.
    """
    folder.refuse_used()
    folder.enter(ready)
    deadline = time.monotonic() + within_s
    waits = list(range(folder.nodes))
    while waits:
        there = folder.ready(waits[0])
        if there is not None:
            _refuse_unlike(ready, there, node=waits.pop(0))
        elif time.monotonic() > deadline:
            raise MachineError(
                f"machine {waits[0]} of {folder.nodes} has not come to {folder.path}",
                hint="type the same command there, with `--node-rank` 1 and up; `srun` does",
            )
        else:
            pause()


def _refuse_unlike(ready: NodeReady, there: NodeReady, *, node: int) -> None:
    who = f"machine {node}, {there.host}"
    if there.problem is not None:
        raise MachineError(f"{who}: {there.problem}", hint="`highwater doctor` there shows more")
    for what, mine, theirs in (
        ("highwater", ready.highwater_version, there.highwater_version),
        ("device", ready.device_name, there.device_name),
        ("model configuration", ready.config_digest, there.config_digest),
    ):
        if mine != theirs:
            raise MachineError(
                f"{who}, has the {what} {theirs}, and {ready.host} has {mine}",
                hint="use machines that are alike; `highwater doctor` shows each",
            )


@dataclass(slots=True)
class RanksOnNodes:
    """Runs the ranks of trials across the machines of a folder, from the first of them."""

    folder: NodeFolder
    _trials: int = field(default=0, init=False)

    def __call__(
        self,
        spec: TrialSpec,
        environment: Mapping[str, str],
        log: IO[bytes],
        *,
        timeout_s: float,
        ended: Event,
        on_phase: OnPhase,
    ) -> RanksEnd:
        """Run all ranks of a trial, as ``RunRanks`` says."""
        self._trials += 1
        trial = self.folder.trial(self._trials)
        for node in range(self.folder.nodes):
            (trial / str(node)).mkdir(parents=True)
        prepare_folder(spec, trial)
        deadline, kills_before = time.monotonic() + timeout_s, kernel_kills()
        process = start_ranks(spec, trial, share_of(spec, trial, self.folder), environment, log)
        try:
            self.folder.say_go(trial, Go(log_path=str(Path(log.name).absolute())))
            lost = self._await(trial, process, deadline, ended, phase_teller(trial, on_phase))
            codes = self._codes(trial, process)
        finally:
            end_reaper(process)
            self.folder.say_end(trial)
        others = self._await_ends(trial)
        failed = (code for code in codes.values() if code)
        is_late = len(codes) < self.folder.nodes and not any(codes.values())
        reports, damaged = read_reports(trial / REPORTS)
        end = RanksEnd(
            exit_code=None if is_late else next(failed, 0),
            reports=reports,
            damaged_reports=damaged,
            exits=self._exits(trial, codes),
            kernel_kills=kernel_kills() - kills_before + sum(each.kernel_kills for each in others),
            lost=lost,
        )
        shutil.rmtree(trial, ignore_errors=True)
        return end

    def _await(
        self,
        trial: Path,
        process: subprocess.Popen[bytes],
        deadline: float,
        ended: Event,
        tell: Callable[[], None],
    ) -> str | None:
        """Wait until every machine's ranks have ended, one's have failed, or time is up; which
        machine was lost, if one was.
        """
        failed_at, told_at = math.inf, time.monotonic()
        while (now := time.monotonic()) < min(deadline, failed_at + _LAST_WORDS_S):
            if ended.is_set():
                raise TrialEndedError
            codes = self._codes(trial, process)
            if len(codes) == self.folder.nodes:
                return None
            if any(codes.values()):
                failed_at = min(failed_at, now)
            for node in range(1, self.folder.nodes):
                if node not in codes and self.folder.is_lost(node):
                    return f"machine {node} was lost: no sign of life for {LOST_S:.0f} s"
            if now - told_at >= TOLD_S:
                told_at = now
                tell()
            pause()
        return None

    def _codes(self, trial: Path, process: subprocess.Popen[bytes]) -> dict[int, int]:
        """Exit status of each machine whose ranks have ended by themselves."""
        own = process.poll()
        codes = {} if own is None else {0: own}
        for node in range(1, self.folder.nodes):
            done = self.folder.done(trial, node)
            if done is not None and done.exit_code is not None:
                codes[node] = done.exit_code
        return codes

    def _await_ends(self, trial: Path) -> list[Done]:
        """Wait until no machine has ranks any more, but for one that is lost."""
        deadline = time.monotonic() + _ENDED_S
        ends: list[Done] = []
        for node in range(1, self.folder.nodes):
            while (done := self.folder.done(trial, node)) is None:
                if time.monotonic() > deadline or self.folder.is_lost(node):
                    break
                pause()
            else:
                ends.append(done)
        return ends

    def _exits(self, trial: Path, codes: Mapping[int, int]) -> tuple[RankExit, ...]:
        """How ranks ended, those of machines that failed first."""
        by_failure = sorted(range(self.folder.nodes), key=lambda node: not codes.get(node))
        return tuple(exit_ for node in by_failure for exit_ in read_exits(trial / str(node)))


def serve(folder: NodeFolder, ready: NodeReady) -> None:
    """Start this machine's share of the ranks of each trial, until the search is over.

    Raises MachineError where the machine that searches does not come, or is lost.
    """
    if folder.is_over:
        raise MachineError(
            f"the search of {folder.path} is over", hint="name a new `--rendezvous` on every one"
        )
    folder.enter(ready)
    number, deadline = 1, time.monotonic() + COME_S
    try:
        while not folder.is_over:
            trial = folder.trial(number)
            go = folder.go(trial)
            if go is not None:
                _run_share(folder, trial, go)
                number += 1
            elif folder.ready(0) is None and time.monotonic() < deadline:
                pause()
            elif folder.ready(0) is None or folder.is_lost(0):
                raise _no_searcher(folder)
            else:
                pause()
    finally:
        folder.leave()


def _no_searcher(folder: NodeFolder) -> MachineError:
    return MachineError(
        f"no machine searches in {folder.path}",
        hint="start it with `--node-rank 0`, on a file system that every machine shares",
    )


def _run_share(folder: NodeFolder, trial: Path, go: Go) -> None:
    """Run this machine's ranks of one trial, until they end or are to."""
    spec = from_json((trial / SPEC_FILE).read_bytes(), TrialSpec)
    kills_before = kernel_kills()
    log_path = Path(go.log_path).with_suffix(f".node-{folder.node}.log")
    with log_path.open("xb") as log:
        share = share_of(spec, trial, folder)
        process = start_ranks(spec, trial, share, trial_environment(spec), log)
        try:
            while (code := process.poll()) is None:
                if folder.is_ended(trial) or folder.is_lost(0):
                    break
                pause()
        finally:
            end_reaper(process)
    if spec.device == "cuda":
        await_release(None, share.count)
    with suppress(OSError):  # whoever searches may have gone, and the folder with it
        folder.say_done(trial, Done(exit_code=code, kernel_kills=kernel_kills() - kills_before))


def share_of(spec: TrialSpec, trial: Path, folder: NodeFolder) -> RankShare:
    """The ranks of a trial that this machine starts."""
    count = spec.layout.machine_gpus
    return RankShare(
        count=count,
        folder=folder.own(trial),
        first=folder.node * count,
        world=spec.layout.gpus,
        store=trial / "store",
    )
