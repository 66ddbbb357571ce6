"""Quantities: every number that the statistics of a step have, what it is over, and which ranks it
is put together from. The reference page is written from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Group = Literal["rank", "context", "data", "all"]
"""Ranks that a number is put together from: this ``rank`` alone; the ``context`` ranks, which share
its sequences; the ``data`` ranks, which have the same place in other sequences; or ``all``."""
How = Literal["sum", "mean", "min", "max", "each", "same", "rate"]
"""``each``: the number of every rank, as a list by rank. ``same``: every rank has it already.
``rate``: from other quantities."""

DOCUMENT = "document"
"""The ``per`` of quantities with a number for each document, over all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Rule by which one number of a step is put together."""

    how: How
    says: str = ""
    """Description of the number, in a line of Markdown."""
    per: str | None = None
    """Denominator of a mean: a count of the step, a sum of the caller's own, or DOCUMENT."""
    group: Group = "all"
    is_count: bool = False
    """True if it is a whole number, put together from whole numbers alone."""


def _count(says: str, **how: str) -> Quantity:
    return Quantity(**{"how": "sum", **how}, says=says, is_count=True)  # pyright: ignore[reportArgumentType]


def _of_tokens(says: str) -> Quantity:
    return Quantity(how="mean", per="n_valid_tokens", says=says)


def _by_rank(says: str) -> Quantity:
    return Quantity(how="each", says=says, group="rank", is_count=True)


QUANTITIES: Mapping[str, Quantity] = {
    "loss": Quantity(how="same", says="what is minimised, over the trained tokens or pairs"),
    "gradient_norm": Quantity(how="same", says="norm of the whole gradient, before clipping"),
    "critic_gradient_norm": Quantity(how="same", says="the critic's, where there is one"),
    "n_tokens": _count("tokens of the step, without padding"),
    "n_valid_tokens": _count("tokens whose labels are trained on"),
    "prompt_tokens": _count("all other tokens: `n_tokens` less `n_valid_tokens`"),
    "n_documents": _count("documents of the step"),
    "n_valid_documents": _count("documents with a token that is trained on", per=DOCUMENT),
    "n_tokens_by_rank": _by_rank("of these tokens, those that each rank held"),
    "n_valid_tokens_by_rank": _by_rank("of these, those that each rank held"),
    "prompt_tokens_by_rank": _by_rank("of these, those that each rank held"),
    "nll": _of_tokens("negative log-likelihood of the labels, in nats"),
    "entropy": _of_tokens("entropy of the distribution that a label is drawn from, in nats"),
    "ppl_avg": Quantity(
        how="mean",
        per=DOCUMENT,
        says="mean perplexity of a document: e to the mean `nll` of its trained tokens",
    ),
    "ppl_min": Quantity(how="min", per=DOCUMENT, says="the smallest perplexity of a document"),
    "ppl_max": Quantity(how="max", per=DOCUMENT, says="the largest perplexity of a document"),
    "logit_min": Quantity(how="min", says="the smallest logit, with `--logit-range`"),
    "logit_max": Quantity(how="max", says="the largest logit, with `--logit-range`"),
    "logit_min_avg": _of_tokens("the smallest logit of a token, with `--logit-range`"),
    "logit_max_avg": _of_tokens("the largest logit of a token, with `--logit-range`"),
    "clip_fraction": _of_tokens("share of tokens whose ratio is clipped (verl's `pg_clipfrac`)"),
    "dual_clip_fraction": _of_tokens(
        "share of tokens that the dual clip holds (verl's `pg_clipfrac_lower`)"
    ),
    "kl_old": _of_tokens(
        "divergence from the policy that sampled the tokens, k1 (verl's `ppo_kl`)"
    ),
    "kl_reference": _of_tokens(
        "divergence from the reference, by `--kl-estimator`, not yet weighted"
    ),
    "step_time_s": Quantity(how="max", says="seconds of the step on the slowest rank"),
    "model_flops": Quantity(
        how="sum", says="FLOPs of the models on these documents, without recomputation"
    ),
    "tokens_per_s": Quantity(how="rate", says="`n_tokens` a second", per="step_time_s"),
    "mfu": Quantity(
        how="rate",
        says="`model_flops` a second over the data sheets' dense bfloat16 FLOP/s of all GPUs",
        per="step_time_s",
    ),
    "statistics_time_s": Quantity(
        how="rate",
        says="seconds that rank 0 took for these numbers, in no step's time",
        group="rank",
    ),
    "peak_allocated_bytes": _by_rank(
        "most memory of tensors that the allocator handed out, since the first step began"
    ),
    "peak_reserved_bytes": _by_rank("most memory that the allocator held, since then"),
    "device_used_bytes": _by_rank("most memory in use as the driver says, since then"),
    "peak_data_segment_bytes": _by_rank("on the CPU: largest data segment of the process"),
}
"""The quantities, in the order in which a line has them. A line leaves out what a step has not."""
