"""Statistics logs: the numbers of a trial's steps, as rank 0 writes them: a line of JSON for each
step, and TensorBoard's events where they are asked for.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from highwater.engine.data.batches import Batch
from highwater.engine.models.decoder import LanguageModel
from highwater.engine.models.loss import LogitRange
from highwater.engine.training.statistics import Reduced, Statistics
from highwater.engine.training.step import Training
from highwater.errors import UsageError
from highwater.model.flops import step_flops
from highwater.model.model import load_model
from highwater.nouns.hardware import kind_of
from highwater.nouns.quantities import QUANTITIES
from highwater.nouns.trial import RankMemory, StatisticsFiles, TrialSpec

_PEAKS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_used_bytes",
    "peak_data_segment_bytes",
)
"""Fields of RankMemory that every rank tells."""


class StatisticsLog:
    """Puts a step's numbers together on all ranks and writes them on rank 0."""

    def __init__(
        self, spec: TrialSpec, files: StatisticsFiles, training: Training, *, device_name: str
    ) -> None:
        """Make ready what the steps need; the files are rank 0's."""
        self._spec = spec
        self._training = training
        self._statistics = Statistics(training.mesh, training.sequence)
        self._flops_per_s = _flops_per_s(device_name, gpus=spec.layout.gpus)
        if files.logit_range:
            follow_logits(training)
        self._files = _Files(files) if training.mesh.get_rank() == 0 else None

    def write(
        self, step: int, known: Mapping[str, float], *, step_time_s: float, memory: RankMemory
    ) -> None:
        """Write a step's numbers: ``known`` are those that all ranks have.

        All ranks call this, once the device has done the step.
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
            rates = self._rates(numbers) | {"statistics_time_s": time.perf_counter() - began}
            told = numbers | rates
            self._files.write(step, {name: told[name] for name in QUANTITIES if name in told})

    def write_evaluation(self, step: int, loss: float) -> None:
        """Write the loss of an evaluation after a step, on rank 0."""
        if self._files is not None:
            self._files.write(step, {"evaluation_loss": loss})

    def _model_flops(self, micro_batches: Sequence[Batch]) -> float:
        """This rank's share of the FLOPs on the documents there were."""
        shape = load_model(self._spec.model_directory).shape
        lengths = Counter(length for batch in micro_batches for length in batch.document_lengths)
        flops = sum(
            step_flops(shape, length_tokens=length, sequences=count, settings=self._spec.settings)
            for length, count in lengths.items()
        )
        return flops / self._statistics.coordinates.sharing

    def _rates(self, numbers: Mapping[str, Reduced]) -> dict[str, Reduced]:
        tokens, flops, time_s = (
            numbers[name] for name in ("n_tokens", "model_flops", "step_time_s")
        )
        assert isinstance(tokens, int)
        assert isinstance(flops, float)
        assert isinstance(time_s, float)
        rates: dict[str, Reduced] = {"tokens_per_s": tokens / time_s}
        if self._flops_per_s is not None:
            rates["mfu"] = flops / time_s / self._flops_per_s
        return rates


class _Files:
    """What rank 0 writes to. A disk that is full stops no trial: that is said once."""

    def __init__(self, files: StatisticsFiles) -> None:
        self._path = Path(files.path)
        self._board = None
        self._failed = False
        if files.tensorboard_directory is not None:
            self._board = _summary_writer(files.tensorboard_directory)

    def write(self, step: int, numbers: Mapping[str, Reduced]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode({"step": step, **numbers}) + b"\n")
            if self._board is not None:
                for tag, value in _scalars(numbers):
                    self._board.add_scalar(tag, value, step)
                self._board.flush()
        except OSError as error:
            if not self._failed:
                sys.stdout.write(f"statistics are not written: {error}\n")
            self._failed = True


def _scalars(numbers: Mapping[str, Reduced]) -> list[tuple[str, float]]:
    """The numbers by TensorBoard's tags; one of every rank has a tag for each."""
    scalars: list[tuple[str, float | int | None]] = []
    for name, value in numbers.items():
        if isinstance(value, tuple):
            scalars += [(f"{name}/rank {rank}", each) for rank, each in enumerate(value)]
        else:
            scalars.append((name, value))
    return [(tag, value) for tag, value in scalars if value is not None]


def _summary_writer(directory: str) -> Any:
    """TensorBoard's writer. Raises UsageError where the package is missing."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise UsageError(
            f"TensorBoard's files cannot be written: {error}",
            hint="`pip install tensorboard`, or leave `--tensorboard` out: the same numbers are in "
            "the lines beside the log",
        ) from error
    return SummaryWriter(directory)


def follow_logits(training: Training) -> None:
    """Record the range of the policy's logits from now on, where it has logits."""
    for module in training.policy.modules():
        if isinstance(module, LanguageModel):
            module.logit_range = training.record.logit_range = LogitRange()


def _flops_per_s(device_name: str, *, gpus: int) -> float | None:
    """FLOP/s of all GPUs by their data sheets; None for those not in the catalog."""
    kind = kind_of(device_name)
    if kind is None or kind.bf16_dense_tflops is None:
        return None
    return kind.bf16_dense_tflops * 1e12 * gpus
