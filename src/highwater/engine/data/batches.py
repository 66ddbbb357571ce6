"""Batches: documents packed into one row, with everything the step must know about them on the
host. Where documents come from is engine/data/micro_batches.py's.

Shapes:  T packed tokens of a micro-batch, or this rank's share of them  N trained tokens among
         those  D documents P documents whose last token this rank has  L tokens of one document
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from highwater.engine.parallel.mesh import SequenceGroups
from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout

UNTRAINED = -100
"""Label of a token that is not trained on, as in Hugging Face."""


class Document(NamedTuple):
    """One sequence, and what an objective may want to know of it."""

    ids_L: Tensor
    labels_L: Tensor
    """The token itself, or UNTRAINED. A document's first token is never predicted: nothing precedes
    it."""
    reward: float = 0.0
    group: int = 0
    """The number of the document's group: sequences of one prompt, among those of all ranks' step.
    GRPO compares their rewards."""
    old_logprobs_L: Tensor | None = None
    """Log-probability of each token under the policy that sampled it; None: under the policy that
    is trained, before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    """Positions of the tokens, counted from 0 in every document."""
    document_lengths: tuple[int, ...]
    trained_positions_N: Tensor
    """Positions from which a trained token is predicted: one before it."""
    labels_N: Tensor
    """The trained tokens."""
    documents_N: Tensor
    """The number of the document that each trained token is in."""
    old_logprobs_N: Tensor | None
    """Log-probabilities of the trained tokens when they were sampled: NaN in a document whose are
    not known; None where no document's are."""
    ends_P: Tensor
    """Positions of documents' last tokens."""
    ended_P: Tensor
    """The number of the document that each of these positions is in."""
    rewards: tuple[float, ...]
    """The reward of each document."""
    groups: tuple[int, ...]
    """The group of each document."""
    padding_tokens: int = 0
    """Tokens of this rank's share that make all shares one length; no part of the micro-batch."""
    shared: "Shared | None" = None
    """The micro-batch that this is a rank's share of; None for a whole one."""

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on ``device``."""
        names = (field.name for field in fields(self))
        return replace(
            self, **{n: t.to(device) for n in names if isinstance(t := getattr(self, n), Tensor)}
        )


class Shared(NamedTuple):
    """A micro-batch that several ranks share, as one of them needs to know it; on the host."""

    whole: Batch
    layout: SequenceLayout
    trained_N: Tensor
    """The number of each of the rank's trained tokens among those of the whole."""


def share_of(batch: Batch, shared: SequenceGroups | None) -> Batch:
    """This rank's share of a micro-batch that it shares with these ranks, or with none."""
    if shared is None:
        return shard(batch, SequenceLayout(batch.document_lengths), rank=0)
    return shard(batch, shared.layout_of(batch.document_lengths), rank=shared.rank)


def shard(batch: Batch, layout: SequenceLayout, *, rank: int) -> Batch:
    """The share of a micro-batch that one rank holds, as the layout says.

    What is predicted was fixed over the whole row, so that the last token of a slice or chunk is
    still followed by its true next one. Padding trains nothing, and nothing sees it.
    ``document_lengths`` stay those of the whole row.
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
    """64 bits of all that micro-batches hold, as a tensor of shape (1,): two that differ have two
    digests.
    """
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
    known = [document.old_logprobs_L for document in documents]
    if all(logprobs_L is None for logprobs_L in known):
        return None
    unknown = [torch.full(document.ids_L.shape, math.nan) for document in documents]
    return torch.cat([u if k is None else k for k, u in zip(known, unknown, strict=True)])[
        trained_T
    ]


def without_first(labels: Tensor) -> Tensor:
    """The labels of a document, its first token untrained: nothing precedes it."""
    labels = labels.clone()
    labels[0] = UNTRAINED
    return labels
