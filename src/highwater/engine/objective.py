"""Objectives: ordinary functions of the log-probabilities of the trained tokens.

Shapes:  N trained tokens of this rank's micro-batch
"""

from torch import Tensor


def sft(logprobs_N: Tensor, *, trained_tokens: int) -> Tensor:
    """This micro-batch's share of the mean negative log-likelihood over the whole batch.

    ``trained_tokens`` counts all micro-batches of all ranks, so that shares add up to the mean, and so do their gradients.
    A rank without a trained token gives 0, with a graph.
    """
    return -logprobs_N.sum() / max(1, trained_tokens)
