"""The end of a trial's log: found, read, and only ever a log."""

import pytest
from studies import fifo

from highwater.nouns.trial import LogEnd
from highwater.store.logs import LINES, log_end


def test_the_end_of_a_log_is_read_where_it_lies_or_beside_the_study(tmp_path):
    log = tmp_path / "moved" / "gpu-1" / "sp-1" / "env" / "model_len-8192.attempt-2.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(
        b"\n".join(
            [
                b"old",
                *(b"line %d" % i for i in range(LINES - 1)),
                b"10%\r99%\x1b[31m red\x1b[0m \xff",
            ]
        )
    )
    study = str(tmp_path / "moved" / "study-1.jsonl")
    found = log_end("logs/Qwen3-0.6B/gpu-1/sp-1/env/model_len-8192.attempt-2.log", study)
    assert found.lines == (*(f"line {i}" for i in range(1, LINES - 1)), "10%", "99% red \ufffd")
    assert log_end(str(log), None) == found
    assert (
        log_end(
            "logs/moved/gpu-1/sp-1/env/model_len-8192.attempt-2.log",
            str(tmp_path / "study-1.jsonl"),
        )
        == found
    )
    assert (
        log_end(str(log.with_name("model_len-4096.log")), study).reason
        == "it is not there any more"
    )
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


def test_the_end_of_a_log_is_what_the_workers_wrote_unless_only_the_launcher_did(
    tmp_path,
):
    log = tmp_path / "model_len-8192.log"
    log.write_text(
        f"Traceback (most recent call last):\n    ~~~^^^^\nRuntimeError: no memory\n{LAUNCHER}"
    )
    trace, error = log_end(str(log), None).lines
    assert trace.startswith("Traceback")
    assert error == "RuntimeError: no memory"
    log.write_text(LAUNCHER)
    assert "exitcode  : -9" in log_end(str(log), None).lines[-1]


def test_the_end_of_a_log_is_what_the_rank_said_that_failed_first_whatever_its_peers_write_after(
    tmp_path,
):
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
    for name in (
        "model_len-1.log",
        "model_len-2.log",
        "model_len-3\0.log",
        "gpu-1/../../model_len-4.log",
    ):
        assert log_end(str(tmp_path / name), str(tmp_path / "study.jsonl")).lines == ()
