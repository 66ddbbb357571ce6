"""Experience: values per trained token that an update needs, from passes without gradients.

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
from highwater.engine.training.step_record import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What objectives compute before a step, for one micro-batch; None: it is not needed."""

    advantages_N: Tensor | None = None
    """Advantages of the trained tokens, in the log-probabilities' dtype or wider."""
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    """Values that the critic gives before its update."""
    returns_N: Tensor | None = None
    """Targets of the critic's values: those values plus the advantages before whitening."""


@torch.no_grad()
def forward_batch(
    model: Decoder, micro_batches: Sequence[Batch], *, device: torch.device
) -> list[Tensor]:
    """Log-probabilities of trained tokens, or a critic's values, by micro-batch; each N.

    Dropout is off, as nothing is trained.
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


def group_experience(training: Training, micro_batches: Sequence[Batch]) -> list[Experience]:
    """GRPO's experience: advantages in groups of all ranks, and reference log-probabilities."""
    advantages = iter(_group_advantages(training, micro_batches))
    experiences: list[Experience] = []
    logprobs = _reference_logprobs(training, micro_batches)
    for batch, logprobs_N in zip(micro_batches, logprobs, strict=True):
        of_documents_D = torch.tensor(
            [next(advantages) for _ in batch.rewards], dtype=logprobs_N.dtype
        )
        advantages_N = of_documents_D[batch.documents_N].to(training.device)
        experiences.append(Experience(advantages_N=advantages_N, reference_logprobs_N=logprobs_N))
    return experiences


def _group_advantages(training: Training, micro_batches: Sequence[Batch]) -> list[float]:
    """Advantages of this rank's documents; groups may extend to other ranks' micro-batches."""
    own_rewards = [reward for batch in micro_batches for reward in batch.rewards]
    own_groups = [group for batch in micro_batches for group in batch.groups]
    rewards = process_mesh.every_ranks(own_rewards, torch.float64, training.mesh)
    groups = process_mesh.every_ranks(own_groups, torch.int64, training.mesh)
    # Ranks that share sequences are neighbours, and have the same documents: they count once.
    sharing = process_mesh.sharing(training.sequence)
    own, rewards, groups = dist.get_rank() // sharing, rewards[::sharing], groups[::sharing]
    before = sum(map(len, rewards[:own]))
    return group_advantages(list(chain(*rewards)), list(chain(*groups)))[
        before : before + len(rewards[own])
    ]


def reference_experience(training: Training, micro_batches: Sequence[Batch]) -> list[Experience]:
    """Return DPO's experience: the reference's log-probabilities, no advantages."""
    return [
        Experience(reference_logprobs_N=logprobs_N)
        for logprobs_N in _reference_logprobs(training, micro_batches)
    ]


def _reference_logprobs(training: Training, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Log-probabilities under the reference model; with adapters the policy without them."""
    assert training.reference is not None, "the objective compares with one"
    with without_adapters(training.reference):
        return forward_batch(training.reference, micro_batches, device=training.device)


def token_experience(training: Training, micro_batches: Sequence[Batch]) -> list[Experience]:
    """Return PPO's experience: generalized advantages, whitened over the trained tokens of all
    ranks; without a critic they come from rewards alone.
    """
    critic, device = training.critic, training.device
    if critic is None:
        values = [
            torch.zeros(len(batch.labels_N), device=device, dtype=torch.float64)
            for batch in micro_batches
        ]
    else:
        values = forward_batch(critic, micro_batches, device=device)
    raw = [
        _advantages(training, batch, values_N)
        for batch, values_N in zip(micro_batches, values, strict=True)
    ]
    experiences: list[Experience] = []
    for values_N, raw_N, white_N in zip(values, raw, _whitened(raw, training.mesh), strict=True):
        if critic is None:
            experiences.append(Experience(advantages_N=white_N))
        else:
            experiences.append(
                Experience(advantages_N=white_N, values_N=values_N, returns_N=raw_N + values_N)
            )
    return experiences


def _advantages(training: Training, batch: Batch, values_N: Tensor) -> Tensor:
    """Advantages of this rank's trained tokens; a document's later tokens may be on other ranks."""
    sequence, numbers = training.sequence, training.hyperparameters
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
    """Scale the advantages to mean 0 and variance 1 over all micro-batches of all ranks."""
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
