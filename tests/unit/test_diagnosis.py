"""Diagnosis: which trial of a study is repeated with its memory recorded, and that it is one and
once.
"""

from pathlib import Path

import msgspec
import pytest
from studies import CELL, study_of, trial

from highwater.nouns.request import request_from
from highwater.nouns.trial import Failure, Outcome, RankReport
from highwater.store.logs import recorded_snapshots, snapshot_folder
from highwater.trials.diagnosis import MemoryDiagnosis, undiagnosed
from highwater.trials.trial_process import log_path_of

REPORTS = tuple(
    RankReport(
        rank=rank, failure=Failure(kind="device_memory", phase="backward", text="", at_unix_s=at_s)
    )
    for rank, at_s in ((0, 2.0), (1, 1.0))
)
STUDY = study_of(
    trial(4096, Outcome.FIT),
    trial(8192, Outcome.CRASHED),
    trial(12_288, Outcome.OUT_OF_MEMORY),
    trial(10_240, Outcome.OUT_OF_MEMORY),
)


def request(folder: Path, **changes: object):
    return request_from(
        {"model": "Qwen3-0.6B", "log_dir": str(folder), "device": "cuda", **changes},
        keywords=True,
    )


def test_the_first_out_of_memory_is_repeated_and_only_once(tmp_path):
    found = undiagnosed(request(tmp_path), STUDY)
    assert found is STUDY.trials[2]
    log = log_path_of(tmp_path, found.spec, "rung")
    snapshot = (
        snapshot_folder(log.with_suffix(".attempt-2.log")) / "step_1" / "snapshot_rank01.pickle"
    )
    snapshot.parent.mkdir(parents=True)
    snapshot.touch()
    assert recorded_snapshots(log) == (snapshot,)
    assert undiagnosed(request(tmp_path), STUDY) is None


@pytest.mark.parametrize("changes", [{"no_diagnose": True}, {"memory_profiler": "0"}])
def test_none_is_repeated_where_none_is_asked_for(tmp_path, changes):
    assert undiagnosed(request(tmp_path, **changes), STUDY) is None


def test_nothing_is_repeated_that_no_gpu_ran(tmp_path):
    for spec, result in (
        ({"device": "cpu", "memory_budget_bytes": 1 << 30}, {}),
        ({}, {"simulated": True}),
        ({}, {"outcome": Outcome.HOST_OUT_OF_MEMORY}),
    ):
        changed = msgspec.structs.replace(
            STUDY.trials[2],
            spec=msgspec.structs.replace(STUDY.trials[2].spec, **spec),
            result=msgspec.structs.replace(STUDY.trials[2].result, **result),
        )
        assert undiagnosed(request(tmp_path), study_of(changed)) is None


def test_the_rank_that_failed_first_is_told_by_its_clock():
    result = msgspec.structs.replace(STUDY.trials[2].result, ranks=REPORTS)
    assert result.first_failed is REPORTS[1]
    assert msgspec.structs.replace(result, ranks=()).first_failed is None


def test_a_note_names_the_snapshot_and_says_where_it_ended_otherwise():
    spec = STUDY.question.trial(CELL, 12_288)
    path = Path("logs/a model/snapshot_rank00.pickle")
    done = MemoryDiagnosis(spec=spec, outcome=Outcome.OUT_OF_MEMORY, snapshots=(path,))
    assert "`highwater profile 'logs/a model/snapshot_rank00.pickle'`" in done.note
    assert "ended as" not in done.note
    fitted = msgspec.structs.replace(done, outcome=Outcome.FIT)
    assert "ended as FIT" in fitted.note
    assert "left no snapshot" in msgspec.structs.replace(fitted, snapshots=()).note
    assert "busy" in MemoryDiagnosis(spec=spec, problem="the GPU is busy").note
