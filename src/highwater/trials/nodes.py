"""Ranks across machines, from the first of them, which searches or trains; what the others do is
node_share.py's.

The machines meet in a folder that all of them see (node_folder.py); the ranks meet through a file
in it, and then talk to each other as gloo and NCCL do, over the network.
"""

import math
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO

from highwater.errors import HighwaterError, MachineError
from highwater.nouns.protocols import TOLD_S, OnPhase, TrialEndedError
from highwater.nouns.training import TrainingSpec
from highwater.nouns.trial import Device, TrialSpec
from highwater.trials.engine_trial import REPORTS, RanksEnd, RanksHere, read_reports
from highwater.trials.job import phase_in
from highwater.trials.node_folder import LOST_S, Done, Go, NodeFolder, NodeReady, pause
from highwater.trials.probe import probe, refuse_busy_gpus
from highwater.trials.ranks import RankExit, RankShare, read_exits
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
    """Wait until all machines have come to the folder, in which this one is ``ready``.

    Raises MachineError where one has not, or is not like this one.
    """
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
        deadline = time.monotonic() + timeout_s
        ranks = RanksAcross(self.folder, self._trials, spec, environment, log)
        told_at = time.monotonic()
        try:
            while (now := time.monotonic()) < deadline and not ranks.is_over():
                if ended.is_set():
                    raise TrialEndedError
                if now - told_at >= TOLD_S:
                    told_at = now
                    on_phase(phase_in(ranks.path / REPORTS))
                pause()
        except BaseException:
            ranks.abandon()
            raise
        return ranks.end()


class RanksAcross:
    """The ranks of one start across the machines of a folder, from the first of them."""

    def __init__(
        self,
        folder: NodeFolder,
        number: int,
        spec: TrialSpec | TrainingSpec,
        environment: Mapping[str, str],
        log: IO[bytes],
    ) -> None:
        """Start them, the ``number``-th of the folder, from 1."""
        self._folder = folder
        self.path = folder.trial(number)
        """Where they meet, and report."""
        for node in range(folder.nodes):
            (self.path / str(node)).mkdir(parents=True)
        trains = isinstance(spec, TrainingSpec)
        self._failed_at = math.inf
        self._lost: str | None = None
        share = share_of(spec.trial if trains else spec, self.path, folder)
        self._here = RanksHere(spec, self.path, environment, log, share=share)
        try:
            go = Go(log_path=str(Path(log.name).absolute()), trains=trains)
            folder.say_go(self.path, go)
        except BaseException:
            self.abandon()
            raise

    def is_over(self) -> bool:
        """Whether every machine's ranks have ended, one's have failed and others had time to report
        on their own, or a machine was lost.
        """
        codes, now = self._codes(), time.monotonic()
        if len(codes) == self._folder.nodes:
            return True
        if any(codes.values()):
            self._failed_at = min(self._failed_at, now)
        for node in range(1, self._folder.nodes):
            if self._lost is None and node not in codes and self._folder.is_lost(node):
                self._lost = f"machine {node} was lost: no sign of life for {LOST_S:.0f} s"
        return self._lost is not None or now >= self._failed_at + _LAST_WORDS_S

    def wait(self) -> None:
        """Wait a moment."""
        time.sleep(TOLD_S)

    def stop(self) -> None:
        """Tell this machine's ranks to stop, and through them all: they agree on the step."""
        self._here.stop()

    def abandon(self) -> None:
        """End the ranks of every machine, whatever they do."""
        try:
            self._here.abandon()
        finally:
            self._folder.say_end(self.path)

    def end(self) -> RanksEnd:
        """End what still runs of them; what they left."""
        codes = self._codes()
        self.abandon()
        others = self._await_ends()
        failed = (code for code in codes.values() if code)
        is_late = len(codes) < self._folder.nodes and not any(codes.values())
        reports, damaged = read_reports(self.path / REPORTS)
        end = RanksEnd(
            exit_code=None if is_late else next(failed, 0),
            reports=reports,
            damaged_reports=damaged,
            exits=self._exits(codes),
            kernel_kills=self._here.kernel_kills + sum(each.kernel_kills for each in others),
            lost=self._lost,
        )
        shutil.rmtree(self.path, ignore_errors=True)
        return end

    def _codes(self) -> dict[int, int]:
        """Exit status of each machine whose ranks have ended by themselves."""
        own = self._here.process.poll()
        codes = {} if own is None else {0: own}
        for node in range(1, self._folder.nodes):
            done = self._folder.done(self.path, node)
            if done is not None and done.exit_code is not None:
                codes[node] = done.exit_code
        return codes

    def _await_ends(self) -> list[Done]:
        """Wait until no machine has ranks any more, but for one that is lost."""
        deadline = time.monotonic() + _ENDED_S
        ends: list[Done] = []
        for node in range(1, self._folder.nodes):
            while (done := self._folder.done(self.path, node)) is None:
                if time.monotonic() > deadline or self._folder.is_lost(node):
                    break
                pause()
            else:
                ends.append(done)
        return ends

    def _exits(self, codes: Mapping[int, int]) -> tuple[RankExit, ...]:
        """How ranks ended, those of machines that failed first."""
        by_failure = sorted(range(self._folder.nodes), key=lambda node: not codes.get(node))
        return tuple(exit_ for node in by_failure for exit_ in read_exits(self.path / str(node)))


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
