"""A tiny model, a marked environment, and the check that no test leaves a process behind."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import MARK, marked

from fork_server import INSIDE
from highwater.nouns.control_group import counters
from tiny_models import SMALLEST, write_model

ENDS_S = 240


@pytest.fixture
def mark(tmp_path: Path, forks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark of this test's processes: none is left when it ends."""
    mark = uuid.uuid4().hex
    environment = {
        MARK: mark,
        "FAULTS": tmp_path,
        "OMP_NUM_THREADS": "1",  # as of forked ones: sums are in one order everywhere
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": Path(__file__).parent,
    }
    environment["TMPDIR"] = tmp_path  # what is killed cannot tidy up
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    # tests in the background may have been told to ignore Ctrl-C and a closed terminal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield mark
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hangup)
    left = marked(mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model whose training steps take no time."""
    return write_model(tmp_path / "tiny", SMALLEST)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose logits of a few thousand tokens fill a GiB."""
    return write_model(tmp_path / "wide", SMALLEST, vocab_size=151_936)


class SmallDisk(NamedTuple):
    """A disk that its own processes alone see, as the folder ``disk`` in that of the test."""

    holder: "subprocess.Popen[bytes]"
    folder: Path

    def start(self, *words: str, cwd: str = ".", **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=os.environ | environment | {INSIDE: str(self.holder.pid)},
        )

    def run(
        self, *words: str, cwd: str = ".", **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        with self.start(*words, cwd=cwd, **environment) as process:
            said, errors = process.communicate(timeout=ENDS_S)
        return subprocess.CompletedProcess(words, process.returncode, said, errors)

    def fill(self, name: str) -> Path:
        filler, is_full = self.folder / name, False
        with filler.open("wb", buffering=0) as file:
            while not is_full:
                try:
                    file.write(bytes(2**16))
                except OSError:
                    is_full = True
        return filler


@pytest.fixture
def small_disk(mark: str, tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    holders: list[subprocess.Popen[bytes]] = []
    (tmp_path / "disk").mkdir()

    def disk(size_mib: int) -> SmallDisk:
        mount = f"mount -t tmpfs -o size={size_mib}m none disk && echo mounted && exec sleep 10000"
        holder = subprocess.Popen(
            ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            refused = holder.communicate()[1].decode()
            pytest.skip(f"this machine lets nobody mount a small disk: {refused[:200]}")
        return SmallDisk(holder, Path(f"/proc/{holder.pid}/root{tmp_path}/disk"))

    yield disk
    for holder in holders:
        holder.kill()
        holder.communicate()


@pytest.fixture
def groups() -> Iterator[Callable[[int], Path]]:
    """Makes control groups with a limit, below this process's own."""
    made: list[Path] = []

    def group(limit_bytes: int) -> Path:
        for counter in counters():
            directory = counter.parent / f"highwater-test-{uuid.uuid4().hex}"
            try:
                directory.mkdir()
                made.append(directory)
                limits = ("memory.swappiness", "0"), ("memory.limit_in_bytes", str(limit_bytes))
                if counter.name == "memory.events":
                    limits = ("memory.max", str(limit_bytes)), ("memory.swap.max", "0")
                for name, value in limits:
                    (directory / name).write_text(value)
            except OSError:
                continue
            return directory
        pytest.skip("this machine lets nobody make a control group")

    yield group
    for directory in made:
        directory.rmdir()
