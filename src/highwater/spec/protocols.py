"""Runner: whatever runs trials.

A real launcher, a simulation and a recorded study are interchangeable.
"""

from typing import Protocol

from highwater.spec.trial import TrialResult, TrialSpec


class Runner(Protocol):
    """Runs one trial at a time, to its end."""

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """Run the ``attempt``-th launch of a trial; blocks until every process of it is gone.

        ``repeat`` above 0 asks for the same trial once more, to confirm it. Raises MachineError
        when no trial can run at all; KeyboardInterrupt after cleaning up.
        """
        ...
