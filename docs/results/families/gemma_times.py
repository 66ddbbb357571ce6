"""How long attention and whole steps of Gemma 4 take on one GPU.

    cd docs/results/families
    python gemma_times.py --predict >> gemma_times.ndjson
    python gemma_times.py --measure steps attention >> gemma_times.ndjson
    python gemma_times.py --predict --unfitted  # and --measure steps
    python gemma_times.py --table

Each line of ``gemma_times.ndjson`` is a document: one attention of one layer, forward and both
ways, in bfloat16 by the engine's own path; one trial of ``highwater try``, two full steps with
random weights; or what was predicted of such a trial before. Steps are measured before this process
holds anything of the GPU, attention from the shortest length to the longest. Both take three
minutes on an H200; what is measured is said on stderr. ``run`` was added to the lines: between the
first and the second one rows of wide heads were aligned.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hybrids import COMMON, OF_GEMMA, asked, figures

FILE = Path(__file__).with_suffix(".ndjson")
LENGTHS = {8_192: 5, 32_768: 3, 131_072: 1}
"""Tokens of the one document, and how often it is timed."""
TRIALS = tuple(
    f"{trial} {COMMON}"
    for trial in (
        "gemma-4-E4B --length 16384 --lora 16 --activations gpu",
        "gemma-4-E4B --length 32768 --lora 16 --activations gpu --recompute all-but-attention",
        "gemma-4-26B-A4B --length 16384 --lora 16 --activations gpu",
    )
)
"""What ``highwater try`` is asked: adapters on all linear layers, of the mixture on attention."""
UNFITTED = tuple(
    f"{trial} {COMMON}"
    for trial in (
        "gemma-4-E4B --length 65536 --lora 16 --activations host",
        "gemma-4-E2B --length 32768 --lora 16 --activations gpu",
        "gemma-4-31B --length 8192 --lora 16 --activations gpu",
        "gemma-4-26B-A4B --length 32768 --lora 16 --activations host",
        f"gemma-4-E4B --length 65536 {OF_GEMMA} --activations host",
    )
)
"""Trials of which no constant is made, each measured once. What is predicted of the first four was
written down before; of the last one after, by the same commit.
"""
LIMIT_S = 100
"""A trial that takes longer is ended."""


class Heads(NamedTuple):
    """One attention of a layer."""

    of: str
    query_heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None


ATTENTIONS = (
    Heads("gemma-4-E4B", 8, 2, 256, 512),
    Heads("gemma-4-26B-A4B", 16, 8, 256, 1024),
    Heads("gemma-4-E4B", 8, 2, 512, None),
    Heads("gemma-4-26B-A4B", 16, 2, 512, None),
)


def main() -> None:
    """Print a line for each thing that is measured or predicted, or the table of them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", nargs="+", default=[], choices=("steps", "attention"))
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--unfitted", action="store_true")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    trials = UNFITTED if words.unfitted else TRIALS
    asked: list[Iterator[dict[str, Any]]] = []
    if words.predict:
        asked.append(map(predicted, trials))
    if "steps" in words.measure:
        asked.append(map(tried, trials))
    if "attention" in words.measure:
        asked.append(attentions())
    for line in chain.from_iterable(asked):
        print(json.dumps(line), flush=True)
    if words.table:
        print(table([json.loads(line) for line in FILE.read_text().splitlines()]))


def attentions() -> Iterator[dict[str, Any]]:
    """Milliseconds of the attention of each kind of layer."""
    import torch

    device = torch.cuda.get_device_name()
    for tokens, times in LENGTHS.items():
        for heads in ATTENTIONS:
            print(f"{heads}, {tokens} tokens", file=sys.stderr, flush=True)
            forward_ms, both_ms = attention_ms(heads, tokens, times)
            yield {
                "what": "attention",
                **heads._asdict(),
                "tokens": tokens,
                "forward_ms": forward_ms,
                "both_ms": both_ms,
                "device": device,
                "torch": torch.__version__,
            }


def attention_ms(heads: Heads, tokens: int, times: int) -> tuple[float, float]:
    """Median milliseconds of the forward pass alone, and of both passes."""
    import torch

    from highwater.engine.attention.patterned import Documents, Pattern, attend_in_pattern
    from highwater.nouns.layout import WIDEST_FUSED_HEAD

    torch.manual_seed(0)
    size, window = heads.head_dim, heads.window_tokens
    pattern = Pattern(scaling=1.0, window_tokens=window, is_wide=size > WIDEST_FUSED_HEAD)

    def made(count: int, scale: float) -> torch.Tensor:
        drawn = torch.randn(1, tokens, count, size, device="cuda", dtype=torch.bfloat16)
        return drawn.mul_(scale).transpose(1, 2).requires_grad_()

    own = [made(heads.query_heads, size**-0.25)]
    own += [made(heads.kv_heads, size**-0.25), made(heads.kv_heads, 1.0)]
    upstream = torch.randn(1, tokens, heads.query_heads, size, device="cuda", dtype=torch.bfloat16)
    documents = Documents(lengths=(tokens,), pattern=pattern, kernel="flash")

    def forward() -> torch.Tensor:
        return attend_in_pattern(*own, documents=documents).output_BSHD

    def both() -> object:
        return torch.autograd.grad(forward(), own, upstream)

    return milliseconds(forward, times), milliseconds(both, times)


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Median time of a call on the GPU, after one to warm up where there are several."""
    import torch

    found: list[float] = []
    for _ in range(times + (times > 1)):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return median(found[-times:])


def tried(trial: str) -> dict[str, Any]:
    """Seconds of a trial's steps, and its peak."""
    print(trial, file=sys.stderr, flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "highwater", "try", *trial.split(), "--json"]
    done = subprocess.run(
        [*command, "--timeout", str(LIMIT_S)], capture_output=True, text=True, check=False
    )
    wall = {"wall_s": time.monotonic() - began, "exit": done.returncode}
    try:
        peak, steps = figures(json.loads(done.stdout))
    except ValueError:
        return {"what": "step", "trial": trial, "error": done.stderr[-1500:], **wall}
    return {
        "what": "step",
        "trial": trial,
        "step_times_s": steps,
        "peak_allocated_bytes": peak,
        **wall,
    }


def predicted(trial: str) -> dict[str, Any]:
    """What is said of a trial before."""
    cell = asked(trial)
    phases = [sum(term["bytes"] for term in each["terms"]) for each in cell["footprint"]["phases"]]
    step = cell["step"]
    return {
        "what": "prediction",
        "trial": trial,
        "time_s": sum(part["seconds"] for part in step["parts"]) if step else None,
        "allocated_bytes": max(phases),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Attention and steps by run, and what was predicted first and last, in Markdown."""
    runs = sorted({line["run"] for line in lines if "run" in line})
    titles = [f"run {run}: forward, both ways" for run in runs]
    rows = [
        f"| attention | tokens | {' | '.join(titles)} |",
        f"| --- | ---: |{' ---: |' * len(runs)}",
    ]
    calls: dict[tuple[Any, ...], list[str]] = {}
    for line in (line for line in lines if line["what"] == "attention"):
        heads = Heads(*(line[name] for name in Heads._fields))
        times = f"{line['forward_ms']:,.1f}, {line['both_ms']:,.1f} ms"
        calls.setdefault((*heads, line["tokens"]), []).append(times)
    for (*of, tokens), times in sorted(calls.items(), key=lambda call: call[0][3:4] + call[0][:1]):
        heads = Heads(*of)
        reads = f", window {heads.window_tokens:,}" if heads.window_tokens else ""
        named = f"{heads.of}: {heads.query_heads} heads of {heads.head_dim}{reads}"
        rows.append(f"| {named} | {tokens:,} | {' | '.join(times)} |")
    steps = [f"run {run}: a step" for run in runs]
    rows += [
        "",
        f"| trial | {' | '.join(steps)} | predicted before | after | allocated | before | after |",
        f"| --- |{' ---: |' * (len(runs) + 5)}",
    ]
    for trial in TRIALS:
        own = [line for line in lines if line.get("trial") == trial]
        found = [line for line in own if line["what"] == "step"]
        said = [line for line in own if line["what"] == "prediction"]
        step_s, peak = (
            [line["step_times_s"][-1] for line in found],
            found[-1]["peak_allocated_bytes"],
        )
        cells = [f"{each:.2f} s" for each in step_s]
        # what was said before is beside the run that it was said of
        for each, against in ((said[0], step_s[0]), (said[-1], step_s[-1])):
            cells.append(f"{each['time_s']:.2f} s, {each['time_s'] / against - 1:+.0%}")
        cells.append(f"{peak / 2**30:.3f} GiB")
        cells += [f"{each['allocated_bytes'] / peak - 1:+.2%}" for each in (said[0], said[-1])]
        rows.append(f"| {trial.replace(f' {COMMON}', '')} | {' | '.join(cells)} |")
    rows += ["", "| nothing fitted to it | a step | predicted before | allocated | predicted |"]
    rows.append(f"| --- |{' ---: |' * 4}")
    for trial in UNFITTED:
        said, found = (
            next(line for line in lines if (line["what"], line.get("trial")) == (what, trial))
            for what in ("prediction", "step")
        )
        step_s, peak = found["step_times_s"][-1], found["peak_allocated_bytes"]
        rows.append(
            f"| {trial.replace(f' {COMMON}', '')} "
            f"| {step_s:.2f} s | {said['time_s']:.2f} s, {said['time_s'] / step_s - 1:+.0%} "
            f"| {peak / 2**30:.3f} GiB | {said['allocated_bytes'] / peak - 1:+.2%} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
