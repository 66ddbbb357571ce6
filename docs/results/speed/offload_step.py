"""A step with FSDP2's offload: gradients added up beside the GPU, as the engine does, and as FSDP2
itself does; writes JSON.

``python docs/results/speed/offload_step.py`` (one GPU; 80 GiB of host memory for Qwen3-4B) builds
one model and has both ways take turns on it, after one step of each; it writes
``offload_step.json`` beside it after every step, so that what was measured stays when time is over.
``--table`` only prints. A step is forward and backward of its micro-batches, and the update, which
is the same for both: clip, AdamW on the host, gradients zeroed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from highwater.units import GIB

FILE = Path(__file__).with_suffix(".json")
OURS, FSDP2S = "beside the GPU", "by FSDP2"
WARM_UP_TOKENS = 512
HEADINGS = (
    "micro-batches",
    "gradients are added",
    "steps",
    "step s",
    "of it update s",
    "ratio",
    "peak reserved GiB",
)


def main() -> None:
    """Measure, unless told otherwise, then print what the file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-4B", help="catalog name or directory")
    parser.add_argument(
        "--length", type=int, default=32_768, help="tokens of one sequence, a micro-batch each"
    )
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2], help="of one step")
    parser.add_argument("--rounds", type=int, default=2, help="timed steps of each")
    parser.add_argument("--output", type=Path, default=FILE, help="the JSON file")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        measure(arguments)
    print(table(json.loads(arguments.output.read_text())))


def measure(arguments: argparse.Namespace) -> None:
    """Both ways in turns, the shortest steps first."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    import torch

    from process_environment import environment

    began = time.perf_counter()
    training = trainer_of(arguments.model, arguments.length)
    torch._C._host_emptyCache()
    document: dict[str, Any] = {
        "environment": environment()
        | {
            "command": ["python", "docs/results/speed/offload_step.py"],
            "cpus": len(os.sched_getaffinity(0)),
        },
        "model": arguments.model,
        "length_tokens": arguments.length,
        "setup_s": time.perf_counter() - began,
        "pinned_before_bytes": pinned_bytes(),
        "steps": [],
    }
    for way in (OURS, FSDP2S):
        step(training, way, arguments.model, WARM_UP_TOKENS, 1)
    for round_ in range(arguments.rounds):
        for count in arguments.micro_batches:
            for way in (OURS, FSDP2S):
                document["steps"].append(
                    {
                        "round": round_,
                        **step(training, way, arguments.model, arguments.length, count),
                    }
                )
                arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def trainer_of(name: str, length: int) -> Any:
    """Random weights, in host memory."""
    import torch

    from highwater.engine.attention.dense import select_kernel
    from highwater.engine.attention.registry import register
    from highwater.engine.models.build import build, read_config
    from highwater.engine.parallel import mesh as process_mesh
    from highwater.engine.training.optimizers import make_optimizer
    from highwater.engine.training.step import Training
    from highwater.model.model import load_model
    from highwater.nouns.layout import Layout

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    device = torch.device("cuda", 0)
    process_mesh.join(device)
    mesh = process_mesh.shard_mesh(Layout(), device)
    known = load_model(name)
    shape = known.shape
    kernel = select_kernel(
        device,
        torch.bfloat16,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    model = build(
        read_config(known.directory, length_tokens=length, rope="auto"),
        directory=known.directory,
        mesh=mesh,
        attention=register(kernel),
        loss="chunked",
        recompute="layer",
        compute_dtype=torch.bfloat16,
        offload=True,
    )
    return Training(policy=model, optimizer=make_optimizer(model), mesh=mesh)


def step(training: Any, way: str, name: str, length: int, micro_batches: int) -> dict[str, Any]:
    """One step, timed, and what it took at the most."""
    import torch

    from highwater.engine.data.batches import Document, pack
    from highwater.engine.parallel.offload import adding_up
    from highwater.engine.training import step as engine
    from highwater.model.model import load_model

    engine.adding_up = (
        adding_up if way == OURS else lambda _: nullcontext()
    )  # a backward pass without it is FSDP2's alone
    generator = torch.Generator().manual_seed(length)
    vocabulary = load_model(name).shape.vocab_size
    ids = [torch.randint(vocabulary, (length,), generator=generator) for _ in range(micro_batches)]
    packed = [pack([Document(each, each)]) for each in ids]
    entered: dict[str, float] = {}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss, (norm, *_) = engine.train_step(
        training, packed, enter=lambda phase: entered.update({phase: time.perf_counter()})
    )
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return {
        "way": way,
        "length_tokens": length,
        "micro_batches": micro_batches,
        "step_time_s": ended - began,
        "update_s": ended - entered["optimizer"],
        "loss": float(loss),
        "gradient_norm": float(norm),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "pinned_bytes": pinned_bytes(),
    }


def pinned_bytes() -> int:
    """Pinned memory of the process, with what PyTorch keeps of it; its count of what is in use
    never goes down (torch 2.11).
    """
    import torch

    return torch.cuda.host_memory_stats()["allocated_bytes.current"]


def table(document: dict[str, Any]) -> str:
    """One line for each way and number of micro-batches; the ratio is FSDP2's median over this
    one.
    """
    lines = [
        f"{document['model']}, {document['length_tokens']:,} tokens a micro-batch, "
        f"{document['environment'].get('gpu')}",
        "",
    ]
    lines += [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for count in sorted({each["micro_batches"] for each in document["steps"]}):
        of_ways = {
            way: [s for s in document["steps"] if (s["micro_batches"], s["way"]) == (count, way)]
            for way in (OURS, FSDP2S)
        }
        medians = {
            way: statistics.median(s["step_time_s"] for s in steps)
            for way, steps in of_ways.items()
            if steps
        }
        for way, median in medians.items():
            steps = of_ways[way]
            update = statistics.median(s["update_s"] for s in steps)
            ratio = f"{medians[FSDP2S] / median:.2f}" if FSDP2S in medians else "-"
            reserved = max(s["peak_reserved_bytes"] for s in steps) / GIB
            figures = (
                str(count),
                way,
                str(len(steps)),
                f"{median:.2f}",
                f"{update:.2f}",
                ratio,
                f"{reserved:.2f}",
            )
            lines.append(f"| {' | '.join(figures)} |")
    if "pinned_before_bytes" in document:
        most = max(each["pinned_bytes"] for each in document["steps"])
        lines += [
            "",
            f"Pinned on the way, both ways together: "
            f"{(most - document['pinned_before_bytes']) / GIB:.2f} GiB",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
