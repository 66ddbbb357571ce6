"""``highwater report`` as a user runs it."""

from conftest import following

from places import FOUND

REAL = str(FOUND / "qwen3-0.6b-79gib-full.jsonl")


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
