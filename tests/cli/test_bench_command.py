"""``highwater bench attention`` as a user runs it: on the CPU, at small sizes, for real."""

import json
import os
import signal
import subprocess

import psutil
import pytest
from conftest import following, offered, refusal

from highwater.cli.bench import bench_dtype
from highwater.errors import MachineError
from highwater.nouns.cluster import Cluster
from highwater.units import GIB

pytestmark = pytest.mark.timeout(600)
SMALL = ("--device", "cpu", "--max-length", "512", "--head-dim", "16")
BENCH = ("bench", "attention", *SMALL, "--implementations", "dense", "block_sparse_5")
FILES = {"attention.json", "attention.md"}
ENDS_S = 240


def words_of(text: str) -> str:
    """Without line ends, as folded text is read."""
    return " ".join(text.split())


def test_the_answer_comes_first_and_the_report_lies_where_it_was_asked_for(highwater, tmp_path):
    done = highwater(*BENCH, "--out", "found")
    assert done.returncode == 0, done.stderr
    first, blank, columns, *_ = done.stdout.splitlines()
    assert " holds ≥ 512 tokens, forward+backward, in " in first
    assert blank == ""
    assert columns.split()[:4] == ["implementation", "mode", "direction", "longest"]
    assert "dense: equals the reference, forward and all gradients" in done.stderr
    assert {path.name for path in (tmp_path / "found").iterdir()} == FILES
    assert following(done)[:2] == ["bench", "attention"]
    problem, hint = refusal(highwater(*BENCH, "--out", "found"), 2)
    assert problem == "found has a report already"
    (again,) = offered(hint)
    document = json.loads((tmp_path / "found" / "attention.json").read_text())
    assert {row["result"] for row in document["rows"]} == {"fits"}
    once_more = highwater(*BENCH, "--only", "forward", "--lengths", "128", "--json", *again)
    assert once_more.returncode == 0, once_more.stderr
    assert (tmp_path / again[1] / "attention.json").exists()


def test_a_published_class_is_understood_and_has_the_pattern_that_is_typed(highwater):
    """The command of the issue, and the flags of ``BlockSparseAttention`` and of training."""
    classes = ("BlockSparseRingDilatedAttention", "DilatedAttention", "BlockSparseAttention")
    pattern = ("--pattern-type", "random", "--sparsity-ratio", "0.3", "--block-size", "32")
    branches = ("--segment-lengths", "100", "256", "--dilation-rates", "1", "3")
    done = highwater(
        *(*BENCH[: -len(("--implementations", "dense", "block_sparse_5"))], "--json"),
        *("--lengths", "256", "--implementations", *classes, *pattern, *branches),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    names = ["block_sparse", "dilated", "block_sparse_ring_dilated"]
    assert list(dict.fromkeys(row["implementation"] for row in document["rows"])) == names
    assert [check["reason"] for check in document["checks"]] == ["", "", ""]
    typed = {"pattern_type": "random", "sparsity_ratio": 0.3, "block_size": 32}
    for name in ("block_sparse", "block_sparse_ring_dilated"):
        assert document["order"]["patterns"][name].items() >= typed.items()
    assert document["order"]["segment_lengths"] == [100, 256]
    assert document["order"]["dilation_rates"] == [1, 3]
    shares = {row["implementation"]: row["kept_share"] for row in document["rows"]}
    assert 0.3 < shares["block_sparse"] < 0.45
    assert shares["block_sparse_ring_dilated"] < shares["dilated"]


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA GeForce GTX 1080", (6, 1)), ("Tesla T4", (7, 5)), ("Tesla V100", (7, 0))],
)
def test_a_gpu_without_bf16_computes_in_fp16_and_refuses_bf16(name, capability):
    where = Cluster(
        gpus=1, device_name=name, device_bytes=8 * GIB, compute_capability=capability
    ).machine()
    assert bench_dtype(None, "cuda", where) == "fp16"
    assert bench_dtype("fp32", "cuda", where) == "fp32"
    with pytest.raises(MachineError, match=f"{name} has no bf16"):
        bench_dtype("bf16", "cuda", where)


def test_what_does_not_run_here_alone_is_refused_by_why(highwater):
    problem, hint = refusal_after_talk(
        highwater("bench", "attention", *SMALL, "--implementations", "dense_flex")
    )
    assert "dense_flex: FlexAttention has no backward pass on the CPU" in problem
    assert offered(hint) == [["--implementations", "dense"]]


def refusal_after_talk(done: "subprocess.CompletedProcess[str]") -> tuple[str, str]:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    error, _, hint = done.stderr.splitlines()[-3:]
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.mark.usefixtures("forks")
def test_ctrl_c_keeps_what_was_measured_and_ends_every_process(tmp_path):
    words = (*BENCH[:-3], "--implementations", "dense", "window", "dilated", "--out", "found")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            ["highwater", *words],
            cwd=tmp_path,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    while "fits" not in (line := process.stderr.readline()):
        assert line, "it has told of a case before it ended"
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None, "between two cases it has no process"
    os.killpg(process.pid, signal.SIGINT)
    answer, talk = process.communicate(timeout=ENDS_S)
    assert process.returncode == 130, talk
    assert "Traceback" not in talk
    assert "interrupted: what had ended is in the report" in words_of(talk)
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert "interrupted: these are the cases that had ended." in words_of(answer)
    document = json.loads((tmp_path / "found" / "attention.json").read_text())
    assert not document["is_whole"]
    assert document["rows"][0]["result"] == "fits"
    assert list(tmp_path.glob("highwater-*")) == []
