"""Training from Python: from a request to a run and its result.

```python
import highwater

done = highwater.train(
    "Qwen3-0.6B", data="data.jsonl", length="32k", steps=200, output="./run", lora=16
)
print(done.losses[-1], done.model_directory)
```
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.memory.capacity import CellPrediction
from highwater.model.held_bytes import checkpoint_bytes
from highwater.model.model import load_model
from highwater.nouns.codec import Record
from highwater.nouns.corpus import Corpus, CorpusOrder, missing_files, whole_paths
from highwater.nouns.environment import SnapshotOrder
from highwater.nouns.hyperparameters import ADAPTERS_RATE
from highwater.nouns.objective import TRAITS
from highwater.nouns.plan import gpus_hint
from highwater.nouns.plan_notes import placement_notes
from highwater.nouns.request import DECLARED, Request, request_from
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import OURS
from highwater.nouns.training import (
    Schedule,
    TrainingProgress,
    TrainingRequest,
    TrainingResult,
    TrainingSpec,
    training_request_from,
)
from highwater.nouns.trial import OnPhase, RankReport, StatisticsFiles, TrialSpec, unheard
from highwater.recommendation.training_settings import ChosenTrial, chosen_trial, training_notes
from highwater.speed import predicted_step
from highwater.store.directory import TrainingFolder, check_run_directory
from highwater.trials.inputs import tokenised
from highwater.trials.nodes import Across, across_nodes
from highwater.trials.probe import probe, refuse_missing_package
from highwater.trials.readiness import check_machine, check_request
from highwater.trials.training_ranks import OnProgress, own_folder, run_ranks


class PreparedTraining(Record, frozen=True, kw_only=True):
    """A training that is checked, and whose data is tokenised; nothing has started yet."""

    spec: TrainingSpec
    predicted: CellPrediction
    """The prediction of its memory, as a trial's."""
    rows_bytes: int = 0
    """Bytes of its rows, beside what is predicted."""
    expected_s: float | None
    """Predicted seconds of its steps; None: unknown."""
    notes: tuple[str, ...]
    allow_busy: bool
    across: Across | None = None
    """How ranks start on several machines; None: on this one alone."""
    done_steps: int = 0
    """Steps of the checkpoint that it goes on from."""


def train(
    model: str,
    *,
    data: str | Sequence[str],
    length: str | int,
    steps: int,
    output: str | Path,
    eval_data: str | Sequence[str] = (),
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train ``model`` on ``data`` for ``steps`` optimizer steps, documents of up to ``length``
    tokens packed into rows; called again, it resumes from the last checkpoint in ``output``.
    ``settings`` are the other fields of ``TrainingRequest`` (``settings="recommended"``, ``rows``,
    ``schedule``, ``save_every``) and those of ``Request`` that define a step (``gpus``, ``lora``,
    ``memory``, ``learning_rate``). Blocks until the training ends; Ctrl-C saves a checkpoint first.
    Raises HighwaterError for invalid settings, before anything starts, and if the training fails.
    """
    named: dict[str, Any] = {
        "data": (data,) if isinstance(data, str) else tuple(data),
        "length": length,
        "steps": steps,
        "output": str(output),
        "eval_data": (eval_data,) if isinstance(eval_data, str) else tuple(eval_data),
    }
    others: dict[str, Any] = {"model": model}
    for name, value in settings.items():
        (named if name in TrainingRequest.__struct_fields__ else others)[name] = value
    asked = training_request_from(named)
    for name in others:  # the request refuses unknown names
        if name in DECLARED and "train" not in DECLARED[name].commands:
            raise UsageError(
                f"{name} is a setting of searches and trials, and says nothing about a training",
                hint=f"leave `{name}` out",
            )
    request = request_from(others, keywords=True)
    with own_folder(Path(asked.output)):
        return run_training(prepare_training(request, asked), on_progress=on_progress)


def prepare_training(
    request: Request, asked: TrainingRequest, *, on_phase: OnPhase = unheard
) -> PreparedTraining:
    """Check and tokenise a training, and compare it with its folder. Raises HighwaterError."""
    folder = TrainingFolder(asked.output)
    folder.refuse_missing(asked.resume_from)
    refuse_missing_package(Settings(), reporters=asked.report_to)
    request, chosen = _planned(request, asked)
    machines = across_nodes(request)
    trial = chosen.spec
    before = folder.spec()
    rows = _rows(asked)
    order = corpus_order(asked.data, trial, asked)
    # Machines that train together all see the run's folder.
    parent = None if request.nodes == 1 else folder.corpora.absolute()
    corpus = tokenised(order, parent=parent, on_phase=on_phase)
    evaluation = None
    if asked.eval_data:
        held_out = order.replace(data=whole_paths(asked.eval_data))
        evaluation = tokenised(
            held_out, parent=parent, on_phase=lambda phase: on_phase(f"held out: {phase}")
        )
    spec = training_spec(asked, trial, request, corpus, evaluation, rows=rows)
    folder.refuse_another(before, spec)
    done_steps = folder.done_steps(asked.resume_from)
    if done_steps > spec.steps:
        raise UsageError(
            f"{asked.output} has a run that has done {done_steps} steps already",
            hint=f"use `--steps {done_steps}` or more, or {folder.another}",
        )
    is_done = asked.resume_from is None and done_steps == spec.steps
    if before is not None and is_done and before.steps == spec.steps:
        spec = spec.replace(model_directory=before.model_directory)
    else:
        # room for two checkpoints, the best one, and the model
        saved = trial.settings.replace(checkpoint="sharded", save_hf="last")
        needed = checkpoint_bytes(load_model(trial.model_directory).shape, saved, trial.device)
        checkpoints = max(1, 2 + bool(asked.eval_data) - len(folder.checkpoint_steps()))
        check_run_directory(folder.path, needed, checkpoints=checkpoints)
    return PreparedTraining(
        spec=spec,
        predicted=chosen.predicted,
        rows_bytes=chosen.rows_bytes,
        expected_s=_expected_s(spec, trial, chosen.predicted),
        notes=(
            *(machines.notes if machines else ()),
            *placement_notes(request, trial.settings),
            *training_notes(load_model(request.model), chosen, corpus, asked),
            *(f"held out: {note}" for note in (evaluation.notes if evaluation else ())),
        ),
        allow_busy=request.allow_busy,
        across=machines,
        done_steps=done_steps,
    )


def _planned(request: Request, asked: TrainingRequest) -> tuple[Request, ChosenTrial]:
    """Complete the request and choose its trial; HighwaterError if it cannot be trained."""
    machine = probe().with_memory(request.host_memory_bytes or sys.maxsize)
    asked = asked.replace(rows=_rows(asked))
    request = request.replace(log_dir=asked.output)
    named = msgspec.structs.asdict(request)
    if named["lora_merged"]:
        request = request.replace(save_hf="last")
    if named["lora"] is not None and request.learning_rate is None:
        request = request.replace(learning_rate=ADAPTERS_RATE)
    others = {"runner": request.on_ray, "dry_run": request.dry_run}
    for name, is_named in {"trainer": request.trainer != OURS, **others}.items():
        if is_named:
            raise UsageError(
                "this package's engine trains, on the machines that it is started on, and nothing "
                f"else does: the file of `--config` has `{name}`",
                hint=f"leave `{name}` out of it",
            )
    check_request(request, machine, steps=asked.steps)
    if asked.reward is not None and TRAITS[request.settings.objective].advantages == "none":
        raise UsageError(
            f"`--reward` is for rollouts, and the objective {request.settings.objective} has none",
            hint="leave `--reward` out, or add `--objective grpo`",
        )
    if request.gpus is None and request.device != "cpu" and machine.gpus:
        request = request.replace(gpus=(len(machine.gpus) * request.nodes,))
    if request.device != "cpu" and not machine.gpus and not machine.unreadable_gpus:
        try:
            chosen_trial(request.replace(device="cpu"), asked, machine)
            hint = "use `--device cpu` to train on it"
        except HighwaterError:
            hint = gpus_hint(request, asked.length_tokens)
        hint += "; `highwater doctor` says what is seen of GPUs"
        if request.device == "cuda":
            raise MachineError("the driver shows no GPU here", hint=hint)
        raise UsageError("no GPU is visible, and the CPU is not named", hint=hint)
    chosen = chosen_trial(request, asked, machine)
    trial = chosen.spec
    check_machine(request, machine, trial.settings, trial.device, gpus=trial.layout.machine_gpus)
    whole_paths((*asked.data, *asked.eval_data))
    return request, chosen


def _rows(asked: TrainingRequest) -> int | None:
    """Number of rows in a step: as named, or as in the run that the output folder has."""
    before = TrainingFolder(asked.output).spec()
    return asked.rows or (before.micro_batches if before else None)


_RECORD_BYTES = 1 << 20
"""Bytes of a first record that are read to see whether it is a conversation."""


def corpus_order(data: Sequence[str], trial: TrialSpec, asked: TrainingRequest) -> CorpusOrder:
    """What to tokenise for a training: its data, as its trial and its request say."""
    directory = Path(trial.model_directory)
    has_tokenizer = not missing_files(directory).tokenizer
    for path in filter(Path.is_file, map(Path, () if has_tokenizer else data)):
        record: object = None
        with path.open("rb") as file, suppress(ValueError):
            record = json.loads(file.readline(_RECORD_BYTES))
        if isinstance(record, dict) and ("messages" in record or "conversations" in record):
            raise UsageError(
                f"{path}:1 is a conversation, and the model has no tokenizer, whose chat template "
                "would make a text of it",
                hint="save one that has one into the model's folder, with "
                "`tokenizer.save_pretrained`, or write texts: "
                '`{"prompt": "Hi", "completion": "Yes"}`',
            )
    return CorpusOrder(
        data=whole_paths(data),
        objective=trial.settings.objective,
        length_tokens=trial.length_tokens,
        tokenizer=str(directory) if has_tokenizer else None,
        vocab_size=load_model(trial.model_directory).shape.vocab_size,
        long_documents=asked.long_documents,
        trained=asked.train_on,
        reward=asked.reward,
    )


def training_spec(
    asked: TrainingRequest,
    trial: TrialSpec,
    request: Request,
    corpus: Corpus,
    evaluation: Corpus | None,
    *,
    rows: int | None,
) -> TrainingSpec:
    """All that a training run depends on; ``rows``: of a step, all ranks; None: the trial's."""
    ranks = trial.layout.data_parallel_degree
    micro_batches = rows or ranks * trial.micro_batches
    own = max(1, micro_batches // ranks)
    folder = TrainingFolder(Path(asked.output).absolute())
    files = StatisticsFiles(
        path=str(folder.statistics),
        report_to=asked.report_to,
        reports_directory=str(folder.reports) if asked.report_to else None,
        logit_range=request.logit_range,
    )
    snapshots = None
    if request.memory_profiler is not None:
        snapshots = SnapshotOrder(
            directory=str(folder.snapshots), profiling=request.memory_profiler
        )
    trial = trial.replace(
        seed=asked.seed,
        micro_batches=own,
        settings=trial.settings.replace(accumulates=own > 1),
        statistics=files,
        memory_snapshots=snapshots,
    )
    schedule = Schedule(name=asked.schedule, warmup_steps=asked.warmup_steps, steps=asked.steps)
    return TrainingSpec(
        trial=trial,
        corpus=corpus,
        evaluation=evaluation,
        steps=asked.steps,
        micro_batches=micro_batches,
        schedule=schedule,
        evaluate_every=asked.eval_every,
        save_every=asked.save_every,
        output_directory=str(folder.path),
        model_directory=str(folder.new_model(asked.steps)),
        resume_from=asked.resume_from,
    )


def _expected_s(spec: TrainingSpec, trial: TrialSpec, predicted: CellPrediction) -> float | None:
    """Predicted seconds of all steps, with rows of the full length; None: unknown GPU."""
    if predicted.step is None or trial.device != "cuda":
        return None
    name = probe().gpus[0].name
    step = predicted_step(
        load_model(trial.model_directory).shape,
        trial.settings,
        trial.layout,
        length_tokens=trial.length_tokens,
        device_name=name,
        micro_batches=spec.micro_batches // trial.layout.data_parallel_degree,
    )
    return None if step is None else step.time_s * spec.steps


def run_training(
    prepared: PreparedTraining, *, on_progress: OnProgress | None = None
) -> TrainingResult:
    """Train to the end, from the last checkpoint if there is one; ``own_folder`` is held."""
    spec = prepared.spec
    reports: Sequence[RankReport] = ()
    last: list[TrainingProgress] = []

    def hear(said: TrainingProgress) -> None:
        last[:] = [said]
        if on_progress is not None:
            on_progress(said)

    if prepared.done_steps < spec.steps or not Path(spec.model_directory).exists():
        TrainingFolder(spec.output_directory).keep(spec)
        reports = run_ranks(
            spec, allow_busy=prepared.allow_busy, on_progress=hear, across=prepared.across
        )
    result = result_so_far(prepared, reports, last)
    if result is None:
        raise MachineError(
            f"the checkpoint in {spec.output_directory} is gone", hint="type the same command again"
        )
    return result


def result_so_far(
    prepared: PreparedTraining,
    reports: Sequence[RankReport] = (),
    heard: Sequence[TrainingProgress] = (),
) -> TrainingResult | None:
    """What a stopped run has reached by its last checkpoint; None if it has none."""
    spec = prepared.spec
    state = TrainingFolder(spec.output_directory).last_state()
    if state is None:
        return None
    is_done = state.step >= spec.steps and Path(spec.model_directory).exists()
    memories = [report.memory for report in reports]
    peaks = [each.device_used_bytes or each.peak_data_segment_bytes for each in memories]
    speeds = (said.tokens / said.seconds for said in heard if said.seconds)
    return TrainingResult(
        status="done" if is_done else "stopped",
        step=state.step,
        steps=spec.steps,
        losses=state.losses,
        evaluations=state.evaluations,
        best_step=state.best_step,
        output_directory=spec.output_directory,
        model_directory=spec.model_directory if is_done else None,
        tokens_per_s=next(speeds, None),
        peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        notes=prepared.notes,
    )
