"""How far what was computed is from what it should be: one measure for every test of numbers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def deviation(ours: "torch.Tensor", expected: "torch.Tensor", beside: float = 1e-300) -> float:
    """Relative to the norm of what is expected, or to ``beside`` where that is more; in float64."""
    wanted = expected.detach().double()
    return float((ours.detach().double() - wanted).norm()) / max(float(wanted.norm()), beside)
