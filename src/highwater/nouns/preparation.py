"""Preparation: what another trainer is given for a trial beside its configuration, as the door's
JSON says it: a model's directory that it can open, and documents of exactly a length.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from highwater.model.weight_files import weight_files
from highwater.nouns.codec import Record, digest
from highwater.nouns.files import CONFIG_BYTES, read_file

DocumentKind = Literal["text", "prompt"]
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    *("tekken.json", "tiktoken.model"),
)
"""Files of which every tokenizer has one."""
_MADE_AS = 1
"""Counted up where the same order makes another directory."""


class MissingFiles(NamedTuple):
    """What a model's directory does not have of what another trainer opens."""

    weights: bool
    tokenizer: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What is taken instead, for readers."""
        said = {
            "its weights are not here: random ones, in bfloat16, are trained": self.weights,
            "its tokenizer is not here: one with a token for each word is used": self.tokenizer,
        }
        return tuple(note for note, is_missing in said.items() if is_missing)


def missing_files(directory: Path) -> MissingFiles:
    """What is missing in a model's directory.

    Raises ModelError for weights that are not a whole model's.
    """
    has_tokenizer = any((directory / name).is_file() for name in _TOKENIZERS)
    return MissingFiles(weights=not weight_files(directory), tokenizer=not has_tokenizer)


def prepared_name(source: Path, seed: int, missing: MissingFiles) -> str:
    """The name of the made directory: another one for other files, wherever they lie."""
    files = {
        path.name: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in source.iterdir()
        if path.is_file()
    }
    files["config.json"] = (0, 0)  # by what is in it
    made = [
        _MADE_AS,
        seed,
        *missing,
        read_file(source / "config.json", most_bytes=CONFIG_BYTES).decode(),
    ]
    place = "" if set(files) == {"config.json"} else str(source)
    return f"{source.name[:60]}-{digest([made, sorted(files.items()), place])[:16]}"


class DocumentOrder(Record, frozen=True, kw_only=True):
    """Documents that are to be written."""

    path: str
    """Absolute path of the file of documents, JSON a line."""
    kind: DocumentKind
    """``text``: a whole sequence, whose end the trainer marks with one token. ``prompt``: what is
    completed, without an end."""
    length_tokens: int
    """Tokens of each document as the model sees it."""
    count: int
    end: str | None = None
    """The text that ends a document; None: the tokenizer's own."""


class PreparationOrder(Record, frozen=True, kw_only=True):
    """What is to be prepared."""

    model_directory: str
    """Absolute path of the user's directory, or the catalog's: it has ``config.json`` at least."""
    cache_directory: str
    """Absolute path below which a directory is kept that has what is missing there."""
    documents: DocumentOrder | None = None
    """None: the trainer has its own."""
    seed: int = 0


class Prepared(Record, frozen=True, kw_only=True):
    """What was prepared."""

    model_directory: str
    """The directory to train from: the order's, or one in the cache."""
