"""Step speeds of this version beside another's, in turns on one GPU.

``git archive 76138b2 src | tar -x -C OLD``, then ``versions.py OLD/src`` writes ``versions.json``.
Each version has a process of its own with its own
``benchmarks/step`` (``highwater.bench.step`` before), the same random weights and the same tokens;
one waits while the other takes its step. Losses of both are compared before any time is: the same
work is a relative difference of at most 5e-4, the benchmark's own tolerance. ``--table`` prints the
recorded rows.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
RECORD = HERE / "versions.json"
CASES = [
    ("Qwen3-0.6B", "chunked", 1_024, 201),
    ("Qwen3-0.6B", "chunked", 8_192, 201),
    ("Qwen3-0.6B", "full", 16_384, 25),
    ("Qwen3-0.6B", "chunked", 32_768, 9),
    ("Qwen3-0.6B", "attention-kept", 32_768, 9),
    ("Qwen3-1.7B", "full", 16_384, 15),
    ("Qwen3-1.7B", "attention-kept", 16_384, 15),
    ("Qwen3-1.7B", "chunked", 32_768, 9),
]
"""Model, contender of the benchmark, tokens of a sequence, timed steps of each version.

At 1,024 and 8,192 tokens the host's launches set the pace, and steps scatter: there are more.
"""

TOLERANCE = 5e-4


def work() -> None:
    """Take steps of one version as standard input asks, a JSON line each way."""
    try:
        import step as bench  # benchmarks/ is on the path of this version alone.
    except ImportError:
        from highwater.bench import step as bench  # type: ignore[no-redef]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    taken: Any = None
    sequences: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, object] = {}
            if "contender" in request:
                taken = None
                gc.collect()
                bench.torch.cuda.empty_cache()
                length = request["length"]
                make = bench.CONTENDERS[request["contender"]]
                taken = make(request["folder"], length)
                sequences = bench.sequences_of(request["model"], length, 2)
                answer["loss"] = float(taken(sequences))
            elif "weights" in request:
                bench.same_weights(request["weights"], Path(request["folder"]))
            else:
                answer["seconds"] = bench._timed(taken, sequences)
        except Exception:  # noqa: BLE001 — it is told to whoever asked.
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


class Version:
    """A process of one version: requests in, answers out."""

    def __init__(self, name: str, paths: list[Path]) -> None:
        """Start it with ``paths`` ahead of what is installed."""
        self.name = name
        inherited = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([*map(str, paths), inherited])
        variables = os.environ | {
            "PYTHONPATH": path,
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )

    def ask(self, **request: object) -> dict[str, Any]:
        """Answer one request; raises RuntimeError with the version's own traceback."""
        assert self._process.stdin  # noqa: S101
        assert self._process.stdout  # noqa: S101
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def end(self) -> None:
        """Close its input and wait for it."""
        assert self._process.stdin  # noqa: S101
        self._process.stdin.close()
        self._process.wait()


def measure(old: Path, revision: str, only: list[str]) -> None:
    """Measure every case, or those named, and write the record after each."""
    import torch

    rows: list[dict[str, object]] = []
    if RECORD.exists() and only:
        rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    record = {
        "command": f"python docs/results/house/versions.py OLD/src --old {revision}",
        "old": revision,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "rows": rows,
    }
    for model, contender, length, rounds in CASES:
        row: dict[str, object] = {"model": model, "case": contender, "length": length}
        if only and f"{model}/{contender}/{length}" not in only:
            continue
        rows[:] = [other for other in rows if not row.items() <= other.items()]
        versions = [
            Version("old", [old]),
            Version("new", [CHECKOUT / "src", CHECKOUT / "benchmarks"]),
        ]
        with tempfile.TemporaryDirectory() as folder:
            versions[1].ask(weights=model, folder=folder)
            try:
                row |= _in_turns(versions, model, folder, contender, length, rounds)
            except RuntimeError as error:
                row["error"] = str(error)
        for version in versions:
            version.end()
        rows.append(row)
        print(json.dumps(row), flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _in_turns(
    versions: list[Version], model: str, folder: str, contender: str, length: int, rounds: int
) -> dict[str, object]:
    losses = {
        version.name: version.ask(model=model, folder=folder, contender=contender, length=length)[
            "loss"
        ]
        for version in versions
    }
    for version in versions:
        version.ask()
    times: dict[str, list[float]] = {version.name: [] for version in versions}
    for turn in range(rounds):
        # Who goes first changes, so that neither always follows a pause.
        for version in versions if turn % 2 else reversed(versions):
            times[version.name].append(version.ask()["seconds"])
    same_work = abs(losses["new"] - losses["old"]) <= TOLERANCE * abs(losses["old"])
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "losses": losses,
        "same_work": same_work,
        "step_times_s": times,
        "speed_ratio": median["old"] / median["new"] if same_work else None,
    }


def print_table() -> None:
    """Print the record as a table."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    print("| model | case | tokens | before, s | now, s | ratio | ratio of fastest | same loss |")
    print("|---|---|---|---|---|---|---|---|")
    for row in record["rows"]:
        if "error" in row:
            told = row["error"].strip().splitlines()[-1]
            print(f"| {row['model']} | {row['case']} | {row['length']:,} | {told} | | | | |")
            continue
        old, new = (statistics.median(row["step_times_s"][name]) for name in ("old", "new"))
        cells = [row["model"], row["case"], f"{row['length']:,}", f"{old:.4f}", f"{new:.4f}"]
        ratio = "" if row["speed_ratio"] is None else f"{row['speed_ratio']:.3f}"
        before, now = (min(row["step_times_s"][name]) for name in ("old", "new"))
        exact = "to the bit" if len(set(row["losses"].values())) == 1 else str(row["same_work"])
        print("| " + " | ".join([*cells, ratio, f"{before / now:.3f}", exact]) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", help="the other version's src")
    parser.add_argument("--old", default="76138b2", help="the other version's commit")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="MODEL/CASE/TOKENS", help="measure these again"
    )
    parser.add_argument("--table", action="store_true", help="print the record")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
    elif arguments.table:
        print_table()
    else:
        measure(arguments.source.resolve(), arguments.old, arguments.only)
