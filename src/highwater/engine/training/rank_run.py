"""Rank run: the common part of a rank in a trial and in training. It sets up the process groups,
builds models and optimizers by the settings, divides the memory budget and runs steps; a report can
be made at any time. A trial runs its steps, saves files by its settings, and checks that memory
stayed within the budget.
"""

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from highwater.engine.activations.host import HostActivations
from highwater.engine.activations.recompute import seeded
from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Batch, Document, batches, digest, pack
from highwater.engine.models.build import build, read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel.collectives import gather_rows
from highwater.engine.parallel.mesh import versions
from highwater.engine.training import checkpoint
from highwater.engine.training.memory_profiler import (
    MemoryWatch,
    TrialProfiler,
    allocator_settings,
    divide_budget,
    past_budget,
    profiler_of,
)
from highwater.engine.training.optimizers import optimizer_of
from highwater.engine.training.out_of_memory import LayerWatch, OutOfMemoryWatch
from highwater.engine.training.rank_context import (
    RankContext,
    compute_dtype,
    shared_window,
    synchronize,
    take_context,
)
from highwater.engine.training.statistics_log import StatisticsLog
from highwater.engine.training.step import (
    Training,
    backward_of,
    clear_gradients,
    clip_trained,
    train_step,
)
from highwater.errors import UsageError
from highwater.model.held_bytes import host_state_bytes
from highwater.model.model import load_model
from highwater.nouns.control_group import host_memory_bytes
from highwater.nouns.settings import HOST_SHARE, Loss
from highwater.nouns.trial import MemoryBudget, OnPhase, RankReport, Save, TrialSpec

CRITIC_SEED = 1
"""Added to the trial's seed, so that a critic with random weights is no copy of the policy."""

_MASTER_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def assemble(spec: TrialSpec, context: RankContext) -> Training:
    """Build and allocate everything that lives as long as the training."""
    settings = spec.settings
    loss: Loss = "full" if settings.holds_logits else "chunked"
    host = None
    if settings.activations == "host":
        most_bytes = min(host_memory_bytes(), spec.host_memory_bytes or sys.maxsize)
        shape = load_model(spec.model_directory).shape
        left_bytes = most_bytes - host_state_bytes(shape, settings, layout=spec.layout)
        host = HostActivations(
            context.device,
            layers_on_gpu=settings.layers_on_gpu,
            budget_bytes=int(min(HOST_SHARE * most_bytes, left_bytes) / spec.layout.machine_gpus),
        )
    policy = _model(spec, context, host, loss=None if settings.traits.gives_scalars else loss)
    critic = _model(spec, context, host, loss=None, seed=CRITIC_SEED) if settings.critic else None
    # traces show this order of allocations, so keep it: optimizers' states, then the reference
    optimizer = optimizer_of(policy, spec)
    critic_optimizer = None if critic is None else optimizer_of(critic, spec)
    reference = None
    if settings.traits.has_reference:  # with adapters: the policy, with them turned off
        reference = _reference(spec, context) if settings.has_second_model else policy
    return Training(
        policy=policy,
        optimizer=optimizer,
        mesh=context.mesh,
        sequence=context.shared.every,
        objective=settings.objective,
        entropy=settings.entropy != "none",
        critic=critic,
        critic_optimizer=critic_optimizer,
        reference=reference,
        hyperparameters=spec.hyperparameters,
        keeps_gradients=settings.keeps_gradients,
        host=host,
    )


def _model(
    spec: TrialSpec,
    context: RankContext,
    host: HostActivations | None,
    *,
    loss: Loss | None,
    seed: int = 0,
) -> Decoder:
    settings = spec.settings
    trained: dict[str, Any] = {
        "strategy": settings.strategy,
        "offload": settings.offloads_model,
        "master_dtype": _MASTER_DTYPES[settings.parameters],
        "host": host,
    }
    if settings.adapters is not None:
        trained |= {"lora": settings.adapters, "master_dtype": compute_dtype(context.device)}
    return _built(spec, context, loss=loss, seed=spec.seed + seed, **trained)


def _reference(spec: TrialSpec, context: RankContext) -> Decoder:
    """Build the reference model: the policy before training, frozen, on the host, copied by layers.

    It uses the policy's own kernels: others round differently, and over a document's thousands of
    tokens that adds up to a log-ratio where there should be none.
    """
    frozen = {"master_dtype": compute_dtype(context.device), "offload": True}
    return _built(spec, context, loss="chunked", seed=spec.seed, **frozen).requires_grad_(False)


def _built(spec: TrialSpec, context: RankContext, **how: Any) -> Decoder:
    """Build a model of the trial; ``how``: arguments of ``build`` that differ by model."""
    settings, depth = spec.settings, spec.attention_depth
    kernel, shared = context.kernel, context.shared
    return build(
        read_config(spec.model_directory, length_tokens=spec.length_tokens, rope=settings.rope),
        directory=spec.model_directory,
        mesh=context.mesh,
        attention=register(kernel, shared=shared, depth=depth, sparse=settings.pattern),
        compute_dtype=compute_dtype(context.device),
        recompute=settings.recompute,
        mlp_tiles=settings.mlp_tiles,
        head_groups=settings.attention_head_groups,
        **how,
    )


REHEARSAL_TOKENS = 256
"""Tokens per rank of the rehearsal: enough to use every kernel, too few to take much memory."""


class RankRun(ABC):
    """What one rank of a trial or a training does; its report can be made at any time."""

    def __init__(self, spec: TrialSpec, *, on_phase: Callable[[str], None]) -> None:
        """``on_phase`` is called with each phase in words, like ``loading kernels``."""
        self.spec = spec
        self.on_phase = on_phase
        self.profiler: TrialProfiler | None = None
        self.where = LayerWatch()
        self.out_of_memory: OutOfMemoryWatch | None = None
        self.report = RankReport(rank=int(os.environ["RANK"]), versions=versions())
        self.watch: MemoryWatch | None = None
        self.statistics_log: StatisticsLog | None = None

    @abstractmethod
    def run(self) -> None:
        """Do the whole run. Raises the error that stops it; ``snapshot`` has the state so far."""

    def assembled(self) -> tuple[Training, RankContext]:
        """Join the groups and build everything that lives as long as the training."""
        transformers_logging.set_verbosity_error()
        context = take_context(self.spec)
        self.watch = MemoryWatch(context.device)
        settings = allocator_settings(context.device)
        asked = str(self.spec.settings.allocator == "expandable")
        if settings.get("expandable_segments", asked) != asked:
            raise RuntimeError(
                f"the allocator runs with expandable_segments {settings['expandable_segments']}, "
                f"asked for {asked}"
            )
        is_gpu = context.device.type == "cuda"
        device_name = torch.cuda.get_device_name(context.device) if is_gpu else "CPU"
        self.report = self.report.replace(
            attention_kernel=context.kernel, allocator_settings=settings, device_name=device_name
        )
        self.profiler = profiler_of(self.spec, self.report.rank)
        self.where = LayerWatch(None if self.profiler is None else self.profiler.enter)
        self.out_of_memory = OutOfMemoryWatch(context.device, self.where)
        self.where.enter("build")
        self.on_phase("building the model")
        training = assemble(self.spec, context)
        for model, _ in training.trained:
            self.where.follow(model.layers)
        self.out_of_memory.know(training)
        self.report = self.report.replace(
            parameters=training.policy.parameter_count, weights=training.policy.weights
        )
        if training.policy.weights == "random":
            sys.stdout.write(
                f"random weights, of seed {self.spec.seed}: {self.spec.model_directory} has none\n"
            )
        if self.spec.statistics is not None:
            self.statistics_log = StatisticsLog(
                self.spec, self.spec.statistics, training, device_name=device_name
            )
        return training, context

    def divide_budget(self, training: Training, context: RankContext) -> None:
        """Limit the allocator by the memory budget, after all memory outside it is allocated."""
        limit = self.spec.memory_budget_bytes
        if context.device.type == "cpu":
            assert limit is not None
            budget = MemoryBudget.split(limit)
        else:
            self.where.enter("rehearsal")
            self.on_phase("loading kernels")
            settle(training, rehearsal_batch(self.spec, context))
            assert self.out_of_memory is not None
            self.out_of_memory.settle()
            budget = divide_budget(
                context.device,
                budget_bytes=limit,
                nccl_bytes=context.nccl_bytes,
                host=training.host,
            )
        assert self.watch is not None
        self.watch.begin()
        self.report = self.report.replace(budget=budget)

    def step(self, training: Training, micro_batches: Sequence[Batch], *, number: int) -> None:
        """Train step ``number`` (from 1) and record it; FloatingPointError for infinite values."""
        synchronize(training.device)
        began = time.perf_counter() - _preparing_s(training)
        first = self.report.first_step_at_unix_s or time.time()
        random = {"seed": self.spec.seed, "rank": self.report.rank, "step": number}
        values = step_numbers(training, micro_batches, enter=self.enter, **random)
        refuse_infinite(values, number)
        self.report = self.report.replace(
            losses=(*self.report.losses, values["loss"]),
            gradient_norms=(*self.report.gradient_norms, values["gradient_norm"]),
            step_times_s=(
                *self.report.step_times_s,
                time.perf_counter() - _preparing_s(training) - began,
            ),
            first_step_at_unix_s=first,
        )
        if self.statistics_log is not None and self.watch is not None:
            seconds, peaks = self.report.step_times_s[-1], self.watch.peaks()
            self.statistics_log.write(number, values, step_time_s=seconds, memory=peaks)

    def snapshot(self) -> RankReport:
        """Return the report as of now, memory peaks included."""
        return self.report.replace(memory=self.watch.peaks()) if self.watch else self.report

    def enter(self, phase: str) -> None:
        """Note that a phase of a step begins."""
        self.where.enter(phase)
        if self.watch:
            self.watch.sample()


def _preparing_s(training: Training) -> float:
    """Return the seconds spent on mapping host memory so far, which step times leave out."""
    return 0.0 if training.host is None else training.host.memory.preparing_s


def rehearsal_batch(spec: TrialSpec, context: RankContext) -> Batch:
    """Return this rank's share of a micro-batch too small to take much memory."""
    ids = torch.zeros(min(REHEARSAL_TOKENS, spec.length_tokens), dtype=torch.long)
    # no document may be longer than the trial's
    documents = [Document(ids, ids)] * (spec.sequences * context.shared.degree)
    return context.share_of(pack(documents))


def settle(training: Training, batch: Batch) -> None:
    """Load everything that is outside the allocator, then empty its cache; for GPUs only."""
    rehearse(training, batch)
    synchronize(training.device)
    torch.cuda.empty_cache()


def step_numbers(
    training: Training, micro_batches: Sequence[Batch], *, enter: OnPhase, **random: int
) -> dict[str, float]:
    """Train one step in ``seeded(**random)``; returns its loss and gradient norms by name."""
    with seeded(device=training.device, **random):
        loss, norms = train_step(training, micro_batches, enter=enter)
    names = ("loss", "gradient_norm", "critic_gradient_norm")
    # float() waits for the device
    return {name: float(value) for name, value in zip(names, (loss, *norms), strict=False)}


def refuse_infinite(values: Mapping[str, float], step: int) -> None:
    """Raise FloatingPointError for the first value of a step that is not finite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"the {name.replace('_', ' ')} of step {step} is {value}")


def rehearse(training: Training, batch: Batch) -> None:
    """Run a step without its updates: the driver loads all kernels, outside the allocator."""

    def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        clip_trained(training, model, optimizer)
        clear_gradients(training, model, optimizer)

    backward_of(training, [batch], then=clear)


class Trial(RankRun):
    """One rank of a trial, from its first step to its last."""

    def run(self) -> None:
        """Run all steps. Raises the error that stops them; ``snapshot`` has the state so far."""
        training, context = self.assembled()
        self.divide_budget(training, context)
        source = batches(
            self.spec,
            vocab_size=training.policy.causal_lm.config.vocab_size,
            data_rank=context.data_rank,
            window_tokens=shared_window(self.spec),
        )
        for step in range(1, self.spec.steps + 1):
            self.where.enter("data")
            self.on_phase(f"step {step} of {self.spec.steps}")
            whole = [next(source) for _ in range(self.spec.micro_batches)]
            if self.spec.data is not None:
                digests = gather_rows(digest(whole).to(context.device), context.shared.every)
                if len(digests.unique()) > 1:
                    raise UsageError(
                        f"{self.spec.data} yielded different documents to the "
                        f"{context.shared.degree} ranks of data rank {context.data_rank}, each of "
                        "which trains a part of them",
                        hint="seed what it draws or shuffles by `data_rank`, which these ranks "
                        "share",
                    )
            own = [context.share_of(batch) for batch in whole]
            with self.profiler.step(step - 1) if self.profiler else nullcontext():
                self.step(training, own, number=step)
                self._save_what_is_due(training, last=step == self.spec.steps)
        self.where.enter("report")
        assert self.watch is not None
        if self.report.budget is not None:  # a trial that used more than its budget did not fit
            why = past_budget(self.watch.peaks(), self.report.budget)
            if why is not None:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {why}")

    def _save_what_is_due(self, training: Training, *, last: bool) -> None:
        """Save files that are due after a step; memory peaks of saving count for the trial."""
        settings, source, mesh = self.spec.settings, Path(self.spec.model_directory), training.mesh
        directory = Path(self.spec.checkpoint_directory or "")
        if settings.checkpoint == "sharded" and last:
            targets = (directory / "sharded", directory / "sharded-critic")
            # not every objective has a critic
            for target, (model, optimizer) in zip(targets, training.trained, strict=False):
                save = partial(checkpoint.save_sharded, model, optimizer, target, mesh=mesh)
                self._save("sharded", save)
        if settings.save_hf == "always" or (settings.save_hf == "last" and last):
            save = partial(
                checkpoint.save_pretrained,
                training.policy,
                directory / "hf",
                mesh=mesh,
                dtype=compute_dtype(training.device),
                source=source,
                merged=settings.lora_merged,
            )
            self._save("hf", save)

    def _save(self, kind: Literal["sharded", "hf"], save: Callable[[], int]) -> None:
        assert self.spec.checkpoint_directory is not None, "a launcher makes one for who saves"
        self.enter("save")
        self.on_phase("saving")
        began = time.perf_counter()
        try:
            written_bytes = save()
        except OSError as error:
            if error.filename is not None:
                raise
            where = self.spec.checkpoint_directory
            raise OSError(error.errno, error.strerror, where) from error
        done = Save(kind=kind, time_s=time.perf_counter() - began, written_bytes=written_bytes)
        self.report = self.report.replace(saves=(*self.report.saves, done))
