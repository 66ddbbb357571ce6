"""A journal that somebody else touches."""

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from studies import FOUND, REAL, without_checksums
from test_journal import QUESTION, lengths, record, search

from highwater.errors import StudyError
from highwater.nouns.codec import to_json
from highwater.nouns.layout import Layout
from highwater.nouns.study import STUDY_SCHEMA_VERSION, Cell, Study
from highwater.store.journal import open_journal, read_study
from highwater.store.journal_file import sealed
from highwater.store.lines import AnsweredLine, FinishedLine, HeaderLine, Line, StartedLine
from highwater.units import GIB
from tables import deep
from trial_specs import answer_of

LENGTHS = (4096, 8192, 12288)


def written(path: Path) -> list[bytes]:
    with open_journal(path, QUESTION) as journal:
        search(QUESTION, journal)
    return path.read_bytes().splitlines(keepends=True)


def offered(hint: str) -> Path:
    return Path(shlex.split(hint.rpartition("--study ")[2].replace("`", " "))[0])


def changed(line: Callable[[bytes], bytes]) -> Callable[[list[bytes], int], list[bytes]]:
    return lambda lines, at: [*lines[:at], line(lines[at]), *lines[at + 1 :]]


EDITS: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "a letter": changed(lambda line: line.replace(b"kind", b"kine", 1)),
    "a digit": changed(lambda line: line.replace(b"1", b"2", 1)),
    "a blank": changed(lambda line: line.replace(b":", b": ", 1)),
    "its checksum": changed(lambda line: b"{" + line.partition(b",")[2]),
    "emptied": changed(lambda line: b"\n"),
    "another's checksum": lambda lines, at: [
        *lines[:at],
        lines[at - 1][:28] + lines[at][28:],
        *lines[at + 1 :],
    ],
    "taken out": lambda lines, at: [*lines[:at], *lines[at + 1 :]],
    "written twice": lambda lines, at: [*lines[: at + 1], lines[at], *lines[at + 1 :]],
    "changed places": lambda lines, at: [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_line_that_was_edited_is_named_by_its_number_with_a_hint_that_works(edit, tmp_path):
    path = tmp_path / "study.jsonl"
    lines = written(path)
    path.write_bytes(b"".join(EDITS[edit](lines, 3)))
    before = path.read_bytes()
    number = 5 if edit == "written twice" else 4
    for attempt in (read_study, lambda path: open_journal(path, QUESTION)):
        with pytest.raises(StudyError, match=f"line {number} of .* is damaged: ") as refusal:
            attempt(path)
    assert path.read_bytes() == before
    with open_journal(offered(refusal.value.hint), QUESTION) as journal:
        record(journal, 4096)


@pytest.mark.parametrize("schema_version", [1, 2])
def test_a_study_from_before_there_were_checksums_goes_on_without_them(schema_version, tmp_path):
    path = tmp_path / "study.jsonl"
    lines = written(path)
    path.write_text(without_checksums(b"".join(lines[:5]).decode(), schema_version=schema_version))
    with open_journal(path, QUESTION) as journal:
        search(QUESTION, journal)
    assert "checksum" not in path.read_text()
    assert read_study(path).complete


def _mutations(lines: list[bytes], seed: int) -> bytes:
    """Lines with one byte changed, put in or taken out, or one line moved, doubled or taken out."""
    draw = random.Random(seed)
    content = bytearray(b"".join(lines))
    kind, at = draw.randrange(6), draw.randrange(len(content) - 1)
    if kind == 0:
        content[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        content.insert(at, draw.randrange(256))
    elif kind == 2:
        del content[at]
    else:
        line = draw.randrange(len(lines) - 1)
        moved = lines[:line] + lines[line + 1 :]
        if kind == 4:
            moved.insert(draw.randrange(len(moved)), lines[line])
        if kind == 5:
            moved = [*lines[: line + 1], lines[line], *lines[line + 1 :]]
        content = bytearray(b"".join(moved))
    return bytes(content)


@pytest.mark.parametrize("count", [150, *deep(20_000)])
def test_a_change_of_a_journal_is_found_or_changes_nothing(count, tmp_path, record_property):
    path = tmp_path / "study.jsonl"
    lines = written(path)
    whole, found, same = read_study(path), 0, 0
    for seed in range(count):
        path.write_bytes(_mutations(lines, seed))
        try:
            study = read_study(path)
        except StudyError:
            found += 1
            continue
        assert msgspec.structs.replace(study, notes=whole.notes) == whole, seed
        same += 1
    said = f"{count:,} mutations of a journal: {found:,} found, {same:,} changed nothing"
    record_property("counted", said)
    assert found > 0.9 * count


def shown(study: Study) -> set[tuple[object, ...]]:
    names = ("cell", "capacity_tokens", "does_not_fit_tokens", "limit", "peak_reserved_bytes")
    return {tuple(getattr(answer, name) for name in names) for answer in study.answers}


@pytest.mark.parametrize("count", [100, *deep(10_000)])
def test_no_edit_without_checksums_makes_a_measured_answer(count, tmp_path, record_property):
    path, draw = tmp_path / "study.jsonl", random.Random(7)
    told = {"unproven": 0, "refused": 0, "the same": 0}
    studies = {path: read_study(path) for path in REAL}
    sources = [path for path, study in studies.items() if study.answers]
    others = [None, 0, 1, 4096, 262_144, 1.5, "memory", "time", "ceiling", True, False, 7_777]
    for _ in range(count):
        source = draw.choice(sources)
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        answer = draw.choice([line["answer"] for line in lines if line["kind"] == "cell_answered"])
        name = draw.choice([n for n in answer if n not in ("cell", "reason", "contradictions")])
        answer[name] = draw.choice(others)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        try:
            study = read_study(path)
        except StudyError:
            told["refused"] += 1
            continue
        told["unproven" if study.unproven else "the same"] += 1
        assert shown(study) <= shown(studies[source]), (source, name, answer[name])
    record_property("counted", f"{count:,} edits of recorded answers without checksums: {told}")
    assert told["unproven"] > count / 3


def test_a_study_that_is_deleted_in_mid_search_stops_it_and_its_trials_are_kept_beside_it(tmp_path):
    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        record(journal, 4096)
        path.unlink()
        with pytest.raises(StudyError, match="was deleted") as stop:
            record(journal, 8192)
    kept = offered(stop.value.hint)
    assert lengths(read_study(kept)) == [4096]
    assert not path.exists()
    with open_journal(kept, QUESTION) as journal:
        record(journal, 8192)
    assert lengths(read_study(kept)) == [4096, 8192]


def test_the_trial_that_had_just_ended_is_kept_too(tmp_path):
    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        journal.trial_started(QUESTION.trial(QUESTION.cells[0], 4096), attempt=1, repeat=0)
        path.rename(tmp_path / "moved.jsonl")
        path.write_text("mine")
        with pytest.raises(StudyError, match="was replaced while") as stop:
            record(journal, 4096)
    assert path.read_text() == "mine"
    assert len(read_study(offered(stop.value.hint)).trials) == 1


@pytest.mark.parametrize(
    ("left", "said"),
    [(0, "to 0 bytes"), (-1, "was cut from"), (None, "written by somebody else, 5 bytes")],
)
def test_a_study_that_is_cut_or_written_in_mid_search_stops_it(left, said, tmp_path):
    path = tmp_path / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        record(journal, 4096)
        if left is None:
            with path.open("ab") as file:
                file.write(b"note\n")
        else:
            os.truncate(path, len(path.read_bytes()[:left]))
        before = path.read_bytes()
        with pytest.raises(StudyError, match=said) as stop:
            record(journal, 8192)
    assert path.read_bytes() == before, "nothing is written into it any more"
    open_journal(offered(stop.value.hint), QUESTION).close()
    if left is not None:
        with open_journal(path, QUESTION) as journal:  # the same command goes on from what is left
            record(journal, 8192)
        assert lengths(read_study(path))[-1] == 8192


def test_a_folder_deleted_in_mid_search_stops_it_and_says_that_nothing_could_be_kept(tmp_path):
    path = tmp_path / "logs" / "study.jsonl"
    with open_journal(path, QUESTION) as journal:
        record(journal, 4096)
        path.unlink()
        path.parent.rmdir()
        with pytest.raises(StudyError, match="cannot be kept"):
            record(journal, 8192)


FEW, MANY = deep(250, 1_000) or (100, 400)
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
    results = [trial.result for trial in source.trials if trial.result]
    fit, no = (next(r for r in results if r.outcome.is_fit is is_fit) for is_fit in (True, False))
    settings = source.question.cells[0].settings
    own = tuple(Cell(layout=Layout(gpus=n), settings=settings) for n in range(1, cells + 1))
    steps = {"start_tokens": 32, "step_tokens": 32, "beyond_step_tokens": 32}
    grid = msgspec.structs.replace(source.question.grid, **steps)
    question = msgspec.structs.replace(source.question, cells=own, grid=grid)
    each, checksum = trials // cells, ""
    figures = ("peak_reserved_bytes", "headroom_bytes", "tokens_per_s", "mfu")
    answered = {"trials": each, **{name: getattr(fit, name) for name in figures}}
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
            answer = answer_of(cell, 32 * (each - 1), 32 * each, reason=no.reason, **answered)
            write(AnsweredLine(at_unix_s=1.0, answer=answer))


def measured(*words: str) -> tuple[float, int]:
    """Seconds of processor time, and the most memory, of a command in a process of its own."""
    command, quiet = [sys.executable, "-c", _MEASURED, *words], subprocess.DEVNULL
    done = subprocess.run(command, stdout=quiet, stderr=subprocess.PIPE, text=True)
    code, seconds, peak_bytes = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    return float(seconds), int(peak_bytes)


@pytest.fixture(scope="module", params=[10, *deep(1, 100)])
def finished(request, tmp_path_factory) -> tuple[int, dict[int, Path]]:
    cells, folder = request.param, tmp_path_factory.mktemp("finished")
    paths = {trials: folder / f"{trials}.jsonl" for trials in (FEW, MANY)}
    for trials, path in paths.items():
        write_study(path, trials, cells)
        assert read_study(path).complete
    return cells, paths


@pytest.mark.parametrize("form", ["show", "html", *deep("md", "csv", "json")])
def test_showing_and_reporting_are_linear_in_the_study(form, finished, tmp_path, record_property):
    cells, paths = finished

    def taken(trials: int) -> tuple[float, int]:
        if form == "show":
            return measured("show", str(paths[trials]))
        return measured("report", str(paths[trials]), "-o", str(tmp_path / f"{trials}.{form}"))

    (few_s, _), (many_s, peak_bytes) = taken(FEW), taken(MANY)
    said = f"{form}, {cells} cells: {FEW:,} trials in {few_s:.1f} s, {MANY:,} in {many_s:.1f} s "
    record_property("counted", f"{said}with {peak_bytes / GIB:.2f} GiB")
    assert peak_bytes < GIB
    assert many_s < MOST_TIMES * few_s
