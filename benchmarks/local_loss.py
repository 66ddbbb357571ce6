"""The loss of ranks that share a sequence: each from its own logits, against gathered logits.

``python benchmarks/local_loss.py`` (two GPUs, about a minute; ``--one-gpu`` has both ranks on
one, where peaks are the same and times mean nothing; ``--device cpu --tokens 2048 --vocabulary 5003
--hidden 64`` tries it with gloo). Each rank has the hidden states of its tokens
and the head. ``gathered`` is what post-processing usually does: every rank gathers the logits of
all tokens and computes the whole loss of them, by cross-entropy in float32 as Hugging Face has it,
or by this project's kernel, so that gathering is the only difference. Nothing is measured before
the loss and both gradients equal a float64 reference. Times are of the slowest rank, the contenders
taking turns; peaks are over forward and backward, inputs excluded, of the fullest rank; ratios are
over the first contender.

Shapes:  N tokens of a rank  T tokens of all ranks  E hidden size  V vocabulary
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from highwater.engine.kernels import rows as row_kernels
from highwater.engine.models.loss import token_statistics
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.collectives import gather_rows
from highwater.nouns.environment import STORE_VARIABLE
from highwater.nouns.settings import Loss
from process_environment import environment

TOLERANCE: Mapping[torch.dtype, float] = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Norm-relative tolerance against float64; bfloat16 keeps 8 bits, and rounds logits and their
gradients once each."""
ODD_SIZES = (515, 1031, 48)
"""Tokens of a rank, vocabulary and hidden size of what is compared with float64."""


class Inputs(NamedTuple):
    """What a rank has."""

    hidden_NE: Tensor
    weight_VE: Tensor
    labels_T: Tensor
    """Of all ranks, one rank's after the other's."""

    @property
    def own(self) -> slice:
        """Where this rank's tokens are among all."""
        first = dist.get_rank() * len(self.hidden_NE)
        return slice(first, first + len(self.hidden_NE))


LossOfRank = Callable[[Inputs], Tensor]
"""Computes what a rank goes backward from: it has, of the mean loss, at least its own tokens'
gradient, and no other's."""


def main() -> None:
    """Start the ranks; rank 0 prints ratios to stderr and the JSON to stdout or ``--out``."""
    arguments = _parse()
    if "RANK" in os.environ:
        measure(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {
            "WORLD_SIZE": str(arguments.ranks),
            STORE_VARIABLE: str(Path(folder) / "store"),
        }
        command = [sys.executable, __file__, *sys.argv[1:]]
        ranks = [
            subprocess.Popen(command, env=variables | _place(rank, one_gpu=arguments.one_gpu))
            for rank in range(arguments.ranks)
        ]
        _await(ranks)


def _place(rank: int, *, one_gpu: bool) -> dict[str, str]:
    """Variables of a rank. NCCL takes one process a GPU, which it knows by its host's name too."""
    if not one_gpu:
        return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    own_host = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return {"RANK": str(rank), "LOCAL_RANK": "0", **own_host}


def _await(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; where one fails, the others wait for it in vain, and are ended."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.1)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(1)


def measure(arguments: argparse.Namespace) -> None:
    """Be one rank: compare, measure every number of tokens, and as rank 0 print."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    process_mesh.join(device)
    for name, contender in CONTENDERS.items():
        _refuse_inexact(name, contender, device)
    rows = [
        _row(
            tokens,
            _inputs(
                tokens // arguments.ranks,
                arguments.vocabulary,
                arguments.hidden,
                device,
                _dtype(device),
            ),
            rounds=arguments.rounds,
        )
        for tokens in arguments.tokens
    ]
    if dist.get_rank() == 0:
        for row in rows:
            print(json.dumps({k: v for k, v in row.items() if k != "times_s"}), file=sys.stderr)
        sizes = {"vocabulary": arguments.vocabulary, "hidden": arguments.hidden}
        found = {"environment": environment(), "ranks": arguments.ranks, **sizes, "rows": rows}
        text = json.dumps(found, indent=1)
        if arguments.out:
            arguments.out.write_text(text + "\n", encoding="utf-8")
        else:
            print(text)
    process_mesh.leave()


def local(inputs: Inputs, *, loss: Loss, known: bool = False) -> Tensor:
    """This rank's share of the mean, from its own logits; ``known``: with gradients that are made
    in the forward pass.
    """
    tokens = len(inputs.labels_T)
    of = token_statistics(
        inputs.hidden_NE,
        inputs.weight_VE,
        inputs.labels_T[inputs.own],
        loss=loss,
        logprob_gradient=-1 / tokens if known else None,
    )
    return -of.logprobs_N.sum() / tokens


def gathered(inputs: Inputs, *, kernel: bool) -> Tensor:
    """The whole mean, from the logits of all ranks; by our kernel, or as Hugging Face has it."""
    logits_TV = _Gather.apply(inputs.hidden_NE @ inputs.weight_VE.T)
    if not kernel:
        return F.cross_entropy(logits_TV.float(), inputs.labels_T)
    return _KernelLoss.apply(logits_TV, inputs.labels_T)


class _Gather(torch.autograd.Function):
    """Every rank's rows. Each rank computes the whole loss of them, so that the gradient of its own
    rows is there already.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor) -> Tensor:
        ctx.rows = len(logits_NV)
        return gather_rows(logits_NV, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first = dist.get_rank() * ctx.rows
        return gradients[0][first : first + ctx.rows]


class _KernelLoss(torch.autograd.Function):
    """The mean negative log-likelihood of rows of logits, which are overwritten by their gradient:
    what the full loss does with a rank's own.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        of = row_kernels.statistics(logits_TV, labels_T)
        ctx.logits_TV, ctx.labels_T, ctx.of = logits_TV, labels_T, of
        return -of.logprob_N.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_TV, ctx.logits_TV = ctx.logits_TV, None
        for_logprob = torch.full_like(ctx.of.logprob_N, -1 / len(logits_TV)) * gradients[0]
        nothing = torch.zeros_like(for_logprob)
        row_kernels.backward_(logits_TV, ctx.labels_T, ctx.of, for_logprob, nothing)
        return logits_TV, None


CONTENDERS: Mapping[str, LossOfRank] = {
    "gathered, cross-entropy": partial(gathered, kernel=False),
    "gathered, kernel": partial(gathered, kernel=True),
    "local, full": partial(local, loss="full"),
    "local, chunked": partial(local, loss="chunked"),
    "local, chunked, gradient known": partial(local, loss="chunked", known=True),
}


def _refuse_inexact(name: str, contender: LossOfRank, device: torch.device) -> None:
    """Raise SystemExit where the loss or a gradient is not that of float64 over all tokens."""
    inputs = _inputs(*ODD_SIZES, device, _dtype(device))
    found = contender(inputs)
    gradients = torch.autograd.grad(found, inputs[:2])
    hidden_TE = gather_rows(inputs.hidden_NE.detach(), dist.group.WORLD).double().requires_grad_()
    weight_VE = inputs.weight_VE.detach().double().requires_grad_()
    exact = F.cross_entropy(hidden_TE @ weight_VE.T, inputs.labels_T)
    expected = torch.autograd.grad(exact, (hidden_TE, weight_VE))
    # A rank's share of the loss, and of the head's gradient: summed over the ranks.
    whole_loss = found.detach().double().clone()
    whole_VE = gradients[1].double()
    if name.startswith("local"):
        dist.all_reduce(whole_loss)
    dist.all_reduce(whole_VE)
    pairs = {
        "loss": (whole_loss, exact.detach()),
        "hidden gradient": (gradients[0].double(), expected[0][inputs.own]),
        "weight gradient": (whole_VE, expected[1]),
    }
    off = {what: float((a - b).norm() / b.norm()) for what, (a, b) in pairs.items()}
    if not max(off.values()) <= TOLERANCE[_dtype(device)]:
        raise SystemExit(f"{name} is not exact, so nothing is measured: {off}")


def _row(tokens: int, inputs: Inputs, *, rounds: int) -> dict[str, object]:
    """Times and peaks of every contender at one number of tokens."""
    peaks = {name: _peak_bytes(contender, inputs) for name, contender in CONTENDERS.items()}
    fits = {name: CONTENDERS[name] for name, peak in peaks.items() if peak is not None}
    times: dict[str, list[float]] = {name: [] for name in fits}
    for _ in range(rounds):
        for name, contender in fits.items():
            times[name].append(_time_s(contender, inputs))
    medians = {name: statistics.median(of) for name, of in times.items()}
    return {
        "tokens": tokens,
        "peak_bytes": peaks,
        "median_s": medians,
        "peak_ratio": _ratios({name: peak for name, peak in peaks.items() if peak is not None}),
        "time_ratio": _ratios(medians),
        "times_s": times,
    }


def _ratios(values: Mapping[str, float]) -> dict[str, float] | None:
    """How many times as much the first contender takes; None where it does not fit."""
    first = values.get(next(iter(CONTENDERS)))
    return None if first is None else {name: first / value for name, value in values.items()}


def _time_s(contender: LossOfRank, inputs: Inputs) -> float:
    """Seconds of forward and backward on the slowest rank."""
    _forget_gradients(inputs)
    _synchronize(inputs)
    dist.barrier()
    began = time.perf_counter()
    contender(inputs).backward()
    _synchronize(inputs)
    return _most(time.perf_counter() - began, inputs)


def _peak_bytes(contender: LossOfRank, inputs: Inputs) -> int | None:
    """Peak over forward and backward on the fullest rank; None where memory runs out on one."""
    try:
        contender(inputs).backward()  # compiles kernels and makes workspaces
        _forget_gradients(inputs)
        peak = _own_peak_bytes(contender, inputs)
    except torch.OutOfMemoryError:
        peak = -1
    _forget_gradients(inputs)
    if _most(float(peak < 0), inputs):
        return None
    return round(_most(float(peak), inputs))


def _own_peak_bytes(contender: LossOfRank, inputs: Inputs) -> int:
    if inputs.hidden_NE.device.type == "cuda":
        _synchronize(inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender(inputs).backward()
        _synchronize(inputs)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        contender(inputs).backward()
    events: Any = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most


def _most(value: float, inputs: Inputs) -> float:
    """The largest of all ranks' values."""
    most = torch.tensor(value, dtype=torch.float64, device=inputs.hidden_NE.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def _forget_gradients(inputs: Inputs) -> None:
    inputs.hidden_NE.grad = inputs.weight_VE.grad = None


def _synchronize(inputs: Inputs) -> None:
    if inputs.hidden_NE.device.type == "cuda":
        torch.cuda.synchronize()


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _inputs(
    tokens: int, vocabulary: int, hidden: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    """A rank's ``tokens``, its own; head and labels are the same on all ranks."""
    own, shared = (torch.Generator(device).manual_seed(seed) for seed in (1 + dist.get_rank(), 0))

    def normal(rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, hidden, device=device, dtype=dtype, generator=generator)

    weight_VE = (normal(vocabulary, shared) / hidden**0.5).requires_grad_()
    labels_T = torch.randint(
        vocabulary, (tokens * dist.get_world_size(),), device=device, generator=shared
    )
    return Inputs(normal(tokens, own).requires_grad_(), weight_VE, labels_T)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share the tokens")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="of all ranks together"
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, taking turns")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    if any(tokens % arguments.ranks for tokens in arguments.tokens):
        parser.error(f"--tokens have to be cut into {arguments.ranks} equal parts")
    return arguments


if __name__ == "__main__":
    main()
