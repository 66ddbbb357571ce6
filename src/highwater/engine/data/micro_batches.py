"""Micro-batches: where a trial's documents come from, the seed or a function of the user's.

A function of the user's, found by the name that an option gives: ``module:function``.
"""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

from highwater.engine.data.batches import UNTRAINED, Batch, Document, pack
from highwater.engine.data.user_documents import EXAMPLE, read_documents, refuse_other_length, seen
from highwater.errors import UsageError
from highwater.nouns.trial import TrialSpec


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
    while True:
        empty = True
        for micro_batch in _called(function, arguments, spec.data):
            empty = False
            documents = read_documents(
                micro_batch,
                spec,
                source=spec.data,
                vocab_size=vocab_size,
                window_tokens=window_tokens,
            )
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
