"""Tables of predictions: capacities by rung, the rungs that fit a length, bytes by term, and how
many cells of a known table a prediction hits.
"""

from collections.abc import Iterator, Sequence

from highwater.memory.capacity import Binding, CellPrediction, Prediction
from highwater.memory.formula.constants import MachineConstants, Term
from highwater.memory.interval.calibration import Calibration, least_residuals
from highwater.memory.interval.residuals import PredictionMethod
from highwater.memory.table_accuracy import Miss, TableAccuracy
from highwater.memory.trace.replay import Replayed
from highwater.memory.trainers import MEMORY, by_replay
from highwater.nouns.settings import short_settings
from highwater.nouns.study import RISK_IN_WORDS, counted_ranks
from highwater.nouns.trainer import OURS, trainer_title
from highwater.pages.sentence import assumed_host, caveat, star_of_yarn
from highwater.pages.table import Column, TextTable, table_of
from highwater.pages.text import plain
from highwater.speed import BASIS_IN_WORDS
from highwater.units import GIB, format_bytes, format_rate, format_seconds, format_tokens

_LONGEST_BAR = 16
"""Characters."""
_METHODS: dict[PredictionMethod, str] = {
    "formula": "formula, nothing was run",
    "trace": "traced steps, replayed; nothing was trained",
}
_BINDINGS: dict[Binding, str] = {
    "device": "GPU memory",
    "host": "host memory",
    "ceiling": "the longest length in question",
}


def prediction_table(prediction: Prediction, *, is_explained: bool = False) -> TextTable:
    """A table of each cell's longest length, what is left there, and how fast it is; at one length,
    whether it fits. One caveat follows. ``is_explained`` adds what ends each cell, the interval of
    its memory and where its peak is, and all that is known of such predictions.
    """
    at_length, native = prediction.length_tokens is not None, prediction.native_length_tokens
    has_counts = len({each.cell.layout.gpus for each in prediction.cells}) > 1
    known = prediction.calibration
    is_timed = any(each.step is not None for each in prediction.cells)
    cells, unlike = [each.cell for each in prediction.cells], () if known is None else known.unlike
    below = caveat(prediction.answer, cells, unlike=unlike, star=_star(prediction))

    def ended(each: CellPrediction) -> str:
        binding = _BINDINGS[each.binding]
        if at_length:
            return "-" if each.capacity_tokens else binding
        if each.does_not_fit_tokens is None:
            return binding
        return f"{format_tokens(each.does_not_fit_tokens)}: {binding}"

    reach: list[Column[CellPrediction]] = [("fits", _fits)]
    if not at_length:
        reach = [
            ("trains up to", lambda each: _length(each.capacity_tokens, native)),
            ("may reach", lambda each: _length(each.likely_edge_tokens, native)),
        ]
    speed: list[Column[CellPrediction]] = [
        ("a step", lambda each: format_seconds(each.step and each.step.time_s)),
        ("tokens/s", lambda each: format_rate(each.step and each.step.tokens_per_s)),
    ]
    more: list[Column[CellPrediction]] = [
        ("ended by", ended),
        ("GPU memory", _device_memory),
        ("peak in", lambda each: each.peak_phase),
    ]
    return table_of(
        f"{_title(prediction)}: predicted by {_METHODS[prediction.method]}",
        prediction.cells,
        ("settings", lambda each: short_settings(each.cell.settings)),
        ("GPUs", lambda each: str(each.cell.layout.gpus)) if has_counts else None,
        ("SP", lambda each: each.cell.layout.sharing),
        *reach,
        *(speed if is_timed else ()),
        ("headroom", lambda each: format_bytes(each.headroom_bytes)),
        ("host memory", lambda each: format_bytes(each.footprint.host_bytes)),
        *(more if is_explained else ()),
        names=1 + has_counts,
        footnotes=_explanations(prediction) if is_explained else (below,),
    )


def term_table(predicted: CellPrediction) -> TextTable:
    """Bytes by term of each phase, and a bar for each: the picture of one peak. Of a trace it shows
    its tensors, the largest kinds.
    """
    if predicted.replayed is not None:
        return _tensor_table(predicted, predicted.replayed)
    footprint = predicted.footprint
    phases: list[tuple[str, Sequence[Term]]] = [
        *(
            (
                f"{each.name}{' (the peak)' if each is footprint.peak else ''}, "
                f"{format_bytes(each.bytes)}",
                each.terms,
            )
            for each in footprint.phases
        ),
        ("reserved besides", footprint.besides),
        ("outside the allocator", footprint.outside),
        ("host", footprint.host),
    ]
    largest = max(term.bytes for _, terms in phases for term in terms)
    rows = [
        (name if index == 0 else "", term)
        for name, terms in phases
        for index, term in enumerate(sorted(terms, key=lambda term: -term.bytes))
    ]
    return table_of(
        f"{predicted.cell.label}, bytes by term: predicted",
        rows,
        ("phase", lambda row: row[0]),
        ("term", lambda row: row[1].name),
        ("", lambda row: _bar(row[1].bytes, largest)),
        ("GiB", lambda row: f"{row[1].bytes / GIB:.2f}"),
        footnotes=(
            f"{format_bytes(footprint.device_used_bytes)} of the GPU: the peak, reserved besides, "
            f"and outside the allocator",
        ),
    )


def _bar(size: int, largest: int) -> str:
    return "#" * round(_LONGEST_BAR * size / largest)


def _tensor_table(predicted: CellPrediction, replayed: Replayed) -> TextTable:
    largest = max((alive.bytes for alive in replayed.alive), default=0) or 1
    named = sum(alive.bytes for alive in replayed.alive)
    peaks = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in replayed.allocated_by_phase.items()
    )
    return table_of(
        f"{predicted.cell.label}, tensors alive at the peak, in {replayed.phase}: traced",
        replayed.alive,
        ("allocated by", lambda alive: alive.operator),
        ("module", lambda alive: alive.module or "-"),
        ("in", lambda alive: alive.phase),
        ("tensors", lambda alive: str(alive.count)),
        ("", lambda alive: _bar(alive.bytes, largest)),
        ("GiB", lambda alive: f"{alive.bytes / GIB:.2f}"),
        footnotes=(
            f"these are {format_bytes(named)} of {format_bytes(replayed.peak_allocated_bytes)} "
            f"allocated; {format_bytes(replayed.peak_reserved_bytes)} reserved, {replayed.retries} "
            "retries of the allocator",
            f"peaks by phase: {peaks}",
        ),
    )


def accuracy_table(table_accuracy: TableAccuracy, *, name: str) -> TextTable:
    """How many cells of a known table a prediction hits, by rung; each miss in a footnote."""
    closed = {row.settings: row for row in table_accuracy.closed_form}
    replayed = table_accuracy.replayed_cells
    is_replayed = MEMORY[table_accuracy.trainer].replay is not None
    notes = (by_replay(replayed, replayed + table_accuracy.formula_cells),) if is_replayed else ()
    return table_of(
        f"predicted against {plain(name)}",
        table_accuracy.per_settings,
        ("settings", lambda row: row.settings),
        ("cells", lambda row: str(row.cells)),
        ("exact", lambda row: str(row.exact)),
        ("within one step", lambda row: str(row.within_one_step)),
        ("closed form: exact", lambda row: str(closed[row.settings].exact)) if closed else None,
        ("within one step", lambda row: str(closed[row.settings].within_one_step))
        if closed
        else None,
        footnotes=(*notes, *map(_missed, table_accuracy.misses)),
        names=1,
    )


def _missed(miss: Miss) -> str:
    layout = miss.cell.layout
    return (
        f"{miss.settings}, {plain(miss.device_name)}, {plain(miss.model_name)}, "
        f"{counted_ranks(layout.gpus, 'cuda')}{layout.suffix}: known "
        f"{format_tokens(miss.known_tokens)}, predicted {format_tokens(miss.predicted_tokens)}"
    )


def _title(prediction: Prediction) -> str:
    where = (
        f"{prediction.gpus} x {plain(prediction.device_name)}, "
        f"{format_bytes(prediction.device_bytes)} each"
    )
    asked = prediction.length_tokens
    length = "" if asked is None else f", {_length(asked, prediction.native_length_tokens)} tokens"
    title = trainer_title(prediction.trainer)
    trainer = "" if prediction.trainer == OURS else f", trained by {title}"
    return f"{plain(prediction.model_name)} on {where}{length}{trainer}"


def _fits(predicted: CellPrediction) -> str:
    """How sure one length is: ``safe``, ``likely``, ``tight``, or ``no``."""
    if predicted.risk is None:
        return "yes" if predicted.capacity_tokens else "no"
    if not predicted.capacity_tokens and predicted.risk == "safe":
        return "no"  # it leaves less than was asked for
    return predicted.risk


def _length(tokens: int, native_length_tokens: int) -> str:
    star = "*" if tokens > native_length_tokens else ""
    return f"{format_tokens(tokens)}{star}" if tokens else "none"


def _device_memory(predicted: CellPrediction) -> str:
    """The interval of the GPU's memory; without one the prediction itself."""
    ends = predicted.interval
    if ends is None:
        return format_bytes(predicted.device_used_bytes)
    return f"{format_bytes(ends.low_bytes)} to {format_bytes(ends.high_bytes)}"


def _star(prediction: Prediction) -> tuple[str, ...]:
    lengths = (predicted.likely_edge_tokens for predicted in prediction.cells)
    longest = prediction.length_tokens or max(lengths, default=0)
    return star_of_yarn(longest, prediction.native_length_tokens)


def _explanations(prediction: Prediction) -> Iterator[str]:
    limit = prediction.memory_limit
    yield from _star(prediction)
    yield RISK_IN_WORDS
    yield (
        f"trains up to: with {format_bytes(prediction.margin_bytes)} of headroom, and at the "
        "pessimistic end of the prediction; may reach: where the prediction itself fits; headroom "
        "is what the prediction leaves of a GPU; GPU memory counts what the allocator only keeps, "
        "too, as far as there is room"
    )
    yield from assumed_host(limit.host_bytes, limit.usual_host)
    if prediction.calibration is not None:
        yield from learned(prediction.calibration)
    steps = (each.step for each in prediction.cells if each.step is not None)
    yield from dict.fromkeys(BASIS_IN_WORDS[step.basis] for step in steps)
    if limit.constants is not None:
        yield _constants(limit.constants, prediction.gpus)
    yield prediction.accuracy
    yield f"not in it: {', '.join(prediction.not_modelled)}"


def _constants(own: MachineConstants, gpus: int) -> str:
    """A note on where what lies outside the allocator was measured, and what of it was not."""
    names = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "cudnn": "cuDNN"}
    known = [f"{name} {own.versions[key]}" for key, name in names.items() if key in own.versions]
    versions = ", ".join(known) or "versions unknown"
    text = f"context, cuBLAS and NCCL as measured on {own.device_name}: {versions}"
    if gpus > max(own.context_bytes):
        text += f"; NCCL of {gpus} GPUs is not among them, and taken as read on H200s and H100s"
    return plain(text)


def learned(calibration: Calibration) -> Iterator[str]:
    """Say what the intervals promise, what they were learned from, and for what they were not."""
    what = "edges" if calibration.edges else "trials"
    each = [
        f"{factors.allocator}, {factors.residuals} {what}: {factors.lower:.3f} to "
        f"{factors.upper:.3f} of the prediction"
        for factors in calibration.factors
    ]
    gpus = "1 GPU" if calibration.gpus == (1,) else f"{', '.join(map(str, calibration.gpus))} GPUs"
    where = plain(
        f"{', '.join(calibration.device_names)}; {gpus}; "
        f"{', '.join((*calibration.objectives, *calibration.model_names))}"
    )
    own = f", {calibration.own_trials} of them yours" if calibration.own_trials else ""
    coverage = f"{calibration.coverage:.0%}".replace("%", " %")
    yield (
        f"each end is to hold for {coverage} of {what} like those it was learned from "
        f"({'; '.join(each)}{own}): {where}"
    )
    few = [factors.allocator for factors in calibration.factors if factors.is_widened]
    if few:
        needed = least_residuals(calibration.coverage)
        yield (
            f"{', '.join(few)}: below {needed} {what} no count gives {coverage}, so the ends are "
            f"the extremes, widened"
        )
    if calibration.unlike:
        yield (
            f"not among those {what}, so nobody knows its coverage there: "
            f"{plain(', '.join(calibration.unlike))}"
        )
