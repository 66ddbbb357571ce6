"""What is refused before anything starts: a clear error, its exit code, and a hint that works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SIMULATED, following, offered, refusal

from highwater.errors import UsageError
from highwater.nouns.hardware import CPU_FLAGS, CPU_SEARCH
from highwater.store.directory import check_log_directory
from tiny_models import write_model

CPU = ("--device", "cpu", "--memory", "2GiB")


def test_an_unknown_model_is_answered_with_the_known_ones(highwater):
    told = "no model 'Qwen3-0.7B': not a directory, not in the catalog"
    problem, hint = refusal(highwater("find", "Qwen3-0.7B", *SIMULATED), 2)
    assert problem == told, "the wording of a refusal, here and nowhere else"
    assert highwater("find", re.findall(r"Qwen3-[\w.]+B", hint)[0], *SIMULATED).returncode == 0
    assert refusal(highwater("find", "Qwen3-0.7B", "--print-config"), 2)[0] == told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--learning-rate", "1e999"), "learning rate is inf"),
        (("--adam-beta2", "nan"), "adam beta2 is nan"),
        (("--weight-decay", "-0.1"), "weight decay is -0.1"),
        (("--max-grad-norm", "much"), "max_grad_norm 'much'"),
        (("--objective", "ppo", "--dual-clip", "0.5"), "dual clip is 0.5"),
        (("--objective", "grpo", "--kl-estimator", "k4"), "kl_estimator 'k4'"),
    ],
)
def test_a_hyperparameter_that_cannot_be_is_answered_with_one_that_can(highwater, words, said):
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *words, *SIMULATED), 2)
    assert problem.startswith(said)
    mended = highwater("find", "Qwen3-0.6B", *words[:-2], *offered(hint)[0], *SIMULATED)
    assert mended.returncode == 0


def test_a_hyperparameter_that_the_objective_has_no_use_for_is_refused(highwater):
    problem, hint = refusal(
        highwater("find", "Qwen3-0.6B", "--kl-coefficient", "0.1", *SIMULATED), 2
    )
    assert problem.startswith("kl coefficient 0.1 ")
    assert "sft" in problem
    assert offered(hint) == [["--kl-coefficient"]]
    assert highwater("find", "Qwen3-0.6B", *SIMULATED).returncode == 0


def test_a_config_without_a_needed_field_is_told_by_the_field(highwater, tiny):
    write_model(tiny, vocab_size=None, num_hidden_layers=None)
    problem, hint = refusal(highwater("find", str(tiny), *SIMULATED), 2)
    assert problem.startswith(f"{tiny}/config.json")
    assert "qwen3" in problem
    assert problem.endswith(" vocab_size, num_hidden_layers")
    assert highwater("find", *offered(hint)[0][2:], *SIMULATED).returncode == 0


def test_a_gpu_that_is_not_there_is_refused_and_the_cpu_is_offered(highwater):
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", "--device", "cuda"), 3)
    assert "no GPU" in problem
    assert offered(hint) == [CPU_SEARCH.split()]
    assert highwater(*offered(hint)[0][1:], "--dry-run").returncode == 0


def test_without_a_gpu_a_search_wants_the_cpu_named_or_a_memory_limit(highwater):
    problem, hint = refusal(highwater("find", "Qwen3-0.6B"), 2)
    assert problem.startswith("no GPU is visible, ")
    assert "CPU" in problem
    assert "memory limit" in problem
    assert offered(hint) == [CPU_SEARCH.split()]
    assert highwater(*offered(hint)[0][1:], "--dry-run").returncode == 0
    named = highwater("find", "tiny", "--device", "cpu", "--max-length", "4k", "--dry-run")
    assert named.returncode == 0, named.stderr


def test_without_a_gpu_one_trial_wants_the_cpu_named(highwater):
    words = ("try", "tiny", "--length", "512", "--dry-run")
    problem, hint = refusal(highwater(*words), 2)
    assert problem.startswith("no GPU is visible, ")
    assert offered(hint) == [["--device", "cpu"]]
    done = highwater(*words, *offered(hint)[0])
    assert done.returncode == 0
    assert highwater(*following(done), "--dry-run").returncode == 0


def test_a_small_model_is_offered_a_short_search_of_its_own(highwater, tiny):
    _, hint = refusal(highwater("find", str(tiny), "--device", "cuda"), 3)
    assert offered(hint) == [["highwater", "find", str(tiny), *CPU_FLAGS.split()]]
    assert highwater(*offered(hint)[0][1:], "--dry-run").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "8"), "no GPU is visible, and 8 GPUs"),
        (("--memory", "90000GiB"), "no GPU is visible, and 90000.00 GiB"),
    ],
)
def test_what_is_meant_for_gpus_does_not_become_a_question_to_the_cpu(highwater, words, said):
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *words), 3)
    assert problem.startswith(said)
    simulated, on_the_cpu = offered(hint)
    assert highwater("find", "Qwen3-0.6B", *words, *simulated).returncode == 0
    assert highwater(*on_the_cpu[1:], "--dry-run").returncode == 0


@pytest.mark.parametrize("words", [("find", "tiny"), ("try", "tiny", "--length", "512")])
def test_without_a_gpu_the_first_thing_said_is_that_this_is_the_cpu(highwater, words):
    done = highwater(*words, "--memory", "1GiB", "--dry-run")
    assert done.returncode == 0
    assert done.stderr.startswith("note: no GPU is visible")


def test_on_the_cpu_lengths_end_early_and_that_is_said(highwater):
    done = highwater(
        "find", "tiny", "--device", "cpu", "--memory", "8GiB", "--loss", "chunked", "--dry-run"
    )
    (note,) = (line for line in done.stderr.splitlines() if line.startswith("note: on"))
    assert "8,192" in note
    assert offered(note) == [["--max-length"]]
    assert "8,192 tokens fit" in done.stdout


@pytest.mark.parametrize(
    ("words", "said", "mended"),
    [
        (("--start-length", "1"), "start length of 1 token", ("--start-length", "2")),
        (("--max-length", "2k"), "start length 4096", ("--start-length", "2048")),
        (("--timeout", "59s"), "timeout of 59 s", ("--timeout", "60s")),
        (("--memory", "80"), "memory of 80 bytes", ("--memory", "80GiB")),
        (("--memory", "0"), "memory of 0 bytes", ("--memory", "80GiB")),
        (("--memory", "80GB"), "memory size '80GB'", ("--memory", "74GiB")),
        (("--loss", "ful"), "loss 'ful'", ("--loss", "full")),
        (("--steps", "1"), "1 step of 2 micro-batches", ("--steps", "2")),
        (("--micro-batches", "0"), "2 steps of 0 micro-batches", ("--micro-batches", "1")),
        (("--data", "nothing"), "'nothing'", ("--data", "my_package.batches:packed")),
        (("--headroom", "90GiB"), "headroom of 90.00 GiB", ("--headroom", "1GiB")),
        (("--gpus", "0"), "gpus is 0", ("--gpus", "1")),
        (("--ulysses", "3"), "SP=3 on 1 GPU", ("--ulysses", "1")),
        (("--confirm", "-1"), "confirm", ("--confirm", "0")),
    ],
)
def test_a_value_that_cannot_work_is_refused_and_the_hint_does(highwater, words, said, mended):
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *SIMULATED, *words), 2)
    assert said in problem
    if words[0] not in ("--headroom",):  # its hint names no value
        assert mended[1] in hint
    assert highwater("find", "Qwen3-0.6B", *SIMULATED, *words, *mended).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("find", "Qwen3-0.6B", *SIMULATED),
        ("try", "Qwen3-0.6B", "--length", "4k", *SIMULATED),
        ("predict", "Qwen3-0.6B"),
    ],
)
def test_a_degree_that_does_not_work_is_answered_with_all_that_do(highwater, words):
    gpus = ("--gpus", "8xH100-80GB" if words[0] == "predict" else "8")
    problem, hint = refusal(highwater(*words, *gpus, "--ulysses", "3"), 2)
    assert problem.startswith("SP=3 on 8 GPUs")
    assert offered(hint) == [["--ulysses", degree] for degree in ("1", "2", "4", "8")]
    for way in offered(hint):
        assert highwater(*words, *gpus, *way).returncode == 0


def test_on_the_cpu_a_shorter_timeout_will_do(highwater):
    words = ("find", "Qwen3-0.6B", *CPU, "--dry-run", "--timeout")
    problem, hint = refusal(highwater(*words, "9s"), 2)
    assert "9.00 s" in problem
    assert ["--timeout", "10s"] in offered(hint)
    assert highwater(*words, "10s").returncode in (0, 1)


def test_one_trial_of_one_token_is_refused_with_a_flag_that_try_has(highwater):
    words = ("try", "Qwen3-0.6B", *SIMULATED)
    problem, hint = refusal(highwater(*words, "--length", "1"), 2)
    assert "1 token" in problem
    assert highwater(*words, *offered(hint)[0]).returncode == 0


def test_a_path_that_is_not_there_is_answered_with_the_catalogs_name(highwater):
    problem, hint = refusal(highwater("find", "/models/Qwen3-0.6B", *SIMULATED), 2)
    assert "'/models/Qwen3-0.6B'" in problem
    assert "catalog" not in problem
    assert highwater("find", *offered(hint)[0], *SIMULATED).returncode == 0


def test_settings_that_exclude_each_other_are_refused(highwater):
    problem, hint = refusal(
        highwater("find", "Qwen3-0.6B", *CPU, "--allocator", "expandable", "--dry-run"), 2
    )
    assert offered(problem) == [["--device", "cpu"], ["--allocator", "expandable"]]
    assert offered(hint) == [["--allocator"]]


def test_one_trial_past_a_models_own_rope_scaling_is_refused(highwater):
    words = ("try", "Llama-3.1-8B", "--length", "256k", *SIMULATED)
    problem, hint = refusal(highwater(*words), 2)
    assert problem.startswith("Llama-3.1-8B ")
    assert re.findall(r"\d[\d,]+,\d+", problem) == ["131,072", "262,144"]
    assert highwater(*words, *offered(hint)[0]).returncode in (0, 1)


def test_a_log_directory_that_cannot_be_written_is_refused_before_anything_starts(
    highwater, tmp_path
):
    (tmp_path / "file").write_text("mine")
    problem, hint = refusal(
        highwater("find", "Qwen3-0.6B", *CPU, "--log-dir", "file/logs", HOME=str(tmp_path)), 2
    )
    assert " file/logs " in problem
    assert problem.endswith(": Not a directory")
    ((flag, directory),) = offered(hint)
    assert flag == "--log-dir"
    check_log_directory(Path(directory))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("words", [("try", "--length", "8k"), ("find", "--start-length", "8k")])
def test_a_model_without_rope_is_refused_past_its_positions_and_the_hint_works(
    highwater, tiny, words
):
    write_model(tiny, model_type="opt")
    command, *rest = words
    problem, hint = refusal(highwater(command, str(tiny), *SIMULATED, *rest), 2)
    assert re.findall(r"\d,\d+", problem) == ["8,192", "4,096"]
    assert "opt has no RoPE" in problem
    assert highwater(command, str(tiny), *SIMULATED, *rest, *offered(hint)[0]).returncode == 0


def test_the_log_directory_that_is_offered_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    home = tmp_path / "$(touch pwned) it's"
    home.mkdir()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError) as refused:
        check_log_directory(tmp_path / "file" / "logs")
    assert offered(refused.value.hint) == [["--log-dir", str(home / "highwater-logs")]]


def test_a_log_directory_that_is_full_is_the_machines_fault(tmp_path):
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "from highwater.cli.app import main; sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["find", "Qwen3-0.6B", *CPU, "--log-dir", "logs"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    problem, hint = refusal(done, 3)
    assert "logs is full" in problem
    assert [words[0] for words in offered(hint)] == ["df", "--log-dir"]
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said", "way"),
    [
        (("fnd",), "'fnd'", "highwater find Qwen3-0.6B"),
        (("find", "Qwen3-0.6B", "--memoryy", "1GiB"), "--memoryy", "--memory"),
        (("find", "Qwen3-0.6B", "--zzz"), "--zzz", "highwater find --help"),
        (("find", "Qwen3-0.6B", "again"), "'again'", "highwater find Qwen3-0.6B"),
        (("find",), "no model", "highwater find Qwen3-0.6B"),
        (("show", "none.jsonl"), "none.jsonl", CPU_SEARCH),
        (("show",), "no study under logs", CPU_SEARCH),
        (("guide", "none.csv"), "none.csv", None),
        (("try", "Qwen3-0.6B"), "--length", None),
        (("find", "--gpus"), "--gpus", None),
    ],
)
def test_a_slip_of_the_fingers_is_answered_like_every_other_error(highwater, words, said, way):
    problem, hint = refusal(highwater(*words), 2)
    assert said in problem
    assert way is None or offered(hint) == [way.split()]


def test_the_newest_study_is_hinted_at_only_where_there_is_one(highwater):
    assert "highwater show" not in refusal(highwater("report", "none.jsonl"), 2)[1]
    assert (
        highwater(
            "find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/Qwen3-0.6B/study-1.jsonl"
        ).returncode
        == 0
    )
    hint = refusal(highwater("report", "none.jsonl"), 2)[1]
    assert offered(hint) == [["highwater", "show"]]
    assert highwater("show").returncode == 0


@pytest.mark.parametrize("command", ["predict", "recommend"])
def test_a_value_that_cannot_be_is_hinted_at_as_a_flag(highwater, command):
    words = (command, "Qwen3-8B", "--gpus", "2xH20-96GB", "--length", "8k")
    for slip, mended in (("--ulysses 0", "--ulysses 1"), ("--loss ful", "--loss full")):
        hint = refusal(highwater(*words, *slip.split()), 2)[1]
        assert mended.split() in offered(hint)
        assert highwater(*words, *offered(hint)[0]).returncode in (0, 1)


@pytest.mark.parametrize(
    ("words", "hinted"),
    [
        ("--gpus 4x --gpu-memory 60GiB", "--gpus 4 --gpu-memory 60GiB"),
        ("--gpus 2xFoo --gpu-memory 60.5GiB", "--gpus 2 --gpu-memory 60.5GiB"),
        ("--gpus 99x", "--gpus 16 --gpu-memory 16GiB"),
        ("--gpus 2xA40-48GB", "--gpus 2 --gpu-memory 44GiB"),
        ("--gpus Foo --gpu-memory 85899345921", "--gpus 1 --gpu-memory 85899345921"),
    ],
)
def test_gpus_of_no_catalog_are_hinted_at_with_the_numbers_that_were_typed(
    highwater, words, hinted
):
    asked = ("predict", "Qwen3-0.6B")
    hint = refusal(highwater(*asked, *words.split()), 2)[1]
    assert hinted.split() in offered(hint)
    assert highwater(*asked, *hinted.split()).returncode == 0


def test_the_example_in_the_hint_of_a_grammar_error_works(highwater):
    _, hint = refusal(highwater("try", "Qwen3-0.6B"), 2)
    assert highwater(*offered(hint)[0][1:], *SIMULATED).returncode == 0


def test_without_a_command_the_help_is_shown_and_nothing_is_answered(highwater):
    done = highwater()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: highwater" in done.stderr


def test_a_flags_word_that_is_misspelt_is_met_with_the_nearest_and_a_number_with_what_it_is(
    highwater,
):
    words = ("train", "tiny", "--data", "d", "--length", "64", "--output", "r", "--steps")
    problem, hint = refusal(highwater(*words, "3", "--schedule", "cosin"), 2)
    assert problem == "--schedule 'cosin' is not one of constant, linear, cosine"
    assert hint == "use `--schedule cosine`"
    problem, hint = refusal(highwater(*words, "3.5"), 2)
    assert problem == "--steps takes a whole number, and '3.5' is none"


def test_a_training_that_does_not_fit_is_met_with_the_memory_that_would(highwater, tmp_path):
    (tmp_path / "d.txt").write_text("a few words")
    words = (
        *("train", "tiny", "--data", "d.txt", "--length", "64", "--steps", "1", "--device", "cpu"),
        *("--output", "r"),
    )
    problem, hint = refusal(highwater(*words, "--memory", "500MiB"), 3)
    assert "are lacking" in problem
    assert highwater(*words, *offered(hint)[0]).returncode == 0
