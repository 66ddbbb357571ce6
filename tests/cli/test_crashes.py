"""How it ends when the program, or the machine below it, fails: codes of their own. What is typed,
and what stands in files that are named, never crashes a command.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, SIMULATED, TIMEOUT_S, refusal

from fork_server import ForkServer
from places import captured
from tables import deep, table

PREDICT = ("predict", "Qwen3-0.6B", "--gpus", "A100-80GB")
SEARCH = ("--model_path", "Qwen3-0.6B")
MAINS = {"highwater.cli.app": PREDICT, "highwater.cli.search_context_length_capacity": SEARCH}


Broken = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def broken(fork_server: ForkServer, tmp_path: Path) -> Broken:
    return partial(_broken, fork_server, tmp_path)


def _broken(
    server: ForkServer, directory: Path, error: str, *, module: str = "highwater.cli.app"
) -> "subprocess.CompletedProcess[str]":
    code = (
        f"import sys, errno; from highwater.cli import predict\n"
        f"from highwater.cli import search_context_length_capacity as published\n"
        f"def broken(*_, **__): raise {error}\n"
        f"predict.api_predict = published.load_model = broken\n"
        f"from {module} import main; sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, **HERE}
    words = (f"-c{code}", *MAINS[module])
    return server.run(*words, within_s=TIMEOUT_S, cwd=directory, environment=environment)


@pytest.mark.parametrize("module", MAINS)
def test_a_bug_of_ours_exits_70_says_so_in_a_line_and_then_where_it_was(broken, module):
    done = broken("KeyError('rope_theta')", module=module)
    assert (done.returncode, done.stdout) == (70, "")
    error, blank, hint, second_blank, *trace = done.stderr.splitlines()
    assert error == "error: highwater itself failed, which is a bug of ours: KeyError: 'rope_theta'"
    assert (blank, second_blank) == ("", "")
    assert hint.startswith("hint: ")
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "KeyError: 'rope_theta'"
    assert any("in broken" in line for line in trace)


def test_the_report_of_a_bug_has_no_secrets_and_drives_no_terminal(broken):
    done = broken("RuntimeError('HF_TOKEN=hf_abcdefghijklmnopqrst \\x1b]0;title\\x07')")
    assert done.returncode == 70
    assert "hf_abcdefghij" not in done.stderr
    assert "[hidden]" in done.stderr
    assert not {"\x1b", "\x07"} & set(done.stderr)


def test_a_bug_is_told_by_its_code_where_nobody_hears_stderr(tmp_path):
    code = (
        "import sys; from highwater.api import prediction; del prediction.predict; "
        "from highwater.cli.app import main; sys.exit(main(sys.argv[1:]))"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *PREDICT],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=120,
        )
    assert (done.returncode, done.stdout) == (70, b"")


@pytest.mark.parametrize(
    ("error", "said"), table("crashes", "what_the_machine_refuses_is_told_in_its_words")
)
def test_what_the_machine_refuses_is_told_in_its_words_and_exits_3(broken, error, said):
    problem, hint = refusal(broken(error), 3)
    assert problem == said
    assert subprocess.run(["bash", "-c", hint.split("`")[1]], capture_output=True).returncode in (
        0,
        2,
    ), "2: that file is not there"


def test_a_working_directory_that_is_gone_is_refused(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = (
        f"cd {gone} && rmdir {gone} && {sys.executable} -m highwater predict here --gpus A100-80GB"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert "'here'" in refusal(done, 2)[0]


FIND = ("highwater", "find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/m/study-1.jsonl")


def in_a_shell(
    directory: Path, words: tuple[str, ...], redirected: str
) -> "subprocess.CompletedProcess[str]":
    return captured(
        ["bash", "-c", f'"$@" {redirected}', "sh", *words],
        cwd=directory,
        env={**os.environ, **HERE},
    )


@pytest.mark.parametrize("words", [FIND, (*FIND, "--json")])
def test_an_answer_that_cannot_be_written_is_an_error_with_a_hint(highwater, tmp_path, words):
    done = in_a_shell(tmp_path, words, "> /dev/full")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    *_, problem, _, hint = done.stderr.splitlines()
    assert problem.startswith("error: the answer ")
    assert problem.endswith(os.strerror(errno.ENOSPC))
    assert " trains up to " in highwater(*hint.split("`")[1].split()[1:]).stdout


def test_a_closed_stdout_is_refused_before_anything_starts(tmp_path):
    problem, hint = refusal(in_a_shell(tmp_path, FIND, ">&-"), 2)
    assert problem.startswith("stdout is closed")
    assert list(tmp_path.iterdir()) == []
    assert in_a_shell(tmp_path, FIND, hint.split("`")[1]).returncode == 0


@pytest.mark.parametrize("redirected", ["2>&-", "2> >(head -c 1 > /dev/null)", "2> /dev/full"])
def test_a_search_goes_on_when_nobody_hears_its_talk(tmp_path, redirected):
    done = in_a_shell(tmp_path, FIND, redirected)
    assert done.returncode == 0, done.stderr
    assert " trains up to " in done.stdout
    assert all(
        json.loads(line)
        for line in (tmp_path / "logs" / "m" / "study-1.jsonl").read_text().splitlines()
    )


def test_a_name_is_told_in_ascii_or_refused_in_words(highwater, tiny):
    model = tiny.rename(tiny.with_name("模型"))
    words = ("find", str(model), *SIMULATED, "--max-length", "8192")
    table = highwater(*words, PYTHONIOENCODING="ascii")
    assert (table.returncode, table.stdout.isascii()) == (0, True)
    document = highwater(*words, "--json", PYTHONIOENCODING="ascii")
    assert json.loads(document.stdout)["question"]["model"]["name"] == "模型"
    odd = model.rename(Path(os.fsdecode(os.fsencode(tiny) + b"\xff")))
    problem, _ = refusal(highwater("find", str(odd), *SIMULATED), 2)
    assert problem == f"{tiny}\\udcff is not UTF-8"
    tiny.symlink_to(odd)
    problem, _ = refusal(highwater("find", str(tiny), *SIMULATED), 2)
    assert f" {tiny}\\udcff " in problem
    odd.rename(odd.with_name("renamed"))
    assert highwater("find", "renamed", *SIMULATED).returncode == 0


HOSTILE = Path(__file__).with_name("hostile.py")
LEAST_FLAGS, LEAST_VALUES = 300, 80
"""Flags and arguments of twelve commands, and the values, of which each has one or all."""
UNPRIVILEGED = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
)
"""Root passes every lock; without these two of its rights it is a user like others."""


def by_hostile(directory: Path, *which: str) -> Any:
    done = captured(
        [*UNPRIVILEGED, sys.executable, str(HOSTILE), *which],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{HOSTILE.parent}:{HOSTILE.parents[1]}"},
        stdin=subprocess.DEVNULL,
    )
    (directory / "locked").chmod(0o700)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [(), *deep(("every",))])
def test_no_hostile_value_of_any_flag_crashes_a_command(which, tmp_path, record_property):
    found = by_hostile(tmp_path, *which)
    record_property(
        "counted", f"{found['cases']:,} hostile commands, by exit code: {found['codes']}"
    )
    assert found["faults"] == []
    assert int(str(found["cases"])) > LEAST_FLAGS * (LEAST_VALUES if which else 1)


LOCKED = {
    "predict locked/tiny --gpus A100-80GB": "",
    "show locked/study.jsonl": "locked/study.jsonl cannot be read: ",
    "show --log-dir locked/logs": "",
    f"find Qwen3-0.6B {' '.join(SIMULATED)} --study locked/study.jsonl": "",
    "find --config locked/study.yaml": "locked/study.yaml cannot be read: ",
    "guide locked/table.csv": "the table locked/table.csv cannot be read: ",
    "guide --predict Qwen3-0.6B --gpus A100-80GB -o locked/guide.md": "",
    "find tiny --device cpu --memory 2GiB --log-dir locked/logs": "",
}
"""Commands that name something in a folder without rights, and how the problem is told."""


def test_a_folder_without_rights_is_refused_by_name(tmp_path):
    found = by_hostile(tmp_path, json.dumps([words.split() for words in LOCKED]))
    for (code, answer, talk), (words, said) in zip(found, LOCKED.items(), strict=True):
        problem, _ = refusal(subprocess.CompletedProcess(words, code, answer, talk), 2)
        assert f"{said}Permission denied" in problem, words
        assert "locked" in problem
    assert [path.name for path in (tmp_path / "locked").iterdir()] == ["config.json"]
