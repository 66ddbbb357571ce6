"""What other trainers hold, and ours beside them: a table of the studies in this folder.

    python docs/results/other_trainers/capacities.py --table

The studies of TRL were found by ``trl_capacity.py``; each line is a pair of real trials.
"""

import sys
from pathlib import Path

from highwater.nouns.hardware import kind_name
from highwater.nouns.study import Study
from highwater.store.journal import read_study
from highwater.units import GIB, format_tokens

STUDIES = Path(__file__).with_name("studies")
ORDER = ("one-gpu", "two-gpus-ring", "grpo", "accelerate")


def rows() -> list[tuple[str, ...]]:
    """A line for each answer of each study, searches of one kind together."""
    paths = sorted(STUDIES.glob("*.jsonl"), key=lambda path: (_place(path.stem), path.stem))
    return [row for path in paths for row in _of_study(read_study(path))]


def _place(stem: str) -> int:
    return next(i for i, name in enumerate((*ORDER, "")) if stem.startswith(name))


def _of_study(study: Study) -> list[tuple[str, ...]]:
    question = study.question
    trainer = "highwater" if question.foreign is None else question.foreign.title
    found: list[tuple[str, ...]] = []
    for answer in study.answers:
        layout, settings = answer.cell.layout, answer.cell.settings
        results = [trial.result for trial in study.trials_of(answer.cell) if trial.result]
        memory_bytes = question.memory_budget_bytes or question.device_total_bytes or 0
        used = answer.peak_reserved_bytes if question.foreign else None
        found.append(
            (
                f"{question.model.name}, {settings.objective}",
                f"{layout.gpus} x {kind_name(question.device_name)}{layout.suffix}",
                f"{memory_bytes / GIB:.0f} GiB",
                trainer,
                format_tokens(answer.capacity_tokens),
                format_tokens(answer.does_not_fit_tokens),
                str(answer.trials),
                f"{sum(result.wall_s for result in results):.0f} s",
                "" if used is None else f"{used / GIB:.2f} GiB",
            )
        )
    return found


def table() -> str:
    """The table in Markdown."""
    head = (
        *("model", "GPUs", "memory", "trainer", "longest that fit", "ran out of memory"),
        *("trials", "time of trials", "device used, sampled"),
    )
    lines = [head, ("---",) * len(head), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        sys.exit("usage: capacities.py --table")
    print(table())
