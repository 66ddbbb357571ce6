"""The auxiliary loss of a mixture of experts: what makes its routers spread the tokens, over all ranks that share a micro-batch.

For one micro-batch, with all its tokens and all its layers together: ``X * sum_e f_e P_e``, where f_e is how many of the chosen
experts are e, per token and layer, and P_e the routers' mean probability of e. Only P has a gradient, so that ranks have to tell
each other no more than how often each expert was chosen: f of the whole micro-batch, times a rank's own probabilities, is that
rank's share of the loss, and its gradient is the whole's.

Shapes:  T tokens of this rank  X experts  K experts per token
Source: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6, as transformers computes it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Routers:
    """Follows the routers of one model through a forward pass; the forward pass of recomputation repeats it and is not counted."""

    def __init__(self, routers: list[nn.Module], *, output: int, experts_per_token: int, coefficient: float) -> None:
        """``output`` is the place of the logits (T, X) in what a router returns."""
        self.experts_per_token = experts_per_token
        self.coefficient = coefficient
        self._output = output
        self._padding_tokens = 0
        self._following = False
        self._seen: list[tuple[Tensor, Tensor]] = []
        for router in routers:
            router.register_forward_hook(self._follow)

    def begin(self, *, padding_tokens: int) -> None:
        """A forward pass begins, whose last tokens are padding. Its backward pass has to come before the next one begins."""
        self._seen, self._following, self._padding_tokens = [], True, padding_tokens

    def loss(self, group: dist.ProcessGroup | None) -> Tensor:
        """The forward pass has ended: the loss, times its coefficient, so that its mean over the group's ranks is the whole's."""
        self._following = False
        seen, self._seen = self._seen, []
        chosen_X = torch.stack([chosen for chosen, _ in seen]).sum(dim=0)
        probabilities_X = torch.stack([probabilities for _, probabilities in seen]).sum(dim=0)
        ranks = 1
        if group is not None:
            ranks = dist.get_world_size(group)
            dist.all_reduce(chosen_X, group=group)
        rows = chosen_X.sum() // self.experts_per_token
        load_X = chosen_X.to(probabilities_X.dtype) / rows
        share = (load_X * probabilities_X).sum() / rows * len(chosen_X)
        return self.coefficient * ranks * share

    def _follow(self, _: nn.Module, __: Any, output: Any) -> None:
        logits_TX: Tensor = output[self._output] if isinstance(output, tuple) else output
        logits_TX = logits_TX[: len(logits_TX) - self._padding_tokens]
        # Sums are taken here, where recomputation drops what they were taken of; and again when it comes back, to no other end.
        wide = torch.promote_types(logits_TX.dtype, torch.float32)
        probabilities_X = logits_TX.softmax(dim=-1, dtype=wide).sum(dim=0)
        with torch.no_grad():
            chosen = logits_TX.topk(self.experts_per_token, dim=-1).indices.flatten()
            chosen_X = torch.zeros(logits_TX.shape[1], dtype=torch.long, device=chosen.device)
            chosen_X.scatter_add_(0, chosen, torch.ones_like(chosen))
        if self._following:
            self._seen.append((chosen_X, probabilities_X))


def follow_routers(causal_lm: nn.Module) -> Routers | None:
    """The routers of a mixture of experts whose config asks for the auxiliary loss; None for any other model."""
    config: Any = causal_lm.config
    coefficient = getattr(config, "router_aux_loss_coef", None)
    recorder: Any = (getattr(causal_lm, "_can_record_outputs", None) or {}).get("router_logits")
    kind = recorder if isinstance(recorder, type) else getattr(recorder, "target_class", None)
    routers = [module for module in causal_lm.modules() if kind is not None and isinstance(module, kind)]
    if not coefficient or not routers:
        return None
    return Routers(
        routers, output=getattr(recorder, "index", 0), experts_per_token=config.num_experts_per_tok, coefficient=coefficient
    )
