"""The bound of ``--memory`` around a foreign trainer, on GPUs: through PyTorch's own allocator.

Every process of it reads PYTORCH_ALLOC_CONF, whose ``per_process_memory_fraction`` bounds what its
allocator reserves of the whole card. Context and NCCL come on top, as measured with our engine.
Source: c10/cuda/CUDAAllocatorConfig.h of PyTorch 2.11 to 2.13.
"""

from collections.abc import Sequence

from highwater.errors import UsageError
from highwater.memory.formula.outside_allocator import context_bytes, outside_terms
from highwater.model.model import load_model
from highwater.nouns.allocator_variables import ALLOCATOR_MODES, ALLOCATOR_VARIABLES
from highwater.nouns.trial import MemoryBudget, RankReport, TrialSpec
from highwater.trials.probe import probe
from highwater.units import GIB, format_bytes

_OVER_BYTES = 2 * GIB
"""What context and NCCL of another trainer may take more than those of our engine. A trainer whose
memory is not PyTorch's goes past the bound by far more."""
_DIGITS = 6
"""Digits of the fraction: of the largest card a millionth is a few hundred KiB."""


def bounded_allocator(spec: TrialSpec, gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Variables that bound the allocators of a trial's processes; none without a bound."""
    budget = memory_budget(spec)
    totals = [gpu.memory_total_bytes for gpu in probe(gpus).gpus[: spec.layout.gpus]]
    if budget is None or spec.device == "cpu" or not totals:
        return {}
    if budget.allocator_cap_bytes <= 0:
        raise UsageError(
            f"a memory of {format_bytes(budget.budget_bytes)} is taken by context and NCCL alone",
            hint="use a larger `--memory`",
        )
    shares = 10**_DIGITS
    share = min(shares, budget.allocator_cap_bytes * shares // min(totals))
    mode = ALLOCATOR_MODES[spec.settings.allocator]
    value = f"{mode},per_process_memory_fraction:{share / shares:.{_DIGITS}f}"
    return dict.fromkeys(ALLOCATOR_VARIABLES, value)


def past_the_bound(ranks: Sequence[RankReport]) -> str | None:
    """That a GPU had more in use than its bound allows, in words; None where none had."""
    for rank in ranks:
        used, budget = rank.memory.device_used_bytes, rank.budget
        if used is None or budget is None or used <= budget.budget_bytes + _OVER_BYTES:
            continue
        return (
            f"{format_bytes(used)} of GPU {rank.rank} were in use, and `--memory` is "
            f"{format_bytes(budget.budget_bytes)}: it bounds PyTorch's allocator alone"
        )
    return None


def memory_budget(spec: TrialSpec) -> MemoryBudget | None:
    """The parts of a trial's bound; None without one."""
    if spec.memory_budget_bytes is None:
        return None
    context = context_bytes(spec.device, gpus=spec.layout.gpus)
    shape = load_model(spec.model_directory).shape
    terms = outside_terms(shape, spec.settings, spec.layout, spec.device)
    nccl = sum(term.bytes for term in terms if "NCCL" in term.name)
    return MemoryBudget(
        budget_bytes=spec.memory_budget_bytes,
        context_bytes=context,
        nccl_bytes=nccl,
        allocator_cap_bytes=spec.memory_budget_bytes - context - nccl,
    )
