"""Step record: values of each trained token of a step, copied to the host while the step runs. Also
``Training``: the models, optimizers and settings of a step.

The values take no device memory, and nothing waits for their copies: they may be read once the
device is synchronised, as when a step's loss is read. They take 8 to 24 bytes a trained token.

Shapes:  N trained tokens of one micro-batch, this rank's share  D documents of the micro-batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.activations.host import HostActivations
from highwater.engine.data.batches import Batch
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.loss import LogitRange
from highwater.engine.parallel.mesh import total
from highwater.engine.training import objectives
from highwater.engine.training.statistics import Statistics
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.objective import TRAITS, Objective, ObjectiveTraits

_OF_LOGITS = ("logit_min", "logit_max", "logit_min_avg", "logit_max_avg")
"""Names of the quantities that ``LogitRange.read`` returns, in its order."""


class TokenNumbers(NamedTuple):
    """Values of a micro-batch's trained tokens, each field of shape N; None if not computed."""

    logprobs_N: Tensor
    entropies_N: Tensor
    advantages_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None


@dataclass(slots=True)
class StepRecord:
    """Record of the trained tokens of one step on one rank, filled by the step."""

    micro_batches: Sequence[Batch] = ()
    """This rank's micro-batches, on the host."""
    most_documents: int = 0
    """Largest number of documents that any rank has in the step."""
    tokens: list[TokenNumbers] = field(default_factory=list[TokenNumbers])
    """Numbers of each micro-batch's tokens; empty for an objective without log-probabilities."""
    logit_range: LogitRange | None = None
    """Range of the policy's logits; None if it is not asked for."""

    def begin(self, micro_batches: Sequence[Batch], *, most_documents: int) -> None:
        """Start a new step's record, and drop that of the last step."""
        self.micro_batches, self.most_documents, self.tokens = micro_batches, most_documents, []
        if self.logit_range is not None:
            self.logit_range.reset()

    def keep(self, *numbers: Tensor | None) -> None:
        """Start copying the values of the next micro-batch's tokens, in TokenNumbers' order."""
        # The copies go to pinned memory, so that neither the host nor a stream waits for them.
        copies = (n if n is None else n.detach().to("cpu", non_blocking=True) for n in numbers)
        self.tokens.append(TokenNumbers(*copies))  # pyright: ignore[reportArgumentType]

    def add_to(self, statistics: Statistics, numbers: Hyperparameters) -> None:
        """Add this rank's parts of the step's statistics, computed on the host in float64."""
        if self.logit_range is not None:
            for name, value in zip(_OF_LOGITS, self.logit_range.read(), strict=True):
                if value is not None:
                    statistics.add(name, value)
        first_of_sharing = statistics.coordinates.slot("data") == 0
        for index, batch in enumerate(self.micro_batches):
            _add_counts(statistics, batch, counts_documents=first_of_sharing)
            if not self.tokens:
                statistics.add_documents(None, _trained_of_documents(batch))
                continue
            tokens = TokenNumbers(*(None if n is None else n.double() for n in self.tokens[index]))  # pyright: ignore[reportArgumentType]
            sums_D = objectives.document_sums(
                tokens.logprobs_N, batch.documents_N, documents=len(batch.rewards)
            )
            statistics.add_documents(sums_D.tolist(), _trained_of_documents(batch))
            statistics.add("nll", -float(tokens.logprobs_N.sum()))
            statistics.add("entropy", float(tokens.entropies_N.sum()))
            _add_ratios(statistics, batch, tokens, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Models, optimizers and settings of a step."""

    policy: Decoder
    """Model that is trained; a ScalarModel if the objective has a scalar head."""
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    """Mesh of all ranks, over which every model is sharded."""
    sequence: dist.ProcessGroup | None = None
    """Ranks that share this rank's sequences; None if no others do."""
    objective: Objective = "sft"
    entropy: bool = False
    """True if the policy's entropy is part of the loss."""
    critic: Decoder | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Decoder | None = None
    """Frozen model that the policy is compared with; None if the objective has no reference."""
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    keeps_gradients: bool = True
    """True if gradients stay allocated between steps; else each backward pass makes them anew."""
    host: HostActivations | None = None
    """Host memory in which layers keep activations; None if they are on the device."""
    record: StepRecord = field(default_factory=StepRecord)
    """Numbers of the last step, for its statistics."""

    @property
    def traits(self) -> ObjectiveTraits:
        """Traits of the objective, such as whether it needs a reference."""
        return TRAITS[self.objective]

    @property
    def trained(self) -> Sequence[tuple[Decoder, torch.optim.Optimizer]]:
        """Models that a step updates, with their optimizers, the policy first."""
        policy = (self.policy, self.optimizer)
        if self.critic is None:
            return (policy,)
        assert self.critic_optimizer is not None, "a critic comes with its optimizer"
        return (policy, (self.critic, self.critic_optimizer))

    @property
    def device(self) -> torch.device:
        """Device of the activations."""
        return torch.device(self.mesh.device_type)

    def set_rate(self, rate: float) -> None:
        """Set every optimizer's learning rate."""
        for _, optimizer in self.trained:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def on_any_rank(self, is_so: bool) -> bool:
        """True if ``is_so`` is true on any rank; all ranks must call it."""
        return bool(total(torch.tensor(float(is_so), device=self.device), self.mesh))


def _add_counts(statistics: Statistics, batch: Batch, *, counts_documents: bool) -> None:
    tokens = len(batch.input_ids_T) - batch.padding_tokens
    valid = len(batch.labels_N)
    of = {"n_tokens": tokens, "n_valid_tokens": valid, "prompt_tokens": tokens - valid}
    for name, count in of.items():
        statistics.add(name, count)
        statistics.add(f"{name}_by_rank", count)
    # Each rank that shares documents has all of them: only the first counts them.
    statistics.add("n_documents", len(batch.rewards) * counts_documents)


def _trained_of_documents(batch: Batch) -> list[int]:
    return torch.bincount(batch.documents_N, minlength=len(batch.rewards)).tolist()


def _add_ratios(
    statistics: Statistics, batch: Batch, tokens: TokenNumbers, numbers: Hyperparameters
) -> None:
    """Add the statistics that compare the policy with the sampling policy and with a reference."""
    logprobs_N = tokens.logprobs_N
    if tokens.advantages_N is not None:
        old_N = objectives.old_logprobs(batch.old_logprobs_N, logprobs_N)
        clipped_N, held_N = objectives.clipped_tokens(
            logprobs_N,
            old_N,
            tokens.advantages_N,
            low=numbers.clip_ratio_low,
            high=numbers.clip_ratio_high,
            dual=numbers.dual_clip,
        )
        statistics.add("clip_fraction", int(clipped_N.sum()))
        statistics.add("dual_clip_fraction", int(held_N.sum()))
        statistics.add("kl_old", float((old_N - logprobs_N).sum()))
    if tokens.reference_logprobs_N is not None:
        divergence = objectives.divergence(
            logprobs_N,
            tokens.reference_logprobs_N,
            estimator=numbers.kl_estimator,
            coefficient=1.0,
            trained_tokens=1,
        )
        statistics.add("kl_reference", float(divergence))
