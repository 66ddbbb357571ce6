"""Batches that go wrong, for ``--data faulty_batches:<name>``: each fault as a user's own code, or
the kernel, would cause it.

The first step's batches are good, so that a fault comes in mid-training, all buffers alive. What a
test has to know or steer goes through files in the folder that the variable ``FAULTS`` names.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil
import torch
from processes import MARK, marked

FIRST_STEP = 2
_DAEMON = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and "
    "os._exit(0); time.sleep(600)"
)

Batches = Iterator[list[list[int]]]


def good(*, length_tokens: int, **_: Any) -> Batches:
    yield from repeat([list(range(length_tokens))])


def noisy(*, length_tokens: int, **_: Any) -> Batches:
    """Everything that a reader of logs could fall for, and good batches."""
    sys.stderr.write(
        'Traceback (most recent call last):\n  File "cache.py", line 1, in load\nMemoryError: '
        "std::bad_alloc\n"
    )
    sys.stderr.write(
        "retried: torch.OutOfMemoryError: CUDA out of memory\n  exitcode  : -9 (pid: 1)\n"
    )
    yield from good(length_tokens=length_tokens)


def crashing_in_rank_1(*, length_tokens: int, data_rank: int, **_: Any) -> Batches:
    yield from _first_step(length_tokens)
    if data_rank == 1:
        raise ValueError("the tokenizer is broken")
    yield from good(length_tokens=length_tokens)


def talking_without_end(*, length_tokens: int, **_: Any) -> Batches:
    """An exception of 6 MB, with a token in its beginning and in its end."""
    yield from _first_step(length_tokens)
    raise RuntimeError(
        f"HF_TOKEN=hf_abcdefghijklmnopqrst {'x' * 6_000_000} Authorization: Bearer abcdefgh12345678"
    )


def leaving_with_1(*, length_tokens: int, **_: Any) -> Batches:
    """A traceback and exit status 1, past every handler."""
    yield from _first_step(length_tokens)
    sys.stderr.write(
        'Traceback (most recent call last):\n  File "reader.py", line 1, in read\nOSError: the '
        "disk is on fire\n"
    )
    os._exit(1)


def leaving_with_0(*, length_tokens: int, **_: Any) -> Batches:
    """Exit status 0, and no result."""
    yield from _first_step(length_tokens)
    os._exit(0)


def killed_in_rank_1(*, length_tokens: int, data_rank: int, **_: Any) -> Batches:
    """A line that speaks of memory, then a SIGKILL that has nothing to do with it."""
    yield from _first_step(length_tokens)
    if data_rank == 1:
        sys.stderr.write("MemoryError: a cache was dropped\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    yield from good(length_tokens=length_tokens)


def allocating_in_rank_1(*, length_tokens: int, data_rank: int, **_: Any) -> Batches:
    """Really allocates until the limit is met, while its peer waits in a collective."""
    yield from _first_step(length_tokens)
    held = []
    while data_rank == 1:
        held.append(torch.ones(2**24))
    yield from good(length_tokens=length_tokens)


def aborting_for_bad_alloc(*, length_tokens: int, **_: Any) -> Batches:
    """As the C++ runtime ends a process whose ``std::bad_alloc`` nobody catches."""
    yield from _first_step(length_tokens)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(
        2,
        b"terminate called after throwing an instance of 'std::bad_alloc'\n"
        b"  what():  std::bad_alloc\n",
    )
    os.abort()


def telling_who_listens(*, length_tokens: int, **_: Any) -> Batches:
    """Writes the addresses on which any process of this trial listens to the file ``listening``."""
    yield from _first_step(length_tokens)
    found = [
        address
        for pid in (os.getpid(), *marked(os.environ[MARK]))
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and (address := connection.laddr.ip)
    ]
    Path(os.environ["FAULTS"], "listening").write_text(json.dumps(found))
    yield from good(length_tokens=length_tokens)


def raising_what_is_no_text(*, length_tokens: int, **_: Any) -> Batches:
    """A file's name, as Python gives one whose bytes are not UTF-8."""
    yield from _first_step(length_tokens)
    raise ValueError(f"no documents in {os.fsdecode(bytes([0xFF, 0xFE]))}.txt")


def filling_the_control_group(*, length_tokens: int, data_rank: int, **_: Any) -> Batches:
    """Takes memory until the kernel kills this process, whose group has less than the limit."""
    yield from _first_step(length_tokens)
    held = []
    while data_rank == 1:
        held.append(b"\1" * 2**24)
    yield from good(length_tokens=length_tokens)


def killed_while_another_group_runs_out(*, length_tokens: int, **_: Any) -> Batches:
    """The kernel kills somebody for want of memory, in the control group that the file ``group``
    names; and somebody kills us.
    """
    yield from _first_step(length_tokens)
    tasks = Path(Path(os.environ["FAULTS"], "group").read_text(), "cgroup.procs")
    code = f"open({str(tasks)!r}, 'w').write('0'); held = [b'1' * 2**24 for _ in range(2**10)]"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(*, length_tokens: int, **_: Any) -> Batches:
    yield from _first_step(length_tokens)
    _hang_on()
    time.sleep(600)


def paused(*, length_tokens: int, **_: Any) -> Batches:
    """Stops the trial of the length that the file ``pause`` names, for as long as it is there."""
    yield from _first_step(length_tokens)
    pause = Path(os.environ["FAULTS"], "pause")
    if pause.exists() and int(pause.read_text()) == length_tokens:
        _hang_on()
        while pause.exists():
            time.sleep(0.02)
    yield from good(length_tokens=length_tokens)


def filling_the_disk(*, length_tokens: int, **_: Any) -> Batches:
    """Fills the disk of ``FAULTS``, once, in the trial whose length the file ``fill`` names."""
    yield from _first_step(length_tokens)
    fill = Path(os.environ["FAULTS"], "fill")
    if int(fill.read_text()) == length_tokens and not fill.with_name("filler").exists():
        with fill.with_name("filler").open("wb", buffering=0) as filler:
            for block in (2**20, 2**12, 1):
                _write_until_full(filler.fileno(), b"\0" * block)
    yield from good(length_tokens=length_tokens)


def _first_step(length_tokens: int) -> Batches:
    yield from repeat([list(range(length_tokens))], FIRST_STEP)


def _hang_on() -> None:
    """Be hard to end: deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", _DAEMON], start_new_session=True).wait()
    Path(os.environ["FAULTS"], "hangs").touch()


def _write_until_full(descriptor: int, block: bytes) -> None:
    try:
        while True:
            os.write(descriptor, block)
    except OSError:
        return
