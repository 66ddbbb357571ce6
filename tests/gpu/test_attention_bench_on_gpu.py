"""``highwater bench attention`` on a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from highwater.units import GIB
from places import captured

pytestmark = pytest.mark.timeout(1200)


def bench(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = captured(
        [sys.executable, "-m", "highwater", "bench", "attention", "--json", *words], cwd=folder
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def longest(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in document["summary"]["longest"] if each["implementation"] == name]
    return found


def test_every_attention_of_one_gpu_is_right_and_fits(tmp_path):
    words = (
        *("--lengths", "4k", "--only", "forward+backward", "--dtype", "bf16", "--heads", "8"),
        *("--kv-heads", "2"),
    )
    document = bench(tmp_path, *words, "--head-dim", "64")
    assert [check["reason"] for check in document["checks"]] == [""] * len(document["checks"])
    names = {check["implementation"] for check in document["checks"]}
    expected = {"dense", "dense_flex", "window", "block_sparse_5", "dilated"}
    assert expected | {"block_sparse_ring_dilated"} <= names
    assert {row["result"] for row in document["rows"]} == {"fits"}
    for row in document["rows"]:
        width = 2 * 64 * row["length_tokens"]
        # the allocator rounds to 512 bytes
        assert 0 <= row["after_qkv_bytes"][0] - (8 + 2 + 2) * width < 3 * 512
        assert row["peak_reserved_bytes"][0] >= row["peak_allocated_bytes"][0]


def test_memory_that_runs_out_is_real_and_linear_before(tmp_path):
    """Under 1 GiB of a big card, dense attention of the published setting."""
    words = ("--dtype", "fp16", "--same-qkv", "--only", "forward", "--implementations", "dense")
    document = bench(tmp_path, *words, "--memory", "1GiB", "--timeout", "30s")
    found = longest(document, "dense")
    assert found["why"] == "ran out of memory"
    outside = document["machine"]["outside_bytes"]
    for row in document["rows"]:
        if row["result"] == "fits":
            assert row["peak_reserved_bytes"][0] + outside <= GIB
    (estimate,) = document["summary"]["estimates"]
    assert estimate["fit"]["bytes_per_pair"] == 0, "memory of a fused kernel is linear"
