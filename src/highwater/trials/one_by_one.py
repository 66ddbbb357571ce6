"""OneByOne: a runner whose trials end within the call that starts them."""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from highwater.nouns.protocols import Launch, OnPhase, unheard
from highwater.nouns.trial import TrialResult, TrialSpec


class OneByOne(ABC):
    """A ``Runner`` of one place, which is free again whenever anybody can ask."""

    @abstractmethod
    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """The result of a trial; raises what a launch raises."""

    def has_room(self, spec: TrialSpec) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:  # noqa: ARG002
        """A future that is done: it has the result of the trial, or what running it raised."""
        future: Future[TrialResult] = Future()
        try:
            result = self.run(launch.spec, attempt=launch.attempt, repeat=launch.repeat)
        except BaseException as error:  # noqa: BLE001 – whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def close(self) -> None:
        """Nothing runs."""
        return
