"""What is refused before anything starts: a clear error, its exit code, and a hint that works."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SIMULATED, Run, refusal

from highwater.errors import UsageError
from highwater.spec.hardware import CPU_FLAGS, CPU_SEARCH
from highwater.store.directory import check_log_directory

CPU = ("--device", "cpu", "--memory", "2GiB")


def test_an_unknown_model_is_answered_with_the_known_ones(highwater: Run) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.7B", *SIMULATED), 2)
    assert problem == "no model 'Qwen3-0.7B': not a directory, not in the catalog"
    offered = re.findall(r"Qwen3-[\w.]+B", hint)
    assert highwater("find", offered[0], *SIMULATED).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--learning-rate", "1e999"), "learning rate is inf, and has to be 0 or more"),
        (("--adam-beta2", "nan"), "adam beta2 is nan, and has to be 0 or more and below 1"),
        (("--weight-decay", "-0.1"), "weight decay is -0.1, and has to be 0 or more"),
        (("--max-grad-norm", "much"), "max_grad_norm 'much' is not a number"),
        (("--objective", "ppo", "--dual-clip", "0.5"), "dual clip is 0.5, and has to be above 1, or 0 for none"),
        (("--objective", "grpo", "--kl-estimator", "k4"), "kl_estimator 'k4' is not one of k1, k2, k3"),
    ],
)
def test_a_hyperparameter_that_cannot_be_is_answered_with_one_that_can(highwater: Run, words: tuple[str, ...], said: str) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *words, *SIMULATED), 2)
    assert problem == said
    assert highwater("find", "Qwen3-0.6B", *words[:-2], *hint.split("`")[1].split(), *SIMULATED).returncode == 0


def test_a_hyperparameter_that_the_objective_has_no_use_for_is_refused(highwater: Run) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", "--kl-coefficient", "0.1", *SIMULATED), 2)
    assert problem == "kl coefficient 0.1 would change nothing: the loss of sft has no divergence from a reference here"
    assert hint == "leave `--kl-coefficient` out"
    assert highwater("find", "Qwen3-0.6B", *SIMULATED).returncode == 0


def test_a_config_without_a_needed_field_is_told_by_the_field(highwater: Run, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    del config["vocab_size"], config["num_hidden_layers"]
    (tiny / "config.json").write_text(json.dumps(config))
    problem, hint = refusal(highwater("find", str(tiny), *SIMULATED), 2)
    assert problem == f"{tiny}/config.json, of the family qwen3, has no vocab_size, num_hidden_layers"
    assert highwater("find", *hint.split("`")[1].split()[2:], *SIMULATED).returncode == 0


def test_a_gpu_that_is_not_there_is_refused_and_the_cpu_is_offered(highwater: Run) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", "--device", "cuda"), 3)
    assert problem == "the driver shows no GPU here"
    assert hint == f"`{CPU_SEARCH}` searches on the CPU"
    assert highwater(*hint.split("`")[1].split()[1:], "--dry-run").returncode == 0


@pytest.mark.parametrize(("device", "said"), [((), "no GPU is visible, and "), (("--device", "cpu"), "")])
def test_without_a_gpu_a_search_wants_a_memory_limit(highwater: Run, device: tuple[str, ...], said: str) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *device), 2)
    assert problem == f"{said}a search on the CPU needs a memory limit"
    assert hint == f"for example `{CPU_SEARCH}`"
    assert highwater(*hint.split("`")[1].split()[1:], "--dry-run").returncode == 0


def test_a_small_model_is_offered_a_short_search_of_its_own(highwater: Run, tiny: Path) -> None:
    _, hint = refusal(highwater("find", str(tiny), "--device", "cuda"), 3)
    assert hint == f"`highwater find {tiny} {CPU_FLAGS}` searches on the CPU"
    assert highwater(*hint.split("`")[1].split()[1:], "--dry-run").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "8"), "no GPU is visible, and 8 GPUs are asked for"),
        (("--memory", "90000GiB"), "no GPU is visible, and 90000.00 GiB is more than this machine's memory"),
    ],
)
def test_what_is_meant_for_gpus_does_not_become_a_question_to_the_cpu(highwater: Run, words: tuple[str, str], said: str) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *words), 3)
    assert problem.startswith(said)
    simulated, on_the_cpu = hint.split("`")[1::2]
    assert highwater("find", "Qwen3-0.6B", *words, *simulated.split()).returncode == 0
    assert highwater(*on_the_cpu.split()[1:], "--dry-run").returncode == 0


@pytest.mark.parametrize("words", [("find", "tiny"), ("try", "tiny", "--length", "512")])
def test_without_a_gpu_the_first_thing_said_is_that_this_is_the_cpu(highwater: Run, words: tuple[str, ...]) -> None:
    done = highwater(*words, "--memory", "1GiB", "--dry-run")
    assert done.returncode == 0
    assert done.stderr.startswith("note: no GPU is visible: trials run on the CPU")


def test_on_the_cpu_lengths_end_early_and_that_is_said(highwater: Run) -> None:
    done = highwater("find", "tiny", "--device", "cpu", "--memory", "8GiB", "--loss", "chunked", "--dry-run")
    assert "note: on the CPU lengths end at 8,192; `--max-length` names another end" in done.stderr
    assert "8,192 tokens fit, the longest length that was to be tried" in done.stdout


@pytest.mark.parametrize(
    ("words", "said", "mended"),
    [
        (("--start-length", "1"), "a start length of 1 token", ("--start-length", "2")),
        (("--max-length", "2k"), "the longest length to try, 2048, is below the start length 4096", ("--start-length", "2048")),
        (("--timeout", "59s"), "a timeout of 59 s ends a trial before it has started", ("--timeout", "60s")),
        (("--memory", "80"), "no trial fits in a memory of 80 bytes; 64.0 MiB is the least", ("--memory", "80GiB")),
        (("--memory", "0"), "no trial fits in a memory of 0 bytes; 64.0 MiB is the least", ("--memory", "80GiB")),
        (("--memory", "80GB"), "memory size '80GB' has a decimal or unclear unit", ("--memory", "80GiB")),
        (("--loss", "ful"), "loss 'ful' is not one of chunked, full", ("--loss", "full")),
        (("--steps", "1"), "1 step of 2 micro-batches never hold the peak", ("--steps", "2")),
        (("--data", "nothing"), "data source 'nothing' is not module:function", ("--data", "my_package.batches:packed")),
        (("--margin", "90GiB"), "a margin of 90.00 GiB leaves nothing of 80.00 GiB", ("--margin", "1GiB")),
        (("--gpus", "0"), "gpus is 0", ("--gpus", "1")),
        (("--ulysses", "3"), "SP=3 on 1 GPU: 3 does not divide 1 GPU", ("--ulysses", "1")),
        (("--confirm", "-1"), "confirm and margin cannot be negative", ("--confirm", "2")),
    ],
)
def test_a_value_that_cannot_work_is_refused_and_the_hint_does(
    highwater: Run, words: tuple[str, str], said: str, mended: tuple[str, str]
) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *SIMULATED, *words), 2)
    assert problem == said
    if words[0] not in ("--margin",):  # its hint names no value
        assert mended[1] in hint
    assert highwater("find", "Qwen3-0.6B", *SIMULATED, *words, *mended).returncode == 0


@pytest.mark.parametrize(
    "words",
    [("find", "Qwen3-0.6B", *SIMULATED), ("try", "Qwen3-0.6B", "--length", "4k", *SIMULATED), ("predict", "Qwen3-0.6B")],
)
def test_a_degree_that_does_not_work_is_answered_with_all_that_do(highwater: Run, words: tuple[str, ...]) -> None:
    gpus = ("--gpus", "8xH100-80GB" if words[0] == "predict" else "8")
    problem, hint = refusal(highwater(*words, *gpus, "--ulysses", "3"), 2)
    assert problem == "SP=3 on 8 GPUs: 3 does not divide 8 GPUs"
    assert hint == "use `--ulysses 1`, `--ulysses 2`, `--ulysses 4` or `--ulysses 8`"
    for offered in hint.split("`")[1::2]:
        assert highwater(*words, *gpus, *offered.split()).returncode == 0


def test_on_the_cpu_a_shorter_timeout_will_do(highwater: Run) -> None:
    words = ("find", "Qwen3-0.6B", *CPU, "--dry-run", "--timeout")
    problem, hint = refusal(highwater(*words, "9s"), 2)
    assert problem == "a timeout of 9.00 s ends a trial before it has started"
    assert "`--timeout 10s`" in hint
    assert highwater(*words, "10s").returncode in (0, 1)


def test_one_trial_of_one_token_is_refused_with_a_flag_that_try_has(highwater: Run) -> None:
    words = ("try", "Qwen3-0.6B", *SIMULATED)
    problem, hint = refusal(highwater(*words, "--length", "1"), 2)
    assert problem == "a length of 1 token"
    assert highwater(*words, *hint.split("`")[1].split()).returncode == 0


def test_a_catalog_model_under_its_hubs_name_is_answered_with_the_catalogs(highwater: Run) -> None:
    problem, hint = refusal(highwater("find", "Qwen/Qwen3-0.6B", *SIMULATED), 2)
    assert problem == "no model 'Qwen/Qwen3-0.6B': not a directory"
    assert highwater("find", hint.split("`")[1], *SIMULATED).returncode == 0


def test_a_configuration_is_printed_only_for_a_model_that_is_there(highwater: Run) -> None:
    problem, _ = refusal(highwater("find", "Qwen3-0.7B", "--print-config"), 2)
    assert problem == "no model 'Qwen3-0.7B': not a directory, not in the catalog"


def test_settings_that_exclude_each_other_are_refused(highwater: Run) -> None:
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *CPU, "--allocator", "expandable", "--dry-run"), 2)
    assert problem == "`--device cpu` and `--allocator expandable` exclude each other"
    assert hint == "leave `--allocator` out"


def test_one_trial_past_a_models_own_rope_scaling_is_refused(highwater: Run) -> None:
    words = ("try", "Llama-3.1-8B", "--length", "256k", *SIMULATED)
    problem, hint = refusal(highwater(*words), 2)
    assert problem == "Llama-3.1-8B scales its own RoPE up to 131,072 tokens: 262,144 is past it"
    assert highwater(*words, *hint.split("`")[1].split()).returncode in (0, 1)


def test_a_log_directory_that_cannot_be_written_is_refused_before_anything_starts(highwater: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    problem, hint = refusal(highwater("find", "Qwen3-0.6B", *CPU, "--log-dir", "file/logs", HOME=str(tmp_path)), 2)
    assert problem == "the log directory file/logs cannot be written: Not a directory"
    check_log_directory(Path(hint.split("`")[1].removeprefix("--log-dir ")))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("words", [("try", "--length", "8k"), ("find", "--start-length", "8k")])
def test_a_model_without_rope_is_refused_past_its_positions_and_the_hint_works(
    highwater: Run, tiny: Path, words: list[str]
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "model_type": "opt"}))
    command, *rest = words
    problem, hint = refusal(highwater(command, str(tiny), *SIMULATED, *rest), 2)
    assert problem == "8,192 tokens are past the 4,096 that tiny was made for, and opt has no RoPE to scale"
    assert highwater(command, str(tiny), *SIMULATED, *rest, *hint.split("`")[1].split()).returncode == 0


def test_the_log_directory_that_is_offered_can_be_pasted_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "$(touch pwned) it's"
    home.mkdir()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError) as refused:
        check_log_directory(tmp_path / "file" / "logs")
    assert shlex.split(refused.value.hint.split("`")[1]) == ["--log-dir", str(home / "highwater-logs")]


def test_a_log_directory_that_is_full_is_the_machines_fault(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "from highwater.cli.app import main; sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["find", "Qwen3-0.6B", *CPU, "--log-dir", "logs"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    problem, hint = refusal(done, 3)
    assert problem.startswith("the log directory logs is full: no space left")
    assert "`--log-dir " in hint
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (("fnd",), "there is no command 'fnd'", "use `highwater find Qwen3-0.6B`"),
        (("find", "Qwen3-0.6B", "--memoryy", "1GiB"), "unknown flag --memoryy", "did you mean `--memory`?"),
        (("find", "Qwen3-0.6B", "--zzz"), "unknown flag --zzz", "`highwater find --help` lists every flag"),
        (("find", "Qwen3-0.6B", "again"), "unexpected argument 'again'", "for example `highwater find Qwen3-0.6B`"),
        (("find",), "no model is named", "name a directory or a catalog model: `highwater find Qwen3-0.6B`"),
        (
            *(("show", "none.jsonl"), "none.jsonl cannot be read: No such file or directory"),
            "name another file; `highwater find Qwen3-0.6B` makes one",
        ),
        (("show",), "there is no study under logs", "`highwater find Qwen3-0.6B` makes one"),
        (("compare-search", "none.csv"), None, None),
        (("try", "Qwen3-0.6B"), None, None),
        (("find", "--gpus"), None, None),
    ],
)
def test_a_slip_of_the_fingers_is_answered_like_every_other_error(
    highwater: Run, words: tuple[str, ...], said: str | None, hint: str | None
) -> None:
    told = refusal(highwater(*words), 2)
    assert said is None or told == (said, hint)


def test_the_newest_study_is_hinted_at_only_where_there_is_one(highwater: Run) -> None:
    assert "highwater show" not in refusal(highwater("report", "none.jsonl"), 2)[1]
    assert highwater("find", "Qwen3-0.6B", *SIMULATED, "--study", "logs/Qwen3-0.6B/study-1.jsonl").returncode == 0
    hint = refusal(highwater("report", "none.jsonl"), 2)[1]
    assert hint == "`highwater show` shows the newest study that can be read"
    assert highwater("show").returncode == 0


@pytest.mark.parametrize("command", ["predict", "recommend"])
def test_a_value_that_cannot_be_is_hinted_at_as_a_flag(highwater: Run, command: str) -> None:
    words = (command, "Qwen3-8B", "--gpus", "2xH20-96GB", "--length", "8k")
    for slip, mended in (("--ulysses 0", "--ulysses 1"), ("--loss ful", "--loss full")):
        hint = refusal(highwater(*words, *slip.split()), 2)[1]
        assert f"`{mended}`" in hint
        assert highwater(*words, *hint.split("`")[1].split()).returncode in (0, 1)


@pytest.mark.parametrize(
    ("words", "hinted"),
    [
        ("--gpus 4x --gpu-memory 60GiB", "--gpus 4 --gpu-memory 60GiB"),
        ("--gpus 2xFoo --gpu-memory 60.5GiB", "--gpus 2 --gpu-memory 60.5GiB"),
        ("--gpus 99x", "--gpus 16 --gpu-memory 80GiB"),
        ("--gpus Foo --gpu-memory 85899345921", "--gpus 1 --gpu-memory 85899345921"),
    ],
)
def test_gpus_of_no_catalog_are_hinted_at_with_the_numbers_that_were_typed(highwater: Run, words: str, hinted: str) -> None:
    asked = ("predict", "Qwen3-0.6B")
    hint = refusal(highwater(*asked, *words.split()), 2)[1]
    assert hint == f"name its memory, `{hinted}`"
    assert highwater(*asked, *hinted.split()).returncode == 0


def test_the_example_in_the_hint_of_a_grammar_error_works(highwater: Run) -> None:
    _, hint = refusal(highwater("try", "Qwen3-0.6B"), 2)
    assert highwater(*hint.split("`")[1].split()[1:], *SIMULATED).returncode == 0


def test_without_a_command_the_help_is_shown_and_nothing_is_answered(highwater: Run) -> None:
    done = highwater()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: highwater" in done.stderr
