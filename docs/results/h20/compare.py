"""Predictions for Trinity-RFT's trainer beside its published tables, cell by cell, and the guides
that follow from both; prints the tables.

``python docs/results/h20/compare.py`` (no GPU, no trace; two minutes on one CPU core) predicts
every cell of both tables with the code that is there, writes ``predicted_h20_96gb.csv`` and
``predicted_a100_80gb.csv`` beside it, and names every cell that it tells otherwise than they did;
``--table`` only prints. A cell whose published capacity is unknown is predicted for no count and
stays unknown in the guides.
"""

import argparse
import csv
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import highwater
from highwater.memory.capacity_table import PUBLISHED_TRAINER, rung_name
from highwater.memory.trainers import predict_untraced
from highwater.nouns.study import usual_grid
from highwater.pages.guide_page import guide_rows
from highwater.units import format_tokens

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from table_accuracy import memory_limits_of, read_capacity_table

HERE = Path(__file__).parent
DATA = HERE.parents[2] / "tests" / "data"
COLUMNS = ("gpu", "settings", "gpus", "sp", "model", "max_model_len")
GRID = usual_grid(40960)


class Table(NamedTuple):
    """A published capacity table, its guide, and what was predicted of its cells."""

    name: str
    published: Path
    guide: Path
    predicted: Path


TABLES = (
    Table(
        "H20-96GB",
        HERE / "published_capacity_h20_96gb.csv",
        HERE / "published_guide_h20_96gb.csv",
        HERE / "predicted_h20_96gb.csv",
    ),
    Table(
        "A100-80GB",
        DATA / "published_capacity_a100_80gb.csv",
        DATA / "published_guide_a100_80gb.csv",
        HERE / "predicted_a100_80gb.csv",
    ),
)
WORDS = {
    "vanilla": "vanilla",
    "env": "Env",
    "env+offload": "Env + Offload",
    "env+offload+never": "Env + Offload, no model saved",
}
Place = tuple[str, int, int, str]
"""Settings, GPUs, SP and model."""


def main() -> None:
    """Predict unless told not to, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the tables, predict nothing")
    if not parser.parse_args().table:
        for table in TABLES:
            predict(table)
    print("\n\n".join((markdown(agreement()), markdown(guides()), markdown(cells()))))


def predict(table: Table) -> None:
    """Write what the code of today says of a table's known cells; print what it said otherwise."""
    before = capacities(table.predicted) if table.predicted.is_file() else {}
    known = read_capacity_table(table.published)
    limits = memory_limits_of(known)
    with table.predicted.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*COLUMNS, "by"))
        for question in known.questions:
            limit = limits[question.device_name]
            for each in predict_untraced(question, limit, PUBLISHED_TRAINER, None):
                name, layout = rung_name(each.cell.settings), each.cell.layout
                by = "closed form" if each.replayed is None else "replay"
                place = (name, layout.gpus, layout.ulysses_degree, question.model.name)
                writer.writerow((question.device_name, *place, each.capacity_tokens, by))
                if before.get(place, each.capacity_tokens) != each.capacity_tokens:
                    print(f"{place}: {before[place]} before, {each.capacity_tokens} now")


def capacities(path: Path) -> dict[Place, int | None]:
    """By place; None where nobody knows."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            (row["settings"], int(row["gpus"]), int(row["sp"]), row["model"]): int(
                row["max_model_len"]
            )
            if row["max_model_len"]
            else None
            for row in csv.DictReader(file)
        }


def steps_off(table: Table) -> dict[str, list[int]]:
    """By settings: of each known cell, how many steps of the grid the prediction is off."""
    predicted = capacities(table.predicted)
    found: dict[str, list[int]] = {}
    for place, tokens in capacities(table.published).items():
        if tokens is not None and (ours := predicted[place]) is not None:
            off = GRID.index_at_most(ours) - GRID.index_at_most(tokens)
            found.setdefault(place[0], []).append(off)
    return found


def agreement() -> Iterator[tuple[str, ...]]:
    """A row for each settings of each table, and their sums."""
    yield ("table", "settings", "cells", "exact", "within one step", "off by more")
    everything: list[int] = []
    for table in TABLES:
        of_settings = steps_off(table)
        for name, offs in of_settings.items():
            yield (table.name, WORDS[name], *counts(offs))
        whole = [off for offs in of_settings.values() for off in offs]
        yield (table.name, "all", *counts(whole))
        everything += whole
    yield ("both", "all", *counts(everything))


def counts(offs: list[int]) -> tuple[str, ...]:
    """Cells, the exact ones, those within one step, the others."""
    near = sum(abs(off) <= 1 for off in offs)
    return tuple(map(str, (len(offs), offs.count(0), near, len(offs) - near)))


def guides() -> Iterator[tuple[str, ...]]:
    """Cells of the published guides that follow from the capacities: published, then predicted."""
    yield ("guide", "cells", "made from", "the same", "unknown here, `-` there", "otherwise")
    for table in TABLES:
        with table.guide.open(encoding="utf-8", newline="") as file:
            known = {tuple(row.values())[:4]: row["settings"] for row in csv.DictReader(file)}
        for source, tokens in (
            ("published capacities", capacities(table.published)),
            ("predicted capacities", capacities(table.predicted)),
        ):
            made = made_guide(table, tokens)
            ends = Counter(
                "same" if made[place] == said else "unknown" if made[place] == "?" else "otherwise"
                for place, said in known.items()
            )
            figures = (str(ends[end]) for end in ("same", "unknown", "otherwise"))
            yield (table.name, str(len(known)), source, *figures)


def made_guide(table: Table, tokens: dict[Place, int | None]) -> dict[tuple[str, ...], str]:
    """The guide of these capacities; what the published table does not know is not known."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "capacities.csv")
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for place in capacities(table.published):
                found = tokens.get(place)
                writer.writerow((table.name, *place, "" if found is None else found))
        rows = guide_rows(highwater.guide(path))
    return {
        tuple(str(row[name]) for name in ("gpu", "gpus", "max_model_len", "model")): str(
            row["settings"]
        )
        for row in rows
    }


def cells() -> Iterator[tuple[str, ...]]:
    """The H20's cells: of each settings published and predicted; bold where they differ."""
    table = TABLES[0]
    known, predicted = capacities(table.published), capacities(table.predicted)
    yield (
        *("model", "GPUs", "SP"),
        *(f"{WORDS[name]}: {side}" for name in WORDS for side in ("published", "predicted")),
    )
    for gpus, sp, model in dict.fromkeys(place[1:] for place in known):
        figures: list[str] = []
        for name in WORDS:
            place = (name, gpus, sp, model)
            theirs, ours = known[place], predicted.get(place)
            mark = "" if theirs is None or theirs == ours else "**"
            figures += [
                "unknown" if theirs is None else format_tokens(theirs),
                "" if ours is None else f"{mark}{format_tokens(ours)}{mark}",
            ]
        yield (model, str(gpus), str(sp), *figures)


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    """A table; the first row is its headings."""
    headings, *others = rows
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (headings, ("---",) * len(headings), *others)
    )


if __name__ == "__main__":
    main()
