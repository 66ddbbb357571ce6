"""Corpora: documents that are tokenised once, for training and for evaluation.

A CorpusOrder goes to one process of the data plane; a Corpus, a folder of flat files, comes back.

Packing: as many sequences are packed into a micro-batch as a token budget holds, so that a shorter
length may pack more tokens: one that just does not go into it twice leaves almost half of it empty.

Pieces: what a memory-only trial's attention runs on in place of whole documents, in a time linear
in the length. The kernel's buffers hold so many bytes per token and head, whatever document a token
is in: the same tokens cut into pieces take the same bytes (docs/decisions/006).

Preparation: what another trainer is given for a trial beside its configuration: a model's directory
that it can open, and documents of exactly a length.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from highwater.errors import UsageError
from highwater.model.weight_files import weight_files
from highwater.nouns.codec import CONFIG_BYTES, Record, digest, read_file
from highwater.nouns.layout import Device
from highwater.nouns.objective import TRAITS, Objective
from highwater.nouns.study import Cell, Question

LongDocuments = Literal["truncate", "split", "refuse"]
TrainedTokens = Literal["all", "responses"]


def whole_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Absolute paths of data; raises UsageError for a path that does not exist."""
    for path in paths:
        if not Path(path).exists():
            raise UsageError(f"there is no {path}", hint="name a file or a folder that is there")
    return tuple(str(Path(path).absolute()) for path in paths)


class CorpusOrder(Record, frozen=True, kw_only=True):
    """A request to tokenise documents, with every setting that the tokens may depend on."""

    data: tuple[str, ...]
    """Absolute paths: files of JSON lines, Parquet or text, their folders, or saved datasets."""
    objective: Objective
    length_tokens: int
    """Tokens of the longest document that is trained."""
    tokenizer: str | None = None
    """Absolute path of a directory with a tokenizer; None: bytes are tokens."""
    vocab_size: int
    """Tokens that the model knows; ids are below."""
    long_documents: LongDocuments = "truncate"
    """Part of a longer document that is kept: its beginning, all of it in pieces, or nothing."""
    trained: TrainedTokens = "responses"
    """Tokens that are trained: the responses, if a document has prompts; ``all``: every token."""
    reward: str | None = None
    """``module:function`` that gives a response's reward to a prompt; None: the data has it."""
    lengths_alone: bool = False
    """True if only lengths are asked for: without a tokenizer, bytes of what messages say count."""

    def __post_init__(self) -> None:
        """Raise UsageError if there is no data, or if the objective cannot train on all tokens."""
        if not self.data:
            raise UsageError("nothing to train on", hint="name a file: `--data data.jsonl`")
        is_plain = TRAITS[self.objective].is_of_plain_documents
        if not is_plain and self.trained == "all":
            raise UsageError(
                f"prompts are not what {self.objective} compares: it trains responses alone",
                hint="leave `--train-on all` out",
            )
        if not is_plain and self.long_documents == "split":
            problem = (
                "a pair are not one"
                if TRAITS[self.objective].pairs
                else "a rollout have no reward of their own"
            )
            raise UsageError(
                f"pieces of {problem}",
                hint="use `--long-documents truncate` or `--long-documents refuse`",
            )


class Corpus(Record, frozen=True, kw_only=True):
    """A tokenised corpus, as its folder describes it."""

    directory: str
    """Absolute path of its folder."""
    digest: str
    """Digest of the bytes of data and tokenizer, and of the order: it names the content."""
    objective: Objective
    length_tokens: int
    documents: int
    """Sequences that are trained: a pair counts as two, a document in pieces as its pieces."""
    units: int
    """Units that a step has whole or not at all: documents, pairs, or groups of rollouts."""
    tokens: int
    trained_tokens: int
    longest_tokens: int
    """Tokens of the longest document as it is trained."""
    lengths: tuple[tuple[int, int], ...] = ()
    """A histogram: upper bounds in tokens, powers of two, each with its number of documents."""
    truncated: int = 0
    """Documents whose end is not trained."""
    truncated_tokens: int = 0
    split: int = 0
    """Documents that are trained in pieces."""
    empty: int = 0
    """Records without a token to train on, which are left out."""
    tokenizer: str = "bytes"
    """Name of the tokenizer's class, ``bytes``, or ``rows`` if all have their ids."""
    notes: tuple[str, ...] = ()
    """Notes for the user, in sentences."""


NOT_MONOTONE = (
    "with a token budget a shorter length may pack more tokens and not fit: an answer is about "
    "its own two lengths, the longest that fit and the next, which did not"
)
"""A note for readers of an answer with a token budget."""


def packed_tokens(question: Question, cell: Cell, index: int) -> int:
    """Tokens of one micro-batch if its sequences have the grid's length number ``index``."""
    length_tokens = question.grid.length(index)
    return length_tokens * cell.settings.sequences(
        length_tokens, context_degree=cell.layout.context_degree
    )


def least_packed(question: Question, cell: Cell, size: int) -> int:
    """Number, in the grid's first ``size``, of the length with the fewest tokens a micro-batch."""
    shortest = (first for first, _ in question.growing_ranges(cell, size))
    return min(shortest, key=partial(packed_tokens, question, cell), default=1)


class _PieceRange(NamedTuple):
    """Fewest and most tokens that a piece of a document may have on a device."""

    shortest: int
    longest: int
    block: int
    """Rows that the kernels round up to in what they allocate."""


_RANGES: Mapping[Device, _PieceRange] = {
    # What is cut has more than 16,384 tokens: even with a single head no kernel then splits keys
    # for want of work.
    "cuda": _PieceRange(4096, 16384, 128),
    # From 768 on PyTorch's scratch does not depend on the length. Source: ATen,
    # FlashAttentionKernel.cpp.
    "cpu": _PieceRange(768, 1535, 1),
}
_MOST_PADDING = 0.005
"""Share by which the rounded buffers of pieces may exceed those of the whole."""


def pieces(tokens: int, device: Device) -> int | None:
    """Pieces that a memory-only trial cuts ``tokens`` into; 1: it stays whole; None: it cannot."""
    shortest, longest, block = _RANGES[device]
    if tokens <= longest:
        return 1
    counts = range(tokens // shortest, tokens // longest, -1)
    equal = (count for count in counts if tokens % count == 0)
    best = min(equal, key=lambda count: _padded(tokens, count, block), default=None)
    most = (1 + _MOST_PADDING) * _padded(tokens, 1, block)
    return None if best is None or _padded(tokens, best, block) > most else best


def _padded(tokens: int, count: int, block: int) -> int:
    """Tokens of ``count`` equal pieces, each rounded up to a multiple of ``block``."""
    return count * (-(-tokens // count // block) * block)


DocumentKind = Literal["text", "prompt"]
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    *("tekken.json", "tiktoken.model"),
)
"""Names of files, of which each tokenizer has at least one."""
_MADE_AS = 1
"""Version of what is made, raised when the same order makes another directory."""


class MissingFiles(NamedTuple):
    """Files of a model's directory that another trainer opens and that are not there."""

    weights: bool
    tokenizer: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on what replaces missing weights and a missing tokenizer."""
        said = {
            "its weights are not here: random ones, in bfloat16, are trained": self.weights,
            "its tokenizer is not here: one with a token for each word is used": self.tokenizer,
        }
        return tuple(note for note, is_missing in said.items() if is_missing)


def missing_files(directory: Path) -> MissingFiles:
    """Files that a model's directory lacks; ModelError for weights of a part of a model."""
    has_tokenizer = any((directory / name).is_file() for name in _TOKENIZERS)
    return MissingFiles(weights=not weight_files(directory), tokenizer=not has_tokenizer)


def prepared_name(source: Path, seed: int, missing: MissingFiles) -> str:
    """Name of the directory with a completed model; it changes with files, seed and version."""
    files = {
        path.name: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in source.iterdir()
        if path.is_file()
    }
    files["config.json"] = (0, 0)  # its content is in the digest
    made = [
        _MADE_AS,
        seed,
        *missing,
        read_file(source / "config.json", most_bytes=CONFIG_BYTES).decode(),
    ]
    place = "" if set(files) == {"config.json"} else str(source)
    return f"{source.name[:60]}-{digest([made, sorted(files.items()), place])[:16]}"


class DocumentOrder(Record, frozen=True, kw_only=True):
    """Made-up documents that are written for a trial of another trainer."""

    path: str
    """Absolute path of the file of documents, JSON a line."""
    kind: DocumentKind
    """``text``: a whole sequence, to be ended by one token. ``prompt``: what is completed."""
    length_tokens: int
    """Tokens of each document as the model sees it."""
    count: int
    end: str | None = None
    """The text that ends a document; None: the tokenizer's own."""


class PreparationOrder(Record, frozen=True, kw_only=True):
    """What to write before a trial of another trainer: documents, and a model's missing files."""

    model_directory: str
    """Absolute path of the user's directory, or the catalog's: it has ``config.json`` at least."""
    cache_directory: str
    """Absolute path of a cache; a directory in it gets what the model's directory lacks."""
    documents: DocumentOrder | None = None
    """None: the trainer has its own."""
    seed: int = 0


class Prepared(Record, frozen=True, kw_only=True):
    """The model's directory that another trainer's trial reads, once it is complete."""

    model_directory: str
    """The directory to train from: the order's, or one in the cache."""
