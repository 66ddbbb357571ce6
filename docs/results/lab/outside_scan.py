"""How ``OUTSIDE_BYTES`` was fitted: cells of the published A100 table that replay tells, by
what is taken to lie outside.

``python docs/results/lab/outside_scan.py`` (no GPU, no trace; nine minutes on one CPU core)
replays the shipped traces with each of ``TENTHS`` and writes ``outside_scan.json`` beside it;
``--table`` only prints. One constant is for layouts whose GPUs share sequences, the other for those
whose do not: no cell has both, so that each is found alone, and their cells add up.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypotheses

from highwater.memory.predictor import edge
from highwater.memory.trace.replay import Replayed, replay
from highwater.nouns.events import EventLog
from highwater.nouns.study import Cell, Question
from highwater.trainers.trinity import OUTSIDE_BYTES
from highwater.units import GIB

FILE = Path(__file__).with_suffix(".json")
TENTHS = range(16, 41)
"""Of a GiB."""
SHARES = (False, True)
"""Whether GPUs share sequences."""
FITTED = {shares: round(10 * OUTSIDE_BYTES[shares] / GIB) for shares in SHARES}
"""The constants, in tenths."""
SETTINGS = {"native": "vanilla", "expandable": "env"}

Row = dict[str, Any]
"""A cell: what names it, and by how many steps of the grid its replay is longer than what was
published, for each of ``TENTHS``."""


def main() -> None:
    """Replay, unless told not to, then print what the file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table, replay nothing")
    if not parser.parse_args().table:
        table = hypotheses.read_capacity_table(hypotheses.TABLE)
        found = [
            scanned(question, cell, known)
            for question, cell, known in hypotheses.replayed_cells(table)
        ]
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    rows: list[Row] = json.loads(FILE.read_text())
    print("\n".join([*counted(rows), "", *told(rows), "", *missed(rows)]))


def scanned(question: Question, cell: Cell, known_tokens: int) -> Row:
    """One cell, looked for from its published length on with each room."""
    known, size = question.grid.index_at_most(known_tokens), max(1, question.size_of(cell))
    fits = fitting(question, cell)
    room_bytes = hypotheses.memory_limit(question).device_bytes - question.margin_bytes
    start = min(size, max(1, known))
    offs = [
        edge(start, size, lambda index, tenths=tenths: fits(index, room_bytes - tenths * GIB // 10))
        - known
        for tenths in TENTHS
    ]
    return {
        "model": question.model.name,
        "gpus": cell.layout.gpus,
        "ulysses_degree": cell.layout.ulysses_degree,
        "shares_sequences": cell.layout.context_degree > 1,
        "settings": SETTINGS[cell.settings.allocator],
        "steps_off": offs,
    }


def fitting(question: Question, cell: Cell) -> Callable[[int, int], bool]:
    """Whether a length, by its index, fits so many bytes: replayed without end once, again only
    with less than it reserved then.
    """

    @cache
    def log(index: int) -> EventLog:
        return hypotheses.events_of(question, cell, question.grid.length(index))

    @cache
    def endless(index: int) -> Replayed:
        return replay(log(index), allocator=cell.settings.allocator)

    def fits(index: int, capacity_bytes: int) -> bool:
        if endless(index).peak_reserved_bytes <= capacity_bytes:
            return True
        if endless(index).peak_allocated_bytes > capacity_bytes:
            return False
        return replay(
            log(index), allocator=cell.settings.allocator, capacity_bytes=capacity_bytes
        ).fits

    return fits


def counted(rows: list[Row]) -> Iterator[str]:
    """The table: a row for each of ``TENTHS``."""
    places = [(shares, settings) for shares in SHARES for settings in SETTINGS.values()]
    heads = [
        f"{'shared' if shares else 'not shared'}, {settings}: exact of "
        f"{len(chosen(rows, shares, settings))} | within one step"
        for shares, settings in places
    ]
    yield f"| GiB outside | {' | '.join(heads)} |"
    yield f"|{'---|' * (1 + 2 * len(places))}"
    for tenths in TENTHS:
        scores = [
            table_accuracy(chosen(rows, shares, settings), tenths) for shares, settings in places
        ]
        yield f"| {tenths / 10} | {' | '.join(f'{exact} | {near}' for exact, near in scores)} |"


def told(rows: list[Row]) -> Iterator[str]:
    """Which of ``TENTHS`` give the most exact cells, and what both constants give together."""
    for shares in SHARES:
        exact = {tenths: table_accuracy(chosen(rows, shares), tenths)[0] for tenths in TENTHS}
        best = gib([tenths for tenths in TENTHS if exact[tenths] == max(exact.values())])
        counts = f"{max(exact.values())} of {len(chosen(rows, shares))} exact"
        yield f"{'shared' if shares else 'not shared'}: the most with {best}, {counts}"
    for settings in SETTINGS.values():
        pairs = [
            table_accuracy(chosen(rows, shares, settings), FITTED[shares]) for shares in SHARES
        ]
        exact, near = (sum(counts) for counts in zip(*pairs, strict=True))
        yield (
            f"{settings}, {FITTED[False] / 10} and {FITTED[True] / 10} GiB: {exact} exact, "
            f"{near} within one step"
        )


def missed(rows: list[Row]) -> Iterator[str]:
    """Cells that are not exact with the constants, and what makes them so."""
    for row in rows:
        offs = dict(zip(TENTHS, row["steps_off"], strict=True))
        off = offs[FITTED[row["shares_sequences"]]]
        if off:
            right = [tenths for tenths in TENTHS if not offs[tenths]]
            name = (
                f"{row['settings']}, {row['model']}, {row['gpus']} GPUs, SP {row['ulysses_degree']}"
            )
            yield f"{name}: {off:+d} steps, exact with {gib(right) if right else 'none of them'}"


def gib(tenths: list[int]) -> str:
    """Those that follow each other as a range."""
    ends: list[list[int]] = []
    for each in tenths:
        if ends and each == ends[-1][1] + 1:
            ends[-1][1] = each
        else:
            ends.append([each, each])
    ranges = (
        str(first / 10) if first == last else f"{first / 10} to {last / 10}" for first, last in ends
    )
    return f"{', '.join(ranges)} GiB"


def chosen(rows: list[Row], shares: bool, settings: str | None = None) -> list[Row]:
    """Those of one constant, and of one of the settings."""
    return [
        row
        for row in rows
        if row["shares_sequences"] == shares and settings in (None, row["settings"])
    ]


def table_accuracy(rows: list[Row], tenths: int) -> tuple[int, int]:
    """Cells that are exact, and within one step of the grid."""
    offs = [row["steps_off"][tenths - TENTHS.start] for row in rows]
    return offs.count(0), sum(abs(off) <= 1 for off in offs)


if __name__ == "__main__":
    main()
