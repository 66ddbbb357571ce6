"""Batches: documents packed into one row, with everything the step must know about them on the host.

Shapes:  T packed tokens of a micro-batch, or this rank's share of them  N trained tokens among those
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from highwater.errors import UsageError
from highwater.parallel.sequence import slice_of
from highwater.spec.trial import TrialSpec

PROMPT_TOKENS = 2048
"""Prompt of a synthetic sequence; half the sequence when that is shorter. Source: the published system's trials."""
UNTRAINED = -100
"""Label of a token that is not trained on, as in Hugging Face."""


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

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on ``device``."""
        return Batch(
            input_ids_T=self.input_ids_T.to(device),
            position_ids_T=self.position_ids_T.to(device),
            document_lengths=self.document_lengths,
            trained_positions_N=self.trained_positions_N.to(device),
            labels_N=self.labels_N.to(device),
        )


def shard(batch: Batch, *, degree: int, rank: int) -> Batch:
    """One rank's slice of a micro-batch that ``degree`` ranks share.

    What is predicted was fixed over the whole row, so that a slice's last token is still followed by its true next one. Padding
    is a document of its own: nothing sees it, and it trains nothing. ``document_lengths`` stay those of the whole row.
    """
    start, stop, padding = slice_of(len(batch.input_ids_T), degree=degree, rank=rank)
    pad_ids, pad_positions = torch.zeros(padding, dtype=torch.long), torch.arange(padding)
    mine_N = (batch.trained_positions_N >= start) & (batch.trained_positions_N < stop)
    return Batch(
        input_ids_T=torch.cat([batch.input_ids_T, pad_ids])[start:stop],
        position_ids_T=torch.cat([batch.position_ids_T, pad_positions])[start:stop],
        document_lengths=(*batch.document_lengths, padding) if padding else batch.document_lengths,
        trained_positions_N=batch.trained_positions_N[mine_N] - start,
        labels_N=batch.labels_N[mine_N],
    )


def pack(documents: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Pack documents, each (token ids, labels) of one length, into a batch.

    A label is the token itself or UNTRAINED. A document's first token is never predicted: nothing precedes it.
    """
    lengths = tuple(len(ids) for ids, _ in documents)
    labels_T = torch.cat([_without_first(labels) for _, labels in documents])
    trained_T = (labels_T != UNTRAINED).nonzero()[:, 0]
    return Batch(
        input_ids_T=torch.cat([ids for ids, _ in documents]),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        document_lengths=lengths,
        trained_positions_N=trained_T - 1,
        labels_N=labels_T[trained_T],
    )


def batches(spec: TrialSpec, *, vocab_size: int, data_rank: int) -> Iterator[Batch]:
    """Micro-batches without end for one data-parallel rank: synthetic, or from ``spec.data``."""
    if spec.data is None:
        return _synthetic(spec, vocab_size=vocab_size, data_rank=data_rank)
    return _from_user(spec, vocab_size=vocab_size, data_rank=data_rank)


def _synthetic(spec: TrialSpec, *, vocab_size: int, data_rank: int) -> Iterator[Batch]:
    """Random tokens, every sequence exactly the trial's length, the response alone trained on."""
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + data_rank)
    prompt = min(PROMPT_TOKENS, spec.length_tokens // 2)
    while True:
        documents: list[tuple[Tensor, Tensor]] = []
        for _ in range(spec.settings.sequences_per_micro_batch):
            ids = torch.randint(vocab_size, (spec.length_tokens,), generator=generator)
            labels = ids.clone()
            labels[:prompt] = UNTRAINED
            documents.append((ids, labels))
        yield pack(documents)


def _from_user(spec: TrialSpec, *, vocab_size: int, data_rank: int) -> Iterator[Batch]:
    """Micro-batches of ``module:function``, called with keyword arguments and again when it runs out.

    The function gets ``data_rank``, ``data_parallel_degree``, ``length_tokens`` and ``sequences``, and yields micro-batches of
    ``length_tokens * sequences`` tokens: each a sequence of documents, each document token ids or a mapping with ``input_ids``
    and maybe ``labels``.
    """
    assert spec.data is not None
    function = _resolve(spec.data)
    tokens = spec.length_tokens * spec.settings.sequences_per_micro_batch
    arguments = {
        "data_rank": data_rank,
        "data_parallel_degree": spec.layout.data_parallel_degree,
        "length_tokens": spec.length_tokens,
        "sequences": spec.settings.sequences_per_micro_batch,
    }
    while True:
        empty = True
        for micro_batch in function(**arguments):
            empty = False
            documents = [_document(document) for document in micro_batch]
            _check(documents, tokens=tokens, vocab_size=vocab_size, source=spec.data)
            yield pack(documents)
        if empty:
            raise UsageError(f"{spec.data} yielded no micro-batch", hint="yield lists of documents, each a list of token ids")


def _resolve(source: str) -> Any:
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"data source {source!r}: {error}", hint="check the name, and that PYTHONPATH has its folder") from error


def _document(document: Any) -> tuple[Tensor, Tensor]:
    """Token ids and labels of a mapping with ``input_ids``, or of plain token ids, all of them trained on."""
    fields = document if isinstance(document, Mapping) else {"input_ids": document}
    ids = torch.as_tensor(fields["input_ids"], dtype=torch.long)
    return ids, torch.as_tensor(fields.get("labels", ids), dtype=torch.long)


def _check(documents: Sequence[tuple[Tensor, Tensor]], *, tokens: int, vocab_size: int, source: str) -> None:
    if not documents or any(ids.ndim != 1 or len(ids) < 1 or ids.shape != labels.shape for ids, labels in documents):
        raise UsageError(
            f"{source} yielded a micro-batch that is not documents of token ids with labels of the same length",
            hint="yield lists of documents: `[{'input_ids': [1, 2, 3], 'labels': [-100, 2, 3]}]`",
        )
    total = sum(len(ids) for ids, _ in documents)
    if total != tokens:
        raise UsageError(
            f"{source} yielded a micro-batch of {total:,} tokens for a trial of {tokens:,}: it would prove another length",
            hint="yield documents of exactly length_tokens x sequences tokens together",
        )
    if any(int(token) >= vocab_size or int(token) < 0 for ids, _ in documents for token in chain(ids.aminmax())):
        raise UsageError(f"{source} yielded token ids outside 0..{vocab_size - 1}", hint="use the model's own tokenizer")


def _without_first(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[0] = UNTRAINED
    return labels
