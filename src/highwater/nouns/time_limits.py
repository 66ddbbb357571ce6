"""Time limits of a search: how lengths are proven, how long the search may take, and each trial."""

from collections.abc import Mapping, Sequence

from highwater.errors import UsageError
from highwater.model.model import Model
from highwater.nouns.request import Request
from highwater.nouns.study import Cell, Proof
from highwater.nouns.trial import Device
from highwater.units import format_seconds

SHORTEST_TIMEOUT_S: Mapping[Device, float] = {"cpu": 10.0, "cuda": 60.0}
"""Shortest timeout of a trial, in seconds, by device. From launch to first step a trial takes
seconds on the CPU, 12 to 21 s on a GPU: less would end every trial before it."""
USUAL_BUDGET_S = 15 * 60.0
"""Time for each layout where nobody names any: what one waits for beside other work."""
_TRIALS_OF_A_CELL = 3
"""Trials that a cell's share of the budget is divided among: its edge takes two or three."""


def proof_of(request: Request, model: Model, device: Device) -> Proof:
    """How the lengths of a search are proven: as is asked; by memory on GPUs, where that can be;
    else in full. Who names a time limit alone wants each trial to have it, in full.
    """
    if request.proof is not None:
        return request.proof
    is_timed = request.timeout is not None and request.budget is None
    if device != "cuda" or request.dry_run or is_timed or request.method != "bisect":
        return "full"
    is_other = request.attention != "dense" or request.data is not None or model.shape.layers < 2
    return "full" if is_other else "memory"


def budget_of(
    request: Request, proof: Proof, device: Device, cells: Sequence[Cell]
) -> float | None:
    """Seconds that a search may take; None: as long as its trials do.

    Raises UsageError for too few.
    """
    if request.budget_s is not None:
        least_s = SHORTEST_TIMEOUT_S[device]
        if request.budget_s < least_s:
            raise UsageError(
                f"a budget of {format_seconds(request.budget_s)} ends before a trial has",
                hint=f"use `--budget {least_s:.0f}s` or more, for example `--budget 15m`",
            )
        return request.budget_s
    is_named = request.proof is not None or request.timeout is not None
    if proof == "full" or is_named:
        return None
    return USUAL_BUDGET_S * len({cell.layout for cell in cells})


def timeout_of(
    request: Request, proof: Proof, budget_s: float | None, device: Device, cells: Sequence[Cell]
) -> float:
    """Seconds that one full trial may take: as is asked, or the trial's share of the budget."""
    if request.timeout is not None or proof == "full" or budget_s is None:
        return request.timeout_s
    return max(SHORTEST_TIMEOUT_S[device], budget_s / (_TRIALS_OF_A_CELL * len(cells)))
