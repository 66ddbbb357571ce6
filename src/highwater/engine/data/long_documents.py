"""Long documents: what becomes of one of more tokens than are trained, counted.

A document begins with a token that nothing precedes: it is never predicted, and a document of which
no other token is trained is left out.
"""

from collections.abc import Iterator

import numpy as np

from highwater.engine.data.rendering import TokenDocument, Unit
from highwater.errors import UsageError
from highwater.nouns.corpus import LongDocuments


class LengthLimit:
    """Cuts units to a length, and counts what it did."""

    def __init__(self, *, length_tokens: int, long_documents: LongDocuments, pairs: bool) -> None:
        """``pairs``: a unit is left out whole where one of its documents is."""
        self._length = length_tokens
        self._choice: LongDocuments = long_documents
        self._pairs = pairs
        self.truncated = 0
        self.truncated_tokens = 0
        self.split = 0
        self.empty = 0
        self.longest_tokens = 0
        """Of the documents as they came."""

    def __call__(self, unit: Unit, *, name: str) -> Iterator[Unit]:
        """The units that are trained of a unit, without those of which nothing is.

        Raises UsageError, with the record's name, for a document that is too long where none may
        be.
        """
        lengths = (len(document.ids_L) for document in unit.documents)
        self.longest_tokens = max(self.longest_tokens, *lengths)
        if self._choice == "split":
            yield from self._pieces(unit)
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

    def _pieces(self, unit: Unit) -> Iterator[Unit]:
        (document,) = unit.documents
        starts = range(0, len(document.ids_L), self._length)
        pieces = [_slice(document, start, start + self._length) for start in starts]
        kept = [piece for piece in pieces if _is_trained(piece)]
        self.split += len(pieces) > 1
        self.empty += not kept
        yield from (Unit((piece,)) for piece in kept)


def _is_trained(document: TokenDocument) -> bool:
    return bool(np.any(document.trained_L[1:]))


def _slice(document: TokenDocument, start: int, end: int) -> TokenDocument:
    logprobs_L = document.logprobs_L
    return document._replace(
        ids_L=document.ids_L[start:end],
        trained_L=document.trained_L[start:end],
        logprobs_L=None if logprobs_L is None else logprobs_L[start:end],
    )
