"""Heat maps of a guide's page.

One shows what each length leaves of a GPU, rung by rung; the other what takes the memory, term by
term.
"""

from collections.abc import Sequence
from typing import NamedTuple

from highwater.memory.capacity import CellPrediction
from highwater.pages.guide.chooser import Place
from highwater.pages.guide.guide import cell_label
from highwater.pages.text_table import TextTable
from highwater.spec.recommendation import Candidate, Recommendation
from highwater.units import GIB, counted, format_tokens

MOST_PLACES = 24
"""Places whose maps a page draws: two of some 200 figures each."""
_NEAR = 1.05
"""How many times its length another may be whose trial colours it."""
_MEASURED = "m"
"""Mark of a figure that was measured where the others are predicted."""


class Figure(NamedTuple):
    """One figure of a heat map."""

    text: str
    heat: float
    """Heat from 0 to 1: the share of what is the most."""
    is_out: bool = False
    """Whether it is known not to fit, and drawn so."""


class HeatMap(NamedTuple):
    """A table whose figures are coloured."""

    table: TextTable
    rows: tuple[tuple[tuple[str, ...], tuple[Figure, ...]], ...]
    """Names, then figures."""
    caption: str | None = None
    """A caption above it, where a heading says the rest of the title."""


def headroom_map(place: Place) -> HeatMap:
    """Rungs by lengths: GiB that a GPU has left, or lacks; without such figures whether it fits."""
    columns = [
        {
            each.cell: each
            for each in answer.found.candidates
            if each.cell.settings.sequences_per_micro_batch == place.sequences
        }
        for answer in place.answers
    ]
    cells = list(dict.fromkeys(cell for column in columns for cell in column))
    sources = dict.fromkeys(each.source for column in columns for each in column.values())
    is_mixed = len(sources) > 1
    found = [answer.found for answer in place.answers]
    rows = tuple(
        (
            (cell_label(cell),),
            tuple(
                _headroom(c.get(cell), at, is_mixed=is_mixed)
                for c, at in zip(columns, found, strict=True)
            ),
        )
        for cell in cells
    )
    lengths = tuple(format_tokens(each.length_tokens) for each in found)
    said = (
        f"GiB left of a GPU by settings and length, {counted(place.sequences, 'sequence')} a "
        f"micro-batch"
    )
    marked = f"{_MEASURED}: measured, all else predicted" if is_mixed else ", ".join(sources)
    return _map(place, f"{said}; {marked}", ("settings", *lengths), rows)


def term_map(place: Place) -> HeatMap | None:
    """Terms by rungs: GiB at the peak, by formula; None where no formula knows of the model."""
    explained = place.explained
    if not explained:
        return None
    each = [_terms(predicted) for predicted in explained]
    most = max((size for terms in each for size in terms.values()), default=1)
    names = sorted(
        dict.fromkeys(name for terms in each for name in terms),
        key=lambda name: -max(terms.get(name, 0) for terms in each),
    )
    rows = [((name,), tuple(_share(terms.get(name), most) for terms in each)) for name in names]
    used = [predicted.footprint.device_used_bytes for predicted in explained]
    total = (("all",), tuple(Figure(f"{size / GIB:.2f}", 0.0) for size in used))
    length = format_tokens(place.explained_tokens)
    caption = (
        f"GiB by term and settings at the peak of a step of {length} tokens, predicted by formula"
    )
    return _map(
        place,
        caption,
        ("term", *(cell_label(predicted.cell) for predicted in explained)),
        (*rows, total),
    )


def _map(
    place: Place,
    caption: str,
    columns: Sequence[str],
    rows: Sequence[tuple[tuple[str, ...], tuple[Figure, ...]]],
) -> HeatMap:
    text = tuple((*names, *(figure.text for figure in figures)) for names, figures in rows)
    title = f"{_title(place)}: {caption}"
    return HeatMap(
        TextTable(title=title, columns=tuple(columns), rows=text, left_columns=1),
        tuple(rows),
        caption,
    )


def _title(place: Place) -> str:
    """The title of a place's maps."""
    return f"{place.model_name} on {place.gpus} x {place.device_name} ({place.basis})"


def _headroom(candidate: Candidate | None, found: Recommendation, *, is_mixed: bool) -> Figure:
    if candidate is None:
        return Figure("?", 0.0)
    mark = f" {_MEASURED}" if is_mixed and candidate.source == "measured" else ""
    left = candidate.headroom_bytes if candidate.lacks_bytes is None else -candidate.lacks_bytes
    if left is None:
        return Figure(
            f"{'fits' if candidate.fits else '-'}{mark}",
            0.5 if candidate.fits else 0.0,
            not candidate.fits,
        )
    measured_at = candidate.headroom_length_tokens or found.length_tokens
    if measured_at > _NEAR * found.length_tokens:
        return Figure(f"≥ {left / GIB:.1f}{mark}", 0.0)
    heat = (
        round(min(1.0, max(0.0, 1 - left / found.device_bytes)), 2)
        if candidate.fits and found.device_bytes
        else 0.0
    )
    least = "≥ " if measured_at > found.length_tokens else ""
    return Figure(f"{least}{left / GIB:.1f}{mark}".replace("-", "−"), heat, not candidate.fits)


def _terms(predicted: CellPrediction) -> dict[str, int]:
    """Terms of all of the GPU's memory that is used at the peak."""
    terms: dict[str, int] = {}
    for term in predicted.footprint.used:
        terms[term.name] = terms.get(term.name, 0) + term.bytes
    return terms


def _share(size: int | None, most: int) -> Figure:
    return Figure("", 0.0) if size is None else Figure(f"{size / GIB:.2f}", round(size / most, 2))
