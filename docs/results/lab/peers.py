"""Peers of the traced prediction on the same trials: the formula, PyTorch's memory trackers, two
cheap trials and a line.

``python docs/results/lab/peers.py`` (no GPU, one to five minutes a tracker and trial) writes
``peers.json`` beside it: what the trackers say of the trials in ``TRACKED``, and the lines.
``--table`` only prints: these, beside what ``traced.json`` holds by then.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import highwater
from highwater.model.model import load_model
from highwater.nouns.codec import to_json
from highwater.nouns.events import TraceOrder
from highwater.nouns.study import Cell
from highwater.nouns.trial import TrialResult, TrialSpec
from highwater.trials.traced import fullest_rank
from highwater.trials.trial_process import trial_environment
from highwater.units import GIB, format_tokens

HERE = Path(__file__).parent
STUDIES = HERE.parent / "find"
FILE = HERE / "peers.json"
TRACED = HERE.parent / "predict" / "traced.json"
TRACKERS = ("FSDPMemTracker", "MemTracker")
TRACKED = (
    "qwen3-1.7b-79gib-full/41db30dcc9914b76",  # Qwen3-1.7B vanilla, 114,688
    "qwen3-0.6b-79gib-full/dea30f600088885c",  # Qwen3-0.6B vanilla, 188,416
    "grpo-0.6b-2-sp2/6cca7bc7302c0f91",  # Qwen3-0.6B Env, GRPO, 2 GPUs that share sequences, 51,200
    "qwen3-4b-79gib/22c085ea93d76e4a",  # Qwen3-4B Env + chunked, 57,344
    "grpo-0.6b-1/10510979bc43acd3",  # Qwen3-0.6B Env, GRPO, FSDP1, 65,536
    "grpo-0.6b-1-offload/efcb2d2aed0609f1",  # Qwen3-0.6B Env + Offload, GRPO, 28,672
    # Qwen3-1.7B Env + entropy-saving, GRPO, 155,648, memory-only
    "grpo-1.7b-1-entropy/8d62145f039124d7",
    "grpo-4b-2-sp2/9a430bc56888ce2c",  # Qwen3-4B Env, GRPO, 2 GPUs that share sequences, 32,768
)
"""Trials that the trackers follow: every kind of setting that was measured."""
TIMEOUT_S = 900
Trials = dict[str, tuple[str, TrialSpec, TrialResult]]


def main() -> None:
    """Follow what the file does not have yet, and put the rest together anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="print what is in the file, track nothing"
    )
    told: dict[str, Any] = (
        json.loads(FILE.read_text()) if FILE.is_file() else {"trackers": {}, "lines": []}
    )
    if not parser.parse_args().table:
        trials = fitting_trials()
        told["lines"] = list(lines(trials.values()))
        keep(told)
        for key in TRACKED:
            for tracker in TRACKERS:
                if tracker not in told["trackers"].get(key, {}).get("answers", {}):
                    told["trackers"].setdefault(key, followed(*trials[key]))["answers"][tracker] = (
                        ask(tracker, *trials[key][:2])
                    )
                    keep(told)
    rows = {
        key: row for key, row in json.loads(TRACED.read_text()).items() if row["measured"]["fits"]
    }
    for title, is_held_out in (("Held out", True), ("Development", False)):
        some = {key: row for key, row in rows.items() if row["held_out"] is is_held_out}
        if some:
            print(f"{title}\n\n{peers_table(some, told['lines'])}\n")
    print(f"{trackers_table(told['trackers'], rows)}\n\n{lines_table(told['lines'])}")


def keep(told: dict[str, Any]) -> None:
    """Write the file."""
    FILE.write_text(json.dumps(told, indent=1) + "\n")


def fitting_trials() -> Trials:
    """Every trial of docs/results/find that fit, by its study and its key."""
    found: Trials = {}
    for path in sorted(STUDIES.glob("*.jsonl")):
        for trial in highwater.open_study(path).trials:
            if trial.result is not None and trial.result.outcome.is_fit:
                found[f"{path.stem}/{trial.spec.key}"] = (path.stem, trial.spec, trial.result)
    return found


def followed(study: str, spec: TrialSpec, result: TrialResult) -> dict[str, Any]:
    """What a trial is, and what was measured on the rank that the trackers follow."""
    return {**named(study, spec), "measured": peaks_of(spec, result), "answers": {}}


def named(study: str, spec: TrialSpec) -> dict[str, Any]:
    """The words of a row."""
    return {
        "study": study,
        "model": spec.model_name,
        "rung": spec.settings.label,
        "objective": spec.settings.objective,
        "strategy": spec.settings.strategy,
        "gpus": spec.layout.gpus,
        "ulysses_degree": spec.layout.ulysses_degree,
        "length_tokens": spec.length_tokens,
        "memory_only": spec.is_memory_only,
    }


def peaks_of(spec: TrialSpec, result: TrialResult) -> dict[str, Any]:
    """Of the fullest rank."""
    memory = result.ranks[fullest_rank(spec)].memory
    return {
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
    }


def ask(tracker: str, study: str, spec: TrialSpec) -> dict[str, Any]:
    """A process of its own follows the step; what it says instead of an answer is one too."""
    print(
        f"{tracker}: {spec.model_name} {spec.settings.label} {format_tokens(spec.length_tokens)}",
        flush=True,
    )
    here = msgspec.structs.replace(spec, model_directory=load_model(spec.model_name).directory)
    environment = {**trial_environment(here), "CUDA_VISIBLE_DEVICES": ""}
    if not (STUDIES / f"{study}.prediction.json").is_file():
        environment["HIGHWATER_PEERS_UNFUSED"] = (
            "1"  # measured before norm and rotation were one kernel
        )
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "order.json"), Path(folder, "answer.json")
        source.write_text(to_json(TraceOrder(spec=here, rank=fullest_rank(here))))
        command = [sys.executable, HERE / "trackers.py", tracker, source, target]
        try:
            ended = subprocess.run(
                command,
                env=environment,
                check=False,
                timeout=TIMEOUT_S,
                stderr=subprocess.PIPE,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer after {TIMEOUT_S} s"}
        if target.is_file():
            return json.loads(target.read_text())
        return {
            "error": f"exit code {ended.returncode}: "
            f"{(ended.stderr.strip().splitlines() or [''])[-1]}"
        }


def lines(trials: Iterable[tuple[str, TrialSpec, TrialResult]]) -> Iterable[dict[str, Any]]:
    """Of each study's cell with three lengths that fit or more: the line through the two shortest,
    read at the longest.
    """
    cells: dict[tuple[str, Cell], dict[int, tuple[TrialSpec, TrialResult]]] = defaultdict(dict)
    for study, spec, result in trials:
        cells[study, Cell(layout=spec.layout, settings=spec.settings)][spec.length_tokens] = (
            spec,
            result,
        )
    for (study, _), by_length in cells.items():
        if len(by_length) < 3:
            continue
        first, second, *_, last = sorted(by_length)
        low, high, known = (
            peaks_of(*by_length[length])["peak_reserved_bytes"] for length in (first, second, last)
        )
        yield {
            **named(study, by_length[last][0]),
            "key": f"{study}/{by_length[last][0].key}",
            "from_tokens": [first, second],
            "peak_reserved_bytes": round(low + (high - low) * (last - first) / (second - first)),
            "measured": {"peak_reserved_bytes": known},
        }


def peers_table(traced: dict[str, Any], known_lines: list[dict[str, Any]]) -> str:
    """A row per trial that fit, of the reserved peak; then how far each is off over all of them."""
    headings = (
        "model",
        "rung",
        "GPUs",
        "SP",
        "length",
        "reserved, measured GiB",
        "traced",
        "formula",
        "two trials and a line",
    )
    by_line = {line["key"]: line for line in known_lines}
    off: dict[str, list[float]] = defaultdict(list)
    rows = [headings, ("---",) * len(headings)]
    for key, row in sorted(traced.items(), key=lambda pair: order_of(pair[1])):
        cells: list[str] = []
        for name, guess in (
            ("traced", row["traced"]),
            ("formula", row["formula"]),
            ("two trials and a line", by_line.get(key)),
        ):
            if guess is None or not guess.get("fits", True):
                cells.append("" if guess is None else f"runs out in {guess['phase']}")
                continue
            off[name].append(
                guess["peak_reserved_bytes"] / row["measured"]["peak_reserved_bytes"] - 1
            )
            cells.append(f"{off[name][-1]:+.2%}")
        rows.append((*words(row), f"{row['measured']['peak_reserved_bytes'] / GIB:.2f}", *cells))
    return "\n".join([markdown(rows), "", *(summary(name, errors) for name, errors in off.items())])


def trackers_table(trackers: dict[str, Any], traced: dict[str, Any]) -> str:
    """A row per trial that the trackers followed: their allocated peak beside the measured ones,
    and our trace's.
    """
    headings = (
        "model",
        "rung",
        "GPUs",
        "SP",
        "length",
        "allocated, measured GiB",
        "reserved",
        *TRACKERS,
        "seconds",
    )
    beside = ("traced: allocated", "traced: reserved", "tracker: of reserved")
    rows = [(*headings, *beside), ("---",) * len((*headings, *beside))]
    off: dict[str, list[float]] = defaultdict(list)
    for key, row in sorted(trackers.items(), key=lambda pair: order_of(pair[1])):
        allocated, reserved = (
            row["measured"][f"peak_{kind}_bytes"] for kind in ("allocated", "reserved")
        )
        answers = [row["answers"].get(tracker, {"error": "not asked yet"}) for tracker in TRACKERS]
        cells = [said(answer, allocated) for answer in answers]
        seconds = " / ".join(
            f"{answer['seconds']:.0f}" if "seconds" in answer else "?" for answer in answers
        )
        figures = dict.fromkeys(beside, "")
        ours = traced.get(key, {}).get("traced", {"fits": False})
        if ours["fits"]:
            figures["traced: allocated"] = note(
                off, "traced: allocated", ours["peak_allocated_bytes"] / allocated - 1
            )
            figures["traced: reserved"] = note(
                off, "traced: reserved", ours["peak_reserved_bytes"] / reserved - 1
            )
        best = [
            answer["peak_allocated_bytes"] for answer in answers if "peak_allocated_bytes" in answer
        ]
        if best:
            note(off, "tracker: allocated", best[0] / allocated - 1)
            figures["tracker: of reserved"] = note(
                off, "tracker: of reserved", best[0] / reserved - 1
            )
        rows.append(
            (
                *words(row),
                f"{allocated / GIB:.2f}",
                f"{reserved / GIB:.2f}",
                *cells,
                seconds,
                *figures.values(),
            )
        )
    errors = [
        f"{row['model']} {row['rung']} {format_tokens(row['length_tokens'])}, {tracker}: "
        f"{answer['error']}"
        for row in trackers.values()
        for tracker, answer in row["answers"].items()
        if "error" in answer
    ]
    return "\n".join(
        [markdown(rows), "", *(summary(name, each) for name, each in sorted(off.items())), *errors]
    )


def lines_table(known_lines: list[dict[str, Any]]) -> str:
    """A row per line."""
    rows = [
        ("study", "rung", "two trials at", "read at", "by the line GiB", "measured", "off by"),
        ("---",) * 7,
    ]
    for line in known_lines:
        guess, known = line["peak_reserved_bytes"], line["measured"]["peak_reserved_bytes"]
        ends = ", ".join(map(format_tokens, line["from_tokens"]))
        where = (line["study"], line["rung"], ends, length_of(line))
        rows.append(
            (*where, f"{guess / GIB:.2f}", f"{known / GIB:.2f}", f"{guess / known - 1:+.2%}")
        )
    return f"{markdown(rows)}\n\n{len(known_lines)} cells have three lengths that fit"


def order_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows stand by these."""
    return tuple(row[name] for name in ("gpus", "model", "study", "length_tokens", "rung"))


def words(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row is of."""
    rung = ", ".join(row[name] for name in ("rung", "objective", "strategy") if name in row)
    return (row["model"], rung, str(row["gpus"]), str(row["ulysses_degree"]), length_of(row))


def length_of(row: dict[str, Any]) -> str:
    """A length, and whether its attention ran in one layer alone."""
    return f"{format_tokens(row['length_tokens'])}{' (memory-only)' if row['memory_only'] else ''}"


def said(answer: dict[str, Any], allocated: int) -> str:
    """A tracker's answer as a share of what was measured."""
    return (
        f"{answer['peak_allocated_bytes'] / allocated - 1:+.2%}"
        if "peak_allocated_bytes" in answer
        else "see below"
    )


def note(off: dict[str, list[float]], name: str, error: float) -> str:
    """Keep an error for the summary; returns it as text."""
    off[name].append(error)
    return f"{error:+.2%}"


def summary(name: str, errors: list[float]) -> str:
    """Absolute."""
    sizes = sorted(map(abs, errors))
    return (
        f"{name}: off by {statistics.median(sizes):.3%} (median), {sizes[-1]:.3%} (most), over "
        f"{len(sizes)} trials"
    )


def markdown(rows: list[tuple[Any, ...]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


if __name__ == "__main__":
    main()
