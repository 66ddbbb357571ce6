"""Weight files: which files of a Hugging Face directory hold the model's weights, by their headers.

Headers are read without torch. A safetensors file begins with its header's length in 8 bytes and
the header in JSON: name, dtype, shape and position of every tensor. If there are several kinds
of files, the first of transformers' order is read: the single safetensors file, the index of
several, then PyTorch's own format, whose files only the engine opens.

Source: https://github.com/huggingface/safetensors#format
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from highwater.errors import ModelError
from highwater.nouns.codec import open_regular, packaged, read_file

SCORE = "score.weight"
"""Name of the weight of a head that gives one number per token, as in Hugging Face's sequence and
token classifiers."""
MXFP4 = "mxfp4"
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a parameter in gpt-oss's files: two numbers per byte, and one
exponent for 32 numbers."""
_LARGEST_HEADER_BYTES = 100_000_000
"""Largest size of a header, as in the safetensors library."""
_LARGEST_INDEX_BYTES = 100_000_000
"""Largest size of an index, which has a name and a file for every tensor: the largest known, with
90,000 tensors, has 9 MB."""
_COMPARED_BYTES = 4 * 1024**2
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
_MARKS: Mapping[str, str] = packaged("model/quantised_tensors.json", dict[str, str])
"""Suffixes of tensor names of a quantisation method, and words for the method."""
_NARROW = ("F8_", "F6_", "F4", "I8", "U8", "I4", "U4")
"""Prefixes of dtypes in which only quantised weights are saved."""
_UNQUANTISED = (
    "use the model's bfloat16 or float32 weights; a copy of config.json alone, without "
    "quantization_config, shows its memory"
)


class SavedTensor(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    """Dtype as safetensors calls it: F32, BF16, F8_E4M3, U8."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Offset of the tensor's first byte in the file."""
    end: int


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return all files that hold the weights; empty if there are none. Raises ModelError for an
    index that names missing files, and for weights that are unreadable or not a whole model's.
    """
    adapters = ("adapter_config.json", "adapter_model.safetensors")
    found = [path.name for path in _files(directory) if path.name in adapters]
    if found:
        raise ModelError(
            f"{directory} holds an adapter ({found[0]}), which changes the model beside it",
            hint="merge it with PEFT's merge_and_unload(), save the model, and give that directory",
        )
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        if (directory / name).is_file():
            return _indexed(directory / name) if name.endswith(".json") else (directory / name,)
    shards = sorted(path for path in _files(directory) if _SHARD.fullmatch(path.name))
    if shards:  # numbered files without an index
        matches = [cast(re.Match[str], _SHARD.fullmatch(path.name)) for path in shards]
        counts = {int(match[2]) for match in matches}
        numbers = [int(match[1]) for match in matches]
        if len(counts) > 1 or numbers != list(range(1, max(counts) + 1)):
            raise ModelError(
                f"{directory} has {len(shards)} numbered weight files, of {max(counts)}, and "
                "no index",
                hint="download the model again, all of its files",
            )
        return tuple(shards)
    kinds = (
        *("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "consolidated*"),
        *("*.gguf", "tf_model*.h5", "*.msgpack"),
    )
    unread = sorted(path.name for kind in kinds for path in _files(directory, kind))
    if unread:  # random weights would be trained in their place
        raise ModelError(
            f"{directory} has weights that are not in Hugging Face's files: "
            f"{', '.join(unread[:3])}",
            hint="save the model with transformers' save_pretrained, which writes "
            "model.safetensors, and give that directory; a copy of config.json alone trains "
            "random weights",
        )
    return ()


def saved_tensors(directory: Path) -> Mapping[str, SavedTensor]:
    """Return every tensor in a directory's safetensors files, by name; empty without any. PyTorch's
    own files are not read. Raises ModelError as ``weight_files`` does, for damaged files, and for a
    tensor that two files hold.
    """
    return _tensors(_versions(directory))


def refuse_quantised(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError, naming the method, for quantised weights, except MXFP4 of gpt-oss, which is
    dequantised. Also raises the errors of ``saved_tensors``.
    """
    source = directory / "config.json"
    method = configured_method(config, source)
    if method not in (None, MXFP4):
        raise ModelError(
            f"{source} is of a quantised checkpoint ({method}), which cannot be trained as it is",
            hint=_UNQUANTISED,
        )
    # only gpt-oss: files do not say how another family's blocks are laid out
    is_mxfp4 = method == MXFP4 and config.get("model_type") == "gpt_oss"
    dtypes = {name: tensor.dtype for name, tensor in _tensors(_versions(directory)).items()}
    refuse_quantised_tensors(dtypes, directory, is_mxfp4=is_mxfp4)


def configured_method(config: Mapping[str, Any], source: Path) -> str | None:
    """Return the quantisation method that a config names; None if it names none."""
    for field in ("quantization_config", "compression_config", "quantization"):
        block = config.get(field)
        if not block:
            continue
        if not isinstance(block, dict):
            raise ModelError(
                f"{field} is {block!r} in {source}",
                hint=f"remove {field}, if the weights are not quantised",
            )
        own = cast(dict[str, Any], block)
        method = own.get("quant_method") or own.get("quant_algo")
        return str(method or field)[:80].lower()
    return None


def refuse_quantised_tensors(
    dtypes: Mapping[str, str], directory: Path, *, is_mxfp4: bool = False
) -> None:
    """Raise ModelError for quantised tensors, by their names and dtypes (as in safetensors). With
    ``is_mxfp4``, pairs of blocks and scales are ignored.
    """
    for name, dtype in dtypes.items():
        if is_mxfp4 and _has_partner(name, dtypes):
            continue
        mark = next((what for end, what in _MARKS.items() if name.endswith(end)), None)
        # Old files have causal masks, stored as bytes and called bias.
        if mark is None and dtype.startswith(_NARROW) and not name.endswith("bias"):
            mark = f"numbers of dtype {dtype}"
        if mark is not None:
            raise ModelError(
                f"the weights in {directory} are quantised ({mark}: they hold {name}) and cannot "
                "be trained as they are",
                hint=_UNQUANTISED,
            )


def unties(directory: Path) -> bool:
    """True if the files hold a head and an embedding with different values, which transformers does
    not tie, whatever the config says. Equal tensors are compared to the last byte: seconds for a
    large vocabulary. Raises ModelError if their dtypes differ.
    """
    tensors = saved_tensors(directory)
    heads = [name for name in tensors if name.removeprefix("language_model.") in _HEADS]
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    head, embedding = tensors[heads[0]], tensors[embeddings[0]]
    if head.dtype != embedding.dtype:
        raise ModelError(
            f"config.json in {directory} ties {heads[0]} to {embeddings[0]}, of dtypes "
            f"{head.dtype} and {embedding.dtype}",
            hint="set tie_word_embeddings to false in config.json, or remove the head from the "
            "files",
        )
    return head.shape != embedding.shape or not _same_bytes(head, embedding, _versions(directory))


def _indexed(index: Path) -> tuple[Path, ...]:
    try:
        text = read_file(index, most_bytes=_LARGEST_INDEX_BYTES).decode()
        names: Any = json.loads(text)["weight_map"]
        files = sorted({str(file) for file in names.values()})
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} cannot be read: {error!r}", hint="download the model again"
        ) from error
    odd = [file for file in files if Path(file).name != file]
    if odd:
        raise ModelError(
            f"{index} names {odd[0]!r}, which is not a file beside it",
            hint="download the model again",
        )
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing or not files:
        what = "no file"
        if missing:
            gone = f"{len(missing)} of {len(files)} files that are not there"
            what = f"{gone}, the first {missing[0]}"
        raise ModelError(f"{index} names {what}", hint="download the model again, all of its files")
    return tuple(index.parent / file for file in files)


def _files(directory: Path, pattern: str = "*") -> list[Path]:
    try:
        return [path for path in directory.glob(pattern) if path.is_file()]
    except OSError:
        return []


def _versions(directory: Path) -> tuple[tuple[Path, int, int], ...]:
    """Return the safetensors files, with times and sizes, as the key of a cache."""
    files = [file for file in weight_files(directory) if file.suffix == ".safetensors"]
    try:
        return tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    except OSError as error:
        raise ModelError(
            f"the weights in {directory} cannot be read: {error}", hint="check the files"
        ) from error


@lru_cache(maxsize=16)
def _tensors(files: tuple[tuple[Path, int, int], ...]) -> Mapping[str, SavedTensor]:
    found: dict[str, SavedTensor] = {}
    for file, _, size in files:
        for name, tensor in _header(file, size).items():
            if name in found:
                raise ModelError(
                    f"{found[name].file.name} and {file.name} in {file.parent} both hold {name}",
                    hint="remove the file that is left from another save",
                )
            found[name] = tensor
    return found


def _header(file: Path, size: int) -> dict[str, SavedTensor]:
    try:
        with open_regular(file) as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ValueError("it is a pointer of Git LFS, and not the file itself")
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries: Any = json.loads(opened.read(length))
        return {
            name: _entry(file, entry, 8 + length, size)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file} cannot be read as safetensors: {error}", hint="download the file again"
        ) from error


def _entry(file: Path, entry: Any, data: int, size: int) -> SavedTensor:
    begin, end = (data + int(offset) for offset in entry["data_offsets"])
    if not data <= begin <= end <= size:
        raise ValueError(f"a tensor ends at byte {end} of {size}")
    shape = tuple(int(length) for length in entry["shape"])
    return SavedTensor(str(entry["dtype"]), shape, file, begin, end)


def _has_partner(name: str, dtypes: Mapping[str, str]) -> bool:
    """True for MXFP4 blocks if their scales exist, and for scales if their blocks exist."""
    for end, other in ((MXFP4_BLOCKS, MXFP4_SCALES), (MXFP4_SCALES, MXFP4_BLOCKS)):
        if name.endswith(end):
            return dtypes[name] == dtypes.get(name.removesuffix(end) + other) == "U8"
    return False


@lru_cache(maxsize=16)
def _same_bytes(one: SavedTensor, other: SavedTensor, _: tuple[tuple[Path, int, int], ...]) -> bool:
    """True if two tensors of equal shape and dtype have equal bytes; cached by file versions."""
    with open_regular(one.file) as first, open_regular(other.file) as second:
        for offset in range(0, one.end - one.begin, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, one.end - one.begin - offset)
            first.seek(one.begin + offset)
            second.seek(other.begin + offset)
            if first.read(length) != second.read(length):
                return False
    return True
