"""Faults of a search: ``highwater find`` on real trials, ended or starved in mid-trial."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from processes import ENDS_S, HANGS_S, are_gone, is_arrived, lines, marked, started, wait_until
from processes import FIND as SEARCH

pytestmark = pytest.mark.timeout(900)

LENGTHS = (32, 64)
FIND = (*SEARCH, "--method", "linear", "--max-length", "64")
"""Two trials, the longer length last."""
PAUSED = (*FIND, "--data", "faulty_batches:paused")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(mark: str, tiny: Path, tmp_path: Path) -> Iterator[Start]:
    searches: list[subprocess.Popen[str]] = []

    def start(*words: str) -> "subprocess.Popen[str]":
        searches.append(started(*words))
        return searches[-1]

    yield start
    for search in searches:
        search.kill()
        search.communicate()


@pytest.fixture
def hanging(start: Start, mark: str, tmp_path: Path) -> "subprocess.Popen[str]":
    """A search whose first trial is recorded, and whose second hangs and is hard to end."""
    (tmp_path / "pause").write_text(str(LENGTHS[1]))
    search = start(*PAUSED)
    assert wait_until(
        lambda: (tmp_path / "hangs").exists() or search.poll() is not None, within_s=HANGS_S
    )
    assert search.poll() is None, search.communicate()[1]
    # The search, the reaper, the worker, and its daemon.
    assert len(marked(mark)) >= 4
    return search


def starts(path: Path) -> dict[int, int]:
    return Counter(
        line["spec"]["length_tokens"] for line in lines(path) if line["kind"] == "trial_started"
    )


def finished(path: Path) -> list[str]:
    return [line["spec_key"] for line in lines(path) if line["kind"] == "trial_finished"]


def complete(search: "subprocess.Popen[str]") -> str:
    answer, talk = search.communicate(timeout=ENDS_S)
    assert search.returncode == 0, talk
    assert "trains up to 64 tokens" in answer
    return talk


def test_a_search_killed_with_9_leaves_no_orphan_and_resumes(hanging, start, mark, tmp_path):
    study = tmp_path / "study.jsonl"
    before = finished(study)
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert are_gone(mark)
    assert list(tmp_path.glob("highwater-*")) == []
    assert len(before) == 1
    assert finished(study) == before
    (tmp_path / "pause").unlink()
    assert "1 so far" in complete(start(*PAUSED))
    assert starts(study) == {LENGTHS[0]: 1, LENGTHS[1]: 2}
    assert finished(study)[:1] == before
    assert len(set(finished(study))) == len(finished(study)) == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
    ],
)
def test_a_search_told_to_stop_keeps_what_is_finished(hanging, start, mark, tmp_path, number, code):
    study = tmp_path / "study.jsonl"
    os.killpg(hanging.pid, number)
    answer, talk = hanging.communicate(timeout=ENDS_S)
    assert marked(mark) == []
    assert (hanging.returncode, answer) == (code, "")
    assert list(tmp_path.glob("highwater-*")) == []
    assert "Traceback" not in talk
    said, how = talk.splitlines()[-2:]
    assert said.startswith("interrupted: ")
    assert said.endswith(", 1 so far: study.jsonl")
    assert how.startswith("next: highwater find")
    assert len(finished(study)) == 1
    (tmp_path / "pause").unlink()
    complete(start(*shlex.split(how.removeprefix("next: ").partition("  (")[0])))
    assert starts(study) == {LENGTHS[0]: 1, LENGTHS[1]: 2}


def test_a_second_search_on_a_study_is_refused_and_the_first_goes_on(hanging, start, tmp_path):
    study = tmp_path / "study.jsonl"
    before = study.read_bytes()
    answer, talk = start(*PAUSED).communicate(timeout=ENDS_S)
    problem, _, hint = talk.splitlines()[-3:]
    assert answer == ""
    assert problem.startswith("error: study.jsonl ")
    assert problem.endswith(f" process {hanging.pid}")
    assert "`--study study-2.jsonl`" in hint
    assert study.read_bytes() == before
    (tmp_path / "pause").unlink()
    complete(hanging)
    assert starts(study) == dict.fromkeys(LENGTHS, 1)
    assert list(tmp_path.glob("highwater-*")) == []


def test_a_study_deleted_in_mid_search_stops_it_and_it_goes_on(hanging, start, mark, tmp_path):
    study, kept = tmp_path / "study.jsonl", tmp_path / "study-2.jsonl"
    study.unlink()
    (tmp_path / "pause").unlink()
    answer, talk = hanging.communicate(timeout=ENDS_S)
    assert (hanging.returncode, answer) == (2, "")
    problem, _, hint = talk.splitlines()[-3:]
    assert problem.startswith("error: study.jsonl was deleted")
    assert problem.endswith(" study-2.jsonl")
    assert "`--study study-2.jsonl`" in hint
    assert not study.exists()
    assert are_gone(mark)
    before = starts(kept)
    complete(start(*PAUSED, "--study", "study-2.jsonl"))
    assert starts(kept) == before == dict.fromkeys(LENGTHS, 1), (
        "the trial that ended last is kept, too"
    )


def test_a_journal_cut_in_mid_line_is_resumed_from_what_is_whole(start, tmp_path):
    study, uncut = tmp_path / "study.jsonl", (*FIND, "--dry-run")
    first, _ = start(*uncut).communicate(timeout=ENDS_S)
    content = study.read_bytes()
    cut = content.rindex(b'"kind":"trial_finished"') + 100
    study.write_bytes(content[:cut])
    again = start(*uncut)
    answer, talk = again.communicate(timeout=ENDS_S)
    assert (again.returncode, answer) == (0, first)
    assert talk.startswith("note: ")
    assert "study.jsonl" in talk.splitlines()[0]
    assert finished(study) == [
        line["spec_key"] for line in map(json.loads, content.splitlines()) if "result" in line
    ]


def test_a_journal_of_a_newer_schema_is_refused_untouched_and_the_hint_works(start, tmp_path):
    study, dry = tmp_path / "study.jsonl", (*FIND, "--dry-run")
    start(*dry).communicate(timeout=ENDS_S)
    newer = study.read_bytes().replace(b'"schema_version":3', b'"schema_version":4', 1)
    study.write_bytes(newer)
    refused = start(*dry)
    answer, talk = refused.communicate(timeout=ENDS_S)
    assert (refused.returncode, answer) == (2, "")
    problem = talk.splitlines()[-3]
    assert problem.startswith("error: study.jsonl ")
    assert "schema is 4" in problem
    assert study.read_bytes() == newer
    other = talk.rstrip().rpartition("`--study ")[2].rstrip("`")
    assert start(*dry, "--study", other).wait(ENDS_S) == 0


def test_a_disk_that_fills_up_ends_the_search_in_order_and_with_room_it_goes_on(small_disk, tiny):
    disk = small_disk(72)
    study, fill = disk.folder / "study.jsonl", disk.folder / "fill"
    shutil.copytree(tiny, disk.folder / "tiny")
    fill.write_text(str(LENGTHS[1]))
    # So many steps that what they make of a line in the study is longer than the disk's blocks: the
    # last one has room for none.
    words = (*FIND, "--data", "faulty_batches:filling_the_disk", "--steps", "60")
    here = {"cwd": "disk", "FAULTS": str(tiny.parent / "disk")}
    search = disk.run(*words, **here)
    assert search.returncode == 3
    (problem,) = (line for line in search.stderr.splitlines() if line.startswith("error: "))
    assert problem.endswith(f" study.jsonl: {os.strerror(errno.ENOSPC)}")
    full = study.read_bytes()
    assert full.endswith(b"\n")
    (disk.folder / "filler").unlink()
    fill.write_text("0")
    resumed = disk.run(*words, **here)
    assert resumed.returncode == 0
    assert "trains up to 64 tokens" in resumed.stdout
    assert study.read_bytes().startswith(full)
    assert starts(study)[LENGTHS[0]] == 1
    assert len(set(finished(study))) == len(finished(study)) == 2


def test_what_a_search_killed_with_its_reaper_leaves_is_removed(hanging, start, mark, tmp_path):
    (reaper,) = (
        child
        for child in psutil.Process(hanging.pid).children()
        if "highwater.trials.reaper" in child.cmdline()
    )
    reaper.suspend()
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    reaper.kill()
    for pid in marked(mark):  # nobody is left who would end the worker's daemon
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert are_gone(mark)
    assert len(list(tmp_path.glob("highwater-*"))) == 1
    (tmp_path / "pause").unlink()
    complete(start(*PAUSED))
    assert list(tmp_path.glob("highwater-*")) == []


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param((signal.SIGINT, signal.SIGINT), id="impatient"),
        pytest.param((signal.SIGHUP,), id="its terminal closed"),
    ],
)
def test_nothing_is_left_of_a_search_however_it_is_ended(hanging, mark, tmp_path, signals):
    for number in signals:
        hanging.send_signal(number)
        assert wait_until(partial(is_arrived, hanging.pid, number), within_s=ENDS_S)
    hanging.communicate(timeout=ENDS_S)
    assert are_gone(mark)
    assert list(tmp_path.glob("highwater-*")) == []
