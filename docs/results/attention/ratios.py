"""Print what a report of `highwater bench attention` shows of sparse attention beside dense:

    python docs/results/attention/ratios.py docs/results/attention/layer/attention.json

TFLOP/s of the pairs that are computed, by element, and as a share of dense attention's on
FlexAttention and on the fused kernel; the peak beside what has to be there. A block on the diagonal
or at a window's edge is computed whole and counted by what is seen of it, so that the share cannot
reach one. Needs the train extra, for the tables.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from highwater.engine.attention.block_flex import block_mask
from highwater.engine.attention.block_table import block_tables
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.units import MIB

WINDOW = SparsePatternConfig(pattern_type="local_window", local_window_size=4096)
PATTERNS = {
    "dense_flex": SparsePatternConfig(sparsity_ratio=1.0),
    "window": WINDOW,
    "block_sparse_5": SparsePatternConfig(sparsity_ratio=0.05),
    "block_sparse_2": SparsePatternConfig(sparsity_ratio=0.02),
    "block_sparse_1": SparsePatternConfig(sparsity_ratio=0.01),
    "block_sparse_adaptive": SparsePatternConfig(sparsity_ratio="adaptive"),
}


def main() -> None:
    """Print a line for each case that fits."""
    document = json.loads(Path(sys.argv[1]).read_text())
    order = document["order"]
    rows = [row for row in document["rows"] if row["result"] == "fits" and row["batch"] == 1]
    print(f"{document['machine']['device_name']}, torch {document['machine']['versions']['torch']}")
    print(
        f"{'implementation':22} {'tokens':>10} {'time':>10} {'TFLOP/s':>7} {'blocks a row':>12} "
        f"{'of flex':>8} {'of fused':>8} {'x dense':>8} {'peak':>11} {'of what must be':>15}"
    )
    for row in rows:
        print(line(row, rows, order))


def line(row: dict[str, Any], rows: list[dict[str, Any]], order: dict[str, Any]) -> str:
    """A case beside the others of its length."""
    length, name = row["length_tokens"], row["implementation"]
    dense = {
        other["implementation"]: other["time_s"]
        for other in rows
        if other["length_tokens"] == length and other["kept_share"] == 1.0
    }
    words = [f"{name:22}", f"{length:10,}", f"{1e3 * row['time_s']:7,.1f} ms"]
    words.append(f"{tflop(row, order) / row['time_s']:7.0f}")
    blocks, tables_bytes = tables(name, length)
    words.append(f"{blocks:12.1f}" if blocks else " " * 12)
    for other in ("dense_flex", "dense"):
        is_one = other in dense
        rate = row["kept_share"] * dense[other] / row["time_s"] if is_one else 0.0
        words.append(f"{rate:8.0%}" if is_one else " " * 8)
    words.append(f"{dense['dense'] / row['time_s']:8.1f}" if "dense" in dense else " " * 8)
    needed = tensors_bytes(row, order) + tables_bytes
    peak = row["peak_allocated_bytes"][0]
    words.append(f"{peak / MIB:7,.0f} MiB")
    words.append(f"{peak / needed:14.2f}x")
    return " ".join(words)


def tflop(row: dict[str, Any], order: dict[str, Any]) -> float:
    """Of one pass: two products of the pairs forward, five backward, as published rates count."""
    pairs = row["kept_share"] * row["length_tokens"] ** 2 / 2
    products = 7 if row["direction"] == "forward+backward" else 2
    return products * 2 * pairs * order["heads"] * order["head_dim"] * row["batch"] / 1e12


def tables(name: str, length: int) -> tuple[float, int]:
    """Blocks of keys that the last row keeps, and the bytes of the mask's tables."""
    if name not in PATTERNS:
        return 0.0, 0
    (table,) = block_tables(PATTERNS[name], length, torch.device("cpu"))
    blocks = int((table.row_of_entry == table.rows - 1).sum())
    tensors = filter(torch.is_tensor, block_mask(table).as_tuple())
    return blocks, sum(each.nbytes for each in tensors)


def tensors_bytes(row: dict[str, Any], order: dict[str, Any]) -> int:
    """Queries, keys and values, output and log-sum-exp; with a backward pass all gradients and the
    sums that it takes of output and its gradient, which are as the log-sum-exp is.
    """
    width = 4 if order["dtype"] == "fp32" else 2
    per_token = order["heads"] * order["head_dim"] * width
    output = per_token * row["length_tokens"]
    sums = 4 * order["heads"] * row["length_tokens"]
    times = 2 if row["direction"] == "forward+backward" else 1
    return times * (row["after_qkv_bytes"][0] + output + sums)


if __name__ == "__main__":
    main()
