"""The process that tokenises: what it makes and what it refuses comes back to who asked, and
nothing of it is left when it is ended.
"""

import threading
from pathlib import Path

import psutil
import pytest
from corpora import ids_of, order, write_lines

from highwater.engine.data.store import open_corpus
from highwater.errors import MachineError, UsageError
from highwater.nouns.protocols import TrialEndedError, unheard
from highwater.trials.inputs import tokenised
from highwater.trials.trial_process import cache_directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "highwater" / "corpora"


def test_a_corpus_is_made_in_the_cache_by_a_process_that_says_what_it_does(cache, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "été"}, {"text": "b"}])
    told: list[str] = []
    summary = tokenised(order(data), on_phase=told.append)
    assert Path(summary.directory) == cache / summary.digest
    assert list(cache.iterdir()) == [Path(summary.directory)]
    assert ids_of(open_corpus(summary.directory)) == [[*"été".encode(), 256], [98, 256]]
    assert told


def test_what_it_refuses_is_raised_as_it_was_said(cache, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a"}, {"text": 7}])
    with pytest.raises(UsageError, match=r"^d\.jsonl:2: `text` is not a text: 7") as refused:
        tokenised(order(data))
    assert refused.value.hint == 'for example `{"text": "some text"}`'
    assert not list(cache.iterdir())


def test_what_a_users_function_raises_is_told_with_the_record(tmp_path, monkeypatch):
    (tmp_path / "strict_judge.py").write_text("def judge(**_):\n    raise RuntimeError('no')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(
        UsageError, match=r"^d\.jsonl:1: strict_judge:judge raised RuntimeError: no"
    ):
        tokenised(order(data, objective="ppo", reward="strict_judge:judge"))


def test_nothing_is_left_of_one_that_is_ended(cache, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a" * 99}] * 400_000)
    ended = threading.Event()
    others = psutil.Process().children(recursive=True)

    def end_soon(phase: str) -> None:
        if phase.startswith("tokenising"):
            ended.set()

    with pytest.raises(TrialEndedError):
        tokenised(order(data), on_phase=end_soon, ended=ended)
    assert not list(cache.iterdir())
    left = set(psutil.Process().children(recursive=True)) - set(others)
    assert not [each for each in left if each.is_running()]


def test_a_process_that_is_killed_without_a_word_is_told_by_its_signal(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a" * 99}] * 100_000)

    def kill_soon(phase: str) -> None:
        if phase.startswith("tokenising"):
            below = psutil.Process().children(recursive=True)
            next(each for each in reversed(below) if not each.children()).kill()

    problem = r"^the data could not be tokenised: ended by signal 9 \(SIGKILL\)"
    with pytest.raises(MachineError, match=problem) as refused:
        tokenised(order(data), on_phase=kill_soon)
    assert not refused.value.problem.endswith(": ")
    assert "free -h" in refused.value.hint


def test_a_cache_that_cannot_be_written_is_the_machines(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="no corpus can be made in") as refused:
        tokenised(order(tmp_path), on_phase=unheard)
    assert "export XDG_CACHE_HOME" in refused.value.hint


def test_corpora_lie_where_the_environment_says():
    assert cache_directory("corpora", {"XDG_CACHE_HOME": "/x"}) == Path("/x/highwater/corpora")
    assert cache_directory("corpora", {}) == Path.home() / ".cache" / "highwater" / "corpora"
