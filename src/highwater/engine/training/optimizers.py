"""Optimizers: AdamW on a model's shards; all its memory is allocated before the first step."""

import re
from typing import Any

import torch
from torch import nn

from highwater.engine.models.weights import name_in_files
from highwater.engine.training.host_states import HostStateAdamW
from highwater.errors import MachineError
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.objective import OPTIMIZERS, OptimizerName
from highwater.nouns.trial import TrialSpec

_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of norms and biases, which get no weight decay, as in transformers' trainer 5.23."""


def optimizer_of(model: nn.Module, spec: TrialSpec) -> torch.optim.Optimizer:
    """Return the optimizer of the trial's settings for one of its models."""
    settings = spec.settings
    return make_optimizer(
        model,
        spec.hyperparameters,
        name=settings.optimizer,
        keeps_gradients=settings.keeps_gradients,
        on_host=settings.offloads_states,
    )


def make_optimizer(
    model: nn.Module,
    hyperparameters: Hyperparameters,
    *,
    name: OptimizerName = "adamw",
    keeps_gradients: bool = True,
    on_host: bool = False,
) -> torch.optim.Optimizer:
    """Return AdamW on the float32 shards, with both moments and every gradient allocated as zeros.
    Without ``keeps_gradients`` each step allocates and frees its gradients.

    Updates run where the shards are; ``on_host`` puts only the moments on the host
    (host_states.py). Frozen parameters are left out: they have no gradient, no state and no decay.

    All tensors that exist for the whole training are allocated before the first activation. Left to
    the first step, gradients and moments would be cut out of blocks that activations just freed,
    and the caching allocator could never join those again: the largest block, the logits, would be
    needed twice. Also, a length that does not fit fails in the first micro-batch, not in step two.

    Raises MachineError if a package is missing.
    """
    groups = _groups(model, weight_decay=hyperparameters.weight_decay)
    optimizer = _made(name, groups, hyperparameters, on_host=on_host)
    fill_missing_gradients(optimizer)
    optimizer.step()  # zero gradients at rate zero: allocates the moments, changes nothing
    for group in optimizer.param_groups:
        group["lr"] = hyperparameters.learning_rate
    for state in optimizer.state.values():
        state["step"].zero_()
    if not keeps_gradients:
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def _made(
    name: OptimizerName, groups: list[dict[str, Any]], numbers: Hyperparameters, *, on_host: bool
) -> torch.optim.Optimizer:
    """Return the optimizer of this name, with learning rate 0."""
    betas = (numbers.adam_beta1, numbers.adam_beta2)
    how: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": numbers.adam_epsilon}
    if on_host:
        assert name == "adamw", "settings refuse others"
        return HostStateAdamW(groups, **how)
    if name == "adamw":
        return torch.optim.AdamW(groups, **how, fused=True)
    try:
        from highwater.engine.training.low_bit import LowBitAdamW
    except ImportError as error:
        raise MachineError(
            f"{name} needs torchao, which cannot be imported: {error}",
            hint='`pip install "torchao>=0.18"`, or use `--optimizer adamw`',
        ) from error
    return LowBitAdamW(groups, traits=OPTIMIZERS[name], **how)


def fill_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give zero gradients to trained parameters without one, which AdamW would skip."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # FSDP1 leaves an empty tensor for a parameter that other ranks hold
            if parameter.grad is None and parameter.numel():
                parameter.grad = torch.zeros_like(parameter)


def _groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split trained parameters as transformers does: those with decay, then norms and biases."""
    norms = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters()
    }
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            does_not = parameter in norms or _NEVER_DECAYS.search(name_in_files(name).lower())
            (others if does_not else decaying).append(parameter)
    groups = (
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
