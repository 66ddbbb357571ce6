"""Completed: a study that has every answer already, on a machine with no GPU to ask anew."""

import shlex
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from highwater.errors import HighwaterError, MachineError, StudyError
from highwater.nouns.hardware import OLDEST_CAPABILITY, Gpu, Machine
from highwater.nouns.plan import plan
from highwater.nouns.plan_notes import prompt_notes
from highwater.nouns.request import Request
from highwater.nouns.study import Question, Study
from highwater.store.journal import read_study
from highwater.trials.probe import probe
from highwater.units import format_seconds


def completed_study(request: Request) -> Study | None:
    """The named study, if it asks what is asked and has every answer, in as much time; else None.

    Only where no GPU is visible: elsewhere a search is resumed, which finds its trials recorded.
    Nothing is run or written. Raises MachineError for a study that asks the same and is not
    finished, or not in that time: it cannot be resumed here.
    """
    if request.study is None or request.dry_run or request.device == "cpu":
        return None
    if request.on_ray or probe().gpus:
        return None
    study = _study_of_gpus(Path(request.study))
    asked = None if study is None else _asked(request, study.question)
    if study is None or asked is None or asked.key != study.question.key:
        return None
    limit_s = asked.timeout_s
    answers = study.answers_within(limit_s)
    open_cells = len(study.question.cells) - sum(not answer.is_undecided for answer in answers)
    shown = f"highwater show {shlex.quote(request.study)}"
    if open_cells:
        is_late = len(answers) < len(study.answers)
        within = f" in {format_seconds(limit_s)} a trial" if is_late else ""
        cells = f"{open_cells} of {len(study.question.cells)} cells without a final answer{within}"
        raise MachineError(
            f"no GPU is visible, and the search in {request.study} is not finished: {cells}",
            hint=f"`{shown}` shows what it has; the same command goes on with it on "
            f"{study.question.device_name}",
        )
    none_needed = f"no GPU is visible, and none is needed: {request.study} has every answer"
    return msgspec.structs.replace(study, notes=(f"{none_needed}; nothing is run", *study.notes))


def _study_of_gpus(path: Path) -> Study | None:
    """The study in a file, if its trials ran on GPUs; else None.

    What is wrong with a file is told where it would be written. A path that is no file, a pipe for
    example, is not waited for.
    """
    with suppress(StudyError, OSError):
        study = read_study(path) if path.is_file() else None
        if study is not None and study.question.device == "cuda" and not study.question.simulated:
            return study
    return None


def _asked(request: Request, question: Question) -> Question | None:
    """What the request asks on a machine with the study's GPUs; None where it asks nothing."""
    with suppress(HighwaterError):
        return plan(gone_on(request)[0], _machine_of(question)).question
    return None


def gone_on(request: Request) -> tuple[Request, tuple[str, ...]]:
    """The request, its sequences with the prompt of a study that it goes on with unless it names
    one, and a note that says so. What is wrong with a file is told where it is opened.
    """
    if request.study is not None and request.prompt_tokens is None:
        with suppress(StudyError, OSError):
            path = Path(request.study)
            recorded = read_study(path).question if path.is_file() else None
            if recorded is not None:
                prompted = msgspec.structs.replace(request, prompt_tokens=recorded.prompt_tokens)
                return prompted, prompt_notes(path, recorded)
    return request, ()


def _machine_of(question: Question) -> Machine:
    """The study's machine, as much of it as a plan looks at.

    Its host held what trials keep there, or they would not have been started.
    """
    gpu = Gpu(
        index=0,
        name=question.device_name,
        memory_total_bytes=question.device_total_bytes or 0,
        memory_used_bytes=0,
        compute_capability=OLDEST_CAPABILITY,
        processes=(),
    )
    return Machine(
        gpus=(gpu,) * max(cell.layout.gpus for cell in question.cells),
        driver_version=None,
        cpu_cores=1,
        host_memory_total_bytes=sys.maxsize,
        host_memory_available_bytes=sys.maxsize,
        versions={},
    )
