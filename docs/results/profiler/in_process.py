"""The cases of ``record.py`` that use the GPU in their own process, one to a process:
``python docs/results/profiler/in_process.py loop OUT`` writes below OUT what it records, and
``OUT/loop.json``.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import torch
from trials import FITS_TOKENS, MODEL, Found, snapshot_row, spec_of

import highwater
from highwater.engine.data.batches import Batch, batches
from highwater.engine.training.memory_profiler import TrialProfiler
from highwater.engine.training.out_of_memory import LayerWatch, OutOfMemoryWatch
from highwater.engine.training.rank_context import RankContext, take_context
from highwater.engine.training.rank_run import assemble
from highwater.engine.training.step import train_step
from highwater.nouns.environment import Profiling, SnapshotOrder
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from process_environment import environment

ENTRIES = 6_000
"""Events of the Trainer that are kept: with the stacks of C++ each is several times as large."""
STEP_ENTRIES = 30_000
"""Events of a step that are kept while it is timed."""
ROUNDS = 60
"""Steps of each kind: single steps on a shared machine differ by a factor of two, and the median of
12 was uncertain by 6 %.
"""
COMMAND = ("python", "docs/results/profiler/record.py", "OUT", "--cases", "step_times")
_MEMORY = cast(Any, torch.cuda.memory)
"""What records a history has no public name."""


def loop(out: Path) -> Found:
    """Anybody's loop, recorded by the context manager, under the name of Megatron's rank 1."""
    os.environ["RANK"] = "1"
    model = torch.nn.Sequential(torch.nn.Linear(4096, 16_384), torch.nn.GELU()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    profiler = highwater.MemoryProfiler(out / "loop", coordinates="p0d1c0t0")
    for _ in range(2):
        with profiler:
            profiler.enter("forward")
            loss = model(torch.randn(8192, 4096, device="cuda")).square().mean()
            profiler.enter("backward")
            loss.backward()
            profiler.enter("optimizer")
            optimizer.step()
            optimizer.zero_grad()
    return {"snapshots": {"step_1": snapshot_row(profiler.path)}}


def trainer(out: Path) -> Found:
    """Two steps of Hugging Face's Trainer, which needs accelerate."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32_000, (8, 1024)).tolist()]
    _MEMORY._record_memory_history(max_entries=ENTRIES)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=4,
            bf16=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(Qwen3ForCausalLM(config), arguments, train_dataset=rows).train()
    target = out / "trainer" / "snapshot_rank00.pickle"
    target.parent.mkdir()
    _MEMORY._dump_snapshot(str(target))
    return {"snapshots": {"two_steps": snapshot_row(target)}}


def step_times(_: Path) -> Found:
    """Seconds of each step of the same training. Without and with the watch take turns; after them
    recorded and with the watch again, because a recorder might leave something behind.
    """
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    spec = spec_of(FITS_TOKENS, Settings(), memory_budget_bytes=None)
    context = take_context(spec)
    steps = {
        "without": step_of(spec, context, None, None),
        "off": step_of(spec, context, LayerWatch(), None),
    }
    times = in_turns(steps)
    with tempfile.TemporaryDirectory() as folder:
        profiling = Profiling(profile_steps=tuple(range(ROUNDS + 1)), max_entries=STEP_ENTRIES)
        order = SnapshotOrder(directory=folder, profiling=profiling)
        profiler = TrialProfiler(order, rank=0, place="d0r0u0")
        on = step_of(spec, context, LayerWatch(profiler.enter), profiler)
        times |= in_turns({"on": on, "off again": partial(unrecorded, steps["off"])})
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "environment": {**environment(), "command": COMMAND},
        "model": MODEL,
        "length_tokens": FITS_TOKENS,
        "step_times_s": times,
        "ratio_over_without": {name: each / medians["without"] for name, each in medians.items()},
        "on_over_off_again": medians["on"] / medians["off again"],
    }


def in_turns(steps: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of ``ROUNDS`` steps of each kind, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for number in range(ROUNDS):
        # who is first changes: a step may warm something up for the next
        for name in sorted(steps, reverse=bool(number % 2)):
            times[name].append(steps[name]())
    return times


def unrecorded(step: Callable[[], float]) -> float:
    """Seconds of a step with the recorder off; a recorded one after it turns it on again."""
    _MEMORY._record_memory_history(None)
    return step()


def step_of(
    spec: TrialSpec, context: RankContext, watch: LayerWatch | None, profiler: TrialProfiler | None
) -> Callable[[], float]:
    """A training of its own, of which a call runs one step; its seconds, without what is written
    after it. Without a watch nothing of the feature is there.
    """
    training = assemble(spec, context)
    if watch is not None:
        for model, _ in training.trained:
            watch.follow(model.layers)
        alive = OutOfMemoryWatch(context.device, watch)
        alive.know(training)
        alive.settle()
    enter: Callable[[str], None] = watch.enter if watch is not None else lambda _: None
    source = batches(
        spec,
        vocab_size=training.policy.causal_lm.config.vocab_size,
        data_rank=0,
        window_tokens=None,
    )
    micro: Sequence[Batch] = [context.share_of(next(source)) for _ in range(spec.micro_batches)]
    done = 0

    def step() -> float:
        nonlocal done
        with profiler.step(done) if profiler is not None else nullcontext():
            torch.cuda.synchronize()
            began = time.perf_counter()
            float(train_step(training, micro, enter=enter)[0])
            torch.cuda.synchronize()
            took_s = time.perf_counter() - began
        done += 1
        return took_s

    return step


CASES: Mapping[str, Callable[[Path], Found]] = {
    "step_times": step_times,
    "loop": loop,
    "trainer": trainer,
}


def main() -> None:
    """Run the case that is named."""
    name, out = sys.argv[1], Path(sys.argv[2])
    (out / f"{name}.json").write_text(json.dumps(CASES[name](out)))


if __name__ == "__main__":
    main()
