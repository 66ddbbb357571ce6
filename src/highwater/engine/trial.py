"""One trial on one rank: join the group, build, divide the budget, take the steps; a report can be
made of it at any time.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn
from torch.cuda.nccl import version as nccl_version
from transformers.utils import logging as transformers_logging

from highwater.activations.dropout import seeded
from highwater.engine import checkpoint
from highwater.engine.assemble import assemble
from highwater.engine.data import Batch, Document, digest, pack
from highwater.engine.layer_watch import LayerWatch
from highwater.engine.memory_log import MemoryWatch, allocator_settings, divide_budget, past_budget
from highwater.engine.memory_profiler import TrialProfiler
from highwater.engine.micro_batches import batches
from highwater.engine.out_of_memory import OutOfMemoryWatch
from highwater.engine.rank_context import RankContext, compute_dtype, synchronize, take_context
from highwater.engine.statistics_log import StatisticsLog
from highwater.engine.step import Training, backward_of, clear_gradients, clip_trained, train_step
from highwater.errors import UsageError
from highwater.parallel.collectives import gather_rows
from highwater.spec.model import load_model
from highwater.spec.profiling import coordinates
from highwater.spec.trial import MemoryBudget, RankReport, Save, TrialSpec
from highwater.version import __version__

REHEARSAL_TOKENS = 256
"""Tokens per rank of the rehearsal: enough for every kernel, too few to matter."""


class Trial:
    """The state of a trial that a report can be made of at any time, also after a failure."""

    def __init__(self, spec: TrialSpec, *, on_phase: Callable[[str], None]) -> None:
        """``on_phase`` hears what is done next, in words."""
        self.spec = spec
        self._on_phase = on_phase
        self.profiler: TrialProfiler | None = None
        self.where = LayerWatch()
        self.out_of_memory: OutOfMemoryWatch | None = None
        self.report = RankReport(rank=int(os.environ["RANK"]), versions=versions())
        self.watch: MemoryWatch | None = None
        self.statistics_log: StatisticsLog | None = None

    def run(self) -> None:
        """Do all steps. Raises whatever stops them; ``snapshot`` then says how far they came."""
        transformers_logging.set_verbosity_error()
        context = self._take_context()
        self._record_memory()
        self.out_of_memory = OutOfMemoryWatch(context.device, self.where)
        self.where.enter("build")
        self._on_phase("building the model")
        training = assemble(self.spec, context)
        for model, _ in training.trained:
            self.where.follow(model.layers)
        assert self.out_of_memory is not None
        self.out_of_memory.know(training)
        self.report = self._with(
            parameters=training.policy.parameter_count, weights=training.policy.weights
        )
        if training.policy.weights == "random":
            sys.stdout.write(
                f"random weights, of seed {self.spec.seed}: {self.spec.model_directory} has none\n"
            )
        if self.spec.statistics is not None:
            name = self.report.device_name or ""
            self.statistics_log = StatisticsLog(
                self.spec, self.spec.statistics, training, device_name=name
            )
        self._divide_budget(training, context)
        source = batches(
            self.spec,
            vocab_size=training.policy.causal_lm.config.vocab_size,
            data_rank=context.data_rank,
            # a ring shares no document that some layer's window cuts
            window_tokens=load_model(self.spec.model_directory).shape.window_tokens
            if self.spec.layout.ring_degree > 1
            else None,
        )
        for step in range(1, self.spec.steps + 1):
            self.where.enter("data")
            self._on_phase(f"step {step} of {self.spec.steps}")
            whole = [next(source) for _ in range(self.spec.micro_batches)]
            if self.spec.data is not None:
                self._refuse_different(whole, context)
            own = [context.share_of(batch) for batch in whole]
            with self.profiler.step(step - 1) if self.profiler else nullcontext():
                self._step(training, own)
                self._save_what_is_due(training, last=step == self.spec.steps)
        self.where.enter("report")
        self._stay_within_budget()

    def _refuse_different(self, whole: Sequence[Batch], context: RankContext) -> None:
        """Raise UsageError where ranks that share a sequence were given different ones: each calls
        the user's function.
        """
        digests = gather_rows(digest(whole).to(context.device), context.sequence)
        if len(digests.unique()) > 1:
            raise UsageError(
                f"{self.spec.data} yielded different documents to the {context.sequence_degree} "
                f"ranks of data rank "
                f"{context.data_rank}, each of which trains a part of them",
                hint="seed what it draws or shuffles by `data_rank`, which these ranks share",
            )

    def _record_memory(self) -> None:
        """Begin to record what is allocated where this launch is to, on this rank."""
        order, rank = self.spec.memory_snapshots, self.report.rank
        if order is not None and order.profiling.records(rank):
            place = coordinates(self.spec.layout, rank)
            self.profiler = TrialProfiler(order, rank=rank, place=place)
            self.where = LayerWatch(self.profiler.enter)

    def snapshot(self) -> RankReport:
        """The report as of now, memory peaks included."""
        return self._with(memory=self.watch.peaks()) if self.watch else self.report

    def _take_context(self) -> RankContext:
        context = take_context(self.spec)
        self.watch = MemoryWatch(context.device)
        self.report = self._with(
            attention_kernel=context.kernel,
            allocator_settings=self._allocator_settings(context.device),
            device_name=torch.cuda.get_device_name(context.device)
            if context.device.type == "cuda"
            else "CPU",
        )
        return context

    def _allocator_settings(self, device: torch.device) -> dict[str, str]:
        """What the allocator says of itself; RuntimeError when it is not what the settings ask."""
        settings = allocator_settings(device)
        asked = str(self.spec.settings.allocator == "expandable")
        if settings.get("expandable_segments", asked) != asked:
            raise RuntimeError(
                f"the allocator runs with expandable_segments {settings['expandable_segments']}, "
                f"asked for {asked}"
            )
        return settings

    def _divide_budget(self, training: Training, context: RankContext) -> None:
        """Give the allocator what the budget leaves, once everything outside it is there."""
        limit = self.spec.memory_budget_bytes
        if context.device.type == "cpu":
            assert limit is not None
            budget = MemoryBudget(
                budget_bytes=limit, context_bytes=0, nccl_bytes=0, allocator_cap_bytes=limit
            )
        else:
            self.where.enter("rehearsal")
            self._on_phase("loading kernels")
            rehearse(training, rehearsal_batch(self.spec, context))
            synchronize(context.device)
            torch.cuda.empty_cache()
            assert self.out_of_memory is not None
            self.out_of_memory.settle()
            budget = divide_budget(
                context.device, budget_bytes=limit, nccl_bytes=context.nccl_bytes
            )
        assert self.watch is not None
        self.watch.begin()
        self.report = self._with(budget=budget)

    def _step(self, training: Training, micro_batches: list[Batch]) -> None:
        synchronize(training.device)
        began = time.perf_counter()
        first = self.report.first_step_at_unix_s or time.time()
        step = len(self.report.losses) + 1
        with seeded(seed=self.spec.seed, rank=self.report.rank, step=step, device=training.device):
            loss, norms = train_step(training, micro_batches, enter=self._enter)
        names = ("loss", "gradient_norm", "critic_gradient_norm")
        values = {
            name: float(value) for name, value in zip(names, (loss, *norms), strict=False)
        }  # waits for the device
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {name.replace('_', ' ')} of step {len(self.report.losses) + 1} is {value}"
                )
        self.report = self._with(
            losses=(*self.report.losses, values["loss"]),
            gradient_norms=(*self.report.gradient_norms, values["gradient_norm"]),
            step_times_s=(*self.report.step_times_s, time.perf_counter() - began),
            first_step_at_unix_s=first,
        )
        if self.statistics_log is not None and self.watch is not None:
            seconds, peaks = self.report.step_times_s[-1], self.watch.peaks()
            self.statistics_log.write(step, values, step_time_s=seconds, memory=peaks)

    def _save_what_is_due(self, training: Training, *, last: bool) -> None:
        """Save what is due after a step: the shards after the last one, Hugging Face weights after
        every one or the last. The peak of saving counts.
        """
        settings, source, mesh = self.spec.settings, Path(self.spec.model_directory), training.mesh
        directory = Path(self.spec.checkpoint_directory or "")
        if settings.checkpoint == "sharded" and last:
            targets = (directory / "sharded", directory / "sharded-critic")
            for target, (model, optimizer) in zip(targets, training.trained, strict=False):
                # not every objective has a critic
                self._save(
                    "sharded", partial(checkpoint.save_sharded, model, optimizer, target, mesh=mesh)
                )
        if settings.save_hf == "always" or (settings.save_hf == "last" and last):
            dtype, target = compute_dtype(training.device), directory / "hf"
            self._save(
                "hf",
                lambda: checkpoint.save_pretrained(
                    training.policy,
                    target,
                    mesh=mesh,
                    dtype=dtype,
                    source=source,
                    merged=settings.lora_merged,
                ),
            )

    def _save(self, kind: Literal["sharded", "hf"], save: Callable[[], int]) -> None:
        assert self.spec.checkpoint_directory is not None, (
            "the launcher makes one for a trial that saves"
        )
        self._enter("save")
        self._on_phase("saving")
        began = time.perf_counter()
        try:
            written_bytes = save()
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(
                error.errno, error.strerror, self.spec.checkpoint_directory
            ) from error  # says where
        done = Save(kind=kind, time_s=time.perf_counter() - began, written_bytes=written_bytes)
        self.report = self._with(saves=(*self.report.saves, done))

    def _stay_within_budget(self) -> None:
        """A trial that fit by taking more than its budget did not fit."""
        assert self.watch is not None
        why = (
            None
            if self.report.budget is None
            else past_budget(self.watch.peaks(), self.report.budget)
        )
        if why is not None:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {why}")

    def _enter(self, phase: str) -> None:
        self.where.enter(phase)
        if self.watch:
            self.watch.sample()

    def _with(self, **changes: object) -> RankReport:
        return msgspec.structs.replace(self.report, **changes)


def rehearsal_batch(spec: TrialSpec, context: RankContext) -> Batch:
    """This rank's share of a micro-batch that is too small to matter."""
    ids = torch.zeros(min(REHEARSAL_TOKENS, spec.length_tokens), dtype=torch.long)
    documents = [Document(ids, ids)] * (
        spec.sequences * context.sequence_degree
    )  # none is longer than the trial's
    return context.share_of(pack(documents))


def rehearse(training: Training, batch: Batch) -> None:
    """All of a step but the updates: the driver loads kernels at their first use, outside the
    allocator.
    """

    def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        clip_trained(training, model, optimizer)
        clear_gradients(training, model, optimizer)

    backward_of(training, [batch], then=clear)


def versions() -> dict[str, str]:
    """What this process runs on."""
    found = {
        "highwater": __version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(str(part) for part in nccl_version())
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found
