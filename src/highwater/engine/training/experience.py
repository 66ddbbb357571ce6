"""Experience: what a step knows of every trained token before its update, from passes that record
no gradient.

Shapes, per rank:  T packed tokens, this rank's share  N trained tokens among those  D documents of
the micro-batch
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.activations.recompute import without_dropout
from highwater.engine.data.batches import Batch
from highwater.engine.models.adapters import without_adapters
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.collectives import gather_rows
from highwater.engine.parallel.fsdp2 import release
from highwater.engine.training.objectives import (
    generalized_advantages,
    group_advantages,
    last_of_each,
)
from highwater.nouns.hyperparameters import Hyperparameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The experience of one micro-batch; None for what the objective does not ask for."""

    advantages_N: Tensor | None = None
    """Advantages of the trained tokens, at least as precise as the log-probabilities."""
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    """Values of the critic before its update."""
    returns_N: Tensor | None = None
    """Values that the critic should have said."""


@torch.no_grad()
def forward_batch(
    model: Decoder, micro_batches: Sequence[Batch], *, device: torch.device
) -> list[Tensor]:
    """Log-probabilities of the trained tokens, or a critic's values at them, recomputed micro-batch
    by micro-batch; each N.

    Without dropout: what a model says is asked, not what it is trained on.
    """
    with without_dropout(model):
        results = [_forward(model, batch.to(device)) for batch in micro_batches]
    release(model)
    return results


def _forward(model: Decoder, batch: Batch) -> Tensor:
    inputs = (batch.input_ids_T, batch.position_ids_T, batch.trained_positions_N)
    if model.gives_scalars:
        return model(*inputs, batch.document_lengths)
    return model(*inputs, batch.labels_N, batch.document_lengths).logprobs_N


def group_experience(
    reference: Decoder,
    micro_batches: Sequence[Batch],
    *,
    mesh: DeviceMesh,
    sequence: dist.ProcessGroup | None,
) -> list[Experience]:
    """The experience of GRPO: rewards against those of the group, over all micro-batches of all
    ranks, and the reference's log-probabilities.
    """
    device = torch.device(mesh.device_type)
    advantages = iter(_group_advantages(micro_batches, mesh, sequence))
    experiences: list[Experience] = []
    logprobs = _reference_logprobs(reference, micro_batches, device)
    for batch, logprobs_N in zip(micro_batches, logprobs, strict=True):
        of_documents_D = torch.tensor(
            [next(advantages) for _ in batch.rewards], dtype=logprobs_N.dtype
        )
        advantages_N = of_documents_D[batch.documents_N].to(device)
        experiences.append(Experience(advantages_N=advantages_N, reference_logprobs_N=logprobs_N))
    return experiences


def _group_advantages(
    micro_batches: Sequence[Batch], mesh: DeviceMesh, sequence: dist.ProcessGroup | None
) -> list[float]:
    """Advantages of this rank's documents, whose groups go on in other ranks' micro-batches."""
    rewards = process_mesh.every_ranks(
        [reward for batch in micro_batches for reward in batch.rewards], torch.float64, mesh
    )
    groups = process_mesh.every_ranks(
        [group for batch in micro_batches for group in batch.groups], torch.int64, mesh
    )
    # Ranks that share sequences are neighbours, and have the same documents: they count once.
    sharing = 1 if sequence is None else dist.get_world_size(sequence)
    own, rewards, groups = dist.get_rank() // sharing, rewards[::sharing], groups[::sharing]
    before = sum(map(len, rewards[:own]))
    return group_advantages(list(chain(*rewards)), list(chain(*groups)))[
        before : before + len(rewards[own])
    ]


def reference_experience(
    reference: Decoder, micro_batches: Sequence[Batch], *, device: torch.device
) -> list[Experience]:
    """The experience of DPO: the reference's log-probabilities, and nothing of rewards."""
    return [
        Experience(reference_logprobs_N=logprobs_N)
        for logprobs_N in _reference_logprobs(reference, micro_batches, device)
    ]


def _reference_logprobs(
    reference: Decoder, micro_batches: Sequence[Batch], device: torch.device
) -> list[Tensor]:
    """What the reference says: a policy with adapters is it without them."""
    with without_adapters(reference):
        return forward_batch(reference, micro_batches, device=device)


def token_experience(
    critic: Decoder | None,
    micro_batches: Sequence[Batch],
    *,
    mesh: DeviceMesh,
    sequence: dist.ProcessGroup | None,
    hyperparameters: Hyperparameters,
) -> list[Experience]:
    """The experience of PPO: generalized advantages, whitened over the trained tokens of all ranks;
    without a critic from rewards alone.
    """
    device = torch.device(mesh.device_type)
    if critic is None:
        values = [
            torch.zeros(len(batch.labels_N), device=device, dtype=torch.float64)
            for batch in micro_batches
        ]
    else:
        values = forward_batch(critic, micro_batches, device=device)
    raw = [
        _advantages(batch, values_N, sequence, hyperparameters)
        for batch, values_N in zip(micro_batches, values, strict=True)
    ]
    experiences: list[Experience] = []
    for values_N, raw_N, white_N in zip(values, raw, _whitened(raw, mesh), strict=True):
        if critic is None:
            experiences.append(Experience(advantages_N=white_N))
        else:
            experiences.append(
                Experience(advantages_N=white_N, values_N=values_N, returns_N=raw_N + values_N)
            )
    return experiences


def _advantages(
    batch: Batch, values_N: Tensor, sequence: dist.ProcessGroup | None, numbers: Hyperparameters
) -> Tensor:
    """Advantages of this rank's trained tokens; what follows may be on other ranks."""
    device, shared = values_N.device, batch.shared
    positions_N = batch.trained_positions_N.to(device)
    values_T = values_N.new_zeros(len(batch.input_ids_T)).index_copy(0, positions_N, values_N)
    whole = batch if shared is None else shared.whole
    values = gather_rows(values_T, sequence)
    if sequence is not None:
        assert shared is not None
        values = shared.layout.restored(values)
    values = values[whole.trained_positions_N.to(device)]
    documents = whole.documents_N.to(device)
    rewards = torch.tensor(batch.rewards, device=device, dtype=values_N.dtype)[
        documents
    ] * last_of_each(documents)
    advantages = generalized_advantages(
        rewards, values, documents, discount=numbers.discount, gae_lambda=numbers.gae_lambda
    )
    if sequence is None:
        return advantages
    assert shared is not None
    return advantages[shared.trained_N.to(device)]


def _whitened(raw: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """The advantages, to mean 0 and variance 1 over all micro-batches of all ranks."""
    flat = torch.cat(list(raw)).double()
    count, sum_, squares = process_mesh.total(
        torch.stack([torch.ones_like(flat).sum(), flat.sum(), flat.square().sum()]), mesh
    )
    mean = sum_ / count.clamp_min(1)
    variance = (squares - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
    return [
        ((advantages.double() - mean) * (variance + 1e-8).rsqrt()).to(advantages.dtype)
        for advantages in raw
    ]
