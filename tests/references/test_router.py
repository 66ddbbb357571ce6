"""The routers' loss against transformers' own and against loads whose value is known."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from references.documents import predictions
from references.router import imbalance, step_imbalance
from references.tiny import documents, language_model, with_experts
from references.wide import float32_casts_lifted

IN_FLOAT32 = 2e-6
"""Relative: transformers' function sums in float32."""


def test_an_even_router_costs_the_number_of_experts_a_token():
    logits = torch.zeros(12, 6, dtype=torch.float64)
    assert imbalance((logits,), top_k=2).item() == pytest.approx(2.0, rel=1e-14)


def test_a_router_that_sends_all_to_one_expert_costs_the_number_of_experts():
    logits = torch.zeros(12, 6, dtype=torch.float64)
    logits[:, 3] = 200.0
    assert imbalance((logits,), top_k=1).item() == pytest.approx(6.0, rel=1e-14)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_it_is_transformers_function_and_its_gradient(top_k):
    ours = [torch.randn(23, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    loss = imbalance(tuple(ours), top_k=top_k)
    gradients = torch.autograd.grad(loss, ours)
    theirs = load_balancing_loss_func(tuple(ours), 8, top_k)
    assert isinstance(theirs, torch.Tensor)
    assert loss.item() == pytest.approx(theirs.item(), rel=IN_FLOAT32)
    for gradient, of_theirs in zip(gradients, torch.autograd.grad(theirs, ours), strict=True):
        assert (gradient - of_theirs).norm() < IN_FLOAT32 * of_theirs.norm()


def test_a_models_own_auxiliary_loss_is_that_of_its_documents():
    model = language_model(with_experts())
    for document in documents([9, 21]):
        with float32_casts_lifted():
            out = model(input_ids=document.ids[None], use_cache=False, output_router_logits=True)
        logits = predictions(model, document, router=True).router_logits
        assert len(logits) == 2
        assert imbalance(logits, top_k=2).item() == pytest.approx(out.aux_loss.item(), rel=1e-13)


def test_a_steps_loss_weighs_documents():
    even, uneven = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(8, 6, dtype=torch.float64)
    uneven[:, 0] = 200.0
    assert step_imbalance(
        [(even,), (uneven,)], top_k=1, weights=[1.0, 1.0]
    ).item() == pytest.approx(3.5, rel=1e-14)
    assert step_imbalance(
        [(even,), (uneven,)], top_k=1, weights=[4.0, 8.0]
    ).item() == pytest.approx(13 / 3, rel=1e-14)
