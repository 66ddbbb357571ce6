"""Saved weights: each rank reads only its own rows of every parameter.

This reads the tensors that transformers would load, or refuses the files. Every parameter must be
in the files, whole and of the config's shape, and no tensor may be left over, except those that the
family's class ignores: a bias that the config does not enable, or layers past its number, would
make it another model. transformers' own table (``conversion_mapping.py``) tells which prefixes are
renamed, and which experts one tensor joins; here a tensor of one expert is called
``experts.3.gate_proj.weight``, ``up_proj`` or ``down_proj``, whatever the file calls it.

Shapes, of MXFP4:  X experts  I inputs  O outputs  G groups of 32 elements  B 16 bytes of two
                   elements each
"""

import pickle
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from highwater.engine.activations.recompute import PREFIX as RECOMPUTE_PREFIX
from highwater.engine.parallel.fsdp1 import PREFIX as FSDP1_PREFIX
from highwater.engine.parallel.fsdp2 import local_shard, own_rows
from highwater.errors import ModelError
from highwater.model.model_config import TEXT_OF, read_config
from highwater.model.weight_files import (
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    refuse_quantised_tensors,
    weight_files,
)
from highwater.nouns.objective import BASE_PREFIX

_TOWER = re.compile(
    r"(model\.)?(visual|(vision|audio)_tower|embed_(vision|audio)|multi_modal_projector)\..*"
)
"""Names of a multimodal model's tensors outside its text model, which are not loaded."""
_TEXT = re.compile(r"^(model\.language_model|language_model\.model)\.|^language_model\.(?=lm_head)")
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_BELONG_TOGETHER = "use weights that belong to the config beside them"
_MXFP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_VALUES = (*_MXFP4_POSITIVE, *(-value for value in _MXFP4_POSITIVE))
"""Value of each 4-bit code. Source: OCP Microscaling Formats 1.0, table of E2M1."""
_MXFP4_BIAS = 127
"""Subtracted from a scale's byte to get its exponent of 2."""
_COMPARED_ROWS = 4096
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, OSError),
    *(RuntimeError, ValueError, LookupError, AttributeError),
)
"""Errors that torch.load raises for a damaged file, or one with more than tensors."""


class SavedWeights:
    """Open weight files of a directory: tensors by name, read from disk on demand."""

    def __init__(
        self, directory: str, where: Mapping[str, Any], written: Mapping[str, str] | None = None
    ) -> None:
        """``where``: open file of each tensor; ``written``: names in the files, if they differ."""
        self.directory = directory
        self._where = where
        self._written = {name: name for name in where} if written is None else written
        self.tower: Mapping[str, Any] = {}
        """Open files of a multimodal model's tensors beside its text model, by their names."""

    def has(self, name: str) -> bool:
        """True if the files hold a tensor of this name."""
        return name in self._where

    def has_same(self, name: str, other: str) -> bool:
        """True if two tensors have the same values."""
        one, two = self._slice(name), self._slice(other)
        if _shape(one) != _shape(two):
            return False
        # By rows, so that neither tensor is whole in memory.
        starts = range(0, _shape(one)[0], _COMPARED_ROWS)
        rows = (slice(start, start + _COMPARED_ROWS) for start in starts)
        return all(torch.equal(one[each], two[each]) for each in rows)

    def renamed(self, names: Mapping[str, str]) -> "SavedWeights":
        """Return the same tensors under other names; ModelError if two would have the same name."""
        first: dict[str, str] = {}
        for name in self._where:
            other = first.setdefault(names[name], name)
            if other != name:
                raise ModelError(
                    f"the weights in {self.directory} hold {names[name]} twice, as {other} and as "
                    f"{name}",
                    hint="remove one of them: save the model with transformers' save_pretrained, "
                    "and give that directory",
                )
        where = {names[name]: file for name, file in self._where.items()}
        written = {names[name]: self._written[name] for name in self._where}
        return SavedWeights(self.directory, where, written)

    def of_text(self) -> "SavedWeights":
        """Return the tensors of a multimodal model's text model, named as in a model of its own."""
        own = {name: file for name, file in self._where.items() if not _TOWER.fullmatch(name)}
        names = {name: _TEXT.sub(lambda each: "model." if each[1] else "", name) for name in own}
        found = SavedWeights(self.directory, own).renamed(names)
        found.tower = {name: file for name, file in self._where.items() if name not in own}
        return found

    def written(self, name: str) -> str:
        """Return a tensor's name in the files; ``name`` itself if they do not have the tensor."""
        return self._written.get(name, name)

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors in the files."""
        return self._where.keys()

    def check(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        *,
        others: Collection[str],
        ignored: Collection[str],
    ) -> None:
        """Raise ModelError unless the files hold exactly these parameters, in their shapes.

        They may also hold ``buffers``, in their shapes, ``others``, and names like ``ignored``.
        """
        expected = set(others)
        for name, parameter in parameters.items():
            expected.update(self._names(name, tuple(parameter.shape)))
        for name, buffer in buffers.items():
            if name in self._where:
                self._check_shape(name, tuple(buffer.shape))
        more = sorted(self._where.keys() - expected)
        left = [name for name in more if not any(re.search(p, name) for p in ignored)]
        if left:
            listed = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise ModelError(
                f"the weights in {self.directory} hold what the config has no place for: {listed}",
                hint="use the config.json that belongs to them; where these are biases, it has "
                "attention_bias or mlp_bias",
            )

    def fill(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        """Fill this rank's shards of the parameters, and those buffers that the files hold.

        Parameters that are not sharded are filled whole.
        """
        for name, parameter in parameters.items():
            start, stop = own_rows(parameter)
            if start < stop:
                local_shard(parameter).detach().copy_(self._read(name, start, stop))
        for name, buffer in buffers.items():
            if name in self._where:
                buffer.copy_(self._tensor(name))

    def _names(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return the names of a parameter's tensors; ModelError if one is missing or misshapen."""
        blocks, scales = name + MXFP4_BLOCKS, name + MXFP4_SCALES
        fused = _FUSED_EXPERTS.fullmatch(name)
        if name in self._where:
            self._check_shape(name, shape)
            return [name]
        if blocks in self._where and len(shape) == 3:
            experts, inputs, outputs = shape
            self._check_shape(blocks, (experts, outputs, inputs // 32, 16))
            self._check_shape(scales, (experts, outputs, inputs // 32))
            return [blocks, scales]
        if fused is None:
            raise self._lack(name)
        rows = shape[1] // 2 if fused[2] == "gate_up_proj" else shape[1]
        names = [each for expert in range(shape[0]) for each in _expert_names(fused, expert)]
        for each in names:
            self._check_shape(each, (rows, shape[2]))
        return names

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._where:
            return self._slice(name)[start:stop]
        if name + MXFP4_BLOCKS in self._where:
            parts = [self._slice(name + kind) for kind in (MXFP4_BLOCKS, MXFP4_SCALES)]
            rows = range(start, stop)
            return torch.cat([dequantised(*(part[n : n + 1] for part in parts)) for n in rows])
        fused = cast(re.Match[str], _FUSED_EXPERTS.fullmatch(name))
        # One row of a fused parameter is one expert, whose matrices are separate in the files.
        experts = [_expert_names(fused, expert) for expert in range(start, stop)]
        return torch.stack([torch.cat([*map(self._tensor, names)]) for names in experts])

    def _tensor(self, name: str) -> Tensor:
        return self._where[name].get_tensor(self._written[name])

    def _slice(self, name: str) -> Any:
        """Return the tensor as a safetensors slice, which reads only the rows that are indexed."""
        return self._where[name].get_slice(self._written[name])

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self._where:
            raise self._lack(name)
        found = _shape(self._slice(name))
        if found != expected:
            raise ModelError(
                f"{name} in {self.directory} is of shape {found}, the config asks for {expected}",
                hint=_BELONG_TOGETHER,
            )

    def _lack(self, name: str) -> ModelError:
        return ModelError(f"the weights in {self.directory} lack {name}", hint=_BELONG_TOGETHER)


class _Unpickled(dict[str, Tensor]):
    """Tensors of a memory-mapped file in PyTorch's format, with methods of a safetensors file."""

    get_tensor = get_slice = dict[str, Tensor].__getitem__


@contextmanager
def opened(directory: str) -> Generator[SavedWeights | None, None, None]:
    """Context manager: open the weights in a directory; None if it has none."""
    files = weight_files(Path(directory))
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            if file.suffix == ".safetensors":
                handle = stack.enter_context(safe_open(file, framework="pt"))
            else:
                handle = _unpickled(file)
            twice = sorted(where.keys() & set(handle.keys()))
            if twice:
                raise ModelError(
                    f"two of the weight files in {directory} hold {twice[0]}",
                    hint="remove the file that is left from another save",
                )
            where |= dict.fromkeys(handle.keys(), handle)
        saved = SavedWeights(directory, where) if files else None
        config = Path(directory, "config.json")  # without one, weights are not a multimodal model's
        is_wrapped = saved and config.is_file() and TEXT_OF in read_config(config)
        yield saved.of_text() if saved and is_wrapped else saved


def dequantised(blocks_XOGB: Tensor, scales_XOG: Tensor) -> Tensor:
    """Return the bfloat16 weights (X, I, O) of MXFP4 tensors.

    Inputs come first, like the experts of gpt-oss in transformers' memory.
    """
    values = torch.tensor(_MXFP4_VALUES, dtype=torch.bfloat16)
    # The low four bits of a byte are the first of its two numbers.
    low, high = values[(blocks_XOGB & 15).int()], values[(blocks_XOGB >> 4).int()]
    pairs = torch.stack((low, high), dim=-1)
    numbers = torch.ldexp(pairs.flatten(-2), scales_XOG.int()[..., None] - _MXFP4_BIAS)
    return numbers.flatten(-2).transpose(1, 2)


def _expert_names(fused: re.Match[str], expert: int) -> list[str]:
    return [f"{fused[1]}.{expert}.{part}.weight" for part in _PARTS[fused[2]]]


def _shape(part: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice as safetensors gives it."""
    return tuple(part.shape if isinstance(part, Tensor) else part.get_shape())


def _unpickled(file: Path) -> _Unpickled:
    """Read a file in PyTorch's own format; ModelError if it contains anything but tensors."""
    try:
        tensors: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except _UNREADABLE as error:
        raise ModelError(
            f"{file} cannot be read as tensors alone: {str(error).partition(chr(10))[0]}",
            hint="load the model with transformers and save it with save_pretrained, which writes "
            "safetensors",
        ) from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(t, Tensor) for t in cast(Mapping[str, Any], tensors).values()
    ):
        raise ModelError(
            f"{file} holds more than tensors by name", hint="use the model's weights alone"
        )
    narrow = {torch.int8: "I8", torch.uint8: "U8"}
    named = cast(Mapping[str, Tensor], tensors)
    dtypes = {
        name: "F8" if "float8" in str(t.dtype) else narrow.get(t.dtype, "")
        for name, t in named.items()
    }
    refuse_quantised_tensors(dtypes, file.parent)
    return _Unpickled(named)


_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def names_in_model(causal_lm: PreTrainedModel, saved: Iterable[str]) -> dict[str, str]:
    """Map every saved tensor's name to its parameter's name in the model, to a name of one expert
    if the model joins experts, or to itself if the model has no such tensor.

    Raises ModelError for tensors that the family combines in an unknown way.
    """
    transforms = get_model_conversion_mapping(causal_lm)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    own = causal_lm.state_dict()
    prefix = causal_lm.base_model_prefix
    names: dict[str, str] = {}
    for name in saved:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own and name in own:
            names[name] = name
        elif renamed in own and pattern is not None:
            names[name] = _of_one_expert(causal_lm, name, renamed, by_pattern[pattern], pattern)
        else:
            names[name] = renamed if renamed in own else name
    return names


def _of_one_expert(
    causal_lm: PreTrainedModel, name: str, target: str, converter: WeightConverter, pattern: str
) -> str:
    experts, _, fused = target.rpartition(".")
    kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    number, parts = _EXPERT.search(name), _PARTS.get(fused, ())
    is_known = kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    if not is_known or number is None or len(parts) != len(converter.source_patterns):
        raise ModelError(
            f"{causal_lm.config.model_type} makes {target} of {name} and others in its files in a "
            f"way that is not supported",
            hint="save the model with transformers' `save_pretrained(..., "
            "save_original_format=False)`, and use that directory",
        )
    return f"{experts}.{number[1]}.{parts[converter.source_patterns.index(pattern)]}.weight"


def name_in_files(name: str) -> str:
    """Return a parameter's name in Hugging Face's files, from its name in our model."""
    for added in (RECOMPUTE_PREFIX, FSDP1_PREFIX):
        name = name.replace(added, "")
    # where one adapter is around another, peft's files have this part of the name
    name = re.sub(rf"{re.escape(BASE_PREFIX)}(?!lora_)", "", name)
    return name.removeprefix("causal_lm.")
