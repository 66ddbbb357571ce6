"""Fill: initialise a model that was built on the meta device, from its directory's files or from
the seed, by each parameter's name in files. Buffers (RoPE's frequencies, the scale of an embedding,
the correction of a router) are computed by the family's own ``_init_weights``, which skips
parameters marked as initialised.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from highwater.engine.models import weights
from highwater.engine.models.adapters import fill_adapter, is_adapter
from highwater.engine.models.decoder import Decoder, ScalarModel
from highwater.engine.models.random_weights import fill_random
from highwater.engine.models.weights import name_in_files
from highwater.errors import ModelError
from highwater.model.weight_files import SCORE

_MARK = "_is_hf_initialized"


@torch.no_grad()
def fill_buffers(
    causal_lm: PreTrainedModel, module: nn.Module, *, device: torch.device
) -> Sequence[str]:
    """Compute a module's own buffers on ``device``; return the names of those left unfilled.

    Buffers are on ``device`` even if the parameters are on the host.
    """
    names = [name for name, _ in module.named_buffers(recurse=False)]
    if not names:
        return ()
    for name in names:
        setattr(module, name, torch.empty_like(cast(Tensor, getattr(module, name)), device=device))
    versions = {name: _version(module, name) for name in names}
    parameters: list[Any] = list(module.parameters(recurse=False))
    for parameter in parameters:
        setattr(parameter, _MARK, True)
    try:
        # Private, but every family's own class overrides it.
        causal_lm._init_weights(module)  # pyright: ignore[reportPrivateUsage]
    finally:
        for parameter in parameters:
            delattr(parameter, _MARK)
    unfilled = [name for name in names if _version(module, name) == versions[name]]
    return [name for name in unfilled if not _fill_with_its_scalar(module, name)]


def _fill_with_its_scalar(module: nn.Module, name: str) -> bool:
    """Fill a buffer of one element from the module's float of the same name; False without one.

    Source: ``XIELUActivation`` of transformers, the activation of Apertus.
    """
    value = getattr(module, f"_{name}_scalar", None)
    buffer = cast(Tensor, getattr(module, name))
    if buffer.ndim or not isinstance(value, float):
        return False
    buffer.fill_(value)
    return True


def _version(module: nn.Module, name: str) -> tuple[int, int]:
    """Return a value that changes when a buffer is written to or replaced."""
    buffer = cast(Tensor, getattr(module, name))
    return id(buffer), buffer._version


_LEFT_IN_FILES = (r"rotary_emb\.inv_freq$",)
"""Patterns of tensors in old files that are computed from the config instead."""


class Fill:
    """Initialises a model that was built on meta, by each parameter's name in files."""

    def __init__(
        self, model: Decoder, saved: weights.SavedWeights | None, *, device: torch.device, seed: int
    ) -> None:
        self.model, self.saved, self.device, self.seed = model, saved, device, seed
        # Read before anything is wrapped, which changes names, or gets storage, which separates
        # shared parameters.
        self.names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._missing = {name_in_files(name) for name, _ in model.named_parameters()}
        self._embedding = cast(nn.Embedding, model.causal_lm.get_input_embeddings())
        self._is_tied = model.head.weight is self._embedding.weight
        self._other_names = {} if saved is None else _other_names(model, saved)
        if saved is not None:
            model.weights = "saved"
            _check_files(model, saved, self._other_names)

    def one_unit(self, unit: nn.Module) -> None:
        """Allocate and fill a unit's modules that are on meta; call this for inner units first."""
        own = {m: (*m.parameters(recurse=False), *m.buffers(recurse=False)) for m in unit.modules()}
        fresh = [module for module, tensors in own.items() if any(t.is_meta for t in tensors)]
        for module in fresh:
            module.to_empty(device=self.device, recurse=False)
        self._fill(fresh)

    def values(self, model: nn.Module) -> None:
        """Fill all parameters and buffers of a model, which must be allocated."""
        self._fill(list(model.modules()))

    def finish(self) -> None:
        """Check that every parameter has been filled."""
        assert not self._missing, f"never filled: {sorted(self._missing)}"

    def _fill(self, modules: Sequence[nn.Module]) -> None:
        self._fill_buffers(modules)
        if self._is_tied and self.model.head in modules:
            self.model.head.weight = self._embedding.weight
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for module in modules:
            prefix = name_in_files(self.names[module])
            parameters |= {prefix + name: p for name, p in module.named_parameters(recurse=False)}
            buffers |= {prefix + name: b for name, b in _saved_buffers(module)}
        # a parameter that two modules share is filled under its first name
        last = {p: name for name, p in reversed(parameters.items())}
        fresh = {name: p for p, name in last.items()}
        strange = sorted(fresh.keys() - self._missing)
        assert not strange, f"filled twice, or new: {strange}"
        self._missing -= fresh.keys()
        if self.saved is not None:
            saved = {name: p for name, p in fresh.items() if _is_in(self.saved, name)}
            self.saved.fill(
                {self._other_names.get(name, name): p for name, p in saved.items()}, buffers
            )
            fresh = {name: p for name, p in fresh.items() if name not in saved}
        std = getattr(self.model.causal_lm.config, "initializer_range", 0.02)
        for name, parameter in fresh.items():
            if is_adapter(name):
                fill_adapter(name, parameter, seed=self.seed, device=self.device)
            else:
                fill_random(name, parameter, std=std, seed=self.seed, device=self.device)

    def _fill_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Compute buffers; ModelError for a buffer that neither the class nor the files provide."""
        for module in modules:
            unknown = fill_buffers(self.model.causal_lm, module, device=self.device)
            names = [name_in_files(self.names[module]) + name for name in unknown]
            lacking = [name for name in names if self.saved is None or not self.saved.has(name)]
            if lacking:
                raise ModelError(
                    f"{type(module).__name__} has the buffer {lacking[0]}, which neither its "
                    f"class nor any file gives a value",
                    hint="use another family, for example Qwen3 or Llama",
                )


def _is_in(saved: weights.SavedWeights, name: str) -> bool:
    """True for a parameter to read from the files: no adapter, and no score head they lack."""
    return not is_adapter(name) and (name != SCORE or saved.has(SCORE))


def _saved_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's persistent buffers, the only ones that transformers reads from files."""
    # state_dict itself uses this set
    left_out = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    return [each for each in module.named_buffers(recurse=False) if each[0] not in left_out]


def _check_files(
    model: Decoder, saved: weights.SavedWeights, other_names: Mapping[str, str]
) -> None:
    """Raise ModelError unless the files have exactly this model's tensors."""
    names = {name_in_files(name): p for name, p in model.named_parameters()}
    parameters = {
        other_names.get(name, name): p for name, p in names.items() if _is_in(saved, name)
    }
    others = {
        name_in_files(name)
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }
    if isinstance(model, ScalarModel):
        others |= {f"{model.replaced_head}.{name}" for name in ("weight", "bias")}
    left: Any = getattr(model.causal_lm, "_keys_to_ignore_on_load_unexpected", None) or ()
    parts = ((name_in_files(name), module) for name, module in model.named_modules())
    buffers = {
        f"{name}.{own}": buffer for name, module in parts for own, buffer in _saved_buffers(module)
    }
    saved.check(parameters, buffers, others=others, ignored={*_LEFT_IN_FILES, *left})


def _other_names(model: Decoder, saved: weights.SavedWeights) -> dict[str, str]:
    """Map the embedding's name to the head's if files have a tied weight only under the latter."""
    tied = [
        name_in_files(name)
        for name, p in model.named_parameters(remove_duplicate=False)
        if p is model.head.weight
    ]
    if len(tied) == 1:
        return {}
    embedding, head = tied
    if saved.has(embedding) and saved.has(head) and not saved.has_same(embedding, head):
        raise ModelError(
            f"config.json in {saved.directory} ties {head} to {embedding}, and the files hold "
            f"different values for them",
            hint="set tie_word_embeddings to false in config.json",
        )
    return {embedding: head} if saved.has(head) and not saved.has(embedding) else {}
