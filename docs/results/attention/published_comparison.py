"""Record the published comparison of attentions on a GPU: sparse blocks in dilated segments, the
dilated segments alone, and dense attention.

    python docs/results/attention/published_comparison.py --out FILE.jsonl
    python docs/results/attention/published_comparison.py --out FILE.jsonl --table

Each part is a `highwater bench attention` in a process of its own: at 131,072 tokens forward and
backward, then the longest of each under 8 GiB and on the whole card; of 2 heads of 32 in fp16,
queries, keys and values one tensor, as published, and of a layer's 32 query and 8 key/value heads
of 128 in bf16. Every attention is compared with the masked formula in float64 on that GPU first.

A line of JSON is written for each check, case and longest length, as soon as a part ends. A part
that the time does not hold is interrupted and has what had ended; the same command goes on with
those that are not done. ``--tiny`` runs all of it on the CPU within minutes, with tiny lengths.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("BlockSparseRingDilatedAttention", "DilatedAttention", "dense")
SHAPES = {
    "published": ("--same-qkv", "--dtype", "fp16", "--heads", "2", "--head-dim", "32"),
    "layer": ("--dtype", "bf16", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"),
}
SEARCHED = {"published": "forward", "layer": "forward+backward"}
"""Direction of the longest lengths: the published ones are forward alone."""
PASS_S, MOST = "1s", "16m"
"""What ends a search but memory: a pass that takes longer, and a length."""
ENDS_S = 20.0
"""Time that an interrupted benchmark has to write its report."""
Line = dict[str, Any]


class Part(NamedTuple):
    """One benchmark."""

    shape: str
    what: str
    """At a length, or the longest under so much memory."""
    names: tuple[str, ...] = NAMES

    @property
    def name(self) -> str:
        """What stands in its lines."""
        return f"{self.shape}, {self.what}: {', '.join(self.names)}"


AT_LENGTH, SMALL, WHOLE = "131,072 tokens", "longest under 8 GiB", "longest on the whole card"
FIRST, OTHERS = NAMES[:1], NAMES[1:]
PARTS = [
    *(Part(shape, AT_LENGTH) for shape in SHAPES),
    *(Part(shape, what, FIRST) for shape in SHAPES for what in (SMALL, WHOLE)),
    *(Part(shape, what, OTHERS) for shape in SHAPES for what in (SMALL, WHOLE)),
]
"""In the order of what is wanted most: a file may end before all of them are done."""


def main() -> None:
    """Record, or print what was recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="print what the file has as Markdown")
    parser.add_argument("--budget", type=float, default=450.0, metavar="SECONDS")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny lengths")
    arguments = parser.parse_args()
    known = read(arguments.out)
    if arguments.table:
        print("\n".join(table(known)))
        return
    ends_s = time.monotonic() + arguments.budget
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        left_s = ends_s - time.monotonic() - ENDS_S
        if any(line["part"] == part.name and line["kind"] == "done" for line in known):
            continue
        if left_s <= 0:
            print(f"left for another time: {part.name}", file=sys.stderr)
            continue
        lines = list(recorded(part, known, left_s=left_s, is_tiny=arguments.tiny))
        known += lines
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
    print("\n".join(table(known)))


def read(path: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text]


def recorded(part: Part, known: list[Line], *, left_s: float, is_tiny: bool) -> Iterator[Line]:
    """A line for each thing that a part tells; the last one says whether it is done."""
    names = part.names
    if part.what == WHOLE:
        smaller = last_of(known, part._replace(what=SMALL))
        if not smaller or smaller[-1]["kind"] != "done":
            yield {"part": part.name, "kind": "failed", "said": f"{SMALL} was not recorded"}
            return
        # more memory changes nothing where a pass took too long, or no longer one is tried
        ended = [line for line in smaller if line.get("why") == "ran out of memory"]
        names = tuple(line["implementation"] for line in ended)
    if not names:
        yield {"part": part.name, "kind": "done", "same_as": SMALL}
        return
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        words = words_of(part, names)
        words = tiny(words, part) if is_tiny else words
        print(f"{part.name}: highwater {' '.join(words)}", file=sys.stderr, flush=True)
        code, said = run([*words, "--out", str(report)], limit_s=left_s)
        path = report / "attention.json"
        document: Line = json.loads(path.read_text()) if path.exists() else {}
    took = {"took_s": round(time.monotonic() - began_s, 1), "exit_code": code}
    for check in document.get("checks", ()):
        yield {"part": part.name, "kind": "check", **check}
    for row in document.get("rows", ()):
        yield {"part": part.name, "kind": "case", **row}
    for each in document.get("summary", {}).get("longest", ()):
        if part.what != AT_LENGTH:
            yield {"part": part.name, "kind": "longest", **each}
    about = {
        name: document.get(name) for name in ("made_at", "machine", "order", "not_run", "answer")
    }
    is_done = document.get("is_whole", False) and code in (0, 1)
    kind = "done" if is_done else "failed"
    yield {"part": part.name, "kind": kind, "words": words, **took, **about, "said": said}


def words_of(part: Part, names: tuple[str, ...]) -> list[str]:
    """What is typed after ``highwater``."""
    words = ["bench", "attention", *SHAPES[part.shape], "--implementations", *names]
    if part.what == AT_LENGTH:
        return [*words, "--lengths", "131072", "--timeout", "30s"]
    bound = ["--memory", "8GiB"] if part.what == SMALL else []
    search = ["--only", SEARCHED[part.shape], "--timeout", PASS_S, "--max-length", MOST]
    return [*words, *bound, *search]


def tiny(words: list[str], part: Part) -> list[str]:
    """The same on the CPU, with lengths and memory that it holds within seconds."""
    smaller = {"131072": "515", "8GiB": "900MiB", "fp16": "fp32", "bf16": "fp32", MOST: "2k"}
    more = ["--memory", "2GiB"] if part.what == WHOLE else []
    return [*(smaller.get(word, word) for word in words), *more, "--device", "cpu"]


def run(words: list[str], *, limit_s: float) -> tuple[int, str]:
    """Run ``highwater`` from this checkout, and interrupt it in the end; its exit code, and the
    last lines that it said.
    """
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with tempfile.TemporaryFile("w+") as talk:
        process = subprocess.Popen(
            [sys.executable, "-m", "highwater", *words],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=talk,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        talk.seek(0)
        said = talk.read()
    print(said, file=sys.stderr, flush=True)
    return process.returncode, " / ".join(filter(None, said.splitlines()[-3:]))


def table(known: list[Line]) -> Iterator[str]:
    """What was recorded, as Markdown."""
    for line in known:
        if line["kind"] == "done" and line.get("machine"):
            machine = line["machine"]
            torch = machine["versions"]["torch"]
            yield f"{machine['device_name']}, torch {torch}, dense on {machine['kernel']}"
            break
    for shape, words in SHAPES.items():
        lines = [line for part in PARTS if part.shape == shape for line in last_of(known, part)]
        cases = [line for line in lines if line["kind"] == "case" and line["batch"] == 1]
        yield f"\n**{shape}**: `{' '.join(words)}`\n"
        yield (
            "| attention | direction | tokens | time | of dense's | kept | after Q/K/V | "
            "peak allocated | peak reserved | |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|"
        yield from (row(line, line["result"], cases) for line in cases if AT_LENGTH in line["part"])
        for line in lines:
            what = SMALL if SMALL in line["part"] else WHOLE
            if line["kind"] == "longest":
                fails = f" at {line['fails_tokens']:,}" if line["fails_tokens"] else ""
                yield row(line["row"] or line, f"{what}: {line['why']}{fails}", [])
        yield ""
        for line in lines:
            if line["kind"] == "check" and AT_LENGTH in line["part"]:
                found = [each for each in line["differences"].values() if each is not None]
                yield (
                    f"- {line['implementation']}: {line['reason'] or 'equals the formula'}, "
                    f"{max(found, default=float('nan')):.1e} off at the most of "
                    f"{line['tolerance']:.0e}, at {line['length_tokens']} tokens"
                )
            if line.get("same_as"):
                yield f"- {line['part']}: no memory ended them under 8 GiB, so more changes nothing"
            if line["kind"] == "failed":
                yield f"- not done: {line['part']}: {line['said']}"


def last_of(known: list[Line], part: Part) -> list[Line]:
    """A part's lines of the last time that it ran."""
    own = [line for line in known if line["part"] == part.name]
    ends = [at for at, line in enumerate(own) if line["kind"] in ("done", "failed")]
    return own[ends[-2] + 1 :] if len(ends) > 1 else own


def row(line: Line, ended: str, others: list[Line]) -> str:
    """A case, beside dense attention's of the same length where that is known."""
    dense = next(
        (
            other["time_s"]
            for other in others
            if other["kind"] == "case"
            and other["implementation"] == "dense"
            and (other["direction"], other["batch"]) == (line["direction"], 1)
        ),
        None,
    )
    time_s, share = line.get("time_s"), line.get("kept_share")
    ratio = f"{time_s / dense:.3g}" if dense and time_s else ""
    cells = (
        line["implementation"],
        line["direction"],
        f"{line['length_tokens']:,}" if line.get("length_tokens") else "-",
        f"{1e3 * time_s:,.4g} ms" if time_s else "-",
        ratio,
        f"{100 * share:.3g} %" if share else "-",
        *(
            f"{line[name][0] / 2**20:,.0f} MiB" if line.get(name) else "-"
            for name in ("after_qkv_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
        ),
        ended,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
