"""Small models of the engine, of a config or a folder, and what packed documents make of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedConfig

from highwater.engine.activations.recompute import recompute_layers
from highwater.engine.attention.block_attention import kept_in_recompute
from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Batch, Document, pack
from highwater.engine.models.build import build, build_on_meta, read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.rank_context import RankContext
from highwater.engine.training.rank_run import assemble
from highwater.engine.training.step import Training
from highwater.nouns.layout import Layout
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.nouns.trial import TrialSpec
from tiny_models import config_of, write_model


def on_meta(
    config: PreTrainedConfig, *, loss: Any = "full", dtype: torch.dtype = torch.float32
) -> Decoder:
    return build_on_meta(config, attention=register("flash"), loss=loss, master_dtype=dtype)


def built(
    directory: str | Path,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    kernel: Any = "flash",
    shared: process_mesh.SequenceGroups = process_mesh.ALONE,
    sparse: SparsePatternConfig | None = None,
    length_tokens: int = 64,
    config: PreTrainedConfig | None = None,
    **how: Any,
) -> Decoder:
    """The model of a folder, or a random one of a config, computed and sharded in ``dtype``; layers
    are recomputed and logits whole, unless ``how`` says otherwise.
    """
    usual = {"loss": "full", "recompute": "layer", "compute_dtype": dtype, "master_dtype": dtype}
    return build(
        config or read_config(str(directory), length_tokens=length_tokens, rope="auto"),
        directory=str(directory),
        mesh=mesh,
        attention=register(kernel, shared=shared, sparse=sparse),
        **{**usual, **how},
    )


def recomputed(layers: nn.ModuleList, recompute: str, **how: Any) -> None:
    if recompute != "none":
        keeping = kept_in_recompute if recompute == "all-but-attention" else None
        recompute_layers(layers, keeping=keeping, **how)


def packed(*documents: Tensor) -> Batch:
    return pack([Document(ids, ids) for ids in documents])


def forward(model: nn.Module, batch: Batch) -> Any:
    return model(
        batch.input_ids_T,
        batch.position_ids_T,
        batch.trained_positions_N,
        batch.labels_N,
        batch.document_lengths,
    )


def assembled(spec: TrialSpec) -> Training:
    """What this rank trains in a trial on the CPU, in the group that its process is in."""
    device = torch.device("cpu")
    mesh = process_mesh.shard_mesh(spec.layout, device)
    context = RankContext(
        device=device, kernel="flash", mesh=mesh, shared=process_mesh.ALONE, nccl_bytes=0
    )
    return assemble(spec, context)


def save_random(config: PreTrainedConfig, folder: Path) -> dict[str, Tensor]:
    """Save the family's own class with random weights, the same every time; returns those."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def tiny_training(folder: Path, objective: Any) -> Training:
    """The tiny model on one process, with random weights and a small vocabulary."""
    write_model(folder, config_of("tiny"), vocab_size=64)
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))

    def model(loss: Any) -> Any:
        return built(folder, mesh, torch.float32, loss=loss)

    policy = model(None if objective == "rw" else "chunked")
    return Training(
        policy=policy,
        optimizer=torch.optim.SGD(policy.parameters()),
        mesh=mesh,
        objective=objective,
        reference=model("chunked").requires_grad_(False) if objective in ("grpo", "dpo") else None,
    )
