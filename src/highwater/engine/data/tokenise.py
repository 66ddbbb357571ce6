"""The process that tokenises a corpus once, without a GPU: ``python -m
highwater.engine.data.tokenise ORDER.json REPORT.json PARENT_FOLDER``.

The folder of the report is where the corpus is made, on the disk of the parent folder, in which it
is kept under its digest: of all that its tokens may depend on, and of nothing else, so that the
same data in another folder is the same corpus. A corpus that is there is not made again.
"""

import inspect
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from highwater.engine.data.data_files import DataFile, DataFiles, bytes_digest, data_files, records
from highwater.engine.data.record_fields import DataRecord
from highwater.engine.data.rendering import (
    Rendering,
    TokenDocument,
    Unit,
    processes_for,
    rendered,
    supervised,
)
from highwater.engine.data.rollouts import RewardFunction, preferences, rollouts
from highwater.engine.data.store import CorpusWriter, disk_errors, open_corpus
from highwater.engine.data.text_tokens import BYTE_VOCABULARY, Bytes, TextTokens, Tokenizer
from highwater.errors import UsageError
from highwater.nouns.codec import CONFIG_BYTES, digest, read_file
from highwater.nouns.corpus import Corpus, CorpusOrder
from highwater.nouns.objective import TRAITS
from highwater.nouns.trial import TOLD_S, OnPhase, serve, tell_phase
from highwater.units import counted


class LengthLimit:
    """Cuts units to a length, and counts what it did. A document's first token is never predicted:
    one of which no other is trained is left out.
    """

    def __init__(self, order: CorpusOrder) -> None:
        self._length, self._choice = order.length_tokens, order.long_documents
        self._pairs = TRAITS[order.objective].pairs
        """True if a unit is left out whole where one of its documents is."""
        self.truncated = self.truncated_tokens = self.split = self.empty = self.longest_tokens = 0
        """Counts of documents, and the longest one before it was cut."""

    def __call__(self, unit: Unit, *, name: str) -> Iterator[Unit]:
        """The units that are trained of a unit, without those of which nothing is.

        Raises UsageError, with the record's name, for a document that is too long where none may
        be.
        """
        lengths = (len(document.ids_L) for document in unit.documents)
        self.longest_tokens = max(self.longest_tokens, *lengths)
        if self._choice == "split":
            (document,) = unit.documents
            starts = range(0, len(document.ids_L), self._length)
            pieces = [_slice(document, start, start + self._length) for start in starts]
            trained = [piece for piece in pieces if _is_trained(piece)]
            self.split += len(pieces) > 1
            self.empty += not trained
            yield from (Unit((piece,)) for piece in trained)
            return
        documents = [self._cut(document, name) for document in unit.documents]
        kept = tuple(document for document in documents if _is_trained(document))
        if len(kept) < len(documents):
            self.empty += 1 if self._pairs else len(documents) - len(kept)
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
        self.truncated += 1
        self.truncated_tokens += over
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
"""Counted up where the same order makes other files."""
_OF_A_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*", "vocab*", "merges.txt", "*.model", "tekken.json"),
)
"""Names of the files that a tokenizer is made of."""


def corpus_digest(order: CorpusOrder, files: Sequence[DataFile], reward: Any | None) -> str:
    """16 digits that name what an order makes of these files; ``reward`` is the function that the
    order names.
    """
    data = [(file.name, bytes_digest(file.parts)) for file in files]
    choices = (
        *(order.objective, order.length_tokens, order.vocab_size),
        *(order.long_documents, order.trained, order.reward),
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
    family = None  # by which transformers chooses a tokenizer's class where its files do not say
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads(read_file(folder / "config.json", most_bytes=CONFIG_BYTES))
        family = str(config.get("model_type"))
    return digests, family


def main() -> None:
    """Tokenise what the order says, or leave word why it cannot be."""
    parent = Path(sys.argv[3])

    def work(order: CorpusOrder, scratch: Path) -> Corpus:
        return tokenise(order, parent, scratch=scratch, on_phase=partial(tell_phase, scratch))

    serve(CorpusOrder, work)


def tokenise(order: CorpusOrder, parent: Path, *, scratch: Path, on_phase: OnPhase) -> Corpus:
    """The corpus of an order, in a folder below ``parent``, made in ``scratch`` where it is not
    there yet.

    Raises UsageError for data that cannot be trained on, and MachineError where the disk refuses.
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
        with disk_errors(parent):  # who has it open keeps what is open
            place.rename(scratch / "damaged")
    made = scratch / "corpus"
    summary = _make(order, found, reward, made, place, on_phase)
    with disk_errors(parent):
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # else somebody made the same meanwhile
                raise
    return msgspec.structs.replace(summary, notes=(*notes, *summary.notes))


def _make(
    order: CorpusOrder,
    found: DataFiles,
    reward: RewardFunction | None,
    made: Path,
    place: Path,
    on_phase: OnPhase,
) -> Corpus:
    """Write the corpus into ``made``, which is gone again where that fails."""
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
        # A function of the user's runs in this process alone.
        processes = 1 if reward is not None else processes_for(found.files)
        everything = chain.from_iterable(map(records, found.files))
        rows = rendered(everything, render, processes=processes)
        _write(rows, len(found.files), limit, writer, on_phase)
        if not writer.documents:
            raise _nothing(order, limit)
        on_phase(f"writing {writer.tokens:,} tokens")
        notes = _notes(order, found, rendering, writer)
        summary = Corpus(
            directory=str(place),
            digest=place.name,
            objective=order.objective,
            length_tokens=order.length_tokens,
            documents=writer.documents,
            units=writer.units,
            tokens=writer.tokens,
            trained_tokens=writer.trained_tokens,
            longest_tokens=writer.longest_tokens,
            lengths=writer.lengths,
            truncated=limit.truncated,
            truncated_tokens=limit.truncated_tokens,
            split=limit.split,
            empty=limit.empty,
            tokenizer=tokens.name,
            notes=notes,
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
    return Bytes()


def _write(
    rows: Iterable[tuple[DataRecord, list[Unit]]],
    files: int,
    limit: LengthLimit,
    writer: CorpusWriter,
    on_phase: OnPhase,
) -> None:
    """Write the units of every record, and say twice a second how far that is."""
    told = 0.0
    for count, (record, units) in enumerate(rows, 1):
        if time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            read, made = counted(count, "record"), counted(writer.tokens, "token")
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
        f"nothing to train on: none of {counted(limit.empty, 'record')} has a trained token past "
        f"its first, within {order.length_tokens} tokens",
        hint=hint,
    )


def _notes(
    order: CorpusOrder, found: DataFiles, rendering: Rendering, writer: CorpusWriter
) -> tuple[str, ...]:
    """Notes for the user about the corpus."""
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
    chat = rendering.tokens.chat
    if writer.chats and chat is not None and chat.writes_the_date:
        notes.append("the chat template writes the date: that of today is in every conversation")
    if TRAITS[order.objective].advantages == "groups" and (alone := writer.units_of_one):
        notes.append(
            f"{counted(alone, 'prompt')} with a single response: with no other to compare it with, "
            "its advantage is its reward / (1 + 1e-6)"
        )
    return tuple(notes)


if __name__ == "__main__":
    main()
