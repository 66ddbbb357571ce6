"""``highwater report`` as a user runs it."""

import csv
import io
import json
from pathlib import Path

import pytest
from conftest import SIMULATED, following, offered, refusal

ROOT = Path(__file__).parents[2]
REAL = str(ROOT / "docs" / "results" / "find" / "qwen3-0.6b-79gib-full.jsonl")
STUDY = ("--max-length", "64k", "--study", "s.jsonl")


def test_a_report_is_printed_or_written_and_the_next_command_works(highwater, tmp_path):
    printed = highwater("report", REAL)
    assert printed.returncode == 0
    assert printed.stdout.startswith("# Qwen3-0.6B on NVIDIA H200, 79.15 GiB per GPU\n")
    assert following(printed) == ["report", REAL, "-o", "report.html"]
    written = highwater(*following(printed))
    assert written.returncode == 0
    assert written.stderr.startswith("the report: report.html\n")
    assert written.stdout == highwater("show", REAL).stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert highwater(*following(written)).returncode == 0


@pytest.mark.parametrize("form", ["html", "md", "csv", "json"])
def test_every_form_is_a_file_that_is_never_written_over(highwater, tmp_path, form):
    assert highwater("report", REAL, "-o", f"report.{form}").returncode == 0
    before = (tmp_path / f"report.{form}").read_bytes()
    problem, hint = refusal(highwater("report", REAL, "-o", f"report.{form}"), 2)
    assert problem.startswith(f"report.{form} ")
    assert offered(hint) == [["-o", f"report-2.{form}"]]
    assert (tmp_path / f"report.{form}").read_bytes() == before
    assert highwater("report", REAL, *offered(hint)[0]).returncode == 0


def test_json_is_one_document_beside_a_file_too(highwater, tmp_path):
    document = json.loads(highwater("report", REAL, "--json").stdout)
    assert document["schema_version"] == 1
    assert document["label"] == "measured"
    assert len(document["trials"]) == 6
    assert json.loads(highwater("report", REAL, "--json", "-o", "r.csv").stdout) == document
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert [int(row["peak_reserved_bytes"]) for row in rows] == [
        trial["peak_reserved_bytes"] for trial in document["trials"]
    ]


def test_without_a_study_the_newest_is_reported(highwater):
    problem, _ = refusal(highwater("report"), 2)
    assert problem.endswith(" under logs")
    highwater(
        "find",
        "Qwen3-0.6B",
        *SIMULATED,
        "--max-length",
        "64k",
        "--study",
        "logs/Qwen3-0.6B/study-1.jsonl",
    )
    done = highwater("report")
    assert done.returncode == 0
    assert "logs/Qwen3-0.6B/study-1.jsonl" in done.stdout
    assert json.loads(highwater("report", "--json").stdout)["label"] == "simulated"


def test_a_search_that_was_cut_short_is_reported_as_it_is(highwater, tmp_path):
    highwater("find", "Qwen3-0.6B", *SIMULATED, *STUDY)
    lines = (tmp_path / "s.jsonl").read_text().splitlines(keepends=True)
    first_end = next(number for number, line in enumerate(lines) if '"trial_finished"' in line)
    (tmp_path / "s.jsonl").write_text("".join(lines[: first_end + 1]) + '{"kind":"trial_st')
    done = highwater("report", "s.jsonl")
    assert done.returncode == 0
    assert done.stderr.startswith("note: the last line ")
    assert "**Unfinished**" in done.stdout
    assert following(done)[:2] == ["find", "Qwen3-0.6B"]
    assert highwater(*following(done)).returncode == 0
    assert "Finished." in highwater("report", "s.jsonl").stdout


def test_a_search_on_the_cpu_is_reported_without_what_is_about_gpus(highwater):
    small = ("--start-length", "256", "--resolution", "256", "--max-length", "1k")
    highwater(
        "find",
        "tiny",
        "--device",
        "cpu",
        "--memory",
        "1GiB",
        *small,
        "--dry-run",
        "--study",
        "s.jsonl",
    )
    done = highwater("report", "s.jsonl")
    assert done.returncode == 0
    assert "trials ran on the CPU" in done.stdout
    assert "data segment" in done.stdout


def test_a_model_path_with_a_script_is_text_in_every_form(highwater, tiny, tmp_path):
    hostile = tiny.rename(tmp_path / "<script>alert(1)<_script>|`x`")
    found = highwater("find", str(hostile), *SIMULATED, *STUDY)
    assert found.returncode == 0, found.stderr
    for form in ("html", "md", "csv", "json"):
        assert highwater("report", "s.jsonl", "-o", f"r.{form}").returncode == 0
    assert "<script>alert" not in (tmp_path / "r.html").read_text()
    heading = (tmp_path / "r.md").read_text().splitlines()[0]
    assert heading.startswith("# &lt;script&gt;alert(1)")
    assert hostile.name in (tmp_path / "r.csv").read_text()
    assert (
        json.loads((tmp_path / "r.json").read_text())["study"]["question"]["model"]["name"]
        == hostile.name
    )


def test_what_cannot_be_read_is_refused_as_show_refuses_it(highwater, tmp_path):
    (tmp_path / "p.jsonl").write_text("no study\n")
    for name in ("p.jsonl", "none.jsonl"):
        assert refusal(highwater("report", name), 2) == refusal(highwater("show", name), 2)
