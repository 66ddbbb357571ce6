"""Profiling as it is asked for: in a file, on a command line, from Python."""

import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import study_of

from highwater.cli.config import to_yaml
from highwater.cli.flags import request_of
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.memory.snapshot.memory_profile import _coordinates
from highwater.nouns.environment import Profiling, SnapshotOrder, coordinates, snapshot_name
from highwater.nouns.layout import Layout
from highwater.nouns.plan import plan
from highwater.nouns.request import request_from
from highwater.nouns.study import RecordedTrial
from highwater.nouns.trial import Outcome, RankReport, TrialResult
from highwater.store.logs import snapshot_folder, snapshot_lines, study_snapshot_lines
from highwater.trials.readiness import check_request
from places import NO_GPU, machine_with
from trial_specs import trial_of

SPEC = trial_of("Qwen3-0.6B", layout=Layout(gpus=2, ulysses_degree=2))


def test_a_file_a_command_line_and_python_ask_for_the_same(tmp_path):
    path = tmp_path / "study.yaml"
    asked = "{profile_steps: [0, 1], max_entries: 100000, ranks: all}"
    path.write_text(f"model: Qwen3-0.6B\nmemory_profiler: {asked}\n")
    from_file = request_of(parse(["find", "--config", str(path)]))
    assert from_file.memory_profiler == Profiling()
    typed = request_of(parse(["find", "Qwen3-0.6B", "--memory-profiler", "0,1"]))
    python = request_from({"model": "Qwen3-0.6B", "memory_profiler": "0, 1"}, keywords=True)
    assert from_file == typed == python
    path.write_text(to_yaml(from_file))
    assert request_of(parse(["find", "--config", str(path)])) == from_file
    assert request_from({"model": "Qwen3-0.6B"}).memory_profiler is None


@pytest.mark.parametrize(
    "asked",
    [
        *({"profile_steps": [-1]}, {"profile_steps": []}, {"ranks": []}, {"ranks": [-1]}),
        *({"ranks": "some"}, {"max_entries": 0}, {"max_entries": 10**12}, {"steps": [0]}),
        *({"profile_steps": list(range(300))}, "first", "1,", True, [0, 1]),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_what_can(asked):
    with pytest.raises(UsageError) as refused:
        request_from({"model": "Qwen3-0.6B", "memory_profiler": asked}, config_file="study.yaml")
    assert "memory_profiler: 0,1" in refused.value.hint


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"device": "cuda", "dry_run": True}])
def test_where_there_is_no_history_to_record_it_is_refused_by_name(changes):
    values = {"model": "Qwen3-0.6B", "memory_profiler": "0", **changes}
    request = request_from(values, keywords=True)
    with pytest.raises(UsageError, match="memory_profiler records the history of a GPU's memory"):
        check_request(request, NO_GPU, steps=2)


@pytest.mark.parametrize(("asked", "steps"), [("2", 2), ("0,7", 5), (100, 100)])
def test_a_step_that_there_is_not_is_refused_by_its_number(asked, steps):
    values = {"model": "Qwen3-0.6B", "memory_profiler": asked}
    request = request_from(values, keywords=True)
    with pytest.raises(UsageError, match=f"and the last one is {steps - 1}") as refused:
        check_request(request, machine_with(1), steps=steps)
    (hinted,) = re.findall("`--memory-profiler (.*)`", refused.value.hint)
    mended = request_from({**values, "memory_profiler": hinted})
    check_request(mended, machine_with(1), steps=steps)
    check_request(request, machine_with(1), steps=101)


@pytest.mark.parametrize(
    ("ranks", "gpus", "absent"),
    [([9], [1], 9), ([0, 1], [1], 1), ([0, 4], [1, 2, 4], 4), ([1], None, 1), ([3], [1, 4], None)],
)
def test_a_rank_that_no_layout_has_is_refused_by_its_number(ranks, gpus, absent):
    values = {"model": "Qwen3-0.6B", "gpus": gpus, "memory_profiler": {"ranks": ranks}}
    request = request_from(values, keywords=True)
    machine = machine_with(4 if gpus else 1)
    if absent is None:
        assert plan(request, machine).question.cells
        return
    with pytest.raises(UsageError, match=f"records rank {absent}, which no trial has") as refused:
        plan(request, machine)
    assert "leave `ranks` out" in refused.value.hint
    assert plan(request_from({**values, "memory_profiler": {}}, keywords=True), machine)


def test_recording_changes_no_trials_key():
    order = SnapshotOrder(directory="/somewhere", profiling=Profiling())
    assert msgspec.structs.replace(SPEC, memory_snapshots=order).key == SPEC.key


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_rank_has_coordinates_of_its_own_which_a_profile_reads_again(data, ring, ulysses):
    layout = Layout(gpus=data * ring * ulysses, ring_degree=ring, ulysses_degree=ulysses)
    places = [coordinates(layout, rank) for rank in range(layout.gpus)]
    # ranks that exchange heads are neighbours (docs/decisions/040)
    every = product(range(data), range(ring), range(ulysses))
    assert places == [f"d{d}r{r}u{u}" for d, r, u in every]
    for rank, place in enumerate(places):
        name = snapshot_name(rank, place)
        assert _coordinates(Path(name).stem) == (rank, (place[:2], place[2:4], place[4:]))


@pytest.mark.parametrize(
    ("ulysses", "ring", "places"),
    [
        (1, 1, "c0d0r0u0 c0d1r0u0 c1d2r0u0 c1d3r0u0"),
        (2, 1, "c0d0r0u0 c0d0r0u1 c1d1r0u0 c1d1r0u1"),
        (2, 2, "c0d0r0u0 c0d0r0u1 c1d0r1u0 c1d0r1u1"),  # one sequence, shared by both copies
    ],
)
def test_where_states_have_copies_a_ranks_place_begins_with_its_copy(ulysses, ring, places):
    layout = Layout(gpus=4, ulysses_degree=ulysses, ring_degree=ring, replicate_degree=2)
    found = [coordinates(layout, rank) for rank in range(layout.gpus)]
    assert found == places.split()
    name = snapshot_name(3, found[3])
    assert _coordinates(Path(name).stem)[1] == tuple(found[3][at : at + 2] for at in (0, 2, 4, 6))


def test_ranks_that_left_no_snapshot_are_named(tmp_path):
    log = tmp_path / "model_len-4096.attempt-2.log"
    reports = (RankReport(rank=0), RankReport(rank=1))
    result = TrialResult(outcome=Outcome.OUT_OF_MEMORY, reason="", ranks=reports, log_path=str(log))
    (none,) = snapshot_lines(SPEC, result, Profiling())
    assert "none" in none
    for part, ranks in (("step_0", (0, 1)), ("step_1", (1,))):
        for rank in ranks:
            path = snapshot_folder(log) / part / snapshot_name(rank, f"d0r0u{rank}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    first, second = snapshot_lines(SPEC, result, Profiling())
    assert "2 of 2 ranks" in first
    assert "1 of 2 ranks" in second
    assert second.endswith("none of rank 0")
    assert len(list(snapshot_lines(SPEC, result, Profiling(ranks=(1,))))) == 2
    assert "none" not in "".join(snapshot_lines(SPEC, result, Profiling(ranks=(1,))))
    without = msgspec.structs.replace(result, ranks=reports[:1])
    *_, ended = snapshot_lines(SPEC, without, Profiling())
    assert "rank 1 was ended" in ended
    assert len(list(snapshot_lines(SPEC, without, Profiling(ranks=(0,))))) == 2


def test_a_search_names_the_ranks_that_were_ended_in_each_of_its_recorded_trials(tmp_path):
    both, first = (RankReport(rank=0), RankReport(rank=1)), (RankReport(rank=0),)

    def ended(length: int, outcome: Outcome, ranks: tuple[RankReport, ...]) -> RecordedTrial:
        log = tmp_path / f"{length}.log"
        if length < 16_384:  # the last one is of a search that recorded nothing
            snapshot_folder(log).mkdir(parents=True)
        result = TrialResult(outcome=outcome, reason="", ranks=ranks, log_path=str(log))
        spec = msgspec.structs.replace(SPEC, length_tokens=length)
        return RecordedTrial(spec=spec, result=result)

    crashed = (ended(length, Outcome.CRASHED, first) for length in (8192, 16_384))
    others = (ended(4096, Outcome.FIT, both), ended(12_288, Outcome.OUT_OF_MEMORY, first))
    trials = sorted((*crashed, *others), key=lambda each: each.spec.length_tokens)
    study = study_of(*trials, RecordedTrial(spec=SPEC))
    where, *lines = study_snapshot_lines(study, Profiling())
    assert "beside its log" in where
    told = [line.split(": ")[0].split(", ")[-1] for line in lines]
    assert told == ["8,192 tokens", "12,288 tokens"]
    assert all("rank 1 was ended" in line for line in lines)
    assert len(list(study_snapshot_lines(study, Profiling(ranks=(0,))))) == 1
