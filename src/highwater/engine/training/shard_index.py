"""The index of a sharded checkpoint: where each tensor's pieces lie in its files, as JSON beside
them.

torch.distributed.checkpoint keeps the same in ``.metadata``, a pickle, which runs what it says when
it is read. That file is written for torch's own tools and never read here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import Record, from_json, to_json
from highwater.nouns.files import INDEX_BYTES, read_file

INDEX_FILE = "index.json"


class IndexedPiece(Record, frozen=True, kw_only=True):
    """A part of one tensor, as one rank had it."""

    file: str
    """Name of the file, in the index's own folder."""
    start_bytes: int
    """Where it begins in the file: there is what ``torch.save`` writes of one tensor."""
    length_bytes: int
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor, by dimension."""
    sizes: tuple[int, ...]


class IndexedTensor(Record, frozen=True, kw_only=True):
    """One tensor, whole in its pieces; of copies one is saved."""

    dtype: str
    """In PyTorch's words: ``float32``."""
    shape: tuple[int, ...]
    pieces: tuple[IndexedPiece, ...]


class ShardIndex(Record, frozen=True, kw_only=True):
    """All tensors of a checkpoint by name: ``model.<parameter>``, and
    ``optimizer.state.<parameter>.exp_avg`` for example.
    """

    tensors: Mapping[str, IndexedTensor]


def write_index(
    directory: Path, metadata: dcp.Metadata, places: Mapping[MetadataIndex, Any]
) -> None:
    """Write the index of what was just saved to ``directory``, at these places, onto the disk."""
    index = ShardIndex(
        tensors={
            name: _saved_tensor(name, entry, places)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    )
    with (directory / INDEX_FILE).open("w", encoding="utf-8") as file:
        file.write(to_json(index))
        file.flush()
        os.fsync(file.fileno())


def read_index(directory: Path) -> ShardIndex:
    """The index in ``directory``; UsageError where there is none, or it is damaged."""
    path = directory / INDEX_FILE
    try:
        index = from_json(read_file(path, most_bytes=INDEX_BYTES), ShardIndex)
    except (OSError, msgspec.MsgspecError, HighwaterError) as error:
        raise damaged(path, error) from error
    files = {piece.file for tensor in index.tensors.values() for piece in tensor.pieces}
    outside = sorted(name for name in files if Path(name).name != name or name in ("", ".."))
    if outside:
        raise damaged(path, ValueError(f"it names {outside[0]!r}, which is no file beside it"))
    return index


def damaged(path: Path, error: BaseException) -> UsageError:
    """What is said of a file of a checkpoint that cannot be read."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UsageError(
        f"{path} cannot be read: {why.splitlines()[0] if why else type(error).__name__}",
        hint=f"`ls -l {path.parent}` shows what is there; go on from another checkpoint",
    )


def _saved_tensor(
    name: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]
) -> IndexedTensor:
    pieces: list[IndexedPiece] = []
    for number, chunk in enumerate(entry.chunks):
        place = places[MetadataIndex(name, chunk.offsets, number)]
        pieces.append(
            IndexedPiece(
                file=place.relative_path,
                start_bytes=place.offset,
                length_bytes=place.length,
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
            )
        )
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return IndexedTensor(dtype=dtype, shape=tuple(entry.size), pieces=tuple(pieces))
