"""``try --attention-depth`` and ``find --proof memory`` as a user types them: real trials on the
CPU, and refusals.
"""

import json

CPU = ("--device", "cpu", "--memory", "1GiB")


def test_a_memory_only_trial_says_what_it_is_and_shows_no_figure_of_a_training(highwater, tiny):
    words = ("try", str(tiny), "--length", "2048", *CPU, "--attention-depth", "1")
    done = highwater(*words)
    assert done.returncode == 0, done.stderr
    assert "measured, memory-only" in done.stdout
    assert "memory-only fit: memory holds it, nothing was trained" in done.stdout
    assert not any(name in done.stdout for name in ("tokens/s", "MFU", "step time", "loss"))
    assert (
        done.stderr.splitlines()[-1]
        == f"next: highwater find {tiny} {' '.join(CPU)} --proof memory"
    )
    result = json.loads(highwater(*words, "--json").stdout)["result"]
    assert result["outcome"] == "MEMORY_ONLY_FIT"
    assert result["tokens_per_s"] is None
    assert result["mfu"] is None
    assert [
        (rank["losses"], rank["gradient_norms"], rank["step_times_s"]) for rank in result["ranks"]
    ] == [([], [], [])]


def test_a_search_that_proves_by_memory_trains_in_full_what_time_allows(highwater, tiny):
    grid = (
        *("--start-length", "512", "--resolution", "512", "--max-length", "1024", "--loss"),
        "full",
    )
    done = highwater("find", str(tiny), *CPU, *grid, "--proof", "memory", "--json")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert answer["capacity_tokens"] == 1024
    assert answer["memory_only"] is None
    assert answer["limit"] == "ceiling"
    shown = highwater("show").stdout
    assert "trained in full" in shown
    assert "memory-only" in shown


def test_a_study_goes_on_with_more_time_and_less_changes_nothing(highwater, tiny, tmp_path):
    grid = (
        *("--start-length", "512", "--resolution", "512", "--max-length", "1024", "--loss"),
        "full",
    )
    words = (
        "find",
        str(tiny),
        *CPU,
        *grid,
        "--proof",
        "memory",
        "--study",
        "s.jsonl",
        "--json",
        "--timeout",
    )
    first = highwater(*words, "2m")
    assert first.returncode == 0, first.stderr
    for time in ("1m", "4m"):
        again = highwater(*words, time)
        assert again.returncode == 0, again.stderr
        assert "trying" not in again.stderr
        assert json.loads(again.stdout)["answers"] == json.loads(first.stdout)["answers"]
    study = tmp_path / "s.jsonl"
    lines = [json.loads(line) for line in study.read_text().splitlines()]
    kept = lines[: max(i for i, line in enumerate(lines) if line["kind"] == "trial_finished") + 1]
    kept[-1]["result"] |= {"outcome": "TIMEOUT", "reason": "not done after 2m 00s"}
    kept[0]["schema_version"] = 2  # whose lines have no checksums
    for line in kept:
        del line["checksum"]
    study.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    more = highwater(*words, "10m")
    assert more.returncode == 0, more.stderr
    assert "of these 1 ran out of less time than there is now, and may be" in more.stderr
    assert more.stderr.count("trying") == 1
    assert "trying 1,024 tokens" in more.stderr
    document = json.loads(more.stdout)
    assert document["answers"][0]["capacity_tokens"] == 1024
    assert document["question"]["timeout_s"] == 600
    assert {trial["timeout_s"] for trial in document["trials"]} == {120, 600}
