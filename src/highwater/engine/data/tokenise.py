"""The process that tokenises a corpus once, without a GPU: ``python -m
highwater.engine.data.tokenise ORDER.json REPORT.json PARENT_FOLDER``.

The corpus is made in the report's folder, which has to be on the disk of the parent folder, and is
then moved there, named by a digest of exactly what its tokens depend on: the same data in another
folder is the same corpus. An existing corpus is not made again. Large data is rendered in several
processes, with the same documents in the same order.
"""

import inspect
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from torch.utils.data import DataLoader

from highwater.engine.data.conversations import ChatTemplate
from highwater.engine.data.data_files import DataFile, DataFiles, bytes_digest, data_files, records
from highwater.engine.data.record_fields import DataRecord
from highwater.engine.data.rendering import (
    Render,
    Rendering,
    RewardFunction,
    TokenDocument,
    Unit,
    preferences,
    rollouts,
    supervised,
)
from highwater.engine.data.store import CorpusWriter, disk_errors, open_corpus
from highwater.engine.data.text_tokens import BYTE_VOCABULARY, Bytes, TextTokens, Tokenizer
from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import CONFIG_BYTES, digest, read_file
from highwater.nouns.corpus import Corpus, CorpusOrder
from highwater.nouns.objective import TRAITS
from highwater.nouns.trial import TOLD_S, OnPhase, serve, tell_phase
from highwater.units import MIB, counted


class LengthLimit:
    """Cuts units to a length, and counts the cuts. A document without a trained token is dropped;
    its first token does not count, as it is never predicted.
    """

    def __init__(self, order: CorpusOrder) -> None:
        self._length, self._choice = order.length_tokens, order.long_documents
        self._pairs = TRAITS[order.objective].pairs
        """True if a whole unit is left out with one of its documents."""
        self.counts = dict.fromkeys(("truncated", "truncated_tokens", "split", "empty"), 0)
        """Counts of cut and left-out documents, under the names that ``Corpus`` has for them."""
        self.longest_tokens = 0
        """Tokens of the longest document, before cuts."""

    def __call__(self, unit: Unit, *, name: str) -> Iterator[Unit]:
        """Yield the trained part of a unit: one unit, one for each piece of a split, or none.

        Raises UsageError, naming the record, for too long a document if such are to be refused.
        """
        lengths = (len(document.ids_L) for document in unit.documents)
        self.longest_tokens = max(self.longest_tokens, *lengths)
        if self._choice == "split":
            (document,) = unit.documents
            starts = range(0, len(document.ids_L), self._length)
            pieces = [_slice(document, start, start + self._length) for start in starts]
            trained = [piece for piece in pieces if _is_trained(piece)]
            self.counts["split"] += len(pieces) > 1
            self.counts["empty"] += not trained
            yield from (Unit((piece,)) for piece in trained)
            return
        documents = [self._cut(document, name) for document in unit.documents]
        kept = tuple(document for document in documents if _is_trained(document))
        if len(kept) < len(documents):
            self.counts["empty"] += 1 if self._pairs else len(documents) - len(kept)
            kept = () if self._pairs else kept
        if kept:
            yield unit._replace(documents=kept)

    def _cut(self, document: TokenDocument, name: str) -> TokenDocument:
        over = len(document.ids_L) - self._length
        if over <= 0:
            return document
        if self._choice == "refuse":
            raise UsageError(
                f"{name}: {len(document.ids_L):,} tokens, and {self._length:,} are trained at the "
                "most",
                hint="cut such documents, `--long-documents truncate`, or train longer ones: "
                f"`--length {len(document.ids_L)}`",
            )
        self.counts["truncated"] += 1
        self.counts["truncated_tokens"] += over
        return _slice(document, 0, self._length)


def _is_trained(document: TokenDocument) -> bool:
    return bool(np.any(document.trained_L[1:]))


def _slice(document: TokenDocument, start: int, end: int) -> TokenDocument:
    logprobs_L = document.logprobs_L
    return document._replace(
        ids_L=document.ids_L[start:end],
        trained_L=document.trained_L[start:end],
        logprobs_L=None if logprobs_L is None else logprobs_L[start:end],
    )


_WRITTEN_AS = 2
"""Version of the files, counted up when the same order would make other files."""
_OF_A_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*", "vocab*", "merges.txt", "*.model", "tekken.json"),
)
"""Patterns of the names of a tokenizer's files."""


def corpus_digest(order: CorpusOrder, files: Sequence[DataFile], reward: Any | None) -> str:
    """Return the 16-digit name of the corpus of an order, from files and reward function."""
    data = [(file.name, bytes_digest(file.parts)) for file in files]
    choices = (
        *(order.objective, order.length_tokens, order.vocab_size),
        *(order.long_documents, order.trained, order.reward),
        *(["lengths alone, of ids as many"] if order.lengths_alone else []),
    )
    source = None
    with suppress(TypeError):  # a function may be in no file
        source = None if reward is None else inspect.getsourcefile(reward)
    of_source = None if source is None else bytes_digest([Path(source)])
    return digest((_WRITTEN_AS, choices, data, _tokenizer_digest(order.tokenizer), of_source))


def _tokenizer_digest(directory: str | None) -> object:
    if directory is None:
        return None
    folder = Path(directory)
    found = {path for pattern in _OF_A_TOKENIZER for path in folder.glob(pattern)}
    files = ((str(path.relative_to(folder)), path) for path in found if path.is_file())
    digests = sorted((name, bytes_digest([path])) for name, path in files)
    family = None  # decides the class of a tokenizer whose files do not name one
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads(read_file(folder / "config.json", most_bytes=CONFIG_BYTES))
        family = str(config.get("model_type"))
    return digests, family


def main() -> None:
    """Tokenise the corpus of the order, or write a report with the error."""
    parent = Path(sys.argv[3])

    def work(order: CorpusOrder, scratch: Path) -> Corpus:
        return tokenise(order, parent, scratch=scratch, on_phase=partial(tell_phase, scratch))

    serve(CorpusOrder, work)


def tokenise(order: CorpusOrder, parent: Path, *, scratch: Path, on_phase: OnPhase) -> Corpus:
    """Return the corpus of an order, in a folder below ``parent``, made in ``scratch`` if new.

    Raises UsageError for data that cannot be trained on, and MachineError if the disk is full.
    """
    on_phase("reading the data")
    found = data_files(order.data)
    reward = RewardFunction(order.reward) if order.reward is not None else None
    digest = corpus_digest(order, found.files, reward.function if reward else None)
    place = parent / digest
    notes: tuple[str, ...] = ()
    if place.exists():
        try:
            return open_corpus(place).summary
        except UsageError as error:
            notes = (f"{error.problem}: the data was tokenised once more",)
        with disk_errors(parent):  # processes that have it open keep their files
            place.rename(scratch / "damaged")
    made = scratch / "corpus"
    summary = _make(order, found, reward, made, place, on_phase)
    with disk_errors(parent):
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # else another process made the same corpus meanwhile
                raise
    return summary.replace(notes=(*notes, *summary.notes))


def _make(
    order: CorpusOrder,
    found: DataFiles,
    reward: RewardFunction | None,
    made: Path,
    place: Path,
    on_phase: OnPhase,
) -> Corpus:
    """Write the corpus into ``made``, which is removed if this fails; return its summary."""
    tokens, traits = _tokens(order), TRAITS[order.objective]
    rendering = Rendering(tokens, vocab_size=order.vocab_size)
    if traits.pairs:
        render = partial(preferences, rendering)
    elif traits.advantages == "none":
        render = partial(supervised, rendering, everything=order.trained == "all")
    else:
        grouped = traits.advantages == "groups"
        render = partial(rollouts, rendering, grouped=grouped, reward=reward)
    limit = LengthLimit(order)
    with CorpusWriter(made, vocab_size=order.vocab_size) as writer:
        # A user's function runs in this process alone.
        processes = 1 if reward is not None else processes_for(found.files)
        everything = chain.from_iterable(map(records, found.files))
        rows = rendered(everything, render, processes=processes)
        what = "byte" if isinstance(tokens, Bytes) else "token"
        _write(rows, len(found.files), limit, writer, on_phase, what)
        if not writer.counts["documents"]:
            raise _nothing(order, limit)
        on_phase(f"writing {writer.counts['tokens']:,} {what}s")
        summary = Corpus(
            directory=str(place),
            digest=place.name,
            objective=order.objective,
            length_tokens=order.length_tokens,
            lengths=tuple(sorted(writer.histogram.items())),
            tokenizer="rows" if writer.given == writer.counts["documents"] else tokens.name,
            notes=_notes(order, found, tokens, writer),
            **writer.counts,
            **limit.counts,
        )
        writer.finish(summary, [file.name for file in found.files])
    return summary


def _tokens(order: CorpusOrder) -> TextTokens:
    if order.tokenizer is not None:
        return Tokenizer(Path(order.tokenizer))
    if order.vocab_size < BYTE_VOCABULARY:
        raise UsageError(
            f"without a tokenizer bytes are tokens, {BYTE_VOCABULARY} with the end of a text, and "
            f"the model knows {order.vocab_size}",
            hint="save its tokenizer into its folder, with `tokenizer.save_pretrained`",
        )
    tokens = Bytes()
    tokens.chat = ChatTemplate(tokens) if order.lengths_alone else None
    return tokens


def _write(
    rows: Iterable[tuple[DataRecord, list[Unit]]],
    files: int,
    limit: LengthLimit,
    writer: CorpusWriter,
    on_phase: OnPhase,
    what: str,
) -> None:
    """Write the units of every record, and report the number of tokens every ``TOLD_S`` seconds;
    ``what``: byte, if bytes are tokens.
    """
    told = 0.0
    for count, (record, units) in enumerate(rows, 1):
        if time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            read, made = counted(count, "record"), counted(writer.counts["tokens"], what)
            where = f", file {record.file + 1} of {files}" if files > 1 else ""
            on_phase(f"tokenising: {read}, {made}{where}")
        for unit in units:
            for fitting in limit(unit, name=record.name):
                writer.add(fitting, file=record.file, row=record.row)


def _nothing(order: CorpusOrder, limit: LengthLimit) -> UsageError:
    if limit.longest_tokens > order.length_tokens:
        hint = f"train documents whole: `--length {limit.longest_tokens}`"
    elif limit.longest_tokens > 1 and TRAITS[order.objective].is_of_plain_documents:
        hint = "train on prompts and what else there is: `--train-on all`"
    else:
        hint = "name data with text in it"
    return UsageError(
        f"nothing to train on: none of {counted(limit.counts['empty'], 'record')} has a trained "
        f"token past its first, within {order.length_tokens} tokens",
        hint=hint,
    )


def _notes(
    order: CorpusOrder, found: DataFiles, tokens: TextTokens, writer: CorpusWriter
) -> tuple[str, ...]:
    notes: list[str] = []
    if found.left_out:
        names = ", ".join(found.left_out[:3]) + (", ..." if len(found.left_out) > 3 else "")
        notes.append(
            f"{counted(len(found.left_out), 'text')} beside files of records are not trained: "
            f"{names}"
        )
    if writer.apart:
        notes.append(
            f"in {counted(writer.apart, 'document')} a token would reach from the prompt into "
            "the response: the two are tokenised by themselves, as a model sees a prompt"
        )
    if writer.chats and order.lengths_alone and order.tokenizer is None:
        notes.append("of conversations what is said is counted, and nothing that a template adds")
    elif writer.chats and tokens.chat is not None and tokens.chat.writes_the_date:
        notes.append("the chat template writes the date: that of today is in every conversation")
    alone = writer.unit_documents.count(1)
    if TRAITS[order.objective].advantages == "groups" and alone:
        notes.append(
            f"{counted(alone, 'prompt')} with a single response: with no other to compare it with, "
            "its advantage is its reward / (1 + 1e-6)"
        )
    return tuple(notes)


_CHUNK = 32
"""Records sent to a process at a time."""
_WAITING = 3
"""Chunks read ahead for each process."""
_MOST_PROCESSES = 32
_WORTH_BYTES = 16 * MIB
"""Size of data above which starting more processes saves time."""


def processes_for(files: Sequence[DataFile]) -> int:
    """Return the number of processes to render these files: 1 if they are small."""
    size = sum(path.stat().st_size for file in files for path in file.parts)
    return min(_MOST_PROCESSES, len(os.sched_getaffinity(0))) if size > _WORTH_BYTES else 1


def rendered(
    records: Iterable[DataRecord], render: Render, *, processes: int
) -> Iterator[tuple[DataRecord, list[Unit]]]:
    """Yield each record with its units, in the order of the records.

    Raises the UsageError of the first invalid record.
    """
    if processes == 1:
        yield from ((record, list(render(record))) for record in records)
        return
    waiting: deque[DataRecord] = deque()

    def read() -> Iterator[DataRecord | HighwaterError]:
        try:
            for record in records:
                waiting.append(record)
                yield record
        except HighwaterError as error:  # passed on, so that earlier records are yielded first
            yield error

    loader = DataLoader[Any](
        cast(Any, _Rendered(render)),
        batch_size=_CHUNK,
        sampler=cast(Any, read()),
        num_workers=processes,
        prefetch_factor=_WAITING,
        collate_fn=list,
        multiprocessing_context="fork",
    )
    for units in chain.from_iterable(loader):
        if isinstance(units, HighwaterError):
            raise units
        yield waiting.popleft(), units


class _Rendered(NamedTuple):
    """Dataset for a DataLoader; the records themselves are its indices."""

    render: Render

    def __getitems__(
        self, records: Sequence[DataRecord | HighwaterError]
    ) -> list[list[Unit] | HighwaterError]:
        """Return the units of each record, up to and including the first error."""
        found: list[list[Unit] | HighwaterError] = []
        for record in records:
            try:
                if isinstance(record, HighwaterError):
                    raise record
                found.append(list(self.render(record)))
            except HighwaterError as error:
                return [*found, error]
        return found


if __name__ == "__main__":
    main()
