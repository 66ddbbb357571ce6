"""The model of a trial: any Hugging Face decoder-only causal LM, built on meta, sharded, then materialised shard by shard.

Shapes:  T packed tokens  N trained tokens  P positions that are asked for  E hidden size  V vocabulary
"""

import copy
import hashlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from highwater.attention.dense import Attention
from highwater.engine import weights
from highwater.engine.fused import fuse_norms
from highwater.engine.loss import TokenStatistics, token_statistics
from highwater.engine.recompute import PREFIX, recompute_layers
from highwater.engine.rope import scale_rope
from highwater.errors import ModelError
from highwater.parallel.fsdp import shard
from highwater.spec.settings import Loss, Recompute, Rope

_CHANGES_LOGITS = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None, "output_multiplier_scale": 1.0}
"""Config fields by which a family changes its logits after the head, and the value that changes nothing."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that only attend; a window that is too small for the documents is refused when it is used."""


SCORE = "score.weight"
"""The head of a model that gives one number per token, as Hugging Face's sequence and token classifiers call it."""


class Decoder(nn.Module):
    """A causal LM up to its last hidden states; what follows them is a subclass's."""

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention

    def hidden_states(self, input_ids_T: Tensor, position_ids_T: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """The last hidden state of every token, normalised; shape TE."""
        hidden_TE = self.backbone(
            input_ids=input_ids_T[None],
            position_ids=position_ids_T[None],
            use_cache=False,
            document_lengths=document_lengths,
        ).last_hidden_state[0]
        self._check_callers()
        return hidden_TE

    def _check_callers(self) -> None:
        """Raise ModelError unless every layer attends through our attention: any other way documents would see each other."""
        layers = self.causal_lm.config.num_hidden_layers
        if len(self.attention.callers) != layers:
            raise _not_by_attention(
                self.causal_lm.config, f"{len(self.attention.callers)} of its {layers} layers attend through it"
            )

    @property
    def backbone(self) -> nn.Module:
        """Embedding, decoder layers and final norm."""
        return getattr(self.causal_lm, self.causal_lm.base_model_prefix)

    @property
    def head(self) -> nn.Linear:
        """The projection to the vocabulary."""
        return cast(nn.Linear, self.causal_lm.get_output_embeddings())

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        count = self.causal_lm.config.num_hidden_layers
        for module in self.backbone.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise ModelError(f"{type(self.causal_lm).__name__} has no list of {count} decoder layers", hint="use a decoder-only model")


class LanguageModel(Decoder):
    """A causal LM whose forward pass ends in statistics of the trained tokens, never in logits."""

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention, loss: Loss) -> None:
        super().__init__(causal_lm, attention=attention)
        self.loss: Loss = loss

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        trained_positions_N: Tensor,
        labels_N: Tensor,
        document_lengths: Sequence[int],
    ) -> TokenStatistics:
        """Log-probabilities of ``labels_N`` and entropies, each read at its position; shape N, float32 or wider."""
        hidden_NE = self.hidden_states(input_ids_T, position_ids_T, document_lengths).index_select(0, trained_positions_N)
        return token_statistics(hidden_NE, self.head.weight, labels_N, loss=self.loss)


class ScalarModel(Decoder):
    """A causal LM with one number per token in the place of its logits: a critic, or a reward model."""

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention) -> None:
        super().__init__(causal_lm, attention=attention)
        causal_lm.config.tie_word_embeddings = False
        hidden_size = self.head.weight.shape[1]
        causal_lm.set_output_embeddings(nn.Linear(hidden_size, 1, bias=False, device="meta", dtype=self.head.weight.dtype))

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, positions_P: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """The number at each position; shape P, float32 or wider."""
        hidden_PE = self.hidden_states(input_ids_T, position_ids_T, document_lengths).index_select(0, positions_P)
        scalars_P = (hidden_PE @ self.head.weight.T)[:, 0]
        return scalars_P.to(torch.promote_types(scalars_P.dtype, torch.float32))


def read_config(directory: str, *, length_tokens: int, rope: Rope) -> PreTrainedConfig:
    """The model's config, its RoPE scaled for the length; no remote code is run."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    _refuse_changed_logits(config)
    scale_rope(config, length_tokens=length_tokens, rope=rope)
    config.use_cache = False
    return config


def build(
    config: PreTrainedConfig,
    *,
    directory: str,
    mesh: DeviceMesh,
    attention: Attention,
    loss: Loss | None,
    recompute: Recompute,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype = torch.float32,
    offload: bool = False,
    seed: int = 0,
) -> Decoder:
    """The sharded model, its shards on the mesh's device: from safetensors in ``directory`` when present, else random.

    A LanguageModel with this loss; without one a ScalarModel, whose head is random unless the files have ``score.weight``.
    At no time does a rank hold more than its own shards: what is sharded is a model without storage.
    ``attention`` is what dense.register returned; ``offload`` keeps the shards in host memory.
    """
    model = build_on_meta(config, attention=attention, loss=loss, master_dtype=master_dtype)
    # Recompute first, FSDP around it: gathered parameters then serve the recomputation too.
    if recompute == "layer":
        recompute_layers(model.layers)
    shard(model, list(model.layers), mesh=mesh, compute_dtype=compute_dtype, offload=offload)
    model.to_empty(device="cpu" if offload else mesh.device_type)
    _fill_buffers(model, device=torch.device(mesh.device_type))
    _retie(model)
    parameters = {name_in_files(name, model): p for name, p in model.named_parameters()}
    buffers = {name_in_files(name, model): b for name, b in model.named_buffers()}
    filled = weights.load(parameters, buffers, directory, optional={SCORE} if loss is None else set())
    for name, parameter in parameters.items():
        if name not in filled:
            _fill_random(name, parameter, std=getattr(config, "initializer_range", 0.02), seed=seed)
    assert all(p.dtype == master_dtype for p in parameters.values()), "master parameters keep their dtype"
    return model.train()


def name_in_files(name: str, model: Decoder) -> str:
    """What safetensors call a parameter of the model."""
    plain = name.replace(PREFIX, "").removeprefix("causal_lm.")
    return SCORE if isinstance(model, ScalarModel) and plain == "lm_head.weight" else plain


def build_on_meta(config: PreTrainedConfig, *, attention: Attention, loss: Loss | None, master_dtype: torch.dtype) -> Decoder:
    """The model without storage, its parameters of the master dtype whatever the config says."""
    # The grouped product of experts, transformers' default, takes no float64.
    experts = "eager" if master_dtype == torch.float64 else None
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=master_dtype,
            attn_implementation=attention.name,
            experts_implementation=experts,
            trust_remote_code=False,
        )
    _refuse_other_mixing(causal_lm)
    fuse_norms(causal_lm)
    if loss is None:
        return ScalarModel(causal_lm, attention=attention)
    model = LanguageModel(causal_lm, attention=attention, loss=loss)
    if getattr(model.head, "bias", None) is not None:
        raise ModelError(f"{config.model_type} has a bias on its head, which is not supported", hint="use a model without one")
    return model


def _refuse_other_mixing(causal_lm: PreTrainedModel) -> None:
    """Refuse layers that carry anything along the sequence but attention, or attend in a way of their own."""
    config = causal_lm.config
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds:
        raise _not_by_attention(config, f"it has layers of {', '.join(sorted(kinds))}")
    if getattr(causal_lm, "_is_stateful", False) or any(isinstance(m, nn.Conv1d) for m in causal_lm.modules()):
        raise _not_by_attention(config, "its layers carry a state or a convolution along the sequence")
    if not getattr(causal_lm, "_supports_attention_backend", False):
        raise _not_by_attention(config, "it does not take one from outside")


def _not_by_attention(config: PreTrainedConfig, why: str) -> ModelError:
    return ModelError(
        f"{config.model_type} cannot be trained with the attention that keeps packed sequences apart: {why}",
        hint="use a family of full attention in every layer, for example Qwen3, Llama or Qwen3-MoE",
    )


def _refuse_changed_logits(config: PreTrainedConfig) -> None:
    for field, neutral in _CHANGES_LOGITS.items():
        if getattr(config, field, neutral) not in (neutral, None):
            raise ModelError(
                f"{config.model_type} changes its logits by {field} = {getattr(config, field)}, which is not supported",
                hint="use a family with plain logits, for example Qwen3 or Llama",
            )


def _fill_buffers(model: nn.Module, *, device: torch.device) -> None:
    """Compute the buffers anew (RoPE frequencies): a model built on meta has none."""
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        if not hasattr(module, "config"):
            raise ModelError(f"{name} of {type(model).__name__} has buffers that no config describes", hint="use another family")
        fresh = cast(Any, type(module))(module.config)
        for buffer_name, buffer in buffers.items():
            # Beside the activations, also where the parameters are in host memory.
            module.register_buffer(buffer_name, getattr(fresh, buffer_name).to(device, buffer.dtype), persistent=False)


def _retie(model: Decoder) -> None:
    """Share the embedding's weight with the head again: materialising gave each its own."""
    if model.causal_lm.config.tie_word_embeddings:
        model.head.weight = cast(nn.Embedding, model.causal_lm.get_input_embeddings()).weight


def _fill_random(name: str, parameter: nn.Parameter, *, std: float, seed: int) -> None:
    """Norms 1, biases 0, the rest normal; every rank and parameter has a stream of its own."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if parameter.ndim == 1:
        local.detach().fill_(0.0 if name.endswith("bias") else 1.0)
        return
    rank = parameter.device_mesh.get_rank() if isinstance(parameter, DTensor) else 0
    stream = int.from_bytes(hashlib.sha256(f"{seed} {rank} {name}".encode()).digest()[:7], "big")
    generator = torch.Generator(local.device).manual_seed(stream)
    local.detach().normal_(0.0, std, generator=generator)
