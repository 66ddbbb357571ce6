"""Predicted starts: the length that a prediction expects of each cell, to try first.

The prediction is in a file, or traced while trials run. It only orders trials.
"""

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from highwater.errors import UsageError
from highwater.memory.capacity import (
    PREDICTION_SCHEMA_VERSION,
    CellPrediction,
    MemoryLimit,
    Prediction,
    predict_cell,
)
from highwater.memory.trace.exact import predict_exactly
from highwater.memory.trainers import formula_of
from highwater.nouns.codec import from_json
from highwater.nouns.files import CONFIG_BYTES, read_file
from highwater.nouns.hardware import SAME_MEMORY, kernels
from highwater.nouns.request import Request
from highwater.nouns.study import Cell, Expectation, Question
from highwater.nouns.trainer import OURS
from highwater.search.predicted_study import unlike_trials
from highwater.trials.probe import probe
from highwater.trials.tracing import CachedTracer, trace_directory
from highwater.units import format_bytes

Expected = Callable[[Cell], int | None]
"""The longest length that is likely to fit a cell, 0 for none.

None: nothing but the formula is known of this cell.
"""


@contextmanager
def predicted_start(request: Request, question: Question) -> Generator[Expected]:
    """What ``request.prediction`` names; leaving the context ends what is still being traced."""
    if request.prediction == "formula":
        yield lambda _: None
    elif request.prediction == "trace":
        with _traced(question) as expected:
            yield expected
    else:
        yield _likely_lengths(read_prediction(Path(request.prediction), question).cells).get


def check_prediction(request: Request, question: Question) -> tuple[str, ...]:
    """Raise for a prediction that cannot be had, before anything starts.

    Returns a note that names the cells which it leaves to the formula.
    """
    if request.prediction == "formula":
        return ()
    if request.prediction == "trace":
        if question.device != "cuda":
            raise UsageError(
                "what is traced are trials on GPUs", hint="leave `--prediction trace` out"
            )
        if request.dry_run:
            raise UsageError(
                "a dry run traces nothing", hint="leave `--dry-run` or `--prediction trace` out"
            )
        return ()
    known = _likely_lengths(read_prediction(Path(request.prediction), question).cells)
    missing = [cell.label for cell in question.cells if cell not in known]
    return (f"{request.prediction} says nothing of {', '.join(missing)}",) if missing else ()


def read_prediction(path: Path, question: Question) -> Prediction:
    """The answer of ``highwater predict --json`` in a file.

    Raises UsageError for one that speaks of other trials.
    """
    hint = (
        "leave `--prediction` out; a file that fits is the answer of `highwater predict --json` "
        "with the settings of this search"
    )
    try:
        found = from_json(read_file(path, most_bytes=CONFIG_BYTES), Prediction)
    except OSError as error:
        problem = f"the prediction {path} cannot be read: {error.strerror}"
        raise UsageError(problem, hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"{path} is not a prediction of this version: {error}"
        raise UsageError(problem, hint=hint) from error
    _refuse_other_trials(found, question, path, hint)
    return found


def _refuse_other_trials(found: Prediction, question: Question, path: Path, hint: str) -> None:
    is_engine = found.trainer == OURS and found.schema_version == PREDICTION_SCHEMA_VERSION
    if found.length_tokens is not None or not is_engine:
        raise UsageError(f"{path} does not say the longest lengths of this engine", hint=hint)
    if question.device != "cuda":
        raise UsageError(
            f"{path} speaks of GPUs, and these trials run on the CPU",
            hint="leave `--prediction` out",
        )
    if found.model_name != question.model.name:
        names = f"{found.model_name}, not of {question.model.name}"
        raise UsageError(f"{path} speaks of {names}", hint=hint)
    memory_bytes, their_bytes = _memory_bytes(question), found.memory_limit.device_bytes
    if memory_bytes is not None and abs(their_bytes / memory_bytes - 1) > SAME_MEMORY:
        theirs, ours = format_bytes(their_bytes), format_bytes(memory_bytes)
        problem = f"{path} speaks of GPUs with {theirs}, these trials have {ours}"
        raise UsageError(problem, hint=f"predict with `--gpu-memory {memory_bytes}`")
    if not _likely_lengths(found.cells).keys() & set(question.cells):
        raise UsageError(f"{path} says nothing of {question.cells[0].label}", hint=hint)


def expectation(
    request: Request, question: Question, cell: Cell, told_tokens: int | None
) -> Expectation | None:
    """What is known of a cell before its first trial: what its prediction told, else the formula.

    None where the formula says nothing.
    """
    if told_tokens is not None:
        return Expectation(cell=cell, likely_tokens=told_tokens, prediction=request.prediction)
    memory_bytes, formula = _memory_bytes(question), formula_of(question)
    if memory_bytes is None or formula is None or unlike_trials(question) is not None:
        return None
    limit = MemoryLimit(device_bytes=memory_bytes - question.margin_bytes)
    likely = predict_cell(question, cell, limit, formula)
    return Expectation(cell=cell, likely_tokens=likely.likely_edge_tokens, prediction="formula")


@contextmanager
def _traced(question: Question) -> Generator[Expected]:
    """Trace cells in their order, ahead of the trials.

    Those of the cells before keep the GPUs busy meanwhile.
    """
    (gpu, *_) = probe().gpus
    memory_bytes = _memory_bytes(question)
    assert memory_bytes is not None, "a GPU has a memory"  # noqa: S101
    memory_limit = MemoryLimit(device_bytes=memory_bytes - question.margin_bytes)
    kernel = kernels(gpu.compute_capability)[0]
    with CachedTracer(trace_directory(os.environ), kernel=kernel) as tracer:

        def predicted(cell: Cell) -> CellPrediction:
            of_one = msgspec.structs.replace(question, cells=(cell,))
            return predict_exactly(of_one, memory_limit, tracer)[0]

        pool = ThreadPoolExecutor(max_workers=1)
        futures: dict[Cell, Future[CellPrediction]] = {
            cell: pool.submit(predicted, cell) for cell in question.cells
        }
        try:
            yield lambda cell: futures[cell].result().likely_edge_tokens
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _likely_lengths(cells: tuple[CellPrediction, ...]) -> dict[Cell, int]:
    return {cell.cell: cell.likely_edge_tokens for cell in cells}


def _memory_bytes(question: Question) -> int | None:
    """Bytes that one GPU may hold, its margin included."""
    return question.memory_budget_bytes or question.device_total_bytes
