"""What every runner does, whatever it starts and wherever: one class of tests, a subclass for each.

A subclass has the fixture ``runner``, a fresh one with nothing running, and says which trials of
its trainer end how.
"""

import time
from concurrent.futures import Future, wait
from threading import Event

import pytest

from highwater.nouns.trial import Launch, Outcome, Runner, TrialEndedError, TrialResult, TrialSpec

ENDS_S = 200
"""Bound on the time of a trial that ends by itself, on a machine that is busy."""
AT_ONCE_S = 30
"""Bound on the time until what runs is ended."""
RUNS_S = 4.0
"""Seconds that a trial which never ends is given; no test depends on it having begun by then."""


class RunnerContract:
    takes_time = True
    """Whether a trial takes any: else it cannot be late, nor be ended."""

    def fitting(self, number: int) -> TrialSpec:
        """A trial that fits; another one for each number, 0 and up."""
        raise NotImplementedError

    def too_long(self) -> TrialSpec:
        """A trial that runs out of memory."""
        raise NotImplementedError

    def crashing(self) -> TrialSpec:
        """A trial that ends in an error that has nothing to do with memory."""
        raise NotImplementedError

    def endless(self) -> TrialSpec:
        """A trial that never ends by itself, where trials take time."""
        raise NotImplementedError

    def test_each_trial_ends_in_the_one_outcome_that_is_its_own(self, runner: Runner) -> None:
        for spec, outcome in (
            (self.fitting(0), Outcome.FIT),
            (self.too_long(), Outcome.OUT_OF_MEMORY),
            (self.crashing(), Outcome.CRASHED),
            (self.fitting(1), Outcome.FIT),
        ):
            assert runner.has_room(spec), "nothing runs"
            result = runner.submit(Launch(spec=spec, attempt=2)).result(timeout=ENDS_S)
            assert result.outcome is outcome, result.reason
            assert result.reason
            assert result.attempt == 2
            assert runner.has_room(spec), "whoever hears of the end finds the place free"

    def test_trials_side_by_side_have_each_their_own_result(self, runner: Runner) -> None:
        specs = [self.fitting(0), self.too_long(), self.fitting(1)]
        wanted = [Outcome.FIT, Outcome.OUT_OF_MEMORY, Outcome.FIT]
        futures: list[Future[TrialResult]] = []
        for spec in specs:
            while not runner.has_room(spec):
                assert wait(futures, timeout=ENDS_S).done
            futures.append(runner.submit(Launch(spec=spec)))
        results = [future.result(timeout=ENDS_S) for future in futures]
        assert [result.outcome for result in results] == wanted, results

    def test_a_trial_has_the_time_that_its_launch_gives_it(self, runner: Runner) -> None:
        if not self.takes_time:
            return
        told: list[str] = []
        launch = Launch(spec=self.endless(), timeout_s=RUNS_S)
        result = runner.submit(launch, on_phase=told.append).result(timeout=ENDS_S)
        assert result.outcome is Outcome.TIMEOUT, result.reason
        assert not result.outcome.tells
        assert told
        assert all(told)

    def test_closing_ends_what_runs_and_a_second_time_does_nothing(self, runner: Runner) -> None:
        runner.close()
        if self.takes_time:
            has_begun = Event()
            future = runner.submit(Launch(spec=self.endless()), on_phase=lambda _: has_begun.set())
            assert has_begun.wait(ENDS_S)
            began = time.monotonic()
            runner.close()
            assert time.monotonic() - began < AT_ONCE_S
            with pytest.raises(TrialEndedError):
                future.result(timeout=1)
        runner.close()
