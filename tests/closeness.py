"""How far what was computed is from what it should be: one measure for every test of numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def deviation(ours: "torch.Tensor", expected: "torch.Tensor", beside: float = 1e-300) -> float:
    """Relative to the norm of what is expected, or to ``beside`` where that is more; in float64."""
    wanted = expected.detach().double()
    return float((ours.detach().double() - wanted).norm()) / max(float(wanted.norm()), beside)


def assert_near(
    ours: Sequence["torch.Tensor"],
    expected: Sequence["torch.Tensor"],
    tolerance: float,
    beside: float = 1e-300,
) -> None:
    off = [deviation(*each, beside=beside) for each in zip(ours, expected, strict=True)]
    assert all(each <= tolerance for each in off), off


def assert_equal(ours: Sequence["torch.Tensor"], expected: Sequence["torch.Tensor"]) -> None:
    assert all(mine.equal(theirs) for mine, theirs in zip(ours, expected, strict=True))


def with_gradients(
    outputs: Sequence["torch.Tensor"], leaves: Sequence["torch.Tensor"], *, rounded: Any = None
) -> list["torch.Tensor"]:
    """Outputs, then the gradient of each leaf where those of the outputs are random: the same ones
    for the same shapes, ``rounded`` to a dtype where one of two sides is in it.
    """
    import torch

    generator = torch.Generator().manual_seed(len(outputs))
    drawn = [
        torch.randn(each.shape, generator=generator, dtype=torch.float64).to(rounded or each.dtype)
        for each in outputs
    ]
    upstream = [each.to(output) for each, output in zip(drawn, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
