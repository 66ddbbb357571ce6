"""Micro-batches: where a trial's documents come from, the seed or a function of the user's
(``module:function``), whose documents, like those of a loop of the user's own, are checked here.
"""

import importlib
import inspect
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from highwater.engine.data.batches import UNTRAINED, Batch, Document, pack, without_first
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
    if isinstance(micro_batch, str | bytes | Mapping) or not isinstance(micro_batch, Iterable):
        raise UsageError(
            f"{source} yielded {seen(micro_batch)} as a micro-batch",
            hint=f"yield lists of documents: {EXAMPLE}",
        )
    documents = [_document(document, source) for document in cast(Iterable[Any], micro_batch)]
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


def _document(document: Any, source: str) -> Document:
    """A mapping with ``input_ids``, or plain token ids, all trained without ``labels``."""
    is_mapping = isinstance(document, Mapping)
    fields: dict[Any, Any] = dict(cast(Any, document)) if is_mapping else {"input_ids": document}
    unread = [str(name) for name in fields if name not in _FIELDS]
    if unread or "input_ids" not in fields:
        what = f"the field {unread[0]!r}, which nobody reads" if unread else "no input_ids"
        raise UsageError(
            f"{source} yielded a document with {what}", hint=f"its fields are {', '.join(_FIELDS)}"
        )
    ids = _whole_numbers(fields["input_ids"], "input_ids", source)
    labels, logprobs = fields.get("labels"), fields.get("logprobs")
    if logprobs is not None:
        logprobs = _tensor(logprobs, "logprobs", source).to(torch.float32)
    return Document(
        ids,
        ids if labels is None else _whole_numbers(labels, "labels", source),
        reward=_number(fields.get("reward", 0.0), source),
        group=_whole_number(fields.get("group", 0), source),
        old_logprobs_L=logprobs,
    )


def _whole_numbers(values: Any, field: str, source: str) -> Tensor:
    tensor = _tensor(values, field, source)
    kind = tensor.dtype
    if tensor.numel() and (kind.is_floating_point or kind.is_complex or kind == torch.bool):
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
        is_trained, known = without_first(document.labels_L) != UNTRAINED, document.old_logprobs_L
        if known is not None and not known[is_trained].isfinite().all():
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
    ids, beside = document.ids_L, (document.labels_L, document.old_logprobs_L)
    same = all(each is None or each.shape == ids.shape for each in beside)
    return ids.ndim == 1 and len(ids) > 0 and same


def user_function(source: str, *, what: str) -> Any:
    """The function that ``source`` names: the user's code, run as it is. No other code comes from
    the working directory. ``what`` is what it is for, in a message.
    """
    module, colon, name = source.partition(":")
    if not (module and colon and name):
        raise UsageError(
            f"{what} {source!r} is not module:function",
            hint="name both: `rewards:length` is the function `length` in rewards.py",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a random.py there is nobody's random
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = "check the name, and that it is in this folder, or that PYTHONPATH has its folder"
        raise UsageError(f"{what} {source!r}: {error}", hint=hint) from error


def refuse_uncallable(function: Any, keywords: Iterable[str], source: str, *, define: str) -> None:
    """Raise UsageError where a function cannot be called with these keywords; ``define`` is how one
    that can is written.
    """
    keywords = tuple(keywords)
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{source} cannot be called with {', '.join(keywords)}: {error}",
            hint=f"define it as `{define}`: names that it does not need go into `**_`",
        ) from error


def batches(
    spec: TrialSpec, *, vocab_size: int, data_rank: int, window_tokens: int | None = None
) -> Iterator[Batch]:
    """Micro-batches without end for one data-parallel rank: synthetic, or from ``spec.data``.

    ``window_tokens``: the longest document that can be trained, where only those that every layer
    attends to whole can.
    """
    if spec.data is None:
        return _synthetic(spec, vocab_size=vocab_size, data_rank=data_rank)
    return _from_user(spec, vocab_size=vocab_size, data_rank=data_rank, window_tokens=window_tokens)


def _synthetic(spec: TrialSpec, *, vocab_size: int, data_rank: int) -> Iterator[Batch]:
    """Random tokens and rewards, every sequence exactly the trial's length and trained on, but for
    the trial's prompt; as far as GRPO is concerned all of them answer one prompt.

    Sequences are numbered, and a number is the same sequence on any layout: data ranks take turns,
    a micro-batch each, so that a step has the same ones however many ranks its micro-batches are
    on.
    """
    in_all_ranks = spec.sequences * spec.layout.data_parallel_degree
    for first in count(data_rank * spec.sequences, in_all_ranks):
        numbers = range(first, first + spec.sequences)
        yield pack([_sequence(spec, number, vocab_size=vocab_size) for number in numbers])


def _sequence(spec: TrialSpec, number: int, *, vocab_size: int) -> Document:
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + number)
    ids = torch.randint(vocab_size, (spec.length_tokens,), generator=generator)
    labels = ids.clone()
    labels[: min(spec.prompt_tokens, spec.length_tokens // 2)] = UNTRAINED
    return Document(ids, labels, reward=float(torch.randn((), generator=generator)))


def _from_user(
    spec: TrialSpec, *, vocab_size: int, data_rank: int, window_tokens: int | None
) -> Iterator[Batch]:
    """Micro-batches of ``module:function``, called with keyword arguments and again when it runs
    out.

    The function gets ``data_rank``, ``data_parallel_degree``, ``length_tokens`` and ``sequences``,
    and yields micro-batches of ``length_tokens * sequences`` tokens: each a sequence of documents
    of at most ``length_tokens`` tokens, each document token ids or a mapping with ``input_ids`` and
    maybe ``labels``, ``reward``, ``group`` and ``logprobs``. ``group`` is a whole number that
    sequences of one prompt share, in whatever micro-batch and on whatever data rank of the step
    they are; those without one are one group. ``logprobs`` has a number for every token, which
    counts where the token is trained on: its log-probability when it was sampled. Of a document
    without them the policy before the step takes their place.
    """
    assert spec.data is not None
    function = user_function(spec.data, what="data source")
    arguments = {
        "data_rank": data_rank,
        "data_parallel_degree": spec.layout.data_parallel_degree,
        "length_tokens": spec.length_tokens,
        "sequences": spec.sequences,
    }
    how: dict[str, Any] = {"vocab_size": vocab_size, "window_tokens": window_tokens}
    while True:
        empty = True
        for micro_batch in _called(function, arguments, spec.data):
            empty = False
            documents = read_documents(micro_batch, spec, source=spec.data, **how)
            refuse_other_length(documents, spec, spec.data)
            yield pack(documents)
        if empty:
            raise UsageError(
                f"{spec.data} yielded no micro-batch",
                hint="yield lists of documents, each a list of token ids",
            )


def _called(function: Any, arguments: Mapping[str, Any], source: str) -> Iterable[Any]:
    """The micro-batches that the function gives for these keywords."""
    refuse_uncallable(function, arguments, source, define="def batches(*, length_tokens, **_)")
    given = function(**arguments)
    if not isinstance(given, Iterable):
        raise UsageError(
            f"{source} returned {seen(given)}, and no micro-batches",
            hint=f"`yield` lists of documents: {EXAMPLE}",
        )
    return cast(Iterable[Any], given)
