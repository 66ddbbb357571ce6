"""Traced and replayed peaks beside those of every trial in docs/results/find; writes JSON, prints
the tables.

``python docs/results/predict/traced.py`` (no GPU, half a minute a trace) goes on with
``traced.json`` beside it; ``--table`` only prints, ``--summary`` a row for each way to predict.
Held out are the searches that were predicted before they were measured
(``NAME.prediction.json``), but for FSDP1's, from which the tracer has learned since. What a trace
and the formula said of a held-out trial when it was first compared stays as ``judged`` and
``formula_judged``; ``traced`` and ``formula`` are of what those rows have mended. The others are of
an engine before (commit 4793eda): their traces stay as they are.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import highwater
from highwater.memory.capacity import Prediction
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.predictor import predict_cell
from highwater.memory.trace.replay import replay
from highwater.memory.trainers import MEMORY
from highwater.model.model import load_model
from highwater.nouns.codec import from_json
from highwater.nouns.events import EventLog
from highwater.nouns.study import Cell, Study
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.trials.traced import CachedTracer, fullest_rank
from highwater.trials.trial_process import cache_directory
from highwater.units import GIB, format_tokens

STUDIES = Path(__file__).parents[1] / "find"
FILE = Path(__file__).with_suffix(".json")
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
NAMES = {
    "judged": "traced as it was first",
    "traced": "traced",
    "formula_judged": "formula as it was first",
    "formula": "formula",
}
WAYS = {
    "judged": "trace, as first compared",
    "traced": "trace, since mended by what they showed",
    "formula_judged": "formula, as first compared",
    "formula": "formula, since mended",
}
HEADINGS = (
    "model",
    "rung",
    "GPUs",
    "SP",
    "length",
    "allocated: traced",
    "measured",
    "off by",
    "reserved: traced",
    "measured",
    "off by",
)


def main() -> None:
    """Trace what is not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the tables, trace nothing")
    parser.add_argument("--summary", action="store_true", help="print a few rows, trace nothing")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if arguments.summary:
        print(summary(rows))
        return
    if not arguments.table:
        with CachedTracer(cache_directory("traces"), kernel="cudnn") as tracer:
            for study_name, spec, result in told():
                name = (
                    f"{study_name}/{spec.key}"  # one trial may stand in two studies, of two engines
                )
                if name not in rows:
                    here = msgspec.structs.replace(
                        spec, model_directory=load_model(spec.model_name).directory
                    )
                    rows[name] = row = beside(study_name, spec, result, tracer(here))
                    if row["held_out"]:
                        row |= {
                            "judged": {key: row["traced"][key] for key in ("fits", *PEAKS)},
                            "formula_judged": row["formula"],
                        }
                    FILE.write_text(json.dumps(rows, indent=1) + "\n")
        for path, study in studies():
            for trial in study.trials:
                if (known := rows.get(f"{path.stem}/{trial.spec.key}")) is not None:
                    known["formula"] = by_formula(trial.spec, known["capacity_bytes"])
        FILE.write_text(json.dumps(rows, indent=1) + "\n")
    for title, is_held_out in (("Held out", True), ("Development", False)):
        shown = [row for row in rows.values() if row["held_out"] is is_held_out]
        print(f"{title}\n\n{table(shown)}\n")
    print(f"{beside_the_fullest_rank(rows)}\n")
    print(capacities())


def told() -> Iterator[tuple[str, TrialSpec, TrialResult]]:
    """Trials of held-out studies that say whether their length fits; those of one length
    together.
    """
    for path, study in studies():
        if not prediction_of(path).is_file():
            continue
        each = [(trial.spec, trial.result) for trial in study.trials if trial.result is not None]
        for spec, result in sorted(each, key=lambda pair: (pair[0].length_tokens, pair[0].key)):
            if result.outcome.is_fit or result.outcome is Outcome.OUT_OF_MEMORY:
                yield path.stem, spec, result


def studies() -> list[tuple[Path, Study]]:
    """By name."""
    return [(path, highwater.open_study(path)) for path in sorted(STUDIES.glob("*.jsonl"))]


def prediction_of(path: Path) -> Path:
    """Where the prediction of a study is, if it was made before."""
    return path.with_suffix(".prediction.json")


def beside(study_name: str, spec: TrialSpec, result: TrialResult, log: EventLog) -> dict[str, Any]:
    """The replay with the trial's own capacity, the formula, and what was measured on the rank that
    is traced.
    """
    fullest = fullest_rank(spec)  # which may have written nothing, where another ran out before
    rank = min(result.ranks, key=lambda report: abs(report.rank - fullest))
    capacity = rank.budget.allocator_cap_bytes if rank.budget is not None else None
    is_share = spec.memory_budget_bytes is not None
    ours = replay(
        log, allocator=spec.settings.allocator, capacity_bytes=capacity, is_share=is_share
    )
    return {
        "study": study_name,
        # FSDP1's trials showed that it gives back what another stream still uses: their rows are
        # traced since, and seen.
        "held_out": spec.settings.strategy != "fsdp",
        "model": spec.model_name,
        "rung": spec.settings.label,
        "gpus": spec.layout.gpus,
        "ulysses_degree": spec.layout.ulysses_degree,
        "length_tokens": spec.length_tokens,
        "memory_only": spec.is_memory_only,
        "capacity_bytes": capacity,
        "traced": {
            "fits": ours.fits,
            "phase": ours.phase,
            "peak_allocated_bytes": ours.peak_allocated_bytes,
            "peak_reserved_bytes": ours.peak_reserved_bytes,
            "retries": ours.retries,
            "versions": log.versions,
        },
        "formula": by_formula(spec, capacity),
        "measured": {
            "fits": result.outcome.is_fit,
            "phase": rank.failure.phase if rank.failure else None,
            "peak_allocated_bytes": rank.memory.peak_allocated_bytes,
            "peak_reserved_bytes": rank.memory.peak_reserved_bytes,
            "retries": rank.memory.allocator_retries,
            "versions": rank.versions,
        },
    }


def by_formula(spec: TrialSpec, capacity_bytes: int | None) -> dict[str, int]:
    """What the formula says of the same, in the allocator's memory."""
    shape = load_model(spec.model_name).shape
    found = likely_footprint(
        Step(shape, spec.settings, spec.layout, length_tokens=spec.length_tokens)
    )
    if capacity_bytes is not None:
        found = found.within(capacity_bytes + found.outside_bytes)
    return dict(zip(PEAKS, (found.allocated_bytes, found.reserved_bytes), strict=True))


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """A row for each way to predict: of the held-out peaks how far off, of the capacities how many
    it has.
    """
    found = list(capacity_rows())
    steps_off = {"judged": 5, "formula": 7}  # of these columns of a capacity
    headings = ("by", "trials", "off by: half of them", "95 %", "most", "capacities exact")
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    held_out = [
        row
        for row in rows.values()
        if row["held_out"] and row["measured"]["fits"] and row["traced"]["fits"]
    ]
    for name, words in WAYS.items():
        shares = (f"{share:.3%}" for share in spread([error(row, name) for row in held_out]))
        hits = sum(row[steps_off[name]] == "+0" for row in found) if name in steps_off else None
        capacities = "" if hits is None else f"{hits} of {len(found)}"
        lines.append(f"| {words} | {len(held_out)} | {' | '.join(shares)} | {capacities} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per trial; those that ran out say where. Then the errors of the reserved peak, traced
    and by formula.
    """
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for row in sorted(
        rows,
        key=lambda row: (
            row["gpus"],
            row["model"],
            row["study"],
            row["length_tokens"],
            row["rung"],
        ),
    ):
        ours, known = row["traced"], row["measured"]
        length = (
            f"{format_tokens(row['length_tokens'])}{' (memory-only)' if row['memory_only'] else ''}"
        )
        names = [row["model"], row["rung"], str(row["gpus"]), str(row["ulysses_degree"]), length]
        if ours["fits"] and known["fits"]:
            pairs = [(ours[name], known[name]) for name in PEAKS]
            figures = [
                text
                for a, b in pairs
                for text in (f"{a / GIB:.2f}", f"{b / GIB:.2f}", f"{a / b - 1:+.3%}")
            ]
        else:
            ends = [
                "fits" if side["fits"] else f"runs out in {side['phase']}" for side in (ours, known)
            ]
            figures = [*ends, "", "", "", ""]
        lines.append(f"| {' | '.join((*names, *figures))} |")
    right = sum(row["traced"]["fits"] == row["measured"]["fits"] for row in rows)
    lines += ["", f"{right} of {len(rows)} trials are told right: whether they fit"]
    for name, words in NAMES.items():
        known = [
            row for row in rows if name in row and row["measured"]["fits"] and row["traced"]["fits"]
        ]
        lines += (
            [f"peak reserved, {words}: {off_by([error(row, name) for row in known])}"]
            if known
            else []
        )
    known = [row for row in rows if row["measured"]["fits"]]
    for name in ("formula_judged", "formula"):
        off = [error(row, name, "peak_allocated_bytes") for row in known if name in row]
        lines += [f"peak allocated, {NAMES[name]}: {off_by(off)}"] if off else []
    lines += [filled(rows, allocator) for allocator in ("native", "expandable")]
    return "\n".join(lines)


def filled(rows: list[dict[str, Any]], allocator: str) -> str:
    """How much of the allocator's memory the formula's tensors fill: the fullest trial that fit,
    and the emptiest that did not.
    """
    shares: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if row["capacity_bytes"] and (("Env" in row["rung"]) == (allocator == "expandable")):
            shares[row["measured"]["fits"]].append(
                row["formula"]["peak_allocated_bytes"] / row["capacity_bytes"]
            )
    return (
        f"filled, {allocator}: {max(shares[True]):.4f} where it fit, at most; "
        f"{min(shares[False]):.4f} where it ran out, at least"
    )


def error(row: dict[str, Any], by: str, peak: str = "peak_reserved_bytes") -> float:
    """Absolute, as a share of what was measured."""
    return abs(row[by][peak] / row["measured"][peak] - 1)


def off_by(errors: list[float]) -> str:
    """The same in words."""
    median, most, largest = spread(errors)
    return f"off by {median:.3%} (median), {most:.3%} (95th percentile), {largest:.3%} (most)"


def spread(errors: list[float]) -> tuple[float, float, float]:
    """The middle one, the 95th percentile, the largest."""
    off = sorted(errors)
    return statistics.median(off), off[min(len(off) - 1, int(0.95 * len(off)))], off[-1]


def beside_the_fullest_rank(rows: dict[str, dict[str, Any]]) -> str:
    """The held-out peaks, traced, beside the most that any rank reserved: of several, the traced
    one is not always that rank.
    """
    off: list[float] = []
    for name, spec, result in told():
        row = rows[f"{name}/{spec.key}"]
        if row["held_out"] and row["traced"]["fits"] and row["measured"]["fits"]:
            most = max(rank.memory.peak_reserved_bytes for rank in result.ranks)
            off.append(abs(row["traced"]["peak_reserved_bytes"] / most - 1))
    return f"held out, traced, beside the most that any rank reserved: {off_by(off)}"


def capacities() -> str:
    """What was predicted of each cell before, beside the edge that its trials have; and what the
    formula of today says of it.
    """
    headings = (
        "search",
        "cell",
        "predicted",
        "fit",
        "ran out",
        "steps off",
        "trials up to the edge",
        "formula: steps off",
    )
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in capacity_rows())])


def capacity_rows() -> Iterator[tuple[str, ...]]:
    """A row for each cell that was predicted and whose edge is known."""
    for path, study in studies():
        if not prediction_of(path).is_file():
            continue
        prediction = from_json(prediction_of(path).read_bytes(), Prediction)
        for predicted in prediction.cells:
            told = edge(study, predicted.cell)
            if told is None:
                continue
            fit, ran_out, trials = told
            by_trace = predicted.likely_edge_tokens
            formula = predict_cell(
                MEMORY[OURS].predictor(study.question, predicted.cell, prediction.memory_limit)
            ).capacity_tokens
            off, formula_off = (
                f"{(length - fit) / (ran_out - fit):+.0f}" for length in (by_trace, formula)
            )
            lengths = map(format_tokens, (by_trace, fit, ran_out))
            yield (path.stem, predicted.cell.label, *lengths, off, str(trials), formula_off)


def edge(study: Study, cell: Cell) -> tuple[int, int, int] | None:
    """The longest length that fit, the next, which did not, and how many trials it took to know
    both; None: not known yet.
    """
    fit: set[int] = set()
    ran_out: set[int] = set()
    for number, trial in enumerate(
        (t for t in study.trials if Cell(layout=t.spec.layout, settings=t.spec.settings) == cell), 1
    ):
        if trial.result is not None and trial.result.outcome.tells:
            (fit if trial.result.outcome.is_fit else ran_out).add(trial.spec.length_tokens)
        longest, grid = max(fit, default=0), study.question.grid
        if fit and grid.length(grid.index_at_most(longest) + 1) in ran_out:
            return longest, grid.length(grid.index_at_most(longest) + 1), number
    return None


if __name__ == "__main__":
    main()
