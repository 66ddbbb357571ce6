"""The process that tokenises a corpus once, without a GPU: ``python -m
highwater.engine.data.tokenise ORDER.json ANSWER.json PARENT_FOLDER``.

The folder of the answer is where the corpus is made, on the disk of the parent folder, in which it
is kept under its digest. A corpus that is there is not made again.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from highwater.engine.data.corpus_digest import corpus_digest
from highwater.engine.data.data_files import DataFiles, data_files
from highwater.engine.data.long_documents import LengthLimit
from highwater.engine.data.preference_pairs import preferences
from highwater.engine.data.readers import records
from highwater.engine.data.render_processes import PlacedRecord, processes_for, rendered
from highwater.engine.data.rendering import Render, Rendering, supervised
from highwater.engine.data.rollouts import RewardFunction, rollouts
from highwater.engine.data.store import CorpusWriter, disk_errors, open_corpus
from highwater.engine.data.text_tokens import BYTE_VOCABULARY, Bytes, TextTokens, Tokenizer
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.corpus import Corpus, CorpusOrder, Tokenised
from highwater.nouns.objective import TRAITS
from highwater.nouns.preparation import Refused
from highwater.nouns.protocols import TOLD_S, OnPhase
from highwater.nouns.trial import PHASE_FILE
from highwater.units import counted


def main() -> None:
    """Tokenise what the order says, or leave word why it cannot be."""
    order_path, answer_path, parent = map(Path, sys.argv[1:])
    order = from_json(order_path.read_bytes(), CorpusOrder)
    scratch = answer_path.parent
    try:
        corpus = tokenise(order, parent, scratch=scratch, on_phase=partial(_tell, scratch))
        answer = Tokenised(corpus=corpus)
    except HighwaterError as error:
        answer = Tokenised(
            refused=Refused(problem=error.problem, hint=error.hint),
            is_machine=isinstance(error, MachineError),
        )
    answer_path.write_text(to_json(answer), encoding="utf-8")


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
    summary = _make(order, found, reward, made, digest, place, on_phase)
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
    digest: str,
    place: Path,
    on_phase: OnPhase,
) -> Corpus:
    """Write the corpus into ``made``, which is gone again where that fails."""
    tokens = _tokens(order)
    rendering = Rendering(tokens, vocab_size=order.vocab_size)
    limit = LengthLimit(
        length_tokens=order.length_tokens,
        long_documents=order.long_documents,
        pairs=TRAITS[order.objective].pairs,
    )
    with CorpusWriter(made, vocab_size=order.vocab_size) as writer:
        # A function of the user's runs in this process alone.
        processes = 1 if reward is not None else processes_for(found.files)
        render = _render(order, rendering, reward)
        _write(found, render, limit, writer, on_phase, processes=processes)
        if not writer.documents:
            raise _nothing(order, limit)
        on_phase(f"writing {writer.tokens:,} tokens")
        notes = _notes(order, found, rendering, writer)
        summary = Corpus(
            directory=str(place),
            digest=digest,
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


def _render(order: CorpusOrder, rendering: Rendering, reward: RewardFunction | None) -> Render:
    traits = TRAITS[order.objective]
    if traits.pairs:
        return preferences(rendering)
    if traits.advantages == "none":
        return supervised(rendering, trained=order.trained)
    return rollouts(rendering, grouped=traits.advantages == "groups", reward=reward)


def _write(
    found: DataFiles,
    render: Render,
    limit: LengthLimit,
    writer: CorpusWriter,
    on_phase: OnPhase,
    *,
    processes: int,
) -> None:
    """Read, render and write every record, and say twice a second how far that is."""
    told = 0.0
    everything = (
        PlacedRecord(number, record)
        for number, file in enumerate(found.files)
        for record in records(file)
    )
    for count, (placed, units) in enumerate(rendered(everything, render, processes=processes), 1):
        if time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            on_phase(_progress(count, writer.tokens, placed.file, len(found.files)))
        for unit in units:
            for fitting in limit(unit, name=placed.record.name):
                writer.add(fitting, file=placed.file, row=placed.record.row)


def _progress(count: int, tokens: int, file: int, files: int) -> str:
    where = f", file {file + 1} of {files}" if files > 1 else ""
    return f"tokenising: {counted(count, 'record')}, {counted(tokens, 'token')}{where}"


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
    """What a user should know of the corpus."""
    notes: list[str] = []
    if found.left_out:
        notes.append(
            f"{counted(len(found.left_out), 'text')} beside files of records are not trained: "
            f"{_some(found.left_out)}"
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _tell(folder: Path, phase: str) -> None:
    """Leave word of what is done, for whoever waits. Nothing depends on it."""
    with suppress(OSError):
        partial_path = folder / f"{PHASE_FILE}.partial"
        partial_path.write_text(phase, encoding="utf-8")
        partial_path.replace(folder / PHASE_FILE)


if __name__ == "__main__":
    main()
