"""``highwater guide`` and ``highwater profile`` as a user runs them."""

import errno
import json
import os
from pathlib import Path

import pytest
from conftest import SIMULATED, SIMULATED_ON_THE_CPU, following, offered, refusal

from highwater.units import MIB
from places import DATA, FOUND

TABLE = str(DATA / "published_capacity_a100_80gb.csv")
A100S = ("--gpus", "2xA100-80GB")


def test_a_guide_is_printed_or_written_and_the_next_command_works(highwater, tmp_path):
    printed = highwater("guide", TABLE)
    assert printed.stdout.startswith(
        "# The longest context that trains, and the simplest settings for it\n"
    )
    assert following(printed) == ["guide", TABLE, "-o", "guide.md"]
    written = highwater(*following(printed))
    assert written.returncode == 0
    assert (tmp_path / "guide.md").read_text() == printed.stdout
    assert written.stdout.startswith("A100-80GB, 1 GPU, ")
    assert written.stderr.startswith("the guide: guide.md\n")
    assert len(json.loads(highwater(*following(written)).stdout)) == 265


def test_a_guide_is_a_page_where_its_name_says_so(highwater, tmp_path):
    assert highwater("guide", TABLE, "-o", "guide.html").returncode == 0
    assert (tmp_path / "guide.html").read_text().startswith("<!doctype html>")
    hint = refusal(highwater("guide", TABLE, "-o", "guide.html"), 2)[1]
    assert offered(hint) == [["-o", "guide-2.html"]]


def test_models_are_predicted_on_several_kinds_of_gpus_beside_a_table(highwater):
    words = ("--predict", "Qwen3-0.6B", "Qwen3-8B", "--gpus", "2xA100-80GB", "1xH200-141GB")
    rows = json.loads(highwater("guide", *words, "--json").stdout)
    assert {(row["gpu"], row["gpus"], row["model"]) for row in rows} == {
        (gpu, gpus, model)
        for gpu, gpus in (("A100-80GB", 2), ("H200-141GB", 1))
        for model in ("Qwen3-0.6B", "Qwen3-8B")
    }
    assert {row["source"] for row in rows} == {"predicted"}
    both = highwater("guide", *words, TABLE, "--json")
    assert (
        json.loads(both.stdout)
        == [row for row in json.loads(both.stdout) if row["source"] == "published"] + rows
    ), "a file after the GPUs is a source"
    ahead = highwater("guide", *A100S, "--predict", "Qwen3-8B", TABLE, "--json")
    assert {row["source"] for row in json.loads(ahead.stdout)} == {"published", "predicted"}


def test_a_prediction_in_a_file_is_a_source_too(highwater, tmp_path):
    words = ("--gpus", "2xA100-80GB")
    (tmp_path / "p.json").write_text(highwater("predict", "Qwen3-8B", *words, "--json").stdout)
    assert json.loads(highwater("guide", "p.json", "--json").stdout) == json.loads(
        highwater("guide", "--predict", "Qwen3-8B", *words, "--json").stdout
    )


@pytest.mark.parametrize("flags", [("--ring", "1", "2"), ("--lora", "16", "--lora-base", "nf4")])
def test_another_setting_of_what_is_predicted_is_offered_as_a_prediction(
    highwater, tmp_path, flags
):
    words = ("guide", TABLE, "--predict", "Qwen3-4B", *A100S, *flags, "-o", "g.md")
    problem, hint = refusal(highwater(*words), 2)
    assert problem == f"unknown flag {flags[0]}"
    (_, *predicted, to, path), (_, *guided) = offered(hint)
    assert predicted == ["predict", "Qwen3-4B", *A100S, *flags, "--json"]
    assert (to, guided) == (">", ["guide", path])
    (tmp_path / path).write_text(highwater(*predicted).stdout)
    assert highwater(*guided).returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host-memory", "512GiB"), "512.00 GiB of host memory"),
        (("--constants", "c.json"), "constants of its own"),
    ],
)
def test_what_a_prediction_assumes_is_refused_with_one_without(highwater, tmp_path, flags, said):
    (tmp_path / "c.json").write_text((FOUND.parent / "predict" / "constants-h200.json").read_text())
    (tmp_path / "prediction.json").write_text(
        highwater("predict", "Qwen3-8B", "--gpus", "2xH200-141GB", *flags, "--json").stdout
    )
    problem, hint = refusal(highwater("guide", "prediction.json"), 2)
    assert problem.startswith("prediction.json ")
    assert said in problem
    without, (_, *predicted, to, path) = offered(hint)
    assert without == [flags[0]]
    assert (to, path) == (">", "prediction-2.json"), "what a user has is not written over"
    (tmp_path / path).write_text(highwater(*predicted).stdout)
    assert highwater("guide", path).returncode == 0


def test_what_a_study_says_of_itself_is_said_again(highwater, tmp_path):
    highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "s.jsonl")
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"kind": "started"')
    done = highwater("guide", "s.jsonl")
    note = "s.jsonl: the last line is not complete"
    assert done.stderr.startswith(f"note: {note}")
    assert note in done.stdout


@pytest.mark.parametrize(
    ("tokens", "code", "label"),
    [("0", 1, "-"), ("", 4, "?"), ("4096", 0, "vanilla")],
    ids=["nothing fits", "unknown", "fits"],
)
def test_the_exit_code_says_whether_anything_fits(highwater, tmp_path, tokens, code, label):
    (tmp_path / "t.csv").write_text(
        f"gpu,settings,gpus,sp,model,max_model_len,yarn\nH20-96GB,vanilla,1,1,Qwen3-8B,{tokens},0\n"
    )
    done = highwater("guide", "t.csv", "--json")
    assert done.returncode == code
    row = json.loads(done.stdout)[0]
    assert row.pop("training").startswith("Trinity-RFT, grpo")
    assert row == {
        "gpu": "H20-96GB",
        "gpus": 1,
        "max_model_len": 4096,
        "model": "Qwen3-8B",
        "settings": label,
        "source": "published",
        "step_time_s": None,
        "tokens_per_s": None,
        "speed_source": None,
    }


def test_what_cannot_be_read_is_refused(highwater, tmp_path):
    for name, kind in (("none.jsonl", ""), ("none.csv", "the table "), ("none.json", "")):
        problem, hint = refusal(highwater("guide", name), 2)
        assert f"{kind}{name} cannot be read" in problem
        assert problem.endswith(f": {os.strerror(errno.ENOENT)}")
    _, *predicted, _, path = offered(hint)[0]
    (tmp_path / path).write_text(highwater(*predicted).stdout)
    assert highwater("guide", path).returncode == 0
    (tmp_path / "p.json").write_text("{}")
    problem, hint = refusal(highwater("guide", "p.json"), 2)
    assert problem.startswith("p.json is not a ")
    assert offered(hint)[0][-2:] == [">", "prediction-2.json"], (
        "neither p.json nor prediction.json is written over"
    )


def test_a_file_that_is_no_source_is_refused_with_what_is_read(highwater, tmp_path):
    (tmp_path / "README.md").write_text("# mine\n")
    problem, hint = refusal(highwater("guide", "README.md"), 2)
    assert problem.startswith("README.md ")
    assert ".csv" in hint
    *_, predicted, made = offered(hint)
    assert predicted == ["highwater", "predict", "--json"]
    assert highwater(*made[1:]).returncode == 0


def test_a_search_on_the_cpu_is_refused(highwater):
    highwater("find", "tiny", *SIMULATED_ON_THE_CPU, "--study", "s.jsonl")
    problem, hint = refusal(highwater("guide", "s.jsonl"), 2)
    assert problem.startswith("s.jsonl ")
    assert highwater(*offered(hint)[0][1:], "--json").returncode == 0


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
