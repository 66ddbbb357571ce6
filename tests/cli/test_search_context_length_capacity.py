"""The drop-in command: the flags and defaults that Trinity-RFT users know; what cannot be done yet
is refused by name.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run, offered, refusal

from highwater.cli.search_context_length_capacity import (
    PROGRAM,
    in_these_words,
    parse,
    request_of,
    settings_of,
)
from highwater.spec.allocator_variables import ignored_options

MODEL = ("--model_path", "Qwen3-0.6B")
SUPPORTED = ("--save_hf_checkpoint", "never")


@pytest.fixture
def search(run: Run) -> Run:
    """Runs the drop-in command."""
    return lambda *words, **environment: run(PROGRAM, *words, **environment)


def test_the_flags_and_defaults_are_the_original_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_CHECKPOINT_ROOT_DIR", raising=False)
    assert vars(parse(MODEL)) == {
        "model_path": "Qwen3-0.6B",
        "start_length": 4096,
        "log_dir": "./logs",
        "checkpoint_path": "./checkpoints/length-test",
        "test_gpu_num": [1, 2, 4, 6],
        "test_sp_num": [1],
        "save_hf_checkpoint": "last",
        "entropy_saving": False,
        "offload": False,
        "trainer_strategy": "fsdp",
        "timeout": 2400,
        "dlc": False,
    }
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", "/checkpoints")
    assert parse(MODEL).checkpoint_path == "/checkpoints"


def test_a_trial_is_the_original_one() -> None:
    arguments = parse((*MODEL, *SUPPORTED, "--test_gpu_num", "2", "4", "--timeout", "600"))
    request = request_of(arguments, settings_of(arguments, {}), {"device": "cuda"})
    assert (request.gpus, request.ulysses, request.timeout_s, request.start_tokens) == (
        (2, 4),
        (1,),
        600.0,
        4096,
    )
    assert (request.sequences_per_micro_batch, request.micro_batches, request.steps) == (2, 4, 2)
    assert (request.method, request.rope, request.device, request.loss) == (
        "bisect",
        "yarn",
        "cuda",
        "full",
    )
    assert (request.checkpoint, request.save_hf, request.checkpoint_dir) == (
        "sharded",
        "never",
        arguments.checkpoint_path,
    )


@pytest.mark.parametrize(
    ("environment", "allocator"),
    [
        ({}, "native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "native"),
    ],
)
def test_the_allocator_is_the_one_that_the_environment_names(
    environment: dict[str, str], allocator: str
) -> None:
    assert settings_of(parse(MODEL), environment).allocator == allocator


def test_allocator_options_that_no_trial_gets_are_named() -> None:
    ignored = ("max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2]")
    options = f"{ignored[0]}, expandable_segments: True, {ignored[1]}"
    (said,) = ignored_options({"PYTORCH_ALLOC_CONF": options}, "cuda", reads_mode=True)
    assert f": {', '.join(ignored)}; " in said
    recommended = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert ignored_options(recommended, "cuda", reads_mode=True) == ()
    assert len(ignored_options(recommended, "cuda")) == 1, "a search sets it by its settings"
    assert ignored_options({}, "cpu") == ()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"},
        {
            "PYTORCH_ALLOC_CONF": "expandable_segments:False",
            "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True",
        },
    ],
)
def test_expandable_segments_in_the_environment_are_ignored_with_a_note_without_a_gpu(
    tiny: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The search is interrupted as soon as it tries a length: it has begun."""
    words = ("--model_path", str(tiny), "--test_gpu_num", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "highwater.cli.search_context_length_capacity", *words],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "trying" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, said + rest
    assert re.search(r"ignored in the environment: .*expandable_segments:true", said, re.IGNORECASE)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("words", [("find", "--max-length", "512"), ("try", "--length", "128")])
def test_find_and_try_ignore_them_with_the_same_note(
    highwater: Run, tiny: Path, words: tuple[str, ...], name: str
) -> None:
    command, *more = words
    usual = ("--device", "cpu", "--memory", "1GiB", "--dry-run")
    start = ("--start-length", "256") if command == "find" else ()
    done = highwater(
        command, str(tiny), *usual, *start, *more, **{name: "expandable_segments:True"}
    )
    assert done.returncode == 0, done.stderr
    assert "ignored in the environment: expandable_segments:True" in done.stderr


def test_no_flag_is_refused_any_more(search: Run) -> None:
    words = (
        "--offload",
        "--entropy_saving",
        "--save_hf_checkpoint",
        "always",
        "--trainer_strategy",
        "fsdp",
    )
    assert _is_past_the_refusal(search(*MODEL))
    assert _is_past_the_refusal(search(*MODEL, *words))


def test_an_sp_that_divides_no_gpu_count_is_never_tried(search: Run) -> None:
    assert _is_past_the_refusal(
        search(*MODEL, *SUPPORTED, "--test_gpu_num", "1", "--test_sp_num", "1", "2")
    )


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nobody listens: Ray itself would find whatever runs on this machine."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


@pytest.mark.usefixtures("no_cluster")
def test_dlc_without_a_cluster_is_answered_with_one_machine(search: Run) -> None:
    problem, hint = refusal(search(*MODEL, "--dlc"), 3)
    assert problem.startswith("--dlc joins the Ray cluster of the job: no Ray cluster answers at ")
    assert _is_past_the_refusal(search(*offered(hint)[0][1:]))


@pytest.mark.parametrize(
    ("words", "said", "way"),
    [
        (("--traner_strategy", "fsdp2"), "--traner_strategy", "--trainer_strategy"),
        (("--timeout", "5"), "timeout of 5.00 s", None),
        (("--start_length", "1"), "start length of 1 token", "--start_length 2"),
        (("--start_length", "0"), "length '0'", None),
        (("--test_gpu_num", "0"), "gpus is 0", "--test_gpu_num 1"),
    ],
)
def test_errors_speak_the_words_of_this_command(
    search: Run, words: tuple[str, ...], said: str, way: str | None
) -> None:
    problem, hint = refusal(search(*MODEL, *SUPPORTED, *words), 2)
    assert said in problem
    assert way is None or offered(hint) == [way.split()]


def test_hints_about_a_full_disk_name_the_flags_that_there_are_here() -> None:
    """The original has no flag against shards: it always writes them."""
    free = "free some space (`df -h x`)"
    for flags in ("--checkpoint none", "--checkpoint none --save-hf never"):
        assert in_these_words(f"{free}, or use `{flags}`") == free
    hint = in_these_words(
        f"{free}, or use `--checkpoint-dir /y`, or use `--save-hf never`, or use `--checkpoint "
        f"none`"
    )
    shown, *ways = offered(hint)
    assert shown == ["df", "-h", "x"]
    assert ways == [["--checkpoint_path", "/y"], ["--save_hf_checkpoint", "never"]]
    arguments = parse((*MODEL, *ways[0], *ways[1]))
    assert (arguments.checkpoint_path, arguments.save_hf_checkpoint) == ("/y", "never")


def test_what_no_flag_can_mend_is_told_before_the_flags(search: Run) -> None:
    assert refusal(search("--model_path", "Qwen3-0.7B"), 2)[0].startswith("no model 'Qwen3-0.7B'")
    assert "1 token" in refusal(search(*MODEL, "--start_length", "1"), 2)[0]


@pytest.mark.usefixtures("no_cluster")
def test_a_value_that_begins_with_a_dash_can_be_typed_as_the_hint_has_it(search: Run) -> None:
    _, hint = refusal(search(*MODEL, "--log_dir=-logs", "--dlc"), 3)
    assert "--log_dir=-logs" in hint
    assert _is_past_the_refusal(search(*offered(hint)[0][1:]))


def test_it_runs_as_a_module_too(run: Run) -> None:
    done = run("python", "-m", "highwater.cli.search_context_length_capacity", "--help")
    assert done.returncode == 0
    assert "--test_sp_num" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_flag_of_the_published_search_runs_a_small_model_on_the_cpu(tmp_path: Path) -> None:
    shape = {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_position_embeddings": 2048,
    }
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "mine").write_text("not the search's")
    words = [
        "--model_path",
        str(small),
        "--log_dir",
        str(logs),
        "--checkpoint_path",
        str(checkpoints),
        "--start_length",
        "512",
    ]
    words += ["--test_gpu_num", "1", "2", "--test_sp_num", "1", "2", "--trainer_strategy", "fsdp2"]
    words += ["--offload", "--entropy_saving", "--save_hf_checkpoint", "last"]
    search = [sys.executable, "-m", "highwater.cli.search_context_length_capacity", *words]
    done = subprocess.run(search, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"model_name = small, trainer_gpu_num = {gpus}, sp_num = {sp}, max_model_len = 8192"
        for gpus, sp in ((1, 1), (2, 1), (2, 2))
    ]
    written = {str(path.relative_to(logs / "small")) for path in logs.rglob("model_len-*.log")}
    assert written == {
        f"gpu-{gpus}/sp-{sp}/model_len-8192.log" for gpus, sp in ((1, 1), (2, 1), (2, 2))
    }
    assert [path.name for path in checkpoints.iterdir()] == ["mine"]


def _is_past_the_refusal(done: subprocess.CompletedProcess[str]) -> bool:
    """On a machine whose GPUs are hidden, the next thing in the way is that there are none."""
    return "no GPU" in refusal(done, 3)[0]
