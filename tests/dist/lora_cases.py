"""One process of a group: LoRA against peft on the family's own class, one document at a time."""

import json
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import peft
import rank_steps
import torch
import torch.distributed as dist
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from float64 import Lifted
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine_models import built
from highwater.engine.models.adapters import is_adapter, name_for_peft
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.fsdp2 import local_shard, own_rows
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora
from tables import deep
from tiny_models import SIZES

OF_TEXT = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {"tie_word_embeddings": True},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # fused projections
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    },
    "olmo2": {},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gemma4_text": {  # layers without keys of their own, and a projection outside of them all
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "global_head_dim": 16,
        "sliding_window": 64,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "enable_moe_block": False,
    },
    "gemma4_text_experts": {  # without v_proj where values are keys, and a router that is linear
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "global_head_dim": 16,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
WITHOUT_RING = ("gemma3_text", "gemma4_text_experts")
DELTA_TOO = ("qwen3_5_text", json.dumps({"ring_degree": 2}))
"""Trained in every run: what adapters of linear attention read crosses ranks."""
IN_EVERY_LAYOUT = ("gemma4_text",)
"""An adapter outside of all layers is of the unit of embedding and head."""
LENGTHS = ((13, 1, 7, 7), (21, 5))
LORAS = {
    "all": Lora(rank=3, alpha=6),
    "some": Lora(rank=5, alpha=4, targets="v_proj,down_proj"),
    "mixtral": Lora(rank=4, alpha=6, targets="q_proj,w1,w2,w3"),
    "qwen3_moe": Lora(rank=4, alpha=6, targets="q_proj,gate_proj,up_proj,down_proj"),
    "packed": Lora(rank=3, alpha=6, base="nf4"),
    "packed, some": Lora(rank=5, alpha=4, targets="v_proj,down_proj", base="nf4"),
}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"offload": True}],
    2: [{}, {"ulysses_degree": 2}, {"ring_degree": 2}, {"offload": True}],
    4: [{"ulysses_degree": 2}, {"replicate_degree": 2}],
}
PACKED_LAYOUTS = {n: [each for each in of if "offload" not in each] for n, of in LAYOUTS.items()}
PACKED_LAYOUTS[2] += [{"replicate_degree": 2}, {"replicate_degree": 2, "ulysses_degree": 2}]

NOT_OF_PHI3 = (("some", "phi3"), ("packed, some", "phi3"))
RECOMPUTED, RECOMPUTES = ("llama", "phi3"), ("layer", "all-but-attention")
PACKED_WAYS = (("float64", "none"), ("float64", "layer"), *product(("float32",), RECOMPUTES))


@dataclass(frozen=True, kw_only=True)
class Case(rank_steps.Fields):
    family: str
    lora: str
    recompute: str
    loss: str
    layout: str
    dtype: str

    @property
    def of_ranks(self) -> dict[str, Any]:
        return json.loads(self.layout)


def cases_for(processes: int) -> list[Case]:
    """Every family alone, its adapters everywhere and once more in one other way, and in each other
    layout some in turn, in float64; each way to recompute in float32. `make test-all` has every
    family in every one of these.
    """
    layouts = [json.dumps(layout) for layout in LAYOUTS[processes]]
    alone = layouts[0] if processes == 1 else None
    wanted: list[tuple[str, str, str, str, str]] = []
    for place, layout in enumerate(layouts):
        for number, family in enumerate(FAMILIES):
            ways = [
                lora for lora in LORAS if lora not in MIXTURES and (lora, family) not in NOT_OF_PHI3
            ]
            if layout != alone:
                is_due = number % 4 == place % 4 or (family, layout) == DELTA_TOO
                is_due |= family in IN_EVERY_LAYOUT
                ways = ["all"] if is_due or deep(family) else []
            elif not deep(family):
                ways = ["all", ways[1 + number % (len(ways) - 1)]]
            wanted += ((family, lora, "none", layout, "float64") for lora in ways)
        for number, (family, recompute) in enumerate(product(RECOMPUTED, RECOMPUTES)):
            if layout == alone or number % 4 == place % 4 or deep(layout):
                wanted.append((family, "all", recompute, layout, "float32"))
        for number, family in enumerate(MIXTURES):
            if layout == alone or number == place % 2 or deep(layout):
                wanted.append((family, family, "none", layout, "float64"))
            if layout == alone:  # what is recomputed runs outside of the mode that lifts casts
                wanted.append((family, family, "layer", layout, "float32"))
    for place, layout in enumerate(map(json.dumps, PACKED_LAYOUTS[processes])):
        wanted += ((family, "packed", "none", layout, "float64") for family in IN_EVERY_LAYOUT)
        for number, family in enumerate(RECOMPUTED):
            for other, (dtype, recompute) in enumerate(PACKED_WAYS):
                if (place + number + other) % 2 == 0 or deep(layout):
                    wanted.append((family, "packed", recompute, layout, dtype))
    return [
        Case(
            family=family,
            lora=lora,
            recompute=recompute,
            loss=("full", "chunked")[[*FAMILIES, *MIXTURES].index(family) % 2],
            layout=layout,
            dtype=dtype,
        )
        for family, lora, recompute, layout, dtype in dict.fromkeys(wanted)
        if not (json.loads(layout).get("ring_degree") and family in WITHOUT_RING)
    ]


def save_models(folder: Path) -> None:
    for family, own in {**FAMILIES, **MIXTURES}.items():
        torch.manual_seed(0)
        fields = {"model_type": family, **SIZES, **OF_TEXT, **own}
        config = transformers.AutoConfig.for_model(**fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(folder / family)


def results(folder: str) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return rank_steps.each(
        cases_for(dist.get_world_size()), lambda case: run(case, Path(folder, case.family))
    )


def run(case: Case, directory: Path) -> dict[str, float | str]:
    dtype = getattr(torch, case.dtype)
    of_ranks = dict(case.of_ranks)
    offload = of_ranks.pop("offload", False)
    layout = Layout(gpus=dist.get_world_size(), **of_ranks)
    rounded = tuple(nf4_of(directory).items()) if LORAS[case.lora].base == "nf4" else ()
    return rank_steps.deviations(
        ours(case, directory, dtype, layout, offload=offload),
        lambda: theirs(directory, dtype, case.lora, layout.data_parallel_degree, rounded),
    )


def ours(
    case: Case, directory: Path, dtype: torch.dtype, layout: Layout, *, offload: bool
) -> rank_steps.Step:
    mesh, shared = rank_steps.place_of(layout)
    model = built(
        directory,
        mesh,
        dtype,
        shared=shared,
        loss=case.loss,
        recompute=case.recompute,
        offload=offload,
        lora=LORAS[case.lora],
    )
    fill_adapters(model, lambda name: name_for_peft(name_in_files(name)))
    own = rank_steps.micro_batches(LENGTHS, layout, shared)
    # Not around the building of a model, which makes most calls of PyTorch and computes nothing.
    with Lifted() if dtype == torch.float64 else nullcontext():
        loss, norm, found = rank_steps.first_step(
            model, (mesh, shared), own, copies=layout.replicate_degree
        )
    frozen = [
        name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None
    ]
    assert not frozen, f"frozen, with a gradient: {frozen}"
    return loss, norm, {name_for_peft(name): gradient for name, gradient in found.items()}


def fill_adapters(model: nn.Module, name_of: Callable[[str], str]) -> None:
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            start, stop = own_rows(parameter)
            values = adapter_values(name_of(name), tuple(parameter.shape))
            local_shard(parameter).detach().copy_(values[start:stop])


def adapter_values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of an adapter's matrix, which its name decides; B's are not zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)


@cache
def theirs(
    directory: Path,
    dtype: torch.dtype,
    lora: str,
    data_ranks: int,
    rounded: tuple[tuple[str, Tensor], ...],
) -> rank_steps.Step:
    base = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    chosen = LORAS[lora]
    for name, weight in rounded:
        base.get_parameter(name).data.copy_(weight)
    config = peft.LoraConfig(
        r=chosen.rank,
        lora_alpha=int(chosen.alpha),
        target_modules=chosen.targets if chosen.names is None else list(chosen.names),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config).to(dtype).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {name.replace(".default.", "."): name for name in trained}
    with torch.no_grad():
        for name, of in names.items():
            trained[of].copy_(adapter_values(name, tuple(trained[of].shape)))
    with Lifted() if dtype == torch.float64 else nullcontext():
        loss, norm, found = rank_steps.plain_step(model, LENGTHS, data_ranks)
    return loss, norm, {name: found[of] for name, of in names.items() if of in found}


@cache
def nf4_of(directory: Path) -> dict[str, Tensor]:
    """By name what bitsandbytes makes of the weight of every linear layer but the head."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found: dict[str, Tensor] = {}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            weight = linear.weight.detach()
            codes, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
            found[f"{name}.weight"] = dequantize_4bit(codes, state)
            assert not torch.equal(found[f"{name}.weight"], weight)
    return found
