"""Progress: what is told while a search runs."""

from typing import Any

import msgspec
import pytest

from highwater.cli.progress import Progress
from highwater.nouns.trial import AliveMemory, Failure, Outcome, RankReport, TrialResult
from highwater.search.cell_outcomes import CellAnswered, TrialFinished, TrialRuns, TrialStarted
from highwater.search.proof import trial_s
from highwater.units import format_seconds
from places import question_of
from trial_specs import answer_of

QUESTION = question_of(loss="full")
CELL = QUESTION.cells[0]


def started(length_tokens: int, *, trials_left: int, **fields: Any) -> TrialStarted:
    question = fields.pop("question", QUESTION)
    spec = question.trial(CELL, length_tokens, memory_only=fields.pop("memory_only", False))
    launch = {"attempt": 1, "repeat": 0, **fields}
    return TrialStarted(cell=CELL, spec=spec, trials_left=trials_left, **launch)


def finished(
    length_tokens: int, outcome: Outcome, *, wall_s: float, **fields: Any
) -> TrialFinished:
    """A trial of the first cell has ended; ``fields`` are of its result, but for a few."""
    is_recorded = fields.pop("is_recorded", False)
    spec = QUESTION.trial(CELL, length_tokens, memory_only=fields.pop("memory_only", False))
    result = TrialResult(**{"outcome": outcome, "reason": "", "wall_s": wall_s, **fields})
    ended = {"attempt": 1, "repeat": 0, "result": result, "is_recorded": is_recorded}
    return TrialFinished(cell=CELL, spec=spec, **ended)


def test_the_time_left_comes_from_the_trials_so_far_and_runs_down_with_the_clock():
    now_s = [0.0]
    progress = Progress(QUESTION, clock=lambda: now_s[0])
    progress.hear(started(4096, trials_left=3))
    assert progress.left_s is None
    progress.hear(finished(4096, Outcome.FIT, wall_s=40))
    assert progress.left_s == 3 * 40
    progress.hear(started(8192, trials_left=2))
    now_s[0] = 15.0
    assert progress.left_s == 3 * 80 - 15  # twice the length, twice the time
    now_s[0] = 1000.0
    assert progress.left_s == 0
    progress.hear(finished(8192, Outcome.FIT, wall_s=100))
    assert progress.left_s == 2 * (80 + 100) / 2
    assert progress.table().footnotes == ("about 3m 00s left",)
    progress.hear(finished(8192, Outcome.OUT_OF_MEMORY, wall_s=5))
    assert progress.left_s == (80 + 100) / 2  # how fast memory ran out says nothing


def test_the_table_says_where_every_cell_stands():
    progress = Progress(QUESTION)
    assert [row[3] for row in progress.table().rows] == ["waiting", "waiting"]
    progress.hear(started(40960, trials_left=1, attempt=2, repeat=1))
    now, *rest = progress.table().rows[0][3:]
    assert now.split(", ") == ["trying 40,960", "attempt 2", "to confirm"]
    assert rest == ["-", "0"]
    progress.hear(finished(40960, Outcome.FIT, wall_s=1))
    progress.hear(started(51200, trials_left=0))
    progress.hear(finished(51200, Outcome.OUT_OF_MEMORY, wall_s=1))
    now, *rest = progress.table().rows[0][3:]
    assert now.startswith("51,200: ")
    assert rest == ["40,960", "2"]
    progress.hear(CellAnswered(answer=answer_of(CELL, 40960, 51200)))
    assert progress.table().rows[0][3] == "done: 40,960"


def test_a_trial_that_was_recorded_before_is_not_told_as_if_it_had_just_run():
    progress = Progress(QUESTION)
    events = (
        finished(4096, Outcome.FIT, wall_s=2, is_recorded=True),
        started(8192, trials_left=0),
        finished(8192, Outcome.OUT_OF_MEMORY, wall_s=2),
    )
    told = []
    for event in events:
        progress.hear(event)
        told.append((progress.line(event), progress.table().rows[0][3]))
    assert ["recorded" in text for text in told[0]] == [True, True]
    assert ["recorded" in text for text in told[2]] == [False, False]
    assert told[0][0].endswith(": recorded: 4,096 tokens fit in 2.00 s"), "the wording, here alone"
    assert "8,192" in told[2][0]


def test_a_line_is_told_for_every_event_and_a_workers_words_are_cut_and_cleaned():
    progress = Progress(QUESTION)
    assert "4,096" in progress.line(started(4096, trials_left=1))
    line = progress.line(
        finished(4096, Outcome.CRASHED, wall_s=2, reason="\x1b[31mboom " + "and so on " * 100)
    )
    assert line.startswith("nothing set, 1 GPU: 4,096 ")
    assert " 2.00 s: \\x1b[31mboom and so" in line
    assert len(line) < 160


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.MEMORY_ONLY_FIT, "8,192 tokens fit, memory-only"),
        (Outcome.TIMEOUT, "8,192 tokens (memory-only) timed out"),
    ],
)
def test_a_memory_only_trial_is_named_in_every_line(outcome, said):
    progress, memory_only = Progress(QUESTION), {"memory_only": True}
    begun = started(8192, trials_left=3, **memory_only)
    progress.hear(begun)
    assert "memory-only" in progress.line(begun)
    ended = finished(8192, outcome, wall_s=1, **memory_only)
    progress.hear(ended)
    assert said in progress.line(ended)
    assert progress.table().rows[0][4] == "-", "nothing was trained"


H200 = msgspec.structs.replace(
    QUESTION, device_name="NVIDIA H200", simulated=False, proof="memory", timeout_s=100.0
)


def test_a_trial_that_runs_says_for_how_long_of_about_how_long_and_what_it_does():
    now_s = [0.0]
    progress = Progress(H200, clock=lambda: now_s[0])
    begun = started(65_536, trials_left=2, question=H200)
    progress.hear(begun)
    expected_s = trial_s(H200, begun.spec)
    assert expected_s is not None
    assert f"(about {format_seconds(expected_s)}, about " in progress.line(begun)
    assert progress.running == (), "nothing is said of a trial that has only just begun"
    now_s[0] = 35.0
    progress.hear(TrialRuns(cell=CELL, spec=begun.spec, phase="step 1 of 2\x1b[31m"))
    told = f"65,536 tokens: 35 s of about {format_seconds(expected_s)}, step 1 of 2\\x1b[31m"
    assert progress.running == (told,)
    assert progress.table().footnotes[0] == told
    before_s = progress.left_s
    now_s[0] = 45.0
    assert progress.left_s == before_s - 10


def test_a_pipe_gets_a_line_a_minute_of_a_trial_that_runs():
    now_s = [0.0]
    progress = Progress(H200, clock=lambda: now_s[0])
    begun = started(65_536, trials_left=2, question=H200)
    progress.hear(begun)
    runs = TrialRuns(cell=CELL, spec=begun.spec, phase="step 1 of 2")
    said: list[float] = []
    for half_seconds in range(1, 400):
        now_s[0] = half_seconds / 2
        progress.hear(runs)
        if progress.sparse_line(runs):
            said.append(now_s[0])
    assert said == [60.0, 120.0, 180.0]


def test_what_a_dry_run_takes_is_not_foretold():
    progress = Progress(QUESTION)
    begun = started(4096, trials_left=3)
    progress.hear(begun)
    assert "about" not in progress.line(begun)


def test_out_of_memory_is_told_shortly_and_the_log_with_the_whole_message_once():
    progress, short = Progress(QUESTION), "no room for 17.97 GiB"
    whole = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 17.97 GiB. GPU 0 has a total "
        "capacity of 79.18 GiB of which 3.21 GiB is free. Including non-PyTorch memory " * 3
    )
    lines: list[str] = []
    for length in (8192, 12_288):
        said = {"reason": whole, "log_path": f"logs/model_len-{length}.log"}
        event = finished(length, Outcome.OUT_OF_MEMORY, wall_s=20, **said)
        progress.hear(event)
        lines.append(progress.line(event))
    first, second = (line.partition(" tokens ran out of memory in 20 s: ")[2] for line in lines)
    assert first.startswith(f"{short}; ")
    assert first.endswith("logs/model_len-8192.log, others beside it")
    assert second == short


def test_out_of_memory_says_what_had_no_room_where_that_is_known():
    alive = AliveMemory(
        requested_bytes=2**30, parameters_bytes=2**31, gradients_bytes=0, optimizer_states_bytes=0
    )
    failure = Failure(kind="device_memory", phase="forward", text="CUDA out of memory", alive=alive)
    ranks = (RankReport(rank=0, failure=failure),)
    event = finished(8192, Outcome.OUT_OF_MEMORY, wall_s=20, reason=failure.text, ranks=ranks)
    progress = Progress(QUESTION)
    progress.hear(event)
    assert progress.line(event).endswith("in 20 s: forward: no room for 1.00 GiB")


def test_several_trials_that_run_are_told_each_with_its_cell_and_share_the_time_left():
    now_s = [0.0]
    progress = Progress(QUESTION, clock=lambda: now_s[0])
    progress.hear(finished(8192, Outcome.FIT, wall_s=40, is_recorded=True))
    first, second = QUESTION.cells[:2]
    for cell in (first, second):
        spec = QUESTION.trial(cell, 8192)
        progress.hear(TrialStarted(cell=cell, spec=spec, attempt=1, repeat=0, trials_left=2))
    assert progress.left_s == 4 * 40 / 2
    now_s[0] = 10.0
    progress.hear(TrialRuns(cell=second, spec=spec, phase="step 1 of 2"))
    lines = progress.running
    assert [line.partition(":")[0] for line in lines] == [first.label, second.label]
    assert ["step 1 of 2" in line for line in lines] == [False, True]
    assert progress.left_s == (4 * 40 - 2 * 10) / 2
    for cell in QUESTION.cells:
        progress.hear(CellAnswered(answer=answer_of(cell, 8192, None, limit="ceiling")))
    assert progress.left_s is None
