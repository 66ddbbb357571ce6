"""Trinity step: the models of Trinity-RFT's trainer (verl's actor on FSDP1), built to allocate as
they do, because the published tables are of that trainer.

Differences from our own models: Hugging Face's layers unchanged; logits of every token, prompts
too, divided by the temperature in place through a view; log-probabilities and entropies whose
gradients are two more tensors of logits; optimizer states made by the first update; gradients freed
after each update; a host that is never far ahead of its GPU. The step around them is our ``grpo``.
It has run on H200s (docs/results/lab/trinity_trials.py).

Shapes:  T packed tokens of a micro-batch on this rank  E hidden size  V vocabulary  N trained
tokens
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedConfig

from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.attention.registry import Attention, register
from highwater.engine.data.batches import Batch
from highwater.engine.kernels import rows as row_kernels
from highwater.engine.models import weights
from highwater.engine.models.build import drop_storage, read_config
from highwater.engine.models.decoder import Decoder, MicroBatchStatistics
from highwater.engine.models.fill import Fill
from highwater.engine.models.requirements import prove_head
from highwater.engine.parallel import fsdp2
from highwater.engine.parallel.fsdp1 import shard_flat
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.engine.tracer.highwater_step import TracedTrainer
from highwater.engine.training.rank_context import RankContext, compute_dtype
from highwater.engine.training.step import Training
from highwater.nouns.trial import TrialSpec

TEMPERATURE = 1.0
"""Temperature of Trinity's trials; logits are divided by it although it is 1."""


def set_up(recorder: AllocationRecorder, context: RankContext) -> None:  # noqa: ARG001
    """Leave out the workspace of an embedding's gradient, which is not linear in the tokens."""
    recorder.hidden.pop(torch.ops.aten.embedding_dense_backward.default)


def begin(
    spec: TrialSpec,
    context: RankContext,
    rehearsal: Batch,  # noqa: ARG001 -- it rehearses nothing
    recorder: AllocationRecorder,
) -> Training:
    """Build the models and make the recorder follow the actor."""
    training = assemble(spec, context)
    recorder.follow(training.policy)
    return training


def assemble(spec: TrialSpec, context: RankContext) -> Training:
    """Build the actor on FSDP1, and its reference in host memory."""
    config = read_config(
        spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope
    )
    dtype = compute_dtype(context.device)
    how: dict[str, Any] = {
        "directory": spec.model_directory,
        "mesh": context.mesh,
        "compute_dtype": dtype,
        "seed": spec.seed,
    }

    def actor(dtype: torch.dtype) -> Actor:
        attention = register(context.kernel, shared=context.shared, depth=spec.attention_depth)
        return actor_on_meta(config, attention=attention, dtype=dtype)

    policy = on_fsdp1(actor(torch.float32), **how)
    for name, module in policy.named_modules():
        if name.endswith("self_attn"):  # Trinity's attention reads lengths, for which it waits
            module.register_forward_pre_hook(_wait_for_gpu)
    return Training(
        policy=policy,
        reference=offloaded(actor(dtype), **how),
        optimizer=_AdamW(policy.parameters(), lr=spec.hyperparameters.learning_rate, foreach=True),
        mesh=context.mesh,
        sequence=context.shared.every,
        objective="grpo",
        entropy=True,
    )


class Actor(Decoder):
    """A causal LM that computes the logits of every token, whether it is trained or not."""

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        trained_positions_N: Tensor,
        labels_N: Tensor,
        document_lengths: Sequence[int],
        # only for `sft`, which Trinity trains in another way
        logprob_gradient: float | None = None,  # noqa: ARG002
    ) -> MicroBatchStatistics:
        """Return log-probabilities of ``labels_N`` at the trained positions, and entropies; N."""
        hidden_TE = self.hidden_states(input_ids_T, position_ids_T, document_lengths)
        logits_TV = self.head(hidden_TE[None]).squeeze(0)
        logits_TV = divided(logits_TV)
        labels_T = torch.zeros_like(input_ids_T).index_copy(0, trained_positions_N, labels_N)
        logprobs_T, entropies_T = _Statistics.apply(logits_TV, labels_T)
        return MicroBatchStatistics(
            logprobs_T[trained_positions_N], entropies_T[trained_positions_N], None
        )


def divided(logits_TV: Tensor) -> Tensor:
    """Divide logits by the temperature, in place, through a view of the head's output."""
    return logits_TV.div_(TEMPERATURE)


class _Statistics(torch.autograd.Function):
    """Statistics by flash attention's cross-entropy and verl's entropy: two gradients of logits."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        of = row_kernels.statistics(logits_TV, labels_T)
        ctx.save_for_backward(logits_TV, labels_T, *of)
        return of.logprob_N, of.entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_TV, labels_T, *rest = ctx.saved_tensors
        of, nothing_T = row_kernels.RowStatistics(*rest), torch.zeros_like(gradients[0])
        whole_TV, other_TV = logits_TV.clone(), logits_TV.clone()
        row_kernels.backward_(whole_TV, labels_T, of, nothing_T, gradients[1])
        row_kernels.backward_(other_TV, labels_T, of, gradients[0], nothing_T)
        return whole_TV.add_(other_TV), None


class _AdamW(torch.optim.AdamW):
    """AdamW that frees gradients after each step and makes its states in the first one, as PyTorch
    does by default. The host waits for the GPU before an update, as verl skips the update if the
    gradients' norm is not finite (``dp_actor.py``).
    """

    # no caller passes a closure
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        _wait_for_gpu()
        super().step(closure)

    # our step asks to keep them
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        super().zero_grad(set_to_none=True)


def _wait_for_gpu(*_: object) -> None:
    """Make the host wait for the GPU; allocations given back by other streams are then free."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def actor_on_meta(config: PreTrainedConfig, *, attention: Attention, dtype: torch.dtype) -> Actor:
    """Return the actor on the meta device: our attention, which allocates like flash attention, and
    all other layers of Hugging Face's own.
    """
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention.name,
            trust_remote_code=False,
        )
    drop_storage(causal_lm)
    prove_head(causal_lm)
    return Actor(causal_lm, attention=attention)


def on_fsdp1(
    actor: Actor,
    *,
    directory: str,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    use_orig_params: bool = False,
    seed: int = 0,
) -> Decoder:
    """Shard the actor by FSDP1, with recomputed layers; its parameters are FSDP1's vectors, as in
    verl. Weights are filled as in ``model.build``.
    """
    recompute_layers(actor.layers)
    with weights.opened(directory) as saved:
        fill = Fill(actor, saved, device=torch.device(mesh.device_type), seed=seed)
        how: dict[str, Any] = {"mesh": mesh, "compute_dtype": compute_dtype}
        how["use_orig_params"] = use_orig_params
        wrapped = shard_flat(actor, actor.layers, materialise=fill.one_unit, **how)
    fill.finish()
    return cast(Decoder, wrapped).train()


def offloaded(
    actor: Actor, *, directory: str, mesh: DeviceMesh, compute_dtype: torch.dtype, seed: int = 0
) -> Decoder:
    """Shard the actor by FSDP2, frozen and in host memory, one layer at a time on the device."""
    with weights.opened(directory) as saved:
        fill = Fill(actor, saved, device=torch.device(mesh.device_type), seed=seed)
        fsdp2.shard(actor, list(actor.layers), mesh=mesh, compute_dtype=compute_dtype, offload=True)
        actor.to_empty(device="cpu")
        fill.values(actor)
    fill.finish()
    return actor.requires_grad_(False).train()


TRACED = TracedTrainer(
    set_up=set_up,
    begin=begin,
    # as the trainer does before it sends the weights to its explorer: once they are there, and
    # after each step
    before_step=lambda recorder: recorder.release(),
)
