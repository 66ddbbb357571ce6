"""Assemble: the models and optimizers that a trial's settings ask for, as one Trainer."""

from typing import Any

from highwater.attention.dense import register
from highwater.engine.model import Decoder, build, read_config
from highwater.engine.place import Place, compute_dtype
from highwater.engine.step import Trainer, make_optimizer
from highwater.spec.settings import Loss
from highwater.spec.trial import TrialSpec

CRITIC_SEED = 1
"""Added to the trial's seed: a critic without weights of its own does not start as a copy of the policy."""


def assemble(spec: TrialSpec, place: Place) -> Trainer:
    """Everything that lives as long as the training, allocated."""
    settings = spec.settings
    loss: Loss = "full" if settings.holds_logits else "chunked"
    policy = _model(spec, place, loss=None if settings.objective == "rw" else loss)
    critic = _model(spec, place, loss=None, seed=CRITIC_SEED) if settings.critic else None
    return Trainer(
        policy=policy,
        optimizer=make_optimizer(policy, spec.hyperparameters),
        mesh=place.mesh,
        sequence=place.sequence,
        objective=settings.objective,
        entropy=settings.entropy != "none",
        critic=critic,
        critic_optimizer=make_optimizer(critic, spec.hyperparameters) if critic is not None else None,
        reference=_reference(spec, place) if settings.objective == "grpo" else None,
        hyperparameters=spec.hyperparameters,
    )


def _model(spec: TrialSpec, place: Place, *, loss: Loss | None, seed: int = 0) -> Decoder:
    """A model to train, as the settings say."""
    settings = spec.settings
    trained = {"recompute": settings.recompute, "mlp_tiles": settings.mlp_tiles, "strategy": settings.strategy}
    return _built(spec, place, loss=loss, seed=spec.seed + seed, offload=settings.offload, **trained)


def _reference(spec: TrialSpec, place: Place) -> Decoder:
    """The policy as it was: frozen, in host memory, in the dtype that it computes in; a layer at a time comes to the device."""
    frozen = {"master_dtype": compute_dtype(place.device), "recompute": "none", "offload": True}
    return _built(spec, place, loss="chunked", seed=spec.seed, **frozen).requires_grad_(False)


def _built(spec: TrialSpec, place: Place, **how: Any) -> Decoder:
    return build(
        read_config(spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        directory=spec.model_directory,
        mesh=place.mesh,
        attention=register(place.kernel, group=place.sequence, depth=spec.attention_depth),
        compute_dtype=compute_dtype(place.device),
        **how,
    )
