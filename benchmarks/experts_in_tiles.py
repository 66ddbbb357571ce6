"""Time and peak memory of one layer's step with experts in tiles, beside one tile of all tokens.

``python benchmarks/experts_in_tiles.py Qwen3-30B-A3B`` on a GPU: two layers of real widths, forward
and backward, at several lengths; a JSON line for each of them, whatever became of it. ``tiles`` 1
holds copies of all tokens; ``untiled`` is transformers' own grouped products, recomputed.
"""

import argparse
import json
import time
from contextlib import nullcontext
from unittest import mock

import torch

import layer
from highwater.engine.models import build
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import backward_of

LENGTHS = (32_768, 65_536, 131_072)
REPEATS = 3


def main() -> None:
    """Print a JSON line for each length and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory or catalog name")
    model = parser.parse_args().model
    device = torch.device("cuda", 0)
    with process_mesh.alone(device):
        for way in ("untiled", "one tile", "tiles"):
            for length in LENGTHS:
                row = {"model": model, "way": way, "tokens": length}
                try:
                    row |= measured(model, device, way, length)
                except torch.OutOfMemoryError:
                    row |= {"out_of_memory": True}
                print(json.dumps(row), flush=True)
                torch.cuda.empty_cache()


def measured(name: str, device: torch.device, way: str, length: int) -> dict[str, float]:
    """Seconds and peak bytes of the fastest of a few passes."""
    own = mock.patch.object(build, "tile_experts", return_value=0)
    with own if way == "untiled" else nullcontext():
        model, mesh = layer.model_of(name, device, 1 if way == "one tile" else None)
    training, batch = layer.training_of(model, mesh), layer.batch_of(length)
    seconds: list[float] = []
    for _ in range(1 + REPEATS):  # the first compiles kernels, and allocates gradients
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        backward_of(training, [batch])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds[1:]), "peak_bytes": torch.cuda.max_memory_allocated()}


if __name__ == "__main__":
    main()
