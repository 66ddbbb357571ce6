"""``highwater predict`` as a user runs it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import SIMULATED, Run, refusal

FOUND = Path(__file__).parents[2] / "docs" / "results" / "find"
PUBLISHED_A100 = Path(__file__).parents[1] / "data" / "published_capacity_a100_80gb.csv"
A100S = ("--gpus", "4xA100-80GB")


def test_capacities_are_predicted_for_gpus_that_are_not_here(highwater: Run) -> None:
    done = highwater("predict", "Qwen3-8B", *A100S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Qwen3-8B on 4 x A100-80GB, 79.15 GiB each: predicted by formula, nothing was run\n")
    assert "high-water mark: " in done.stdout
    assert done.stdout.rstrip().endswith(", predicted")
    assert "measured" not in done.stdout
    assert done.stderr == "next: highwater predict Qwen3-8B --gpus 4xA100-80GB --explain\n"


def test_a_length_turns_it_round_and_the_first_rung_that_fits_is_explained(highwater: Run) -> None:
    done = highwater("predict", "Qwen3-8B", "--gpus", "1xH200-141GB", "--length", "64k", "--explain")
    assert done.returncode == 0, done.stderr
    table, explained = done.stdout.split("bytes by term: predicted")
    rows = [re.split(" {2,}", line) for line in table.splitlines() if re.search(r" 1 +1 +(yes|no) ", line)]
    assert {row[0]: row[3] for row in rows} == {
        "vanilla": "no",
        "Env": "no",
        "Env + chunked": "no",
        "Env + Offload": "yes",
        "Env + Offload + chunked": "yes",
    }
    assert table.rstrip().endswith("Env + Offload, 1 GPU,")
    assert "(the peak)" in explained
    settings = "--allocator expandable --loss full --offload"
    assert done.stderr == f"next: highwater try Qwen3-8B --gpus 1 --ulysses 1 --length 65536 {settings}\n"
    assert "65,536* tokens: predicted" in table
    assert "* past the native length of 40,960: YaRN" in table
    tried = highwater(*done.stderr.split()[2:], "--device", "cuda", "--memory", "139.8GiB", "--dry-run")
    assert tried.returncode == 0, "what was said to fit is what is tried"


def test_the_terms_of_the_peak_and_what_is_besides_add_up(highwater: Run) -> None:
    done = highwater("predict", "Qwen3-8B", "--gpus", "4xH100-80GB", "--length", "64k", "--explain")
    lines = done.stdout.split("bytes by term: predicted")[1].strip().splitlines()
    table, footnote = lines[1:-2], lines[-1]
    parts = {line[:31].strip(): index for index, line in enumerate(table) if line[:31].strip()}
    ends = dict(zip(parts, [*list(parts.values())[1:], len(table)], strict=True))
    added = [name for name in parts if "(the peak)" in name or name in ("reserved besides", "outside the allocator")]
    figures = [float(line.split()[-1]) for name in added for line in table[parts[name] : ends[name]]]
    assert "kept until memory runs short" in done.stdout
    assert sum(figures) == pytest.approx(float(footnote.split()[0]), abs=0.006 * len(figures))


def test_nothing_that_fits_is_answered_no(highwater: Run) -> None:
    done = highwater("predict", "Qwen3-32B", "--gpus", "RTX-3090", "--allocator", "native")
    assert done.returncode == 1
    assert "none" in done.stdout


def test_a_prediction_is_one_document(highwater: Run) -> None:
    document = json.loads(highwater("predict", "Qwen3-4B", *A100S, "--json").stdout)
    assert document["schema_version"] == 1
    assert document["method"] == "formula"
    first = document["cells"][0]
    assert first["capacity_tokens"] < first["does_not_fit_tokens"]
    assert {phase["name"] for phase in first["footprint"]["phases"]} == {
        *("loss", "backward of the last layer", "backward of a layer", "reduction of embedding and head")
    }


def test_each_prediction_is_an_interval_and_says_what_it_promises(highwater: Run) -> None:
    done = highwater("predict", "Qwen3-8B", *A100S)
    heading, row = done.stdout.splitlines()[2:4]
    assert re.search(r"capacity +likely +ended by +predicted GPU memory +headroom, at least", heading)
    assert re.search(r"\d GiB to \d+\.\d\d GiB", row)
    assert "each end is to hold for 95 % of trials like those it was learned from" in done.stdout
    assert "native, 15 trials: 0." in done.stdout
    assert "NVIDIA H200; 1 GPU; grpo, sft, Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B" in done.stdout
    assert "below 19 trials no count gives 95 %, so the ends are the extremes, widened" in done.stdout
    assert "nobody knows its coverage there: A100-80GB, Qwen3-8B, 4 GPUs, Ulysses, offload" in done.stdout
    document = json.loads(highwater("predict", "Qwen3-8B", *A100S, "--json").stdout)
    assert document["calibration"]["coverage"] == 0.95
    for cell in document["cells"]:
        assert cell["interval"]["low_bytes"] < cell["interval"]["high_bytes"] <= document["room"]["device_bytes"]
        assert (cell["interval"]["coverage"], cell["interval"]["is_widened"]) == (0.95, True)
        assert cell["interval"]["residuals"] == {"native": 15, "expandable": 14}[cell["cell"]["settings"]["allocator"]]
        assert cell["capacity_tokens"] <= cell["likely_tokens"]


def test_another_trainers_prediction_has_no_interval_and_says_so(highwater: Run) -> None:
    done = highwater("predict", "Qwen3-8B", *A100S, "--trainer", "trinity")
    assert "a prediction without an interval" in done.stdout
    assert not re.search(r"GiB to|likely|learned", done.stdout)


def test_own_trials_are_learned_from(highwater: Run) -> None:
    shipped = str(FOUND / "qwen3-0.6b-79gib-full.jsonl")
    alone = highwater("predict", "Qwen3-0.6B", "--gpus", "H200-141GB")
    for words in (("Qwen3-0.6B", "--calibrate", shipped, shipped), ("--calibrate", shipped, "Qwen3-0.6B")):
        again = highwater("predict", *words, "--gpus", "H200-141GB")
        assert again.returncode == 0, again.stderr
        assert again.stdout == alone.stdout, "these trials come along: they count once"
    explained = shlex.split(again.stderr.removeprefix("next: highwater "))
    assert highwater(*explained).returncode == 0


def test_what_no_prediction_learns_from_is_refused_with_a_hint_that_works(highwater: Run, tmp_path: Path) -> None:
    real, simulated = str(FOUND / "qwen3-0.6b-79gib-full.jsonl"), str(tmp_path / "simulated.jsonl")
    search = ("find", "tiny", "--device", "cuda", "--memory", "80GiB", "--dry-run", "--max-length", "8k", "--study", simulated)
    assert highwater(*search).returncode == 0
    asked = ("predict", "Qwen3-8B", *A100S)
    problem, hint = refusal(highwater(*asked, "--calibrate", simulated), 2)
    assert problem == f"{simulated} is of simulated trials: nothing was measured"
    assert hint.startswith(f"leave `--calibrate {simulated}` out, or name a study")
    assert refusal(highwater(*asked, "--exact", "--calibrate", simulated), 2)[0] == problem
    problem, hint = refusal(highwater(*asked, "--trainer", "trinity", "--calibrate", real), 2)
    assert hint == "leave `--trainer` out"
    problem, hint = refusal(highwater("predict", "--against", str(PUBLISHED_A100), "--calibrate", real), 2)
    assert hint == "leave `--calibrate` out"
    assert highwater(*asked, "--calibrate", real).returncode == 0


def test_own_constants_are_named_in_the_answer_and_kept_in_the_next_command(highwater: Run, tmp_path: Path) -> None:
    constants = str(FOUND.parent / "predict" / "constants-h200.json")
    words = ("predict", "Qwen3-8B", "--gpus", "2xH200-141GB", "--constants", constants)
    done = highwater(*words)
    assert done.returncode == 0, done.stderr
    assert "context, cuBLAS and NCCL as measured on NVIDIA H200: torch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, cuDNN" in done.stdout
    assert done.stderr == f"next: highwater {shlex.join(words)} --explain\n"
    assert json.loads(highwater(*words, "--json").stdout)["room"]["constants"]["device_name"] == "NVIDIA H200"
    (tmp_path / "printed.json").write_text(highwater("doctor", "--json").stdout)
    for file, said in (("printed.json", "has no readings: it was printed without `--measure`"), ("none.json", "cannot be read")):
        problem, hint = refusal(highwater("predict", "Qwen3-8B", *A100S, "--constants", str(tmp_path / file)), 2)
        assert said in problem
        assert hint.startswith("leave `--constants` out, or make the file where the GPUs are: `highwater doctor --measure --json")
    assert (
        refusal(highwater("predict", "--against", str(PUBLISHED_A100), "--constants", constants), 2)[1] == "leave `--constants` out"
    )


def test_predictions_are_scored_against_a_table(highwater: Run, tmp_path: Path) -> None:
    heading, *rows = PUBLISHED_A100.read_text().splitlines()
    few = tmp_path / "few.csv"
    few.write_text("\n".join((heading, *(row for row in rows if ",1,1,Qwen3" in row))) + "\n")
    words = ("predict", "--trainer", "trinity", "--against", str(few))
    document = json.loads(highwater(*words, "--json").stdout)
    assert document["per_settings"][1] == {"settings": "env", "cells": 5, "exact": 4, "within_one_step": 5}
    done = highwater(*words)
    assert done.returncode == 0
    assert "within one step" in done.stdout
    assert "10 of 15 cells by replay of a trace that comes with the package, the others by formula" in done.stdout
    assert (document["replayed_cells"], document["formula_cells"]) == (10, 5)


HEADING = "gpu,settings,gpus,sp,model,max_model_len\n"


def test_a_table_says_when_no_cell_is_replayed_and_may_name_directories(highwater: Run, tmp_path: Path, tiny: Path) -> None:
    other = tmp_path / "other" / tiny.name
    other.mkdir(parents=True)
    (other / "config.json").write_text(
        (tiny / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 4')
    )
    rows = (f"A100-80GB,vanilla,3,1,{model},4096\n" for model in ("Qwen3-4B", "./tiny", other))
    (tmp_path / "few.csv").write_text(HEADING + "".join(rows))
    done = highwater("predict", "--trainer", "trinity", "--against", "few.csv")
    assert done.returncode == 0, done.stderr
    assert "no cell by replay of a trace that comes with the package: all 3 by formula" in done.stdout
    assert "vanilla, A100-80GB, ./tiny, 3 GPUs: known 4,096" in done.stdout
    assert f"vanilla, A100-80GB, {other}, 3 GPUs: known 4,096" in done.stdout
    assert done.stderr == "next: highwater predict --trainer trinity --against few.csv --json\n"


def test_a_table_of_a_gpu_that_no_catalog_has_is_compared_by_its_memory(highwater: Run, tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text(HEADING + "A6000,env,1,1,Qwen3-0.6B,4096\n")
    words = ("predict", "--against", "few.csv")
    problem, hint = refusal(highwater(*words), 2)
    assert problem == "the memory of A6000 is not in the catalog"
    assert highwater(*words, *hint.split("`")[1].split()).returncode == 0
    large, small, shared = (
        highwater(*words, "--gpu-memory", "48GiB", *more).stdout
        for more in ((), ("--state-bytes-per-param", "64"), ("--reserved", "30GiB"))
    )
    assert len({large, small, shared}) == 3
    assert refusal(highwater(*words, "--gpu-memory", "0"), 2)[0].startswith("a GPU with a memory of 0.0 MiB")


@pytest.mark.parametrize("flags", ["--ulysses 2", "--offload", "--loss full", "--resolution 4k", "--margin 2GiB", "--explain"])
def test_what_a_tables_rows_say_cannot_be_said_beside_it(highwater: Run, flags: str) -> None:
    _, hint = refusal(highwater("predict", "--against", str(PUBLISHED_A100), *flags.split()), 2)
    assert hint == f"leave `{flags.split()[0]}` out"


@pytest.mark.parametrize(
    ("gpus", "hint"),
    [
        ("4xA6000 --gpu-memory 48GiB", "name its memory, `--gpus 4 --gpu-memory 48GiB`"),
        ("4xH2000 --gpu-memory 139.8GiB", "name its memory, `--gpus 4 --gpu-memory 139.8GiB`"),
        ("8xMI300X", "name its memory, `--gpus 8 --gpu-memory 80GiB`"),
        ("GH200", "name its memory, `--gpus 1 --gpu-memory 80GiB`"),
        ("RTX-PRO-6000", "name its memory, `--gpus 1 --gpu-memory 80GiB`"),
        ("RTX-5090", "use `--gpus 1xRTX-4090`"),
        (
            "2xH20-141GB",
            "use `--gpus 2xH20-96GB`; for one of 141 GB `--gpus 2 --gpu-memory 141GiB`, or what its driver reports",
        ),
        ("H20-141GB --gpu-memory 139GiB", "name its memory, `--gpus 1 --gpu-memory 139GiB`"),
        ("H100-94GB", "use `--gpus 1xH100-94GB-NVL`"),
    ],
)
def test_a_gpu_of_no_catalog_is_hinted_at_by_its_memory_and_no_far_name_is_offered(highwater: Run, gpus: str, hint: str) -> None:
    assert refusal(highwater("predict", "Qwen3-0.6B", "--gpus", *gpus.split()), 2)[1] == hint
    for offered in re.findall(r"`(--gpus [^`]*)`", hint):
        assert highwater("predict", "Qwen3-0.6B", *offered.split()).returncode == 0


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ("--gpu-memory 79.15", "79.15GiB"),
        ("--gpu-memory 81920", "81920MiB"),
        ("--reserved 20", "20GiB"),
        ("--host-memory 512", "512GiB"),
        ("--margin 2", "2GiB"),
    ],
)
def test_a_memory_without_its_unit_is_refused_and_the_hint_has_it(highwater: Run, flags: str, meant: str) -> None:
    words = ("predict", "Qwen3-0.6B", *A100S)
    problem, hint = refusal(highwater(*words, *flags.split()), 2)
    assert problem == f"a memory size of {flags.split()[1]} bytes"
    assert hint == f"give the unit: `{meant}`"
    assert highwater(*words, flags.split()[0], meant).returncode == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ((*A100S, "--gpu-memory", "0"), "give its own, for example `--gpu-memory 80GiB`"),
        (("--gpus", "4", "--gpu-memory", "0"), "give its own, for example `--gpu-memory 80GiB`"),
        ((*A100S, "--host-memory", "0"), "give the machine's, for example `--host-memory 512GiB`, or leave it out"),
    ],
)
def test_no_memory_at_all_is_refused(highwater: Run, words: tuple[str, ...], hint: str) -> None:
    assert refusal(highwater("predict", "Qwen3-0.6B", *words), 2)[1] == hint
    assert highwater("predict", "Qwen3-0.6B", *A100S, *hint.split("`")[1].split()).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no model is named"),
        (("Qwen3-8B",), "no GPU is here, and none is named"),
        (("Qwen3-8B", "--gpus", "4xA100-70GB"), "the catalog has no GPU 'A100-70GB'"),
        (("Qwen3-8B", *A100S, "--ulysses", "3"), "3 does not divide 4 GPUs"),
        (("Qwen3-8B", *A100S, "--length", "many"), "'many' is not a length in tokens"),
        (("Qwen3-8B", *A100S, "--gpu-memory", "80GB"), "decimal or unclear unit"),
        (("Qwen3-8B", *A100S, "--reserved", "90GiB"), "90.00 GiB are reserved"),
        (("--against", "none.csv"), "the table none.csv cannot be read: No such file or directory"),
        (("--against", "none.csv", "Qwen3-8B"), "names its models"),
    ],
)
def test_what_cannot_be_predicted_is_refused(highwater: Run, words: tuple[str, ...], said: str) -> None:
    problem, _ = refusal(highwater("predict", *words), 2)
    assert said in problem


@pytest.mark.parametrize("trainer", ["highwater", "trinity"])
def test_a_token_budget_is_predicted_beside_no_number_of_sequences(highwater: Run, trainer: str) -> None:
    words = ("predict", "Qwen3-0.6B", *A100S, "--trainer", trainer)
    budget, sequences = ("--token-budget", "64k"), ("--sequences-per-micro-batch", "2")
    problem, hint = refusal(highwater(*words, *budget, *sequences), 2)
    assert problem == "--sequences-per-micro-batch and --token-budget: both say how many sequences a micro-batch has"
    assert hint == "leave `--sequences-per-micro-batch` or `--token-budget` out"
    assert [highwater(*words, *alone).returncode for alone in (budget, sequences)] == [0, 0]


@pytest.mark.parametrize(("name", "meant"), [("4xH2000", "4xH200-141GB"), ("8xh100x", "8xH100-80GB"), ("B300", "1xB200")])
def test_an_unknown_gpu_is_answered_with_the_one_whose_name_begins_alike(highwater: Run, name: str, meant: str) -> None:
    _, hint = refusal(highwater("predict", "Qwen3-0.6B", "--gpus", name), 2)
    assert hint == f"use `--gpus {meant}`"
    assert highwater("predict", "Qwen3-0.6B", *hint.split("`")[1].split()).returncode == 0


@pytest.mark.parametrize("words", [("--gpus", "4xA100-70GB"), ("--gpus", "H200-141GB-NVL"), ()])
def test_the_flags_in_a_hint_work(highwater: Run, words: tuple[str, ...]) -> None:
    _, hint = refusal(highwater("predict", "Qwen3-8B", *words), 2)
    flags = hint.split("`")[1].split()
    kept = words if flags[0] == "--gpu-memory" else ()
    assert highwater("predict", "Qwen3-8B", *kept, *flags).returncode == 0


def test_the_next_command_keeps_the_settings_that_were_typed_word_by_word(highwater: Run) -> None:
    words = ("predict", "Qwen3-0.6B", "--gpus", "1xA100-80GB", "--ulysses", "1", "--sequences-per-micro-batch", "1")
    first = highwater(*words).stderr
    assert first == f"next: highwater {' '.join(words)} --explain\n"
    then = highwater(*first.split()[2:]).stderr
    of_the_mark = "--ulysses 1 --allocator expandable --offload"
    assert then == f"next: highwater find Qwen3-0.6B --gpus 1 {of_the_mark} --sequences-per-micro-batch 1\n"
    offered = (*then.split()[2:], "--device", "cuda", "--memory", "80GiB", "--dry-run")
    assert highwater(*offered).returncode == 0


@pytest.mark.parametrize(
    ("words", "then"),
    [
        ("Qwen3-8B --gpus 4xA100-80GB", "find Qwen3-8B --gpus 4 --ulysses 4 --allocator expandable --offload"),
        ("--gpus 4xA100-80GB --ulysses 2 Qwen3-8B", "find Qwen3-8B --gpus 4 --ulysses 2 --allocator expandable --offload"),
        (
            "Qwen3-32B --gpus RTX-3090 --allocator native --token-budget 8k",
            "recommend Qwen3-32B --gpus RTX-3090 --allocator native --length 4096",
        ),
        (
            "Qwen3-8B --gpus 4 --gpu-memory 48GiB --trainer trinity --length 8k",
            "predict Qwen3-8B --gpus 4 --length 8k --gpu-memory 48GiB",
        ),
    ],
)
def test_the_command_after_an_explanation_works_and_has_the_settings_of_the_mark(highwater: Run, words: str, then: str) -> None:
    done = highwater("predict", *words.split(), "--explain")
    following = done.stderr.splitlines()[-1].removeprefix("next: highwater ")
    assert following == then
    simulated = SIMULATED if then.startswith("find") else ()
    assert highwater(*shlex.split(following), *simulated).returncode in (0, 1)


def test_a_star_says_past_the_native_length_only_where_there_is_one(highwater: Run) -> None:
    for length, starred in (("32k", False), ("64k", True)):
        table = highwater("predict", "Qwen3-8B", *A100S, "--length", length).stdout
        assert ("past the native length" in table) == ("*" in table.splitlines()[0]) == starred


@pytest.mark.parametrize(
    ("words", "accuracy", "note"),
    [
        (("Llama-3.1-8B", *A100S), "by the closed form, fitted", "no cell by replay of a trace that comes with the package: all 9"),
        (("Qwen3-0.6B", *A100S, "--allocator", "native"), "by replay of a trace, which has", "3 of 3 cells by replay"),
        (("Qwen3-0.6B", *A100S), "; the others by the closed form, fitted", "6 of 9 cells by replay"),
    ],
)
def test_another_trainers_accuracy_is_that_of_what_answered(
    highwater: Run, words: tuple[str, ...], accuracy: str, note: str
) -> None:
    done = highwater("predict", *words, "--trainer", "trinity")
    assert accuracy in done.stdout
    assert ("69 of 80 cells" in done.stdout) == ("closed form" in accuracy)
    assert ("39 of 40 cells" in done.stdout) == ("replay" in done.stdout)
    assert "72 of 80" not in done.stdout
    assert f"note: {note}" in done.stderr


def test_a_timeline_needs_a_trace_and_a_new_file(highwater: Run, tmp_path: Path) -> None:
    words = ("predict", "tiny", "--gpus", "A100-80GB", "--length", "4096", "--timeline")
    taken = tmp_path / "taken.pickle"
    taken.write_text("mine")
    assert refusal(highwater(*words, str(tmp_path / "new.pickle")), 2) == ("a timeline is drawn from a trace", "add `--exact`")
    problem, hint = refusal(highwater(*words, str(taken), "--exact"), 2)
    assert problem == f"{taken} is there already"
    assert taken.read_text() == "mine"
    offered = hint.removeprefix("name a new file: `--timeline ").removesuffix("`")
    one_rung = ("--loss", "full", "--allocator", "native")
    drawn = highwater(*words, offered, "--exact", *one_rung, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / offered).stat().st_size > 0
    assert "--timeline" not in drawn.stderr, "the next command does not name the file that is there now"
    for nowhere in (str(tmp_path / "no" / "where.pickle"), "/proc/x.pickle", ""):
        problem, hint = refusal(highwater(*words, nowhere, "--exact"), 2)
        assert problem.startswith(f"{nowhere or '.'} ")
        assert hint.startswith("name a new file: `--timeline timeline")


def test_traces_are_of_our_own_steps_and_of_no_table(highwater: Run) -> None:
    other = highwater("predict", "Qwen3-0.6B", *A100S, "--trainer", "trinity", "--exact")
    table = highwater("predict", "--against", str(PUBLISHED_A100), "--exact")
    for done in (other, table):
        assert done.returncode == 2
        assert "leave `--exact`" in done.stderr
