"""Trial on one rank: take its steps, save what the settings ask for, and check that all stayed
within the memory budget.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from highwater.engine.data.batches import Batch, digest
from highwater.engine.data.micro_batches import batches
from highwater.engine.parallel.collectives import gather_rows
from highwater.engine.training import checkpoint
from highwater.engine.training.rank_context import RankContext, compute_dtype
from highwater.engine.training.rank_run import RankRun
from highwater.engine.training.statistics_log import past_budget
from highwater.engine.training.step import Training
from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.nouns.trial import Save


class Trial(RankRun):
    """One rank of a trial."""

    def run(self) -> None:
        """Take all steps. Raises whatever stops them; ``snapshot`` then says how far they came."""
        training, context = self.assembled()
        self.divide_budget(training, context)
        source = batches(
            self.spec,
            vocab_size=training.policy.causal_lm.config.vocab_size,
            data_rank=context.data_rank,
            # a ring cannot share a document that is longer than some layer's window
            window_tokens=load_model(self.spec.model_directory).shape.window_tokens
            if self.spec.layout.ring_degree > 1
            else None,
        )
        for step in range(1, self.spec.steps + 1):
            self.where.enter("data")
            self.on_phase(f"step {step} of {self.spec.steps}")
            whole = [next(source) for _ in range(self.spec.micro_batches)]
            if self.spec.data is not None:
                self._refuse_different(whole, context)
            own = [context.share_of(batch) for batch in whole]
            with self.profiler.step(step - 1) if self.profiler else nullcontext():
                self.step(training, own, number=step)
                self._save_what_is_due(training, last=step == self.spec.steps)
        self.where.enter("report")
        assert self.watch is not None
        if self.report.budget is not None:  # a trial that fit only by using more did not fit
            why = past_budget(self.watch.peaks(), self.report.budget)
            if why is not None:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {why}")

    def _refuse_different(self, whole: Sequence[Batch], context: RankContext) -> None:
        """Raise UsageError if ranks that share a sequence were given different documents."""
        digests = gather_rows(digest(whole).to(context.device), context.sequence)
        if len(digests.unique()) > 1:
            raise UsageError(
                f"{self.spec.data} yielded different documents to the {context.sequence_degree} "
                f"ranks of data rank "
                f"{context.data_rank}, each of which trains a part of them",
                hint="seed what it draws or shuffles by `data_rank`, which these ranks share",
            )

    def _save_what_is_due(self, training: Training, *, last: bool) -> None:
        """Save what is due after a step; memory peaks of saving count for the trial."""
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
        self.report = self.with_(saves=(*self.report.saves, done))
