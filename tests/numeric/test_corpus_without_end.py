"""The process that tokenises."""

import json
import os
import resource
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from corpora import ids_of, made, order, write_lines, write_tokenizer
from forked_python import forked

from highwater.engine.data import conversations, tokenise
from highwater.engine.data.data_files import data_files, records
from highwater.engine.data.store import open_corpus
from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.trial import REFUSED_FILE, Refused, TrialEndedError, unheard
from highwater.trials.inputs import tokenised
from highwater.trials.trial_process import cache_directory
from torch_server import SERVER

pytestmark = pytest.mark.timeout(120)
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.txt", "d.jsonl.gz", "d.parquet"])
@pytest.mark.parametrize("irregular", [pipe, link_to_a_pipe, zeros])
def test_data_that_is_no_file_is_refused_and_never_waited_for(irregular, name, tmp_path):
    data = tmp_path / name
    irregular(data)
    with pytest.raises(UsageError, match=f"{name} cannot be read: it is no regular file") as said:
        made(tmp_path / "made", data)
    subprocess.run(shlex.split(said.value.hint.split("`")[1]), check=True, timeout=20)


@pytest.mark.parametrize("irregular", [pipe, link_to_a_pipe, zeros, dangling])
def test_what_is_no_file_within_a_folder_of_data_is_refused_not_left_out(irregular, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"text": "a"}])
    irregular(folder / "b.jsonl")
    with pytest.raises(UsageError, match=r"b\.jsonl cannot be read: "):
        made(tmp_path / "made", folder)


def test_what_becomes_a_pipe_is_not_waited_for_and_a_link_is_read(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a"}])
    (found,) = data_files([str(data)]).files
    data.unlink()
    pipe(data)
    with pytest.raises(MachineError, match="it is no regular file"):
        list(records(found))
    write_lines(tmp_path / "there.jsonl", [{"text": "a"}])
    data.unlink()
    data.symlink_to("there.jsonl")
    assert made(tmp_path / "made", tmp_path / "d.jsonl").summary.documents == 1
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a"}])
    folder = write_tokenizer(tmp_path / "tokenizer", "{{ messages[0]['content'] }}")
    for name in ("tokenizer.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
        pipe(folder / name)
    with pytest.raises(UsageError, match="no tokenizer can be opened"):
        made(tmp_path / "made", data, tokenizer=folder)


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999)"
    " %}{% endfor %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}"
    "{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(90) }}",
    "a text that doubles": "{% set all = namespace(text='a') %}{% for a in range(99999) %}"
    "{% set all.text = (all.text ~ all.text)[:1000000] %}{% endfor %}",
    "sums in a loop": "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "a number of 370 million digits": "{{ 9 ** (9 ** 9) }}",
    "a loop for one record alone": "{% if messages|length > 2 %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.mark.parametrize(
    ("name", "processes"),
    [*((name, 1) for name in ENDLESS), ("nested loops", 2), ("a loop for one record alone", 2)],
)
def test_a_template_without_end_is_refused_with_its_record(name, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "LIMIT_S", 1.0)
    if processes > 1:
        monkeypatch.setattr(tokenise, "_WORTH_BYTES", 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", ENDLESS[name])
    longer = {"messages": [*CHAT["messages"], *CHAT["messages"]]}
    of_one = name == "a loop for one record alone"
    data = write_lines(tmp_path / "d.jsonl", [CHAT, longer] if of_one else [CHAT])
    line = 2 if of_one else 1
    with pytest.raises(UsageError, match=rf"^d\.jsonl:{line}: the chat template") as refused:
        made(tmp_path / "made", data, tokenizer=tokenizer)
    assert "in 1 s" in refused.value.problem, refused.value.problem
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_a_template_that_calls_itself_is_refused_with_its_record(tmp_path):
    again = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    tokenizer = write_tokenizer(tmp_path / "tokenizer", again)
    data = write_lines(tmp_path / "d.jsonl", [CHAT])
    with pytest.raises(UsageError, match=r"^d\.jsonl:1: the chat template refuses .*depth"):
        made(tmp_path / "made", data, tokenizer=tokenizer)


def test_all_that_a_template_writes_of_a_record_has_one_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "LIMIT_S", 0.5)
    slow = "{% for a in range(99) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    write = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    begin = "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = write_tokenizer(tmp_path / "tokenizer", slow + write + begin)
    records = [{"messages": CHAT["messages"] * 40}]
    begin_s = time.process_time()
    with pytest.raises(UsageError, match=r"^d\.jsonl:1: the chat template has not written"):
        made(tmp_path / "made", write_lines(tmp_path / "d.jsonl", records), tokenizer=tokenizer)
    assert time.process_time() - begin_s < 2


DOUBLED = (
    "{{% set all = namespace(text='x') %}}{{% for a in range({}) %}}"
    "{{% set all.text = all.text + all.text %}}{{% endfor %}}"
).format
GROWN = {
    "a text doubled 60 times": DOUBLED(60) + "{{ all.text }}",
    "a text doubled 60 times and not written": DOUBLED(60),
    "a text that is tokenised for hours": DOUBLED(24) + "{{ all.text }}",
    "a list of lists": "{% set all = namespace(of=[]) %}{% for a in range(60000) %}"
    "{% set all.of = all.of + [all.of] %}{% endfor %}{{ all.of }}",
    "a list of numbers": "{{ range(99999) | list * 99999 }}",
    "a number with a billion blanks": "{{ '%9999999999d' | format(3) }}",
    "what no machine has": "{{ 'a' * 10 ** 15 }}",
}


TOKENISE = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
runpy.run_module("highwater.engine.data.tokenise", run_name="__main__", alter_sys=True)
"""
"""The process that tokenises; a test that fails takes no machine with it."""


@pytest.mark.parametrize("name", GROWN)
def test_a_template_that_grows_is_refused_with_its_record_and_takes_no_memory(name, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", GROWN[name])
    data = write_lines(tmp_path / "d.jsonl", [CHAT])
    order_file, answer = tmp_path / "order.json", tmp_path / "made" / "answer.json"
    answer.parent.mkdir()
    order_file.write_text(to_json(order(data, tokenizer=tokenizer)))
    done = forked(TOKENISE, *map(str, (order_file, answer, tmp_path)))
    assert done.returncode == 0, done.stderr[-2000:]
    refused = from_json(answer.with_name(REFUSED_FILE).read_bytes(), Refused)
    assert refused.problem.startswith("d.jsonl:1: the chat template makes more than ")
    assert "chat_template.jinja" in refused.hint


def test_the_limit_of_a_templates_memory_ends_with_it(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", GROWN["a text doubled 60 times"])
    with pytest.raises(UsageError):
        made(tmp_path / "made", write_lines(tmp_path / "d.jsonl", [CHAT]), tokenizer=tokenizer)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_long_conversation_is_within_the_limit(tmp_path):
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": CHAT["messages"] * 200}) + "\n")
    corpus = made(tmp_path / "made", data, tokenizer=tokenizer, length_tokens=1 << 16)
    assert corpus.summary.documents == 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(subprocess, "Popen", SERVER.popen_of_commands)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "highwater" / "corpora"


def test_a_process_makes_a_corpus_in_the_cache_or_refuses_as_said(cache, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "été"}, {"text": "b"}])
    summary = tokenised(order(data))
    assert Path(summary.directory) == cache / summary.digest
    assert list(cache.iterdir()) == [Path(summary.directory)]
    assert ids_of(open_corpus(summary.directory)) == [[*"été".encode(), 256], [98, 256]]
    data = write_lines(tmp_path / "d.jsonl", [{"text": "a"}, {"text": 7}])
    with pytest.raises(UsageError, match=r"^d\.jsonl:2: `text` is not a text: 7") as refused:
        tokenised(order(data))
    assert refused.value.hint == 'for example `{"text": "some text"}`'
    assert list(cache.iterdir()) == [Path(summary.directory)]


def test_it_says_what_it_does_and_nothing_is_left_of_one_that_is_ended(cache, tmp_path):
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


def test_the_cache_is_where_the_environment_says_and_the_machines(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="no corpus can be made in") as refused:
        tokenised(order(tmp_path), on_phase=unheard)
    assert "export XDG_CACHE_HOME" in refused.value.hint
    assert cache_directory("corpora", {"XDG_CACHE_HOME": "/x"}) == Path("/x/highwater/corpora")
    assert cache_directory("corpora", {}) == Path.home() / ".cache" / "highwater" / "corpora"
