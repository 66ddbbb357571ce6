"""On a terminal: a live table while it runs, a drawn one at the end; elsewhere plain lines."""

import os
import pty
import subprocess
from pathlib import Path

from conftest import BIN, SIMULATED, Run


def on_a_terminal(directory: Path, *words: str, **environment: str) -> str:
    """What a terminal is sent by ``highwater``."""
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [BIN / "highwater", *words],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm-256color", "COLUMNS": "140", **environment},
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    shown = b""
    try:
        while chunk := os.read(reader, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait(30) == 0
    return shown.decode()


def test_a_terminal_gets_a_drawn_table_and_the_next_command(tmp_path: Path) -> None:
    shown = on_a_terminal(tmp_path, "find", "Qwen3-0.6B", *SIMULATED)
    assert "━" in shown
    assert "high-water mark: " in shown
    assert shown.splitlines()[-1].startswith("next: highwater find Qwen3-0.6B")
    assert "trying 71,680 tokens" not in shown  # lines are for pipes


def test_no_color_is_honoured(tmp_path: Path) -> None:
    shown = on_a_terminal(tmp_path, "find", "Qwen3-0.6B", *SIMULATED, NO_COLOR="1")
    assert not [code for code in range(30, 38) if f"\x1b[{code}m" in shown]


def test_a_models_name_cannot_drive_a_terminal(tmp_path: Path, tiny: Path) -> None:
    evil = tiny.rename(tiny.with_name("evil[red]\x1b]0;title\x07"))
    shown = on_a_terminal(tmp_path, "find", str(evil), *SIMULATED, "--max-length", "8192")
    assert "evil[red]\\x1b]0;title\\x07" in shown
    assert "\x1b]0;" not in shown
    assert "\x07" not in shown


def test_a_pipe_gets_plain_lines(highwater: Run) -> None:
    done = highwater("find", "Qwen3-0.6B", *SIMULATED, "--max-length", "8k")
    assert "\x1b" not in done.stdout + done.stderr
    assert "━" not in done.stdout
    assert all(line == line.rstrip() for line in (done.stdout + done.stderr).splitlines())
