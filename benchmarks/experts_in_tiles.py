"""Time and memory of a layer's step with experts in tiles, beside all tokens at once.

``python benchmarks/experts_in_tiles.py Qwen3-30B-A3B`` on a GPU: two layers of real widths, forward
and backward, in two minutes. A JSON line for each length and packing, whatever became of it; one
of the bytes that a token takes of a layer, attention's kernel apart; one of how much longer steps
in tiles take. ``--shorter N`` divides the lengths: the CPU runs it, and counts no memory.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import layer
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import Training, backward_of
from highwater.nouns.layout import EXPERT_TILE_TOKENS

LONG = ((131_072, 1), (196_608, 1))
"""Tokens, and the documents that they are packed in. Between these a layer's peak is of its
attention in tiles, and of its experts untiled: their slopes are the bytes of a token."""
CASES = ((65_536, 1), (65_536, 16), *LONG)
REPEATS = 3
WITHIN_S = 110
"""No case begins later."""
Row = dict[str, Any]


def main() -> None:
    """Print a JSON line for each case and way, then what they come to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory or catalog name")
    parser.add_argument("--shorter", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    for row in rows(arguments.model, shorter=arguments.shorter):
        print(json.dumps({"model": arguments.model, **row}), flush=True)


def rows(
    name: str, *, shorter: int = 1, cases: Sequence[tuple[int, int]] = CASES, repeats: int = REPEATS
) -> Iterator[Row]:
    """Measure every case in tiles and untiled, by turns."""
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    with process_mesh.alone(device):
        model, mesh = layer.model_of(name, device)
        training = layer.training_of(model, mesh)
        beside = bytes_beside(model.causal_lm.config)
        tile = EXPERT_TILE_TOKENS // shorter
        measured(training, tokens=2 * tile, documents=1, tile=tile, repeats=1)  # compiles kernels
        found: dict[tuple[int, int], Row] = {}
        for tokens, documents in cases:
            case = {"tokens": tokens // shorter, "documents": documents}
            if time.perf_counter() - start > WITHIN_S:
                yield {**case, "error": f"not begun within {WITHIN_S} s"}
                continue
            try:
                row = measured(training, **case, tile=tile, repeats=repeats)
            except Exception as error:  # noqa: BLE001 - told in its line; the others go on
                yield {**case, "error": f"{type(error).__name__}: {error}"[:500]}
                torch.cuda.empty_cache()
                continue
            found[tokens, documents] = row
            yield {**case, **row}
    if found.keys() >= set(LONG):
        yield {"layer_bytes_per_token": per_token(found, beside, shorter=shorter)}
    ratios = (row["tiled_s"] / row["untiled_s"] for row in found.values())
    yield {"step_time_ratio": [round(ratio, 4) for ratio in ratios]}


def measured(training: Training, *, tokens: int, documents: int, tile: int, repeats: int) -> Row:
    """Seconds of the fastest of a few passes and peak bytes, of both ways by turns."""
    batch = layer.batch_of(tokens, documents)
    seconds = dict[str, list[float]](tiled=[], untiled=[])
    peaks = dict[str, int]()
    for _ in range(repeats):
        for way, found in seconds.items():
            use_way(training.policy, -(-tokens // tile) if way == "tiled" else 1)
            synchronize()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            backward_of(training, [batch])
            synchronize()
            found.append(time.perf_counter() - start)
            peaks[way] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        **{f"{way}_s": min(found) for way, found in seconds.items()},
        **{f"{way}_peak_bytes": size for way, size in peaks.items()},
    }


def use_way(model: Any, tiles: int) -> None:
    """Have all experts of a model go in so many tiles."""
    experts = [each for each in model.modules() if hasattr(each, "untiled")]
    assert experts, "no experts that go in tiles"
    for each in experts:
        each.tiles = tiles


def bytes_beside(config: Any) -> int:
    """Bytes per token of the first layer's input, and of attention's kernel. The peak is of that
    layer: gradients of the second one's experts, which lie there, outweigh its input.
    """
    return 2 * config.hidden_size + kernel_bytes(config)


def kernel_bytes(config: Any) -> int:
    """Bytes per token of q's gradient in float32, and of k's and v's for every query head."""
    query = config.num_attention_heads * config.head_dim
    return 4 * query + 2 * 2 * query


def per_token(found: dict[tuple[int, int], Row], beside: int, *, shorter: int = 1) -> Row:
    """Bytes of a token in a layer, by way: the slope between the peaks of ``LONG``, less what
    is ``beside``.
    """
    less, more = (found[case] for case in LONG)
    tokens = (LONG[1][0] - LONG[0][0]) // shorter
    names = {way: f"{way}_peak_bytes" for way in ("tiled", "untiled")}
    return {way: (more[name] - less[name]) / tokens - beside for way, name in names.items()}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
