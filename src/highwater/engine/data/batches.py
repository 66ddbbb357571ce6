"""Batches: documents packed into one row, with all metadata that a step needs on the host.
Documents come from a trial's seed, or from a user's function (``module:function``) or own loop; a
user's documents are checked here.

Shapes:  T packed tokens of a micro-batch, or this rank's share of them  N trained tokens among
         those  D documents P documents whose last token this rank has  L tokens of one document
"""

import hashlib
import importlib
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from highwater.engine.parallel.mesh import SequenceGroups
from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout
from highwater.errors import UsageError
from highwater.nouns.trial import TrialSpec

UNTRAINED = -100
"""Label of a token that is not trained on, as in Hugging Face."""


class Document(NamedTuple):
    """One document as ids, and what objectives need of it besides, such as its reward."""

    ids_L: Tensor
    labels_L: Tensor
    """Each token's own id, or UNTRAINED; a document's first token is never predicted."""
    reward: float = 0.0
    group: int = 0
    """Number of the group of sequences of one prompt, whose rewards GRPO compares; the same on all
    data ranks of a step."""
    old_logprobs_L: Tensor | None = None
    """Log-probability of each token when sampled; None: the policy's before the step is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch of one rank: packed documents, their labels, positions and rewards."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    """Positions of the tokens, counted from 0 in every document."""
    document_lengths: tuple[int, ...]
    trained_positions_N: Tensor
    """Indices in ``input_ids_T`` at which trained tokens are predicted: one before their own."""
    labels_N: Tensor
    """Ids of the trained tokens."""
    documents_N: Tensor
    """Number of the document that each trained token is in."""
    old_logprobs_N: Tensor | None
    """Log-probabilities of the trained tokens when they were sampled: NaN in documents without
    them; None if no document has them."""
    ends_P: Tensor
    """Indices in ``input_ids_T`` of documents' last tokens."""
    ended_P: Tensor
    """Number of the document that each of ``ends_P`` is in."""
    rewards: tuple[float, ...]
    """Reward of each document."""
    groups: tuple[int, ...]
    """Group of each document."""
    padding_tokens: int = 0
    """Tokens added to this rank's share to make all shares one length; they train nothing."""
    shared: "Shared | None" = None
    """Whole micro-batch of which this is a rank's share; None if this is whole."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on ``device``."""
        names = (field.name for field in fields(self))
        return replace(
            self, **{n: t.to(device) for n in names if isinstance(t := getattr(self, n), Tensor)}
        )


class Shared(NamedTuple):
    """What one rank holds of a micro-batch that several ranks share, in host memory."""

    whole: Batch
    layout: SequenceLayout
    trained_N: Tensor
    """Index of each of the rank's trained tokens among the whole micro-batch's trained tokens."""


def share_of(batch: Batch, shared: SequenceGroups) -> Batch:
    """Return this rank's share of a micro-batch that the ranks of ``shared`` share."""
    return shard(batch, shared.layout_of(batch.document_lengths), rank=shared.rank)


def shard(batch: Batch, layout: SequenceLayout, *, rank: int) -> Batch:
    """Return one rank's share of a micro-batch, by the layout.

    Labels are taken from the whole row, so that the last token of a slice or chunk predicts its
    true next token. Padding trains nothing, and no token attends to it. ``document_lengths`` remain
    those of the whole row.
    """
    share = layout.share_of(rank)
    positions_T = torch.from_numpy(share.positions_T)
    is_token_T = positions_T != PADDING
    own_S = torch.full((layout.tokens,), PADDING)
    own_S[positions_T[is_token_T]] = is_token_T.nonzero()[:, 0]
    trained_N, ends_P = own_S[batch.trained_positions_N], own_S[batch.ends_P]
    mine_N, here_P = trained_N != PADDING, ends_P != PADDING
    return replace(
        batch,
        input_ids_T=batch.input_ids_T[positions_T].where(is_token_T, 0),
        position_ids_T=torch.from_numpy(share.offsets_T),
        trained_positions_N=trained_N[mine_N],
        labels_N=batch.labels_N[mine_N],
        documents_N=batch.documents_N[mine_N],
        old_logprobs_N=None if batch.old_logprobs_N is None else batch.old_logprobs_N[mine_N],
        ends_P=ends_P[here_P],
        ended_P=batch.ended_P[here_P],
        padding_tokens=share.padding_tokens,
        shared=Shared(batch, layout, mine_N.nonzero()[:, 0]),
    )


def digest(micro_batches: Sequence[Batch]) -> Tensor:
    """Return a 64-bit digest of the micro-batches' content, shape (1,), to compare ranks."""
    found = hashlib.sha256()
    for batch in micro_batches:
        for field in fields(batch):
            value = getattr(batch, field.name)
            found.update(
                value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            )
    return torch.frombuffer(bytearray(found.digest()[:8]), dtype=torch.long)


def pack(documents: Sequence[Document]) -> Batch:
    """Pack documents into one row."""
    lengths = torch.tensor([len(document.ids_L) for document in documents])
    labels_T = torch.cat([without_first(document.labels_L) for document in documents])
    trained_T = (labels_T != UNTRAINED).nonzero()[:, 0]
    return Batch(
        input_ids_T=torch.cat([document.ids_L for document in documents]),
        position_ids_T=torch.cat([torch.arange(len(document.ids_L)) for document in documents]),
        document_lengths=tuple(lengths.tolist()),
        trained_positions_N=trained_T - 1,
        labels_N=labels_T[trained_T],
        documents_N=torch.repeat_interleave(torch.arange(len(documents)), lengths)[trained_T],
        old_logprobs_N=_sampled(documents, trained_T),
        ends_P=lengths.cumsum(0) - 1,
        ended_P=torch.arange(len(documents)),
        rewards=tuple(document.reward for document in documents),
        groups=tuple(document.group for document in documents),
    )


def _sampled(documents: Sequence[Document], trained_T: Tensor) -> Tensor | None:
    if all(document.old_logprobs_L is None for document in documents):
        return None
    known = (
        torch.full(document.ids_L.shape, math.nan)
        if document.old_logprobs_L is None
        else document.old_logprobs_L
        for document in documents
    )
    return torch.cat(list(known))[trained_T]


def without_first(labels: Tensor) -> Tensor:
    """Return a document's labels with the first token untrained: nothing precedes it."""
    labels = labels.clone()
    labels[0] = UNTRAINED
    return labels


_FIELDS = ("input_ids", "labels", "reward", "group", "logprobs")
"""Fields of a document that is a mapping."""
_EXAMPLE = "`[{'input_ids': [1, 2, 3], 'labels': [-100, 2, 3]}]`"
"""One micro-batch, as hints show it."""
_LISTS = f"yield lists of documents: {_EXAMPLE}"
_MOST_SEEN = 60
_MOST_GROUPS = 2**63
"""Bound of a group's number, which ranks exchange in 64 bits."""
_Fault = tuple[str, str]
"""Reason why documents cannot be trained, and a hint."""


def read_documents(
    micro_batch: Any, spec: TrialSpec, *, source: str, vocab_size: int, window_tokens: int | None
) -> list[Document]:
    """Return the documents of a micro-batch that the user's function ``source`` yielded.

    Raises UsageError for documents that cannot be trained; ``window_tokens``: longest document that
    a ring can train; None: any. The sum of their lengths is not checked.
    """
    if isinstance(micro_batch, str | bytes | Mapping) or not isinstance(micro_batch, Iterable):
        raise _refused(source, f"{seen(micro_batch)} as a micro-batch", _LISTS)
    documents = [_document(document, source) for document in cast(Iterable[Any], micro_batch)]
    if not documents or not all(map(_is_whole, documents)):
        what = "a micro-batch that is not documents of token ids with labels (and logprobs) of the"
        raise _refused(source, f"{what} same length", _LISTS)
    faults = [
        *chain.from_iterable(_faults_of_ids(each, vocab_size) for each in documents),
        *_faults_of_length(max(len(each.ids_L) for each in documents), spec, window_tokens),
        *chain.from_iterable(map(_faults_of_numbers, documents)),
    ]
    if spec.settings.traits.pairs and len(documents) % 2:
        what = f"{len(documents)} documents in a micro-batch, and {spec.settings.objective} trains"
        faults.append((f"{what} on pairs", "yield chosen, rejected, chosen, rejected, ..."))
    for what, hint in faults:
        raise _refused(source, what, hint)
    return documents


def seen(value: Any) -> str:
    """Return a value's text for a message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= _MOST_SEEN else f"{text[:_MOST_SEEN]}..."


def _refused(source: str, what: str, hint: str) -> UsageError:
    return UsageError(f"{source} yielded {what}", hint=hint)


def _document(document: Any, source: str) -> Document:
    """Read a mapping with ``input_ids``, or token ids; without ``labels`` all are trained."""
    is_mapping = isinstance(document, Mapping)
    fields: dict[Any, Any] = dict(cast(Any, document)) if is_mapping else {"input_ids": document}
    unread = [str(name) for name in fields if name not in _FIELDS]
    if unread or "input_ids" not in fields:
        what = f"the field {unread[0]!r}, which nobody reads" if unread else "no input_ids"
        raise _refused(source, f"a document with {what}", f"its fields are {', '.join(_FIELDS)}")

    def read(field: str, meant: str, convert: Callable[[Any], Any]) -> Any:
        try:
            return convert(fields[field])
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            what = f"a document whose {field} is not {meant}: {seen(fields[field])}"
            raise _refused(source, what, f"for example {_EXAMPLE}") from error

    def numbers(field: str) -> Tensor:
        return read(field, "a list of numbers", lambda each: torch.as_tensor(each).detach().cpu())

    def whole_numbers(field: str) -> Tensor:
        found = numbers(field)
        return read(field, "whole numbers", lambda _: _as_whole(found))

    ids = whole_numbers("input_ids")
    labels = ids if fields.get("labels") is None else whole_numbers("labels")
    is_sampled = fields.get("logprobs") is not None
    logprobs = numbers("logprobs").to(torch.float32) if is_sampled else None
    reward = read("reward", "a number", _as_number) if "reward" in fields else 0.0
    group = read("group", "a whole number", operator.index) if "group" in fields else 0
    return Document(ids, labels, reward=reward, group=group, old_logprobs_L=logprobs)


def _as_whole(found: Tensor) -> Tensor:
    kind = found.dtype
    if found.numel() and (kind.is_floating_point or kind.is_complex or kind == torch.bool):
        raise TypeError
    return found.to(torch.long)


def _as_number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError
    return float(value)


def _is_whole(document: Document) -> bool:
    ids, beside = document.ids_L, (document.labels_L, document.old_logprobs_L)
    same = all(each is None or each.shape == ids.shape for each in beside)
    return ids.ndim == 1 and len(ids) > 0 and same


def _faults_of_ids(document: Document, vocab_size: int) -> Iterator[_Fault]:
    ids_L, labels_L = document.ids_L, document.labels_L
    if ((ids_L < 0) | (ids_L >= vocab_size)).any():
        yield f"token ids outside 0..{vocab_size - 1}", "use the model's own tokenizer"
    foreign = labels_L[(labels_L != UNTRAINED) & ((labels_L < 0) | (labels_L >= vocab_size))]
    if len(foreign):
        yield (
            f"the label {int(foreign[0])}, neither {UNTRAINED} nor a token id in "
            f"0..{vocab_size - 1}",
            f"label a token with its own id to train on it, with {UNTRAINED} not to",
        )


def _faults_of_length(longest: int, spec: TrialSpec, window_tokens: int | None) -> Iterator[_Fault]:
    if longest > spec.length_tokens:
        yield (
            f"a document of {longest:,} tokens for a length of {spec.length_tokens:,}",
            f"cut documents to {spec.length_tokens} tokens, or begin with a length of "
            f"`{longest}` or more",
        )
    if window_tokens is not None and longest > window_tokens:
        yield (
            f"a document of {longest:,} tokens, past the sliding window of {window_tokens:,} in "
            f"which {spec.model_name} attends, and a ring shares only what all layers attend to "
            "whole",
            f"cut documents to {window_tokens} tokens, or use `--ulysses` in the place of `--ring`",
        )


def _faults_of_numbers(document: Document) -> Iterator[_Fault]:
    if not abs(document.reward) <= torch.finfo(torch.float32).max:  # nor is NaN
        yield f"a document with the reward {document.reward}", "yield finite rewards"
    is_trained, logprobs = without_first(document.labels_L) != UNTRAINED, document.old_logprobs_L
    if logprobs is not None and not logprobs[is_trained].isfinite().all():
        yield (
            "a document whose logprobs are not finite at tokens that are trained on",
            "yield each token's log-probability when it was sampled, or no `logprobs` for that "
            "document",
        )
    if not -_MOST_GROUPS <= document.group < _MOST_GROUPS:
        what = f"a document of the group {document.group}"
        yield what, "number groups by whole numbers of 64 bits"


def user_function(source: str, keywords: Iterable[str], *, what: str, define: str) -> Any:
    """Return the user's function that ``source`` names, after a check that it takes ``keywords``.
    No other code comes from the working directory. For messages, ``what`` says what the function is
    for, and ``define`` how to write it. Raises UsageError if not found, or if it takes others.
    """
    module, colon, name = source.partition(":")
    if not (module and colon and name):
        raise UsageError(
            f"{what} {source!r} is not module:function",
            hint="name both: `rewards:length` is the function `length` in rewards.py",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file random.py there must not replace Python's module
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = "check the name, and that it is in this folder, or that PYTHONPATH has its folder"
        raise UsageError(f"{what} {source!r}: {error}", hint=hint) from error
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{source} cannot be called with {', '.join(keywords)}: {error}",
            hint=f"define it as `{define}`: names that it does not need go into `**_`",
        ) from error
    return function


def batches(
    spec: TrialSpec, *, vocab_size: int, data_rank: int, window_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield micro-batches endlessly for one data-parallel rank: synthetic, or from ``spec.data``.

    ``window_tokens``: longest document that a ring can train; None: any.

    Synthetic sequences are numbered, and a number is the same sequence on any layout: data ranks
    take turns, a micro-batch each, so that a step has the same sequences on any number of ranks.

    A user's function, ``module:function``, is called with ``data_rank``, ``data_parallel_degree``,
    ``length_tokens`` and ``sequences`` as keywords, and again when it runs out. It yields
    micro-batches of ``length_tokens * sequences`` tokens: each a sequence of documents of at most
    ``length_tokens`` tokens, each document token ids or a mapping with ``input_ids`` and optionally
    ``labels``, ``reward``, ``group`` and ``logprobs``. ``group`` is a whole number that sequences
    of one prompt share, in any micro-batch and on any data rank of the step; sequences without it
    are one group. ``logprobs`` has a number for every token, its log-probability when it was
    sampled, which is used if the token is trained. For a document without ``logprobs`` those of
    the policy before the step are used.

    Raises UsageError for documents that cannot be trained, and micro-batches of another size.
    """
    if spec.data is None:
        in_all_ranks = spec.sequences * spec.layout.data_parallel_degree
        for first in count(data_rank * spec.sequences, in_all_ranks):
            numbers = range(first, first + spec.sequences)
            yield pack([_sequence(spec, number, vocab_size=vocab_size) for number in numbers])
    assert spec.data is not None
    keywords = {
        "data_rank": data_rank,
        "data_parallel_degree": spec.layout.data_parallel_degree,
        "length_tokens": spec.length_tokens,
        "sequences": spec.sequences,
    }
    define = "def batches(*, length_tokens, **_)"
    function = user_function(spec.data, keywords, what="data source", define=define)
    how: dict[str, Any] = {"vocab_size": vocab_size, "window_tokens": window_tokens}
    expected = spec.length_tokens * spec.sequences
    while True:
        given = function(**keywords)
        if not isinstance(given, Iterable):
            raise UsageError(
                f"{spec.data} returned {seen(given)}, and no micro-batches",
                hint=f"`yield` lists of documents: {_EXAMPLE}",
            )
        empty = True
        for micro_batch in cast(Iterable[Any], given):
            empty = False
            documents = read_documents(micro_batch, spec, source=spec.data, **how)
            total = sum(len(document.ids_L) for document in documents)
            if total != expected:
                what = f"a micro-batch of {total:,} tokens for a trial of {expected:,}: it would"
                hint = "yield documents of exactly length_tokens x sequences tokens together"
                raise _refused(spec.data, f"{what} prove another length", hint)
            yield pack(documents)
        if empty:
            hint = "yield lists of documents, each a list of token ids"
            raise _refused(spec.data, "no micro-batch", hint)


def _sequence(spec: TrialSpec, number: int, *, vocab_size: int) -> Document:
    """Return random tokens, trained except the trial's prompt, with a random reward; group 0."""
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + number)
    ids = torch.randint(vocab_size, (spec.length_tokens,), generator=generator)
    labels = ids.clone()
    labels[: min(spec.prompt_tokens, spec.length_tokens // 2)] = UNTRAINED
    return Document(ids, labels, reward=float(torch.randn((), generator=generator)))
