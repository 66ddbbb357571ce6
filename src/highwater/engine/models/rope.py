"""RoPE past the native length: YaRN, or the model's own scaling up to its maximum. Also
frequencies that depend on a document's length: ``longrope`` has two sets, ``dynamic`` grows them.
transformers uses the largest position as the length, which in a packed row or a rank's share is no
document's length: here each document has the frequencies of its own length.

Shapes:  T packed tokens of this rank  F frequencies, half the channels that are rotated
Source: Ding et al., LongRoPE, https://arxiv.org/abs/2402.13753; transformers'
        ``modeling_rope_utils.py``
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from highwater.engine.parallel.sequence_layout import Part
from highwater.errors import ModelError
from highwater.model.rope import grows, kept_parameters, yarn_parameters
from highwater.nouns.settings import Rope


def scale_rope(config: PreTrainedConfig, *, length_tokens: int, rope: Rope) -> None:
    """Set the config's RoPE for a length, in place; nothing changes up to the native length.

    YaRN's factor is length / native length; for a model with its own scaling and ``rope="yarn"``,
    the native length is the one that its scaling started from. Scaling that grows with the length
    (``dynamic``) has no maximum. Lengths past a maximum are refused where a trial is planned.
    """
    native = config.max_position_embeddings
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    own_scaling = parameters.get("rope_type", "default") != "default"
    if length_tokens <= native and not (own_scaling and rope == "yarn"):
        return
    assert "rope_type" in parameters, f"{config.model_type} has no one RoPE to scale"
    if own_scaling and rope == "auto":
        assert grows(parameters), f"the model's own scaling goes up to {native} tokens"
        return
    if own_scaling:
        native = parameters.get("original_max_position_embeddings", native)
    if length_tokens <= native:
        return
    config.rope_parameters = {
        **kept_parameters(parameters),
        **yarn_parameters(length_tokens / native, native_length_tokens=native),
    }
    config.max_position_embeddings = length_tokens


_TOLD = "told by document"
"""Kind of RoPE that a module claims to have while a document's frequencies are set in it:
transformers does not change the frequencies of a kind that it does not know."""


class DocumentRope(nn.Module):
    """Wrapper of a family's rotary module that gives each document the RoPE of its own length."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.theirs = theirs
        self.config = theirs.config
        """Config of the wrapped module, which some families read (granite_swa)."""
        self.parts: Sequence[Part] = ()
        """This rank's parts of documents, in order; the model sets them for every forward pass."""
        module: Any = theirs
        self.kinds: dict[str | None, str] = (
            module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        )
        """Kinds of RoPE by layer type; under None if all layers have the same kind."""
        told = {
            layer_type: _TOLD if depends_on_length(kind) else kind
            for layer_type, kind in self.kinds.items()
        }
        self.told: str | dict[str | None, str] = told.get(None, told)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Compute cosines and sines as the family's module does, for one type of layers."""
        tokens = sum(part.tokens for part in self.parts)
        assert tokens == position_ids.shape[-1], "every token is of a document"
        call = {"x": x, "position_ids": position_ids}
        call |= {} if layer_type is None else {"layer_type": layer_type}
        if not depends_on_length(self.kinds[layer_type]):
            return self.theirs(**call)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        theirs: Any = self.theirs
        original, kinds = cast(Tensor, getattr(theirs, name)), theirs.rope_type
        theirs.rope_type = self.told
        found: list[Any] = []
        first = 0
        try:
            for length, parts in groupby(self.parts, partial(self._telling, layer_type)):
                stop = first + sum(part.tokens for part in parts)
                setattr(theirs, name, self._of_length(length, original, layer_type, x.device))
                found.append(theirs(**call | {"position_ids": position_ids[:, first:stop]}))
                first = stop
        finally:  # the next pass must not see these frequencies
            setattr(theirs, name, original)
            theirs.rope_type = kinds
        if len(found) == 1:
            return found[0]
        return tuple(torch.cat(each, dim=1) for each in zip(*found, strict=True))

    def _telling(self, layer_type: str | None, part: Part) -> int | None:
        """Return a length in tokens with this document's frequencies; None: the unscaled ones."""
        config: Any = self.theirs.config
        tokens = part.document_tokens
        if self.kinds[layer_type] != "longrope":
            return tokens if tokens > config.max_position_embeddings else None
        parameters: dict[str, Any] = config.rope_parameters
        own = parameters if layer_type is None else parameters[layer_type]
        border: int = own["original_max_position_embeddings"]
        return border + 1 if tokens > border else None

    def _of_length(
        self, tokens: int | None, original_F: Tensor, layer_type: str | None, device: torch.device
    ) -> Tensor:
        if tokens is None:
            return original_F.to(device)
        compute: Any = ROPE_INIT_FUNCTIONS[self.kinds[layer_type]]
        # For ``dynamic`` a tensor, as in transformers: float32 powers differ slightly from those
        # of a Python float.
        is_dynamic = "dynamic" in self.kinds[layer_type]
        length = torch.tensor(tokens, device=device) if is_dynamic else tokens
        config: Any = self.theirs.config
        if getattr(config, "is_heterogeneous", False):  # heads of each kind of layer differ
            config = config.per_layer_config[layer_type]
        return compute(config, device, seq_len=length, layer_type=layer_type)[0]


class PhimoeRope(DocumentRope):
    """Phimoe's rotary module, whose cosines and sines have a scale that depends on the length.

    Its frequencies do not depend on it: all documents have those of short ones.
    """

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all tokens, each scaled for its document."""
        assert layer_type is None
        frequencies_F = cast(Tensor, self.theirs.inv_freq).to(x.device)
        with torch.no_grad():
            angles = position_ids[..., None].float() * frequencies_F
            angles = torch.cat((angles, angles), dim=-1)
            scale = self._scale(x.device)
            return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    def _scale(self, device: torch.device) -> Tensor | float:
        parameters: dict[str, Any] = cast(Any, self.theirs.config).rope_parameters
        border = parameters["original_max_position_embeddings"]
        scales = [
            parameters["long_mscale" if part.document_tokens > border else "short_mscale"]
            for part in self.parts
        ]
        if len(set(scales)) == 1:
            return scales[0]
        ones = torch.ones(1, 1, device=device)
        return torch.cat(
            [(ones * n).expand(part.tokens, -1) for n, part in zip(scales, self.parts, strict=True)]
        )


def follow_documents(causal_lm: PreTrainedModel) -> list[DocumentRope]:
    """Wrap every rotary module that depends on the length in a DocumentRope, in place; return them.

    Raises ModelError if the config has such RoPE and no module has a ``rope_type``.
    """
    rotaries = [
        (parent, name, m)
        for parent in list(causal_lm.modules())
        for name, m in parent.named_children()
        if _kinds(m)
    ]
    if not rotaries and any(depends_on_length(kind) for kind in _kinds_in(causal_lm.config)):
        raise ModelError(
            f"{causal_lm.config.model_type} has no module that shows its "
            f"{', '.join(_kinds_in(causal_lm.config))} RoPE, "
            "and each document needs that of its own length",
            hint="use a family with plain RoPE, for example Qwen3 or Llama",
        )
    placed: list[DocumentRope] = []
    for parent, name, rotary in rotaries:
        if any(depends_on_length(kind) for kind in _kinds(rotary)):
            is_phimoe = type(rotary).__name__ == "PhimoeRotaryEmbedding"
            placed.append((PhimoeRope if is_phimoe else DocumentRope)(rotary))
            setattr(parent, name, placed[-1])
    return placed


def depends_on_length(kind: str) -> bool:
    """True if frequencies of this ``rope_type`` depend on the length of the sequence."""
    return kind == "longrope" or "dynamic" in kind


def _kinds(module: nn.Module) -> tuple[str, ...]:
    """Return the kinds of RoPE that a rotary module names; empty for any other module."""
    said = getattr(module, "rope_type", None)
    if isinstance(said, str):
        return (said,)
    return tuple(cast(dict[str, str], said).values()) if isinstance(said, dict) else ()


def _kinds_in(config: PreTrainedConfig) -> tuple[str, ...]:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    blocks = [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]
    return tuple(str(block["rope_type"]) for block in blocks if "rope_type" in block)
