"""Large studies: showing and reporting one takes as much longer as it is longer, and never a GiB.
Its times are printed.
"""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from studies import FOUND

from highwater.nouns.codec import to_json
from highwater.nouns.layout import Layout
from highwater.nouns.study import STUDY_SCHEMA_VERSION, Cell, CellAnswer
from highwater.store.journal import read_study
from highwater.store.lines import AnsweredLine, FinishedLine, HeaderLine, Line, StartedLine, sealed
from highwater.units import GIB
from tables import deep

FEW, MANY = 500, 2_000
MOST_TIMES = 6.0
"""Times as long that four times as many trials may take: 4 where it is linear, and some for caches
and a busy machine; 16 where each trial looks at all others."""

_MEASURED = """
import resource, sys
from highwater.cli.app import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
with open("/proc/self/status") as status:  # ru_maxrss has the parent's memory in it
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
sys.stderr.write(f"\\n{code} {used.ru_utime + used.ru_stime} {peak_kib * 1024}")
"""


def write_study(path: Path, trials: int, cells: int) -> None:
    """A finished study with so many trials, all with what real ranks reported."""
    source = read_study(FOUND / "qwen3-0.6b-79gib-full.jsonl")
    fit, no = (
        next(t.result for t in source.trials if t.result and t.result.outcome.is_fit is is_fit)
        for is_fit in (True, False)
    )
    own = tuple(
        Cell(layout=Layout(gpus=gpus), settings=source.question.cells[0].settings)
        for gpus in range(1, cells + 1)
    )
    grid = msgspec.structs.replace(
        source.question.grid, start_tokens=32, step_tokens=32, beyond_step_tokens=32
    )
    question = msgspec.structs.replace(source.question, cells=own, grid=grid)
    each, checksum = trials // cells, ""
    with path.open("wb") as file:

        def write(line: HeaderLine | Line) -> None:
            nonlocal checksum
            text, checksum = sealed(to_json(line), after=checksum)
            file.write(text + b"\n")

        write(HeaderLine(schema_version=STUDY_SCHEMA_VERSION, question=question))
        for cell in own:
            for index in range(1, each + 1):
                spec = question.trial(cell, 32 * index)
                launch = {"spec_key": spec.key, "attempt": 1, "repeat": 0, "at_unix_s": 1.0}
                write(StartedLine(spec=spec, **launch))
                write(FinishedLine(result=fit if index < each else no, **launch))
            answer = CellAnswer(
                cell=cell,
                capacity_tokens=32 * (each - 1),
                does_not_fit_tokens=32 * each,
                limit="memory",
                reason=no.reason,
                trials=each,
                peak_reserved_bytes=fit.peak_reserved_bytes,
                headroom_bytes=fit.headroom_bytes,
                tokens_per_s=fit.tokens_per_s,
                mfu=fit.mfu,
            )
            write(AnsweredLine(at_unix_s=1.0, answer=answer))


def measured(*words: str) -> tuple[float, int]:
    """Seconds of processor time, and the most memory, of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, seconds, peak_bytes = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    return float(seconds), int(peak_bytes)


@pytest.mark.parametrize("cells", [100, *deep(1)])
@pytest.mark.parametrize("form", ["show", "html", "md", "csv", "json"])
def test_showing_and_reporting_grow_no_faster_than_the_study(
    form, cells, tmp_path, record_property
):
    taken: list[tuple[float, int]] = []
    for trials in (FEW, MANY):
        path = tmp_path / f"{trials}.jsonl"
        write_study(path, trials, cells)
        assert read_study(path).complete
        words = (
            ("show", str(path))
            if form == "show"
            else ("report", str(path), "-o", str(tmp_path / f"{trials}.{form}"))
        )
        taken.append(measured(*words))
    (few_s, _), (many_s, peak_bytes) = taken
    said = (
        f"{form}, {cells} cells: {FEW:,} trials in {few_s:.1f} s, {MANY:,} in {many_s:.1f} s "
        f"with {peak_bytes / GIB:.2f} GiB"
    )
    record_property("counted", said)
    assert peak_bytes < GIB
    assert many_s < MOST_TIMES * few_s
