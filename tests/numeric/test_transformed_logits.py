"""A family's loss, with its factor or its cap, and every gradient."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from family_models import TINY, VOCABULARY, randomise
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from highwater.engine.kernels import rows as row_kernels
from highwater.engine.kernels.rows import RowStatistics
from highwater.engine.models import loss as loss_module
from highwater.engine.models.loss import token_statistics
from highwater.engine.models.requirements import prove_rows
from highwater.errors import MachineError
from highwater.model.families import PLAIN, LogitTransform, logit_transform_of

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative: the order of summation alone differs."""
TOKENS = 301
"""All but the first are predicted, in three of the smallest chunks of logits."""
CASES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "cohere2_moe": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    "granitemoe": {"logits_scaling": 8.0},
    "granitemoeshared": {"logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "nanochat": {"final_logit_softcapping": 2.0},
    "vaultgemma": {"final_logit_softcapping": 2.0},
}
"""Gemma 2's and VaultGemma's attention is their own here: what follows it is what is compared."""
TRANSFORMS = (
    LogitTransform(scale=0.0625),
    LogitTransform(scale=1 / 3),
    LogitTransform(soft_cap=30.0),
    LogitTransform(scale=3.0, soft_cap=0.5),
)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("how", ["full", "chunked", "known gradient"])
@pytest.mark.parametrize("family", list(CASES))
def test_a_familys_loss_and_every_gradient_are_its_own_classs(family, how, dtype, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", 1)
    model = tiny(family, getattr(torch, dtype))
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[1:])
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    statistics = token_statistics(
        model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1],
        model.get_output_embeddings().weight,
        ids[1:],
        loss="full" if how == "full" else "chunked",
        transform=logit_transform_of(model.config.to_dict(), "its config"),
        logprob_gradient=-1 / (TOKENS - 1) if how == "known gradient" else None,
    )
    loss = -statistics.logprobs_N.mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    norm = float(torch.cat([gradient.flatten() for gradient in wanted]).norm())
    assert float((loss - expected).detach().abs() / expected.detach()) <= TOLERANCE[dtype]
    for name, ours, theirs in zip(dict(model.named_parameters()), found, wanted, strict=True):
        floor = max(float(theirs.norm()), 1e-3 * norm)
        assert float((ours - theirs).norm()) / floor <= TOLERANCE[dtype], name


def tiny(family: str, dtype: "torch.dtype") -> Any:
    kind = CONFIG_MAPPING[family]
    known = set(kind().to_dict())
    sizes = {name: value for name, value in TINY.items() if name in known}
    kinds = {"layer_types": ["full_attention"] * 2} if "layer_types" in known else {}
    config = kind(**{**sizes, "max_position_embeddings": 512, **kinds, **CASES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    randomise(model)
    return model


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rows_are_proven_where_they_are_right(transform):
    prove_rows(transform, torch.device("cpu"))


@pytest.mark.parametrize("forgets", ["statistics", "backward_"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rows_that_forget_the_transform_in_either_pass_are_refused(transform, forgets, monkeypatch):
    """In float32, as of a GPU's kernels; what they are compared with is float64."""
    right = getattr(row_kernels, forgets)

    def wrong(logits_NV: "torch.Tensor", *rest: Any) -> RowStatistics | None:
        if logits_NV.dtype != torch.float64:
            rest = (*rest[:-1], PLAIN)
        return right(logits_NV, *rest)

    monkeypatch.setattr(row_kernels, forgets, wrong)
    with pytest.raises(MachineError, match="row kernels of cpu differ"):
        prove_rows(transform, torch.device("cpu"))


def test_rows_of_nan_are_refused(monkeypatch):
    def nothing(logits_NV: "torch.Tensor", *_: Any) -> None:
        if logits_NV.dtype != torch.float64:
            logits_NV.fill_(float("nan"))

    monkeypatch.setattr(row_kernels, "backward_", nothing)
    with pytest.raises(MachineError, match="differ from PyTorch by nan"):
        prove_rows(LogitTransform(soft_cap=30.0), torch.device("cpu"))
