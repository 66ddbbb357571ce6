"""The drop-in command: the flags and defaults that Trinity-RFT users know."""

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from conftest import Run, offered, refusal

from highwater.cli.search_context_length_capacity import (
    PUBLISHED,
    in_these_words,
    parse,
    request_of,
    settings_of,
)
from highwater.nouns.environment import ignored_options
from highwater.store.journal import read_study
from tables import deep, table
from tiny_models import write_model

MODEL = ("--model_path", "Qwen3-0.6B")
SUPPORTED = ("--save_hf_checkpoint", "never")


@pytest.fixture
def search(run: Run) -> Run:
    return lambda *words, **environment: run(PUBLISHED, *words, **environment)


def test_the_flags_and_defaults_are_the_original_ones(monkeypatch):
    monkeypatch.delenv("TRINITY_CHECKPOINT_ROOT_DIR", raising=False)
    assert vars(parse(MODEL)) == {
        "model_path": "Qwen3-0.6B",
        "start_length": 4096,
        "method": "bisect",
        "memory": None,
        "config": None,
        "data": None,
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


def test_a_trial_is_the_original_one():
    arguments = parse((*MODEL, *SUPPORTED, "--test_gpu_num", "2", "4", "--timeout", "600"))
    request = request_of(arguments, settings_of(arguments, {}), {"device": "cuda"})
    assert request.gpus == (2, 4)
    assert request.ulysses == (1,)
    assert (request.timeout_s, request.start_tokens) == (600.0, 4096)
    assert (request.sequences_per_micro_batch, request.micro_batches, request.steps) == (2, 4, 2)
    usual = request.hyperparameters
    assert (usual.learning_rate, usual.max_grad_norm) == (1e-5, 1.0)
    assert (request.method, request.rope, request.device) == ("bisect", "yarn", "cuda")
    assert (request.loss, request.checkpoint, request.save_hf) == ("full", "sharded", "never")
    assert request.checkpoint_dir == arguments.checkpoint_path


@pytest.mark.parametrize(
    ("environment", "allocator"),
    [
        ({}, "native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "native"),
    ],
)
def test_the_allocator_is_the_one_that_the_environment_names(environment, allocator):
    assert settings_of(parse(MODEL), environment).allocator == allocator


def test_allocator_options_that_no_trial_gets_are_named():
    ignored = ("max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2]")
    options = f"{ignored[0]}, expandable_segments: True, {ignored[1]}"
    (said,) = ignored_options({"PYTORCH_ALLOC_CONF": options}, "cuda", reads_mode=True)
    assert f": {', '.join(ignored)}; " in said
    recommended = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert ignored_options(recommended, "cuda", reads_mode=True) == ()
    assert len(ignored_options(recommended, "cuda")) == 1, "a search sets it by its settings"
    assert ignored_options({}, "cpu") == ()


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nobody listens: Ray itself would find whatever runs on this machine."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


@pytest.mark.usefixtures("no_cluster")
def test_dlc_without_a_cluster_is_answered_with_one_machine(search):
    problem, hint = refusal(search(*MODEL, "--dlc"), 3)
    assert problem.startswith("--dlc joins the Ray cluster of the job: no Ray cluster answers at ")
    assert _is_past_the_refusal(search(*offered(hint)[0][1:]))


def test_hints_about_a_full_disk_name_the_flags_that_there_are_here():
    """The original has no flag against shards, which a file can switch off."""
    free = "free some space (`df -h x`)"
    assert offered(in_these_words(f"{free}, or use `--checkpoint none --save-hf never`"))[1:] == [
        ["--save_hf_checkpoint", "never"],
        ["checkpoint:", "none"],
        ["--config"],
    ]
    hint = in_these_words(
        f"{free}, or use `--checkpoint-dir /y`, or use `--save-hf never`, or use `--checkpoint "
        f"none`"
    )
    shown, *ways = offered(hint)
    assert shown == ["df", "-h", "x"]
    assert ways[:2] == [["--checkpoint_path", "/y"], ["--save_hf_checkpoint", "never"]]
    arguments = parse((*MODEL, *ways[0], *ways[1]))
    assert (arguments.checkpoint_path, arguments.save_hf_checkpoint) == ("/y", "never")


@pytest.mark.usefixtures("no_cluster")
def test_a_value_that_begins_with_a_dash_can_be_typed_as_the_hint_has_it(search):
    _, hint = refusal(search(*MODEL, "--log_dir=-logs", "--dlc"), 3)
    assert "--log_dir=-logs" in hint
    assert _is_past_the_refusal(search(*offered(hint)[0][1:]))


SIMULATED = "device: cuda\nmemory: 80GiB\ndry_run: true\nstudy: study.jsonl\n"
"""Settings of a file with which the script answers from a memory law, on any machine."""


@pytest.fixture
def simulated(search: Run, tmp_path: Path) -> Run:
    """Runs the script without training, with further lines of its file of settings."""

    def run_it(*words: str, more: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "simulated.yaml").write_text(SIMULATED + more)
        return search(*MODEL, "--config", "simulated.yaml", *words)

    return run_it


def lengths_tried(study: Path) -> dict[tuple[int, int], list[int]]:
    """The lengths of each cell's trials, in their order, by GPUs and SP."""
    found: dict[tuple[int, int], list[int]] = {}
    for trial in read_study(study).trials:
        layout = trial.spec.layout
        place = layout.gpus, layout.ulysses_degree
        found.setdefault(place, []).append(trial.spec.length_tokens)
    return found


def capacities(done: subprocess.CompletedProcess[str]) -> list[int]:
    form = r"model_name = \S+, trainer_gpu_num = \d+, sp_num = \d+, max_model_len = (\d+)"
    found = [re.fullmatch(form, line) for line in done.stdout.splitlines()]
    assert None not in found, done.stdout
    return [int(line[1]) for line in found if line]


GPUS_AND_SP = ("--test_gpu_num", "1", "2", "--test_sp_num", "1", "2")


@pytest.mark.parametrize(
    ("words", "more", "start"),
    [
        (("--start_length", "4096"), "", 4096),
        (("--start_length", "12k"), "", 12_288),
        (("--start_length", "8192"), "start_length: 512\n", 8192),
        ((), "start_length: 256\n", 256),
    ],
)
def test_a_start_length_is_tried_first_and_longer_ones(simulated, tmp_path, words, more, start):
    done = simulated(*words, *GPUS_AND_SP, more=more)
    assert done.returncode == 0, done.stderr
    tried = lengths_tried(tmp_path / "study.jsonl")
    assert list(tried) == [(1, 1), (2, 1), (2, 2)]
    for lengths in tried.values():
        assert lengths[0] == start
        assert min(lengths[1:]) > start
    answers = read_study(tmp_path / "study.jsonl").answers
    assert [answer.capacity_tokens for answer in answers] == capacities(done)
    assert all(answer.limit == "memory" for answer in answers)


def followed(hint: str, words: tuple[str, ...], more: str) -> list[tuple[tuple[str, ...], str]]:
    """The words and the file after each way that a hint offers: flags in the place of those that
    were typed, a bare value in that of the value, keys in the file; `and` joins two.
    """
    ways: list[tuple[tuple[str, ...], str]] = []
    for way in re.split(r",? or |, |; ", hint):
        typed, lines = list(words), dict(re.findall(r"(\w+): (.*)\n", more))
        for span in re.findall(r"`([^`]*)`", way):
            if re.fullmatch(r"\w+: .*", span):
                key, _, lines_value = span.partition(": ")
                lines[key] = lines_value
            elif span.startswith("--"):
                flag, *values = span.split()
                if flag == "--config":
                    continue
                if flag in typed:
                    del typed[typed.index(flag) : typed.index(flag) + 2]
                typed += [flag, *values]
            else:
                typed[-1] = span
        made = tuple(typed), "".join(f"{key}: {value}\n" for key, value in lines.items())
        if made != (words, more) and made not in ways:
            ways.append(made)
    return ways


@pytest.mark.parametrize(
    ("words", "more"),
    [
        *((("--timeout", "0"), ""), (("--start_length", "0"), ""), (("--memory", "30MiB"), "")),
        *(((), "memory: 16MiB\n"), ((), "steps: 1\n"), ((), "ring: [3]\n")),
        *((("--test_sp_num", "3"), "ring: 2\n"), ((), "proof: memory\n")),
        *(((), "optimizer: adamw-8bit\n"), ((), "lora_base: nf4\nstrategy: fsdp2\n")),
        *(((), "token_budget: 2k\n"), ((), "objective: reward\n")),
    ],
)
def test_every_hint_can_be_typed_here_or_written_into_the_file(simulated, words, more):
    counts = ("--test_gpu_num", "1", "2")
    problem, hint = refusal(simulated(*counts, *words, more=more), 2)
    ways = followed(hint, words, more)
    assert ways, hint
    for typed, file in ways:
        done = simulated(*counts, *typed, more=file)
        if done.returncode == 2:  # the next thing that is wrong, which is another one
            assert refusal(done, 2)[0] != problem, (hint, typed, file)
        else:
            assert done.returncode in (0, 1), (hint, typed, file, done.stderr)


@pytest.mark.parametrize(
    ("said", "here"),
    table("search_context_length_capacity", "what_has_no_flag_here_is_a_key_of_the_file"),
)
def test_what_has_no_flag_here_is_a_key_of_the_file(said, here):
    told = in_these_words(said, {"save_hf_checkpoint"})
    spans = [span for span in re.findall(r"`([^`]*)`", told) if span != "--config"]
    assert [span for span in spans if not span.startswith("highwater ")] == here
    assert in_these_words(told, {"save_hf_checkpoint"}) == told, "these words stay what they are"


def test_a_switch_that_was_typed_and_no_file_takes_back_is_to_be_left_out():
    assert in_these_words("use `--runner local`", {"dlc"}).endswith(", without `--dlc`")
    assert "without" not in in_these_words("use `--runner local`")


@pytest.mark.parametrize(
    ("more", "goes_on"), [("", True), ("max_length: 512\n", False), ("start_length: 256\n", False)]
)
def test_the_note_on_where_lengths_end_is_said_where_it_is_true(search, tmp_path, more, goes_on):
    bundled = Path(__file__).parents[2] / "examples" / "tiny"
    (tmp_path / "end.yaml").write_text("dry_run: true\nmemory: 1GiB\n" + more)
    words = ("--model_path", str(bundled), "--test_gpu_num", "1", "--config", "end.yaml")
    done = search(*words)
    notes = [line for line in done.stderr.splitlines() if "lengths end at" in line]
    assert len(notes) == 1, done.stderr
    told = re.search(r"`--start_length 512` goes on to ([\d,]+)", notes[0])
    assert (told is not None) is goes_on, notes
    if told is not None:
        again = search(*words, "--start_length", "512", "--log_dir", "other")
        assert f"lengths end at {told[1]} tokens" in again.stderr


@pytest.mark.parametrize("more", ["device: cuda\n", "device: cpu\n"])
def test_a_device_in_the_file_has_its_own_lengths(search, tiny, tmp_path, more):
    file = f"dry_run: true\nmemory: 1GiB\nstudy: study.jsonl\n{more}"
    (tmp_path / "device.yaml").write_text(file)
    search("--model_path", str(tiny), "--test_gpu_num", "1", "--config", "device.yaml")
    grid = read_study(tmp_path / "study.jsonl").question.grid
    assert (grid.step_tokens == 128) is ("cpu" in more)


@pytest.mark.parametrize("method", ["bisect", "linear"])
def test_where_the_start_length_itself_does_not_fit_0_is_said_to_be_no_search_below(
    simulated, highwater, tmp_path, method
):
    start = "110000"
    words = ("--method", method, "--test_gpu_num", "1", "2")
    done = simulated(*words, "--start_length", start)
    assert (done.returncode, capacities(done)) == (1, [0, 0]), done.stderr
    assert list(lengths_tried(tmp_path / "study.jsonl").values()) == [[int(start)]] * 2
    lines = highwater("show", "study.jsonl", "--as", "lines")
    for said in (done.stderr, lines.stderr):
        notes = re.findall(r"^note: .*start length itself, ([\d,]+) tokens", said, re.MULTILINE)
        assert notes == [f"{int(start):,}"] * 2
    (tmp_path / "study.jsonl").unlink()
    shorter = simulated(*words, "--start_length", "8192")
    assert (shorter.returncode, "itself" in shorter.stderr) == (0, False), shorter.stderr
    assert min(capacities(shorter)) >= 8192


def test_the_linear_method_is_the_published_scan(simulated, tmp_path):
    done = simulated("--method", "linear", "--start_length", "8192", "--test_gpu_num", "1", "2")
    assert done.returncode == 0, done.stderr
    one, two = lengths_tried(tmp_path / "study.jsonl").values()
    grid = [*range(8192, 40960, 4096), *range(40960, 40960 * 9, 10240)]
    assert one == grid[: len(one)]
    assert two == grid[len(one) - 2 :][: len(two)], "it begins with the answer on one GPU"
    assert capacities(done) == [one[-2], two[-2]]


@pytest.mark.parametrize("words", [(), ("--method", "linear"), ("--start_length", "8192")])
def test_a_ceiling_is_marked_in_both_layouts_and_no_edge_is(simulated, highwater, tmp_path, words):
    done = simulated("--test_gpu_num", "1", *words, more="max_length: 16384\n")
    assert (done.returncode, capacities(done)) == (0, [16384]), done.stderr
    assert "≥16384: " in done.stderr
    assert "capacity ≥16,384 tokens" in done.stderr
    shown = highwater("show", "study.jsonl", "--as", "published")
    assert re.search(r"^1 +\| 1 +\| ≥16384$", shown.stdout, re.MULTILINE), shown.stdout
    lines = highwater("show", "study.jsonl", "--as", "lines")
    assert (lines.returncode, lines.stdout) == (0, done.stdout)
    assert "≥16384: " in lines.stderr
    (tmp_path / "study.jsonl").unlink()
    edge = simulated("--test_gpu_num", "1", *words)
    assert "≥" not in edge.stderr + highwater("show", "study.jsonl", "--as", "published").stdout


def test_typed_flags_are_above_a_file_and_a_file_is_above_the_usual_settings(simulated, tmp_path):
    more = "gpus: [1, 4]\nulysses: 2\nstrategy: fsdp2\ntoken_budget: 64k\nmethod: linear\n"
    done = simulated("--test_gpu_num", "1", "2", "4", "6", "--method", "bisect", more=more)
    assert done.returncode == 0, done.stderr
    question = read_study(tmp_path / "study.jsonl").question
    assert [cell.layout.gpus for cell in question.cells] == [2, 4, 6]
    assert {cell.layout.ulysses_degree for cell in question.cells} == {2}
    assert {cell.settings.strategy for cell in question.cells} == {"fsdp2"}
    assert {cell.settings.token_budget_tokens for cell in question.cells} == {65_536}
    assert (question.method, question.micro_batches) == ("bisect", 4)


OWN_DATA = """
import time

def waits(**_):
    time.sleep(600)
    yield []

def hungry(**_):
    raise MemoryError
    yield []
"""


@pytest.fixture
def on_the_cpu(search: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script on one process, with sequences that a function of ``OWN_DATA`` yields."""
    (tmp_path / "own_sequences.py").write_text(OWN_DATA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "short.yaml").write_text("study: study.jsonl\nmax_length: 256\n")
    usual = ("--model_path", str(tiny), "--test_gpu_num", "1", "--config", "short.yaml")

    def run_it(function: str, *words: str) -> subprocess.CompletedProcess[str]:
        return search(*usual, "--data", f"own_sequences:{function}", *words)

    return run_it


@pytest.mark.parametrize(
    "source", ["own_sequences:nothing", "nomod:x", "own_sequences.inner:x", "x", ":x", "json:dumpz"]
)
def test_a_function_that_is_not_there_is_refused_first(search, on_the_cpu, tiny, highwater, source):
    words = ("--model_path", str(tiny), "--test_gpu_num", "1", "--data", source)
    assert source in refusal(search(*words), 2)[0]
    tried = highwater("try", str(tiny), "--device", "cpu", "--length", "128", "--data", source)
    assert source in refusal(tried, 2)[0]


@pytest.mark.timeout(300)
def test_where_nothing_fits_it_is_said_in_plain_words(on_the_cpu, tmp_path):
    done = on_the_cpu("hungry", "--start_length", "128")
    assert (done.returncode, capacities(done)) == (1, [0]), done.stderr
    assert "none tokens" not in done.stderr
    assert re.search(r": nothing fits$", done.stderr, re.MULTILINE)
    assert not re.search(r":[;:]|: *$", done.stderr, re.MULTILINE)
    assert re.search(r"ran out of (host )?memory.*: .*\w", done.stderr), done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["bisect", *deep("linear")])
def test_after_a_time_out_there_is_no_second_attempt_and_no_line_without_a_number(
    on_the_cpu, highwater, tmp_path, method
):
    done = on_the_cpu("waits", "--start_length", "128", "--timeout", "10", "--method", method)
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert lengths_tried(tmp_path / "study.jsonl") == {(1, 1): [128]}
    assert re.search(
        r"^note: tiny, .*1 process: no line, .*took too long", done.stderr, re.MULTILINE
    )
    lines = highwater("show", "study.jsonl", "--as", "lines")
    assert (lines.returncode, lines.stdout) == (4, "")
    shown = highwater("show", "study.jsonl", "--as", "published")
    assert shown.returncode == 4
    assert "?" not in shown.stdout
    assert "no line" in shown.stderr


@pytest.mark.timeout(1200)
def test_the_documented_example_finds_capacities_on_a_laptop_in_two_minutes(search, tmp_path):
    """The time is that of its processors, as this machine may have other work; in `make test-all`
    every process starts as installed, and imports PyTorch.
    """
    bundled = Path(__file__).parents[2] / "examples" / "tiny"
    counts = deep(*GPUS_AND_SP) or ("--test_gpu_num", "1", "--test_sp_num", "1")
    words = ("--model_path", str(bundled), *counts)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = search(*words, **({"PYTHONPATH": str(tmp_path)} if deep(1) else {}))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert len(capacities(done)) == (3 if deep(1) else 1)
    assert min(capacities(done)) > 0
    assert "half of the free memory" in done.stderr
    taken_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert taken_s / len(os.sched_getaffinity(0)) < 120


@pytest.mark.timeout(600)
def test_every_flag_of_the_published_search_runs_a_small_model_on_the_cpu(search, tmp_path):
    small = write_model(tmp_path / "small", vocab_size=1024, max_position_embeddings=2048)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("not the search's")
    (tmp_path / "short.yaml").write_text("max_length: 512\n")  # attention's square is felt here
    done = search(
        *("--model_path", str(small), "--config", "short.yaml", "--log_dir", "logs"),
        *("--checkpoint_path", "checkpoints", "--start_length", "512", *GPUS_AND_SP),
        *("--trainer_strategy", "fsdp2", "--offload", "--entropy_saving"),
        *("--save_hf_checkpoint", "last"),
    )
    assert done.returncode == 0, done.stderr
    cells = ((1, 1), (2, 1), (2, 2))
    assert done.stdout.splitlines() == [
        f"model_name = small, trainer_gpu_num = {gpus}, sp_num = {sp}, max_model_len = 512"
        for gpus, sp in cells
    ]
    logs = tmp_path / "logs" / "small"
    assert {str(path.relative_to(logs)) for path in logs.rglob("model_len-*.log")} == {
        f"gpu-{gpus}/sp-{sp}/model_len-512.log" for gpus, sp in cells
    }
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["mine"]


def _is_past_the_refusal(done: subprocess.CompletedProcess[str]) -> bool:
    """On a machine whose GPUs are hidden, the next thing in the way is that there are none."""
    return "no GPU" in refusal(done, 3)[0]
