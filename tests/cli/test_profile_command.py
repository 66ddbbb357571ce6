"""``highwater profile`` as a user runs it."""

import json
from pathlib import Path

from conftest import following, offered, refusal

from highwater.units import MIB

FOLDER = Path(__file__).parents[1] / "data" / "snapshots"
MEGATRON, TRAINER = (
    str(FOLDER / "snapshot_rank00_p0d1c0t0.pickle"),
    str(FOLDER / "trainer_out_of_memory.pickle"),
)


def test_the_answer_comes_first_and_the_next_command_writes_the_page(highwater, tmp_path):
    printed = highwater("profile", TRAINER)
    assert printed.returncode == 0
    first = printed.stdout.splitlines()[0]
    assert "out of memory" in first
    assert "128.0 MiB" in first
    assert following(printed) == ["profile", TRAINER, "--html", "profile.html"]
    written = highwater(*following(printed))
    assert written.stdout == printed.stdout
    assert (tmp_path / "profile.html").read_text().startswith("<!doctype html>")
    assert highwater(*following(written)).returncode == 0
    problem, hint = refusal(highwater(*following(printed)), 2)
    assert problem.startswith("profile.html is there already")
    assert highwater("profile", TRAINER, *offered(hint)[0]).returncode == 0


def test_two_snapshots_are_side_by_side_in_every_form(highwater, tmp_path):
    table = highwater("profile", MEGATRON, TRAINER).stdout
    assert "rank 0 p0 d1 c0 t0" in table
    row = next(line for line in table.splitlines() if line.startswith("logits"))
    assert row.split()[-6:] == ["40.0", "MiB", "128.0", "MiB", "+88.0", "MiB"]
    document = json.loads(highwater("profile", MEGATRON, TRAINER, "--json").stdout)
    assert document["schema_version"] == 1
    one, other = document["profiles"]
    assert (one["rank"], one["coordinates"], other["rank"]) == (0, ["p0", "d1", "c0", "t0"], None)
    assert other["requested_bytes"] == 128 * MIB
    for each in (one, other):
        assert sum(part["bytes"] for part in each["categories"]) == each["allocated_bytes"]
    assert highwater("profile", MEGATRON, TRAINER, "--html", "two.html").returncode == 0
    assert (tmp_path / "two.html").read_text().count("<svg viewBox") >= 4
    problem, hint = refusal(highwater("profile", MEGATRON, TRAINER, MEGATRON), 2)
    assert problem.startswith("3 snapshots")
    assert highwater(*offered(hint)[0][1:]).returncode == 0


def test_a_snapshot_that_is_not_there_is_refused_with_one_or_how_it_is_made(highwater, tmp_path):
    (tmp_path / "snapshot_rank0.pickle").write_bytes(Path(TRAINER).read_bytes())
    problem, hint = refusal(highwater("profile", "snapshot_rank00.pickle"), 2)
    assert problem == "there is no file snapshot_rank00.pickle"
    assert offered(hint) == [["highwater", "profile", "snapshot_rank0.pickle"]]
    assert highwater(*offered(hint)[0][1:]).returncode == 0
    (tmp_path / "snapshot_rank0.pickle").unlink()
    (tmp_path / "empty").mkdir()
    problem, hint = refusal(highwater("profile", "empty"), 2)
    assert problem == "empty has no memory snapshot"
    assert refusal(highwater("profile", "none.pickle"), 2) == ("there is no file none.pickle", hint)
    (makes,) = offered(hint)
    assert highwater(*makes[1:]).returncode == 0
    assert highwater("profile", makes[-1]).returncode == 0


def test_a_folder_of_ranks_is_shown_by_its_fullest_and_the_others_are_named(highwater, tmp_path):
    """The folder of a step, that of all steps of a trial, and the trial's own."""
    trial = tmp_path / "model_len-4096"
    snapshots = trial / "memory_snapshots"
    for step, ranks in (("step_2", (MEGATRON, TRAINER)), ("step_10", (MEGATRON, TRAINER, None))):
        (snapshots / step).mkdir(parents=True)
        for rank, source in enumerate(ranks):
            content = b"damaged" if source is None else Path(source).read_bytes()
            (snapshots / step / f"snapshot_rank{rank:02d}_d{rank}r0u0.pickle").write_bytes(content)
    shown = str(snapshots / "step_10" / "snapshot_rank01_d1r0u0.pickle")
    for folder in (snapshots / "step_10", snapshots, trial):
        printed = highwater("profile", str(folder))
        assert printed.returncode == 0
        assert printed.stdout == highwater("profile", shown).stdout
        assert "snapshot_rank01_d1r0u0.pickle is shown" in printed.stderr
        assert "snapshot_rank00_d0r0u0.pickle 162.0 MiB" in printed.stderr
        assert "not shown: " in printed.stderr
        assert following(printed)[:2] == ["profile", shown]
    only = highwater("profile", str(snapshots / "step_2"), MEGATRON, "--json")
    assert [each["rank"] for each in json.loads(only.stdout)["profiles"]] == [1, 0]


def test_a_log_is_told_from_a_snapshot_and_the_hint_says_how_one_is_made(highwater, tmp_path):
    log = "step 37: 71.3 GiB\ntorch.OutOfMemoryError: CUDA out of memory – größer\n"
    (tmp_path / "run.log").write_text(log)
    problem, hint = refusal(highwater("profile", "run.log"), 2)
    assert problem == "run.log is a text, such as a log, and no memory snapshot"
    assert "_record_memory_history()" in hint
    assert "_dump_snapshot('snapshot.pickle')" in hint
    (tmp_path / "broken.pickle").write_bytes(bytes(range(256)))
    assert "pickle" in refusal(highwater("profile", "broken.pickle"), 2)[0].partition(": ")[2]
