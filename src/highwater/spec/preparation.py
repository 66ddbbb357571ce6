"""Preparation: what another trainer is given for a trial beside its configuration, as the door's
JSON says it: a model's directory that it can open, and documents of exactly a length.
"""

from typing import Literal

from highwater.spec.codec import Record

ORDER_FILE, PREPARED_FILE = "order.json", "prepared.json"
DocumentKind = Literal["text", "prompt"]


class PreparationOrder(Record, frozen=True, kw_only=True):
    """What is to be prepared."""

    model_directory: str
    """Absolute path of the user's directory, or the catalog's: it has ``config.json`` at least."""
    cache_directory: str
    """Absolute path below which a directory is kept that has what is missing there."""
    scratch_directory: str
    """Absolute path of a folder beside those, in which it is made; gone after the order."""
    documents_path: str
    """Absolute path of the file of documents, JSON a line."""
    kind: DocumentKind
    """``text``: a whole sequence, whose end the trainer marks with one token. ``prompt``: what is
    completed, without an end."""
    length_tokens: int
    """Tokens of each document as the model sees it."""
    documents: int
    end: str | None = None
    """The text that ends a document; None: the tokenizer's own."""
    seed: int = 0


class Refused(Record, frozen=True, kw_only=True):
    """Why nothing could be prepared, as a user is told."""

    problem: str
    hint: str


class Prepared(Record, frozen=True, kw_only=True):
    """What was prepared."""

    model_directory: str = ""
    """The directory to train from: the order's, or one in the cache."""
    notes: tuple[str, ...] = ()
    """What is not the user's own in it, for readers."""
    refused: Refused | None = None
