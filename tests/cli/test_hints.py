"""Every hint, typed on the case that printed it, is accepted and does what it says.

The cases are in ``tests/data/hints.json``: a command line that is refused, what the refusal says,
and what its hint has to do beyond being accepted: ``offers`` is all that it has to type.
"""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Typed, followed, offered

from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO
from highwater.nouns.cluster import cluster
from highwater.units import GIB, parse_bytes

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "hints.json").read_text(encoding="utf-8")
)
FILES = {
    "d.txt": b"a few words",
    "data.jsonl": b'{"text": "a few words"}',
    "held_out.jsonl": b'{"text": "other words"}',
    "latin1.txt": b"\xfcber all words",
    "spread.jsonl": b'{\n"text": "a few words"\n}',
    "file": b"mine",
}


@pytest.mark.parametrize("row", ROWS, ids=[row["command"].replace(" ", "_") for row in ROWS])
def test_a_hint_that_is_typed_does_what_it_says(run, tmp_path, row):
    words = whole(tuple(shlex.split(row["command"])))
    prepare(run, tmp_path, row)
    done = run(*words)
    assert (done.returncode, done.stdout) in ((2, ""), (3, "")), done.stderr
    problem, hint = refused(done)
    assert row.get("said", "") in problem
    if "offers" in row:
        assert [shlex.join(words) for words in offered(hint) if words != ["nvidia-smi"]] == row[
            "offers"
        ]
    ways = list(followed(words[1:], problem, hint))
    assert bool(ways) != row.get("offers_no_value", False), hint
    for way in ways:
        prepare(run, tmp_path, row)
        check_offer(row, way)
        if way.is_shell:
            subprocess.run(["bash", "-c", way.words[0]], check=True, cwd=tmp_path)
            typed = shlex.split(row.get("then", row["command"]))
        elif way.is_whole:
            typed = [*way.words, *shlex.split(row.get("with", ""))]
        else:
            typed = [words[0], *way.words]
        again = run(*whole(tuple(typed)))
        if row.get("past"):
            assert again.returncode in (0, 1) or refused(again)[0] != problem
            continue
        assert again.returncode in (EXIT_ANSWERED, EXIT_ANSWERED_NO), (hint, again.stderr)
        if row.get("trains") and not way.is_whole:
            assert list(tmp_path.glob("*/model/model.safetensors")), hint


def refused(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Problem and hint of a command, which may have said before what it does."""
    error, blank, hint = done.stderr.splitlines()[-3:]
    assert (error[:7], blank, hint[:6]) == ("error: ", "", "hint: ")
    return error[7:], hint[6:]


def whole(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command with its program."""
    is_named = words[0] in ("highwater", "search_context_length_capacity")
    return words if is_named else ("highwater", *words)


def prepare(run: Run, folder: Path, row: dict[str, Any]) -> None:
    """The folder as the command found it."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for command in row.get("before", []):
        assert run(*whole(tuple(shlex.split(command)))).returncode == 0


def check_offer(row: dict[str, Any], way: Typed) -> None:
    """That the offer is no more than what was meant, and possible on this machine."""
    offered = dict(zip(way.offered, (*way.offered[1:], ""), strict=True))
    sizes = [parse_bytes(word) for word in way.offered if word.endswith("iB")]
    if "memory_at_most_gb" in row:
        assert 0.98 * row["memory_at_most_gb"] * 10**9 < sizes[0] <= row["memory_at_most_gb"] * 1e9
    if "gpu_at_most_gib" in row and "--gpus" in {*way.words, *way.offered}:
        typed = dict(zip(way.words, (*way.words[1:], ""), strict=True))
        memory = typed.get("--gpu-memory")
        memory_bytes = None if memory is None else parse_bytes(memory)
        gpus = cluster(typed["--gpus"], gpu_memory_bytes=memory_bytes, machine=None)
        assert gpus.device_bytes <= row["gpu_at_most_gib"] * GIB
    if row.get("no_cpu"):
        assert offered.get("--device") != "cpu"
