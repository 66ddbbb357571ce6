"""Batches: documents packed into one row, with everything the step must know about them on the host.

Shapes:  T packed tokens of a micro-batch, or this rank's share of them  N trained tokens among those  D documents
         P documents whose last token this rank has  L tokens of one document
"""

import hashlib
import importlib
import inspect
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from highwater.errors import UsageError
from highwater.parallel.sequence import slice_of
from highwater.spec.trial import PROMPT_TOKENS, TrialSpec

UNTRAINED = -100
"""Label of a token that is not trained on, as in Hugging Face."""
_FIELDS = ("input_ids", "labels", "reward", "group", "logprobs")
"""Of a document that is a mapping."""
_EXAMPLE = "`[{'input_ids': [1, 2, 3], 'labels': [-100, 2, 3]}]`"
_MOST_SEEN = 60
_MOST_GROUPS = 2**63
"""Ranks tell each other a group's number in 64 bits."""


class Document(NamedTuple):
    """One sequence, and what an objective may want to know of it."""

    ids_L: Tensor
    labels_L: Tensor
    """The token itself, or UNTRAINED. A document's first token is never predicted: nothing precedes it."""
    reward: float = 0.0
    group: int = 0
    """Sequences of one prompt, among those of all ranks' step: GRPO compares their rewards."""
    old_logprobs_L: Tensor | None = None
    """Log-probability of each token under the policy that sampled it; None: under the policy that is trained, before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    """Counted from 0 in every document."""
    document_lengths: tuple[int, ...]
    trained_positions_N: Tensor
    """Positions from which a trained token is predicted: one before it."""
    labels_N: Tensor
    """The trained tokens."""
    documents_N: Tensor
    """Which document each of them is in."""
    old_logprobs_N: Tensor | None
    """Their log-probabilities when they were sampled: NaN in a document whose are not known; None where no document's are."""
    ends_P: Tensor
    """Positions of documents' last tokens."""
    ended_P: Tensor
    """Which document each of them is of."""
    rewards: tuple[float, ...]
    """Of each document."""
    groups: tuple[int, ...]
    """Of each document."""
    padding_tokens: int = 0
    """Tokens at the end of this rank's share that make all shares one length; no part of the micro-batch."""
    whole: "Batch | None" = None
    """The micro-batch that this is a rank's share of, on the host; None for a micro-batch itself."""
    trained_before: int = 0
    """Trained tokens of it that earlier ranks have."""

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on ``device``."""
        names = (field.name for field in fields(self))
        return replace(self, **{n: t.to(device) for n in names if isinstance(t := getattr(self, n), Tensor)})


def shard(batch: Batch, *, degree: int, rank: int) -> Batch:
    """One rank's slice of a micro-batch that ``degree`` ranks share.

    What is predicted was fixed over the whole row, so that a slice's last token is still followed by its true next one. Padding
    is a document of its own: nothing sees it, and it trains nothing. ``document_lengths`` stay those of the whole row.
    """
    start, stop, padding = slice_of(len(batch.input_ids_T), degree=degree, rank=rank)
    pad_ids, pad_positions = torch.zeros(padding, dtype=torch.long), torch.arange(padding)
    mine_N = (batch.trained_positions_N >= start) & (batch.trained_positions_N < stop)
    here_P = (batch.ends_P >= start) & (batch.ends_P < stop)
    return replace(
        batch,
        input_ids_T=torch.cat([batch.input_ids_T, pad_ids])[start:stop],
        position_ids_T=torch.cat([batch.position_ids_T, pad_positions])[start:stop],
        document_lengths=(*batch.document_lengths, padding) if padding else batch.document_lengths,
        trained_positions_N=batch.trained_positions_N[mine_N] - start,
        labels_N=batch.labels_N[mine_N],
        documents_N=batch.documents_N[mine_N],
        old_logprobs_N=None if batch.old_logprobs_N is None else batch.old_logprobs_N[mine_N],
        ends_P=batch.ends_P[here_P] - start,
        ended_P=batch.ended_P[here_P],
        padding_tokens=min(stop - start, max(0, stop - len(batch.input_ids_T))),
        whole=batch,
        trained_before=int((batch.trained_positions_N < start).sum()),
    )


def digest(micro_batches: Sequence[Batch]) -> Tensor:
    """64 bits of all that micro-batches hold, as a tensor of shape (1,): two that differ have two digests."""
    found = hashlib.sha256()
    for batch in micro_batches:
        for field in fields(batch):
            value = getattr(batch, field.name)
            found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return torch.frombuffer(bytearray(found.digest()[:8]), dtype=torch.long)


def pack(documents: Sequence[Document]) -> Batch:
    """Pack documents into one row."""
    lengths = torch.tensor([len(document.ids_L) for document in documents])
    labels_T = torch.cat([_without_first(document.labels_L) for document in documents])
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
    known = [document.old_logprobs_L for document in documents]
    if all(logprobs_L is None for logprobs_L in known):
        return None
    unknown = [torch.full(document.ids_L.shape, math.nan) for document in documents]
    return torch.cat([u if k is None else k for k, u in zip(known, unknown, strict=True)])[trained_T]


def batches(spec: TrialSpec, *, vocab_size: int, data_rank: int, window_tokens: int | None = None) -> Iterator[Batch]:
    """Micro-batches without end for one data-parallel rank: synthetic, or from ``spec.data``.

    ``window_tokens``: the longest document that every layer attends to whole, where there is one.
    """
    if spec.data is None:
        return _synthetic(spec, vocab_size=vocab_size, data_rank=data_rank)
    return _from_user(spec, vocab_size=vocab_size, data_rank=data_rank, window_tokens=window_tokens)


def _synthetic(spec: TrialSpec, *, vocab_size: int, data_rank: int) -> Iterator[Batch]:
    """Random tokens and rewards, every sequence exactly the trial's length, the response alone trained on.

    All sequences of a data rank answer one prompt, its own, as far as GRPO is concerned.
    """
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + data_rank)
    prompt = min(PROMPT_TOKENS, spec.length_tokens // 2)
    while True:
        documents: list[Document] = []
        for _ in range(spec.sequences):
            ids = torch.randint(vocab_size, (spec.length_tokens,), generator=generator)
            labels = ids.clone()
            labels[:prompt] = UNTRAINED
            reward = float(torch.randn((), generator=generator))
            documents.append(Document(ids, labels, reward=reward, group=data_rank))
        yield pack(documents)


def _from_user(spec: TrialSpec, *, vocab_size: int, data_rank: int, window_tokens: int | None) -> Iterator[Batch]:
    """Micro-batches of ``module:function``, called with keyword arguments and again when it runs out.

    The function gets ``data_rank``, ``data_parallel_degree``, ``length_tokens`` and ``sequences``, and yields micro-batches of
    ``length_tokens * sequences`` tokens: each a sequence of documents of at most ``length_tokens`` tokens, each document token
    ids or a mapping with ``input_ids`` and maybe ``labels``, ``reward``, ``group`` and ``logprobs``. ``group`` is a whole number
    that sequences of one prompt share, in whatever micro-batch and on whatever data rank of the step they are; those without one
    are one group. ``logprobs`` has a number for every token, which counts where the token is trained on: its log-probability when
    it was sampled. Of a document without them the policy before the step takes their place.
    """
    assert spec.data is not None
    function = _resolve(spec.data)
    arguments = {
        "data_rank": data_rank,
        "data_parallel_degree": spec.layout.data_parallel_degree,
        "length_tokens": spec.length_tokens,
        "sequences": spec.sequences,
    }
    while True:
        empty = True
        for micro_batch in _called(function, arguments, spec.data):
            empty = False
            documents = _documents(micro_batch, spec.data)
            _check(documents, spec, vocab_size=vocab_size)
            _check_lengths(documents, spec, window_tokens=window_tokens)
            _check_numbers(documents, spec)
            _check_pairs(documents, spec)
            yield pack(documents)
        if empty:
            raise UsageError(f"{spec.data} yielded no micro-batch", hint="yield lists of documents, each a list of token ids")


def _resolve(source: str) -> Any:
    """The function that ``--data`` names: the user's code, run as it is. No other code comes from the working directory."""
    module, _, name = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a random.py there is nobody's random
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = "check the name, and that it is in this folder, or that PYTHONPATH has its folder"
        raise UsageError(f"data source {source!r}: {error}", hint=hint) from error


def _called(function: Any, arguments: Mapping[str, Any], source: str) -> Iterable[Any]:
    """What the function gives for these keywords; raises UsageError where it cannot be called so, or gives no micro-batches."""
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{source} cannot be called with {', '.join(arguments)}: {error}",
            hint="define it as `def batches(*, length_tokens, **_)`: names that it does not need go into `**_`",
        ) from error
    given = function(**arguments)
    if not isinstance(given, Iterable):
        raise UsageError(f"{source} returned {_seen(given)}, and no micro-batches", hint=f"`yield` lists of documents: {_EXAMPLE}")
    return cast(Iterable[Any], given)


def _documents(micro_batch: Any, source: str) -> list[Document]:
    if isinstance(micro_batch, str | bytes | Mapping) or not isinstance(micro_batch, Iterable):
        raise UsageError(f"{source} yielded {_seen(micro_batch)} as a micro-batch", hint=f"yield lists of documents: {_EXAMPLE}")
    return [_document(document, source) for document in cast(Iterable[Any], micro_batch)]


def _document(document: Any, source: str) -> Document:
    """A mapping with ``input_ids``, or plain token ids; all of them trained on unless ``labels`` say otherwise.

    Raises UsageError, by the field's name, for a field that nobody reads and for what is not of a field's kind: nothing is rounded.
    """
    fields: dict[Any, Any] = dict(cast(Any, document)) if isinstance(document, Mapping) else {"input_ids": document}
    unread = [str(name) for name in fields if name not in _FIELDS]
    if unread or "input_ids" not in fields:
        what = f"the field {unread[0]!r}, which nobody reads" if unread else "no input_ids"
        raise UsageError(f"{source} yielded a document with {what}", hint=f"its fields are {', '.join(_FIELDS)}")
    ids = _whole_numbers(fields["input_ids"], "input_ids", source)
    labels, logprobs = fields.get("labels"), fields.get("logprobs")
    return Document(
        ids,
        ids if labels is None else _whole_numbers(labels, "labels", source),
        reward=_number(fields.get("reward", 0.0), source),
        group=_whole_number(fields.get("group", 0), source),
        old_logprobs_L=None if logprobs is None else _tensor(logprobs, "logprobs", source).to(torch.float32),
    )


def _whole_numbers(values: Any, field: str, source: str) -> Tensor:
    tensor = _tensor(values, field, source)
    if tensor.numel() and (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool):
        raise _no_numbers(values, field, source, "whole numbers")
    return tensor.to(torch.long)


def _tensor(values: Any, field: str, source: str) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_numbers(values, field, source, "a list of numbers") from error


def _whole_number(value: Any, source: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise _no_numbers(value, "group", source, "a whole number") from error


def _number(value: Any, source: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _no_numbers(value, "reward", source, "a number") from error


def _no_numbers(value: Any, field: str, source: str, meant: str) -> UsageError:
    return UsageError(f"{source} yielded a document whose {field} is not {meant}: {_seen(value)}", hint=f"for example {_EXAMPLE}")


def _seen(value: Any) -> str:
    """As much of a value as is told of it."""
    text = repr(value)
    return text if len(text) <= _MOST_SEEN else f"{text[:_MOST_SEEN]}..."


def _check(documents: Sequence[Document], spec: TrialSpec, *, vocab_size: int) -> None:
    """Raise UsageError for what is no micro-batch of this model's tokens."""
    if not documents or not all(_is_whole(document) for document in documents):
        raise UsageError(
            f"{spec.data} yielded a micro-batch that is not documents of token ids with labels (and logprobs) of the same length",
            hint=f"yield lists of documents: {_EXAMPLE}",
        )
    for document in documents:
        if ((document.ids_L < 0) | (document.ids_L >= vocab_size)).any():
            raise UsageError(f"{spec.data} yielded token ids outside 0..{vocab_size - 1}", hint="use the model's own tokenizer")
        labels_L = document.labels_L
        foreign = labels_L[(labels_L != UNTRAINED) & ((labels_L < 0) | (labels_L >= vocab_size))]
        if len(foreign):
            raise UsageError(
                f"{spec.data} yielded the label {int(foreign[0])}, neither {UNTRAINED} nor a token id in 0..{vocab_size - 1}",
                hint=f"label a token with its own id to train on it, with {UNTRAINED} not to",
            )


def _check_lengths(documents: Sequence[Document], spec: TrialSpec, *, window_tokens: int | None) -> None:
    """Raise UsageError for documents that would prove another length, or that some layer would not attend to whole."""
    longest, total = max(len(document.ids_L) for document in documents), sum(len(document.ids_L) for document in documents)
    tokens = spec.length_tokens * spec.sequences
    if longest > spec.length_tokens:
        raise UsageError(
            f"{spec.data} yielded a document of {longest:,} tokens for a trial of {spec.length_tokens:,}",
            hint=f"cut documents to length_tokens, or try with `--length {longest}`",
        )
    if total != tokens:
        raise UsageError(
            f"{spec.data} yielded a micro-batch of {total:,} tokens for a trial of {tokens:,}: it would prove another length",
            hint="yield documents of exactly length_tokens x sequences tokens together",
        )
    if window_tokens is not None and longest > window_tokens:
        raise UsageError(
            f"{spec.data} yielded a document of {longest:,} tokens, past the sliding window of {window_tokens:,} in which "
            f"{spec.model_name} attends; only full attention is supported",
            hint=f"cut documents to {window_tokens} tokens",
        )


def _check_numbers(documents: Sequence[Document], spec: TrialSpec) -> None:
    """Raise UsageError for what would make the loss NaN, which no later message could trace back to a document."""
    for document in documents:
        if not abs(document.reward) <= torch.finfo(torch.float32).max:  # nor is NaN
            raise UsageError(f"{spec.data} yielded a document with the reward {document.reward}", hint="yield finite rewards")
        is_trained = _without_first(document.labels_L) != UNTRAINED
        if document.old_logprobs_L is not None and not document.old_logprobs_L[is_trained].isfinite().all():
            raise UsageError(
                f"{spec.data} yielded a document whose logprobs are not finite at tokens that are trained on",
                hint="yield each token's log-probability when it was sampled, or no `logprobs` for that document",
            )
        if not -_MOST_GROUPS <= document.group < _MOST_GROUPS:
            raise UsageError(
                f"{spec.data} yielded a document of the group {document.group}", hint="number groups by whole numbers of 64 bits"
            )


def _check_pairs(documents: Sequence[Document], spec: TrialSpec) -> None:
    if spec.settings.objective == "rw" and len(documents) % 2:
        raise UsageError(
            f"{spec.data} yielded {len(documents)} documents in a micro-batch, and a reward model is trained on pairs",
            hint="yield chosen, rejected, chosen, rejected, ...",
        )


def _is_whole(document: Document) -> bool:
    ids, logprobs = document.ids_L, document.old_logprobs_L
    same = document.labels_L.shape == ids.shape and (logprobs is None or logprobs.shape == ids.shape)
    return ids.ndim == 1 and len(ids) > 0 and same


def _without_first(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[0] = UNTRAINED
    return labels
