"""Adapters: LoRA on a model that was built on meta. peft adds them to its layers; our own layers
replace peft's, after a small proof has shown that they compute the same.

peft decides which linear layers have an adapter, their names, and the files for others to load.
"""

import hashlib
import math
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from highwater.engine.models.fused.adapted_linear import AdaptedLinear
from highwater.engine.models.fused.experts import AdaptedExperts
from highwater.engine.models.fused.fused import small_experts
from highwater.engine.models.fused.nf4 import prepare
from highwater.engine.models.random_weights import draw
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.fsdp2 import local_shard, own_rows
from highwater.errors import MachineError, ModelError
from highwater.nouns.objective import EXPERT_MATRICES, Lora, expert_targets

NAME = "default"
"""Name that peft gives to a model's only adapter."""
_WITHIN = "model.language_model."
"""Prefix of the names that a text model's modules have in its multimodal model."""
A, B = f"lora_A.{NAME}.weight", f"lora_B.{NAME}.weight"
"""Suffixes of the names of an adapter's two parameters."""


def add_adapters(causal_lm: PreTrainedModel, lora: Lora, *, dtype: torch.dtype) -> None:
    """Freeze a model on meta, and add adapters of ``dtype`` to its linear layers, in place.

    Raises ModelError for a target that is no linear layer, MachineError without peft.
    """
    peft = _peft()
    linear, family = _linear_names(causal_lm), causal_lm.config.model_type
    offered = f"use `--lora-targets {','.join(linear)}`, or some of these"
    of_experts = EXPERT_MATRICES.get(family, ())
    wrong = [name for name in lora.names or () if name not in (*linear, *of_experts)]
    if wrong:
        raise ModelError(
            f"{wrong[0]} names no linear layer in the decoder layers of {family}", hint=offered
        )
    causal_lm.requires_grad_(requires_grad=False)
    peft.inject_adapter_in_model(peft_config(lora, family), causal_lm, low_cpu_mem_usage=True)
    layer_type = peft.tuners.lora.Linear
    _prove(peft)
    if expert_targets(family, lora):
        experts = next(m for m in causal_lm.modules() if hasattr(m, "gate_up_proj"))
        if not hasattr(experts, "tiles"):
            raise ModelError(f"LoRA on experts of {family} whose gate is another", hint=offered)
        _prove_experts(peft, experts, family)
    for parent in list(causal_lm.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, peft.tuners.lora.layer.ParamWrapper) and of_experts:
                setattr(parent, name, AdaptedExperts(layer, scale=lora.scale))
            elif isinstance(layer, peft.tuners.lora.LoraLayer):
                if type(layer) is not layer_type or type(layer.base_layer) is not nn.Linear:
                    raise ModelError(
                        f"LoRA on {name} of {family}, which is a "
                        f"{type(layer.base_layer).__name__} and no linear layer",
                        hint=offered,
                    )
                setattr(parent, name, AdaptedLinear(layer, scale=lora.scale))
    for name, parameter in causal_lm.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(is_adapter(name))
    if lora.base == "nf4":
        prepare(causal_lm, causal_lm.get_output_embeddings())


def _linear_names(causal_lm: PreTrainedModel) -> list[str]:
    """Return the last parts of names that only linear layers have, except the head, sorted."""
    head = causal_lm.get_output_embeddings()
    named: dict[str, list[nn.Module]] = {}
    for name, module in causal_lm.named_modules():
        named.setdefault(name.rpartition(".")[2], []).append(module)
    return sorted(
        name
        for name, modules in named.items()
        if all(type(module) is nn.Linear and module is not head for module in modules)
    )


def peft_config(lora: Lora, family: str, *, base: str | None = None) -> Any:
    """Return peft's configuration of an adapter; ``base`` is the model that it was trained on."""
    ranks, of_experts = expert_targets(family, lora), EXPERT_MATRICES.get(family, ())
    names = None if lora.names is None else [n for n in lora.names if n not in of_experts]
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        target_modules=lora.targets if names is None else names,
        target_parameters=[f"experts.{name}" for name in ranks] or None,
        rank_pattern={rf".*\.{name}": rank for name, rank in ranks.items()},
        alpha_pattern={rf".*\.{name}": rank * lora.scale for name, rank in ranks.items()},
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def is_adapter(name: str) -> bool:
    """True if this is the name of an adapter's parameter."""
    return name.endswith((A, B))


def fill_adapter(name: str, parameter: nn.Parameter, *, seed: int, device: torch.device) -> None:
    """Fill this rank's rows of an adapter's matrix, with the same values on any number of ranks: B
    with zeros, so that the model begins unchanged; A evenly in +-1 / sqrt(inputs), like peft.
    """
    local = local_shard(parameter.detach())
    if name.endswith(B):
        local.zero_()
        return
    inputs, (first_row, _) = parameter.shape[1], own_rows(parameter)
    stream = hashlib.sha256(f"{seed} {name}".encode()).hexdigest()
    place = {"first": first_row * inputs, "total": parameter.numel()}
    wide = torch.empty(local.numel(), dtype=torch.float32, device=local.device)
    draw(wide, **place, stream=stream, std=1.0, device=device)
    # the cumulative probability of a normal number is evenly distributed between 0 and 1
    even = torch.special.ndtr(wide.double()).mul_(2).sub_(1).mul_(1 / math.sqrt(inputs))
    local.view(-1).copy_(even)


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Context manager: turn off a model's adapters, if it has any, while the block runs."""
    kinds = (AdaptedLinear, AdaptedExperts)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def name_for_peft(name: str, *, is_of_text: bool = False) -> str:
    """Return the name in peft's files of an adapter's parameter, from its name in the causal LM.

    ``is_of_text``: peft adds the adapters to a multimodal model, whose text model this is.
    """
    name = name.replace(f".{NAME}.", ".")
    return "base_model.model." + (name.replace("model.", _WITHIN, 1) if is_of_text else name)


def adapted_layer(model: nn.Module, name: str) -> AdaptedLinear | None:
    """Return the adapted layer whose weight has this name in files; None if there is none."""
    for own, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear) and name == f"{name_in_files(own)}.weight":
            return layer
    return None


def write_adapters(
    directory: Path,
    tensors: dict[str, Tensor],
    lora: Lora,
    *,
    family: str,
    base: str,
    gives_scalars: bool,
) -> int:
    """Write a directory that peft loads; returns its bytes. ``tensors`` have the names that peft
    reads, ``base`` is the directory of the model that the adapters were trained on.
    """
    config = peft_config(lora, family, base=base)
    if any(
        f".{_WITHIN}" in name for name in tensors
    ):  # peft must adapt only the text model: a tower has layers of the same names
        layers = "|".join(sorted({name.split(".")[-3] for name in tensors}))
        config.target_modules = rf"{re.escape(_WITHIN)}(.*\.)?({layers})"
    if gives_scalars:
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
    config.inference_mode = True
    config.save_pretrained(str(directory))
    path = directory / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path.stat().st_size + (directory / "adapter_config.json").stat().st_size


def _prove(peft: Any) -> None:
    """Raise MachineError unless our layer computes the same as peft's: output and gradients."""
    box = nn.Module()
    box.add_module("linear", nn.Linear(5, 7, dtype=torch.float64))
    box.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["linear"])
    peft.inject_adapter_in_model(config, box)
    theirs = cast(nn.Module, box.linear).to(torch.float64)
    numbers = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _compare(peft, theirs, lambda: AdaptedLinear(theirs, scale=2.0), (numbers,))


def _prove_experts(peft: Any, experts: Any, family: str) -> None:
    """Raise MachineError unless adapters on experts compute the same as peft's."""
    small, call = small_experts(experts)
    box = nn.Module()
    box.add_module("experts", small)
    lora = Lora(rank=3, alpha=6, targets=",".join(EXPERT_MATRICES[family]))
    peft.inject_adapter_in_model(peft_config(lora, family), box)
    theirs = cast(nn.Module, box.experts).to(torch.float64)
    _compare(peft, theirs, lambda: AdaptedExperts(theirs, scale=2.0), call)


def _compare(
    peft: Any, theirs: nn.Module, ours: Callable[[], nn.Module], call: tuple[Tensor, ...]
) -> None:
    """Raise MachineError unless peft's layer and ours, made from its children, give equal outputs
    and gradients for the arguments ``call``.
    """
    generator = torch.Generator().manual_seed(1)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    found: list[list[Tensor]] = []
    for layer in (lambda: theirs, ours):
        inputs = call[0].clone().requires_grad_()
        out = layer()(inputs, *call[1:])
        found.append([out, *torch.autograd.grad(out.square().sum(), [inputs, *trained])])
    if not all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True)):
        raise MachineError(
            f"LoRA of peft {peft.__version__} computes something else than ours",
            hint="`pip install 'peft<0.22'`",
        )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MachineError(
            f"LoRA is peft's, which is not here: {error}", hint="`pip install peft`"
        ) from error
    return peft
