"""Router loss: auxiliary loss of a mixture of experts, so that a document uses many experts.

The loss of a document, over all its tokens and all layers together, is ``X * sum_e f_e P_e``: f_e
is how often expert e was chosen, per token and layer, and P_e the routers' mean probability of e.
A step's loss is the mean over its documents, weighted by their tokens: the same however documents
are split into micro-batches and ranks (docs/decisions/008). For a single document it is
what transformers adds to the loss; for several in one batch transformers takes f and P over all of
them, and its value depends on the split.

Only P has a gradient, so that ranks that share a document exchange only how often each expert was
chosen: f of the whole document, times a rank's own probabilities, is that rank's share of the loss,
with the right gradient.

Shapes:  T tokens of this rank  D documents of the micro-batch  X experts  K experts per token
Source: Fedus et al., Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6, as
        transformers computes it.
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from highwater.errors import ModelError

_LOSS = "load_balancing_loss_func"
"""Name of the loss function in a family's module, if its causal LM has this loss."""
_ITS_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Arguments of the known loss function; a family with other arguments has another loss."""


class Routers:
    """Sums up the outputs of a model's routers in a forward pass, for their auxiliary loss.

    The repeated forward pass of a recomputation is not counted.
    """

    def __init__(
        self,
        routers: Sequence[nn.Module],
        *,
        output: int,
        experts_per_token: int,
        coefficient: float,
    ) -> None:
        """Hook the routers; ``output``: index of the logits (T, X) in their outputs."""
        self.experts_per_token = experts_per_token
        self.coefficient = coefficient
        self._output = output
        self._documents_T = torch.empty(0, dtype=torch.long)
        """Document number of each token; padding has the number of documents."""
        self._documents = self._rows = 0
        self._following = False
        self._seen: list[tuple[Tensor, Tensor]] = []
        for router in routers:
            router.register_forward_hook(self._follow)

    def begin(self, documents_T: Tensor, *, documents: int, is_padded: bool) -> None:
        """Begin a forward pass over ``documents`` documents.

        ``documents_T`` is the document number of each token; padding, if ``is_padded``, has the
        number ``documents``. The backward pass must come before the next forward pass begins.
        """
        self._seen, self._following = [], True
        self._documents_T, self._documents = documents_T, documents
        self._rows = documents + is_padded

    def loss(self, group: dist.ProcessGroup | None) -> Tensor:
        """End a forward pass and return this rank's share of its loss, times the coefficient.

        Shares add up over ``group`` (None: this rank) to the sum over documents of tokens times
        loss. A step's loss is the sum of all ranks' and micro-batches' shares, over its tokens.
        """
        self._following = False
        seen, self._seen = self._seen, []
        chosen_DX = torch.stack([chosen for chosen, _ in seen]).sum(dim=0)
        probabilities_DX = torch.stack([probabilities for _, probabilities in seen]).sum(dim=0)
        if group is not None:
            dist.all_reduce(chosen_DX, group=group)
        rows_D = chosen_DX.sum(dim=1) // self.experts_per_token
        load_DX = chosen_DX.to(probabilities_DX.dtype) / rows_D[:, None]
        experts, layers = chosen_DX.shape[1], len(seen)
        return self.coefficient * experts / layers * (load_DX * probabilities_DX).sum()

    def _follow(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        logits_TX: Tensor = output[self._output] if isinstance(output, tuple) else output
        experts = logits_TX.shape[1]
        # Sums are taken here, before recomputation drops the logits. The recomputation takes them
        # again, to no effect.
        wide = torch.promote_types(logits_TX.dtype, torch.float32)
        probabilities_TX = logits_TX.softmax(dim=-1, dtype=wide)
        rows = self._rows
        probabilities_DX = probabilities_TX.new_zeros(rows, experts).index_add(
            0, self._documents_T, probabilities_TX
        )
        with torch.no_grad():
            chosen_TK = (
                logits_TX.topk(self.experts_per_token, dim=-1).indices
                + experts * self._documents_T[:, None]
            )
            chosen = torch.zeros(rows * experts, dtype=torch.long, device=chosen_TK.device)
            chosen.scatter_add_(0, chosen_TK.flatten(), torch.ones_like(chosen_TK).flatten())
        if self._following:
            own = slice(self._documents)  # without the row of padding
            self._seen.append((chosen.view(rows, experts)[own], probabilities_DX[own]))


def follow_routers(causal_lm: nn.Module) -> Routers | None:
    """Follow a model's routers if its config asks for their auxiliary loss; else return None.

    The config is read as transformers reads it. Raises ModelError if the loss is requested and the
    family computes it in a way of its own.
    """
    loose: Any = causal_lm
    config: Any = loose.config
    loss = getattr(sys.modules[type(causal_lm).__module__], _LOSS, None)
    if loss is None or not getattr(config, "output_router_logits", False):
        return None
    # transformers' own record of which modules are routers, and where their logits are.
    recorder: Any = (getattr(causal_lm, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", ())
    within = getattr(recorder, "layer_name", None) or ""
    named = causal_lm.named_modules()
    routers = [module for name, module in named if isinstance(module, kind) and within in name]
    coefficient = getattr(loose, "router_aux_loss_coef", None)
    is_known = tuple(inspect.signature(loss).parameters) == _ITS_ARGUMENTS
    if not is_known or coefficient is None or not routers:
        raise ModelError(
            f"{config.model_type} asks for its routers' auxiliary loss (output_router_logits), "
            "which is one of its own",
            hint='set "output_router_logits": false in its config.json to train without that loss',
        )
    if not coefficient:
        return None
    return Routers(
        routers,
        output=getattr(recorder, "index", 0),
        experts_per_token=loose.num_experts_per_tok,
        coefficient=coefficient,
    )
