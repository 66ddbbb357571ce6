"""Shard reader: read parts of saved tensors into allocated shards, whatever sharding saved them.

Every sharding cuts a tensor into ranges of its flat elements: FSDP2 and saved pieces at rows, FSDP1
anywhere. A rank holds one range, and reads the saved pieces that overlap it, one at a time. The
position of each piece is in a JSON index beside the files: torch's own ``.metadata`` is a pickle,
which is written for torch's tools and never read here.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import (
    _create_file_view,  # pyright: ignore[reportPrivateUsage] -- its own reader's, in 2.13
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import (
    INDEX_BYTES,
    Record,
    from_json,
    open_regular,
    read_file,
    to_json,
    write_whole,
)
from highwater.nouns.objective import QUANTIZED_BLOCK

INDEX_FILE = "index.json"


class IndexedPiece(Record, frozen=True, kw_only=True):
    """Part of one tensor, as one rank saved it."""

    file: str
    """Name of the file, in the index's own folder."""
    start_bytes: int
    """Offset in the file of the piece, which ``torch.save`` wrote."""
    length_bytes: int
    offsets: tuple[int, ...]
    """Position of its first element in the whole tensor, by dimension."""
    sizes: tuple[int, ...]


class IndexedTensor(Record, frozen=True, kw_only=True):
    """One unsharded tensor as saved pieces; of copies on several ranks only one is saved."""

    dtype: str
    """PyTorch's name of the dtype, like ``float32``."""
    shape: tuple[int, ...]
    pieces: tuple[IndexedPiece, ...]


class ShardIndex(Record, frozen=True, kw_only=True):
    """Tensors by name: ``model.<parameter>``, ``optimizer.state.<parameter>.exp_avg``, ..."""

    tensors: Mapping[str, IndexedTensor]


def write_index(
    directory: Path, metadata: dcp.Metadata, places: Mapping[MetadataIndex, Any]
) -> None:
    """Write and flush the index of tensors just saved in ``directory``; ``places``: of pieces."""
    index = ShardIndex(
        tensors={
            name: _saved_tensor(name, entry, places)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    )
    write_whole(directory / INDEX_FILE, to_json(index).encode(), durably=True)


def read_index(directory: Path) -> ShardIndex:
    """Read the index in ``directory``; UsageError if it is missing or damaged."""
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
    """Return the error for a checkpoint's file that cannot be read."""
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


class FlatRange(NamedTuple):
    """Range of a tensor's flat elements, from ``start`` up to ``stop``, exclusive."""

    start: int
    stop: int


class ShardReader:
    """Reader of the tensors of one sharded checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Read the index; UsageError if it cannot be read."""
        self.directory = directory
        self.tensors: Mapping[str, IndexedTensor] = read_index(directory).tensors
        self._open: dict[str, IO[bytes]] = {}

    def fill(self, name: str, target: Tensor, held: FlatRange) -> None:
        """Fill a contiguous shard with the range of a saved tensor that it holds.

        Raises UsageError for another dtype, 8-bit moments with cut blocks, and damaged files.
        """
        saved = self.tensors[name]
        length = held.stop - held.start
        assert target.numel() == length, f"{name}: a shard of {target.numel()} for {length}"
        filled = 0
        for piece in saved.pieces:
            part = _range_of(name, piece, saved)
            both = FlatRange(max(held.start, part.start), min(held.stop, part.stop))
            if both.start < both.stop:
                filled += both.stop - both.start
                source = _FlatPlace(self._read(piece), both.start - part.start)
                own = _FlatPlace(target, both.start - held.start)
                _copy(name, source, own, both.stop - both.start)
        if filled != length:
            missing = f"of the numbers of {name} {filled} of {length} are in it"
            raise damaged(self.directory, ValueError(missing))

    def _read(self, piece: IndexedPiece) -> Tensor:
        path = self.directory / piece.file
        try:
            if piece.file not in self._open:
                self._open[piece.file] = open_regular(path)
            view: Any = _create_file_view(
                self._open[piece.file],  # pyright: ignore[reportArgumentType] -- as dcp calls it
                piece.start_bytes,
                piece.length_bytes,
            )
            found = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds of errors for a damaged file
            raise damaged(path, error) from error
        if not isinstance(found, Tensor) or tuple(found.shape) != piece.sizes:
            raise damaged(path, ValueError("a tensor in it is not what the index says"))
        return found.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()


class _FlatPlace(NamedTuple):
    """A tensor, and the index of its first element in the flat tensor."""

    tensor: Tensor
    first: int


def _range_of(name: str, piece: IndexedPiece, saved: IndexedTensor) -> FlatRange:
    """Return a piece's range of the tensor's flat elements; pieces are whole rows."""
    if piece.offsets[1:] != (0,) * len(piece.offsets[1:]) or piece.sizes[1:] != saved.shape[1:]:
        raise UsageError(
            f"{name} was saved in pieces that are no whole rows",
            hint="go on from a checkpoint that `highwater train` wrote",
        )
    row = math.prod(saved.shape[1:])
    first = piece.offsets[0] * row if piece.offsets else 0
    return FlatRange(first, first + math.prod(piece.sizes))


def _copy(name: str, source: _FlatPlace, target: _FlatPlace, length: int) -> None:
    """Copy ``length`` flat elements from one tensor to another, without rounding."""
    is_coded = is_traceable_wrapper_subclass(source.tensor)
    if is_traceable_wrapper_subclass(target.tensor):
        _copy_codes(name, source, target, length, is_coded=is_coded)
        return
    found: Any = source.tensor
    if is_coded:  # the codes' values, in the float32 that the optimizer computes in
        found = found.dequantize()
    if found.dtype != target.tensor.dtype:
        kept, wanted = (str(each.dtype).removeprefix("torch.") for each in (found, target.tensor))
        raise UsageError(
            f"{name} was saved in {kept}, and is kept in {wanted} now",
            hint="go on with the settings that the run began with: `--parameters`, `--optimizer`",
        )
    own = target.tensor.view(-1)[target.first : target.first + length]
    own.copy_(found.reshape(-1)[source.first : source.first + length])


def _copy_codes(
    name: str, source: _FlatPlace, target: _FlatPlace, length: int, *, is_coded: bool
) -> None:
    """Copy 8-bit codes and scales; UsageError unless the range is of whole blocks."""
    if not is_coded or any(n % QUANTIZED_BLOCK for n in (source.first, target.first, length)):
        kept = "float32" if not is_coded else "blocks that lie otherwise"
        raise UsageError(
            f"the moments of 8 bits of {name} are cut otherwise on this number of GPUs: they were "
            f"saved in {kept}, and would be rounded anew",
            hint="go on with as many GPUs a copy as saved it",
        )
    theirs: Any = source.tensor
    own: Any = target.tensor  # torchao's OptimState8bit, as theirs
    for numbers, others, size in (
        (own.codes, theirs.codes, 1),
        (own.scale, theirs.scale, QUANTIZED_BLOCK),
    ):
        first, start, count = target.first // size, source.first // size, length // size
        numbers.view(-1)[first : first + count].copy_(others.reshape(-1)[start : start + count])
