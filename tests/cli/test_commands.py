"""``try``, ``show``, ``report``, ``doctor`` and ``schema``."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import FORKING, SIMULATED, following, offered, refusal

from highwater import study_report
from highwater.api.search import open_study
from highwater.model.model_place import catalog_names, model_catalog
from highwater.nouns.hardware import gpu_catalog
from places import DATA, FOUND, ROOT, script
from tiny_models import write_model


@pytest.mark.parametrize(
    ("length", "code", "outcome"), [("8k", 0, "FIT"), ("1m", 1, "OUT_OF_MEMORY")]
)
def test_one_trial_says_how_it_ended_by_its_exit_code(highwater, length, code, outcome):
    done = highwater("try", "Qwen3-0.6B", "--length", length, *SIMULATED)
    assert done.returncode == code
    does = "Yes: Qwen3-0.6B trains " if code == 0 else "No: Qwen3-0.6B does not train "
    assert done.stdout.startswith(does)
    assert "simulated, nothing was trained" in done.stdout.partition("\n\n")[0]
    assert not re.search(r" -$", done.stdout, re.MULTILINE), "what nobody measured is left out"
    assert re.search(rf"^outcome +{outcome}$", done.stdout, re.MULTILINE)
    assert following(done)[:2] == ["find", "Qwen3-0.6B"]
    as_json = highwater("try", "Qwen3-0.6B", "--length", length, *SIMULATED, "--json")
    document = json.loads(as_json.stdout)
    assert as_json.returncode == code
    assert (document["schema_version"], document["result"]["outcome"]) == (1, outcome)


def test_a_study_is_shown_as_a_table_as_published_as_lines_and_as_json(highwater, tmp_path):
    found = highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/m/study-1.jsonl")
    assert highwater("show").stdout == found.stdout
    published = highwater("show", "logs/m/study-1.jsonl", "--as", "published")
    assert published.stdout.splitlines()[1] == "#GPU | SP | Qwen3-0.6B"
    lines = highwater("show", "--as", "lines").stdout.splitlines()
    assert len(lines) == len(found.stdout.split("\n\n")[2].splitlines()) - 1
    fields = dict(field.split(" = ") for field in lines[0].split(", "))
    assert int(fields.pop("max_model_len")) > 0
    assert fields == {"model_name": "Qwen3-0.6B", "trainer_gpu_num": "1", "sp_num": "1"}
    document = json.loads(highwater("show", "--as", "json").stdout)
    assert document["path"] == "logs/m/study-1.jsonl"
    assert len(document["trials"]) >= 3, "two around an edge, one where lengths end"
    assert all(trial["result"]["simulated"] for trial in document["trials"])


def test_without_a_name_the_newest_study_is_shown(highwater):
    for model in ("Qwen3-0.6B", "Qwen3-1.7B"):
        highwater("find", model, *SIMULATED, "--study", f"elsewhere/{model}/study-1.jsonl")
    assert highwater("show", "--log-dir", "elsewhere").stdout.startswith("Qwen3-1.7B")


def test_a_study_that_cannot_be_read_hides_no_other(highwater, tmp_path):
    found = highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/m/study-1.jsonl")
    broken = tmp_path / "logs" / "m" / "study-2.jsonl"
    broken.write_text("not a study\n")
    problem, hint = refusal(highwater("show", str(broken)), 2)
    assert problem.startswith(f"{broken} ")
    shown = highwater(*offered(hint)[0][1:])
    assert (shown.returncode, shown.stdout) == (0, found.stdout)
    (note,) = (line for line in shown.stderr.splitlines() if line.startswith("note: "))
    assert "logs/m/study-2.jsonl" in note
    (tmp_path / "logs" / "m" / "study-1.jsonl").unlink()
    assert " under logs " in refusal(highwater("show"), 2)[0]


def test_the_search_after_a_trial_has_the_flags_of_the_trial(highwater, tmp_path):
    (tmp_path / "t.yaml").write_text("memory: 80GiB\n")
    flags = (
        *("--config", "t.yaml", "--device", "cuda", "--gpus", "2", "--loss", "full", "--rope"),
        *("yarn", "--log-dir", "my logs"),
    )
    done = highwater("try", "--length", "8k", "Qwen3-0.6B", *flags, "--dry-run")
    assert following(done) == ["find", "Qwen3-0.6B", *flags]
    assert highwater(*following(done), "--dry-run").returncode == 0


def test_several_studies_share_a_published_table(highwater):
    for name, model in (("a.jsonl", "Qwen3-0.6B"), ("b.jsonl", "Qwen3-1.7B")):
        highwater("find", model, *SIMULATED, "--study", name)
    shown = highwater("show", "a.jsonl", "b.jsonl", "--as", "published").stdout
    assert shown.splitlines()[1].split(" | ")[2:] == ["Qwen3-0.6B", "Qwen3-1.7B"]
    _, hint = refusal(highwater("show", "a.jsonl", "b.jsonl", "--as", "json"), 2)
    assert ["highwater", "show", "a.jsonl", "--as", "json"] in offered(hint)


def test_a_search_that_was_cut_short_is_shown_with_the_command_that_resumes_it(highwater, tmp_path):
    command = ("find", "Qwen3-0.6B", *SIMULATED, "--study", "s.jsonl")
    highwater(*command)
    lines = (tmp_path / "s.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "s.jsonl").write_text("".join(lines[:6]))
    shown = highwater("show", "s.jsonl")
    assert "not searched yet" in shown.stdout
    assert following(shown) == list(command)
    copy = tmp_path / "a copy.jsonl"
    copy.write_text((tmp_path / "s.jsonl").read_text())
    for reader in ("show", "report"):
        words = following(highwater(reader, "a copy.jsonl"))
        assert words[-2:] == ["--study", "a copy.jsonl"]
    (tmp_path / "s.jsonl").unlink()
    assert highwater(*words).returncode == 0
    assert "not searched yet" not in highwater("show", "a copy.jsonl").stdout
    highwater(*command)
    assert "not searched yet" not in highwater("show", "s.jsonl").stdout


def test_the_doctor_says_what_is_here_and_what_to_do(highwater):
    done = highwater("doctor")
    assert "no GPU is visible" in done.stdout
    assert "host memory" in done.stdout
    document = json.loads(highwater("doctor", "--json").stdout)
    assert document["machine"]["gpus"] == []
    assert document["machine"]["host_memory_total_bytes"] > 0
    assert done.returncode == 0
    assert {each["what"] for each in document["features"] if not each["obstacles"]} == {
        line.rpartition("  yes")[0].strip()
        for line in done.stdout.splitlines()
        if line.endswith("  yes")
    }
    words = following(done)
    assert highwater(*words, *(("--dry-run",) if words[0] == "find" else ())).returncode == 0


def test_the_published_schema_is_current(highwater):
    printed = highwater("schema").stdout
    assert json.loads(printed)["$defs"]["Request"]["additionalProperties"] is False
    assert (ROOT / "docs" / "study.schema.json").read_text() == printed, (
        "`highwater schema > docs/study.schema.json` renews it"
    )


def test_every_model_is_listed_with_its_id_and_its_source(highwater):
    done = highwater("models")
    assert done.returncode == 0
    for model in model_catalog():
        assert any(
            line.split()[:2] == [model.name, model.hub_id or "-"]
            for line in done.stdout.splitlines()
        )
    listed = json.loads(highwater("models", "--json").stdout)["models"]
    assert sorted(each["model"]["name"] for each in listed) == catalog_names()
    assert all(each["model"]["source"] and each["shape"]["layers"] for each in listed)
    assert highwater(*following(done)).returncode == 0


def test_every_kind_of_gpu_is_listed_with_its_source(highwater):
    done = highwater("gpus")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for kind in gpu_catalog():
        assert any(line.split()[:1] == [kind.name] for line in lines)
        assert f"{kind.name}: {kind.source}" in lines
    listed = json.loads(highwater("gpus", "--json").stdout)["gpus"]
    assert [each["name"] for each in listed] == [kind.name for kind in gpu_catalog()]
    assert highwater(*following(done)).returncode == 0


def test_a_list_has_the_names_with_the_words_that_were_typed(highwater):
    listed = json.loads(highwater("models", "QWEN3", "8b", "--json").stdout)["models"]
    assert "Qwen3-8B" in [each["model"]["name"] for each in listed]
    assert all("qwen3" in each["model"]["name"].lower() for each in listed)
    assert highwater("gpus", "v100").returncode == 0


EXAMPLES = ROOT / "examples"
TIME_LIMIT_S = 420
"""Far more than the demo takes alone: other tests share the cores."""


@pytest.mark.timeout(TIME_LIMIT_S)
def test_the_demo_answers_with_pairs_of_real_trials_and_leaves_what_is_there(tmp_path, fork_server):
    others = {path.name for path in tmp_path.iterdir()}
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "demo" / "1").mkdir(parents=True)
    demo = f"-c{FORKING}import runpy\nrunpy.run_path('examples/demo.py', run_name='__main__')"
    done = fork_server.run(demo, within_s=TIME_LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    capacities = re.findall(
        r"^model_name = tiny, trainer_gpu_num = 1, sp_num = 1, max_model_len = (\d+)$",
        done.stdout,
        re.M,
    )
    assert len(capacities) == 1
    assert 256 <= int(capacities[0]) <= 1024
    assert re.search(r"^checked: .* demo/2/study\.jsonl: one fit, ", done.stdout, re.MULTILINE)
    study = open_study(tmp_path / "demo" / "2" / "study.jsonl")
    assert script(EXAMPLES / "demo.py").doubts_about(study) == [], "what the demo itself says"
    assert re.search(r"^checked: demo/2/run was trained on 1 process", done.stdout, re.MULTILINE)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "demo/2/run/statistics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 2
    assert all(10 < loss < 14 for loss in losses), "the logarithm of 151,936 is 11.9"
    found = study_report(tmp_path / "demo" / "2" / "study.jsonl")
    assert [
        where.versions["torch"] == found.versions["torch"][0] for where in found.study.environments
    ] == [True]
    assert all("memory" in failed.log.lines[-1] for failed in found.failures), "the logs' own words"
    assert {path.name for path in tmp_path.iterdir()} - others == {"demo", "examples"}
    assert list((tmp_path / "demo" / "1").iterdir()) == []


FOUND_STUDY = str(FOUND / "qwen3-0.6b-79gib-full.jsonl")


def test_a_report_is_printed_or_written_and_the_next_command_works(highwater, tmp_path):
    printed = highwater("report", FOUND_STUDY)
    assert printed.returncode == 0
    assert printed.stdout.startswith("# Qwen3-0.6B on NVIDIA H200, 79.15 GiB per GPU\n")
    assert following(printed) == ["report", FOUND_STUDY, "-o", "report.html"]
    written = highwater(*following(printed))
    assert written.returncode == 0
    assert written.stderr.startswith("the report: report.html\n")
    assert written.stdout == highwater("show", FOUND_STUDY).stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert highwater(*following(written)).returncode == 0


UNPREDICTED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 512,
}
"""A model that trains, and whose layers nobody has traced."""


@pytest.mark.parametrize(("length", "placement"), [("64k", "gpu"), ("320k", "host")])
def test_a_trial_says_which_placement_it_takes(highwater, length, placement):
    asked = ("try", "Qwen3-4B", "--lora", "16", "--length", length, "--loss", "chunked")
    memory = ("--host-memory", "512GiB", "--allocator", "expandable")
    done = highwater(*asked, *memory, *SIMULATED, "--activations", "auto")
    assert done.returncode == 0
    assert f"note: `--activations auto` is `--activations {placement}` here" in done.stderr
    assert ("activations on host" in done.stdout) == (placement == "host")
    assert highwater(*following(done), "--dry-run").returncode == 0


def test_auto_of_a_model_that_nobody_predicts_is_refused(highwater, tmp_path):
    model = str(write_model(tmp_path / "model", **UNPREDICTED))
    asked = ("try", model, "--length", "64", *SIMULATED, "--activations", "auto")
    problem, hint = refusal(highwater(*asked), 2)
    assert "no prediction knows" in problem
    assert "`auto` is by prediction" in hint
    for words in offered(hint)[:2]:
        assert highwater("find", model, *words, "--print-config").returncode == 0


SNAPSHOT = sorted((DATA / "snapshots").glob("*.pickle"))[0]
WRITERS = {
    "report": "report study.jsonl -o {}.html",
    "report as CSV": "report study.jsonl -o {}.csv",
    "guide": "guide study.jsonl -o {}.html",
    "guide as Markdown": "guide --predict tiny --gpus H200-141GB -o {}.md",
    "profile": "profile snapshot.pickle --html {}.html",
    "timeline": "predict tiny --gpus H200-141GB --length 4k --exact --timeline {}.pickle",
}


@pytest.fixture(autouse=True)
def things(simulated: Path, tmp_path: Path) -> None:
    shutil.copy(simulated, tmp_path / "study.jsonl")
    shutil.copy(SNAPSHOT, tmp_path / "snapshot.pickle")


def words_of(writer: str, path: str) -> list[str]:
    return [word.format(path) for word in WRITERS[writer].split()]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_place_that_cannot_be_written_is_refused(highwater, tmp_path, writer):
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
