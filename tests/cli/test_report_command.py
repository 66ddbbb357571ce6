"""``highwater report`` as a user runs it."""

from pathlib import Path

from conftest import SIMULATED_ON_THE_CPU, following, refusal

ROOT = Path(__file__).parents[2]
REAL = str(ROOT / "docs" / "results" / "find" / "qwen3-0.6b-79gib-full.jsonl")


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


def test_a_search_on_the_cpu_is_reported_without_what_is_about_gpus(highwater):
    highwater("find", "tiny", *SIMULATED_ON_THE_CPU, "--study", "s.jsonl")
    done = highwater("report", "s.jsonl")
    assert done.returncode == 0
    assert "trials ran on the CPU" in done.stdout
    assert "data segment" in done.stdout


def test_what_cannot_be_read_is_refused_as_show_refuses_it(highwater, tmp_path):
    (tmp_path / "p.jsonl").write_text("no study\n")
    for name in ("p.jsonl", "none.jsonl"):
        assert refusal(highwater("report", name), 2) == refusal(highwater("show", name), 2)
