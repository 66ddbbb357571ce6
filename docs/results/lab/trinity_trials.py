"""The reference trainer's step on GPUs, in what an A100-80GB leaves its allocator; beside replays
of its shipped traces.

``python docs/results/lab/trinity_trials.py --gpus 4`` (GPUs; a minute a trial) goes on with
``trinity_trials.json`` beside it; ``--table`` only prints. Beside each log lies, compressed, what
the allocator of the traced rank did. Where `vanilla` replays too long, this tells whether the trace
lacks something that the step does, or whether the published trainer does more than this step.
"""

import argparse
import dataclasses
import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypotheses
import msgspec
import trinity

from highwater.memory.trace.replay import Replayed, replay
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Allocator
from highwater.nouns.trial import Device, TrialSpec
from highwater.trials.ranks import RankShare
from highwater.trials.reaper import under_reaper
from highwater.trials.trial_process import trial_environment
from highwater.units import GIB, format_tokens

FILE = Path(__file__).with_suffix(".json")
TIMEOUT_S = 240.0
FIGURES = ("peak_allocated_bytes", "peak_reserved_bytes", "retries")
"""Of the allocator."""
Trial = tuple[str, int, int, Allocator, int]
"""Model, GPUs, SP, allocator, length."""
TRIALS: tuple[Trial, ...] = (
    ("Qwen3-14B", 4, 4, "native", 4096),
    ("Qwen3-14B", 4, 4, "native", 16_384),
    ("Qwen3-14B", 4, 2, "native", 8192),
    ("Qwen3-14B", 4, 1, "native", 4096),
    ("Qwen3-8B", 4, 4, "native", 51_200),
    ("Qwen3-8B", 4, 1, "native", 12_288),
    ("Qwen3-14B", 4, 4, "expandable", 20_480),
    ("Qwen3-8B", 2, 1, "expandable", 4096),
    ("Qwen3-8B", 2, 1, "native", 4096),
    ("Qwen3-8B", 2, 2, "native", 4096),
    ("Qwen3-8B", 2, 2, "expandable", 4096),
    ("Qwen3-4B", 2, 1, "native", 12_288),
    ("Qwen3-4B", 2, 2, "native", 24_576),
    ("Qwen3-4B", 1, 1, "native", 4096),
    ("Qwen3-1.7B", 1, 1, "native", 16_384),
    ("Qwen3-0.6B", 1, 1, "native", 20_480),
    ("Qwen3-0.6B", 1, 1, "native", 24_576),
    ("Qwen3-0.6B", 1, 1, "expandable", 24_576),
    ("Qwen3-0.6B", 1, 1, "expandable", 28_672),
    ("Qwen3-1.7B", 1, 1, "expandable", 16_384),
    ("Qwen3-1.7B", 1, 1, "expandable", 20_480),
    ("Qwen3-4B", 1, 1, "expandable", 4096),
)
"""First those of 14B and 8B on four GPUs that replay has longer than they were published; then
edges on two GPUs and on one."""
HEADINGS = (
    *("model", "rung", "GPUs", "SP", "length", "published", "allocator may hold, GiB"),
    *("shipped trace", "allocated GiB", "reserved", "retries"),
    *("measured", "allocated GiB", "reserved", "retries"),
)


def main() -> None:
    """Try what is not in the file yet, then print what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="numbers of GPUs whose trials are run"
    )
    parser.add_argument("--output", type=Path, default=FILE, help="the JSON file")
    parser.add_argument(
        "--log-dir", type=Path, default=Path("logs/trinity-trials"), help="directory of logs"
    )
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    parser.add_argument(
        "--worker", type=Path, nargs=2, metavar=("ORDER", "REPORTS"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.worker:
        Worker(*arguments.worker).run()
        return
    rows: list[dict[str, Any]] = (
        json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
    )
    for trial in () if arguments.table else TRIALS:
        if trial[1] in arguments.gpus and trial not in {trial_of(row) for row in rows}:
            rows.append(tried(trial, arguments.log_dir))
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def trial_of(row: dict[str, Any]) -> Trial:
    """As in ``TRIALS``."""
    return row["model"], row["gpus"], row["ulysses_degree"], row["allocator"], row["length_tokens"]


def tried(trial: Trial, log_directory: Path, *, device: Device = "cuda") -> dict[str, Any]:
    """One trial in processes of its own, which are gone when this returns."""
    name, gpus, ulysses, allocator, length = trial
    model = load_model(name)
    spec = TrialSpec(
        model_name=name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device=device,
        layout=Layout(gpus=gpus, ulysses_degree=ulysses),
        settings=msgspec.structs.replace(trinity.SETTINGS, allocator=allocator),
        length_tokens=length,
        memory_budget_bytes=capacity_bytes(trial),
    )
    log_directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(log_directory, f"{'-'.join(map(str, trial))}.log").open("wb") as log,
    ):
        order, reports = Path(folder, "order.json"), Path(folder, "reports")
        order.write_bytes(msgspec.json.encode(spec))
        reports.mkdir()
        command = under_reaper(
            [sys.executable, __file__, "--worker", str(order), str(reports)],
            ranks=RankShare(count=gpus, folder=folder),
        )
        process = subprocess.Popen(
            command, env=trial_environment(spec), stdout=log, stderr=log, start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        process.wait()
        told = [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]
        for path in reports.glob("*.gz"):
            shutil.move(path, Path(log.name).with_suffix(f".{path.name}"))
    fits = len(told) == gpus and all(each["error"] is None for each in told)
    row = {
        "model": name,
        "gpus": gpus,
        "ulysses_degree": ulysses,
        "allocator": allocator,
        "length_tokens": length,
    }
    print(row, "fits" if fits else [each["error"] for each in told], flush=True)
    row |= {"capacity_bytes": spec.memory_budget_bytes, "fits": fits}
    return row | {"ranks": told, "wall_s": time.monotonic() - began}


class Worker:
    """One rank: two steps, and what its allocator says of them."""

    def __init__(self, order: Path, reports: Path) -> None:
        self.spec = msgspec.json.decode(order.read_bytes(), type=TrialSpec)
        self.report = reports / f"rank-{os.environ['RANK']}.json"
        self.phase = "setup"

    def run(self) -> None:
        """End with a report, whatever happens; a rank that failed takes the others with it."""
        error = None
        try:
            self.steps()
        # the process edge: the error is in the report
        except BaseException as raised:  # noqa: BLE001
            error = f"{self.phase}: {type(raised).__name__}: {raised}"
        self.report.write_text(json.dumps(self.told() | {"error": error}))
        self.write_history()
        if error is not None:
            print(error, flush=True)
            os._exit(1)
        from highwater.engine.parallel.mesh import leave

        leave()

    def steps(self) -> None:
        """As ``Trial`` takes them, with the reference's model."""
        import torch

        from highwater.engine.data.batches import batches
        from highwater.engine.tracer import trinity_step
        from highwater.engine.training.rank_context import take_context
        from highwater.engine.training.step import train_step

        context = dataclasses.replace(take_context(self.spec), kernel="flash")
        if (budget := self.spec.memory_budget_bytes) is not None and context.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(
                budget / torch.cuda.mem_get_info()[1], context.device
            )
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=4_000_000
            )
        training = trinity_step.assemble(self.spec, context)
        source = batches(
            self.spec,
            vocab_size=training.policy.causal_lm.config.vocab_size,
            data_rank=context.data_rank,
        )
        for _ in range(self.spec.steps):
            if context.device.type == "cuda":
                torch.cuda.empty_cache()
            whole = [next(source) for _ in range(self.spec.micro_batches)]
            own = [context.share_of(batch) for batch in whole]
            loss, _ = train_step(training, own, enter=self.enter)
            if not math.isfinite(float(loss)):
                raise FloatingPointError(f"the loss is {float(loss)}")

    def enter(self, phase: str) -> None:
        """Told by the step."""
        self.phase = phase

    def told(self) -> dict[str, Any]:
        """The allocator's own figures."""
        import torch

        versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
        if not torch.cuda.is_available():
            return {"versions": versions}
        stats = torch.cuda.memory_stats()
        return {
            "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
            "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
            "retries": stats["num_alloc_retries"],
            "device_name": torch.cuda.get_device_name(),
            "versions": versions,
        }

    def write_history(self) -> None:
        """Beside the log, of the rank that is traced: every allocation, release and segment, as
        PyTorch names them.
        """
        import torch

        if (
            torch.cuda.is_available()
            and int(os.environ["RANK"]) == self.spec.layout.ulysses_degree - 1
        ):
            entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            told = [
                [entry["action"], entry.get("addr"), entry["size"], entry["stream"]]
                for entry in entries
            ]
            self.report.with_suffix(".gz").write_bytes(gzip.compress(json.dumps(told).encode()))


def capacity_bytes(trial: Trial) -> int:
    """What an A100-80GB leaves its allocator, as replay has it."""
    question, cell, _ = published(trial)
    return hypotheses.capacity_bytes(question, cell)


def published(trial: Trial) -> tuple[Any, Any, int]:
    """Question, cell and tokens of the published table."""
    name, gpus, ulysses, allocator, _ = trial
    return next(
        (question, cell, known)
        for question, cell, known in hypotheses.replayed_cells(
            hypotheses.read_capacity_table(hypotheses.TABLE)
        )
        if question.model.name == name
        and (cell.layout.gpus, cell.layout.ulysses_degree, cell.settings.allocator)
        == (gpus, ulysses, allocator)
    )


def replayed(row: dict[str, Any]) -> Replayed:
    """The shipped trace at this length, in the memory of the trial."""
    question, cell, _ = published(trial_of(row))
    log = hypotheses.events_of(question, cell, row["length_tokens"])
    return replay(
        log, allocator=row["allocator"], capacity_bytes=row["capacity_bytes"], is_share=True
    )


def table(rows: list[dict[str, Any]]) -> str:
    """One line a trial; of several ranks the one that reserved most."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Of one line."""
    (_, cell, known), ours = published(trial_of(row)), replayed(row)
    yield from (row["model"], cell.settings.label, str(row["gpus"]), str(row["ulysses_degree"]))
    yield from (
        format_tokens(row["length_tokens"]),
        format_tokens(known),
        f"{row['capacity_bytes'] / GIB:.2f}",
    )
    yield from figures(ours.fits, *(getattr(ours, name) for name in FIGURES))
    if not (ranks := [rank for rank in row["ranks"] if "peak_reserved_bytes" in rank]):
        yield from ("no report", "", "", "")
        return
    fullest = max(ranks, key=lambda rank: rank["peak_reserved_bytes"])
    ran_out = any("OutOfMemoryError" in (rank["error"] or "") for rank in row["ranks"])
    yield from figures(
        row["fits"],
        *(fullest[name] for name in FIGURES),
        otherwise="runs out" if ran_out else "failed otherwise",
    )


def figures(
    fits: bool,
    allocated_bytes: int,
    reserved_bytes: int,
    retries: int,
    *,
    otherwise: str = "runs out",
) -> Iterator[str]:
    """How it ended, and the allocator's peaks."""
    yield from (
        "fits" if fits else otherwise,
        f"{allocated_bytes / GIB:.2f}",
        f"{reserved_bytes / GIB:.2f}",
        str(retries),
    )


if __name__ == "__main__":
    main()
