"""Records memory snapshots on a GPU, what was alive without any, and what recording costs.

``python docs/results/profiler/record.py OUT`` wants one GPU of 64 GiB or more that nobody uses, 64
GiB of host memory, no network, and less than ten minutes; so does ``--cases step_times``, which is
not among them because it takes most of that. A case that fails, or takes too long, is told and does
not end the others. It writes ``OUT/record.json``, anew after each case, of which the
page keeps ``OUT/step_times.json`` and ``OUT/runs_out.json``, and snapshots of at most 15 MiB, which
``highwater profile`` reads:

- ``step_times``: steps without the layer watch and with it, in turns, then recorded ones and with
  it once more, in turns; ratios over the first, within one process (``step_times.json``)
- ``fits``, ``runs_out``: trials that record, 8,192 tokens of Qwen3-0.6B and, with logits kept,
  65,536 under 20 GiB (``fits/step_N/``, ``runs_out/step_0/``)
- trials of many settings that run out, and say what was alive without any recording: ``logits``,
  which is ``runs_out`` without it (``runs_out.json``), ``layers``, ``kept activations``, ...
- ``loop``: anybody's loop, named by Megatron's coordinates (``loop/``)
- ``trainer``: two steps of Hugging Face's Trainer, with the stacks of C++ (``trainer/``)
- ``search``: a search whose first out of memory is repeated (``search/step_0/``)

It prints for each trial how much of what was allocated has no name, and exits 1 where that is more
than 5 % or a case failed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
from trials import (
    FITS_TOKENS,
    MODEL,
    RUNS_OUT_TOKENS,
    TRIAL_S,
    Found,
    run,
    snapshot_row,
    spec_of,
    that_run_out,
    trial_row,
)

import highwater
from highwater.nouns.environment import Profiling
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.trials.probe import busy_gpus, probe
from highwater.units import MIB, format_bytes

ENTRIES = 30_000
"""Events of a step that are kept: one of 8,192 tokens has fewer."""
MOST_FILE_BYTES = 15 * MIB
NAMELESS_SHARE = 0.05
"""Part of what is allocated that may have no name."""
RELEASE_S = 30
"""Seconds for the driver to take a process's memory back."""
IN_PROCESS_S = 200
"""Seconds for a case that uses the GPU in a process of its own."""
STEP_TIMES_S = 400
"""Seconds for the timed steps: 244 of half a second or so, and a snapshot after each fourth."""
OTHERS = ("loop", "trainer")
"""Programs of others: their categories are as good as the names of their functions."""
Case = Callable[[], Found]


def main() -> None:
    """Run every case, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a new folder, or an empty one")
    parser.add_argument("--limit-s", type=float, default=570, help="time for all of it")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="run these alone")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.limit_s
    found: dict[str, Found] = {}
    every = cases(out)
    for name in arguments.cases or [name for name in every if name != "step_times"]:
        case = every[name]
        left_s = deadline - time.monotonic()
        print(f"== {name}, {left_s:.0f} s left", flush=True)
        found[name] = attempt(case) if left_s > TRIAL_S / 4 else {"error": "no time was left"}
        write(out / "record.json", found)
        keep(out, name, found[name])
    problems = [*checks(found), *large_files(out)]
    print("\n".join(problems) or "every case was recorded, and named within its bounds")
    sys.exit(bool(problems))


def write(path: Path, document: Found) -> None:
    """Write a document, over an earlier one."""
    path.write_text(json.dumps(document, indent=1) + "\n")


def keep(out: Path, name: str, told: Found) -> None:
    """Write by itself what the page beside this script shows."""
    if "error" in told:
        return
    if name == "step_times":
        write(out / "step_times.json", told)
    if name == "logits":
        write(out / "runs_out.json", told["result"])


def cases(out: Path) -> dict[str, Case]:
    """The cases by name; those that may be missed come last."""
    kept = Settings()
    return {
        "step_times": partial(in_process, "step_times", out, limit_s=STEP_TIMES_S),
        "fits": partial(recorded, out / "fits", spec_of(FITS_TOKENS, kept)),
        "runs_out": partial(recorded, out / "runs_out", spec_of(RUNS_OUT_TOKENS, kept)),
        "loop": partial(in_process, "loop", out),
        "trainer": partial(in_process, "trainer", out),
        "search": partial(search, out / "search"),
        **{name: partial(unrecorded, spec) for name, spec in that_run_out()},
    }


def attempt(case: Case) -> Found:
    """What a case found, or why it found nothing."""
    began = time.monotonic()
    try:
        await_free_gpu()
        found = case()
    except Exception as error:  # noqa: BLE001 -- the others are run all the same
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    return {"took_s": round(time.monotonic() - began, 1), **found}


def await_free_gpu() -> None:
    """Wait until the driver has taken back what the case before had."""
    deadline = time.monotonic() + RELEASE_S
    while busy_gpus(probe().gpus) and time.monotonic() < deadline:
        time.sleep(0.5)


def recorded(target: Path, spec: TrialSpec) -> Found:
    """Run a trial that records; what its snapshots say, and it besides."""
    result = run(spec, target, Profiling(max_entries=ENTRIES))
    return {**trial_row(spec, result), **snapshots_in(target)}


def unrecorded(spec: TrialSpec) -> Found:
    """Run a trial that records nothing and runs out."""
    row = trial_row(spec, run(spec))
    print(row.get("line", row["outcome"]), flush=True)
    return row if "line" in row else {"error": f"it ended as {row['outcome']}", **row}


def in_process(name: str, out: Path, *, limit_s: float = IN_PROCESS_S) -> Found:
    """Run a case of ``in_process.py``."""
    script, told = Path(__file__).with_name("in_process.py"), out / f"{name}.json"
    command = [sys.executable, str(script), name, str(out)]
    code = subprocess.run(command, check=False, timeout=limit_s).returncode
    if code:
        raise RuntimeError(f"its process ended with status {code}")
    found: Found = json.loads(told.read_text())
    told.unlink()
    return found


def search(target: Path) -> Found:
    """A search of two lengths, whose first out of memory is repeated."""
    with tempfile.TemporaryDirectory() as folder:
        study = highwater.find(
            MODEL,
            gpus=[1],
            memory="20GiB",
            loss="full",
            allocator="native",
            start_length="48k",
            max_length="64k",
            resolution="16k",
            log_dir=folder,
        )
        launches = len(list(Path(folder).rglob("model_len-*.log")))
        for path in Path(folder).rglob("memory_snapshots/*/*.pickle"):
            (target / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / path.parent.name)
    return {
        "trials": study.finished_trials,
        "launches": launches,
        "notes": [note.replace(folder, "LOG") for note in study.notes],
        "answers": msgspec.to_builtins(study.answers),
        **snapshots_in(target),
    }


def snapshots_in(target: Path) -> Found:
    """What the snapshots below a folder say, by their step."""
    paths = sorted(target.rglob("*.pickle"))
    return {"snapshots": {path.parent.name: snapshot_row(path) for path in paths}}


def checks(found: Mapping[str, Found]) -> Iterator[str]:
    """Print what has no name, and the ratios; yield what is not as it has to be."""
    for case, told in found.items():
        if "error" in told:
            yield f"{case}: {told['error']}"
        if told.get("snapshots") == {}:
            yield f"{case}: there is no snapshot"
        snapshots = told.get("snapshots", {}).items()
        rows = {case: told, **{f"{case}, {step}": row for step, row in snapshots}}
        for name, row in rows.items():
            share = row.get("unattributed_share")
            if share is not None:
                whole = format_bytes(row["allocated_bytes"])
                print(f"{name}: {share:.2%} of {whole} has no name")
                if share > NAMELESS_SHARE and case not in OTHERS:
                    yield f"{name}: {share:.2%} of {whole} has no name"
        for name, ratio in told.get("ratio_over_without", {}).items():
            print(f"step time, {name}: {ratio:.4f} of the step without")


def large_files(out: Path) -> Iterator[str]:
    """Print the sizes of snapshots; yield those that are too large to keep."""
    for path in sorted(out.rglob("*.pickle")):
        size = path.stat().st_size
        print(f"{path.relative_to(out)}: {format_bytes(size)}")
        if size > MOST_FILE_BYTES:
            yield f"{path.relative_to(out)} is too large to keep: fewer entries"


if __name__ == "__main__":
    main()
