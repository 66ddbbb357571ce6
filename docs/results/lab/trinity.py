"""Makes the traces that are shipped of the reference system's step: every model and layout of the
published A100 table.

``python docs/results/lab/trinity.py --folder FOLDER`` (no GPU; three traces a cell, a quarter
of an hour for all on 2 cores) keeps what it has made in the folder and writes
``src/highwater/trainers/trinity.json.xz`` when all are there.
"""

import argparse
import lzma
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from highwater.model.model import ModelShape, load_model
from highwater.nouns.events import EventLog, TraceOrder
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.trainers.trinity import TRACES_FILE, BundledTrace

sys.path += [str(Path(__file__).parents[3] / folder) for folder in ("tools", "benchmarks")]
from scaled_traces import scaled_trace
from table_accuracy import read_capacity_table

TABLE = Path(__file__).parents[3] / "tests" / "data" / "published_capacity_a100_80gb.csv"
LENGTHS = (4224, 4608)
"""These make the lines, where what kernels take for themselves grows."""
LONG_TOKENS = 27_648
"""Of a micro-batch on one rank: there all of it has come to its ceiling.
``tests/numeric/test_tracer.py`` tries other lengths, of a small model.
"""
RESIDENT_THREADS = 108 * 2048
"""An A100's."""
SETTINGS = Settings(
    strategy="fsdp", loss="full", objective="grpo", entropy="full", sequences_per_micro_batch=2
)


def main() -> None:
    """Trace what is not in the folder yet, then pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where finished traces are kept")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        traces = list(pool.map(lambda cell: traced(*cell, folder), cells()))
    TRACES_FILE.write_bytes(
        lzma.compress(msgspec.json.encode(traces), preset=9 | lzma.PRESET_EXTREME)
    )
    print(f"{len(traces)} traces, {TRACES_FILE.stat().st_size:,} bytes")


def cells() -> Iterator[tuple[str, Layout]]:
    """Of the published table, each once."""
    found = {
        (question.model.name, cell.layout)
        for question in read_capacity_table(TABLE).questions
        for cell in question.cells
    }
    yield from sorted(found, key=lambda cell: (cell[0], cell[1].gpus, cell[1].ulysses_degree))


def traced(name: str, layout: Layout, folder: Path) -> BundledTrace:
    """The lines of one cell."""
    path = folder / f"{name}-{layout.gpus}-{layout.ulysses_degree}.json"
    if not path.is_file():
        lengths = (
            *LENGTHS,
            LONG_TOKENS * layout.ulysses_degree // SETTINGS.sequences_per_micro_batch,
        )
        logs = {
            tokens(length, layout): trace(name, layout, length, path.with_suffix(".events"))
            for length in lengths
        }
        path.write_bytes(msgspec.json.encode(scaled_trace(logs)))
        print(f"{path.name}", flush=True)
    shape: ModelShape = load_model(name).shape
    return BundledTrace(shape=shape, layout=layout, log=msgspec.Raw(path.read_bytes()))


def tokens(length: int, layout: Layout) -> int:
    """Of a micro-batch on one rank."""
    return -(-SETTINGS.sequences_per_micro_batch * length // layout.ulysses_degree)


def trace(name: str, layout: Layout, length: int, events: Path) -> EventLog:
    """One length; the tracer is a process of its own. Flash attention: the table's GPUs are
    A100s.
    """
    model = load_model(name)
    spec = TrialSpec(
        model_name=name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=layout,
        settings=SETTINGS,
        length_tokens=length,
    )
    order = events.with_suffix(".order")
    gpu: dict[str, Any] = {"kernel": "flash", "resident_threads": RESIDENT_THREADS}
    order.write_bytes(
        msgspec.json.encode(
            TraceOrder(spec=spec, rank=layout.ulysses_degree - 1, trainer="trinity", **gpu)
        )
    )
    subprocess.run(
        [sys.executable, "-m", "highwater.engine.tracer.tracer", order, events], check=True
    )
    log = msgspec.json.decode(events.read_bytes(), type=EventLog)
    order.unlink()
    events.unlink()
    return log


if __name__ == "__main__":
    main()
