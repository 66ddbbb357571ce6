"""Commands that write a file: into a folder that is missing, or over something, none does; each is
refused with a hint that works.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import SIMULATED, Run, offered, refusal

SNAPSHOT = sorted((Path(__file__).parents[1] / "data" / "snapshots").glob("*.pickle"))[0]
WRITERS = {
    "report": ("report", "study.jsonl", "-o", "{}.html"),
    "report as CSV": ("report", "study.jsonl", "-o", "{}.csv"),
    "guide": ("guide", "study.jsonl", "-o", "{}.html"),
    "guide as Markdown": ("guide", "--predict", "tiny", "--gpus", "H200-141GB", "-o", "{}.md"),
    "profile": ("profile", "snapshot.pickle", "--html", "{}.html"),
    "timeline": (
        *("predict", "tiny", "--gpus", "H200-141GB", "--length", "4k"),
        *("--exact", "--timeline", "{}.pickle"),
    ),
}


@pytest.fixture(autouse=True)
def things(highwater: Run, tmp_path: Path) -> None:
    """A study and a snapshot."""
    assert highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "study.jsonl").returncode == 0
    shutil.copy(SNAPSHOT, tmp_path / "snapshot.pickle")


def words_of(writer: str, path: str) -> list[str]:
    return [word.format(path) for word in WRITERS[writer]]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_missing_folder_is_refused_and_the_hint_makes_it(highwater, tmp_path, writer):
    folder = "missing/deep down"
    words = words_of(writer, f"{folder}/page")
    problem, hint = refusal(highwater(*words), 2)
    assert f"there is no folder {folder}" in problem
    assert not (tmp_path / "missing").exists()
    make, other = offered(hint)
    subprocess.run(make, cwd=tmp_path, check=True)
    if writer == "timeline":  # a trace takes minutes: it is enough that the file is not refused
        return
    assert highwater(*words).returncode == 0
    assert (tmp_path / words[-1]).stat().st_size > 0
    assert highwater(*words[:-2], *other).returncode == 0
    assert (tmp_path / other[-1]).stat().st_size > 0


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_below_a_file_or_over_a_folder_is_refused(highwater, tmp_path, writer):
    for path in ("study.jsonl/page", "there"):
        words = words_of(writer, path)
        if path == "there":
            (tmp_path / words[-1]).mkdir()
        _, hint = refusal(highwater(*words), 2)
        (other,) = offered(hint)
        assert other[0] == words[-2]
        assert not (tmp_path / other[1]).exists()


def test_a_benchmark_makes_its_folder(highwater, tmp_path):
    words = ("bench", "attention", "--device", "cpu", "--lengths", "64", "--only", "forward")
    words += ("--implementations", "dense", "--out")
    assert highwater(*words, "missing/deep").returncode == 0
    assert (tmp_path / "missing" / "deep" / "attention.json").is_file()
    refusal(highwater(*words, "study.jsonl/report"), 2)
