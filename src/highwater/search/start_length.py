"""Start lengths: choose the first length to try in a cell, from finished cells or from a prediction
(in a file, or traced meanwhile). The choice orders trials; answers do not depend on it.

    memory = states + fixed + bytes_per_token x tokens per GPU

States are known. The other two terms start from the trainer's memory line: by its formula, or for
scripts with Hugging Face's loss, or for an unknown trainer. If a finished cell disagrees with the
line, the line is moved just enough to meet the middle between what fit and what did not (successive
projection, Agmon and Motzkin, 1954); cells of the same rung are applied last and so weigh most. The
published A100 table takes 246 trials this way, of which 224 are inevitable.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from highwater.errors import UsageError
from highwater.memory.capacity import (
    PREDICTION_SCHEMA_VERSION,
    CellPrediction,
    MemoryLimit,
    Prediction,
)
from highwater.memory.predictor import longest
from highwater.memory.trainers import formula_of_trials
from highwater.model.held_bytes import device_state_bytes, layer_input_bytes
from highwater.nouns.codec import record_in
from highwater.nouns.hardware import SAME_MEMORY, kernels
from highwater.nouns.request import Request
from highwater.nouns.study import Cell, CellAnswer, Expectation, Grid, Question
from highwater.nouns.trainer import OURS
from highwater.search.predicted_study import unlike_trials
from highwater.trials.probe import probe
from highwater.trials.traced import CachedTracer, predict_traced
from highwater.trials.trial_process import cache_directory
from highwater.units import format_bytes

_HF_LOGITS_BYTES = 12.4
"""Bytes per token and vocabulary entry in Hugging Face's loss, measured on an H200 in bf16."""
_FIXED_SHARE = 0.1
"""Share of the memory that an unknown trainer is assumed to take at any length."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes of one GPU besides weights, gradients and optimizer states: linear in its tokens."""

    fixed_bytes: float
    bytes_per_token: float

    def at(self, tokens: float) -> float:
        """Bytes at this many tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens


MemoryLineOf = Callable[[Question, Cell, int], MemoryLine]
"""Memory line of a trainer before any trial, from question, cell, and usable bytes of a GPU."""


def trainer_line(question: Question, cell: Cell, usable_bytes: int) -> MemoryLine:
    """Return the memory line of the question's trainer: through its formula's bytes at the
    predicted capacity and at twice that length, if it has a formula.
    """
    predictor = formula_of_trials(question, cell, usable_bytes)
    if predictor is None:
        foreign = question.foreign
        assert foreign is not None, "our engine has a formula"  # noqa: S101
        return _LINES[foreign.trainer](question, cell, usable_bytes)
    length_tokens = question.grid.length(longest(predictor, usable_bytes) or 1)
    at_bytes = predictor.at(length_tokens).needed_bytes
    tokens = _tokens_per_gpu(cell, length_tokens)
    bytes_per_token = (predictor.at(2 * length_tokens).needed_bytes - at_bytes) / tokens
    fixed_bytes = at_bytes - _states_bytes(question, cell) - bytes_per_token * tokens
    return MemoryLine(fixed_bytes, bytes_per_token)


def hugging_face_line(question: Question, _: Cell, usable_bytes: int) -> MemoryLine:
    """Return the memory line of Hugging Face's own loss: whole logits, and recomputed layers."""
    shape = question.model.shape
    of_token = layer_input_bytes(shape) + _HF_LOGITS_BYTES * shape.vocab_size
    return MemoryLine(_FIXED_SHARE * usable_bytes, of_token)


def unknown_trainer_line(question: Question, cell: Cell, usable_bytes: int) -> MemoryLine:
    """Memory line of an unknown trainer: geometric mean of the least and most that a token can
    cost. Logits cost 2 (ours) to 12.4 bytes (Hugging Face) per token and vocabulary entry; the rest
    1 to 4 times the layer inputs that recomputation keeps. The fixed part is a tenth of the memory.
    """
    shape = question.model.shape
    vocabulary = shape.vocab_size if cell.settings.loss == "full" else 0
    least, most = (
        inputs * layer_input_bytes(shape) + logits * vocabulary
        for inputs, logits in ((1, 2.0), (4, _HF_LOGITS_BYTES))
    )
    return MemoryLine(_FIXED_SHARE * usable_bytes, (least * most) ** 0.5)


_LINES: Mapping[str, MemoryLineOf] = {
    **dict.fromkeys(("accelerate", "llamafactory", "axolotl", "ms-swift"), hugging_face_line),
    "command": unknown_trainer_line,
}
"""Memory lines of trainers without a formula; most for fine-tuning have Hugging Face's loss."""


_FIXED_DOUBT = 0.1
"""Initial uncertainty of a line's fixed part, as a share of the memory."""
_TOKEN_DOUBT = 0.3
"""Initial doubt of a token's bytes, as a share; the doubts only weigh which part moves more."""
_PASSES = 3
"""Times that the finished cells are applied to the line: a later cell may undo an earlier one."""


def first_index(
    question: Question,
    cell: Cell,
    finished: Sequence[CellAnswer],
    line_of: MemoryLineOf = trainer_line,
) -> int | None:
    """Return the index to try first, nearest to the expected longest length; None if the memory is
    unknown. Next come i + 1 or i - 1, so two trials answer a capacity of i or of i - 1.
    """
    memory_bytes = question.memory_bytes
    if cell.settings.token_budget_tokens is not None:
        return question.size_of(cell)  # a micro-batch has about as many tokens at any length
    if memory_bytes is None:
        return None
    usable_bytes = memory_bytes - question.margin_bytes
    line = before = line_of(question, cell, usable_bytes)
    # it is corrected by finished cells whose tokens take as many bytes, wherever their states are,
    # then by those of this rung
    token_cost = cell.settings.holds_logits, cell.settings.recompute
    rung = [answer for answer in finished if answer.cell.settings == cell.settings]
    kin = [
        each
        for each in finished
        if each not in rung
        and (each.cell.settings.holds_logits, each.cell.settings.recompute) == token_cost
        and line_of(question, each.cell, usable_bytes) == before
    ]
    for answers in (kin, rung):
        for answer in _PASSES * answers:
            taken_bytes = usable_bytes - _states_bytes(question, answer.cell)
            line = _moved(line, before, taken_bytes, usable_bytes, answer)
    room_bytes = usable_bytes - _states_bytes(question, cell) - line.fixed_bytes
    tokens_per_gpu = room_bytes / line.bytes_per_token
    return _nearest_index(question.grid, tokens_per_gpu / _tokens_per_gpu(cell, 1))


def carried_start(question: Question, cell: Cell, finished: Sequence[CellAnswer]) -> int | None:
    """Return the index where the published scan starts a cell: this rung's longest capacity on
    fewer GPUs or at less Ulysses; or None. Source: Trinity-RFT, search_context_length_capacity.py.
    """
    smaller = (answer.reach_tokens or 0 for answer in finished if precedes(answer.cell, cell))
    longest = max(smaller, default=0)
    return question.grid.index_at_most(longest) if longest else None


def _moved(
    line: MemoryLine, line_of: MemoryLine, taken_bytes: float, usable_bytes: int, answer: CellAnswer
) -> MemoryLine:
    """Move the memory line to the middle between fit and failure, unless it passes between them."""
    fit_tokens = _tokens_per_gpu(answer.cell, answer.reach_tokens or 0)
    failed_tokens = None
    if answer.does_not_fit_tokens:
        failed_tokens = _tokens_per_gpu(answer.cell, answer.does_not_fit_tokens)
    too_steep = fit_tokens > 0 and line.at(fit_tokens) > taken_bytes
    too_flat = failed_tokens is not None and line.at(failed_tokens) < taken_bytes
    if not (too_steep or too_flat):
        return line
    tokens = fit_tokens if failed_tokens is None else (fit_tokens + failed_tokens) / 2
    missing_bytes = taken_bytes - line.at(tokens)
    fixed_weight = (_FIXED_DOUBT * usable_bytes) ** 2
    token_weight = (_TOKEN_DOUBT * line_of.bytes_per_token) ** 2
    step = missing_bytes / (fixed_weight + token_weight * tokens**2)
    # Contradicting cells must not turn the line around: a token always costs something.
    moved = line.bytes_per_token + step * token_weight * tokens
    bytes_per_token = max(moved, line_of.bytes_per_token / 10)
    return MemoryLine(line.fixed_bytes + step * fixed_weight, bytes_per_token)


def _states_bytes(question: Question, cell: Cell) -> float:
    states = device_state_bytes(question.model.shape, cell.settings, device=question.device)
    return states / cell.layout.shard_degree


def _tokens_per_gpu(cell: Cell, length_tokens: int) -> float:
    return length_tokens * cell.settings.sequences_per_micro_batch / cell.layout.context_degree


def _nearest_index(grid: Grid, length_tokens: float) -> int:
    below = min(grid.index_at_most(int(length_tokens)), grid.size)
    if below < 1:
        return 1
    nearer_to_next = length_tokens - grid.length(below) >= grid.length(below + 1) - length_tokens
    return min(below + nearer_to_next, grid.size)


def precedes(earlier: Cell, cell: Cell) -> bool:
    """True if the published scan starts ``cell`` from the answer of ``earlier``."""
    if earlier.settings != cell.settings:
        return False
    sp, gpus = earlier.layout.context_degree, earlier.layout.gpus
    fewer_gpus = sp == cell.layout.context_degree and gpus < cell.layout.gpus
    less_sp = gpus == cell.layout.gpus and sp < cell.layout.context_degree
    return fewer_gpus or less_sp


Expected = Callable[[Cell], int | None]
"""Longest length that likely fits a cell, 0 for none; None if only the formula is known."""


@contextmanager
def predicted_start(request: Request, question: Question) -> Generator[Expected]:
    """Context manager: the prediction by which a request orders trials; ends its tracers."""
    if request.prediction == "formula":
        yield lambda _: None
    elif request.prediction == "trace":
        with _traced(question) as expected:
            yield expected
    else:
        yield _likely_lengths(read_prediction(Path(request.prediction), question).cells).get


def check_prediction(request: Request, question: Question) -> tuple[str, ...]:
    """Raise UsageError for an unusable prediction; return a note on cells that it leaves out."""
    if request.prediction == "formula":
        return ()
    if request.prediction == "trace":
        if question.device != "cuda":
            hint = "leave `--prediction trace` out"
            raise UsageError("what is traced are trials on GPUs", hint=hint)
        if request.dry_run:
            hint = "leave `--dry-run` or `--prediction trace` out"
            raise UsageError("a dry run traces nothing", hint=hint)
        return ()
    known = _likely_lengths(read_prediction(Path(request.prediction), question).cells)
    missing = [cell.label for cell in question.cells if cell not in known]
    return (f"{request.prediction} says nothing of {', '.join(missing)}",) if missing else ()


def read_prediction(path: Path, question: Question) -> Prediction:
    """Read a file of ``highwater predict --json``; raises UsageError if it is for other trials."""
    hint = (
        "leave `--prediction` out; a file that fits is the answer of `highwater predict --json` "
        "with the settings of this search"
    )
    what = "a prediction of this version"
    found = record_in(path, Prediction, called="prediction", what=what, hint=hint)
    is_engine = found.trainer == OURS and found.schema_version == PREDICTION_SCHEMA_VERSION
    if found.length_tokens is not None or not is_engine:
        raise UsageError(f"{path} does not say the longest lengths of this engine", hint=hint)
    if question.device != "cuda":
        problem = f"{path} speaks of GPUs, and these trials run on the CPU"
        raise UsageError(problem, hint="leave `--prediction` out")
    if found.model_name != question.model.name:
        names = f"{found.model_name}, not of {question.model.name}"
        raise UsageError(f"{path} speaks of {names}", hint=hint)
    memory_bytes, their_bytes = question.memory_bytes, found.memory_limit.device_bytes
    if memory_bytes is not None and abs(their_bytes / memory_bytes - 1) > SAME_MEMORY:
        theirs, ours = format_bytes(their_bytes), format_bytes(memory_bytes)
        problem = f"{path} speaks of GPUs with {theirs}, these trials have {ours}"
        raise UsageError(problem, hint=f"predict with `--gpu-memory {memory_bytes}`")
    if not _likely_lengths(found.cells).keys() & set(question.cells):
        raise UsageError(f"{path} says nothing of {question.cells[0].label}", hint=hint)
    return found


def expectation(
    request: Request, question: Question, cell: Cell, told_tokens: int | None
) -> Expectation | None:
    """Return the longest length predicted for a cell before its first trial; None if nothing
    predicts it. ``told_tokens``: that length by a trace or a file; None: predict it by formula.
    """
    if told_tokens is not None:
        return Expectation(cell=cell, likely_tokens=told_tokens, prediction=request.prediction)
    if question.memory_bytes is None or unlike_trials(question) is not None:
        return None
    usable_bytes = question.memory_bytes - question.margin_bytes
    predictor = formula_of_trials(question, cell, usable_bytes)
    if predictor is None:
        return None
    index = longest(predictor, usable_bytes)
    likely_tokens = question.grid.length(index) if index else 0
    return Expectation(cell=cell, likely_tokens=likely_tokens, prediction="formula")


@contextmanager
def _traced(question: Question) -> Generator[Expected]:
    """Context manager: trace the cells in order, in the background, ahead of their trials."""
    (gpu, *_) = probe().gpus
    memory_bytes = question.memory_bytes
    assert memory_bytes is not None, "a GPU has a memory"  # noqa: S101
    usable_bytes = memory_bytes - question.margin_bytes
    memory_limit = MemoryLimit(device_bytes=usable_bytes, host_bytes=question.host_memory_bytes)
    kernel = kernels(gpu.compute_capability)[0]
    with CachedTracer(cache_directory("traces"), kernel=kernel) as tracer:

        def predicted(cell: Cell) -> CellPrediction:
            of_one = question.replace(cells=(cell,))
            return predict_traced(of_one, memory_limit, tracer)[0]

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
