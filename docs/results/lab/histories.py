"""Records what PyTorch's caching allocator does on a GPU: random sequences, and whole trials;
prints how its simulation compares.

``python docs/results/lab/histories.py`` (one GPU, two minutes) writes ``histories.json.gz``
beside it, what has finished after each case; ``--table`` only replays and prints, without a GPU.
Each case runs in a process of its own, under its allocator.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from highwater.api.search import prepare_trial
from highwater.memory.trace.allocator import CachingAllocator, CapacityError
from highwater.memory.trace.replay import replay
from highwater.nouns.events import Allocate, Enter, EventLog, Free, ReleaseCached, TraceEvent
from highwater.nouns.request import Request
from highwater.nouns.trial import TrialSpec
from highwater.trials.trial_process import trial_environment
from highwater.units import GIB, MIB, format_tokens

FILE = Path(__file__).with_suffix(".json.gz")
ALLOCATORS = ("native", "expandable")
SEEDS = range(4)
STEPS = 3000
CAP_BYTES = 5 * GIB
"""Of the sequences that run into the end of their memory."""
TRIALS: dict[str, dict[str, Any]] = {
    f"{name}, {allocator}": {"allocator": allocator, **asked}
    for name, asked in {
        "Qwen3-0.6B sft full 16,384": {"model": "Qwen3-0.6B", "loss": "full", "length": 16384},
        "Qwen3-0.6B grpo full 16,384": {
            "model": "Qwen3-0.6B",
            "loss": "full",
            "objective": "grpo",
            "entropy": "full",
            "sequences_per_micro_batch": 2,
            "length": 16384,
        },
        "Qwen3-1.7B sft full 114,688 of 79.15 GiB, memory-only": {
            "model": "Qwen3-1.7B",
            "loss": "full",
            "memory": "79.15GiB",
            "attention_depth": 1,
            "length": 114688,
        },
    }.items()
    for allocator in ALLOCATORS
}
MARKS = ("release cached", "experience", "forward", "backward", "optimizer", "save")
"""What is written into a history as an allocation of an odd size, which nothing else has:
``FIRST_MARK`` and two more each."""
FIRST_MARK = 300_001


def main() -> None:
    """Record what is asked, or what is not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="replay what is recorded, record nothing"
    )
    parser.add_argument(
        "--record", nargs=3, metavar=("KIND", "NAME", "FILE"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.record:
        kind, name, target = arguments.record
        Path(target).write_text(
            json.dumps(record_random(name) if kind == "random" else record_trial(name))
        )
        return
    told: dict[str, Any] = (
        json.loads(gzip.decompress(FILE.read_bytes()))
        if FILE.is_file()
        else {"random": {}, "trials": {}}
    )
    if not arguments.table:
        names = [
            f"{a}, seed {seed}, {end}"
            for a in ALLOCATORS
            for seed in SEEDS
            for end in ("without end", "a share")
        ]
        for kind, name in [
            *(("random", name) for name in names),
            *(("trials", name) for name in TRIALS),
        ]:
            if name not in told[kind]:
                keep(told, kind, name)
    print(table(told))


def keep(told: dict[str, Any], kind: str, name: str) -> None:
    """One case, in its own process; a case that fails is said and left out."""
    allocator = "expandable" if "expandable" in name else "native"
    environment = os.environ | dict.fromkeys(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        f"expandable_segments:{allocator == 'expandable'}",
    )
    if kind == "trials":
        environment = trial_environment(trial_spec(name)) | {
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        }
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "case.json")
        ended = subprocess.run(
            [sys.executable, __file__, "--record", kind, name, target], env=environment, check=False
        )
        if ended.returncode or not target.is_file():
            print(f"{name}: exit code {ended.returncode}", flush=True)
            return
        told[kind][name] = json.loads(target.read_text())
    FILE.write_bytes(gzip.compress(json.dumps(told, separators=(",", ":")).encode(), mtime=0))
    print(f"{name}: recorded", flush=True)


def record_random(name: str) -> dict[str, Any]:
    """Allocations and frees by a seeded generator, on two streams, and what the allocator held
    after each.
    """
    import torch

    dice = random.Random(name)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    total = torch.cuda.mem_get_info()[1]
    if "a share" in name:
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total)
    live: list[tuple[int, int]] = []
    steps: list[list[int]] = []
    for number in range(STEPS):
        if live and dice.random() < 0.48:
            which = dice.randrange(len(live)) if dice.random() < 0.7 else len(live) - 1
            handle, pointer = live.pop(which)
            torch.cuda.caching_allocator_delete(pointer)
            steps.append([-1, handle, 0])
        elif dice.random() < 0.005:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            steps.append([-2, 0, 0])
        else:
            size = int(2 ** dice.uniform(6, dice.choice((14, 22, 28, 30.5))))
            stream = dice.random() < 0.2
            with suppress(torch.OutOfMemoryError):
                live.append(
                    (number, torch.cuda.caching_allocator_alloc(size, stream=streams[stream]))
                )
            steps.append([size, number, int(stream)])
        steps[-1] += [torch.cuda.memory_reserved(), torch.cuda.memory_allocated()]
    return {
        "cap_bytes": int(CAP_BYTES / total * total) if "a share" in name else None,
        "steps": steps,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "out_of_memory": torch.cuda.memory_stats()["num_ooms"],
        "versions": versions(),
    }


def trial_spec(name: str) -> TrialSpec:
    """The trial of a case, as ``highwater try`` would run it."""
    asked = dict(TRIALS[name])
    length = asked.pop("length")
    return prepare_trial(Request(gpus=(1,), allow_busy=True, **asked), length)


def record_trial(name: str) -> dict[str, Any]:
    """The engine's own trial in this process, every allocation from the first on, and the peaks
    that PyTorch reports.
    """
    import torch

    from highwater.engine.training.rank_run import Trial

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

    def mark(what: str) -> None:
        size = FIRST_MARK + 2 * MARKS.index(what)
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(size))

    empty, enter = torch.cuda.empty_cache, Trial._enter

    def marked_empty() -> None:
        mark("release cached")
        empty()

    def marked_enter(self: Any, phase: str) -> None:
        mark(phase)
        enter(self, phase)

    torch.cuda.empty_cache, Trial._enter = marked_empty, marked_enter  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=4_000_000
    )
    trial = Trial(trial_spec(name))
    trial.run()
    stats, budget = torch.cuda.memory_stats(), trial.report.budget
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    log = event_log(history)
    return {
        "log": msgspec.to_builtins(log),
        "cap_bytes": budget.allocator_cap_bytes if budget else None,
        "is_share": "memory" in TRIALS[name],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "versions": versions(),
    }


def event_log(history: list[dict[str, Any]]) -> EventLog:
    """A history of PyTorch's, its marks read."""
    events: list[TraceEvent] = []
    streams: dict[int, int] = {}
    live: dict[int, int] = {}
    for number, entry in enumerate(history):
        size, mark = entry["size"], (entry["size"] - FIRST_MARK) // 2
        is_mark = entry["size"] % 2 == 1 and 0 <= mark < len(MARKS)
        match entry["action"]:
            case "alloc":
                if is_mark:
                    events.append(Enter(MARKS[mark]) if mark else ReleaseCached())
                    # A marked allocation is one too: it comes before what it says.
                    events.insert(
                        -1,
                        Allocate(
                            number, size, streams.setdefault(entry["stream"], len(streams)), 0
                        ),
                    )
                    events.insert(-1, Free(number))
                    continue
                live[entry["addr"]] = number
                events.append(
                    Allocate(number, size, streams.setdefault(entry["stream"], len(streams)), 0)
                )
            case "free_completed":
                if entry["addr"] in live:
                    events.append(Free(live.pop(entry["addr"])))
            case "oom":
                raise RuntimeError("a trial that runs out of memory has no whole history")
            case _:
                pass
    return EventLog(source="recorded", versions={}, operators=("",), events=tuple(events))


def versions() -> dict[str, str]:
    """Of what is recorded."""
    import torch

    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "gpu": torch.cuda.get_device_name(),
    }


@dataclass(frozen=True)
class Followed:
    """A random sequence, taken by the simulation or by the real allocator."""

    reserved: list[int]
    """Bytes after each step."""
    allocated: list[int]
    ran_out: list[int]
    """Steps whose request was not served."""
    retries: int


def recorded(case: dict[str, Any]) -> Followed:
    """What the real allocator did; a request that was not served leaves the allocated bytes as they
    were.
    """
    reserved, allocated = ([step[which] for step in case["steps"]] for which in (3, 4))
    before = zip(case["steps"], [0, *allocated], strict=False)
    ran_out = [
        number for number, (step, held) in enumerate(before) if step[0] >= 0 and step[4] == held
    ]
    return Followed(
        reserved=reserved, allocated=allocated, ran_out=ran_out, retries=case["retries"]
    )


def simulated(name: str, case: dict[str, Any]) -> Followed:
    """The same steps, taken by the simulation."""
    allocator = CachingAllocator(
        is_expandable="expandable" in name, capacity_bytes=case["cap_bytes"], is_share=True
    )
    handles: dict[int, int] = {}
    reserved, allocated, ran_out = list[int](), list[int](), list[int]()
    for kind, number, stream, *_ in case["steps"]:
        if kind == -1 and number in handles:  # or it was served there and not here
            allocator.free(handles.pop(number))
        elif kind == -2:
            allocator.release_cached()
        elif kind >= 0:
            try:
                handles[number] = allocator.allocate(kind, stream=stream)
            except CapacityError:
                ran_out.append(len(reserved))
        reserved.append(allocator.reserved_bytes)
        allocated.append(allocator.allocated_bytes)
    return Followed(
        reserved=reserved, allocated=allocated, ran_out=ran_out, retries=allocator.retries
    )


def table(told: dict[str, Any]) -> str:
    """Sequences: at how many steps reserved or allocated bytes differ. Trials: their replayed
    histories beside the peaks.
    """
    headings = (
        "sequence",
        "steps",
        "steps that differ",
        "most, MiB",
        "retries: simulated",
        "real",
        "not served: simulated",
        "real",
    )
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for name, case in told["random"].items():
        ours, real = simulated(name, case), recorded(case)
        pairs = zip(
            (*ours.reserved, *ours.allocated), (*real.reserved, *real.allocated), strict=True
        )
        apart = [abs(a - b) for a, b in pairs]
        steps = len(case["steps"])
        differ = sum(map(any, zip(apart[:steps], apart[steps:], strict=True)))
        served = (len(ours.ran_out), len(real.ran_out))
        cells = (
            name,
            steps,
            differ,
            f"{max(apart) / MIB:.0f}",
            ours.retries,
            real.retries,
            *served,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "| trial | events | reserved: replayed GiB | measured | off by | allocated: off by | "
        "retries |",
        f"|{'---|' * 7}",
    ]
    for name, case in told["trials"].items():
        log = msgspec.convert(case["log"], EventLog)
        cap = case["cap_bytes"]
        allocator = "expandable" if "expandable" in name else "native"
        ours = replay(log, allocator=allocator, capacity_bytes=cap, is_share=case["is_share"])
        reserved, allocated = case["peak_reserved_bytes"], case["peak_allocated_bytes"]
        figures = (
            f"{ours.peak_reserved_bytes / GIB:.3f}",
            f"{reserved / GIB:.3f}",
            f"{ours.peak_reserved_bytes / reserved - 1:+.3%}",
            f"{ours.peak_allocated_bytes / allocated - 1:+.3%}",
            f"{ours.retries} / {case['retries']}",
        )
        lines.append(f"| {' | '.join((name, format_tokens(len(log.events)), *figures))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
