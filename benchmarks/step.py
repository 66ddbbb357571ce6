"""A training step of ours against Hugging Face's, plain or with Liger's kernels.

``python benchmarks/step.py Qwen3-0.6B --lengths 8192 32768 36864`` (one GPU). Time is measured
interleaved in one process, memory apart. All train on the same synthetic sequences, one sequence
per micro-batch, ``--micro-batches`` of them per step. Losses are printed side by side: they start
from the same weights, so that a ratio is only shown for the same work. ``--alone`` names lengths at
which the contenders do not fit on the card together: there each is timed in the process that
measures its memory, and the row says so. ``--lora 32`` trains adapters in the place of the models,
of Hugging Face with peft and Liger, and ``--lora-base nf4`` packs the weights beside them.
A length without a peak ran out of memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from highwater.engine.activations.host import HostActivations
from highwater.engine.attention.dense import select_kernel
from highwater.engine.attention.registry import register
from highwater.engine.data.batches import UNTRAINED, Document, pack
from highwater.engine.models.build import build, read_config
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.memory_profiler import divide_budget
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.model.model import load_model
from highwater.nouns.control_group import host_memory_bytes
from highwater.nouns.environment import allocator_environment
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora, LoraBase
from highwater.nouns.settings import HOST_SHARE, Activations, Loss, Recompute
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.units import parse_bytes
from peers import HuggingFacePeer, LigerPeer, LoraPeer
from process_environment import environment

LOSS_TOLERANCE = 5e-4
"""Relative tolerance of losses.

Two bfloat16 paths from the same weights are a few steps of bfloat16 rounding apart.
"""

STEPS_ALONE = 2
"""Timed steps in a process of its own, after one that warms up, unless ``--steps-alone`` says."""

TimedStep = Callable[[list[tuple[Tensor, Tensor]]], float]


class Alone(NamedTuple):
    """Peak reserved bytes and step times of one contender that had the card to itself."""

    reserved: int
    times: list[float]


def main() -> None:
    """Print ratios to stderr and the JSON document to stdout or ``--out``."""
    arguments = _parse()
    if arguments.memory_of:
        measure_alone(arguments.memory_of, arguments)
        return
    # Memory first: once this process has timed a step, the card is no longer empty for anybody.
    alone = {name: _in_own_process(name, arguments) for name in arguments.contenders}
    micro_batches = arguments.micro_batches
    rows = {length: _row_alone(length, alone, micro_batches) for length in arguments.alone}
    if arguments.lengths:
        rows |= time_side_by_side(arguments)
    rows = dict(sorted(rows.items()))
    for length, row in rows.items():
        row["peak_reserved_bytes"] = {
            name: found[length].reserved if length in found else None
            for name, found in alone.items()
        }
        told = {key: value for key, value in row.items() if key != "step_times_s"}
        print(json.dumps(told), file=sys.stderr)
    text = json.dumps(
        {"environment": environment(), "model": arguments.model, "rows": list(rows.values())},
        indent=1,
    )
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def time_side_by_side(arguments: argparse.Namespace) -> dict[int, dict[str, object]]:
    """Median step time of every contender at every length, the contenders taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        directory = same_weights(arguments.model, Path(folder))
        steps = {
            name: _step_of(name, directory, max(arguments.lengths), _lora(arguments))
            for name in arguments.contenders
        }
        rows: dict[int, dict[str, object]] = {}
        for length in arguments.lengths:
            sequences = sequences_of(arguments.model, length, arguments.micro_batches)
            losses = {name: step(sequences) for name, step in steps.items()}
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(arguments.rounds):
                for name, step in steps.items():
                    times[name].append(_timed(step, sequences))
            rows[length] = _row(length, losses, times, arguments.micro_batches)
    return rows


def measure_alone(contender: str, arguments: argparse.Namespace) -> None:
    """Print a line per length: peak reserved bytes and step times of one contender alone.

    It has the card to itself.
    """
    lengths = sorted({*arguments.lengths, *arguments.alone})
    directory = load_model(arguments.model).directory
    if arguments.memory is not None:
        divide_budget(torch.device("cuda", 0), budget_bytes=arguments.memory, nccl_bytes=0)
    step = _step_of(contender, directory, max(lengths), _lora(arguments))
    for length in lengths:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        sequences = sequences_of(arguments.model, length, arguments.micro_batches)
        step(sequences)
        # The second step is the first one with all optimizer states; its time counts where it
        # is one of several.
        steps = arguments.steps_alone if length in arguments.alone else 1
        times = [_timed(step, sequences) for _ in range(steps)]
        reserved = torch.cuda.max_memory_reserved()
        print(json.dumps({"length": length, "reserved": reserved, "times": times}), flush=True)


def _step_of(contender: str, directory: str, longest: int, lora: Lora | None) -> TimedStep:
    """A contender's step: of the model, or of adapters."""
    if lora is None or contender in OURS:
        how = {"lora": lora} if contender in OURS else {}
        return CONTENDERS[contender](directory, longest, **how)
    return LoraPeer(directory, lora, offload=contender == "liger-offload").step


def _lora(arguments: argparse.Namespace) -> Lora | None:
    """The adapters that are trained; None where the model is."""
    rank: int | None = arguments.lora
    return None if rank is None else Lora(rank=rank, alpha=2 * rank, base=arguments.lora_base)


def ours(
    directory: str,
    longest: int,
    *,
    loss: Loss,
    recompute: Recompute = "layer",
    activations: Activations = "gpu",
    lora: Lora | None = None,
) -> TimedStep:
    """A step of our engine on one GPU."""
    device = torch.device("cuda", 0)
    shape = load_model(directory).shape
    heads = {"query_heads": shape.query_heads, "kv_heads": shape.kv_heads}
    kernel = select_kernel(device, torch.bfloat16, **heads, head_dim=shape.head_dim)
    if not torch.distributed.is_initialized():
        process_mesh.join_alone(device)
    mesh = process_mesh.shard_mesh(Layout(), device)
    # The native RoPE at every length, as Hugging Face has it here: YaRN changes values, not time
    # or memory.
    native = min(longest, shape.native_length_tokens)
    config = read_config(directory, length_tokens=native, rope="auto")
    model = build(
        config,
        directory=directory,
        mesh=mesh,
        attention=register(kernel),
        loss=loss,
        recompute=recompute,
        compute_dtype=torch.bfloat16,
        master_dtype=torch.float32 if lora is None else torch.bfloat16,
        lora=lora,
        host=None
        if activations == "gpu"
        else HostActivations(
            device, layers_on_gpu=1, budget_bytes=int(HOST_SHARE * host_memory_bytes())
        ),
    )
    training = Training(policy=model, optimizer=make_optimizer(model, Hyperparameters()), mesh=mesh)

    def step(sequences: list[tuple[Tensor, Tensor]]) -> float:
        batches = [pack([Document(ids, labels)]) for ids, labels in sequences]
        return float(train_step(training, batches)[0])

    return step


OURS: dict[str, Callable[..., TimedStep]] = {
    "full": partial(ours, loss="full"),
    "chunked": partial(ours, loss="chunked"),
    "attention-kept": partial(ours, loss="chunked", recompute="all-but-attention"),
    "on-host": partial(ours, loss="chunked", activations="host"),
    "attention-on-host": partial(
        ours, loss="chunked", recompute="all-but-attention", activations="host"
    ),
}
CONTENDERS: dict[str, Callable[..., TimedStep]] = {
    "hugging face": lambda directory, _: HuggingFacePeer(directory).step,
    "liger": lambda directory, _: LigerPeer(directory).step,
    "liger-offload": lambda directory, _: LigerPeer(directory, offload=True).step,
    **OURS,
}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory or catalog name")
    for flag, how in (
        ("--lengths", "the contenders taking turns"),
        ("--alone", "each contender in its own process"),
    ):
        parser.add_argument(
            flag, type=int, nargs="+", default=[], help=f"tokens of one sequence, {how}"
        )
    parser.add_argument(
        "--micro-batches", type=int, default=2, help="sequences of a step, one after the other"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed steps of each contender, taking turns"
    )
    parser.add_argument(
        "--steps-alone", type=int, default=STEPS_ALONE, help="timed steps of each with --alone"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        default=["hugging face", "full", "chunked"],
        help="who takes part; speeds are ratios over the first",
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank")
    parser.add_argument(
        "--lora-base", choices=get_args(LoraBase), default="bf16", help="what is frozen beside them"
    )
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help="bound on the GPU's memory for --alone"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--memory-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    named = [arguments.memory_of] if arguments.memory_of else arguments.contenders
    without = {"hugging face", "full"} & set(named)
    if arguments.lora is not None and without:
        parser.error("--lora goes with neither of the contenders hugging face and full")
    if arguments.lora is None and arguments.lora_base != "bf16":
        parser.error("--lora-base goes with --lora")
    if arguments.memory is not None and arguments.lengths:
        parser.error("--memory goes with --alone")
    return arguments


def same_weights(model: str, folder: Path) -> str:
    """Write a directory with the model's config and random weights, which every contender loads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(load_model(model).directory, local_files_only=True)
    torch.manual_seed(0)
    with torch.device("cuda"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.save_pretrained(folder)
    return str(folder)


def sequences_of(model: str, length: int, micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    """The same micro-batches for every contender, of random tokens.

    The first 2,048 tokens, or half of them if they are fewer, are not trained on.
    """
    vocabulary = load_model(model).shape.vocab_size
    generator = torch.Generator().manual_seed(length)
    sequences: list[tuple[Tensor, Tensor]] = []
    for _ in range(micro_batches):
        ids = torch.randint(vocabulary, (length,), generator=generator)
        labels = ids.clone()
        labels[: min(PROMPT_TOKENS, length // 2)] = UNTRAINED
        sequences.append((ids, labels))
    return sequences


def _timed(step: TimedStep, sequences: list[tuple[Tensor, Tensor]]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(sequences)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _row(
    length: int, losses: dict[str, float], times: dict[str, list[float]], micro_batches: int
) -> dict[str, object]:
    base = next(iter(losses.values()))
    same_work = all(abs(loss - base) <= LOSS_TOLERANCE * abs(base) for loss in losses.values())
    proof: dict[str, object] = {"loss": losses, "same_work": same_work}
    tokens = micro_batches * length
    what = {"length_tokens": length, "step_tokens": tokens, "timed": "taking turns"}
    return what | proof | _speeds(tokens, times, same_work)


def _row_alone(
    length: int, alone: dict[str, dict[int, Alone]], micro_batches: int
) -> dict[str, object]:
    times = {name: found[length].times for name, found in alone.items() if length in found}
    tokens = micro_batches * length
    speeds = _speeds(tokens, times, next(iter(alone)) in times)
    return {"length_tokens": length, "step_tokens": tokens, "timed": "a process each", **speeds}


def _speeds(step_tokens: int, times: dict[str, list[float]], comparable: bool) -> dict[str, object]:
    median = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(median), None)
    ratios = None
    if first and comparable:
        ratios = {name: median[first] / value for name, value in median.items()}
    return {
        "step_times_s": times,
        "tokens_per_s": {name: step_tokens / value for name, value in median.items()},
        "speed_over": first,
        "speed_ratio": ratios,
    }


def _in_own_process(contender: str, arguments: argparse.Namespace) -> dict[int, Alone]:
    """Run a contender alone, with expandable segments, and return what it measured by length.

    Lengths end before the first at which it ran out of memory.
    """
    words = [arguments.model, "--memory-of", contender]
    words += ["--micro-batches", str(arguments.micro_batches)]
    words += ["--steps-alone", str(arguments.steps_alone)]
    if arguments.lora is not None:
        words += ["--lora", str(arguments.lora), "--lora-base", arguments.lora_base]
    words += [] if arguments.memory is None else ["--memory", str(arguments.memory)]
    for flag, lengths in (("--lengths", arguments.lengths), ("--alone", arguments.alone)):
        words += [flag, *map(str, lengths)] if lengths else []
    command = [sys.executable, __file__, *words]
    variables = os.environ | allocator_environment("expandable")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, env=variables)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"length"')]
    return {line["length"]: Alone(line["reserved"], line["times"]) for line in lines}


if __name__ == "__main__":
    main()
