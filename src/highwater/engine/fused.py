"""Fused modules in the place of a family's own, where a trial on random numbers shows that they compute the same.

A family's RMS norm is a dozen elementwise kernels with float32 copies of its input; PyTorch's is one kernel each way that keeps
the input and one number per row.
"""

from typing import Any, cast

import torch
from torch import nn

PROOF_SIZE = 32
PROOF_TOLERANCE = 1e-5
"""Relative, in float32: another order of the same operations. A norm that adds 1 to its weight is off by far more."""


def fuse_norms(model: nn.Module) -> int:
    """Replace every RMS norm that PyTorch's own equals, in place, under the same parameter names; returns how many."""
    proven: dict[tuple[type[nn.Module], float], bool] = {}
    count = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            eps = _epsilon(norm)
            if eps is None:
                continue
            kind = (type(norm), eps)
            if kind not in proven:
                proven[kind] = _computes_rms_norm(*kind)
            if proven[kind]:
                setattr(parent, name, _fused(norm, eps))
                count += 1
    return count


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of what calls itself an RMS norm over its last dimension; None for anything else."""
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return None
    if [name for name, _ in module.named_parameters()] != ["weight"] or cast(torch.Tensor, module.weight).ndim != 1:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _computes_rms_norm(kind: type[nn.Module], eps: float) -> bool:
    """Whether a small one of this kind equals PyTorch's RMS norm, for inputs of several sizes and any weight."""
    try:
        theirs = cast(Any, kind)(PROOF_SIZE, eps=eps).to(device="cpu", dtype=torch.float32)
    except TypeError:
        return False  # made in another way: left alone
    generator = torch.Generator().manual_seed(0)
    ours = nn.RMSNorm(PROOF_SIZE, eps=eps)
    inputs = torch.randn(64, PROOF_SIZE, generator=generator) * torch.logspace(-4, 2, 64)[:, None]
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(PROOF_SIZE, generator=generator))
        ours.weight.copy_(theirs.weight)
        return bool(torch.allclose(theirs(inputs), ours(inputs), rtol=PROOF_TOLERANCE, atol=PROOF_TOLERANCE))


def _fused(norm: nn.Module, eps: float) -> nn.RMSNorm:
    weight = cast(nn.Parameter, norm.weight)
    fused = nn.RMSNorm(weight.shape[0], eps=eps, device=weight.device, dtype=weight.dtype)
    fused.weight = weight
    return fused
