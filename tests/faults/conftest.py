"""A tiny model, a marked environment, and the check that no test leaves a process behind."""

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from processes import MARK, marked

from highwater.nouns.control_group import counters
from tiny_models import SMALLEST, write_model


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark of this test's processes: none is left when it ends.

    The environment that carries it also hides every GPU, and finds ``faulty_batches``.
    """
    mark = uuid.uuid4().hex
    environment = {
        MARK: mark,
        "FAULTS": tmp_path,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": Path(__file__).parent,
    }
    environment["TMPDIR"] = tmp_path  # what is killed cannot tidy up
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # tests in the background were told to ignore Ctrl-C
    yield mark
    signal.signal(signal.SIGINT, before)
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
