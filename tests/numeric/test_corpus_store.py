"""A corpus is the same from every kind of file, whole or not there."""

import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from corpora import ids_of, made, of_records, order, trained_of, write_lines, write_tokenizer
from pyarrow import parquet

from highwater.engine.data.data_files import data_files, records
from highwater.engine.data.store import CorpusWriter, open_corpus, read_manifest, write_manifest
from highwater.engine.data.text_tokens import BYTE_VOCABULARY
from highwater.engine.data.tokenise import tokenise
from highwater.errors import HighwaterError, MachineError, UsageError

RECORDS: list[dict[str, Any]] = [
    {"prompt": f"What is {number}?", "completion": " A number" + "." * number, "id": number}
    for number in range(7)
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}]}
    for text in ("Because.", "It is two.")
]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


def write_packed(path: Path, rows: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def save_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).with_format("numpy").save_to_disk(str(path))
    return path


def save_split(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))
    return path


def save_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    (path / "deep").mkdir(parents=True)
    write_lines(path / "a.json", rows[:2])
    write_parquet(path / "deep" / "b.parquet", rows[2:4])
    write_packed(path / "z.jsonl.gz", rows[4:])
    (path / ".hidden.jsonl").write_text("{")
    (path / "README.md").write_text("About these data.")
    return path


def save_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    shutil.copyfile(next(save_dataset(path.with_name("saved"), rows).glob("*.arrow")), path)
    return path


KINDS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "d.json": write_lines,
    "d.jsonl.gz": write_packed,
    "d.parquet": write_parquet,
    "d.arrow": save_arrow,
    "saved": save_dataset,
    "splits": save_split,
    "folder": save_folder,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_corpus(name, tmp_path):
    told = made(tmp_path, write_lines(tmp_path / "told.jsonl", RECORDS))
    corpus = made(tmp_path, KINDS[name](tmp_path / name, RECORDS))
    assert ids_of(corpus) == ids_of(told)
    assert trained_of(corpus) == trained_of(told)
    assert corpus.lengths.tolist() == told.lengths.tolist()


def test_messages_of_a_table_are_those_of_lines(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    chats = [
        *CHATS,
        {"messages": [*CHATS[0]["messages"][:1], {"role": "assistant", "content": ""}]},
    ]
    chats[0]["messages"][0]["name"] = "somebody"  # None in the other rows of a table
    lines = of_records(tmp_path, chats, tokenizer=tokenizer)
    table = made(tmp_path, write_parquet(tmp_path / "d.parquet", chats), tokenizer=tokenizer)
    saved = made(tmp_path, save_dataset(tmp_path / "saved", chats), tokenizer=tokenizer)
    assert ids_of(lines) == ids_of(table) == ids_of(saved)
    assert trained_of(lines) == trained_of(table) == trained_of(saved)


def test_texts_are_a_document_a_file_in_order_of_their_names(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.md").write_bytes(b"\xef\xbb\xbfsecond\r\n")
    (folder / "a.txt").write_text("first")
    (folder / "c.rst").write_text("")
    with gzip.open(folder / "d.txt.gz", "wb") as stream:
        stream.write(b"fourth")
    corpus = made(tmp_path, folder)
    assert ids_of(corpus) == [[*text, 256] for text in (b"first", b"second\r\n", b"fourth")]
    assert [corpus.name_of(number) for number in range(3)] == [
        *("texts/a.txt:1", "texts/b/1.md:1", "texts/d.txt.gz:1")
    ]
    assert corpus.summary.empty == 1


def test_texts_beside_records_are_named_and_not_trained(tmp_path):
    corpus = made(tmp_path, save_folder(tmp_path / "data", RECORDS))
    assert corpus.summary.documents == len(RECORDS)
    assert "data/README.md" in corpus.summary.notes[0]


def test_a_document_knows_its_file_and_line_and_files_of_one_name_are_whole(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('\ufeff{"text": "a"}\n\n{"text": ""}\n{"text": "b"}', encoding="utf-8")
    corpus = made(tmp_path, path)
    assert [corpus.name_of(number) for number in range(2)] == ["d.jsonl:1", "d.jsonl:4"]
    assert corpus.summary.empty == 1
    paths = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        paths.append(write_lines(tmp_path / folder / "d.jsonl", [{"text": folder}]))
    corpus = made(tmp_path, paths)
    assert [corpus.name_of(number) for number in range(2)] == [f"{path}:1" for path in paths]


def test_long_documents_are_cut_split_or_refused_and_counted(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "abcdefgh"}, {"text": "xy"}])
    cut = made(tmp_path, data, length_tokens=4)
    assert ids_of(cut) == [[*b"abcd"], [*b"xy", 256]]
    assert (cut.summary.truncated, cut.summary.truncated_tokens) == (1, 5)
    split = made(tmp_path, data, length_tokens=4, long_documents="split")
    # The ninth token, the end, would be a piece of one token, of which none can be predicted.
    assert ids_of(split) == [[*b"abcd"], [*b"efgh"], [*b"xy", 256]]
    assert (split.summary.split, split.summary.documents, split.summary.units) == (1, 3, 3)
    assert split.summary.lengths == ((4, 3),)
    with pytest.raises(UsageError, match=r"^d\.jsonl:1: 9 tokens, and 4") as refused:
        made(tmp_path, data, length_tokens=4, long_documents="refuse")
    assert "`--length 9`" in refused.value.hint
    assert made(tmp_path, data, length_tokens=9, long_documents="refuse").summary.documents == 2


def test_a_pair_or_a_rollout_is_cut_each_and_a_pair_without_a_response_left_out(tmp_path):
    pairs = [
        {"prompt": "ab", "chosen": "cdefgh", "rejected": "x"},
        {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"},
    ]
    data = write_lines(tmp_path / "pairs.jsonl", pairs)
    corpus = made(tmp_path, data, objective="dpo", length_tokens=5)
    assert ids_of(corpus) == [[*b"abcde"], [*b"abx", 256]]
    assert (corpus.summary.truncated, corpus.summary.empty, corpus.summary.units) == (3, 1, 1)
    group = {"prompt": "ab", "responses": ["cdefgh", "x"], "rewards": [1, 0]}
    data = write_lines(tmp_path / "group.jsonl", [group])
    corpus = made(tmp_path, data, objective="grpo", length_tokens=5)
    assert ids_of(corpus) == [[*b"abcde"], [*b"abx", 256]]


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_where_nothing_is_left_to_train_the_hint_says_what_leaves_some(objective, tmp_path):
    answers = {"sft": {"completion": "i"}, "dpo": {"chosen": "i", "rejected": "j"}}
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "abcdefgh", **answers[objective]}])
    with pytest.raises(UsageError, match="nothing to train on") as refused:
        made(tmp_path, data, objective=objective, length_tokens=5)
    assert commands_in(refused.value)[0] == "--length 10"
    assert made(tmp_path, data, objective=objective, length_tokens=10).summary.documents
    ids = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    data = write_lines(tmp_path / "untrained.jsonl", [ids])
    with pytest.raises(UsageError, match="nothing to train on") as refused:
        made(tmp_path, data)
    assert commands_in(refused.value) == ["--train-on all"]
    assert made(tmp_path, data, trained="all").summary.documents == 1


@pytest.mark.parametrize("objective", ["grpo", "ppo", "dpo", "rw"])
def test_only_supervised_documents_are_split_or_trained_whole(objective, tmp_path):
    for choices in ({"long_documents": "split"}, {"trained": "all"}):
        with pytest.raises(UsageError):
            order(tmp_path, objective=objective, **choices)


def test_the_same_order_is_made_once_and_another_is_another(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", RECORDS)
    first = made(tmp_path, data)
    written = (Path(first.summary.directory) / "ids.bin").stat()
    assert made(tmp_path, data).summary == first.summary
    assert (Path(first.summary.directory) / "ids.bin").stat().st_mtime_ns == written.st_mtime_ns
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = made(tmp_path, Path(shutil.copy(data, elsewhere)))
    assert moved.summary.digest == first.summary.digest
    others = [
        made(tmp_path, data, **choices).summary.digest
        for choices in ({"length_tokens": 16}, {"trained": "all"}, {"vocab_size": 300})
    ]
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    others.append(made(tmp_path, data, tokenizer=tokenizer).summary.digest)
    write_tokenizer(tmp_path / "tokenizer", "{{ messages[0]['content'] }}")
    others.append(made(tmp_path, data, tokenizer=tokenizer).summary.digest)
    write_lines(data, RECORDS[1:])
    others.append(made(tmp_path, data).summary.digest)
    assert len({*others, first.summary.digest}) == len(others) + 1


def test_large_vocabularies_have_larger_ids(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"input_ids": [1, 99_999, 65_536]}])
    assert ids_of(made(tmp_path, data, vocab_size=100_000)) == [[1, 99_999, 65_536]]
    small = made(tmp_path, write_lines(data, [{"input_ids": [1, 65_535]}]), vocab_size=65_536)
    assert ids_of(small) == [[1, 65_535]]


def flip_a_bit_of_every_byte(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


def write_a_large_id(file: Path) -> None:
    file.write_bytes(b"\xff\xff" + file.read_bytes()[2:])


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def put_a_pipe_there(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("harm", [flip_a_bit_of_every_byte, cut, Path.unlink, put_a_pipe_there])
@pytest.mark.parametrize(
    "name",
    [
        *("ids.bin", "trained.bin", "offsets.bin", "units.bin", "rewards.bin", "logprobs.bin"),
        *("files.bin", "rows.bin", "corpus.json", "names.json", "manifest.json"),
    ],
)
def test_a_damaged_corpus_is_not_opened_and_is_made_anew(name, harm, tmp_path):
    ids = {"prompt_ids": [1, 2], "response_ids": [3, 4]}
    rollouts = [{"prompt": "a", **ids, "logprobs": [-0.5, -0.25], "reward": 1.0}] * 3
    data = write_lines(tmp_path / "d.jsonl", rollouts)
    before = made(tmp_path, data, objective="ppo")
    folder, ids = Path(before.summary.directory), ids_of(before)
    harm(folder / name)
    with pytest.raises(UsageError, match=f"{name} is damaged: ") as refused:
        open_corpus(folder)
    assert "tokenised once more" in refused.value.hint
    scratch = tmp_path / "again"
    scratch.mkdir()
    asked = order(data, objective="ppo")
    summary = tokenise(asked, folder.parent, scratch=scratch, on_phase=lambda _: None)
    assert f"{name} is damaged: " in summary.notes[0]
    assert summary.digest == before.summary.digest
    again = open_corpus(folder)
    assert again.summary == before.summary, "the note is of this time alone"
    assert ids_of(again) == ids == [[1, 2, 3, 4]] * 3


def test_only_what_the_manifest_names_is_mapped(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", RECORDS)
    folder = Path(made(tmp_path, data).summary.directory)
    (folder / "manifest.json").unlink()
    write_a_large_id(folder / "ids.bin")
    assert max(map(max, ids_of(made(tmp_path, data)))) < BYTE_VOCABULARY
    folder = Path(of_records(tmp_path, RECORDS).summary.directory)
    manifest = read_manifest(folder)
    write_manifest(folder, {name: of for name, of in manifest.files.items() if name != "ids.bin"})
    with pytest.raises(UsageError, match=r"ids\.bin"):
        open_corpus(folder)


def test_nothing_is_left_of_a_corpus_that_could_not_be_made(tmp_path):
    with pytest.raises(UsageError):
        of_records(tmp_path, [*RECORDS, {"text": 7}])
    assert not list((tmp_path / "corpora").iterdir())
    assert not list((tmp_path / "scratch-0").iterdir())


def test_a_full_disk_is_the_machines_refusal(tmp_path):
    """``/dev/full`` is a disk that is full: the first of its files that is written there fails."""
    writer = CorpusWriter(tmp_path / "corpus", vocab_size=300)
    corpus = of_records(tmp_path, RECORDS)

    def write() -> None:
        with writer:
            (tmp_path / "corpus" / "corpus.json.partial").symlink_to("/dev/full")
            writer.finish(corpus.summary, ["d.jsonl"])

    with pytest.raises(MachineError, match=os.strerror(errno.ENOSPC)) as refused:
        write()
    assert "export XDG_CACHE_HOME" in refused.value.hint
    assert not (tmp_path / "corpus").exists()


def test_two_that_make_the_same_corpus_at_once_have_one(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", RECORDS)

    def another_is_faster(phase: str) -> None:
        if phase.startswith("writing"):
            assert phase.endswith(" bytes"), "without a tokenizer nothing is counted in tokens"
            made(tmp_path, data)

    scratch = tmp_path / "slow"
    scratch.mkdir()
    found = tokenise(order(data), tmp_path / "corpora", scratch=scratch, on_phase=another_is_faster)
    assert open_corpus(found.directory).summary == found


HOSTILE: list[tuple[str, bytes, str, str]] = [
    ("d.jsonl", b'{"text": "a"}\n{"text": ', "d.jsonl:2 is no record of JSON", "sed -n 2p"),
    ("d.jsonl", b'{"text": "a"}\n"b"\n', "d.jsonl:2 is no record of JSON", "sed -n 2p"),
    ("d.jsonl", b'{"text": NaN}\n', "d.jsonl:1 is no record of JSON", "sed -n 1p"),
    ("d.jsonl", b'{"a": ' + b"[" * 9999 + b"\n", "d.jsonl:1 is no record of JSON", "sed -n 1p"),
    ("d.jsonl", b'{"text": "\\ud800"}\n', "d.jsonl:1 is no record of JSON", "sed -n 1p"),
    ("d.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "d.jsonl:2 is not UTF-8", "iconv"),
    ("d.txt", b"\xe9t\xe9", "d.txt is not UTF-8: the byte 0xe9 at 0", "> utf8.txt"),
    ("d.jsonl", "{}".encode("utf-16"), "d.jsonl:1 is not UTF-8", "-f utf-16"),
    ("d.json", b'{\n "text": "a"\n}\n', "d.json:1 is a record that goes on", "--no-indent"),
    ("d.jsonl", b"", "d.jsonl has no record", "leave the file out"),
    ("d.jsonl", b"\n\n", "d.jsonl has no record", "leave the file out"),
    ("d.txt", b"", "nothing to train on", "name data with text in it"),
    (
        "d.jsonl.gz",
        gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
        "cannot be unpacked",
        "gzip -t",
    ),
    ("d.jsonl.gz", b'{"text": "a"}\n', "d.jsonl.gz:1 cannot be unpacked", "gzip -t"),
    ("d.parquet", b"PAR1" + bytes(99), "d.parquet:1 cannot be read", "copy the file anew"),
    ("d.arrow", bytes(99), "d.arrow:1 cannot be read", "copy the file anew"),
    ("d.csv", b"text\na\n", "of no kind that is read", ".jsonl"),
    ("d.parquet.gz", b"", "of no kind that is read", ".jsonl"),
]


@pytest.mark.parametrize(("name", "content", "problem", "hint"), HOSTILE)
def test_an_unreadable_file_is_refused_by_name_and_line(name, content, problem, hint, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        made(tmp_path, path)
    assert problem in refused.value.problem
    assert hint in refused.value.hint


def commands_in(error: HighwaterError) -> list[str]:
    return error.hint.split("`")[1::2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", '{"text": "été"}\n{"text": "b"}\n'.encode("latin1")),
        ("d.jsonl.gz", gzip.compress('{"text": "été"}\n{"text": "b"}\n'.encode("latin1"), mtime=0)),
    ],
)
def test_what_the_hint_writes_can_be_read(name, content, tmp_path, monkeypatch):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        made(tmp_path, path)
    (command,) = commands_in(refused.value)
    (tmp_path / "mended").mkdir()
    monkeypatch.chdir(tmp_path / "mended")
    assert os.system(command) == 0  # noqa: S605 -- a hint, as somebody types it
    (written,) = (tmp_path / "mended").iterdir()
    assert ids_of(made(tmp_path, written)) == [[*"été".encode(), 256], [98, 256]]


def test_paths_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no data at"):
        made(tmp_path, tmp_path / "nowhere.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no file of records or text"):
        made(tmp_path, tmp_path / "empty")
    both = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": both, "test": both}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UsageError, match="2 splits: test, train") as refused:
        made(tmp_path, tmp_path / "both")
    assert commands_in(refused.value) == [f"--data {tmp_path / 'both' / 'train'}"]
    assert made(tmp_path, tmp_path / "both" / "train").summary.documents == len(RECORDS)


@pytest.mark.parametrize(("name", "package"), [("d.parquet", "pyarrow"), ("saved", "datasets")])
def test_a_missing_package_is_named_with_what_installs_it(name, package, tmp_path, monkeypatch):
    path = KINDS[name](tmp_path / name, RECORDS)
    from highwater.engine.data import data_files as readers

    def found(asked: str) -> object | None:
        return None if asked == package else object()

    monkeypatch.setattr(readers, "find_spec", found)
    with pytest.raises(UsageError, match=f"read by {package}, which is not installed") as refused:
        made(tmp_path, path)
    assert commands_in(refused.value) == [f"pip install {package}"]


def test_a_table_is_read_a_few_rows_at_a_time(tmp_path):
    rows = [{"text": "x" * 1000, "number": number} for number in range(3000)]
    (file,) = data_files([str(write_parquet(tmp_path / "d.parquet", rows))]).files
    read = records(file)
    allocated = pa.total_allocated_bytes()
    for record, _ in zip(read, range(2000), strict=False):
        assert record.fields["number"] == record.row - 1
    assert pa.total_allocated_bytes() - allocated < 2 * len(rows) * 1000
