"""Peers: how others train the same model, set up as their users do."""

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.objective import Lora


class HuggingFacePeer:
    """Plain Hugging Face: bfloat16 parameters, SDPA, per-layer recompute, full logits.

    Master weights and moments are float32.
    """

    def __init__(
        self, directory: str, *, trains: bool = True, packed: bool = False, offload: bool = False
    ) -> None:
        """``offload``: what recomputed layers keep is in host memory, by transformers' flag."""
        self.model: Any = _load(directory, packed=packed).train()
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}, offload=offload
        )
        if not trains:  # what is trained is somebody else's
            return
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=Hyperparameters().learning_rate, fused=True
        )

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        """Train one step over (token ids, labels) of one sequence each; returns the mean loss."""
        total = self.backward(micro_batches)
        nn.utils.clip_grad_norm_(self.parameters, Hyperparameters().max_grad_norm)
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
        return total

    def backward(self, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        """Add the gradients of all micro-batches; returns the mean loss."""
        total = torch.zeros((), device="cuda")
        for ids_T, labels_T in micro_batches:
            ids, labels = ids_T[None].cuda(), labels_T[None].cuda()
            of_one = self.model(input_ids=ids, labels=labels, use_cache=False).loss
            loss = of_one / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return float(total)


class LigerPeer(HuggingFacePeer):
    """Hugging Face with all of Liger's kernels for the family.

    They are rotary embedding, RMS norm, SwiGLU, and a loss without logits. Liger puts some of its
    kernels into the family's module, where every model of the process finds them. Here they are
    there during this peer's own work alone, so that nobody else is timed with them.
    """

    def __init__(
        self, directory: str, *, trains: bool = True, packed: bool = False, offload: bool = False
    ) -> None:
        super().__init__(directory, trains=trains, packed=packed, offload=offload)
        self._module = sys.modules[type(self.model).__module__]
        family = self._module.__name__.split(".")[-2]  # a text model's is its whole class's
        with _attributes_restored(self._module):
            liger = importlib.import_module("liger_kernel.transformers")
            getattr(liger, f"apply_liger_kernel_to_{family}")(model=self.model)
            self._patched = dict(vars(self._module))

    def backward(self, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        """Go forward and backward with Liger's kernels in the family's module."""
        with _attributes_restored(self._module):
            vars(self._module).update(self._patched)
            return super().backward(micro_batches)


class LoraPeer:
    """peft's LoRA on all linear layers, of Hugging Face with Liger's kernels: a frozen model in
    bfloat16, or its linear layers in bitsandbytes' NF4; adapters and their moments in float32,
    autocast, per-layer recompute.
    """

    def __init__(self, directory: str, lora: Lora, *, offload: bool = False) -> None:
        base = LigerPeer(directory, trains=False, packed=lora.base == "nf4", offload=offload)
        peft: Any = importlib.import_module("peft")
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha),
            target_modules=lora.targets,
            task_type="CAUSAL_LM",
        )
        self._base = base
        base.model = peft.get_peft_model(base.model, config).train()
        base.parameters = [p for p in base.model.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in base.parameters), "peft makes them wide"
        self.optimizer = torch.optim.AdamW(
            base.parameters, lr=Hyperparameters().learning_rate, fused=True
        )

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        """Train one optimizer step of the adapters."""
        with torch.autocast("cuda", torch.bfloat16):
            total = self._base.backward(micro_batches)
        nn.utils.clip_grad_norm_(self._base.parameters, Hyperparameters().max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


@contextmanager
def _attributes_restored(module: ModuleType) -> Generator[None]:
    """Put everything that was in the module back after the block."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def _load(directory: str, *, packed: bool) -> Any:
    """The model on the GPU in bfloat16, with the directory's weights if it has any, else random;
    its linear layers ``packed`` by bitsandbytes.
    """
    kind = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if any(Path(directory).glob("*.safetensors")):
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, device_map="cuda", **kind
        )
    else:
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, **kind)
    if packed:
        _pack(model)
    return model


def _pack(model: Any) -> None:
    """Put bitsandbytes' layers in the place of all linear ones but the head, as transformers does
    with ``load_in_4bit``, in NF4 with scales in 8 bits.
    """
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    head = model.get_output_embeddings()
    how = {"compress_statistics": True, "quant_type": "nf4"}
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and linear is not head:
                has_bias = "bias" in dict(linear.named_parameters())
                packed = bitsandbytes.nn.Linear4bit(
                    *(linear.in_features, linear.out_features, has_bias),
                    **(how | {"compute_dtype": torch.bfloat16, "device": "meta"}),
                )
                packed.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.detach(), requires_grad=False, module=packed, **how
                ).to("cuda")
                packed.bias = linear.bias
                setattr(parent, name, packed)
    model.is_loaded_in_4bit = True
    torch.cuda.empty_cache()
