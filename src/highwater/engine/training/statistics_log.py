"""Statistics log: rank 0 writes the statistics of a trial's steps, one line of JSON for each step,
and sends them to reporters.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from highwater.engine.data.batches import Batch
from highwater.engine.models.decoder import LanguageModel
from highwater.engine.models.loss import LogitRange
from highwater.engine.training.statistics import QUANTITIES, Reduced, Statistics
from highwater.engine.training.step import Training
from highwater.model.held_bytes import step_flops
from highwater.model.model import load_model
from highwater.nouns.hardware import kind_of
from highwater.nouns.trial import RankMemory, StatisticsFiles, TrialSpec

if TYPE_CHECKING:
    from highwater.engine.training.reporters import Reports

_PEAKS = (
    *("peak_allocated_bytes", "peak_reserved_bytes"),
    *("device_used_bytes", "peak_data_segment_bytes"),
)
"""Fields of RankMemory that every rank adds to the statistics."""


class StatisticsLog:
    """Combines a step's statistics over all ranks, and writes them on rank 0."""

    def __init__(
        self, spec: TrialSpec, files: StatisticsFiles, training: Training, *, device_name: str
    ) -> None:
        """Prepare for the steps of ``spec``; only rank 0 uses the files."""
        self._spec = spec
        self._training = training
        self._statistics = Statistics(training.mesh, training.sequence)
        kind, self._flops_per_s = kind_of(device_name), None
        if kind is not None and kind.bf16_dense_tflops is not None:
            self._flops_per_s = kind.bf16_dense_tflops * 1e12 * spec.layout.gpus
        if files.logit_range:
            follow_logits(training)
        self._files = _Files(files) if training.mesh.get_rank() == 0 else None

    def write(
        self, step: int, known: Mapping[str, float], *, step_time_s: float, memory: RankMemory
    ) -> None:
        """Write a step's statistics; ``known``: values that are equal on all ranks, like the loss.

        All ranks must call this, after the device has finished the step.
        """
        began = time.perf_counter()
        statistics, record = self._statistics, self._training.record
        for name, value in known.items():
            statistics.add(name, value)
        record.add_to(statistics, self._training.hyperparameters)
        statistics.add("step_time_s", step_time_s)
        statistics.add("model_flops", self._model_flops(record.micro_batches))
        for name in _PEAKS:
            peak = getattr(memory, name)
            if peak is not None:
                statistics.add(name, peak)
        numbers = statistics.export(most_documents=record.most_documents)
        if self._files is not None:
            tokens, flops, time_s = (
                numbers[name] for name in ("n_tokens", "model_flops", "step_time_s")
            )
            assert isinstance(tokens, int)
            assert isinstance(flops, float)
            assert isinstance(time_s, float)
            told = numbers | {"tokens_per_s": tokens / time_s}
            if self._flops_per_s is not None:
                told["mfu"] = flops / time_s / self._flops_per_s
            told["statistics_time_s"] = time.perf_counter() - began
            self._files.write(step, {name: told[name] for name in QUANTITIES if name in told})

    def write_evaluation(self, step: int, loss: float) -> None:
        """Write the loss of an evaluation after a step, on rank 0."""
        if self._files is not None:
            self._files.write(step, {"evaluation_loss": loss})

    def close(self) -> None:
        """End the reports, after the last step."""
        if self._files is not None and self._files.reports is not None:
            self._files.reports.close()

    def _model_flops(self, micro_batches: Sequence[Batch]) -> float:
        """Return this rank's share of the model FLOPs for its documents."""
        shape = load_model(self._spec.model_directory).shape
        lengths = Counter(length for batch in micro_batches for length in batch.document_lengths)
        flops = sum(
            step_flops(shape, length_tokens=length, sequences=count, settings=self._spec.settings)
            for length, count in lengths.items()
        )
        return flops / self._statistics.coordinates.sharing


class _Files:
    """Statistics files of rank 0. A full disk does not stop the trial; it is reported once."""

    def __init__(self, files: StatisticsFiles) -> None:
        self._path, self._failed = Path(files.path), False
        self.reports: Reports | None = None
        if files.reports_directory is not None:
            from highwater.engine.training import reporters  # few runs have them

            self.reports = reporters.Reports(files.report_to, Path(files.reports_directory))

    def write(self, step: int, numbers: Mapping[str, Reduced]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode({"step": step, **numbers}) + b"\n")
        except OSError as error:
            if not self._failed:
                sys.stdout.write(f"statistics are not written: {error}\n")
            self._failed = True
        if self.reports is not None:
            self.reports.write(step, numbers)


def follow_logits(training: Training) -> None:
    """Record the range of the policy's logits from now on, if it has logits."""
    for module in training.policy.modules():
        if isinstance(module, LanguageModel):
            module.logit_range = training.record.logit_range = LogitRange()
