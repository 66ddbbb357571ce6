"""The terminal session of the README: what commands print on 80 columns, recorded as they run."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from templates import environment

HERE = Path(__file__).parent
COLUMNS, ROWS = 80, 50
COMMANDS = (
    "highwater predict Qwen3-4B --gpus 1xA100-80GB",
    "highwater recommend Qwen3-8B --gpus 4xH100-80GB --length 128k",
    "highwater show docs/results/find/qwen3-4b-79gib.jsonl",
)
SHOWN = (15, 9, 17)
"""Lines of each that are drawn; the rest are explanations, and are left out."""
CHARACTER, LINE, LEFT, TOP = 7.8, 19, 20, 48
_CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\r")


class Row(NamedTuple):
    """A line of the terminal, and where it is drawn."""

    text: str
    y: int
    width: float
    is_typed: bool


def session() -> str:
    """The whole SVG."""
    templates = environment()
    lines = list(_lines())
    rows = [
        Row(text, TOP + LINE * number, round(CHARACTER * len(text), 1), text.startswith("$ "))
        for number, text in enumerate(lines)
    ]
    return templates.get_template("session.svg.j2").render(
        rows=[row for row in rows if row.text],
        left=LEFT,
        width=round(2 * LEFT + CHARACTER * COLUMNS),
        height=TOP + LINE * len(lines) + 4,
        commands=", then ".join(COMMANDS),
    )


def _lines() -> Iterator[str]:
    for command, count in zip(COMMANDS, SHOWN, strict=True):
        yield f"$ {command}"
        shown = on_a_terminal(command.split()[1:])
        yield from shown[:count]
        yield "..." if len(shown) > count else ""
        yield ""


def on_a_terminal(words: list[str]) -> list[str]:
    """What highwater prints on a terminal, line by line, without what it says beside the answer."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "highwater", *words],
        cwd=HERE.parent,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    shown = b""
    while chunk := _read(reader):
        shown += chunk
    os.close(reader)
    if process.wait() > 1:
        raise RuntimeError(f"{words} ended with {process.returncode}")
    return _CONTROL.sub("", shown.decode()).rstrip("\n").split("\n")


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 65_536)
    except OSError:  # how Linux says that the other end is closed
        return b""
