"""Assemble: the models and optimizers that a trial's settings ask for, as one Training."""

from collections.abc import Mapping
from typing import Any

import torch

from highwater.engine.attention.registry import register
from highwater.engine.models.build import build, read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.training.optimizers import optimizer_of
from highwater.engine.training.rank_context import RankContext, compute_dtype
from highwater.engine.training.step import Training
from highwater.nouns.settings import Loss, Parameters
from highwater.nouns.trial import TrialSpec

CRITIC_SEED = 1
"""Added to the trial's seed: a critic without weights of its own does not start as a copy of the
policy."""

_MASTER_DTYPES: Mapping[Parameters, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
}


def assemble(spec: TrialSpec, context: RankContext) -> Training:
    """Everything that lives as long as the training, allocated."""
    settings = spec.settings
    loss: Loss = "full" if settings.holds_logits else "chunked"
    policy = _model(spec, context, loss=None if settings.traits.gives_scalars else loss)
    critic = _model(spec, context, loss=None, seed=CRITIC_SEED) if settings.critic else None
    return Training(
        policy=policy,
        optimizer=optimizer_of(policy, spec),
        mesh=context.mesh,
        sequence=context.sequence,
        objective=settings.objective,
        entropy=settings.entropy != "none",
        critic=critic,
        critic_optimizer=None if critic is None else optimizer_of(critic, spec),
        reference=_reference_of(policy, spec, context),
        hyperparameters=spec.hyperparameters,
        keeps_gradients=settings.keeps_gradients,
    )


def _model(spec: TrialSpec, context: RankContext, *, loss: Loss | None, seed: int = 0) -> Decoder:
    """A model to train, as the settings say."""
    settings = spec.settings
    trained: dict[str, Any] = {
        "strategy": settings.strategy,
        "offload": settings.offloads_model,
        "master_dtype": _MASTER_DTYPES[settings.parameters],
    }
    if settings.adapters is not None:
        trained |= {"lora": settings.adapters, "master_dtype": compute_dtype(context.device)}
    return _built(spec, context, loss=loss, seed=spec.seed + seed, **trained)


def _reference_of(policy: Decoder, spec: TrialSpec, context: RankContext) -> Decoder | None:
    """The reference where the objective has one: with adapters the policy itself, which is asked
    without them.
    """
    if not spec.settings.traits.has_reference:
        return None
    return _reference(spec, context) if spec.settings.has_second_model else policy


def _reference(spec: TrialSpec, context: RankContext) -> Decoder:
    """The policy as it was: frozen, in host memory, in the dtype that it computes in; a layer at a
    time comes to the device.

    By the policy's own kernels: others round differently, and over a document's thousands of tokens
    that adds up to a log-ratio where there should be none.
    """
    frozen = {"master_dtype": compute_dtype(context.device), "offload": True}
    return _built(spec, context, loss="chunked", seed=spec.seed, **frozen).requires_grad_(False)


def _built(spec: TrialSpec, context: RankContext, **how: Any) -> Decoder:
    """What every model of the trial has in common, and how this one differs."""
    return build(
        read_config(
            spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope
        ),
        directory=spec.model_directory,
        mesh=context.mesh,
        attention=register(
            context.kernel,
            shared=context.shared,
            depth=spec.attention_depth,
            sparse=spec.settings.pattern,
        ),
        compute_dtype=compute_dtype(context.device),
        recompute=spec.settings.recompute,
        mlp_tiles=spec.settings.mlp_tiles,
        **how,
    )
