"""On a terminal: a live table while it runs, a drawn one at the end; elsewhere plain lines."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from conftest import SIMULATED, Run

from fork_server import COMMANDS, ForkServer
from highwater.trainers.targets import TARGETS
from tables import deep, table

ROOT = Path(__file__).parents[2]
PREDICT = ("predict", "Llama-3.1-8B", "--gpus", "4xA100-80GB")
LAYOUTS = ("find", "Qwen3-0.6B", *SIMULATED, "--gpus", "1", "2", "4", "--ulysses", "1", "2")
PAGES: dict[str, tuple[str, ...]] = {
    name: tuple(str(ROOT / word) if "/" in word else word for word in command.split())
    for name, command in table("terminal", "pages").items()
}
"""Everything that draws a table or prints long lines."""
REDRAWN = re.compile(r"\r?(?:\x1b\[1A\x1b\[2K)+")
"""How a live table goes back to its first line."""
OF_A_TERMINAL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\r")


Terminal = Callable[..., str]
Pipe = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def on_a_terminal(fork_server: ForkServer) -> Terminal:
    """What a terminal of so many columns is sent by ``highwater``."""

    def on_a_terminal(
        directory: Path, *words: str, columns: int = 140, code: int | None = 0, **environment: str
    ) -> str:
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        hidden = {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm-256color"}
        process = fork_server.popen(
            *(COMMANDS["highwater"], "highwater", *words),
            **dict.fromkeys(("stdin", "stdout", "stderr"), writer),
            env={**inherited, **hidden, **environment},
            cwd=directory,
        )
        os.close(writer)
        shown = b""
        with suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(reader, 4096):
                shown += chunk
        os.close(reader)
        assert process.wait() in ((0, 1) if code is None else (code,))
        return shown.decode().replace("\r\n", "\n")

    return on_a_terminal


@pytest.fixture(scope="session")
def in_a_pipe(forked: Run) -> Pipe:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    @cache
    def in_a_pipe(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return forked("highwater", *words, cwd=directory, environment=environment)

    return in_a_pipe


def plainly(shown: str) -> list[str]:
    """What stands there, line by line; a live table each time that it was drawn."""
    return OF_A_TERMINAL.sub("", REDRAWN.sub("\n", shown)).split("\n")


def lines_of(shown: str) -> list[str]:
    """The same, but for what is meant to be pasted or is quoted: a terminal wraps that itself."""
    lines: list[str] = []
    is_fenced = False
    for line in plainly(shown):
        is_fence = line.startswith("```")
        is_fenced ^= is_fence
        if not (is_fence or is_fenced or line.lstrip().startswith(("next: ", "`"))):
            lines.append(line)
    return lines


def standing(shown: str) -> list[str]:
    """What stands there at the end, line by line: what a live table drew over is gone."""
    lines, at = [""], 0
    for part in re.split(r"(\x1b\[\d*A|\x1b\[2K|\n)", shown):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part.startswith("\x1b[") and part.endswith("A"):
            at -= int(part[2:-1] or 1)
        else:
            lines[at] += OF_A_TERMINAL.sub("", part)
    return lines[:-1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, in_a_pipe: Pipe) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    assert in_a_pipe(directory, *LAYOUTS, "--study", "found.jsonl").returncode == 0
    return directory


def test_the_bar_of_a_training_stays_on_one_line_and_cuts_nothing(tiny, tmp_path, on_a_terminal):
    (tmp_path / "data.jsonl").write_text('{"text": "The cat sat on the mat."}\n')
    words = (
        *("train", str(tiny), "--data", "data.jsonl", "--eval-data", "data.jsonl"),
        *("--length", "64", "--steps", "100", "--eval-every", "20", "--output", "run"),
        *("--rows", "1", "--device", "cpu", "--memory", "4GiB"),
    )
    shown = on_a_terminal(tmp_path, *words, columns=80).replace("\r\x1b[2K", "\n")
    bars = [line for line in plainly(shown) if "/100 " in line]
    trained = [line for line in bars if line.startswith("loss ")]
    assert trained
    for line in trained:
        assert re.match(r"loss \d+\.\d{3}, held-out \d+\.\d{3}, [\d,]+ tokens/s +[━╸╺]{4,}", line)
    assert max(map(len, bars)) <= 80
    assert "…" not in "".join(bars)
    assert max(map(len, lines_of(shown))) <= 80
    assert re.search(r"held-out loss +\d+\.\d+ before, \d+\.\d+ after", shown)


@pytest.mark.parametrize(
    "command",
    [
        *table("terminal", "answers"),  # those that were the longest of some hundred
        *(
            f"emit --for {each} Qwen3-8B --gpus 4xH20 --length 32k -o o"
            + " --rollout-gpus 2" * (each == "areal")
            for each in TARGETS
        ),
    ],
)
def test_an_answer_takes_at_most_25_lines(on_a_terminal, tmp_path, command):
    (tmp_path / "long.jsonl").write_text(
        "".join(f'{{"text": "{"a " * 2**number}"}}\n' for number in range(18))
    )
    (tmp_path / "longer.jsonl").write_text(f'{{"text": "{"a " * 2**20}"}}\n')
    shown = standing(on_a_terminal(tmp_path, *command.split(), columns=80, code=None))
    assert sum(max(1, -(-len(line) // 80)) for line in shown) <= 25, "\n".join(shown)


def test_a_rollout_is_told_in_two_bars_and_on_paper(on_a_terminal, tmp_path):
    asked = "predict Qwen3-8B --gpus 8xH100-80GB --trainer trl --objective grpo --rollout vllm"
    named = "--sleep-level 2 --gpu-memory-utilization 0.5 --rollout-sequences 64 --length 32k"
    sent = on_a_terminal(tmp_path, *asked.split(), *named.split(), columns=80)
    assert max(map(len, lines_of(sent))) <= 80
    shown = standing(sent)
    assert len(shown) <= 25, "\n".join(shown)
    said = " ".join(" ".join(shown).split())
    assert "vLLM holds 40 such sequences at once" in said
    assert "On paper, by vLLM 0.33.0's own rule; never measured here." in said
    (awake,) = (line for line in shown if line.startswith("vLLM generates"))
    (asleep,) = (line for line in shown if line.startswith("the step trains"))
    assert awake.split()[2:] == ["53.37", "GiB", "39.55", "GiB", "13.82", "GiB", "-"]
    assert asleep.split()[3:] == ["37.14", "GiB", "757.8", "MiB", "36.40", "GiB", "4.00", "GiB"]
    assert " peak 53.37 GiB, " in said


@pytest.mark.parametrize("columns", [60, *deep(33, 80, 120, 200)])
@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_the_terminal(directory, on_a_terminal, in_a_pipe, page, columns):
    piped = in_a_pipe(directory, *PAGES[page])
    shown = on_a_terminal(directory, *PAGES[page], columns=columns, code=piped.returncode)
    assert max(map(len, lines_of(shown))) <= columns
    assert shown.count("…") <= piped.stdout.count("…")


def test_a_live_table_is_as_narrow_as_the_terminal(on_a_terminal, tmp_path):
    shown = on_a_terminal(tmp_path, *LAYOUTS, columns=60)
    live = [line for frame in REDRAWN.split(shown)[:-1] for line in lines_of(frame)]
    cells = [re.split(" {2,}", line) for line in live]
    assert ["settings", "GPUs", "Ulysses", "now"] in cells
    done = [n for n, row in enumerate(cells) if row[:3] == ["nothing set", "4", "2"] and row[3:]]
    done = [n for n in done if cells[n][3].startswith("done: ")]
    assert done
    for n in done:
        longest = cells[n][3].removeprefix("done: ").rstrip("*")
        assert cells[n + 1][1] == f"longest that fit: {longest}"
        assert int(cells[n + 1][2].removeprefix("trials: ")) > 1
    chunked = max(n for n, row in enumerate(cells) if row[0] == "expandable, chunked loss")
    assert cells[chunked : chunked + 2] == [
        ["expandable, chunked loss", "4", "2", "done: ≥1,048,576*"],
        ["", "longest that fit: 1,048,576", "trials: 1"],
    ]
    assert max(map(len, live)) <= 60


@pytest.mark.parametrize(
    ("named", "columns"), [("60", 60), ("0", 100), ("wide", 100), ("9" * 400, 100), ("-5", 100)]
)
def test_the_users_columns_go_first_where_they_are_a_width(on_a_terminal, tmp_path, named, columns):
    shown = on_a_terminal(tmp_path, *PREDICT, columns=100, COLUMNS=named)
    assert columns - 12 < max(map(len, lines_of(shown))) <= columns


def test_a_terminal_that_does_not_say_how_wide_it_is_has_80_columns(on_a_terminal, tmp_path):
    assert 68 < max(map(len, lines_of(on_a_terminal(tmp_path, *PREDICT, columns=0)))) <= 80


def test_a_refusal_breaks_between_words_and_leaves_what_is_typed_whole(on_a_terminal, tmp_path):
    words = ("predict", "Qwen3-8B", "--gpus", "8xH100-80GB", "--ulysses", "3")
    lines = on_a_terminal(tmp_path, *words, columns=40, code=2).splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(lines[:2]).startswith("error: Ulysses 3 on 8 GPUs: ")
    assert lines[2] == ""
    assert [line.count("`") for line in lines[3:]] == [4, 4], "no flag is cut from its value"


def test_what_is_read_by_a_program_is_plain_and_never_folded(on_a_terminal, tmp_path, highwater):
    module = "a_package_with_a_long_name.and_a_module:and_a_function"
    for command in (
        "emit --for trl Qwen3-8B --gpus 8xH20-96GB --rollout-gpus 2 --length 32k",
        f"find Qwen3-0.6B --data {module} --print-config",
        "predict Llama-3.1-8B --gpus 4xA100-80GB --json",
    ):
        words = command.split()
        assert highwater(*words).stdout in on_a_terminal(tmp_path, *words, columns=40)
    done = highwater("find", "Qwen3-0.6B", *SIMULATED, "--max-length", "8k")
    assert "\x1b" not in done.stdout + done.stderr
    assert "----" not in done.stdout
    assert all(line == line.rstrip() for line in (done.stdout + done.stderr).splitlines())
    assert highwater(*PREDICT, COLUMNS="40").stdout == highwater(*PREDICT, COLUMNS="400").stdout


def test_a_terminal_gets_a_drawn_table_in_the_colours_it_wants(on_a_terminal, tmp_path):
    shown = on_a_terminal(tmp_path, "find", "Qwen3-0.6B", *SIMULATED)
    assert re.search(r"\n-{24,}  ", shown)
    assert " trains up to " in shown
    assert shown.splitlines()[-1].startswith("next: highwater find ")
    assert "trying 71,680 tokens" not in shown  # lines are for pipes
    shown = on_a_terminal(tmp_path, "find", "Qwen3-0.6B", *SIMULATED, NO_COLOR="1")
    assert not [code for code in range(30, 38) if f"\x1b[{code}m" in shown]
