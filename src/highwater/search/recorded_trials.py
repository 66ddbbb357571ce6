"""Recorded trials: those of a cell that a search takes from its study, without another launch."""

from dataclasses import dataclass

from highwater.nouns.study import Past, Question
from highwater.nouns.trial import Outcome

MAX_ATTEMPTS = 3
"""Launches of a trial that ends without telling anything about memory."""


@dataclass(frozen=True, slots=True)
class WantedTrial:
    """A trial that a search asks for: where, for which time, and how."""

    index: int
    repeat: int = 0
    memory_only: bool = False
    after_edge: bool = False
    """The edge is known: this full trial only says how much of it is trained."""


def recorded_trials(question: Question, known: Past) -> list[WantedTrial]:
    """Trials that told; and where time counts, those that ran out of no less than there is.

    Each trial stands here once, however often it was launched, and none of them needs another
    launch.
    """
    ends: dict[WantedTrial, dict[int, Outcome]] = {}
    for trial in known.trials:
        if trial.result is not None:
            index = question.grid.index_at_most(trial.spec.length_tokens)
            asked = WantedTrial(index, trial.repeat, memory_only=trial.spec.is_memory_only)
            ends.setdefault(asked, {})[trial.attempt] = trial.result.outcome
    return [
        asked
        for asked, found in ends.items()
        if any(outcome.tells for outcome in found.values()) or _is_late(question, found)
    ]


def _is_late(question: Question, outcomes: dict[int, Outcome]) -> bool:
    """Whether a launch of a trial ran out of time, with a recorded end for each before it."""
    ends = [outcomes.get(attempt) for attempt in range(1, MAX_ATTEMPTS + 1)]
    launched = ends.index(None) if None in ends else MAX_ATTEMPTS
    return question.timeout_s is not None and Outcome.TIMEOUT in ends[:launched]
