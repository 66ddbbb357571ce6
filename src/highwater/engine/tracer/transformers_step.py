"""Hugging Face's step: the step of transformers' Trainer on one GPU, without the Trainer.
accelerate, Axolotl, LLaMA-Factory and ms-swift train by the same step.

The model is transformers' own class with SDPA, its layers checkpointed by its flag, with or without
the flag's ``offload``. The loss is transformers', in float32 over logits of all tokens, or Liger's,
together with Liger's other kernels. If everything is trained, parameters are in float32 under
autocast, whose casts of weights live until it is left. With LoRA, peft's layers on a frozen model
are in bfloat16 and adapters in float32. accelerate makes a float32 copy of the model's output. The
optimizer is PyTorch's fused AdamW; gradients are dropped after each step.

Sources: modeling_utils.py and loss_utils.py of transformers 5.23, operations.py of accelerate 1.15,
liger-kernel 0.8.5. docs/results/other_trainers compares with what an H200 reserved.
"""

import importlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, PreTrainedConfig

from highwater.engine.data.batches import Batch
from highwater.engine.models.adapters import peft_config
from highwater.engine.models.build import read_config
from highwater.engine.models.fused import nf4
from highwater.engine.tracer import kernel_stubs
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.engine.tracer.highwater_step import TracedTrainer
from highwater.engine.training.rank_context import RankContext
from highwater.errors import MachineError
from highwater.nouns.objective import Lora
from highwater.nouns.settings import Settings
from highwater.nouns.trial import OnPhase, TrialSpec

_LIGER = "liger_kernel.transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTraining:
    """Hugging Face's model and optimizer as they are traced, and the micro-batch's size."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sequences: int
    length_tokens: int
    host: None = None
    """No host memory: the formula counts it, and a trace has only the GPU's."""

    def step(self, micro_batches: Sequence[Batch], enter: OnPhase) -> None:
        """Run one step on as many micro-batches; their token ids do not matter."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        for _ in micro_batches:
            enter("forward")
            loss = self._loss() / len(micro_batches)
            enter("backward")
            loss.backward()
        enter("optimizer")
        nn.utils.clip_grad_norm_(trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self) -> Tensor:
        ids = torch.zeros(self.sequences, self.length_tokens, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            found = self.model(input_ids=ids, labels=ids.clone(), use_cache=False)
        logits = found.logits
        wide = None if logits is None else logits.float()
        del wide, logits
        return found.loss


def begin(
    spec: TrialSpec,
    context: RankContext,
    rehearsal: Batch,  # noqa: ARG001 -- it rehearses nothing
    recorder: AllocationRecorder,
) -> HuggingFaceTraining:
    """Build the model and its optimizer; MachineError if a library of the step is missing."""
    assert context.mesh.size() == 1, "nobody asks for several GPUs"
    config = read_config(
        spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope
    )
    model = _on_meta(config, spec.settings)
    table = nf4.scale_table(context.device) if spec.settings.lora_base == "nf4" else None
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                on_gpu = torch.empty_like(parameter, device="cuda")
                module._parameters[name] = nn.Parameter(on_gpu, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cuda")
        if table is not None and isinstance(module, nf4.Nf4Linear):
            module.pack(table)
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    recorder.follow(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    return HuggingFaceTraining(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=1e-4, fused=True),
        sequences=spec.settings.sequences_per_micro_batch,
        length_tokens=spec.length_tokens,
    )


def _on_meta(config: PreTrainedConfig, settings: Settings) -> Any:
    adapters, is_liger = settings.adapters, settings.loss == "chunked"
    is_narrow = adapters is not None or settings.parameters == "bf16"
    if is_liger:
        kernel_stubs.put_triton()
    with unset_fake_temporarily(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if is_narrow else torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=False,
        )
        if adapters is not None:
            _adapt(model, adapters)
    model.train()
    if settings.recompute != "none":
        model.activation_checkpointing_enable(offload=settings.activations == "host")
    if is_liger:
        _put_liger(model, config.model_type, settings)
    return model


def _adapt(model: Any, lora: Lora) -> None:
    """Add LoRA adapters to a frozen model. In NF4 bitsandbytes' layers allocate as ours do, and
    peft's layers beside them copy no input.
    """
    peft = importlib.import_module("peft")
    model.requires_grad_(requires_grad=False)
    if lora.base == "nf4":
        nf4.prepare(model, model.get_output_embeddings())
    peft.inject_adapter_in_model(
        peft_config(lora, model.config.model_type), model, low_cpu_mem_usage=True
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    for module in model.modules() if lora.base == "nf4" else ():
        if isinstance(module, peft.tuners.lora.Linear):
            module.__class__ = peft.tuners.lora.Linear4bit


def _put_liger(model: Any, family: str, settings: Settings) -> None:
    """Apply Liger's kernels, or only its loss, to a model, as ``use_liger_kernel`` does."""
    put: Any = None
    with suppress(ImportError):
        put = getattr(importlib.import_module(_LIGER), f"apply_liger_kernel_to_{family}", None)
    if put is None:
        raise MachineError(
            f"no kernels of Liger for {family} are installed here",
            hint="pip install --no-deps liger-kernel==0.8.5, or leave `--exact` out",
        )
    others = ("rope", "rms_norm", "swiglu")
    put(model=model, **dict.fromkeys(others, settings.liger == "all"))


TRACED = TracedTrainer(
    begin=begin,
    step=HuggingFaceTraining.step,
    needs_peft=True,  # Liger imports it
)
