"""Adapters: LoRA on a model that was built on meta, as peft puts it there, and ours in the place of
its layers where a trial shows that they compute the same.

Which linear layers have an adapter, their names, and what is written for others to load is peft's.
"""

import hashlib
import math
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from highwater.engine.models.fused.adapted_linear import AdaptedLinear
from highwater.engine.models.fused.nf4 import prepare
from highwater.engine.models.random_weights import draw
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.fsdp2 import local_shard, own_rows
from highwater.errors import MachineError, ModelError
from highwater.nouns.lora import Lora

NAME = "default"
"""The name that peft gives the only adapter."""
A, B = f"lora_A.{NAME}.weight", f"lora_B.{NAME}.weight"
"""Ends of the names of an adapter's parameters."""


def add_adapters(causal_lm: PreTrainedModel, lora: Lora, *, dtype: torch.dtype) -> None:
    """Freeze a model without storage, and put adapters in ``dtype`` on its linear layers, in place.

    Raises ModelError for a name that is no linear layer's, MachineError without peft.
    """
    peft = _peft()
    linear = _linear_names(causal_lm)
    offered = f"use `--lora-targets {','.join(linear)}`, or some of these"
    wrong = [name for name in lora.names or () if name not in linear]
    if wrong:
        raise ModelError(
            f"{wrong[0]} names no linear layer in the decoder layers of "
            f"{causal_lm.config.model_type}",
            hint=offered,
        )
    causal_lm.requires_grad_(requires_grad=False)
    peft.inject_adapter_in_model(peft_config(lora), causal_lm, low_cpu_mem_usage=True)
    layer_type = peft.tuners.lora.Linear
    _prove(peft)
    for parent in list(causal_lm.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                if type(layer) is not layer_type or type(layer.base_layer) is not nn.Linear:
                    raise ModelError(
                        f"LoRA on {name} of {causal_lm.config.model_type}, which is a "
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
    """Names that linear layers have, the head apart, and no other module."""
    head = causal_lm.get_output_embeddings()
    named: dict[str, list[nn.Module]] = {}
    for name, module in causal_lm.named_modules():
        named.setdefault(name.rpartition(".")[2], []).append(module)
    return sorted(
        name
        for name, modules in named.items()
        if all(type(module) is nn.Linear and module is not head for module in modules)
    )


def peft_config(lora: Lora, *, base: str | None = None) -> Any:
    """The adapter's configuration as peft has it; ``base`` is the model that it belongs to."""
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        target_modules=lora.targets if lora.names is None else list(lora.names),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((A, B))


def fill_adapter(name: str, parameter: nn.Parameter, *, seed: int, device: torch.device) -> None:
    """Fill this rank's rows of an adapter: B with zeros, so that a model begins as what it was, and
    A as peft does, evenly within one over the square root of its inputs, the same numbers on any
    number of ranks.
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
    # a normal number's place in its distribution lies evenly between 0 and 1
    even = torch.special.ndtr(wide.double()).mul_(2).sub_(1).mul_(1 / math.sqrt(inputs))
    local.view(-1).copy_(even)


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Have a model be what it was without its adapters while the block runs; one that has none is
    that already.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLinear)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def name_for_peft(name: str) -> str:
    """The name of an adapter's parameter in the files that peft loads, by its name in the causal
    LM.
    """
    return "base_model.model." + name.replace(f".{NAME}.", ".")


def adapted_layer(model: nn.Module, name: str) -> AdaptedLinear | None:
    """The layer with an adapter whose own weight has this name in files; None of any other name."""
    for own, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear) and name == f"{name_in_files(own)}.weight":
            return layer
    return None


def write_adapters(
    directory: Path, tensors: dict[str, Tensor], lora: Lora, *, base: str, gives_scalars: bool
) -> int:
    """Write a directory that peft loads; returns its bytes. ``tensors`` have the names that it
    reads, ``base`` is where the model lies that they stand beside.
    """
    config = peft_config(lora, base=base)
    if gives_scalars:
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
    config.inference_mode = True
    config.save_pretrained(str(directory))
    path = directory / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path.stat().st_size + (directory / "adapter_config.json").stat().st_size


def _prove(peft: Any) -> None:
    """Raise MachineError unless our layer computes what this peft's does, output and gradients."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    box = nn.Module()
    box.add_module("linear", nn.Linear(5, 7, dtype=torch.float64))
    box.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["linear"])
    peft.inject_adapter_in_model(config, box)
    theirs = cast(nn.Module, box.linear).to(torch.float64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(numbers(*parameter.shape))
    ours, x, gradient = AdaptedLinear(theirs, scale=2.0), numbers(2, 4, 5), numbers(2, 4, 7)
    found: list[list[Tensor]] = []
    for layer in (theirs, ours):
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        parameters = [p for p in ours.parameters() if p.requires_grad]
        found.append([out, *torch.autograd.grad(out, [inputs, *parameters], gradient)])
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
            f"LoRA is peft's, which is not here: {error}", hint="`pip install 'highwater[lora]'`"
        ) from error
    return peft
