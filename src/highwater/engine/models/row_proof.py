"""Proof that the row kernels of this machine scale and cap logits as PyTorch does in float64.

It runs before a model is trained whose family transforms its logits: a few rows, forward and
backward, in milliseconds. Where nothing is transformed, the kernels' own tests have to do.

Shapes:  N rows  V vocabulary
"""

import torch
from torch import Tensor

from highwater.engine.kernels import rows as row_kernels
from highwater.errors import MachineError
from highwater.model.logit_transform import LogitTransform

_ROWS, _VOCABULARY = 3, 4097
"""Two blocks of the kernels, the last one of a single logit."""
_REACH = 1.5
"""What the largest logits are, times the cap: some are bent, few are flat."""
_TOLERANCE = 1e-4
"""Norm-relative, of float32 against float64: a kernel without the transform is off by far more."""


def prove_rows(transform: LogitTransform, device: torch.device) -> None:
    """Raise MachineError unless statistics and gradient of rows on ``device`` are PyTorch's."""
    generator = torch.Generator().manual_seed(0)
    reach = 4.0 if transform.soft_cap is None else _REACH * transform.soft_cap
    logits_NV = torch.randn(_ROWS, _VOCABULARY, generator=generator)
    logits_NV *= reach / transform.scale / float(logits_NV.abs().max())
    labels_N = torch.randint(_VOCABULARY, (_ROWS,), generator=generator)
    upstream_2N = torch.randn(2, _ROWS, generator=generator)
    found = _both_passes(logits_NV.to(device), labels_N, upstream_2N, transform)
    expected = _both_passes(logits_NV.double(), labels_N, upstream_2N, transform)
    for ours, exact in zip(found, expected, strict=True):
        difference = float((ours.cpu().double() - exact).norm() / exact.norm())
        if not difference <= _TOLERANCE:
            raise MachineError(
                f"the row kernels of {device} differ from PyTorch by {difference:.1e} of what they "
                f"compute, with {transform}",
                hint="install the Triton that your PyTorch came with: `highwater doctor` says "
                "what is there",
            )


def _both_passes(
    logits_NV: Tensor, labels_N: Tensor, upstream_2N: Tensor, transform: LogitTransform
) -> tuple[Tensor, ...]:
    """Statistics of logits, and the gradient that is written over a copy of them."""
    labels_N, upstream_2N = labels_N.to(logits_NV.device), upstream_2N.to(logits_NV)
    logits_NV = logits_NV.clone()
    of = row_kernels.statistics(logits_NV, labels_N, transform)
    row_kernels.backward_(logits_NV, labels_N, of, upstream_2N[0], upstream_2N[1], transform)
    return (*of, logits_NV)
