"""Trainer: a trial's step in the user's own loop, in one process or on several ranks.

It trains exactly what a search measured: the same keywords make the same TrialSpec, and
``assemble`` builds the same models and optimizers from it. docs/reference/library.md is the page
for users.
"""

import gc
import math
import os
import resource
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from highwater.engine.data.batches import Batch, digest, pack, read_documents
from highwater.engine.parallel.mesh import every_ranks
from highwater.engine.training import checkpoint
from highwater.engine.training.memory_profiler import (
    TrialProfiler,
    allocator_settings,
    divide_budget,
    profiler_of,
)
from highwater.engine.training.out_of_memory import LayerWatch
from highwater.engine.training.rank_context import (
    compute_dtype,
    device_of,
    shared_window,
    take_context,
)
from highwater.engine.training.rank_run import (
    assemble,
    refuse_infinite,
    rehearsal_batch,
    settle,
    step_numbers,
)
from highwater.engine.training.statistics import Quantity, Reduced, Statistics, known
from highwater.engine.training.statistics_log import follow_logits
from highwater.engine.training.trainer_keywords import in_keywords, trial_of
from highwater.engine.training.training_run import Evaluation, evaluate
from highwater.errors import HighwaterError, UsageError
from highwater.nouns.environment import ALLOCATOR_MODES, ALLOCATOR_VARIABLES
from highwater.nouns.request import Request
from highwater.units import counted, parse_tokens

_SOURCE = "the loop"
_LOOPBACK = "lo"


class StepResult(NamedTuple):
    """Results of a step, the same on every rank."""

    loss: float
    """Policy's loss before the update: mean over the trained tokens, or pairs, of all ranks."""
    gradient_norm: float
    """Norm of the policy's whole gradient, before it is clipped."""
    tokens: int
    """Tokens of the step's documents, over all data-parallel ranks."""
    critic_gradient_norm: float | None = None
    """Norm of the critic's whole gradient; None without a critic."""


class Trainer:
    """A model, its optimizer and everything a step needs, for a training loop of your own.

    Every rank of the loop makes a Trainer, with the same keywords, and calls the same methods in
    the same order. A process has one at a time, as it joins a process group, until ``close``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        length: int | str,
        seed: int = 0,
        quantities: Mapping[str, Quantity] | None = None,
        **settings: Any,
    ) -> None:
        """Join the process group, and build models and optimizers on this rank's device.

        ``model`` is a directory with weights, an id of the Hub or a catalog name; the last has
        random weights, drawn by ``seed``. ``length`` is the longest document, in tokens.
        ``quantities`` are statistics, by name, that the loop itself adds to. ``settings`` are those
        of ``highwater.run_trial`` that concern a step. The allocator, or on the CPU this process's
        data segment, is bounded only if ``memory`` is given.

        Raises HighwaterError for settings that cannot be trained, before anything is built.
        """
        self.spec, request = trial_of(str(model), parse_tokens(str(length)), settings, seed=seed)
        if dist.is_initialized():
            raise UsageError(
                "this process is in a process group already, and a Trainer joins one of its own",
                hint="make the Trainer first, and `close()` it before the next one",
            )
        self._data_limit = resource.getrlimit(resource.RLIMIT_DATA)
        """Limit of this process's data segment, restored when the Trainer is closed."""
        self._is_bounded = request.memory is not None
        self._closed = False
        self._profiler: TrialProfiler | None = None
        self._own = {} if quantities is None else quantities
        self._first_addition: int | None = None
        """Steps done when the loop first added a number since the last ``statistics``."""
        self.steps_done = 0
        """Steps so far, which seed dropout; a loop that goes on from a save may set it."""
        if self._is_bounded and self.spec.device == "cpu":  # unless a lower limit is set already
            (soft, hard), budget = self._data_limit, self.spec.memory_budget_bytes
            assert budget is not None
            least = budget if soft == resource.RLIM_INFINITY else min(soft, budget)
            resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            # ranks of one machine use its loopback, unless the user chose an interface
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, _LOOPBACK)
        try:
            self._build(request)
        except BaseException:
            if self._profiler is not None:
                self._profiler.write_failed()
            if self.spec.layout.gpus == 1:
                self._leave()
            raise

    def _build(self, request: Request) -> None:
        self._context = take_context(self.spec)
        if request.allocator is not None:
            mode = ALLOCATOR_MODES[request.allocator]  # fixed when the process starts
            name, _, wanted = mode.partition(":")
            found = allocator_settings(self.device).get(name, wanted)
            if found != wanted:
                raise UsageError(
                    f"the allocator runs with {name} {found}, and {wanted} is asked for",
                    hint=f"`export {ALLOCATOR_VARIABLES[0]}={mode}` before the loop starts",
                )
        self._statistics = Statistics(
            self._context.mesh, self._context.shared.every, quantities=self._own
        )
        self._profiler = profiler_of(self.spec, self.rank)
        self._where = LayerWatch(None if self._profiler is None else self._profiler.enter)
        self._where.enter("build")
        self.training = assemble(self.spec, self._context)
        """Models and optimizers, for ``train_step`` and whatever else a loop calls."""
        if self._profiler is not None:
            for model, _ in self.training.trained:
                self._where.follow(model.layers)
        if request.logit_range:
            follow_logits(self.training)
        if self._is_bounded and self.device.type == "cuda":
            settle(self.training, rehearsal_batch(self.spec, self._context))
            divide_budget(
                self.device,
                budget_bytes=self.spec.memory_budget_bytes,
                nccl_bytes=self._context.nccl_bytes,
                host=self.training.host,
            )
        self._where.enter("data")
        if self.training.policy.weights == "random" and self.rank == 0:
            warnings.warn(
                f"random weights, of seed {self.spec.seed}: {self.spec.model_directory} has none",
                stacklevel=3,
            )

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._context.device

    @property
    def rank(self) -> int:
        """This process's number among all ranks."""
        return dist.get_rank()

    @property
    def data_rank(self) -> int:
        """Number of this data-parallel group, whose ranks must be given the same documents."""
        return self._context.data_rank

    @property
    def data_parallel_degree(self) -> int:
        """Number of data-parallel groups, each of which trains on its own documents."""
        return self.spec.layout.data_parallel_degree

    @property
    def learning_rate(self) -> float:
        """Learning rate of the policy and the critic; a new value takes effect in the next step."""
        return float(self.training.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError(
                f"learning rate is {rate}, and has to be 0 or more", hint="for example `1e-5`"
            )
        self.training.set_rate(rate)

    def step(self, micro_batches: Iterable[Any]) -> StepResult:
        """Train on micro-batches of this data-parallel rank: forward, backward, clip, update.

        A micro-batch is a list of documents, packed into one row without padding. A document is a
        list of token ids, or a mapping with ``input_ids`` and optionally ``labels``, ``reward``,
        ``group`` and ``logprobs``. Documents are at most ``length`` long, a micro-batch ``length``
        times the sequences per micro-batch. Every rank must give the same number of micro-batches.

        Raises UsageError for invalid documents before anything is trained, on all ranks if one has
        any. Raises FloatingPointError for a loss or a norm that is not finite: by then the update
        has run, and the weights are lost.
        """
        whole, tokens = self._read(micro_batches, trains=True)
        number = self.steps_done + 1
        random = {"seed": self.spec.seed, "rank": self.rank, "step": number}
        own = self._shares(whole)
        with self._recorded():
            values = step_numbers(self.training, own, enter=self._where.enter, **random)
        self.steps_done = number
        refuse_infinite(values, number)
        for name, value in values.items():
            self._statistics.add(name, value)
        return StepResult(tokens=tokens, **values)

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Add this rank's part of one of the ``quantities``: to a sum, to the numerator of a mean
        or to its denominator; for a minimum or maximum, one more candidate.

        Raises UsageError for an unknown name, with the declared ones and how to declare one, and
        for a value that is neither a number nor a tensor of one element.
        """
        known(name, self._own)
        self._statistics.add(name, value)
        if self._first_addition is None:
            self._first_addition = self.steps_done

    def statistics(self) -> dict[str, Reduced]:
        """Return the last step's numbers, and those the loop has added since the last call,
        combined over all ranks, which must all call it.

        Raises UsageError if the loop added numbers in more than one step.
        """
        first, self._first_addition = self._first_addition, None
        if first is not None and self.steps_done - first > 1:
            self._statistics.reset()
            raise UsageError(
                f"the loop added to {self.steps_done - first} steps, and statistics are of one",
                hint="call `statistics()` after every step that the loop adds to",
            )
        record = self.training.record
        record.add_to(self._statistics, self.training.hyperparameters)
        return self._statistics.export(most_documents=record.most_documents)

    def evaluate(self, micro_batches: Iterable[Any]) -> Evaluation:
        """Return the mean loss of micro-batches, given as for ``step``, without training on any."""
        whole, _ = self._read(micro_batches, trains=False)
        own = self._shares(whole)
        with self._recorded(trains=False):
            self._where.enter("evaluation")
            return evaluate(self.training, own)

    def batches(self, micro_batches: Iterable[Any]) -> list[Batch]:
        """Return this rank's shares of micro-batches, given as for ``step``, for ``train_step``."""
        return self._shares(self._read(micro_batches, trains=True)[0])

    def save(self, directory: str | Path, *, merged: bool = False) -> None:
        """Write the policy to a new directory, for ``from_pretrained``: in bfloat16 from a GPU, in
        float32 from the CPU. For a model with LoRA only the adapters are written, for peft; with
        ``merged`` the model plus its adapters.

        The first rank writes to a temporary name, and renames it when all is on the disk. Raises
        UsageError for a directory that is not empty.
        """
        target = Path(directory).absolute()
        partial = target.with_name(f".{target.name}.partial")
        self._agree(self._obstacle_to_saving(target, merged=merged))
        checkpoint.save_pretrained(
            self.training.policy,
            partial,
            mesh=self.training.mesh,
            dtype=compute_dtype(self.device),
            source=Path(self.spec.model_directory),
            merged=merged,
        )
        if self.rank == 0:
            partial.replace(target)
        self._wait()

    def close(self) -> None:
        """Wait for the other ranks, free the model and leave the process group, once."""
        if self._closed:
            return
        self._wait()
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed and self.spec.layout.gpus == 1:
            # with several ranks, others may hang in a collective: their launcher ends them
            self._leave()

    @contextmanager
    def _recorded(self, *, trains: bool = True) -> Generator[None]:
        """Context manager: record memory if ``memory_profiler`` asks; failures write a snapshot."""
        if self._profiler is None:
            yield
            return
        try:
            with self._profiler.step(self.steps_done, trains=trains):
                yield
        except BaseException:
            self._profiler.write_failed()
            raise
        self._where.enter("data")

    def _leave(self) -> None:
        self._closed = True
        if self._profiler is not None:
            self._profiler.end()
        if self._is_bounded and self.spec.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device_of(self.spec.device))
        resource.setrlimit(resource.RLIMIT_DATA, self._data_limit)
        for name in ("training", "_context", "_statistics"):
            self.__dict__.pop(name, None)
        gc.collect()  # gloo's threads end only when nothing refers to the group
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def _shares(self, whole: Sequence[Batch]) -> list[Batch]:
        return [self._context.share_of(batch) for batch in whole]

    def _read(self, micro_batches: Iterable[Any], *, trains: bool) -> tuple[list[Batch], int]:
        """Pack this data rank's micro-batches, count all ranks' tokens; errors raise on all."""
        whole: list[Batch] = []
        refusal: HighwaterError | None = None
        try:
            whole = [self._packed(micro_batch) for micro_batch in micro_batches]
            if trains and not whole:
                raise UsageError(
                    "a step of no micro-batches trains nothing",
                    hint="give one or more: `[documents]`",
                )
            if trains and len(whole) > 1 and not self.spec.settings.accumulates:
                raise UsageError(
                    f"a step of {len(whole)} micro-batches, of a Trainer that adds up no gradients",
                    hint="give a step one, or leave `micro_batches=1` out",
                )
        except HighwaterError as error:
            error.hint = in_keywords(error.hint)
            refusal = error
        self._agree(refusal)
        return whole, self._compare(whole)

    def _packed(self, micro_batch: Any) -> Batch:
        spec = self.spec
        documents = read_documents(
            micro_batch,
            spec,
            source=_SOURCE,
            vocab_size=self.training.policy.causal_lm.config.vocab_size,
            window_tokens=shared_window(spec),
        )
        tokens = sum(len(document.ids_L) for document in documents)
        most = spec.length_tokens * spec.sequences
        if tokens > most:
            raise UsageError(
                f"{_SOURCE} yielded a micro-batch of {tokens:,} tokens, and {most:,} is the most: "
                f"{counted(spec.sequences, 'sequence')} of {spec.length_tokens:,}",
                hint="give a step more micro-batches, or the Trainer "
                f"`sequences_per_micro_batch={-(-tokens // spec.length_tokens)}`",
            )
        return pack(documents)

    def _agree(self, refusal: HighwaterError | None) -> None:
        """Raise on all ranks if one has a refusal: on others an error that names this rank."""
        told = every_ranks([int(refusal is not None)], torch.int64, self.training.mesh)
        if refusal is not None:
            raise refusal
        for rank, (refused,) in enumerate(told):
            if refused:
                raise UsageError(
                    f"rank {rank} cannot go on, and the others would wait for it",
                    hint=f"its own error, in what rank {rank} writes, says why",
                )

    def _compare(self, whole: Sequence[Batch]) -> int:
        """Return the tokens of all data ranks; UsageError if ranks that must agree do not."""
        tokens = sum(len(batch.input_ids_T) for batch in whole)
        sharing = self._context.shared.degree
        own = int(digest(whole)) if sharing > 1 else 0
        told = every_ranks([len(whole), own, tokens], torch.int64, self.training.mesh)
        counts = sorted({count for count, _, _ in told})
        if len(counts) > 1:
            raise UsageError(
                f"ranks were given {' and '.join(map(str, counts))} micro-batches, and all go "
                "through as many",
                hint="deal out as many to each `data_rank`, and leave over what is too few",
            )
        for data_rank in range(self.data_parallel_degree):
            together = told[data_rank * sharing : (data_rank + 1) * sharing]
            if len({value for _, value, _ in together}) > 1:
                raise UsageError(
                    f"the {sharing} ranks of data rank {data_rank}, which train parts of the same "
                    "documents, were given different ones",
                    hint="choose documents by `data_rank`, and seed what is drawn by it",
                )
        return sum(count for _, _, count in told[::sharing])

    def _obstacle_to_saving(self, target: Path, *, merged: bool) -> HighwaterError | None:
        settings = self.spec.settings
        if merged and settings.lora is None:
            return UsageError("merged adapters, and no LoRA", hint="leave `merged=True` out")
        if merged and settings.lora_base != "bf16":
            return UsageError(
                "adapters were trained beside a model in nf4, and would be merged into another one",
                hint="leave `merged=True` out: peft merges them into the model of your choice",
            )
        if self.rank == 0 and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
            return UsageError(
                f"{target} holds something, and a save replaces nothing",
                hint=f"name a new directory: `{target.name}-{self.steps_done}`",
            )
        return None
