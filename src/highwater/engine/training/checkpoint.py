"""Checkpoints: model and optimizer as every rank's shards, and the model as a directory that
``from_pretrained`` loads, or its adapters as a directory that peft loads.

Shards are read through torch.distributed.checkpoint.state_dict, which knows FSDP1, FSDP2 and
shards in host memory. No save makes a whole copy of the model: shards are written as they are, and
Hugging Face weights one parameter at a time.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.futures import Future

from highwater.engine.models.adapters import (
    adapted_layer,
    is_adapter,
    name_for_peft,
    write_adapters,
)
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.pretrained import PretrainedDirectory, text_config, write_beside
from highwater.engine.models.weights import name_in_files, opened
from highwater.engine.parallel.fsdp2 import local_shard, own_rows
from highwater.engine.parallel.mesh import all_ranks, every_ranks
from highwater.engine.training.shard_reader import FlatRange, ShardReader, write_index
from highwater.errors import UsageError
from highwater.nouns.objective import Lora


def save_sharded(
    model: Decoder, optimizer: torch.optim.Optimizer, directory: Path, *, mesh: DeviceMesh
) -> int:
    """Write every rank's shards of model and optimizer to ``directory``; returns this rank's bytes.

    The format is torch.distributed.checkpoint's, with keys ``model`` and ``optimizer`` (a tied head
    under its embedding's name alone), with an index that ``load_sharded`` reads. A save takes 12
    bytes a parameter over all ranks: float32 weights and both moments. For a model with adapters
    only these are saved, as the rest has not changed. Raises OSError if the disk is full or fails.
    """
    options = _options(model)
    weights = get_model_state_dict(model, options=options)
    for name in [name for name in weights if name_in_files(name) in _tied_names(model)]:
        del weights[name]
    state: dict[str, Any] = {
        "model": weights,
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    writer = _CountingWriter(directory)
    try:
        # A single rank needs no collective, for which NCCL would take memory.
        dcp.save(state, storage_writer=writer, no_dist=mesh.size() == 1, process_group=None)
    except dcp.CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise next((each for each in failures if isinstance(each, OSError)), failures[0]) from error
    return writer.written_bytes


@torch.no_grad()
def load_sharded(
    model: Decoder, optimizer: torch.optim.Optimizer, directory: Path, *, mesh: DeviceMesh
) -> None:
    """Read what ``save_sharded`` wrote into the shards of model and optimizer, in place: weights,
    moments and the optimizer's step counts are restored bit by bit.

    The saving run may have had another number of ranks or copies, the other FSDP strategy, or
    moments in host memory. Only 8-bit moments may be refused on another number of shards, if their
    blocks of 256 elements would be cut. Learning rates and other options are not loaded.

    Each rank reads only the elements that it holds, one saved piece (a rank's part of a tensor) at
    a time on the host. Raises UsageError for another model's checkpoint, and for a damaged one.
    """
    own = _held_by_rank(model, mesh)
    with ShardReader(directory) as reader:
        saved = {_saved_name(name): name for name in reader.tensors}
        _refuse_another_model(model, optimizer, own, saved, reader)
        for name, buffer in model.named_buffers():
            key = saved.get(("model", name_in_files(name), ""))
            if key is not None:
                reader.fill(key, buffer, FlatRange(0, buffer.numel()))
        for name, (parameter, _, held) in own.items():
            shard = local_shard(parameter.detach())
            reader.fill(saved["model", name, ""], shard, held)
            for kind, moment in optimizer.state.get(parameter, {}).items():
                part = held if moment.ndim else FlatRange(0, 1)
                reader.fill(saved["optimizer", name, kind], local_shard(moment), part)


class _TrainedShard(NamedTuple):
    """A trained parameter, its number of elements, and the range of them that this rank holds."""

    parameter: nn.Parameter
    numbers: int
    held: FlatRange


def _held_by_rank(model: Decoder, mesh: DeviceMesh) -> dict[str, _TrainedShard]:
    """Return this rank's shards of the trained parameters, by their names in files."""
    trained = {
        name_in_files(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        own: dict[str, _TrainedShard] = {}
        for name, parameter in trained.items():
            row = math.prod(parameter.shape[1:])
            held = FlatRange(*(number * row for number in own_rows(parameter)))
            own[name] = _TrainedShard(parameter, parameter.numel(), held)
        return own
    # FSDP1 cuts its flat vectors into one range for each rank, in the order of the ranks.
    sizes = [parameter.numel() for parameter in trained.values()]
    counts = torch.tensor(every_ranks(sizes, torch.int64, mesh))
    starts = counts.cumsum(0) - counts
    found = zip(trained.items(), starts[dist.get_rank()].tolist(), counts.sum(0), strict=True)
    return {
        name: _TrainedShard(parameter, int(numbers), FlatRange(start, start + parameter.numel()))
        for (name, parameter), start, numbers in found
    }


def _saved_name(key: str) -> tuple[str, str, str]:
    """Split a saved tensor's key: model or optimizer, parameter's name in files, kind of state."""
    owner, _, rest = key.partition(".")
    if owner == "model":
        return owner, name_in_files(rest), ""
    parameter, _, kind = rest.removeprefix("state.").rpartition(".")
    return owner, name_in_files(parameter), kind


def _refuse_another_model(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, _TrainedShard],
    saved: Mapping[tuple[str, str, str], str],
    reader: ShardReader,
) -> None:
    """Raise UsageError if the checkpoint has other trained parameters or other optimizer states."""
    theirs = {name for owner, name, _ in saved if owner == "model"}
    buffers = {name_in_files(name) for name, _ in model.named_buffers()}
    differing = sorted(set(own) - theirs) or sorted(theirs - set(own) - buffers)
    for name in theirs & set(own):
        shape, (parameter, numbers, _) = reader.tensors[saved["model", name, ""]].shape, own[name]
        is_whole = isinstance(parameter, DTensor)  # FSDP1's parameters are flat
        if shape != tuple(parameter.shape) if is_whole else math.prod(shape) != numbers:
            differing.append(name)
    for name, (parameter, _, _) in own.items():
        kinds = optimizer.state.get(parameter, {})
        differing += [name for kind in kinds if ("optimizer", name, kind) not in saved]
    if differing:
        raise UsageError(
            f"{reader.directory} was saved of another model, or of another optimizer: "
            f"{differing[0]} is not the same",
            hint="go on with the model, `--lora` and `--optimizer` that the run began with",
        )


def save_pretrained(
    model: Decoder,
    directory: Path,
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    source: Path,
    merged: bool = False,
) -> int:
    """Write the Hugging Face model to ``directory`` in ``dtype``; returns the bytes that this rank
    wrote, which is 0 except on rank 0. For a model with adapters, write only these, in their own
    dtype, for peft to load beside the model at ``source``; or with ``merged`` the model plus them.

    Every rank gathers one parameter at a time, as in the forward pass; only rank 0 copies it to its
    host and writes it. Files of an earlier save in the directory are overwritten one by one.
    ``source`` is the directory that the model came from. Raises OSError if the disk is full.
    """
    if model.lora is not None and not merged:
        return _save_adapters(model, model.lora, directory, mesh=mesh, source=source)
    shards = _named_shards(model)
    parameters = {name_in_files(name) for name, _ in model.named_parameters()}
    dtypes = {
        name: dtype if name in parameters else tensor.dtype for name, tensor in shards.items()
    }
    written_bytes, left = 0, iter(shards.items())
    try:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            shapes = {
                name: torch.empty(shard.shape, dtype=dtypes[name], device="meta")
                for name, shard in shards.items()
            }
            is_text_of = text_config(source) is not None and not model.gives_scalars
            with opened(str(source)) if is_text_of else nullcontext() as whole:
                with PretrainedDirectory(directory, model.causal_lm, shapes, whole) as target:
                    for name, shard in left:
                        target.write(name, _merged(model, name, shard, dtypes[name], mesh).cpu())
                written_bytes = target.written_bytes
            written_bytes += write_beside(
                *(directory, model.causal_lm),
                architecture=model.architecture,
                dtype=dtype,
                source=source,
                is_whole=whole is not None,
            )
    finally:
        for name, shard in left:  # even if the first rank failed: the others are gathering
            _merged(model, name, shard, dtypes[name], mesh)
        _meet(mesh)
    return written_bytes


def _meet(mesh: DeviceMesh) -> None:
    """Wait until the first rank has written, so that the next step's time excludes it."""
    if mesh.size() > 1:
        dist.barrier(group=all_ranks(mesh))


def _save_adapters(
    model: Decoder, lora: Lora, directory: Path, *, mesh: DeviceMesh, source: Path
) -> int:
    """Gather a model's adapters on all ranks; rank 0 writes peft's files. Returns bytes written."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_of_text = text_config(source) is not None and not model.gives_scalars
    whole: dict[str, Tensor] = {
        name_for_peft(name_in_files(name), is_of_text=is_of_text): _whole(
            parameter.detach(), parameter.dtype, mesh
        ).cpu()
        for name, parameter in trained.items()
    }
    written_bytes = 0
    try:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            written_bytes = write_adapters(
                directory,
                whole,
                lora,
                family=model.causal_lm.config.model_type,
                base=str(source),
                gives_scalars=model.gives_scalars,
            )
    finally:
        _meet(mesh)
    return written_bytes


def _merged(
    model: Decoder, name: str, shard: Tensor, dtype: torch.dtype, mesh: DeviceMesh
) -> Tensor:
    """Return the whole tensor, plus the product of its layer's adapter if any, rounded once."""
    layer = adapted_layer(model, name)
    if layer is None:
        return _whole(shard, dtype, mesh)
    adapter = layer.adapter
    assert adapter is not None, "no adapter is off between two passes"
    a_RI, b_OR = (_whole(each.detach(), each.dtype, mesh) for each in adapter[:2])
    whole = _whole(shard, shard.dtype, mesh).to(a_RI)
    return torch.addmm(whole, b_OR, a_RI, alpha=adapter.scale).to(dtype)


def _options(model: Decoder) -> StateDictOptions:
    """Return state-dict options, with which FSDP2 returns shards, FSDP1 host copies of shards."""
    return StateDictOptions(
        cpu_offload=any(isinstance(module, FullyShardedDataParallel) for module in model.modules()),
        ignore_frozen_params=model.lora is not None,
    )


def _named_shards(model: Decoder) -> dict[str, Tensor]:
    """Return this rank's shards by the Hugging Face model's names, each once, without adapters."""
    options = replace(_options(model), ignore_frozen_params=False)
    shards: dict[str, Any] = get_model_state_dict(model, options=options)
    tied = _tied_names(model)
    return {
        name_in_files(name): shard
        for name, shard in shards.items()
        if name_in_files(name) not in tied and not is_adapter(name)
    }


def _tied_names(model: Decoder) -> set[str]:
    """Return the names in files of shared parameters, all but the first name of each."""
    first = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name_in_files(name) for name in every - first}


def _whole(shard: Tensor, dtype: torch.dtype, mesh: DeviceMesh) -> Tensor:
    """Cast the shard to ``dtype``, so that less travels, and gather the whole tensor."""
    if not isinstance(shard, DTensor):
        return shard.to(dtype)
    if mesh.size() == 1:  # nothing to gather, so avoid making a communicator
        return shard.to_local().to(dtype)
    # Shards in host memory travel over the mesh's device.
    return cast(DTensor, shard.to(device=mesh.device_type, dtype=dtype)).full_tensor()


class _CountingWriter(dcp.FileSystemWriter):
    """Writer that counts its bytes and keeps the system's error, which torch.save hides."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.written_bytes = 0

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the index of all tensors, on the first rank."""
        super().finish(metadata, results)
        places = {each.index: each.storage_data for ranks in results for each in ranks}
        write_index(Path(self.path), metadata, places)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[Any]]:
        try:
            results = super().write_data(plan, planner)
        except RuntimeError as error:
            raise _cause(error) from None  # it crosses ranks by pickle, which keeps no context
        self.written_bytes += sum(result.size_in_bytes for result in results.wait())
        return results


def _cause(error: BaseException) -> BaseException:
    """Return the OSError that led to ``error``, directly or not; ``error`` itself if none did."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return behind or error
