"""The model of a trial: any Hugging Face decoder-only causal LM, built on meta, sharded, then materialised shard by shard.

Shapes:  T packed tokens  N trained tokens  E hidden size  V vocabulary
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from highwater.attention.dense import Attention
from highwater.engine import weights
from highwater.engine.buffers import fill_buffers
from highwater.engine.document_rope import follow_documents
from highwater.engine.fused import fuse_attentions, fuse_mlps, fuse_norms
from highwater.engine.head_proof import prove_head
from highwater.engine.loss import token_statistics
from highwater.engine.random_weights import fill_random
from highwater.engine.recompute import PREFIX as RECOMPUTE_PREFIX
from highwater.engine.recompute import recompute_layers
from highwater.engine.rope import scale_rope
from highwater.engine.router import documents_of, follow_routers
from highwater.engine.weight_names import names_in_model
from highwater.errors import ModelError
from highwater.parallel.fsdp import shard
from highwater.parallel.fsdp1 import PREFIX as FSDP1_PREFIX
from highwater.parallel.fsdp1 import shard_flat
from highwater.parallel.sequence import parts_of
from highwater.spec.settings import Loss, Recompute, Rope, Strategy
from highwater.spec.trial import Weights
from highwater.spec.weight_files import SCORE, unties

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that only attend; a window that is too small for the documents is refused when it is used."""
_LEFT_IN_FILES = (r"rotary_emb\.inv_freq$",)
"""Tensors of old files that follow from the config."""


class MicroBatchStatistics(NamedTuple):
    """What a forward pass tells: TokenStatistics of the trained tokens, and what the whole micro-batch adds to the loss."""

    logprobs_N: Tensor
    entropies_N: Tensor
    router_loss: Tensor | None
    """This rank's share of the routers' auxiliary loss, summed over tokens, times its coefficient; over all tokens of the step it
    is part of the loss. None for a model without, and where no gradient is recorded."""


class Decoder(nn.Module):
    """A causal LM up to its last hidden states; what follows them is a subclass's."""

    gives_scalars = False
    """Whether it is a ScalarModel: also FSDP1's wrapper knows."""
    weights: Weights = "random"
    """Where its first values are from."""

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention
        self.document_ropes = follow_documents(causal_lm)
        self.parameter_count = sum(p.numel() for p in causal_lm.parameters())
        """Of the whole model, tied ones once, however it is sharded afterwards."""

    def hidden_states(self, input_ids_T: Tensor, position_ids_T: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """The last hidden state of every token, normalised; of shape (T, E)."""
        self._tell_documents(document_lengths, tokens=len(input_ids_T))
        hidden_TE = self.backbone(
            input_ids=input_ids_T[None],
            position_ids=position_ids_T[None],
            use_cache=False,
            document_lengths=document_lengths,
        ).last_hidden_state[0]
        self._check_callers()
        return hidden_TE

    def _tell_documents(self, document_lengths: Sequence[int], *, tokens: int) -> None:
        """Tell rotary modules that depend on it which documents this rank's tokens are of."""
        start = 0 if self.attention.group is None else tokens * dist.get_rank(self.attention.group)
        parts = parts_of(document_lengths, start=start, stop=start + tokens) if self.document_ropes else []
        for rope in self.document_ropes:
            rope.parts = parts

    def _check_callers(self) -> None:
        """Raise ModelError unless every layer attends through our attention: any other way documents would see each other."""
        layers = self.causal_lm.config.num_hidden_layers
        if len(self.attention.callers) != layers:
            raise _not_by_attention(
                self.causal_lm.config, f"{len(self.attention.callers)} of its {layers} layers attend through it"
            )

    @property
    def architecture(self) -> str:
        """The class of transformers that loads what is saved of it."""
        return type(self.causal_lm).__name__

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
        self.routers = follow_routers(causal_lm)

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        trained_positions_N: Tensor,
        labels_N: Tensor,
        document_lengths: Sequence[int],
        padding_tokens: int = 0,
        slope: float | None = None,
    ) -> MicroBatchStatistics:
        """Log-probabilities of ``labels_N`` and entropies, each read at its position; shape N, float32 or wider.

        ``padding_tokens`` are the last of this rank's tokens: no expert of theirs is counted. ``slope`` as ``token_statistics``
        has it.
        """
        routers = self.routers if torch.is_grad_enabled() else None
        if routers is not None:
            documents_T = self._documents(input_ids_T, document_lengths)[: len(input_ids_T) - padding_tokens]
            routers.begin(documents_T, documents=len(document_lengths))
        hidden_NE = self.hidden_states(input_ids_T, position_ids_T, document_lengths).index_select(0, trained_positions_N)
        statistics = token_statistics(hidden_NE, self.head.weight, labels_N, loss=self.loss, slope=slope)
        router_loss = None if routers is None else routers.loss(self.attention.group)
        return MicroBatchStatistics(statistics.logprobs_N, statistics.entropies_N, router_loss)

    def _documents(self, input_ids_T: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """Which document each of this rank's tokens is in."""
        tokens, group = len(input_ids_T), self.attention.group
        before = 0 if group is None else dist.get_rank(group) * tokens
        return documents_of(document_lengths, start=before, tokens=tokens).to(input_ids_T.device)


class ScalarModel(Decoder):
    """A causal LM with one number per token in the place of its logits: a critic, or a reward model."""

    gives_scalars = True

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention) -> None:
        vocabulary = cast(nn.Linear, causal_lm.get_output_embeddings())
        name = next(name for name, module in causal_lm.named_modules() if module is vocabulary)
        causal_lm.set_submodule(name, nn.Identity())
        causal_lm.config.tie_word_embeddings = False
        causal_lm.config.num_labels = 1  # what is saved loads as a sequence or token classifier
        super().__init__(causal_lm, attention=attention)
        self.replaced_head = name
        """Name of the head that files may hold, and that this model has not."""
        self.score = nn.Linear(vocabulary.in_features, 1, bias=False, device="meta", dtype=vocabulary.weight.dtype)
        self.parameter_count += vocabulary.in_features

    @property
    def architecture(self) -> str:
        """The family's sequence classifier; the causal LM where transformers has none."""
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(self.causal_lm.config.model_type, super().architecture)

    @property
    def head(self) -> nn.Linear:
        """The projection to a number."""
        return self.score

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, positions_P: Tensor, document_lengths: Sequence[int]) -> Tensor:
        """The number at each position; shape P, float32 or wider."""
        hidden_PE = self.hidden_states(input_ids_T, position_ids_T, document_lengths).index_select(0, positions_P)
        scalars_P = (hidden_PE @ self.head.weight.T)[:, 0]
        return scalars_P.to(torch.promote_types(scalars_P.dtype, torch.float32))


def read_config(directory: str, *, length_tokens: int, rope: Rope) -> PreTrainedConfig:
    """The model's config, its RoPE scaled for the length; no remote code is run."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    if getattr(config, "tie_word_embeddings", False) and unties(Path(directory)):
        config.tie_word_embeddings = False  # as transformers does with files that hold both, and different values
    if getattr(config, "head_dim", 0) is None:  # YaRN multiplies it (transformers' modeling_rope_utils.py), where attention divides
        config.head_dim = config.hidden_size // config.num_attention_heads
    if hasattr(config, "sliding_window") and "sliding_window" not in inspect.signature(type(config).__init__).parameters:
        delattr(config, "sliding_window")  # a Llama's config may have one, of which its class knows nothing
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
    strategy: Strategy = "fsdp2",
    offload: bool = False,
    mlp_tiles: int | None = None,
    master_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Decoder:
    """The sharded model, its shards on the mesh's device or, with offload, on the host: from safetensors in ``directory`` when
    present, else random.

    A LanguageModel with this loss; without one a ScalarModel, whose head is random unless the files have ``score.weight``.
    What is sharded is a model without storage. With FSDP2 a rank never holds more than its own shards; FSDP1 cuts one layer
    after the other (parallel/fsdp1.py), and its model is a wrapper in which every attribute of the model is found.
    ``attention`` is what dense.register returned. ``mlp_tiles`` None: the MLP goes in tiles where that costs no time.
    """
    model = build_on_meta(config, attention=attention, loss=loss, master_dtype=master_dtype)
    # Without recomputation the products that tiles compute twice would cost time: only on demand.
    if recompute != "none" or mlp_tiles is not None:
        tile_mlps(model, mlp_tiles)
    # Recompute first, FSDP around it: gathered parameters then serve the recomputation too.
    if recompute != "none":
        recompute_layers(model.layers, keep_attention=recompute == "all-but-attention")
    device = torch.device(mesh.device_type)
    with weights.opened(directory) as files:
        saved = None if files is None else files.renamed(names_in_model(model.causal_lm, files.names))
        fill = Fill(model, saved, device=device, seed=seed)
        if strategy == "fsdp":
            wrapped = shard_flat(
                model, model.layers, mesh=mesh, compute_dtype=compute_dtype, materialise=fill.one_unit, offload=offload
            )
            model = cast(Decoder, wrapped)
        else:
            shard(model, list(model.layers), mesh=mesh, compute_dtype=compute_dtype, offload=offload)
            model.to_empty(device="cpu" if offload else device)
            fill.values(model)
    fill.finish()
    assert all(p.dtype == master_dtype for p in model.parameters()), "master parameters keep their dtype"
    return model.train()


def build_on_meta(config: PreTrainedConfig, *, attention: Attention, loss: Loss | None, master_dtype: torch.dtype) -> Decoder:
    """The model without storage, its parameters of the master dtype whatever the config says."""
    # None is one grouped product over all experts wherever PyTorch has it, in the dtype of the gathered weights; it takes no
    # float64.
    experts = "eager" if master_dtype == torch.float64 else None
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=master_dtype,
            attn_implementation=attention.name,
            experts_implementation=experts,
            trust_remote_code=False,
        )
    drop_storage(causal_lm)
    _refuse_shared_parameters(causal_lm)
    _refuse_other_mixing(causal_lm)
    prove_head(causal_lm)
    fuse_norms(causal_lm)
    fuse_attentions(causal_lm)
    if loss is None:
        return ScalarModel(causal_lm, attention=attention)
    model = LanguageModel(causal_lm, attention=attention, loss=loss)
    if getattr(model.head, "bias", None) is not None:
        raise ModelError(f"{config.model_type} has a bias on its head, which is not supported", hint="use a model without one")
    return model


def drop_storage(causal_lm: PreTrainedModel) -> None:
    """Put on meta what the family's class made elsewhere, by functions that know no default device: Fill gives all values."""
    for module in causal_lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                empty = torch.empty_like(parameter, device="meta")
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="meta"))


def _refuse_shared_parameters(causal_lm: PreTrainedModel) -> None:
    """Refuse a parameter with several places, but for the embedding in the head's: FSDP would train each place by itself."""
    first: dict[nn.Parameter, str] = {}
    head = cast(nn.Linear, causal_lm.get_output_embeddings()).weight
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        if parameter in first and parameter is not head:
            raise ModelError(
                f"{causal_lm.config.model_type} has one parameter as {first[parameter]} and as {name}, which is not supported",
                hint="use a family whose layers share nothing, for example Qwen3 or Llama",
            )
        first.setdefault(parameter, name)


def tile_mlps(model: Decoder, tiles: int | None) -> None:
    """Put every gated MLP into tiles. Raises ModelError where tiles are asked for and no MLP of the family is known."""
    if not fuse_mlps(model.causal_lm, tiles=tiles) and tiles is not None:
        raise ModelError(
            f"{model.causal_lm.config.model_type} has no MLP of the form down(silu(gate) * up), which is what goes in tiles",
            hint="leave `--mlp-tiles` out",
        )


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


class Fill:
    """Gives the modules of a model that was built on meta their values, each parameter under the name that files give it."""

    def __init__(self, model: Decoder, saved: weights.SavedWeights | None, *, device: torch.device, seed: int) -> None:
        self.model = model
        self.saved = saved
        self.device = device
        self.seed = seed
        # Read before anything is wrapped, which changes names, or given storage, which parts what is shared.
        self.names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._missing = {name_in_files(name) for name, _ in model.named_parameters()}
        self._is_tied = model.head.weight is cast(nn.Embedding, model.causal_lm.get_input_embeddings()).weight
        self._other_names = {} if saved is None else _other_names(model, saved)
        if saved is not None:
            model.weights = "saved"
            _check_files(model, saved, self._other_names)

    def one_unit(self, unit: nn.Module) -> None:
        """Storage on the device and values for what of the unit is still on meta: all but the units within it."""
        fresh = [m for m in unit.modules() if any(t.is_meta for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))]
        for module in fresh:
            module.to_empty(device=self.device, recurse=False)
        self._fill(fresh)

    def values(self, model: nn.Module) -> None:
        """Values for all of a model that has storage."""
        self._fill(list(model.modules()))

    def finish(self) -> None:
        """Every parameter has been given its values, each once."""
        assert not self._missing, f"never filled: {sorted(self._missing)}"

    def _fill(self, modules: Sequence[nn.Module]) -> None:
        self._fill_buffers(modules)
        if self._is_tied and self.model.head in modules:
            self.model.head.weight = cast(nn.Embedding, self.model.causal_lm.get_input_embeddings()).weight
        parameters, buffers = {}, {}
        for module in modules:
            prefix = name_in_files(self.names[module])
            parameters |= {prefix + name: p for name, p in module.named_parameters(recurse=False)}
            buffers |= {prefix + name: b for name, b in _saved_buffers(module)}
        fresh = _once(parameters)
        assert fresh.keys() <= self._missing, f"filled twice, or new: {sorted(fresh.keys() - self._missing)}"
        self._missing -= fresh.keys()
        if self.saved is not None:
            saved = {name: p for name, p in fresh.items() if name != SCORE or self.saved.has(SCORE)}
            self.saved.fill({self._other_names.get(name, name): p for name, p in saved.items()}, buffers)
            fresh = {name: p for name, p in fresh.items() if name not in saved}
        std = getattr(self.model.causal_lm.config, "initializer_range", 0.02)
        for name, parameter in fresh.items():
            fill_random(name, parameter, std=std, seed=self.seed, device=self.device)

    def _fill_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Compute buffers anew; raise ModelError for those that neither the family's class nor the files describe."""
        for module in modules:
            unknown = fill_buffers(self.model.causal_lm, module, device=self.device)
            names = [name_in_files(self.names[module]) + name for name in unknown]
            lacking = [name for name in names if self.saved is None or not self.saved.has(name)]
            if lacking:
                raise ModelError(
                    f"{type(module).__name__} has the buffer {lacking[0]}, which neither its class nor any file gives a value",
                    hint="use another family, for example Qwen3 or Llama",
                )


def _saved_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own buffers that are a part of what is saved of it; of the others transformers reads nothing from files either."""
    left_out = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage] -- what state_dict itself asks
    return [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in left_out]


def _check_files(model: Decoder, saved: weights.SavedWeights, other_names: Mapping[str, str]) -> None:
    """Raise ModelError for files that do not hold this model, all of it and nothing else."""
    names = {name_in_files(name): p for name, p in model.named_parameters()}
    parameters = {other_names.get(name, name): p for name, p in names.items() if name != SCORE or saved.has(SCORE)}
    others = {name_in_files(name) for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    if isinstance(model, ScalarModel):
        others |= {f"{model.replaced_head}.{name}" for name in ("weight", "bias")}
    left: Any = getattr(model.causal_lm, "_keys_to_ignore_on_load_unexpected", None) or ()
    parts = ((name_in_files(name), module) for name, module in model.named_modules())
    buffers = {f"{name}.{own}": buffer for name, module in parts for own, buffer in _saved_buffers(module)}
    saved.check(parameters, buffers, others=others, ignored={*_LEFT_IN_FILES, *left})


def _other_names(model: Decoder, saved: weights.SavedWeights) -> dict[str, str]:
    """The head's name in the place of the embedding's, where the files hold a tied weight under that name alone."""
    tied = [name_in_files(name) for name, p in model.named_parameters(remove_duplicate=False) if p is model.head.weight]
    if len(tied) == 1:
        return {}
    embedding, head = tied
    if saved.has(embedding) and saved.has(head) and not saved.has_same(embedding, head):
        raise ModelError(
            f"config.json in {saved.directory} ties {head} to {embedding}, and the files hold different values for them",
            hint="set tie_word_embeddings to false in config.json",
        )
    return {embedding: head} if saved.has(head) and not saved.has(embedding) else {}


def name_in_files(name: str) -> str:
    """A parameter's name in our model, as Hugging Face's files have it."""
    return name.replace(RECOMPUTE_PREFIX, "").replace(FSDP1_PREFIX, "").removeprefix("causal_lm.")


def _once(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Without the second name of a parameter that two modules share."""
    return {name: p for p, name in {p: name for name, p in reversed(parameters.items())}.items()}
