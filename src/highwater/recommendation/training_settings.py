"""Training settings: choose the cell of a training, from the named settings, a study's answer, or a
recommendation; whether it fits, and notes for the user before it starts.
"""

import resource
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from highwater.errors import MachineError, UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.predictor import FormulaPredictor, predict_cell
from highwater.memory.question import placed
from highwater.memory.trainers import calibration_of, predict_untraced
from highwater.model.model import Model, load_model
from highwater.model.rope import yarn
from highwater.nouns.cells import simplicity
from highwater.nouns.corpus import Corpus, missing_files
from highwater.nouns.declaration import MOST_GPUS, flag_of
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import alone, plan, plan_trial
from highwater.nouns.plan_notes import weights_notes
from highwater.nouns.request import DECLARED, TOPICS, Request
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, Question
from highwater.nouns.trainer import OURS
from highwater.nouns.training import RECOMMENDED, TrainingRequest, refuse_uneven
from highwater.nouns.trial import TrialSpec
from highwater.recommendation.recommend import recommend
from highwater.store.directory import TrainingFolder
from highwater.store.journal import read_study
from highwater.units import MIB, format_bytes, format_tokens

_TOKEN_OF_A_ROW_BYTES = 200
"""Bytes of a token in a row that waits for its turn, measured over 2 to 64 rows of 4,096 tokens."""
_NEAR = 0.08
"""Share by which predictions of a process's memory on the CPU are off: 7 % too few bytes at the
most, in trainings of models of 9, 20 and 33 million parameters with each optimizer."""
_COMPILED_BYTES = 32 * MIB
"""More bytes while Python compiles what it imports: 30 MiB, read on the CPU without bytecode."""
_THREADS = 7
"""Threads of a rank on two CPU cores, which predictions include with ``_STACK_BYTES`` each."""
_STACK_BYTES = 8 * MIB
_POOLS = 2
"""Pools with a thread for each core: of the forward pass and of the backward pass."""


class ChosenTrial(NamedTuple):
    """The trial whose step a training repeats, with its prediction and notes on its choice."""

    spec: TrialSpec
    predicted: CellPrediction
    notes: tuple[str, ...]
    rows_bytes: int = 0
    """Bytes of a step's rows, beside what is predicted of a trial."""


def chosen_trial(request: Request, asked: TrainingRequest, machine: Machine) -> ChosenTrial:
    """The trial of a training. Raises HighwaterError for invalid settings, and if it is predicted
    not to fit, with settings that would.
    """
    spec = plan_trial(request, machine, asked.length_tokens)
    how = named_settings(request)
    if asked.settings is not None and how:
        flag = flag_of(how[0])
        raise UsageError(
            f"the settings are those of `--settings {asked.settings}`, and `{flag}` is another",
            hint=f"leave `{flag}` out, or `--settings`",
        )
    training = _Training(request, asked, machine, spec)
    notes: tuple[str, ...] = ()
    prompt_tokens = 0
    if asked.settings not in (None, RECOMMENDED):
        path = Path(asked.settings or "")
        if not path.exists():
            raise UsageError(
                f"there is no study {path}",
                hint="use `--settings recommended`, or name the file of a study",
            )
        cell, measured, notes = _cell_of(path, training)
        prompt_tokens = measured.prompt_tokens
        if request.memory is None and spec.device == "cuda":
            budget_bytes = measured.memory_budget_bytes
            spec = spec.replace(memory_budget_bytes=budget_bytes)
    elif asked.settings == RECOMMENDED or not how:
        cell = training.recommended()
    else:
        cell, *others = plan(alone(request, spec.length_tokens), machine).question.cells
        if others:
            cell = placed(training.question(cell, *others), machine)
    before = TrainingFolder(asked.output).spec() if request.activations == "auto" else None
    if before is not None:  # a resumed run goes on as it began
        cell = cell.changed(activations=before.trial.settings.activations)
    spec = spec.replace(prompt_tokens=prompt_tokens)
    return _checked(replace(training, spec=spec), cell, notes)


def named_settings(request: Request, *, says_what: bool = False) -> tuple[str, ...]:
    """Settings that a request names, on how a model is trained; ``says_what``: on what is."""
    usual = Request(model=request.model)
    rung = set(Settings.__struct_fields__)
    return tuple(
        row.name
        for row in TOPICS["trial"]
        if getattr(request, row.name) not in (getattr(usual, row.name), "auto")
        and (
            row.says_what
            if says_what
            else not row.says_what
            and row.name != "micro_batches"
            and (row.sets in rung or row.name in ("ulysses", "ring", "copies"))
        )
    )


@dataclass(frozen=True, slots=True)
class _Training:
    """A training, and the trial that it names."""

    request: Request
    asked: TrainingRequest
    machine: Machine
    spec: TrialSpec

    def question(self, cell: Cell, *others: Cell) -> Question:
        """The question of cells of one layout at the training's length. Micro-batches are a rank's
        rows or, if no rows are named, a study's or the usual number.
        """
        own = self.request.micro_batches if cell.settings.accumulates else 1
        if self.asked.rows is not None:
            own = max(1, self.asked.rows // cell.layout.data_parallel_degree)
        asked = self.request.replace(
            gpus=(self.spec.layout.gpus,),
            memory=self.spec.memory_budget_bytes or self.request.memory,
            start_length=self.spec.length_tokens,
            max_length=self.spec.length_tokens,
            micro_batches=1 if own == 1 else max(2, self.request.micro_batches),
        )
        cells = tuple(each.changed(accumulates=own > 1) for each in (cell, *others))
        return plan(asked, self.machine).question.replace(cells=cells)

    def predicted(self, question: Question) -> CellPrediction:
        """Predict the memory of a question's cell."""
        is_gpu = question.device == "cuda"
        if question.memory_bytes is None:
            problem = "nobody knows the memory that there is"
            raise MachineError(problem, hint="name it: `--memory 80GiB`")
        limit = MemoryLimit(
            device_bytes=max(1, question.memory_bytes - self.rows_bytes(question)),
            host_bytes=self.machine.host_bytes if is_gpu else None,
        )
        if not is_gpu:
            return predict_cell(
                FormulaPredictor(likely_footprint, question, question.cells[0], limit)
            )
        return predict_untraced(question, limit, OURS, calibration_of(question, OURS))[0]

    def rows_bytes(self, question: Question) -> int:
        """Bytes of a step's rows beyond a trial's: on the CPU all rows are in process memory."""
        (cell,) = question.cells
        if self.asked.rows is None or question.device != "cpu":
            return 0
        trial = question.trial(cell, question.grid.start_tokens)
        own = -(-self.asked.rows // cell.layout.data_parallel_degree)
        row_tokens = trial.length_tokens * trial.sequences
        return _TOKEN_OF_A_ROW_BYTES * row_tokens * max(0, own - trial.micro_batches)

    def what_fits(self, lacks_bytes: int) -> str:
        """Hint for named settings that lack ``lacks_bytes`` to fit: what to type instead."""
        is_gpu = self.spec.device == "cuda"
        try:
            cell = self.recommended()
        except MachineError as error:
            return error.hint if is_gpu else self.more_memory(lacks_bytes)
        label = cell.label_on(self.spec.device)
        return f"use `--settings recommended`, which is {label}, and leave other settings out"

    def recommended(self) -> Cell:
        """The simplest cell that is predicted to fit; raises MachineError if no cell is."""
        if self.spec.device == "cpu":
            return self.simplest_here()
        request, asked, gpus = self.request, self.asked, self.spec.layout.gpus
        own, nodes = self.spec.layout.machine_gpus, request.nodes
        total_bytes = min(gpu.memory_total_bytes for gpu in self.machine.gpus[:own])
        found = recommend(
            request.model,
            length=asked.length_tokens,
            gpus=f"{nodes}x{own}" if nodes > 1 else own,
            reserved=max(0, total_bytes - (self.spec.memory_budget_bytes or total_bytes)),
            host_memory=self.machine.host_bytes,
            micro_batches=1 if asked.rows and asked.rows < 2 * gpus else 2,
            **{name: getattr(request, name) for name in named_settings(request, says_what=True)},
        )
        for candidate in sorted(found.candidates, key=lambda each: each.order):
            if not candidate.fits or candidate.is_lowered:
                continue
            if _may_fit(self.predicted(self.question(candidate.cell))):
                return candidate.cell
        words = f"highwater recommend {shlex.quote(request.model)} --length {asked.length}"
        raise MachineError(
            f"{format_tokens(asked.length_tokens)} tokens do not fit on {gpus} of these GPUs with "
            "any settings, predicted",
            hint=f"`{words}` says what would: more GPUs, a larger one, or `--lora 16`",
        )

    def simplest_here(self) -> Cell:
        """The simplest settings that fit in a process on the CPU."""
        request, spec = self.request, self.spec
        usual = Request(model=request.model)
        every = request.replace(
            **{name: getattr(usual, name) for name in named_settings(request)},
            gpus=(spec.layout.gpus,),
            memory=spec.memory_budget_bytes,
            start_length=spec.length_tokens,
            max_length=spec.length_tokens,
        )
        lacks: list[int] = []
        for cell in sorted(plan(every, self.machine).question.cells, key=simplicity):
            predicted = self.predicted(self.question(cell))
            if _may_fit(predicted):
                return cell
            lacks.append(predicted.lacks_bytes or 0)
        budget = format_bytes(spec.memory_budget_bytes or 0)
        raise MachineError(
            f"{format_tokens(spec.length_tokens)} tokens do not fit into {budget} of a process, "
            f"predicted: {format_bytes(min(lacks))} are lacking",
            hint=self.more_memory(min(lacks)),
        )

    def more_memory(self, lacks_bytes: int) -> str:
        """Hint for a process on the CPU that lacks ``lacks_bytes``: what to type instead."""
        needed_bytes = (self.spec.memory_budget_bytes or 0) + lacks_bytes
        needed_mib = -(-(needed_bytes + self.room_bytes(needed_bytes)) // MIB)
        host_bytes = self.machine.host_memory_total_bytes
        is_there = needed_mib * MIB <= host_bytes // self.spec.layout.machine_gpus
        more = f"`--memory {needed_mib}MiB`, or " if is_there else ""
        return f"use {more}a smaller `--length`, or a smaller model"

    def room_bytes(self, predicted_bytes: int) -> int:
        """Bytes that a CPU process may need beyond its prediction: errors, cores, thread stacks."""
        stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
        if stack_bytes == resource.RLIM_INFINITY:
            stack_bytes = _STACK_BYTES
        cores = max(1, self.machine.cpu_cores // self.spec.layout.gpus)
        stacks = (_THREADS + _POOLS * cores) * stack_bytes - _THREADS * _STACK_BYTES
        return int(_NEAR * predicted_bytes) + _COMPILED_BYTES + max(0, stacks)


def _may_fit(predicted: CellPrediction) -> bool:
    return bool(predicted.capacity_tokens) or predicted.risk is not None


def _checked(training: _Training, cell: Cell, notes: tuple[str, ...]) -> ChosenTrial:
    asked, spec = training.asked, training.spec
    if asked.rows is not None:
        refuse_uneven(asked.rows, cell.layout.data_parallel_degree)
    question = training.question(cell)
    (cell,) = question.cells
    question = question.replace(prompt_tokens=spec.prompt_tokens)
    predicted = training.predicted(question)
    if not _may_fit(predicted):
        lacks_bytes = predicted.lacks_bytes or 0
        length, label = format_tokens(asked.length_tokens), cell.label_on(spec.device)
        whose = "GPU" if spec.device == "cuda" else "process"
        raise MachineError(
            f"{length} tokens do not fit with {label}: {format_bytes(lacks_bytes)} of a {whose}'s "
            "memory are lacking, predicted",
            hint=training.what_fits(lacks_bytes),
        )
    spec = spec.replace(
        layout=cell.layout, settings=cell.settings, micro_batches=question.micro_batches
    )
    used_bytes = (question.memory_budget_bytes or 0) - predicted.headroom_bytes
    room_bytes = replace(training, spec=spec).room_bytes(used_bytes)
    is_near = spec.device == "cpu" and predicted.headroom_bytes < room_bytes
    if not predicted.capacity_tokens or is_near:
        notes = (*notes, "it is tight: predicted to fit, and not by as much as predictions are off")
    return ChosenTrial(spec, predicted, notes, training.rows_bytes(question))


def _cell_of(path: Path, training: _Training) -> tuple[Cell, Question, tuple[str, ...]]:
    """The simplest cell of a study that trained the length, on as many GPUs as named, or as are
    here, or of a study of one machine on each of several; the study's question; and a note.
    UsageError if there is none, or for another model.
    """
    request, spec = training.request, training.spec
    nodes = request.nodes
    most_gpus = nodes * len(training.machine.gpus) if spec.device == "cuda" else MOST_GPUS
    study = read_study(path)
    question = study.question
    if question.foreign is not None or question.device != spec.device:
        raise UsageError(
            f"{path} is of {'another trainer' if question.foreign else question.device}, and says "
            "nothing about this training",
            hint="use `--settings recommended`",
        )
    if question.simulated:
        raise UsageError(
            f"{path} is of a dry run, and measured nothing", hint="use `--settings recommended`"
        )
    if question.model.config_digest != spec.config_digest:
        raise UsageError(
            f"{path} is of {question.model.name}, another model",
            hint="use `--settings recommended`, or that model",
        )
    alike: list[CellAnswer] = []
    for answer in study.answers:
        layout, settings = answer.cell.layout, answer.cell.settings
        layout = layout.across(nodes) if nodes > 1 and not layout.machines else layout
        is_here = (layout.machines or 1) == nodes and layout.gpus <= most_gpus
        is_named = request.gpus is None or layout.gpus == spec.layout.gpus
        if is_here and is_named and _trains_what_is_named(settings, spec.settings, request):
            cell = answer.cell.replace(layout=layout)
            alike.append(answer.replace(cell=cell))
    answers = [answer for answer in alike if (answer.reach_tokens or 0) >= spec.length_tokens]
    if not answers:
        longest = max((answer.reach_tokens or 0 for answer in alike), default=0)
        if not longest:
            problem = f"nothing in {path} was trained as it is named here"
            raise UsageError(problem, hint="use `--settings recommended`")
        raise UsageError(
            f"nothing in {path} trained {format_tokens(spec.length_tokens)} tokens so: the longest "
            f"was {format_tokens(longest)}",
            hint=f"use `--length {longest}`, or `--settings recommended`",
        )
    answer = min(answers, key=lambda each: simplicity(each.cell))
    measured = format_tokens(answer.reach_tokens or 0)
    cell = answer.cell
    if spec.settings.lora_merged:  # it changes the export alone
        cell = cell.changed(lora_merged=True, save_hf="last")
    label = answer.cell.label_on(spec.device)
    return cell, question, (f"settings of {path}: {label}, measured up to {measured}",)


def _trains_what_is_named(measured: Settings, named: Settings, request: Request) -> bool:
    """True if a study trained with the named settings; the objective always counts as named."""
    fields = {
        DECLARED[name].sets
        for name in named_settings(request, says_what=True)
        if name not in ("lora_merged", "save_hf")
    }
    fields = {"objective", *fields.intersection(Settings.__struct_fields__)}
    return all(getattr(measured, field) == getattr(named, field) for field in fields)


def training_notes(
    model: Model, chosen: ChosenTrial, corpus: Corpus, asked: TrainingRequest
) -> tuple[str, ...]:
    """Notes on a training's settings, weights and data, a sentence each."""
    trial = chosen.spec
    trained = [Path(path).resolve() for path in asked.data]
    both = [
        path
        for path in asked.eval_data
        for own in (Path(path).resolve(),)
        if any(own.is_relative_to(each) or each.is_relative_to(own) for each in trained)
    ]
    said = f"{', '.join(both)} of `--eval-data` is in `--data`, too: its loss is not held out"
    return (
        *chosen.notes,
        *data_notes(chosen, corpus),
        *weights_notes(model, trial.settings, simulated=False),
        *adapter_notes(trial),
        *corpus.notes,
        *((said,) if both else ()),
    )


def data_notes(chosen: ChosenTrial, corpus: Corpus) -> tuple[str, ...]:
    """A note on logits that a study did not measure: its sequences began with a prompt, for whose
    tokens the full loss makes no logits, but this data is trained from the first token.
    """
    spec, predicted = chosen.spec, chosen.predicted
    if not spec.prompt_tokens:
        return ()
    row_tokens = spec.length_tokens * spec.sequences
    prompts_tokens = min(spec.prompt_tokens, spec.length_tokens // 2) * spec.sequences
    is_prompted = corpus.trained_tokens * row_tokens <= corpus.tokens * (
        row_tokens - prompts_tokens
    )
    if spec.settings.loss != "full" or is_prompted:
        return ()
    element_bytes = 2 if spec.device == "cuda" else 4
    vocab_size = load_model(spec.model_directory).shape.vocab_size
    more_bytes = element_bytes * vocab_size * prompts_tokens // spec.layout.context_degree
    if more_bytes <= predicted.headroom_bytes:
        return ()
    return (
        f"up to {format_bytes(more_bytes)} more of logits than predicted, and "
        f"{format_bytes(predicted.headroom_bytes)} are left: this data is trained from its "
        f"beginning, a trial's sequence after a prompt of {format_tokens(prompts_tokens)} tokens; "
        "`--loss chunked` in the place of `--settings` takes none of them",
    )


def has_lost_base(trial: TrialSpec) -> bool:
    """True if adapters alone are saved, and their random base is not: nobody can load them."""
    settings = trial.settings
    is_adapter = settings.lora is not None and not settings.lora_merged
    return is_adapter and missing_files(Path(trial.model_directory)).weights


def adapter_notes(trial: TrialSpec) -> tuple[str, ...]:
    """Notes on what is saved with adapters, and on what is needed to load them."""
    settings = trial.settings
    if settings.lora is None or settings.lora_merged:
        return ()
    model = load_model(trial.model_directory)
    scaled = yarn(model, length_tokens=trial.length_tokens, rope=settings.rope)
    notes: list[str] = []
    if has_lost_base(trial):
        notes.append(
            "the adapters alone are saved, not the random weights that they belong to: "
            "`--lora-merged` saves a model that loads"
        )
    if scaled is not None:
        notes.append(
            f"the adapters alone are saved, not the YaRN of factor {scaled.factor:.4g} that they "
            "are trained with: load them on a model whose config has it, or `--lora-merged` saves "
            "one that does"
        )
    return tuple(notes)
