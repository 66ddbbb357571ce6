"""Build any decoder-only causal LM of Hugging Face on meta, shard it, and fill its shards."""

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from highwater.engine.activations.host import HostActivations
from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.registry import Attention
from highwater.engine.models import weights
from highwater.engine.models.adapters import add_adapters
from highwater.engine.models.decoder import Decoder, LanguageModel, ScalarModel
from highwater.engine.models.fill import Fill
from highwater.engine.models.fused.delta_net import fuse_delta_nets
from highwater.engine.models.fused.earlier_keys import hand_over_earlier_keys
from highwater.engine.models.fused.fused import fuse_attentions, fuse_mlps, fuse_norms, tile_experts
from highwater.engine.models.fused.nf4 import pack, scale_table
from highwater.engine.models.fused.rotary_attention import RotaryAttention
from highwater.engine.models.pretrained import text_config
from highwater.engine.models.requirements import (
    prove_head,
    prove_rows,
    refuse_other_mixing,
    refuse_shared_parameters,
)
from highwater.engine.models.rope import scale_rope
from highwater.engine.models.weights import names_in_model
from highwater.engine.parallel.fsdp1 import shard_flat
from highwater.engine.parallel.fsdp2 import shard
from highwater.errors import MachineError, ModelError
from highwater.model.families import PLAIN, logit_transform_of
from highwater.model.weight_files import unties
from highwater.nouns.objective import Lora, expert_targets
from highwater.nouns.settings import Loss, Recompute, Rope, Strategy


def read_config(directory: str, *, length_tokens: int, rope: Rope) -> PreTrainedConfig:
    """Return the model's config, with RoPE scaled for the length; no remote code is run."""
    config = text_config(Path(directory)) or AutoConfig.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    if getattr(config, "tie_word_embeddings", False) and unties(Path(directory)):
        # as transformers does if the files hold both, with different values
        config.tie_word_embeddings = False
    # Attention takes None as hidden size / heads, but transformers' YaRN would multiply by None.
    # Read from to_dict: a config with several head sizes raises if asked for its one head_dim.
    if config.to_dict().get("head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    taken = inspect.signature(type(config).__init__).parameters
    if hasattr(config, "sliding_window") and "sliding_window" not in taken:
        # the field may be in a config (Llama's) whose class does not use it
        delattr(config, "sliding_window")
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
    head_groups: int = 1,
    master_dtype: torch.dtype = torch.float32,
    lora: Lora | None = None,
    host: HostActivations | None = None,
    seed: int = 0,
) -> Decoder:
    """Return the sharded model, its shards on the mesh's device or, with offload, on the host.
    Weights are from safetensors in ``directory`` if there are any, else random.

    With a ``loss`` this is a LanguageModel, without one a ScalarModel, whose head is random unless
    the files have ``score.weight``. Sharding starts from a model without storage. With FSDP2 a rank
    never holds more than its own shards; FSDP1 cuts one layer after the other
    (engine/parallel/fsdp1.py), and returns a wrapper that has every attribute of the model.
    ``attention``: result of registry.register. ``mlp_tiles`` None: MLPs are tiled if that costs no
    time. ``head_groups``: groups of key/value heads in every layer. With ``lora`` the model is
    frozen in ``master_dtype``, or its linear layers in NF4; its adapters, and a ScalarModel's head,
    are trained in float32 or wider. ``host``: host memory for the tensors that recomputed layers
    keep; None: they stay on the device.
    """
    model = build_on_meta(config, attention=attention, loss=loss, master_dtype=master_dtype)
    wide = master_dtype if lora is None else torch.promote_types(master_dtype, torch.float32)
    transform = getattr(model, "logit_transform", PLAIN)
    if mesh.device_type == "cuda" and not transform.is_plain:
        prove_rows(transform, torch.device("cuda"))
    # Tiles compute products twice. With recomputation that is free; without it, MLPs are tiled only
    # on demand and for experts with adapters.
    has_adapters = lora is not None and expert_targets(config.model_type, lora)
    if recompute != "none" or mlp_tiles is not None or has_adapters:
        tile_mlps(model, mlp_tiles)
    group_heads(model, head_groups)
    device = torch.device(mesh.device_type)
    with weights.opened(directory) as files:
        saved = files and files.renamed(names_in_model(model.causal_lm, files.names))
        if lora is not None:  # after names are read: adapters change the names of their layers
            add_adapters(model.causal_lm, lora, dtype=wide)
            model.lora = lora
            if isinstance(model, ScalarModel):
                model.score.to(wide)
        # Recompute first, FSDP around it: gathered parameters then serve the recomputation too.
        if recompute != "none":
            keeps = recompute == "all-but-attention"
            keeping = kept_in_recompute if keeps else None
            recompute_layers(model.layers, keeping=keeping, host=host)
        fill, layers = Fill(model, saved, device=device, seed=seed), model.layers
        how: dict[str, Any] = {"mesh": mesh, "compute_dtype": compute_dtype, "offload": offload}
        if strategy == "fsdp":  # cut and filled one layer after the other
            model = cast(Decoder, shard_flat(model, layers, materialise=fill.one_unit, **how))
        elif lora is not None and lora.base == "nf4":  # packed whole, then cut, unit by unit
            if mesh.size(mesh.ndim - 1) > 1 and TorchVersion(torch.__version__) < "2.12":
                raise MachineError(
                    f"FSDP2 of PyTorch {torch.__version__} shards no bytes, as a model in nf4 has",
                    hint="`pip install 'torch>=2.12'`, or use `--copies` for each GPU's own",
                )
            packed = partial(pack, table=scale_table(device), fill=fill.one_unit)
            shard(model, list(layers), prepare=packed, **how)
            fill.one_unit(model)
        else:  # cut before there is storage, so that only shards get any
            shard(model, list(layers), **how)
            model.to_empty(device="cpu" if offload else device)
            fill.values(model)
    fill.finish()
    are_wide = (p.dtype == wide for p in model.parameters() if p.requires_grad)
    assert all(are_wide), "master parameters keep their dtype"
    return model.train()


def build_on_meta(
    config: PreTrainedConfig, *, attention: Attention, loss: Loss | None, master_dtype: torch.dtype
) -> Decoder:
    """Return the model on meta, with parameters in ``master_dtype`` (not the config's dtype)."""
    # None means one grouped product over all experts if PyTorch has it, in the dtype of the
    # gathered weights; it does not support float64.
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
    refuse_shared_parameters(causal_lm)
    fuse_delta_nets(causal_lm, attention)
    hand_over_earlier_keys(causal_lm)
    refuse_other_mixing(causal_lm)
    transform = logit_transform_of(config.to_dict(), source=f"the config of {config.model_type}")
    prove_head(causal_lm, transform)
    fuse_norms(causal_lm)
    fuse_attentions(causal_lm)
    if loss is None:
        return ScalarModel(causal_lm, attention=attention)
    model = LanguageModel(causal_lm, attention=attention, loss=loss, logit_transform=transform)
    if getattr(model.head, "bias", None) is not None:
        raise ModelError(
            f"{config.model_type} has a bias on its head, which is not supported",
            hint="use a model without one",
        )
    return model


def drop_storage(causal_lm: PreTrainedModel) -> None:
    """Move tensors that the family's class allocated to meta; Fill computes all values."""
    for module in causal_lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                empty = torch.empty_like(parameter, device="meta")
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="meta"))


def tile_mlps(model: Decoder, tiles: int | None) -> None:
    """Compute MLPs and experts in tiles; ModelError if ``tiles`` is set but none can be tiled."""
    tiled = fuse_mlps(model.causal_lm, tiles=tiles) + tile_experts(model.causal_lm, tiles=tiles)
    if not tiled and tiles is not None:
        raise ModelError(
            f"{model.causal_lm.config.model_type} has no MLP of the form down(silu(gate) * up), "
            f"which is what goes in tiles",
            hint="leave `--mlp-tiles` out",
        )


def group_heads(model: Decoder, groups: int) -> None:
    """Compute every layer's attention in ``groups`` of heads; ModelError if a layer cannot."""
    ours = [module for module in model.layers.modules() if isinstance(module, RotaryAttention)]
    if groups > 1 and len(ours) < len(model.layers):
        raise ModelError(
            f"{model.causal_lm.config.model_type} has an attention of its own in "
            f"{len(model.layers) - len(ours)} of {len(model.layers)} layers, which does not go in "
            "head groups",
            hint="leave `--attention-head-groups` out",
        )
    for attention in ours:
        heads = cast(nn.Linear, attention.k_proj).out_features // attention.head_dim
        assert heads % groups == 0, "groups of as many heads each"
        attention.groups = groups
