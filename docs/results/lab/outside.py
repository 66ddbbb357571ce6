"""What the driver reports beyond what the allocator reserves, measured in every trial, beside the
formula's terms; prints a table.

``python docs/results/lab/outside.py`` (no GPU, no trace) reads each trial that fits of
``grpo-*``, ``edge-*`` and ``long-*`` in docs/results/find, and every row of ``second_check.json``.
Trials of one line have the same terms: a rung matters by what it has in pinned memory, a length not
at all. MiB, of the rank that has the most; off by is predicted less measured.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import highwater
from highwater.memory.formula.constants import outside_terms
from highwater.model.model import Model
from highwater.nouns.study import Cell
from highwater.units import MIB

STUDIES = Path(__file__).parents[1] / "find"
PATTERNS = ("grpo-*.jsonl", "edge-*.jsonl", "long-*.jsonl")
SECOND_CHECK = Path(__file__).with_name("second_check.json")
# Offloaded gradients pass through pinned memory of their own since decision 005; of which commit a
# trial is, no file says.
STUDIES_BEFORE = (
    "edge-1.7b-1-full-offload",
    "edge-4b-1-chunked-offload",
    "edge-4b-1-full-offload",
    "grpo-0.6b-1-offload",
    "grpo-1.7b-1-offload",
)
SECOND_CHECKS_BEFORE = ("edge-1.7b-1-full-offload", "grpo-0.6b-1-offload")
TERMS = ("context", "page tables of pinned memory", "NCCL", "NCCL, all-to-all")
HEADINGS = (
    "model",
    "GPUs",
    "SP",
    "objective",
    "in pinned memory",
    "trials",
    "measured",
    "predicted",
    *TERMS,
    "off by",
)


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """What the trials of one line of the table have in common, in the order of its lines."""

    gpus: int
    model: str
    ulysses_degree: int
    objective: str
    pinned: str
    """What the trials had; the formula takes gradients to be there with the parameters."""
    terms_bytes: tuple[int, ...]
    """In the order of ``TERMS``."""


def main() -> None:
    """A row for each line."""
    measured: defaultdict[Line, list[int]] = defaultdict(list)
    for model, cell, are_gradients_pinned, beyond_bytes in (*of_studies(), *of_second_check()):
        measured[line_of(model, cell, are_gradients_pinned)].append(beyond_bytes)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for line in sorted(measured):
        print(f"| {' | '.join(row(line, measured[line]))} |")
    print(f"\n{sum(map(len, measured.values()))} trials")


def of_studies() -> Iterator[tuple[Model, Cell, bool, int]]:
    """Of each trial that fits, whether its offloaded gradients were pinned, and the bytes beyond
    the allocator's.
    """
    for path in (path for pattern in PATTERNS for path in sorted(STUDIES.glob(pattern))):
        study = highwater.open_study(path)
        for trial in study.trials:
            if trial.result is not None and trial.result.outcome.is_fit:
                memories = [rank.memory for rank in trial.result.ranks]
                beyond_bytes = most_beyond(
                    [memory.device_used_bytes for memory in memories],
                    [memory.peak_reserved_bytes for memory in memories],
                )
                cell = Cell(layout=trial.spec.layout, settings=trial.spec.settings)
                yield study.question.model, cell, path.stem not in STUDIES_BEFORE, beyond_bytes


def of_second_check() -> Iterator[tuple[Model, Cell, bool, int]]:
    """The same of each row, also of those that ran out."""
    for each in json.loads(SECOND_CHECK.read_text()):
        question = highwater.open_study(STUDIES / f"{each['search']}.jsonl").question
        cell = next(cell for cell in question.cells if cell.settings.label == each["rung"])
        beyond_bytes = most_beyond(each["device_used_bytes"], each["peak_reserved_bytes"])
        yield question.model, cell, each["search"] not in SECOND_CHECKS_BEFORE, beyond_bytes


def most_beyond(used_bytes: list[int | None], reserved_bytes: list[int | None]) -> int:
    """The most of all ranks that wrote both."""
    pairs = zip(used_bytes, reserved_bytes, strict=True)
    return max(
        used - reserved for used, reserved in pairs if used is not None and reserved is not None
    )


def line_of(model: Model, cell: Cell, are_gradients_pinned: bool) -> Line:
    """Where a trial belongs."""
    settings, layout = cell.settings, cell.layout
    offloaded = ("parameters", "gradients") if are_gradients_pinned else ("parameters",)
    pinned = (
        *(offloaded if settings.offload else ()),
        *(("reference",) if settings.objective == "grpo" else ()),
    )
    by_name = {
        term.name: term.bytes for term in outside_terms(model.shape, settings, layout, "cuda")
    }
    terms = tuple(by_name.pop(name, 0) for name in TERMS)
    assert not by_name, f"the table has no column for {by_name}"  # noqa: S101 -- a term that is new
    return Line(
        layout.gpus,
        model.name,
        layout.ulysses_degree,
        settings.objective,
        ", ".join(pinned) or "-",
        terms,
    )


def row(line: Line, measured: list[int]) -> tuple[str, ...]:
    """The least and the most that was measured, what is predicted, its terms, and how far that is
    from the most and the least.
    """
    predicted = sum(line.terms_bytes)
    least, most = (f"{end / MIB:,.1f}" for end in (min(measured), max(measured)))
    nearest, farthest = (
        f"{(predicted - end) / MIB:+.1f}" for end in (max(measured), min(measured))
    )
    return (
        line.model,
        str(line.gpus),
        str(line.ulysses_degree),
        line.objective,
        line.pinned,
        str(len(measured)),
        least if least == most else f"{least} to {most}",
        f"{predicted / MIB:,.1f}",
        *(f"{term / MIB:,.1f}" if term else "-" for term in line.terms_bytes),
        nearest if nearest == farthest else f"{nearest} to {farthest}",
    )


if __name__ == "__main__":
    main()
