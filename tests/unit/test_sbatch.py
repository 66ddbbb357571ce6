"""The job that is printed for Slurm: whatever a model is called, only the search runs in it."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from highwater.cli.app import main
from tiny_models import TINY

FIND = ("--device", "cpu", "--memory", "1GiB", "--gpus", "2", "--nodes", "2", "--print-sbatch")
RAN = "RAN"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(place: Path, name: str) -> str:
    """A model's directory of this name."""
    folder = place / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def typed_in_the_job(script: str, place: Path) -> list[str]:
    """What ``highwater`` is told where the script runs, which makes no file."""
    (place / "highwater").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$TOLD"\n')
    (place / "highwater").chmod(0o755)
    (place / "job.sh").write_text(script)
    told = place / "told"
    variables = {"PATH": f"{place}:{os.environ['PATH']}", "TOLD": str(told)}
    subprocess.run(["bash", "job.sh"], cwd=place, env=variables, check=True, timeout=20)
    assert not list(place.rglob(f"{RAN}.made"))
    return told.read_text().split("\0")[:-1]


HOSTILE = [
    f"x\ntouch {RAN}.made\n#",
    f"x\r\ntouch {RAN}.made",
    f"x; touch {RAN}.made",
    f"$(touch {RAN}.made)",
    f"x' && touch {RAN}.made '",
    f"x\n#SBATCH --wrap='touch {RAN}.made'",
    "a model of ours",
    "Größe",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_the_name_of_a_model_runs_nothing_and_is_no_other_option(name, place, capsys):
    named = model(place, name)
    (place / "find.yaml").write_text(f"model: {json.dumps(named)}\n")
    assert main(("find", "--config", "find.yaml", *FIND)) == 0, capsys.readouterr().err
    script = capsys.readouterr().out
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    (job,) = (line for line in options if "job-name" in line)
    assert re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9._-]+", job)
    assert len(options) == len({line.partition("=")[0] for line in options})
    assert not any("wrap" in line.partition("=")[0] for line in options)
    words = typed_in_the_job(script, place)
    assert words[: len(FIND) + 2] == ["find", "--config", "find.yaml", *FIND[:-1]]
    name, launcher, meet, file = words[len(FIND) + 2 :]
    assert (name, meet, file) == ("--launcher", "--rendezvous", "logs/rendezvous/ranks")
    assert shlex.split(launcher)[:2] == ["srun", "--nodes"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\x85"])
@pytest.mark.parametrize("at", ["model", "--study", "--log-dir", "--command"])
def test_a_word_with_a_line_end_is_refused(at, end, place, capsys):
    hostile = f"x{end}touch {RAN}.made"
    if at == "model":
        words = (model(place, hostile),)
    elif at == "--command":
        words = (
            model(place, "x"),
            "--trainer",
            "command",
            at,
            f"a {{length}} '{hostile}'",
            "--gpus=1",
        )
    else:
        words = (model(place, "x"), f"{at}={hostile}")
    more = FIND if at != "--command" else ("--device", "cpu", "--memory", "1GiB", "--print-sbatch")
    assert main(("find", *words, *more)) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "has its command in one line" in said.err


@pytest.mark.timeout(60)
def test_what_a_shell_would_expand_reaches_the_search_as_it_was_typed(place, capsys):
    named = model(place, f"$(touch {RAN}.made) 'a'")
    assert main(("find", named, *FIND)) == 0
    assert shlex.quote(named) in (script := capsys.readouterr().out)
    assert named in typed_in_the_job(script, place)
