"""Bytes per token and vocabulary entry of the loss paths: ours beside Hugging Face's, in one run.

``python benchmarks/loss.py`` (one GPU, about a minute). The slope of the loss's own peak
(forward and backward, inputs excluded) between two token counts is what a path costs per token;
divided by the vocabulary it does not depend on the model. No memory is reported before the values
and both gradients equal a float64 reference.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.engine.models.loss import token_statistics
from highwater.nouns.settings import Loss
from process_environment import environment

VOCABULARY = 151_936
HIDDEN = 1024
TOKENS = (8192, 16384)
TOLERANCE = 1e-2
"""Norm-relative tolerance against float64.

bfloat16 keeps 8 bits, and rounds logits and their gradients once each.
"""

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Sum over tokens of a loss, from hidden states NE, weight VE and labels N."""


class Contender(NamedTuple):
    """A way to compute a loss, and what it has to equal."""

    compute: LossOf
    exact: LossOf
    """The reference, in the dtype of its inputs."""


def main() -> None:
    """Print a table to stderr and the JSON document to stdout or ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    rows = [measure(name, path) for name, path in CONTENDERS.items()]
    for row in rows:
        cost = f"{row['bytes_per_token_vocabulary']:6.3f} bytes / (token x vocabulary)"
        print(f"{row['path']:>18}  {cost}", file=sys.stderr)
    text = json.dumps(
        {"environment": environment(), "vocabulary": VOCABULARY, "hidden": HIDDEN, "rows": rows},
        indent=1,
    )
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def measure(name: str, path: Contender) -> dict[str, object]:
    """Deviations from float64, peaks at both token counts, and their slope."""
    deviations = compare(path)
    if max(deviations.values()) > TOLERANCE:
        raise SystemExit(f"{name} is not exact, so it is not measured: {deviations}")
    peaks = [peak_bytes(path, tokens) for tokens in TOKENS]
    bytes_per_token_vocabulary = (peaks[1] - peaks[0]) / (TOKENS[1] - TOKENS[0]) / VOCABULARY
    return {
        "path": name,
        "bytes_per_token_vocabulary": bytes_per_token_vocabulary,
        "tokens": list(TOKENS),
        "peak_bytes": peaks,
        "norm_relative_deviation": deviations,
    }


def compare(path: Contender, *, tokens: int = 1031, vocabulary: int = 5003) -> dict[str, float]:
    """Norm-relative deviation of the loss and its gradients from float64, on odd sizes.

    Both are computed from the same bfloat16 inputs.
    """
    hidden, weight, labels = _inputs(tokens, vocabulary)
    wide = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    found, exact = path.compute(hidden, weight, labels), path.exact(*wide, labels)
    ours = (found.detach(), *torch.autograd.grad(found, (hidden, weight)))
    reference = (exact.detach(), *torch.autograd.grad(exact, wide))
    names = ("loss", "hidden_gradient", "weight_gradient")
    return {
        n: float((a.double() - b).norm() / b.norm())
        for n, a, b in zip(names, ours, reference, strict=True)
    }


def peak_bytes(path: Contender, tokens: int) -> int:
    """Peak allocated bytes over forward and backward, less what was alive before."""
    inputs = _inputs(tokens, VOCABULARY)
    path.compute(*inputs).backward()  # compiles kernels and makes workspaces
    for tensor in inputs[:2]:
        tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    path.compute(*inputs).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def hugging_face(hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor) -> Tensor:
    """Loss of transformers' ForCausalLMLoss: all logits, upcast to float32, cross-entropy."""
    return F.cross_entropy((hidden_NE @ weight_VE.T).float(), labels_N, reduction="sum")


def eager_entropy(hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor) -> Tensor:
    """Loss with entropy as a trainer writes it that has ordinary logits."""
    log_p = torch.log_softmax((hidden_NE @ weight_VE.T).float(), dim=-1)
    return -log_p.gather(1, labels_N[:, None]).sum() - (log_p.exp() * log_p).sum()


def highwater_loss(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    *,
    loss: Loss,
    entropy: bool,
    logprob_gradient: float | None = None,
) -> Tensor:
    """Loss of this project: negative log-likelihood, and the entropy where it is asked for."""
    of = token_statistics(
        hidden_NE, weight_VE, labels_N, loss=loss, logprob_gradient=logprob_gradient
    )
    return -of.logprobs_N.sum() + (of.entropies_N.sum() if entropy else 0.0)


def _exact(hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(hidden_NE @ weight_VE.T, labels_N, reduction="sum")


def _exact_with_entropy(hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor) -> Tensor:
    log_p = torch.log_softmax(hidden_NE @ weight_VE.T, dim=-1)
    return -log_p.gather(1, labels_N[:, None]).sum() - (log_p.exp() * log_p).sum()


CONTENDERS: dict[str, Contender] = {
    "hugging face": Contender(hugging_face, _exact),
    "full": Contender(partial(highwater_loss, loss="full", entropy=False), _exact),
    "chunked": Contender(partial(highwater_loss, loss="chunked", entropy=False), _exact),
    "chunked, gradient known": Contender(
        partial(highwater_loss, loss="chunked", entropy=False, logprob_gradient=-1.0), _exact
    ),
    "eager + entropy": Contender(eager_entropy, _exact_with_entropy),
    "full + entropy": Contender(
        partial(highwater_loss, loss="full", entropy=True), _exact_with_entropy
    ),
    "chunked + entropy": Contender(
        partial(highwater_loss, loss="chunked", entropy=True), _exact_with_entropy
    ),
}


def _inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
        for rows in (tokens, vocabulary)
    )
    weight = weight / HIDDEN**0.5
    labels = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


if __name__ == "__main__":
    main()
