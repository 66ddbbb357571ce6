"""Pretrained directory: write a Hugging Face directory that transformers 4.57 and 5 load, as a
stream: all offsets are known before the first tensor is, so this process never holds more than one
parameter. In memory transformers 5 fuses experts and renames some weights; the files keep the
layout that both versions read.

Also: make a directory that any trainer opens, if the model's own lacks weights or a tokenizer.
Existing files are linked, weights are drawn from a seed in bfloat16, and a made tokenizer has one
token for each word. The directory is made once and stays in the cache.

Source: https://github.com/huggingface/safetensors#format
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from highwater.engine.models.fill import fill_buffers
from highwater.engine.models.random_weights import fill_random
from highwater.engine.models.weights import SavedWeights
from highwater.errors import ModelError
from highwater.model import model_config
from highwater.nouns.codec import CONFIG_BYTES, read_file
from highwater.nouns.corpus import MissingFiles, missing_files, prepared_name
from highwater.units import GIB

FILE_BYTES = 4 * GIB
"""Largest size of a weight file: a parameter that would exceed it begins the next file."""
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files that are copied unchanged if the model's directory has them."""
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class _File(NamedTuple):
    """Plan of one safetensors file."""

    parameters: dict[str, dict[str, Tensor]]
    """For each parameter in memory, its tensors in the file by name, on meta for their shapes."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def header(self) -> bytes:
        """Return length and text of the header, padded: tensors begin at a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, tensor in self._tensors():
            stop = start + tensor.nbytes
            place = {"shape": list(tensor.shape), "data_offsets": [start, stop]}
            entries[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], **place}
            start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for tensors in self.parameters.values():
            yield from tensors.items()


class PretrainedDirectory:
    """Weight files that are being written.

    Construct it with all parameters' shapes, write their values in that order, then end the block.
    """

    def __init__(
        self,
        directory: Path,
        model: PreTrainedModel,
        shapes: Mapping[str, Tensor],
        whole: SavedWeights | None = None,
    ) -> None:
        """Plan the files: ``shapes`` has every tensor under its name in memory, on meta.

        Each tensor is saved in the dtype that it has there. ``whole``: files of the multimodal
        model whose text model this is: their names are kept, and the tensors that they have beside
        the text model are written last, unchanged.
        """
        self.written_bytes = 0
        self._model, self._whole = model, whole
        tower = {} if whole is None else whole.tower
        beside = {name: file.get_tensor(name).to("meta") for name, file in tower.items()}
        files = self._planned({**shapes, **beside})
        count = len(files)
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        self._file_of = {
            parameter: (directory / name, file)
            for name, file in zip(names, files, strict=True)
            for parameter in file.parameters
        }
        self._directory = directory
        self._open: tuple[Path, IO[bytes]] | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next parameter; ``tensor``: the unsharded values, in host memory."""
        path, file = self._file_of[name]
        if self._open is None or self._open[0] != path:
            self._close_file()
            self._open = path, path.open("wb")
            self._put(file.header())
        expected = file.parameters[name]
        for file_name, part in self._as_in_files(name, tensor).items():
            planned = expected[file_name]
            assert part.shape == planned.shape, f"{file_name} is not as planned"
            assert part.dtype == planned.dtype, f"{file_name} is not as planned"
            content: Any = part.contiguous().reshape(-1).view(torch.uint8).numpy()
            self._put(memoryview(content))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._whole is not None:
            for name, file in self._whole.tower.items():
                self.write(name, file.get_tensor(name))
        self._close_file()
        files = dict(self._file_of.values())
        if kind is not None or len(files) == 1:  # a single file needs no index
            return
        weight_map = {
            name: path.name
            for path, file in files.items()
            for tensors in file.parameters.values()
            for name in tensors
        }
        size_bytes = sum(file.size_bytes for file in files.values())
        index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
        self.written_bytes += _write_json(self._directory / "model.safetensors.index.json", index)

    def _planned(self, shapes: Mapping[str, Tensor]) -> list[_File]:
        """Assign parameters to files, in order; the tensors of one parameter share a file."""
        files, filled_bytes = [_File({})], 0
        for name, shape in shapes.items():
            filled_bytes += shape.nbytes
            if files[-1].parameters and filled_bytes > FILE_BYTES:
                files, filled_bytes = [*files, _File({})], shape.nbytes
            files[-1].parameters[name] = self._as_in_files(name, shape)
        return files

    def _as_in_files(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        whole = self._whole
        return found if whole is None else {whole.written(n): part for n, part in found.items()}

    def _put(self, data: bytes | memoryview) -> None:
        assert self._open is not None
        self._open[1].write(data)
        self.written_bytes += len(data)

    def _close_file(self) -> None:
        """Close the file after flushing it: a full disk may only show then."""
        if self._open is None:
            return
        (_, file), self._open = self._open, None
        with file:
            file.flush()
            os.fsync(file.fileno())


def write_beside(
    directory: Path,
    model: PreTrainedModel,
    *,
    architecture: str,
    dtype: torch.dtype,
    source: Path,
    is_whole: bool = False,
) -> int:
    """Write ``config.json`` and copy the tokenizer's files; returns the bytes written. With
    ``is_whole`` the config is that of the multimodal model that has ``model`` as its text model.
    """
    config = (
        _of_whole(model.config, dtype, source)
        if is_whole
        else config_of(model, architecture=architecture, dtype=dtype, source=source)
    )
    written_bytes = _write_json(directory / "config.json", config)
    for name in COPIED:
        if (source / name).is_file():
            written_bytes += Path(shutil.copyfile(source / name, directory / name)).stat().st_size
    return written_bytes


def text_config(directory: Path) -> PreTrainedConfig | None:
    """Return the text model's config if the directory has a multimodal model; else None."""
    fields = model_config.read_config(directory / "config.json")
    if fields.pop(model_config.TEXT_OF, None) is None:
        return None
    return AutoConfig.for_model(**fields)


def _of_whole(config: PreTrainedConfig, dtype: torch.dtype, source: Path) -> dict[str, Any]:
    """Return the multimodal model's config, with RoPE and dtype of its text model as trained."""
    whole: dict[str, Any] = json.loads(read_file(source / "config.json", most_bytes=CONFIG_BYTES))
    text, before = whole.get("text_config", whole), text_config(source)
    assert before is not None
    if config.max_position_embeddings != before.max_position_embeddings:
        old = {**(text.get("rope_parameters") or {}), **(text.get("rope_scaling") or {})}
        kept = {name: value for name, value in old.items() if name.startswith("mrope_")}
        text |= _rope({**config.to_dict()["rope_parameters"], **kept})
        text["max_position_embeddings"] = config.max_position_embeddings
    for said in (text, whole):
        said.pop("torch_dtype", None)
        said |= {
            "dtype": str(dtype).removeprefix("torch."),
            "tie_word_embeddings": bool(config.tie_word_embeddings),
        }
    return whole


def config_of(
    model: PreTrainedModel, *, architecture: str, dtype: torch.dtype, source: Path
) -> dict[str, Any]:
    """Return the model's config with RoPE as it was trained, for transformers 4.57 and 5.

    ``architecture``: name of the class that loads the model. Unknown fields are kept.
    """
    theirs: dict[str, Any] = json.loads(read_file(source / "config.json", most_bytes=CONFIG_BYTES))
    config = model.config
    ours: dict[str, Any] = config.to_diff_dict()
    if theirs.get("model_type") != ours["model_type"]:
        theirs = {}
    theirs.pop("torch_dtype", None)  # the older name of dtype
    for said in (theirs, ours):
        said.pop("quantization_config", None)  # the trained and saved weights are dequantised
    # Version 5 writes num_local_experts, for example, where 4.57 reads num_experts.
    ours |= {old: ours[name] for old, name in config.attribute_map.items() if name in ours}
    return {
        **theirs,
        **ours,
        **_rope(config.to_dict().get("rope_parameters")),
        "architectures": [architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "use_cache": theirs.get("use_cache", True),  # turned off only for training
    }


def _rope(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return RoPE's fields for transformers 5, ``rope_parameters``, and 4.57, ``rope_scaling``."""
    if parameters is None or "rope_type" not in parameters:
        return {}  # no RoPE, or one for each kind of layer: 4.57 has other fields for these
    own = ("rope_theta", "partial_rotary_factor")
    top_level = {name: parameters[name] for name in own if name in parameters}
    scaling = {name: value for name, value in parameters.items() if name not in top_level}
    return {
        "rope_parameters": dict(parameters),
        **top_level,
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> int:
    return path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


END = "</s>"
_WORDS = 32768
"""Words of a made tokenizer: enough to reach many experts, in less than 1 MiB."""


def openable_directory(source: Path, cache: Path, scratch: Path, *, seed: int) -> Path:
    """Return the model's own directory if it is complete, else one in ``cache``; if that does not
    exist yet, it is made in ``scratch`` and moved.

    Raises ModelError for incomplete files of a model, and for buffers that cannot be computed.
    """
    missing = missing_files(source)
    if not any(missing):
        return source
    target = cache / prepared_name(source, seed, missing)
    with (cache / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if two trials begin together, only one makes it
        if not target.is_dir():
            made = scratch / target.name
            _make(source, made, seed, missing)
            made.rename(target)
    return target


def _make(source: Path, target: Path, seed: int, missing: MissingFiles) -> None:
    """Make the directory: link the files that the model has, write the missing ones."""
    target.mkdir(parents=True)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    if missing.weights:
        _write_weights(config, source, target, seed)
    else:
        shutil.copyfile(source / "config.json", target / "config.json")
    for path in sorted(source.iterdir()):
        if path.is_file() and not (target / path.name).exists():
            (target / path.name).symlink_to(path.resolve())
    if missing.tokenizer:
        write_tokenizer(target, vocab_size=config.get_text_config().vocab_size)


def write_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Write a tokenizer of words between spaces, ``w1 w2 ...``; its token 0 ends a text.

    Source of the file's form: ``Tokenizer.to_str`` of tokenizers 0.23.3.
    """
    words = [END, *(f"w{number}" for number in range(1, min(vocab_size, _WORDS)))]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": END, "special": True, **plain}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": words[-1],
        },
    }
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (directory / name).write_text(json.dumps(content), encoding="utf-8")


def _write_weights(config: PreTrainedConfig, source: Path, directory: Path, seed: int) -> None:
    """Write random weights, and a config for them."""
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # drawn weights are not quantised
    with torch.device("meta"):
        model = cast(
            PreTrainedModel,
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False),
        )
    buffers = _buffers(model)
    parameters = dict(model.named_parameters())
    every = parameters | buffers
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in every.items()}
    with PretrainedDirectory(directory, model, shapes) as files:
        std = float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)
        for name, value in _values(parameters, std=std, seed=seed):
            files.write(name, value)
        for name, value in buffers.items():
            files.write(name, value)
    kind = type(model).__name__
    write_beside(directory, model, architecture=kind, dtype=torch.bfloat16, source=source)


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's persistent buffers by name, with the values its class computes."""
    saved = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    modules = {name.rpartition(".")[0] for name in saved}
    for place in sorted(modules):
        unknown = fill_buffers(model, model.get_submodule(place), device=torch.device("cpu"))
        lacking = [name for name in unknown if f"{place}.{name}" in saved]
        if lacking:
            raise ModelError(
                f"{model.config.model_type} has the buffer {place}.{lacking[0]}, for which nothing "
                "but its own files has a value",
                hint="name a directory that has the model's weights",
            )
    return {name: model.get_buffer(name) for name in sorted(saved)}


def _values(
    parameters: Mapping[str, nn.Parameter], *, std: float, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every name with random values; as many parameters at once are drawn as cores."""

    def drawn(name: str) -> tuple[str, Tensor]:
        like = parameters[name]
        made = nn.Parameter(torch.empty(like.shape, dtype=like.dtype), requires_grad=False)
        fill_random(name, made, std=std, seed=seed, device=torch.device("cpu"))
        return name, made.detach()

    names, cores = iter(parameters), len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        while together := list(islice(names, cores)):
            yield from pool.map(drawn, together)
