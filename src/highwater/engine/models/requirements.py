"""Requirements: check that the engine can train a model's family, in milliseconds, before any
training; the errors name what is missing.

The engine applies the head itself, to the trained tokens, in chunks. That would train another model
if a family transforms the hidden states before its head (ModernBERT's decoder), or changes the
logits after it other than by scaling and capping (Granite, Cohere, Gemma 2). So the family's own
forward pass runs around a backbone that returns random hidden states, and row kernels for scaled
and capped logits are compared with PyTorch in float64. A refusal names the config's logit fields.

Shapes:  N rows  V vocabulary
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from highwater.engine.kernels import rows as row_kernels
from highwater.engine.kernels.rows import transformed
from highwater.engine.models.fused.delta_net import GatedDeltaNet
from highwater.engine.models.fused.fused import PROOF_TOLERANCE
from highwater.errors import MachineError, ModelError
from highwater.model.families import PLAIN, LogitTransform
from highwater.model.model_config import ATTENTION_LAYERS, DELTA_LAYER


def refuse_shared_parameters(causal_lm: PreTrainedModel) -> None:
    """Raise ModelError for a shared parameter that is no tied embedding: FSDP trains each alone."""
    first: dict[nn.Parameter, str] = {}
    head = cast(nn.Linear, causal_lm.get_output_embeddings()).weight
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        if parameter in first and parameter is not head:
            raise ModelError(
                f"{causal_lm.config.model_type} has one parameter as {first[parameter]} and as "
                f"{name}, which is not supported",
                hint="use a family whose layers share nothing, for example Qwen3 or Llama",
            )
        first.setdefault(parameter, name)


def refuse_other_mixing(causal_lm: PreTrainedModel) -> None:
    """Raise ModelError for layers that mix tokens by anything but an attention we can replace."""
    config = causal_lm.config
    ours = [module for module in causal_lm.modules() if isinstance(module, GatedDeltaNet)]
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    kinds -= {DELTA_LAYER} if ours else set()
    if kinds:
        raise not_by_attention(config, f"it has layers of {', '.join(sorted(kinds))}")
    inside = {part for module in ours for part in module.modules()}
    others = (module for module in causal_lm.modules() if module not in inside)
    convolves = any(isinstance(module, nn.Conv1d) for module in others)
    # The class may be stateful because of layers that this config does not have.
    names_layers = getattr(config, "layer_types", None)
    if (getattr(causal_lm, "_is_stateful", False) and not names_layers) or convolves:
        why = "its layers carry a state or a convolution along the sequence"
        raise not_by_attention(config, why)
    # Classes with a delta rule do not declare support; the forward pass checks every layer's call.
    if not ours and not getattr(causal_lm, "_supports_attention_backend", False):
        raise not_by_attention(config, "it does not take one from outside")


def not_by_attention(config: PreTrainedConfig, why: str) -> ModelError:
    """Return the error for a model that mixes tokens by something other than our attention."""
    return ModelError(
        f"{config.model_type} cannot be trained with the attention that keeps packed sequences "
        f"apart: {why}",
        hint="use a family of full attention in every layer, for example Qwen3, Llama or Qwen3-MoE",
    )


_PROVEN_ROWS, _VOCABULARY = 3, 4097
"""Sizes of the proof: a row is two blocks of the kernels, the second with a single logit."""
_REACH = 1.5
"""Largest logit of the proof, in multiples of the cap, which bends some and flattens few."""
_TOLERANCE = 1e-4
"""Norm-relative error of float32 against float64; a kernel without the transform is far worse."""


def prove_rows(transform: LogitTransform, device: torch.device) -> None:
    """Raise MachineError unless the row kernels on ``device`` agree with PyTorch in float64."""
    generator = torch.Generator().manual_seed(0)
    reach = 4.0 if transform.soft_cap is None else _REACH * transform.soft_cap
    logits_NV = torch.randn(_PROVEN_ROWS, _VOCABULARY, generator=generator)
    logits_NV *= reach / transform.scale / float(logits_NV.abs().max())
    labels_N = torch.randint(_VOCABULARY, (_PROVEN_ROWS,), generator=generator)
    upstream_2N = torch.randn(2, _PROVEN_ROWS, generator=generator)
    found = _both_passes(logits_NV.to(device), labels_N, upstream_2N, transform)
    expected = _both_passes(logits_NV.double(), labels_N, upstream_2N, transform)
    for ours, exact in zip(found, expected, strict=True):
        difference = float((ours.cpu().double() - exact).norm() / exact.norm())
        if not difference <= _TOLERANCE:
            raise MachineError(
                f"the row kernels of {device} differ from PyTorch by {difference:.1e} of what they "
                f"compute, with {transform}",
                hint="install the Triton that your PyTorch came with: `highwater doctor` says "
                "what is there",
            )


def _both_passes(
    logits_NV: Tensor, labels_N: Tensor, upstream_2N: Tensor, transform: LogitTransform
) -> tuple[Tensor, ...]:
    """Return the statistics of logits, and their gradient, written over a copy of the logits."""
    labels_N, upstream_2N = labels_N.to(logits_NV.device), upstream_2N.to(logits_NV)
    logits_NV = logits_NV.clone()
    of = row_kernels.statistics(logits_NV, labels_N, transform)
    row_kernels.backward_(logits_NV, labels_N, of, upstream_2N[0], upstream_2N[1], transform)
    return (*of, logits_NV)


_ROWS, _TOKENS = 5, 3

_STRANGE = (
    *(AttributeError, IndexError, KeyError, TypeError, ValueError),
    *(NotImplementedError, RuntimeError),
)
"""Errors that a forward pass may raise if it needs more from its backbone than hidden states."""


def prove_head(causal_lm: PreTrainedModel, transform: LogitTransform = PLAIN) -> None:
    """Raise ModelError unless a family's logits are ``transform`` of its head's product.

    The model may be on meta.
    """
    head: Any = causal_lm.get_output_embeddings()
    prefix = causal_lm.base_model_prefix
    if prefix not in dict(causal_lm.named_children()) or not isinstance(head, nn.Linear):
        raise _refusal(causal_lm, f"it is not a backbone called {prefix} and a head")
    generator = torch.Generator().manual_seed(0)
    hidden_1TE = torch.randn(1, _TOKENS, head.in_features, generator=generator)
    backbone = _Answering(hidden_1TE)
    family, small = _around(causal_lm, backbone, head)
    ids = torch.arange(_TOKENS)[None]
    with torch.no_grad():
        expected = transformed(small(hidden_1TE), transform)
        call = {"input_ids": ids, "position_ids": ids.clone(), "use_cache": False}
        try:
            logits: Tensor = cast(Any, family)(**call).logits
        except _STRANGE as error:
            why = f"its forward pass cannot be followed ({type(error).__name__})"
            raise _refusal(causal_lm, why) from error
    if len(backbone.heard) != 1 or backbone.heard[0] is not ids:
        raise _refusal(causal_lm, "its backbone is given something else than the tokens")
    if backbone.is_entered and not _hands_on(causal_lm, backbone):
        raise _refusal(causal_lm, "its backbone is not what its head is applied to")
    off = PROOF_TOLERANCE
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=off, atol=off):
        between = [name for name, _ in causal_lm.named_children() if name != prefix]
        config = vars(causal_lm.config)
        names = [name for name in config if name.startswith(("logit", "final_logit"))]
        values = ", ".join(f"{name} = {config[name]}" for name in names if config[name])
        said = f"; its config has {values}" if values else ""
        what = "its logits are not its head's product with the last hidden states"
        raise _refusal(causal_lm, f"{what} (beside its backbone: {', '.join(between)}){said}")


class _Answering(nn.Module):
    """Stand-in for backbone and decoder: records its inputs, and returns a fixed output."""

    def __init__(self, hidden_1TE: Tensor) -> None:
        super().__init__()
        self.hidden_1TE = hidden_1TE
        self.heard: list[Tensor | None] = []
        self.is_entered = False

    @property
    def decoder(self) -> nn.Module:
        """Module that some families call instead of the backbone (OPT)."""
        self.is_entered = True
        return self

    def forward(self, input_ids: Tensor | None = None, **_: Any) -> BaseModelOutputWithPast:
        """Return the fixed hidden states, whatever the tokens are."""
        self.heard.append(input_ids)
        return _HeadOutput(last_hidden_state=cast(Any, self.hidden_1TE))


class _HeadOutput(BaseModelOutputWithPast):
    """Model output in which every further field that a family reads is None."""

    def __getattr__(self, _: str) -> None:
        return None


def _hands_on(causal_lm: PreTrainedModel, decoder: _Answering) -> bool:
    """True if the family's backbone returns its decoder's output unchanged."""
    backbone: Any = copy.copy(causal_lm.get_submodule(causal_lm.base_model_prefix))
    backbone._modules = {**backbone._modules, "decoder": decoder}
    ids = torch.arange(_TOKENS)[None]
    output = backbone(input_ids=ids, position_ids=ids, use_cache=False)
    return output.last_hidden_state is decoder.hidden_1TE


def _around(
    causal_lm: PreTrainedModel, backbone: nn.Module, whole: nn.Linear
) -> tuple[nn.Module, nn.Linear]:
    """Return a random copy of the family's outer module around ``backbone``, and its small head."""
    name = next(name for name, module in causal_lm.named_modules() if module is whole)
    has_bias = "bias" in dict(whole.named_parameters())
    small = nn.Linear(whole.in_features, _ROWS, bias=has_bias, device="meta")
    family = copy.copy(causal_lm)
    loose: Any = family
    for kind in ("_modules", "_parameters", "_buffers"):
        setattr(loose, kind, dict(getattr(causal_lm, kind)))
    loose._modules[causal_lm.base_model_prefix] = None
    # Wherever a module refers to the head, its copy refers to the small one.
    loose._modules = {
        child: copy.deepcopy(module, {id(whole): small}) for child, module in loose._modules.items()
    }
    for part in (family, *family.children()):
        part.to_empty(device="cpu", recurse=part is not family)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*family.parameters(), *family.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator)
    loose._modules[causal_lm.base_model_prefix] = backbone
    head = cast(nn.Linear, family.get_submodule(name))
    assert head.out_features == _ROWS
    return family.eval(), head


def _refusal(causal_lm: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"{causal_lm.config.model_type} cannot be trained: {why}",
        hint="use a family whose head alone makes the logits, for example Qwen3 or Llama",
    )
