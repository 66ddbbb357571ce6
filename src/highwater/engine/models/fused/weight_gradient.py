"""The gradient of a weight, summed over parts of the tokens.

It is as exact as if it had been computed in one product: sums are wide.

Shapes:  T tokens of one part  O outputs of the weight  I its inputs
"""

import torch
from torch import Tensor


class WeightGradient:
    """Sum over parts of ``gradient.T @ input``, in float32 where the weight is narrower."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.dtype = weight_OI.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.sum_OI = torch.zeros_like(weight_OI, dtype=self.wide)

    def add(self, gradient_TO: Tensor, input_TI: Tensor) -> None:
        """Add one part's share."""
        if self.dtype == self.wide:
            self.sum_OI.addmm_(gradient_TO.T, input_TI)
        elif gradient_TO.is_cuda:
            # The product is added in float32, and never rounded to the weight's dtype in between.
            torch.addmm(self.sum_OI, gradient_TO.T, input_TI, out_dtype=self.wide, out=self.sum_OI)
        else:
            self.sum_OI += gradient_TO.T @ input_TI

    def total(self) -> Tensor:
        """Return the gradient in the weight's own dtype, and free the wide sum."""
        total_OI = self.sum_OI.to(self.dtype)
        del self.sum_OI
        return total_OI
