"""Objectives: what each needs besides a policy and its optimizer, a row for each.

Everybody reads the row. The name alone is compared where the objective's own formula is chosen
(engine/training/step.py), and where another trainer's words for it are (emit/).

Completions: TRL's GRPO generates a batch of whole groups, and a step's micro-batches are that
batch. Source: ``num_generations`` and ``generation_batch_size`` in ``trl/trainer/grpo_config.py``
of trl 1.16.0.
"""

import math
from collections.abc import Mapping
from typing import Literal

from highwater.nouns.codec import Record

Objective = Literal["sft", "grpo", "ppo", "rw", "dpo"]
Head = Literal["tokens", "scalar"]
Reference = Literal["none", "divergence", "margin"]
Advantages = Literal["none", "groups", "tokens"]


class ObjectiveTraits(Record, frozen=True, kw_only=True):
    """What an objective needs of data, models and the time before a step's update."""

    pairs: bool = False
    """Documents come in pairs, the chosen one first, and the loss is a mean over all pairs of the
    step. False: they come one by one, and it is a mean over all trained tokens."""
    head: Head = "tokens"
    """``tokens``: log-probabilities of tokens, from logits that are whole or in chunks. ``scalar``:
    one number in the place of the vocabulary, and no logits."""
    reference: Reference = "none"
    """What a frozen copy of the policy is for, whose log-probabilities are computed before the
    update: a divergence from it at each trained token, or the margin by which it prefers the chosen
    document of a pair. ``none``: there is no copy."""
    critic: bool = False
    """A second model of token values may be trained along; its values are computed before the
    update."""
    advantages: Advantages = "none"
    """What weighs the clipped ratio of new to old probability: a document's reward against those of
    its group, or an advantage of each token. ``none``: no ratio is in the loss, nor an entropy."""

    @property
    def gives_scalars(self) -> bool:
        """Whether the policy has one number in the place of the vocabulary."""
        return self.head == "scalar"

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the policy is held, and runs over every micro-batch."""
        return self.reference != "none"

    @property
    def is_of_plain_documents(self) -> bool:
        """Whether a document stands by itself, neither compared with another nor rewarded."""
        return not self.pairs and self.advantages == "none"

    @property
    def documents_together(self) -> int:
        """Documents that one micro-batch has all of, or none."""
        return 2 if self.pairs else 1


TRAITS: Mapping[Objective, ObjectiveTraits] = {
    "sft": ObjectiveTraits(),
    "grpo": ObjectiveTraits(reference="divergence", advantages="groups"),
    "ppo": ObjectiveTraits(critic=True, advantages="tokens"),
    "rw": ObjectiveTraits(pairs=True, head="scalar"),
    "dpo": ObjectiveTraits(pairs=True, reference="margin"),
}


def without_reference(objective: Objective) -> Objective:
    """The objective most like this one, in its data and its loss, that holds no reference."""
    traits = TRAITS[objective]

    def likeness(name: Objective) -> tuple[bool, bool]:
        other = TRAITS[name]
        is_clipped = (other.advantages == "none") == (traits.advantages == "none")
        return other.pairs == traits.pairs, is_clipped

    return max((name for name, each in TRAITS.items() if not each.has_reference), key=likeness)


GENERATIONS = 8
"""``num_generations`` of GRPOConfig: a generation batch is a multiple of it."""


def generation_micro_batches(rows: int, gpus: int, generations: int = GENERATIONS) -> int:
    """Micro-batches of ``rows`` sequences on each of so many GPUs that hold whole groups."""
    together = rows * gpus
    return math.lcm(generations, together) // together
