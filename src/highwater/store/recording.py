"""RecordingRunner: a runner that remembers.

What a journal has finished is returned from it; the rest is run and recorded. Resuming a search is
running it again: its questions are deterministic, and the recorded answers take no time.
"""

from highwater.spec.protocols import Runner
from highwater.spec.secrets import kept_result
from highwater.spec.trial import TrialResult, TrialSpec
from highwater.store.journal import Journal


class RecordingRunner:
    """A ``Runner`` around another one, with a journal as its memory."""

    def __init__(self, runner: Runner, journal: Journal) -> None:
        self._runner = runner
        self._journal = journal
        self.reused = 0
        """Trials answered from the journal."""

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """The recorded result, or else the result of running the trial now.

        When the run is interrupted the journal keeps its start without an end, and it is run again
        on resume.
        """
        recorded = self._journal.recorded(spec, attempt=attempt, repeat=repeat)
        if recorded is not None:
            self.reused += 1
            return recorded
        # The start is on the disk before the trial begins: a crash of the machine leaves its name.
        self._journal.trial_started(spec, attempt=attempt, repeat=repeat)
        # Secrets are hidden before the result is written, never afterwards.
        result = kept_result(self._runner.run(spec, attempt=attempt, repeat=repeat))
        self._journal.trial_finished(spec, attempt=attempt, repeat=repeat, result=result)
        return result
