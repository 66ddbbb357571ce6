"""Corpora: what is tokenised once, for training and for evaluation, and what came of it.

A CorpusOrder goes to one process of the data plane, and a Corpus comes back: a folder of flat files
that ranks map into memory.
"""

from typing import Literal

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.objective import TRAITS, Objective

LongDocuments = Literal["truncate", "split", "refuse"]
TrainedTokens = Literal["all", "responses"]


class CorpusOrder(Record, frozen=True, kw_only=True):
    """What is to be tokenised, and how; everything that the tokens may depend on."""

    data: tuple[str, ...]
    """Absolute paths: files of JSON lines, of Parquet or of plain text, folders of them, or folders
    that ``datasets`` saved."""
    objective: Objective
    length_tokens: int
    """The longest document that is trained."""
    tokenizer: str | None = None
    """Absolute path of a directory with a tokenizer; None: bytes are tokens."""
    vocab_size: int
    """Tokens that the model knows; ids are below."""
    long_documents: LongDocuments = "truncate"
    """What becomes of a document of more tokens: its beginning is trained, or all of it in pieces,
    or nothing is."""
    trained: TrainedTokens = "responses"
    """What is trained on: the responses, where a document has prompts; ``all``: every token."""
    reward: str | None = None
    """``module:function`` that gives the reward of a response to a prompt; None: the data has
    it."""

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be."""
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
    """A tokenised corpus, as its folder says."""

    directory: str
    """Absolute path of its folder."""
    digest: str
    """Digest of the data's bytes, the tokenizer's, and the order: another content is another
    corpus."""
    objective: Objective
    length_tokens: int
    documents: int
    """Sequences that are trained: of a pair two, of a document in pieces its pieces."""
    units: int
    """What a step has all of or nothing: a document, a pair, a group of rollouts."""
    tokens: int
    trained_tokens: int
    longest_tokens: int
    """Tokens of the longest document as it is trained."""
    lengths: tuple[tuple[int, int], ...] = ()
    """A histogram: an upper bound in tokens, a power of two, and how many documents are up to it
    and past the one before."""
    truncated: int = 0
    """Documents whose end is not trained."""
    truncated_tokens: int = 0
    split: int = 0
    """Documents that are trained in pieces."""
    empty: int = 0
    """Records without a token to train on, which are left out."""
    tokenizer: str = "bytes"
    """Name of the tokenizer's class, or ``bytes``."""
    notes: tuple[str, ...] = ()
    """What a user should know of it, in sentences."""
