"""LocalRunner: trials on this machine, side by side where its GPUs and host memory have room."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Event, Thread
from typing import Generic, TypeVar

from highwater.errors import MachineError
from highwater.memory.formula.layers import Step, host_activation_bytes
from highwater.model.held_bytes import PROCESS_BYTES, host_state_bytes, staged_gradient_bytes
from highwater.model.model import load_model
from highwater.nouns.hardware import SAME_MEMORY, Gpu, Machine
from highwater.nouns.trial import (
    Launch,
    Launcher,
    OnPhase,
    Outcome,
    TrialEndedError,
    TrialResult,
    TrialSpec,
    unheard,
)
from highwater.trials.probe import EMPTY_GPU_BYTES, probe


@dataclass(slots=True, kw_only=True, eq=False)
class Occupant:
    """A running trial, and the GPUs or the node that it uses."""

    spec: TrialSpec
    ended: Event = field(default_factory=Event)


OccupantT = TypeVar("OccupantT", bound=Occupant)


class SeveralAtOnce(ABC, Generic[OccupantT]):
    """Runs several trials, each in a thread and on GPUs, or a node, of its own."""

    def __init__(self, most_trials: int | None) -> None:
        """``most_trials``: most trials at a time; None: as many as there are places."""
        self._most_trials = most_trials
        self._running: list[OccupantT] = []
        self._changed = Condition()
        """Notified when a trial has left its place."""

    @abstractmethod
    def _has_room(self, spec: TrialSpec) -> bool:
        """True if a place is free for another trial. Called with the lock held."""

    @abstractmethod
    def _place(self, spec: TrialSpec) -> OccupantT:
        """Reserve a place for a trial; MachineError if none holds it. Called with the lock held."""

    @abstractmethod
    def _launched(self, launch: Launch, place: OccupantT, on_phase: OnPhase) -> TrialResult:
        """Run a trial to its end on its place; see ``Launcher.launch``."""

    def has_room(self, spec: TrialSpec) -> bool:
        """True if a trial could start now; see ``Runner.has_room``."""
        with self._changed:
            return not self._running or self._has_room(spec)

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial in a new thread; see ``Runner.submit``."""
        future: Future[TrialResult] = Future()
        with self._changed:
            place = self._place(launch.spec)
            self._running.append(place)
        # A daemon thread: if this process dies, the reaper ends the trial.
        Thread(target=self._run, args=(launch, place, on_phase, future), daemon=True).start()
        return future

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """Run one trial to its end. An interrupt ends the trial and is raised."""
        try:
            return self.submit(Launch(spec=spec, attempt=attempt, repeat=repeat)).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all trials. A Ctrl-C meanwhile is raised after all have ended."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    for place in self._running:
                        place.ended.set()
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._running)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(
        self, launch: Launch, place: OccupantT, on_phase: OnPhase, future: Future[TrialResult]
    ) -> None:
        """Launch a trial; runs in the trial's own thread until its processes have ended."""
        result, error = None, None
        try:
            result = self._launched(launch, place, on_phase)
        except BaseException as raised:  # noqa: BLE001 – whoever waits for the future gets it
            error = raised
        with self._changed:
            self._running.remove(place)
            self._changed.notify_all()
        # Only now: whoever is told of the end finds the place free.
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)


@dataclass(slots=True, kw_only=True, eq=False)
class _LocalOccupant(Occupant):
    """The GPUs of this machine that a trial uses, and whether it runs alone."""

    gpus: tuple[str, ...] | None
    host_bytes: int
    is_alone: bool
    """True if no other trial may run beside it."""
    had_company: bool
    """True if another trial ran beside it at any time."""
    waits: bool = False
    """True while it waits, without processes, to be launched once more alone."""


class LocalRunner(SeveralAtOnce[_LocalOccupant]):
    """Runs the trials of a launcher on this machine; no two share a GPU.

    A trial that keeps states or activations in host memory runs alone; for others, free host memory
    is checked. A trial that ran out of host memory beside others is launched again, alone.
    """

    def __init__(
        self, launcher: Launcher, *, machine: Machine | None = None, most_trials: int | None = None
    ) -> None:
        """``machine``: as read while no trial ran; None: it is read now. ``most_trials`` at a time;
        None: as many as there are GPUs for, one on the CPU.
        """
        super().__init__(most_trials)
        self._launcher = launcher
        self._machine = probe() if machine is None else machine

    def _has_room(self, spec: TrialSpec) -> bool:
        running = self._running
        most = 1 if spec.device == "cpu" else len(self._machine.gpus)
        if len(running) >= (most if self._most_trials is None else self._most_trials):
            return False
        if spec.device == "cuda" and len(self._free_gpus()) < spec.layout.machine_gpus:
            return False
        if any(each.is_alone or each.waits for each in running) or is_alone(spec):
            return False
        taken_bytes = sum(each.host_bytes for each in running)
        return taken_bytes + host_bytes(spec) <= self._machine.host_memory_available_bytes

    def _free_gpus(self) -> list[Gpu]:
        """Unused GPUs of the first GPU's kind; those that other programs use come last."""
        taken = {gpu for each in self._running for gpu in each.gpus or ()}
        free = [gpu for gpu in alike(self._machine.gpus) if str(gpu.index) not in taken]
        return sorted(free, key=lambda gpu: gpu.memory_used_bytes > EMPTY_GPU_BYTES)

    def _place(self, spec: TrialSpec) -> _LocalOccupant:
        gpus = None
        if spec.device == "cuda":
            free = self._free_gpus()
            count = spec.layout.machine_gpus
            if len(free) < count:
                raise MachineError(
                    f"{count} GPUs are asked for, and {len(free)} are free",
                    hint="`highwater doctor` shows the GPUs",
                )
            gpus = tuple(sorted((str(gpu.index) for gpu in free[:count]), key=int))
        for each in self._running:
            each.had_company = True
        return _LocalOccupant(
            spec=spec,
            gpus=gpus,
            host_bytes=host_bytes(spec),
            is_alone=is_alone(spec),
            had_company=bool(self._running),
        )

    def _launched(self, launch: Launch, place: _LocalOccupant, on_phase: OnPhase) -> TrialResult:
        began = time.monotonic()
        run = partial(self._launcher.launch, gpus=place.gpus, ended=place.ended, on_phase=on_phase)
        result = run(launch)
        if place.had_company and blames_the_host(result, launch.spec):
            self._wait_until_alone(place)
            result = run(with_time_left(launch, began))
        return result

    def _wait_until_alone(self, running: _LocalOccupant) -> None:
        """Wait until no other trial has processes; TrialEndedError if ``running`` is ended."""
        with self._changed:
            running.waits = running.is_alone = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    running.ended.is_set()
                    or all(each.waits for each in self._running if each is not running)
                )
            )
            if running.ended.is_set():
                raise TrialEndedError
            running.waits = False


def with_time_left(launch: Launch, began: float) -> Launch:
    """The launch with as many seconds as are left of its time limit since ``began``."""
    if launch.timeout_s is None:
        return launch
    left_s = max(0.0, launch.timeout_s - (time.monotonic() - began))
    return launch.replace(timeout_s=left_s)


def alike(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs of the same kind as the first: other kinds would give different results."""
    return tuple(
        gpu
        for gpu in gpus
        if gpu.name == gpus[0].name
        and abs(gpu.memory_total_bytes / gpus[0].memory_total_bytes - 1) <= SAME_MEMORY
    )


def host_bytes(spec: TrialSpec) -> int:
    """Bytes of host memory that a trial takes at least; on the CPU all that it may use."""
    each = PROCESS_BYTES + (spec.memory_budget_bytes or 0 if spec.device == "cpu" else 0)
    return spec.layout.machine_gpus * each + _kept_on_the_host(spec)


def is_alone(spec: TrialSpec) -> bool:
    """True if a trial keeps tensors in host memory: bandwidth and pinned pages would be shared."""
    return spec.device == "cuda" and _kept_on_the_host(spec) > 0


def _kept_on_the_host(spec: TrialSpec) -> int:
    if spec.device == "cpu":
        return 0
    shape, settings, layout = load_model(spec.model_directory).shape, spec.settings, spec.layout
    states = host_state_bytes(shape, settings, layout=layout)
    activations = host_activation_bytes(Step(shape, settings, layout, spec.length_tokens))
    staged = staged_gradient_bytes(shape, settings, layout=layout)
    return states + staged + layout.machine_gpus * activations


def blames_the_host(result: TrialResult, spec: TrialSpec) -> bool:
    """True if the machine's memory ran out, and not what the trial was allowed."""
    if spec.device == "cuda":
        return result.outcome is Outcome.HOST_OUT_OF_MEMORY
    failures = (rank.failure for rank in result.ranks)
    told = any(failure is not None and failure.kind == "device_memory" for failure in failures)
    return result.outcome.is_memory and not told
