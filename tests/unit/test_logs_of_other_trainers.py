"""Logs of other trainers, each judged as whoever reads it with care concludes: no length is said to
fit that was not shown to, none not to fit that memory did not end.

60 of them were written by someone who had not read the code that judges them; the others here are
variations of what was found wrong: other hosts, other prefixes, other trainers' words.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_trials import FRAMES, OOM, RAN_OUT, outcome
from studies import fifo

from highwater.nouns.trial import LogEnd, Outcome
from highwater.store.logs import LINES, log_end
from tables import table

FOLDER = Path(__file__).parents[1] / "data" / "foreign_logs"
EXPECTED: list[dict[str, Any]] = json.loads((FOLDER / "expectations.json").read_text("utf-8"))
NAMES = [each["name"] for each in EXPECTED]


def judged(log: str, exit_code: int | None, **named: Any) -> str:
    """The outcome in lower case; ``inconclusive`` where it says nothing about memory."""
    found = outcome(log, exit_code, **named)
    return found.value.lower() if found.tells else "inconclusive"


def judged_as(expected: dict[str, Any], log: str) -> str:
    return judged(
        log,
        expected["exit_code"],
        kernel_kills=expected["kernel_kills"],
        device=expected["device"],
        steps=expected["steps"],
        pattern=expected["done_pattern"],
    )


def log_of(expected: dict[str, Any]) -> str:
    return (FOLDER / f"{expected['name']}.log").read_bytes().decode()


@pytest.mark.parametrize("expected", EXPECTED, ids=NAMES)
def test_a_log_is_judged_as_its_reader_concludes(expected):
    assert judged_as(expected, log_of(expected)) == expected["outcome"], expected["why"]


PREFIXES: dict[str, Callable[[int, str], str]] = {
    "pdsh": lambda _, line: f"worker-1: {line}",
    "an address": lambda _, line: f"10.0.0.7: {line}",
    "srun": lambda _, line: f"3: {line}",
    "a host without a number": lambda _, line: f"alpha: {line}",
    "a whole host's name": lambda _, line: f"gpu-a.cluster.local: {line}",
    "a time in brackets": lambda at, line: f"[2026-11-26 10:00:{at % 60:02d},123] {line}",
    "kubectl's time": lambda at, line: f"2026-11-26T10:00:{at % 60:02d}.123456789Z {line}",
    "Ray": lambda _, line: f"(RayWorker pid=12, ip=10.0.0.7) {line}",
    "torchrun": lambda _, line: f"[default0]:{line}",
    "docker compose": lambda _, line: f"trainer-1  | {line}",
    "a pod": lambda _, line: f"[pod/train-0/main] {line}",
    "a host and a rank": lambda _, line: f"node07: [default1]:{line}",
    "mpirun": lambda _, line: f"[1,3]<stdout>: {line}",
    "a time and a rank": lambda at, line: f"2026-11-26 10:00:{at % 60:02d} [rank: 2] {line}",
    "a script that logs": lambda at, line: f"2026-11-26 10:00:{at % 60:02d},1 - run.sh - {line}",
    "an arrow": lambda _, line: f"gpu1> {line}",
    "line ends of Windows": lambda _, line: f"{line}\r",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_what_stands_before_every_line_changes_no_verdict(prefix):
    for expected in EXPECTED:
        lines = log_of(expected).split("\n")
        log = "\n".join(prefix(at, line) for at, line in enumerate(lines))
        assert judged_as(expected, log) == expected["outcome"], expected["name"]


STEPS = "step 1/2 loss 2.5\nstep 2/2 loss 2.4\n"

NO_FIT = table("logs_in_words", "no fit")


@pytest.mark.parametrize("log", NO_FIT.values(), ids=NO_FIT)
def test_what_is_not_shown_to_have_trained_is_no_fit(log):
    assert judged(log, 0) == "inconclusive"


FITS = table("logs_in_words", "fits")


@pytest.mark.parametrize("log", FITS.values(), ids=FITS)
def test_steps_with_a_proof_beside_them_fit(log):
    assert (judged(log, 0), judged(log, 1)) == ("fit", "inconclusive")


OF_NO_MEMORY = table("logs_in_words", "of no memory") | {
    "a quotation": f"RuntimeError: the last run ended with: {OOM}",
    "a quotation in quotes": f"RuntimeError: cannot resume '{OOM}'",
    "a quotation over two lines": f"ValueError: the last run said\n{OOM}",
    "a check of a log": f"AssertionError: {OOM}",
}


@pytest.mark.parametrize("error", OF_NO_MEMORY.values(), ids=OF_NO_MEMORY)
def test_an_error_that_is_not_of_the_trainings_memory_is_none(error):
    assert judged(f"step 1/2 loss 2.5\n{FRAMES}{error}\n", 1) == "inconclusive"


WENT_ON = {
    "left out a batch": f"{RAN_OUT}batch 3 skipped\n",
    "warned of it": "WARNING trainer: batch 3 left out\n"
    + RAN_OUT.replace("<module>", "step")
    + "loss is stuck, giving up\n",
    "tried again": f"{RAN_OUT}retrying with batch size 4\nstopped by the user's callback\n",
    "took less": f"{RAN_OUT}reducing batch size from 8 to 4\naborted: too few samples\n",
    "did the step after it": f"{RAN_OUT}step 1/2 loss 2.5\nstopped by the user's callback\n",
    "had done all its steps": f"{STEPS}Evaluating\n{RAN_OUT}",
    "did so as a rank": "".join(f"[rank0]: {line}\n" for line in RAN_OUT.splitlines())
    + "[rank0]: skipping this batch\n[rank0]: stopped by the user's callback\n",
}


@pytest.mark.parametrize("log", WENT_ON.values(), ids=WENT_ON)
def test_an_error_after_which_training_went_on_did_not_end_it(log):
    assert (judged(log, 1), judged(log, 139)) == ("inconclusive", "inconclusive")


BROKEN = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator:\n"
    "can't allocate memory: you tried to allocate 12884901888 bytes. Error code 12"
)
HIDDEN = table("logs_in_words", "hidden")


@pytest.mark.parametrize("log", HIDDEN.values(), ids=HIDDEN)
def test_memory_that_ran_out_is_found_where_it_is_hidden(log):
    assert judged(log, 1) == "out_of_memory"


@pytest.mark.parametrize(
    "prefix", ["", "worker-1: ", "10.0.0.7: ", "[2026-11-26 10:00:00] ", "3: "]
)
def test_a_hosts_sentence_is_found_over_two_lines(prefix):
    log = "".join(f"{prefix}{line}\n" for line in f"{FRAMES}{BROKEN}".splitlines())
    assert judged(log, 1, device="cpu") == "out_of_memory"
    assert judged(log, 1) == "host_out_of_memory"


def test_a_pattern_of_the_users_is_a_proof_and_no_excuse_for_a_failed_allocation():
    log = "update 1\nupdate 2\nsaved\n"
    assert judged(log, 0, pattern="saved") == "fit"
    for said in ("OOM, batch skipped", OOM, "ran out of memory; next", "MemoryError: caught"):
        warned = f"update 1\n{said}\nupdate 2\nsaved\n"
        assert judged(warned, 0, pattern=r"update (?P<step>\d+)") == "inconclusive"
        assert judged(f"{said}\n{log}", 0, pattern="") == "inconclusive"
    assert Outcome.FIT.tells


def test_the_end_of_a_log_is_read_where_it_lies_or_beside_the_study(tmp_path):
    log = tmp_path / "moved" / "gpu-1" / "sp-1" / "env" / "model_len-8192.attempt-2.log"
    log.parent.mkdir(parents=True)
    numbered = [b"line %d" % i for i in range(LINES - 1)]
    log.write_bytes(b"\n".join([b"old", *numbered, b"10%\r99%\x1b[31m red\x1b[0m \xff"]))
    study = str(tmp_path / "moved" / "study-1.jsonl")
    name = "gpu-1/sp-1/env/model_len-8192.attempt-2.log"
    found = log_end(f"logs/Qwen3-0.6B/{name}", study)
    assert found.lines == (*(f"line {i}" for i in range(1, LINES - 1)), "10%", "99% red \ufffd")
    assert log_end(str(log), None) == found
    assert log_end(f"logs/moved/{name}", str(tmp_path / "study-1.jsonl")) == found
    gone = str(log.with_name("model_len-4096.log"))
    assert log_end(gone, study).reason == "it is not there any more"
    assert log_end(None, study).reason == "no log is recorded"


LAUNCHER = """\
E1122 02:35:47.289000 20798 torch/distributed/elastic/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : -9 (pid: 20803)
"""


def test_the_end_of_a_log_is_what_the_workers_wrote_unless_only_the_launcher_did(tmp_path):
    log = tmp_path / "model_len-8192.log"
    log.write_text(
        f"Traceback (most recent call last):\n    ~~~^^^^\nRuntimeError: no memory\n{LAUNCHER}"
    )
    trace, error = log_end(str(log), None).lines
    assert trace.startswith("Traceback")
    assert error == "RuntimeError: no memory"
    log.write_text(LAUNCHER)
    assert "exitcode  : -9" in log_end(str(log), None).lines[-1]


def test_a_logs_end_is_what_the_first_failed_rank_said_whatever_its_peers_write(tmp_path):
    log = tmp_path / "model_len-8192.log"
    said = "RuntimeError: no memory"
    log.write_text(f"begins\n{said}, 5 GiB\n" + "a peer's traceback\n" * 2 * LINES + LAUNCHER)
    assert log_end(str(log), None, said=said).lines == ("begins", f"{said}, 5 GiB")
    assert set(log_end(str(log), None, said="another error").lines) == {"a peer's traceback"}


@pytest.mark.parametrize(
    "name", ["id_rsa", "model_len-8192.log.key", "../model_len-1.txt", "/etc/passwd"]
)
def test_what_is_not_called_like_a_log_is_not_read(tmp_path, name):
    (tmp_path / "id_rsa").write_text("private")
    found = log_end(str(tmp_path / name), None)
    assert found == LogEnd(reason=found.reason), "no line of it"
    assert "is not read" in str(found.reason)


def test_a_log_that_is_a_link_or_a_pipe_is_not_read(tmp_path):
    (tmp_path / "id_rsa").write_text("private")
    (tmp_path / "model_len-1.log").symlink_to(tmp_path / "id_rsa")
    fifo(tmp_path / "model_len-2.log")
    numbered = ("model_len-1.log", "model_len-2.log", "model_len-3\0.log")
    for name in (*numbered, "gpu-1/../../model_len-4.log"):
        assert log_end(str(tmp_path / name), str(tmp_path / "study.jsonl")).lines == ()
