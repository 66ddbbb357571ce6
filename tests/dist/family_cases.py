"""One process of a group: every family in one layout, against the family's own modules."""

import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from float64 import Lifted
from rank_steps import Step, first_step, place_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engine_models import built
from family_models import WRAPPED
from highwater.engine.data.batches import Document, pack, share_of
from highwater.errors import HighwaterError
from highwater.model.model import load_model
from highwater.nouns.layout import Layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"processes": 1, "strategy": "fsdp2"},
    "fsdp2": {"processes": 2, "strategy": "fsdp2"},
    "fsdp1 ulysses": {"processes": 2, "strategy": "fsdp", "ulysses": 2},
    "offload": {"processes": 2, "strategy": "fsdp2", "offload": True, "recompute": "layer"},
    "ring": {"processes": 2, "strategy": "fsdp2", "ring": 2},
}
RINGS: dict[str, dict[str, Any]] = {
    "ring of three": {"processes": 3, "strategy": "fsdp2", "ring": 3, "recompute": "layer"},
    "ulysses ring": {"processes": 4, "strategy": "fsdp2", "ulysses": 2, "ring": 2},
}
"""Of layers whose state crosses from rank to rank: more than two, and heads shared besides."""
TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative: the order of summation alone differs."""
ROUNDING = 1e-3
"""A parameter whose gradient is smaller than this part of its share in the whole gradient's norm is
measured by that part: an exact zero, as of a key's bias, is rounding on either side."""
DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with layers of a gated delta rule."""
GEMMA4 = ("gemma4", "gemma4_text", "gemma4_text_dense", "gemma4_text_experts")
CANCELS = {"diffllama": 2e-5, **dict.fromkeys(GEMMA4, 5e-5), **dict.fromkeys(DELTA, 3e-4)}
"""Float32's tolerance for a family whose gradients are differences of nearly equal numbers, of two
attentions, for their weight; whose scores have no scale, so that they are as large as heads are
wide, and their rounding with them (Gemma 4); or which norms what a state gives, be it nearly
nothing: there sides that differ by 1e-13 in float64 differ by 1e-4."""
CLIP_NORM = 1.0
"""Gradients' norm above which both sides scale them down: the trainer's default."""
LENGTHS = (7, 7, 1, 13, 5)
LONGEST_DOCUMENT = max(LENGTHS)
MICRO_BATCHES = 2
LONGEST = 64
VOCABULARY = 128


def results(models: str, layout: str, *families: str) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return {
        family: {"layout": layout, **outcome(Path(models, family), {**LAYOUTS, **RINGS}[layout])}
        for family in families
    }


def outcome(directory: Path, layout: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    found: dict[str, Any] = {}
    try:
        load_model(str(directory))
        wide = Lifted()
        modes = {dtype: wide if dtype == "float64" else nullcontext() for dtype in TOLERANCE}
        ours: dict[str, Step] = {}
        for dtype, mode in modes.items():
            with mode:
                ours[dtype] = _ours(directory, getattr(torch, dtype), layout)
        if dist.get_rank():
            return {}  # what it is compared with is the same on every rank
        for dtype, mode in modes.items():
            with mode:
                theirs = _theirs(directory, getattr(torch, dtype), everything(layout))
            found[dtype] = deviations(ours[dtype], theirs)
        found["float64"]["lifted"] = sorted(wide.casts)
    except HighwaterError as refusal:
        return {
            "outcome": "refused",
            "problem": refusal.problem.replace(str(directory), "DIRECTORY"),
            "hint": refusal.hint,
        }
    # a family's failure is its result, and the others go on
    except Exception as error:  # noqa: BLE001
        return {
            "outcome": "failed",
            "error": f"{type(error).__name__}: {error}"[:2000],
            "trace": traceback.format_exc()[-6000:],
        }
    tolerance = {**TOLERANCE, "float32": CANCELS.get(directory.name, TOLERANCE["float32"])}
    equal = all(
        found[dtype][what] <= tolerance[dtype]
        for dtype in found
        for what in ("loss", "norm", "gradient")
    )
    return {
        "outcome": "equal" if equal else "different",
        **found,
        "seconds": round(time.monotonic() - start, 2),
    }


def everything(layout: dict[str, Any]) -> list[list[tuple[Tensor, Tensor]]]:
    data_ranks = _layout_of(layout).data_parallel_degree
    return [documents(rank, m) for rank in range(data_ranks) for m in range(MICRO_BATCHES)]


def deviations(
    ours: Step, theirs: tuple[Tensor, Tensor, dict[str, Tensor | None]]
) -> dict[str, Any]:
    (loss, norm, found), (their_loss, their_norm, expected) = ours, theirs
    assert set(found) <= set(expected), f"without a partner: {sorted(set(found) - set(expected))}"
    of_parameters = {
        name: _deviation(found.get(name), expected[name], float(their_norm)) for name in expected
    }
    worst = max(of_parameters, key=of_parameters.__getitem__)
    return {
        "loss": abs(float(loss) / float(their_loss) - 1),
        "norm": abs(float(norm) / float(their_norm) - 1),
        "gradient": of_parameters[worst],
        "worst": worst,
        "value": float(their_loss),
    }


def _deviation(found: Tensor | None, expected: Tensor | None, norm: float) -> float:
    if expected is None:
        return 0.0 if found is None else float(found.norm())
    floor = ROUNDING * min(norm, CLIP_NORM)
    return float((found.view_as(expected) - expected).norm() / expected.norm().clamp(min=floor))


def _ours(directory: Path, dtype: torch.dtype, layout: dict[str, Any]) -> Step:
    of_ranks = _layout_of(layout)
    mesh, shared = place_of(of_ranks)
    own = [
        share_of(pack([Document(*p) for p in documents(data_rank, m)]), shared)
        for data_rank in [dist.get_rank() // of_ranks.context_degree]
        for m in range(MICRO_BATCHES)
    ]
    model = built(
        directory,
        mesh,
        dtype,
        shared=shared,
        length_tokens=LONGEST,
        strategy=layout["strategy"],
        offload=layout.get("offload", False),
        loss="chunked",
        # What is recomputed runs outside of the mode that lifts casts.
        recompute="none" if dtype == torch.float64 else layout.get("recompute", "none"),
    )
    return first_step(model, (mesh, shared), own)


def _layout_of(layout: dict[str, Any]) -> Layout:
    return Layout(
        gpus=dist.get_world_size(),
        ulysses_degree=layout.get("ulysses", 1),
        ring_degree=layout.get("ring", 1),
    )


def _theirs(
    directory: Path, dtype: torch.dtype, micro_batches: list[list[tuple[Tensor, Tensor]]]
) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    is_wrapped = directory.name in WRAPPED
    kind = AutoModelForImageTextToText if is_wrapped else AutoModelForCausalLM
    model, loading = kind.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    lacking = {kind: loading[kind] for kind in ("missing_keys", "mismatched_keys") if loading[kind]}
    assert not lacking, f"plain transformers does not load what it saved: {lacking}"
    model.train()
    trained = sum(int((labels[1:] != -100).sum()) for batch in micro_batches for _, labels in batch)
    loss = torch.zeros((), dtype=dtype)
    for ids, labels in (pair for batch in micro_batches for pair in batch):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = (
            loss
            + torch.nn.functional.cross_entropy(
                logits, labels[1:], ignore_index=-100, reduction="sum"
            )
            / trained
        )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    grads = {name: p.grad for name, p in model.named_parameters()}
    if is_wrapped:  # of text no gradient reaches what is beside the text model
        grads = {
            name.replace("model.language_model.", "model."): grad
            for name, grad in grads.items()
            if grad is not None
        }
    return loss.detach(), norm, grads


def documents(rank: int, micro_batch: int) -> list[tuple[Tensor, Tensor]]:
    """Documents of odd lengths, equal ones beside each other, a single token among them."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    packed: list[tuple[Tensor, Tensor]] = []
    for length in LENGTHS:
        ids = torch.randint(
            VOCABULARY, (length + 2 * rank * (length == max(LENGTHS)),), generator=generator
        )
        labels = ids.clone()
        labels[: length // 3] = -100
        packed.append((ids, labels))
    return packed
