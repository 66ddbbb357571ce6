"""Records memory snapshots on a GPU, and what recording costs; ``highwater profile`` reads them.

``python docs/results/profiler/record.py OUT`` (one GPU of 64 GiB or more that nobody uses, no
network, some minutes). It writes into OUT:

- ``trial/step_N/``: a trial of our engine that fits, 8,192 tokens of Qwen3-0.6B
- ``out_of_memory/``: the same at 65,536 tokens under 20 GiB, with logits kept: it runs out
- ``trainer/``: two steps of Hugging Face's Trainer with a small random model, recorded as anybody
  would, with the stacks of C++
- ``step_times.json``: a step without the layer watch, with it, and recorded, taking turns in one
  process; ratios over the first
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch

from highwater.bench.environment import environment
from highwater.run.local import LocalRunner
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.profiling import Profiling, SnapshotOrder
from highwater.spec.settings import Settings
from highwater.spec.trial import TrialResult, TrialSpec
from highwater.store.trial_snapshots import snapshot_folder
from highwater.train.assemble import assemble
from highwater.train.data import Batch
from highwater.train.layer_watch import LayerWatch
from highwater.train.memory_profiler import TrialProfiler
from highwater.train.micro_batches import batches
from highwater.train.rank_context import RankContext, take_context
from highwater.train.step import train_step
from highwater.units import GIB, MIB

MODEL = "Qwen3-0.6B"
FITS_TOKENS, RUNS_OUT_TOKENS = 8192, 65_536
ENTRIES = 30_000
"""Events of a step that are kept: one of 8,192 tokens has fewer."""
TRAINER_ENTRIES = 6_000
"""With the stacks of C++ each is several times as large."""
ROUNDS = 12
MOST_FILE_BYTES = 15 * MIB


def main() -> None:
    """Record all of it; what is there already is left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True)
    profiling = Profiling(max_entries=ENTRIES)
    # trials first: they want a GPU that no process uses
    ended = {
        "trial": trial(out / "trial", FITS_TOKENS, profiling),
        "out_of_memory": trial(out / "out_of_memory", RUNS_OUT_TOKENS, profiling),
    }
    for name, result in ended.items():
        print(name, result.outcome, result.reason)
    trainer(out / "trainer")
    (out / "step_times.json").write_text(json.dumps(step_times(), indent=1) + "\n")
    for path in sorted(out.rglob("*.pickle")):
        print(f"{path} {path.stat().st_size / MIB:.1f} MiB")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise SystemExit(f"{path} is too large to keep: fewer entries")


def spec_of(length_tokens: int) -> TrialSpec:
    """A trial of the plainest settings, within 20 GiB."""
    model = load_model(MODEL)
    return TrialSpec(
        model_name=model.name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=Layout(),
        settings=Settings(),
        length_tokens=length_tokens,
        memory_budget_bytes=20 * GIB,
    )


def trial(target: Path, length_tokens: int, profiling: Profiling) -> TrialResult:
    """Run a trial that records; its snapshots, and its result beside them."""
    with tempfile.TemporaryDirectory() as folder:
        runner = LocalRunner(log_directory=Path(folder), timeout_s=400, profiling=profiling)
        result = runner.run(spec_of(length_tokens))
        shutil.copytree(snapshot_folder(Path(str(result.log_path))), target)
    target.joinpath("result.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(result, log_path=None)))
    )
    return result


def trainer(target: Path) -> None:
    """Two steps of Hugging Face's Trainer, which needs accelerate."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    target.mkdir()
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
    torch.cuda.memory._record_memory_history(max_entries=TRAINER_ENTRIES)
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
    torch.cuda.memory._dump_snapshot(str(target / "snapshot_rank00.pickle"))
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.empty_cache()


def step_times() -> dict[str, object]:
    """Seconds of each step of three ways to run the same training, which take turns."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    spec = msgspec.structs.replace(spec_of(FITS_TOKENS), memory_budget_bytes=None)
    context = take_context(spec)
    watch = LayerWatch()
    steps = {
        "without": step_of(spec, context, None, None),
        "off": step_of(spec, context, watch, None),
    }
    with tempfile.TemporaryDirectory() as folder:
        times: dict[str, list[float]] = {name: [] for name in (*steps, "on")}
        for step in steps.values():
            step()
        for _ in range(ROUNDS):
            for name, step in steps.items():
                times[name].append(step())
        # last, because a recorder that was there once is no longer nothing
        order = SnapshotOrder(
            directory=folder,
            profiling=Profiling(profile_steps=tuple(range(ROUNDS)), max_entries=ENTRIES),
        )
        profiler = TrialProfiler(order, rank=0, place="d0r0u0")
        on = step_of(spec, context, LayerWatch(profiler.enter), profiler)
        on()
        times["on"] = [on() for _ in range(ROUNDS - 1)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "environment": environment(),
        "model": MODEL,
        "length_tokens": FITS_TOKENS,
        "step_times_s": times,
        "ratio_over_without": {name: each / medians["without"] for name, each in medians.items()},
    }


def step_of(
    spec: TrialSpec, context: RankContext, watch: LayerWatch | None, profiler: TrialProfiler | None
) -> Callable[[], float]:
    """A training of its own, of which a call runs one step; its seconds, without what is written
    after it.
    """
    training = assemble(spec, context)
    if watch is not None:
        for model, _ in training.trained:
            watch.follow(model.layers)
    enter = watch.enter if watch is not None else lambda _: None
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


if __name__ == "__main__":
    main()
