"""Sizes: no number, file or device that a user can name hangs a command or eats the machine."""

import os
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from studies import fifo

from highwater.cli.app import main
from highwater.cli.config import to_yaml
from highwater.cli.flags import request_of
from highwater.errors import HighwaterError, UsageError
from highwater.memory.capacity_table import table_capacities
from highwater.nouns.codec import SETTINGS_BYTES, read_file
from highwater.nouns.corpus import least_packed, packed_tokens
from highwater.nouns.declaration import MOST_GPUS, MOST_LENGTHS
from highwater.nouns.layout import Layout
from highwater.nouns.request import Request
from highwater.units import parse_bytes, parse_seconds, parse_tokens
from places import examples, question_of
from tables import deep

pytestmark = pytest.mark.timeout(60)
"""For the tests of single values, each of which takes a moment or would never end."""

DRY = (
    *("find", "Qwen3-0.6B", "--device", "cuda", "--memory", "80GiB", "--dry-run", "--allocator"),
    *("native", "--loss", "full"),
)
LONG = "9" * 310
"""More than a float holds."""
BIG = "9" * 20
TOO_MANY = (
    *(("--gpus", "99999999"), ("--gpus", LONG), ("--gpus", *map(str, range(1, 400)))),
    *(("--ulysses", "99999999"), ("--max-length", LONG), ("--resolution", LONG)),
    ("--start-length", "2", "--resolution", "1", "--max-length", "1000000000000"),
    ("--start-length", "2", "--resolution", "1", "--max-length", "1000000000"),
    *(("--token-budget", LONG), ("--memory", f"{LONG}GiB"), ("--headroom", LONG)),
    *(("--timeout", LONG), ("--confirm", "1000000000"), ("--confirm", LONG), ("--steps", BIG)),
    *(("--micro-batches", BIG), ("--sequences-per-micro-batch", BIG[:12]), ("--mlp-tiles", BIG)),
)


@pytest.mark.parametrize("words", TOO_MANY, ids=lambda words: " ".join(words)[:40])
def test_a_number_that_nobody_means_is_refused_at_once(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main((*DRY, *words)) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert "hint: " in said
    assert len(said) < 2000


def test_the_finest_grid_that_is_read_is_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finest = ("--start-length", "2", "--resolution", "1", "--max-length", str(MOST_LENGTHS))
    assert (main((*DRY, *finest)), main((*DRY, *finest, "--token-budget", "64k"))) == (0, 0)


@given(
    budget=st.integers(2, 200_000),
    start=st.integers(2, 3000),
    step=st.integers(1, 3000),
    objective=st.sampled_from(["sft", "rw", "dpo"]),
)
@settings(max_examples=examples(300))
def test_the_least_packed_length_is_found_without_looking_at_each(budget, start, step, objective):
    assume(budget >= 2 * start)
    lengths = {"start_length": start, "resolution": step, "max_length": start + 200 * step}
    question = question_of(token_budget=budget, objective=objective, loss="full", **lengths)
    cell = question.cells[0]
    size = question.size_of(cell)
    packed = {index: packed_tokens(question, cell, index) for index in range(size, 0, -1)}
    looked_at = min(packed, key=packed.__getitem__, default=1)
    assert least_packed(question, cell, size) == looked_at


@pytest.mark.parametrize("parse", [parse_bytes, parse_tokens, parse_seconds])
@pytest.mark.parametrize("text", [LONG, "1" + "0" * 5000, "9" * 30])
def test_a_size_a_length_and_a_time_have_an_end(parse, text):
    with pytest.raises(UsageError) as refusal:
        parse(text)
    assert len(refusal.value.problem) < 200


@pytest.mark.parametrize("name", ["gpus", "ulysses_degree", "ring_degree", "replicate_degree"])
def test_a_layout_of_more_than_any_job_is_none(name):
    Layout(**{"gpus": MOST_GPUS, name: MOST_GPUS})
    with pytest.raises(UsageError, match="is the most"):
        Layout(**{"gpus": MOST_GPUS, name: 4_000_000_007})


ALIASES = [f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghi")]
ODD_YAML = {
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(ALIASES),
    "an alias of itself": "model: &a [*a]\n",
    "a merge": "a: &a {gpus: 1}\n<<: *a\n",
    "depth": f"gpus: {'[' * 2000}{']' * 2000}\n",
    "depth of blocks": "".join(f"{' ' * depth}a:\n" for depth in range(900)),
    "a tag": "model: !!python/object/apply:os.system [id]\n",
    "a tag of YAML": "model: !!binary aGVsbG8=\n",
    "a date": "model: Qwen3-0.6B\ngpus: 2026-01-01\n",
    "digits": f"model: Qwen3-0.6B\nsteps: {'9' * 5000}\n",
    "a number past 64 bits": f"model: Qwen3-0.6B\nsteps: {'9' * 310}\n",
    "no number": "model: Qwen3-0.6B\ntimeout: .nan\n",
    "without end": "model: Qwen3-0.6B\ntimeout: .inf\n",
    "a list as a name": "[1, 2]: 3\n",
    "a mapping as a name": "? {a: b}\n: 3\n",
    "no text": "\x00\x01",
    "its size": "# " + "x" * (SETTINGS_BYTES + 1),
    "names": "".join(f"a{n}: 1\n" for n in range(2_000)),
}


@pytest.mark.parametrize("kind", ODD_YAML)
def test_yaml_that_no_settings_need_is_refused(kind, capsys, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(ODD_YAML[kind])
    assert main(("find", "--config", str(path), *DRY[2:])) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert "hint: " in said
    assert len(said) < 3000


def test_a_date_stays_the_text_that_it_was_written_as(capsys, tmp_path):
    (tmp_path / "study.yaml").write_text("model: 2026-01-01\n")
    assert main(("find", "--config", str(tmp_path / "study.yaml"))) == 2
    assert "no model '2026-01-01'" in capsys.readouterr().err


def _odd(kind: str, folder: Path) -> Path:
    path = folder / "odd"
    if kind == "pipe":
        return fifo(path)
    if kind == "folder":
        path.mkdir()
    elif kind == "too long":
        path.touch()
        os.truncate(path, 40 << 30)  # a hole: it takes no room
    else:
        return Path(kind)
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "/dev/null", "too long"])
@pytest.mark.parametrize(
    "command",
    [
        *("find --config", "find --prediction", "find --study", "recommend --study", "show"),
        *("report", "profile", "guide", "guide.csv", "guide.json", "predict --constants", "model"),
    ],
)
def test_a_file_without_an_end_is_refused_anywhere(command, kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = _odd(kind, tmp_path)
    name, _, suffix = command.partition(".")
    if suffix:
        (tmp_path / f"link.{suffix}").symlink_to(path)
        path = tmp_path / f"link.{suffix}"
    if command == "model":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "config.json").symlink_to(path)
        words = ["predict", str(tmp_path / "mine"), "--gpus", "H200-141GB"]
    else:
        verb, _, flag = name.partition(" ")
        own = {
            "find": ("Qwen3-0.6B", *DRY[2:]),
            "predict": ("Qwen3-0.6B", "--gpus", "H200-141GB"),
            "recommend": ("Qwen3-0.6B", "--gpus", "H200-141GB", "--length", "8k"),
        }.get(verb, ())
        words = [verb, *own, *([flag] if flag else []), str(path)]
    assert main(words) == 2
    said = capsys.readouterr().err
    of_a_folder = ("Is a directory", "has no memory snapshot")
    fitting = of_a_folder if kind == "folder" else ("regular file", "it has more than")
    assert any(words in said for words in (*fitting, "has no config.json"))
    assert "hint: " in said


def test_a_file_at_its_bound_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    assert read_file(path, most_bytes=8) == b"12345678"
    with pytest.raises(OSError, match="it has more than"):
        read_file(path, most_bytes=7)


HEADER = "gpu,settings,gpus,sp,model,max_model_len"


@pytest.mark.parametrize(
    "row",
    [
        "A100-80GB,vanilla,4000000007,1,Qwen3-0.6B,8192",
        "A100-80GB,vanilla,4,4000000007,Qwen3-0.6B,8192",
        "A100-80GB,vanilla,1,1,Qwen3-0.6B,99999999999999999999",
        f"A100-80GB,vanilla,{'9' * 5000},1,Qwen3-0.6B,8192",
        f"A100-80GB,vanilla,1,1,{'a/' * 70_000},8192",
    ],
)
def test_a_table_with_a_number_that_nobody_means_is_refused_at_once(row, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(HighwaterError):
        table_capacities(path)


def _mutated(text: str, draw: random.Random, pieces: tuple[str, ...]) -> str:
    """Text with a piece or two of it replaced, doubled, cut out, or followed by something odd."""
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.randrange(12))
        put = draw.choice((*pieces, text[at:end] * 2, ""))
        text = text[:at] + put + text[draw.choice((at, end)) :]
    return text


YAML_PIECES = (
    *("[", "]", "{", "}", ":", "- ", "&a ", "*a", "!!int ", "\n", "  ", "'", '"', "|", ">", "%"),
    *("@", "9" * 400, "-1", ".inf", "1e999", "2026-01-01", "\x00", "é", "\ud7ff", "null", "~"),
    *("true", "<<: ", "? ", "#"),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [300, *deep(15_000)])
def test_a_mutated_configuration_is_read_or_refused(count, tmp_path, record_property):
    path, draw, refused = tmp_path / "study.yaml", random.Random(20), 0
    named = {"model": "Qwen3-0.6B", "gpus": (1, 2), "memory": "80GiB", "token_budget": "16k"}
    whole = to_yaml(Request(**named, confirm=2, headroom="2GiB"))
    for _ in range(count):
        path.write_text(_mutated(whole, draw, YAML_PIECES), errors="surrogatepass")
        try:
            request_of(SimpleNamespace(config=str(path)))
        except HighwaterError:
            refused += 1
    said = f"{refused:,} refused, {count - refused:,} read"
    record_property("counted", f"{count:,} mutated configurations: {said}")
