"""The Python interface, and the only place where a search, a runner and a journal are put together.

```python
import highwater

study = highwater.find("Qwen3-0.6B", gpus=[1], memory="80GiB")
for answer in study.answers:
    print(answer.cell.label, answer.capacity_tokens)
```
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from highwater.answered import answered
from highwater.errors import MachineError, UsageError
from highwater.evidence import OnCalibrate, own_constants, own_residuals
from highwater.foresight import check_prediction, expectation, foresight
from highwater.launch.local import LocalRunner, LogLayout, refuse_unsupported
from highwater.launch.probe import (
    INSTALL_HINT,
    environment,
    gpus_meant,
    package_obstacles,
    probe,
    refuse_busy_gpus,
    refuse_torch_without_gpu,
    refuse_unreadable_gpus,
)
from highwater.launch.simulated import FormulaLaw, SimulatedRunner, TableLaw
from highwater.launch.tracing import CachedTracer, trace_directory
from highwater.prediction.asked import calibration_of, predict_by_formula, predicted_question, room_in
from highwater.prediction.capacity import ACCURACY, NOT_MODELLED, NOT_TRACED, TRACED_ACCURACY, Prediction, Room, accuracy
from highwater.prediction.exact import predict_exactly
from highwater.prediction.formula import refuse_unknown_family
from highwater.prediction.residuals import Method
from highwater.prediction.score import Score, rooms_of, score
from highwater.prediction.shipped import by_replay
from highwater.prediction.timeline import timeline as draw_timeline
from highwater.search.campaign import CellAnswered, Event, TrialStarted, campaign
from highwater.search.compare import MethodCount, compare
from highwater.spec.cluster import Cluster
from highwater.spec.events import Trainer
from highwater.spec.footprint import checkpoint_bytes
from highwater.spec.hardware import Kernel, Machine, kernels, refuse_unfit_gpu
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, load_model
from highwater.spec.plan import Plan, plan, plan_trial, used_gpus
from highwater.spec.protocols import Runner
from highwater.spec.published import read_capacity_table
from highwater.spec.request import Request, request_from
from highwater.spec.settings import Settings
from highwater.spec.study import Question, Study
from highwater.spec.trial import Device, TrialResult, TrialSpec
from highwater.store.directory import (
    check_checkpoint_directory,
    check_log_directory,
    check_new_file,
    study_path,
    write_new_file,
)
from highwater.store.journal import Journal, open_journal, read_study
from highwater.store.recording import RecordingRunner
from highwater.units import format_seconds, parse_memory, parse_tokens

Listener = Callable[[Event], None]

_TIMEOUT_FLOOR_S: Mapping[Device, float] = {"cpu": 10.0, "cuda": 60.0}
"""From launch to first step a trial takes seconds on the CPU, 12 to 21 s on a GPU: less would end every trial before it."""


def find(model: str, *, on_event: Listener | None = None, **settings: Any) -> Study:
    """The longest context that ``model`` trains with, for each layout and rung: a study with a pair of real trials each.

    ``settings`` are the fields of ``Request``: ``gpus=[1, 2]``, ``memory="80GiB"``, ``loss="chunked"``, ``dry_run=True``.
    ``on_event`` hears each trial as it starts and ends. Blocks for as long as the trials take; called again after an
    interruption it goes on where it was. A ``study`` that has every answer is returned as it is where there is no GPU to ask.
    Raises HighwaterError for what cannot be asked, before anything starts.
    """
    request = request_from({"model": model, **settings}, keywords=True)
    return answered(request) or answer(request, prepare(request), on_event=on_event)


def run_trial(model: str, length: int | str, **settings: Any) -> TrialResult:
    """One real trial of ``length`` tokens: how it ended, and what was measured. ``settings`` as for ``find``.

    Raises HighwaterError for what cannot be tried, before anything starts.
    """
    request = request_from({"model": model, **settings}, keywords=True)
    return answer_trial(request, prepare_trial(request, length))


def predict(
    model: str,
    *,
    gpus: str | int | None = None,
    length: int | str | None = None,
    trainer: Trainer = "highwater",
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
    state_bytes_per_param: int = STATE_BYTES_PER_PARAMETER,
    exact: bool = False,
    timeline: str | Path | None = None,
    calibrate_with: Sequence[str | Path] = (),
    constants: str | Path | None = None,
    on_trace: Callable[[TrialSpec], None] | None = None,
    on_calibrate: OnCalibrate | None = None,
    **settings: Any,
) -> Prediction:
    """The longest context that ``model`` is predicted to train with on each rung; with ``length`` the rungs that it fits.

    It fits where the upper end of its interval does, which recorded trials taught; ``calibrate_with`` are studies whose trials are
    to teach too: with ``exact`` those that tell the most, each traced first; ``on_calibrate`` hears how many traces that takes.

    ``constants`` is a file that ``highwater doctor --measure --json`` printed on such GPUs: context, cuBLAS and NCCL are taken from
    it, in the place of those that were read on H200s.

    ``gpus`` names GPUs that need not be here, ``"4xA100-80GB"``; without it this machine's are meant. ``gpu_memory`` is the memory
    of one, for a kind that no catalog has; ``host_memory`` the machine's, unknown unless it is said; ``reserved`` what others take
    of each GPU. ``settings`` are the fields of ``Request`` that name a trial or a grid of lengths. Nothing is trained.

    By formula: milliseconds, no torch. ``exact`` traces the engine's own steps on fake tensors, in processes with torch, at the
    lengths around each edge: half a minute to minutes a trace, which ``on_trace`` hears of and which is kept for the next time.
    ``timeline`` is a file to write, which PyTorch's memory viewer opens: every allocation of the cell that ``explained`` names.
    Raises HighwaterError for what cannot be asked.
    """
    refuse_unknown_family(load_model(model))
    is_ours = trainer == "highwater" and state_bytes_per_param == STATE_BYTES_PER_PARAMETER
    _check_exact(exact=exact, timeline=timeline, is_ours=is_ours)
    _check_trainer(trainer, calibrate_with=calibrate_with, constants=constants)
    where = gpus_meant(gpus, gpu_memory)
    room = room_in(where, host_memory=host_memory, reserved=reserved, state_bytes_per_param=state_bytes_per_param)
    if constants is not None:
        room = msgspec.structs.replace(room, constants=own_constants(Path(constants), where))
    length_tokens = None if length is None else parse_tokens(str(length))
    question, notes = predicted_question(model, where, trainer, length_tokens, settings)
    method: Method = "trace" if exact else "formula"
    own = own_residuals(calibrate_with, method, room.constants, on_calibrate=on_calibrate, on_trace=on_trace)
    known = calibration_of(question, room, trainer, method=method, own=own)
    prediction = _without_cells(question, where, room, trainer, method, length_tokens)
    prediction = msgspec.structs.replace(prediction, calibration=known, notes=notes)
    if not exact:
        return _by_formula(prediction, question)
    kernel = kernels(where.compute_capability)[0]
    return _traced(prediction, question, kernel, on_trace, None if timeline is None else Path(timeline))


def _without_cells(
    question: Question, where: Cluster, room: Room, trainer: Trainer, method: Method, length_tokens: int | None
) -> Prediction:
    """What is predicted, of what and how, before any of it is."""
    is_traced = method == "trace"
    return Prediction(
        model_name=question.model.name,
        config_digest=question.model.config_digest,
        native_length_tokens=question.grid.native_length_tokens,
        trainer=trainer,
        gpus=where.gpus,
        device_name=where.device_name,
        device_bytes=where.device_bytes,
        room=room,
        margin_bytes=question.margin_bytes,
        length_tokens=length_tokens,
        cells=(),
        method=method,
        accuracy=TRACED_ACCURACY if is_traced else ACCURACY[trainer],
        not_modelled=NOT_TRACED if is_traced else NOT_MODELLED,
    )


def _by_formula(prediction: Prediction, question: Question) -> Prediction:
    """Every cell; for another trainer, how many of them by replay."""
    cells = predict_by_formula(question, prediction.room, prediction.trainer, prediction.calibration)
    replayed = sum(cell.replayed is not None for cell in cells)
    known = accuracy(prediction.trainer, replayed=replayed, cells=len(cells))
    prediction = msgspec.structs.replace(prediction, cells=cells, accuracy=known)
    if prediction.trainer == "highwater":
        return prediction
    return msgspec.structs.replace(prediction, notes=(*prediction.notes, by_replay(replayed, len(cells))))


def _traced(
    prediction: Prediction,
    question: Question,
    kernel: Kernel,
    on_trace: Callable[[TrialSpec], None] | None,
    timeline: Path | None,
) -> Prediction:
    """With every cell by traces."""
    with CachedTracer(trace_directory(os.environ), kernel=kernel, on_trace=on_trace) as tracer:
        cells = predict_exactly(question, prediction.room, tracer, prediction.calibration)
        prediction = msgspec.structs.replace(prediction, cells=cells)
        if timeline is not None:
            _write_timeline(timeline, question, prediction, tracer)
    return prediction


def _check_exact(*, exact: bool, timeline: str | Path | None, is_ours: bool) -> None:
    if exact and not is_ours:
        raise UsageError(
            "what is traced are this engine's own steps, with AdamW in float32",
            hint="leave `--exact` out, or `--trainer` and `--state-bytes-per-param`",
        )
    if timeline is None:
        return
    if not exact:
        raise UsageError("a timeline is drawn from a trace", hint="add `--exact`")
    check_new_file(Path(timeline), flag="--timeline", name="timeline.pickle")


def _check_trainer(trainer: Trainer, *, calibrate_with: Sequence[str | Path], constants: str | Path | None) -> None:
    for is_named, what in ((bool(calibrate_with), "trials of"), (constants is not None, "constants as measured for")):
        if is_named and trainer != "highwater":
            raise UsageError(f"{what} this engine say nothing about the trainer {trainer}", hint="leave `--trainer` out")


def _write_timeline(path: Path, question: Question, prediction: Prediction, tracer: CachedTracer) -> None:
    shown = prediction.explained
    length_tokens = shown.capacity_tokens or shown.does_not_fit_tokens or question.grid.start_tokens
    log = tracer(question.trial(shown.cell, length_tokens))
    capacity = prediction.room.device_bytes - question.margin_bytes - shown.footprint.outside_bytes
    workspaces = prediction.room.cublas_workspaces_bytes
    allocator = shown.cell.settings.allocator
    drawn = draw_timeline(log, allocator=allocator, capacity_bytes=capacity, workspaces_bytes=workspaces)
    write_new_file(path, drawn, flag="--timeline")


def predict_against(
    table_path: str | Path, *, trainer: Trainer = "highwater", gpu_memory: str | int | None = None, **limits: Any
) -> Score:
    """Predictions for every cell of a table of known capacities (CSV), compared with it.

    ``gpu_memory`` is that of the kind that no catalog has, or of the table's only kind; ``limits`` are ``host_memory``,
    ``reserved`` and ``state_bytes_per_param``, as for ``predict``.
    """
    table = read_capacity_table(Path(table_path))
    for question in table.questions:
        refuse_unknown_family(question.model)
    memory_bytes = None if gpu_memory is None else parse_memory(str(gpu_memory))
    return score(table, trainer, rooms_of(table, gpu_memory_bytes=memory_bytes, **limits))


def open_study(path: str | Path) -> Study:
    """The study in a file, as it is now; raises StudyError when there is none, or when it is damaged."""
    return read_study(Path(path))


def compare_search(table_path: str | Path) -> tuple[MethodCount, ...]:
    """Trials that each search method takes to find the capacities of a known table (CSV); nothing is trained."""
    table = read_capacity_table(Path(table_path))
    return compare(table.questions, SimulatedRunner(TableLaw(capacity_tokens=table.of_one_gpu())))


def prepare(request: Request) -> Plan:
    """The question of a request, after every check that can be made before the first trial.

    Raises HighwaterError for what cannot be asked.
    """
    machine = probe()
    _check_request(request, machine)
    planned = plan(request, machine)
    question = planned.question
    unforeseen = check_prediction(request, question)
    for cell in question.cells:
        refuse_unsupported(cell.layout)
    _check_machine(request, machine, question.device, gpus=max(cell.layout.gpus for cell in question.cells))
    _check_room_for_checkpoints(request, question.cells[0].settings, question.device)
    return msgspec.structs.replace(planned, notes=planned.notes + unforeseen)


def prepare_trial(request: Request, length: int | str) -> TrialSpec:
    """The trial of one length, after the same checks as ``prepare``."""
    machine = probe()
    _check_request(request, machine)
    spec = plan_trial(request, machine, parse_tokens(str(length)))
    refuse_unsupported(spec.layout)
    _check_machine(request, machine, spec.device, gpus=spec.layout.gpus)
    _check_room_for_checkpoints(request, spec.settings, spec.device)
    return spec


def answer(
    request: Request,
    planned: Plan,
    *,
    on_event: Listener | None = None,
    log_layout: LogLayout = "rung",
    command: Sequence[str] = (),
) -> Study:
    """Ask the question: run what its study does not have yet, and return the study.

    ``command`` is what was typed, kept in the study for whoever resumes it. Every finished trial is on disk when this
    raises, KeyboardInterrupt included.
    """
    path = study_file(request, planned.question)
    runner = _runner(request, log_layout, planned.question.device_total_bytes)
    if path is not None:
        return _search(request, planned, runner, path, on_event, command)
    with tempfile.TemporaryDirectory(prefix="highwater-") as folder:  # a dry run leaves nothing behind
        study = _search(request, planned, runner, Path(folder, "study.jsonl"), on_event, command)
    return msgspec.structs.replace(study, path=None)


def answer_trial(request: Request, spec: TrialSpec) -> TrialResult:
    """Run one prepared trial; it is recorded in no study."""
    totals = [gpu.memory_total_bytes for gpu in used_gpus(probe(), device=spec.device, count=spec.layout.gpus)]
    return _runner(request, "rung", min(totals, default=None)).run(spec)


def study_file(request: Request, question: Question) -> Path | None:
    """The file of a question's study; None for a dry run, unless the request names one."""
    if request.study is not None:
        return Path(request.study)
    return None if request.dry_run else study_path(Path(request.log_dir), question)


def _search(
    request: Request, planned: Plan, runner: Runner, path: Path, on_event: Listener | None, command: Sequence[str]
) -> Study:
    question = planned.question
    where = None if question.simulated else environment()  # a dry run depends on no machine
    opened = partial(open_journal, command=command, environment=where, retry_crashed=request.retry_crashed)
    with foresight(request, question) as expected, opened(path, question) as journal:
        for event in campaign(question, RecordingRunner(runner, journal), expected=expected, past=journal.past):
            if isinstance(event, TrialStarted) and journal.takes_expectation(event.cell):
                found = expectation(request, question, event.cell, expected(event.cell))
                if found is not None:
                    journal.cell_expected(found)
            if isinstance(event, CellAnswered):
                journal.cell_answered(event.answer)
            if on_event is not None and not _is_recorded_start(event, journal):
                on_event(event)
        study = journal.snapshot()
    return msgspec.structs.replace(study, notes=(*planned.notes, *study.notes))


def _is_recorded_start(event: Event, journal: Journal) -> bool:
    """The start of a trial that will not start, because its result is in the journal: nobody needs to hear of it."""
    return isinstance(event, TrialStarted) and journal.recorded(event.spec, attempt=event.attempt, repeat=event.repeat) is not None


def _runner(request: Request, log_layout: LogLayout, device_total_bytes: int | None = None) -> Runner:
    if request.dry_run:
        return SimulatedRunner(FormulaLaw(shape=load_model(request.model).shape), device_total_bytes=device_total_bytes)
    return LocalRunner(
        log_directory=Path(request.log_dir),
        timeout_s=request.timeout_s,
        log_layout=log_layout,
        allow_busy=request.allow_busy,
        checkpoint_directory=None if request.checkpoint_dir is None else Path(request.checkpoint_dir),
    )


def _check_room_for_checkpoints(request: Request, settings: Settings, device: Device) -> None:
    """Raise for a directory that cannot take what one trial saves: the same on every rung and layout, and one trial at a time."""
    needed = checkpoint_bytes(load_model(request.model).shape, settings, device)
    if any(needed) and not request.dry_run:
        check_checkpoint_directory(Path(request.checkpoint_dir or request.log_dir), needed)


def _check_request(request: Request, machine: Machine) -> None:
    """Raise for what depends on the device alone, and has to be said before there is a plan."""
    device: Device = request.device or ("cuda" if machine.gpus or machine.unreadable_gpus else "cpu")
    floor_s = _TIMEOUT_FLOOR_S[device]
    if request.timeout_s < floor_s:
        raise UsageError(
            f"a timeout of {format_seconds(request.timeout_s)} ends a trial before it has started",
            hint=f"use `--timeout {floor_s:.0f}s` or more; the default is `--timeout 40m`",
        )
    if device == "cuda" and not request.dry_run:
        refuse_unreadable_gpus(machine, count=max(request.gpus or (1,)))


def _check_machine(request: Request, machine: Machine, device: Device, *, gpus: int) -> None:
    """Raise for what would make every trial fail: no log directory, no engine, an unfit or busy GPU, a torch that cannot use it."""
    if request.dry_run:
        return
    check_log_directory(Path(request.log_dir))
    obstacles = package_obstacles(machine)
    if obstacles:
        raise MachineError("; ".join(obstacles), hint=INSTALL_HINT)
    for gpu in used_gpus(machine, device=device, count=gpus):
        refuse_unfit_gpu(gpu.name, gpu.compute_capability)
    if device == "cuda":
        refuse_unreadable_gpus(machine, count=gpus)
        if not request.allow_busy:
            refuse_busy_gpus(machine, count=gpus)
        refuse_torch_without_gpu(machine)
