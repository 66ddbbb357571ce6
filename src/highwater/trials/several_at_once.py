"""SeveralAtOnce: what runners of several trials have in common: one trial awaited, and an end to
all.
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from threading import Condition

from highwater.nouns.protocols import Launch, OnPhase, unheard
from highwater.nouns.trial import TrialResult, TrialSpec


class SeveralAtOnce(ABC):
    """A ``Runner`` whose trials end in other threads."""

    _changed: Condition
    """Notified when a trial has left its place."""

    @abstractmethod
    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial, as ``Runner`` says."""

    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether no trial has a place; the lock of ``_changed`` is held."""

    @abstractmethod
    def _end_all(self) -> None:
        """Tell every trial to end; the lock of ``_changed`` is held."""

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """Run one trial to its end; it is ended where this is interrupted."""
        try:
            return self.submit(Launch(spec=spec, attempt=attempt, repeat=repeat)).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End whatever runs.

        A Ctrl-C meanwhile is heard when nothing runs any more.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._end_all()
                    self._changed.wait_for(self._is_idle)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
