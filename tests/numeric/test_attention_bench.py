"""The benchmark of attentions, on the CPU."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_attention_modules import BLOCK, kept_blocks

from fork_server import ForkServer
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.bench.attention.contenders import CONTENDERS, Conditions, counts
from highwater.engine.bench.attention.measurement import differences, naive_attention
from highwater.nouns.attention_bench import (
    IMPLEMENTATIONS,
    OFF_AT_THE_MOST,
    BenchLine,
    BenchOrder,
    BenchShare,
    implementations_named,
)
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.trials.trial_process import ON_THE_CPU
from highwater.units import GIB, MIB
from references.sparse_masks import meetings

pytestmark = pytest.mark.timeout(300)
WITH_WRONG_ONES = """
import json, os

from highwater.engine.bench.attention.benchmark import main
from highwater.engine.bench.attention.contenders import CONTENDERS


def spoilt(own, how):
    def build(conditions, length):
        compute = own.build(conditions, length)

        def computed(query, key, value):
            output = compute(query, key, value)
            here = {"query": query, "key": key, "value": value, "output": output}
            exec(how, here)
            return here["output"]

        return computed

    return own._replace(build=build)


for name, how in json.loads(os.environ["WAYS"]).items():
    CONTENDERS[name] = spoilt(CONTENDERS[name], how)
main()
"""
"""A module that measures as the benchmark's own does, but for attentions that are spoilt."""
BENCHMARK = """
import json, sys

from highwater.nouns.attention_bench import BenchOrder
from highwater.nouns.codec import from_json, to_json
from highwater.trials.measurements import bench_lines

order, named = from_json(sys.argv[1], BenchOrder), json.loads(sys.argv[2])
with bench_lines(order, **named) as lines:
    for line in lines:
        print(to_json(line).replace(chr(10), " "))
"""
SERVER = ForkServer(
    *("forked_modules", "highwater.engine.bench.attention.contenders"),
    environment={**ON_THE_CPU, "PYTHONPATH": str(Path(__file__).parents[1])},
)
RED = {
    "dense": ("output = output * 1.001", "output 1.0e-03"),
    "window": (
        "output = output.detach() + 0 * (query.sum() + key.sum() + value.sum())",
        "query gradient 1.0",
    ),
    "block_sparse_5": (
        "output = output + (value - value.detach())[:, :1] * 0.01",
        "value gradient",
    ),
    "dilated": ("output = output * float('nan')", "output is no number"),
}
"""Attentions that are wrong: how, and what is said of it."""
FAILING = {
    "block_sparse_2": ("raise ValueError('broken')", "crashed", "ValueError: broken"),
    "block_sparse_1": ("import os; os.kill(os.getpid(), 9)", "crashed", "ended with -9"),
    "block_sparse": (
        "import torch; torch.ones(2**40)",
        "ran out of memory",
        "can't allocate memory",
    ),
    "block_sparse_adaptive": ("import time; time.sleep(2.1)", "took too long", "longer than 2 s"),
}
"""Attentions that fail where they are long: how, the result, and its reason."""
SOUND = "block_sparse_ring_dilated"
"""One that is right, comes last, and starts a process in each pass."""


def conditions_of(name: str, **more: Any) -> Conditions:
    asked = {"device": "cpu", "implementations": (name,), "heads": 4, "kv_heads": 2, "head_dim": 8}
    share = BenchShare(order=BenchOrder(**(asked | more)), implementation=name)
    return Conditions.of(share, torch.device("cpu"), "flash")


CPU = conditions_of("dense")


def run(
    measures: Path | None = None, ways: dict[str, str] | None = None, **order: object
) -> list[BenchLine]:
    asked = {"device": "cpu", "implementations": ("dense",), "lengths": (256,), "head_dim": 8}
    named = {} if measures is None else {"measures": measures.stem}
    found = {} if measures is None else {"PYTHONPATH": str(measures.parent)}
    words = (to_json(BenchOrder(**(asked | order))), json.dumps(named))
    told = {**os.environ, "WAYS": json.dumps(ways), **found}
    done = SERVER.run(f"-c{BENCHMARK}", *words, within_s=280, environment=told)
    assert done.returncode == 0, done.stderr
    return [from_json(line, BenchLine) for line in done.stdout.splitlines()]


def spoilt(folder: Path, ways: dict[str, str], **order: object) -> list[BenchLine]:
    """The same where attentions are spoilt, each in its way."""
    measures = folder / "spoilt_attentions.py"
    measures.write_text(WITH_WRONG_ONES)
    return run(measures, ways, implementations=tuple(ways), directions=("forward",), **order)


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the processes that a sound attention started."""
    return tmp_path_factory.mktemp("pids") / "pids"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, pids: Path) -> list[BenchLine]:
    """What is told of attentions of which all but one are wrong or fail."""
    ways = {name: how for name, (how, _) in RED.items()}
    ways |= {name: f"if query.shape[2] > 600: {how}" for name, (how, *_) in FAILING.items()}
    ways[SOUND] = (
        "import subprocess\n"
        "started = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{started.pid}}\\n')"
    )
    return spoilt(tmp_path_factory.mktemp("faults"), ways, lengths=(256, 700), timeout_s=2.0)


@pytest.fixture(scope="module")
def measured() -> list[BenchLine]:
    names = ("dense", "window", "block_sparse_5", "dilated")
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    return run(lengths=(512, 2560), implementations=names, **sizes)


def rows(lines: list[BenchLine]) -> list[tuple[object, ...]]:
    found = (line.row for line in lines if line.row is not None)
    return [(row.implementation, row.length_tokens, row.result) for row in found]


def test_whoever_is_named_can_take_part_and_the_other_way_round():
    assert list(CONTENDERS) == list(IMPLEMENTATIONS)
    own = {name for name in IMPLEMENTATIONS if name != "block_sparse"}
    assert set(implementations_named(())) == own, "that one has the pattern of flags"
    assert implementations_named(("block_sparse", "dense")) == (
        *("dense", "block_sparse_5", "block_sparse_2", "block_sparse_1", "block_sparse_adaptive"),
    )


def test_the_formula_that_judges_is_the_reference_and_counts_keys_as_often_as_met():
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, 37, 5, dtype=torch.float64) for heads in (4, 2, 2))
    found = naive_attention(q, k, v, torch.ones(37, 37).tril(), 0.3)
    expected = reference_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), document_lengths=[37], scaling=0.3
    )
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
    q, k, v = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.tensor([[[3.0], [9.0]]])
    counts = torch.tensor([[0.0, 0.0], [2.0, 1.0]])
    assert naive_attention(q, k, v, counts, 1.0).flatten().tolist() == [0.0, 5.0]


@pytest.mark.parametrize(
    "name", [name for name, each in IMPLEMENTATIONS.items() if "single" in each.modes]
)
def test_each_equals_the_formula_with_grouped_heads(name):
    contender, conditions = CONTENDERS[name], conditions_of(name)
    if contender.obstacle(conditions) is not None:
        assert name == "dense_flex", "all others run on the CPU"
        return
    assert max(differences(contender.build, conditions).values()) <= OFF_AT_THE_MOST["fp32"]


BRANCHES = (((), (1, 2)), ((7, 100), (1, 3)), ((16, 32, 300), (1, 2, 4)))


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_what_a_token_meets_is_told_by_the_definition_of_segments_and_blocks(branches, heads):
    """The formula judges by counts; here they are counted by another, of its own test."""
    name, blocks = "block_sparse_ring_dilated", SparsePatternConfig("dilated_sparse", 0.4, BLOCK)
    order = {"heads": heads[0], "kv_heads": heads[1], "patterns": {name: blocks}}
    order |= {"segment_lengths": branches[0], "dilation_rates": branches[1]}
    for length in (1, 37, 129):
        of_length = (branches[0] or (max(1, length // 2), length), branches[1])
        for contender, *seen in ((name, kept_blocks), ("dilated",)):
            found = counts(conditions_of(contender, **order), length)
            assert found.equal(meetings(length, heads[0], of_length, *seen).float())


def test_the_benchmarks_headline_attention_has_blocks_of_256():
    pattern = IMPLEMENTATIONS["block_sparse_ring_dilated"].pattern
    assert (pattern.block_size, pattern.sparsity_ratio) == (256, "adaptive")
    assert SparsePatternConfig().block_size == 128


@pytest.mark.parametrize("name", RED)
def test_a_wrong_attention_has_no_number(faults, name):
    (red,) = [line.check for line in faults if line.check and line.check.implementation == name]
    assert RED[name][1] in red.reason
    (row,) = [line.row for line in faults if line.row and line.row.implementation == name]
    assert (row.result, row.length_tokens, row.time_s) == ("red", None, None)
    assert row.peak_allocated_bytes == row.after_qkv_bytes == ()


@pytest.mark.parametrize("name", FAILING)
def test_a_case_that_fails_is_told_by_how(faults, name):
    _, result, reason = FAILING[name]
    own = [row for row in rows(faults) if row[0] == name]
    assert own == [(name, 256, "fits"), (name, 700, result)]
    (failed,) = [
        row for line in faults if (row := line.row) and row.implementation == name and not row.fits
    ]
    assert reason in failed.reason


def test_no_fault_of_one_takes_another_along_and_what_it_started_ends(faults, pids):
    assert len({line.check.reason for line in faults if line.check} - {""}) == len(RED)
    assert rows(faults)[-2:] == [(SOUND, 256, "fits"), (SOUND, 700, "fits")]
    started = [int(pid) for pid in pids.read_text().split()]
    assert started
    assert not [pid for pid in started if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_memory_is_a_limit_that_binds_and_the_longest_within_it_is_found(measured):
    """Of eight heads the formula takes 54 MiB at 512 tokens, and four times as much at 1,024."""
    (machine,) = [line.machine for line in measured if line.machine is not None]
    lines = run(
        implementations=("reference",),
        lengths=(),
        most_tokens=1024,
        directions=("forward",),
        memory_bytes=machine.outside_bytes + 160 * MIB,
        heads=8,
        kv_heads=8,
    )
    results = dict(row[1:] for row in rows(lines))
    assert (results[512], results[1024]) == ("fits", "ran out of memory")
    fits = max(length for length, result in results.items() if result == "fits")
    fails = min(length for length, result in results.items() if result != "fits")
    assert fails - fits == 64, "an eighth of the last doubling"
    for row in (line.row for line in lines if line.row is not None and line.row.fits):
        assert row.peak_reserved_bytes[0] <= machine.outside_bytes + 160 * MIB


def test_bytes_are_those_of_the_tensors_and_a_peak_is_above_what_it_is_made_of(measured):
    shared = run(lengths=(512,), heads=4, kv_heads=4, head_dim=16, same_qkv=True)
    for row in (line.row for line in measured if line.row is not None):
        query = 4 * row.length_tokens * 16 * 4
        assert row.after_qkv_bytes == (2 * query,), "keys and values have half as many heads"
        assert row.peak_allocated_bytes[0] >= 3 * query, "and the output is as large as queries"
        assert row.peak_reserved_bytes[0] > row.peak_allocated_bytes[0]
    for row in (line.row for line in shared if line.row is not None):
        assert row.after_qkv_bytes == (4 * 512 * 16 * 4,), "one tensor is counted once"


def test_the_kept_share_is_measured(measured):
    shares = {
        row.implementation: row.kept_share
        for line in measured
        if (row := line.row) and row.length_tokens == 2560
    }
    pairs = 2560 * 2561 / 2
    window = (512 * 513 / 2 + (2560 - 512) * 512) / pairs
    # of 20 rows of blocks each keeps one: the diagonal, whose blocks are half seen
    diagonal = 20 * (128 * 129 / 2) / pairs
    # halves whole, and every other token of all
    branches = (2 * 1280 * 1281 / 2 + 1280 * 1281 / 2) / pairs
    assert shares == pytest.approx(
        {"dense": 1.0, "window": window, "block_sparse_5": diagonal, "dilated": branches}
    )


@pytest.mark.timeout(600)
def test_two_processes_share_a_sequence_or_have_one_each():
    lines = run(
        gpus=2,
        lengths=(255, 1024),
        implementations=("dense", "ring", "block_sparse_ring", "ulysses"),
        memory_bytes=GIB,
    )
    assert [line.check.reason for line in lines if line.check is not None] == [""] * 4
    found = {}
    for row in (line.row for line in lines if line.row is not None):
        name = row.implementation if row.mode == "ring" else row.mode
        found[name, row.direction, row.length_tokens] = row
    assert len(found) == 5 * 2 * 2
    assert all(row.result == "fits" for row in found.values()), found
    whole = found["single", "forward", 1024].after_qkv_bytes[0]
    for ring in ("ring", "block_sparse_ring"):
        assert found[ring, "forward", 1024].after_qkv_bytes == (whole // 2,) * 2
    # of eight rows of blocks each keeps one: the diagonal, whose blocks are half seen
    kept = 8 * (128 * 129 / 2) / (1024 * 1025 / 2)
    assert found["block_sparse_ring", "forward", 1024].kept_share == pytest.approx(kept)
    assert found["ulysses", "forward", 1024].after_qkv_bytes == (whole // 2,) * 2
    parallel = found["data parallel", "forward", 1024]
    assert (parallel.batch, parallel.after_qkv_bytes) == (2, (whole,) * 2)


@pytest.mark.parametrize("name", ["dense_flex", "block_sparse_5", "block_sparse_ring_dilated"])
def test_what_threads_cannot_compile_is_not_measured_in_data_parallel(name):
    whole = replace(conditions_of(name, gpus=2), device=torch.device("cuda"), dtype=torch.bfloat16)
    parallel = replace(whole, share=whole.share.replace(mode="data parallel"))
    assert CONTENDERS[name].obstacle(whole) is None
    assert "threads" in (CONTENDERS[name].obstacle(parallel) or "")
    assert CONTENDERS["dense"].obstacle(parallel) is None


def test_a_rank_that_fails_ends_the_others_at_once(tmp_path):
    how = (
        "import torch.distributed as dist\n"
        "if query.shape[2] == 300 and dist.is_initialized() and dist.get_rank():\n"
        "    raise ValueError('rank one')\n"
        "if query.shape[2] == 300 and dist.is_initialized():\n"
        "    dist.barrier()"
    )
    lines = spoilt(tmp_path, {"dense": how}, gpus=2, lengths=(300,))
    assert rows(lines) == [("dense", 300, "fits"), ("dense", 300, "crashed")]
    assert [line.row.reason for line in lines if line.row and line.row.reason] == [
        "ValueError: rank one"
    ]
