"""A user's documents: what a function of ``--data`` yields, or a loop of the user's own, read and
checked before anything trains on it.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from highwater.engine.data.batches import UNTRAINED, Document, without_first
from highwater.errors import UsageError
from highwater.nouns.trial import TrialSpec

_FIELDS = ("input_ids", "labels", "reward", "group", "logprobs")
"""Fields of a document that is a mapping."""
EXAMPLE = "`[{'input_ids': [1, 2, 3], 'labels': [-100, 2, 3]}]`"
"""One micro-batch, as a hint shows it."""
_MOST_SEEN = 60
_MOST_GROUPS = 2**63
"""Ranks tell each other a group's number in 64 bits."""


def read_documents(
    micro_batch: Any, spec: TrialSpec, *, source: str, vocab_size: int, window_tokens: int | None
) -> list[Document]:
    """The documents of a micro-batch that ``source``, which errors name, yielded.

    Raises UsageError for what cannot be trained: ``window_tokens`` is the longest document that can
    be, where only those that every layer attends to whole can. How long they are together is not
    looked at.
    """
    documents = _documents(micro_batch, source)
    _check(documents, source, vocab_size=vocab_size)
    _check_longest(documents, spec, source, window_tokens=window_tokens)
    _check_numbers(documents, source)
    _check_pairs(documents, spec, source)
    return documents


def refuse_other_length(documents: Sequence[Document], spec: TrialSpec, source: str) -> None:
    """Raise UsageError for documents that together would prove another length than the trial's."""
    total = sum(len(document.ids_L) for document in documents)
    tokens = spec.length_tokens * spec.sequences
    if total != tokens:
        raise UsageError(
            f"{source} yielded a micro-batch of {total:,} tokens for a trial of {tokens:,}: it "
            f"would prove another length",
            hint="yield documents of exactly length_tokens x sequences tokens together",
        )


def _documents(micro_batch: Any, source: str) -> list[Document]:
    if isinstance(micro_batch, str | bytes | Mapping) or not isinstance(micro_batch, Iterable):
        raise UsageError(
            f"{source} yielded {seen(micro_batch)} as a micro-batch",
            hint=f"yield lists of documents: {EXAMPLE}",
        )
    return [_document(document, source) for document in cast(Iterable[Any], micro_batch)]


def _document(document: Any, source: str) -> Document:
    """A mapping with ``input_ids``, or plain token ids, all trained without ``labels``."""
    fields: dict[Any, Any] = (
        dict(cast(Any, document)) if isinstance(document, Mapping) else {"input_ids": document}
    )
    unread = [str(name) for name in fields if name not in _FIELDS]
    if unread or "input_ids" not in fields:
        what = f"the field {unread[0]!r}, which nobody reads" if unread else "no input_ids"
        raise UsageError(
            f"{source} yielded a document with {what}", hint=f"its fields are {', '.join(_FIELDS)}"
        )
    ids = _whole_numbers(fields["input_ids"], "input_ids", source)
    labels, logprobs = fields.get("labels"), fields.get("logprobs")
    return Document(
        ids,
        ids if labels is None else _whole_numbers(labels, "labels", source),
        reward=_number(fields.get("reward", 0.0), source),
        group=_whole_number(fields.get("group", 0), source),
        old_logprobs_L=None
        if logprobs is None
        else _tensor(logprobs, "logprobs", source).to(torch.float32),
    )


def _whole_numbers(values: Any, field: str, source: str) -> Tensor:
    tensor = _tensor(values, field, source)
    if tensor.numel() and (
        tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool
    ):
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
    return UsageError(
        f"{source} yielded a document whose {field} is not {meant}: {seen(value)}",
        hint=f"for example {EXAMPLE}",
    )


def seen(value: Any) -> str:
    """The text of a value, as much of it as is told."""
    text = repr(value)
    return text if len(text) <= _MOST_SEEN else f"{text[:_MOST_SEEN]}..."


def _check(documents: Sequence[Document], source: str, *, vocab_size: int) -> None:
    """Raise UsageError for what is no micro-batch of this model's tokens."""
    if not documents or not all(_is_whole(document) for document in documents):
        raise UsageError(
            f"{source} yielded a micro-batch that is not documents of token ids with labels "
            f"(and logprobs) of the same length",
            hint=f"yield lists of documents: {EXAMPLE}",
        )
    for document in documents:
        if ((document.ids_L < 0) | (document.ids_L >= vocab_size)).any():
            raise UsageError(
                f"{source} yielded token ids outside 0..{vocab_size - 1}",
                hint="use the model's own tokenizer",
            )
        labels_L = document.labels_L
        foreign = labels_L[(labels_L != UNTRAINED) & ((labels_L < 0) | (labels_L >= vocab_size))]
        if len(foreign):
            raise UsageError(
                f"{source} yielded the label {int(foreign[0])}, neither {UNTRAINED} nor a "
                f"token id in 0..{vocab_size - 1}",
                hint=f"label a token with its own id to train on it, with {UNTRAINED} not to",
            )


def _check_longest(
    documents: Sequence[Document], spec: TrialSpec, source: str, *, window_tokens: int | None
) -> None:
    """Raise UsageError for a document too long for the trial, or for a layer to attend to."""
    longest = max(len(document.ids_L) for document in documents)
    if longest > spec.length_tokens:
        raise UsageError(
            f"{source} yielded a document of {longest:,} tokens for a length of "
            f"{spec.length_tokens:,}",
            hint=f"cut documents to {spec.length_tokens} tokens, or begin with a length of "
            f"`{longest}` or more",
        )
    if window_tokens is not None and longest > window_tokens:
        raise UsageError(
            f"{source} yielded a document of {longest:,} tokens, past the sliding window of "
            f"{window_tokens:,} in which "
            f"{spec.model_name} attends, and a ring shares only what all layers attend to whole",
            hint=f"cut documents to {window_tokens} tokens, or use `--ulysses` in the place of "
            "`--ring`",
        )


def _check_numbers(documents: Sequence[Document], source: str) -> None:
    """Raise UsageError for what would make the loss NaN, while the document is known."""
    for document in documents:
        if not abs(document.reward) <= torch.finfo(torch.float32).max:  # nor is NaN
            raise UsageError(
                f"{source} yielded a document with the reward {document.reward}",
                hint="yield finite rewards",
            )
        is_trained = without_first(document.labels_L) != UNTRAINED
        if (
            document.old_logprobs_L is not None
            and not document.old_logprobs_L[is_trained].isfinite().all()
        ):
            raise UsageError(
                f"{source} yielded a document whose logprobs are not finite at tokens that are "
                f"trained on",
                hint="yield each token's log-probability when it was sampled, or no `logprobs` "
                "for that document",
            )
        if not -_MOST_GROUPS <= document.group < _MOST_GROUPS:
            raise UsageError(
                f"{source} yielded a document of the group {document.group}",
                hint="number groups by whole numbers of 64 bits",
            )


def _check_pairs(documents: Sequence[Document], spec: TrialSpec, source: str) -> None:
    """Raise UsageError for a document that is left without the other of its pair."""
    if spec.settings.traits.pairs and len(documents) % 2:
        raise UsageError(
            f"{source} yielded {len(documents)} documents in a micro-batch, and "
            f"{spec.settings.objective} trains on pairs",
            hint="yield chosen, rejected, chosen, rejected, ...",
        )


def _is_whole(document: Document) -> bool:
    ids, logprobs = document.ids_L, document.old_logprobs_L
    same = document.labels_L.shape == ids.shape and (
        logprobs is None or logprobs.shape == ids.shape
    )
    return ids.ndim == 1 and len(ids) > 0 and same
