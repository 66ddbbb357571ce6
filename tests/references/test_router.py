"""The routers' loss against transformers' own and against loads whose value is known."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from references.documents import predictions
from references.router import imbalance, step_imbalance
from references.tiny import dense, documents, language_model, with_experts
from references.wide import float32_casts_lifted

IN_FLOAT32 = 2e-6


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


def test_a_norm_that_casts_to_float32_does_not():
    norm, x = LlamaRMSNorm(16).double(), torch.randn(5, 16, dtype=torch.float64)
    exact = x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    assert (norm(x) - exact).norm() > 1e-9 * exact.norm()
    with float32_casts_lifted():
        assert (norm(x) - exact).norm() < 1e-15 * exact.norm()


def test_rotary_frequencies_are_those_of_the_formula():
    frequencies = language_model(dense()).model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float64
    assert frequencies.tolist() == [10000.0 ** (-2 * index / 4) for index in range(2)]


def test_a_loss_is_accurate_to_finite_differences():
    model, ids = language_model(dense()), torch.arange(11)
    weight = model.model.layers[0].self_attn.q_proj.weight

    def loss() -> torch.Tensor:
        with float32_casts_lifted():
            return model(input_ids=ids[None], use_cache=False).logits.square().mean()

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        logprob_gradient = []
        for step in (1e-5, -1e-5):
            weight.add_(direction, alpha=step)
            logprob_gradient.append(loss().item())
            weight.sub_(direction, alpha=step)
    exact = (gradient * direction).sum().item()
    assert (
        abs((logprob_gradient[0] - logprob_gradient[1]) / 2e-5 - exact) < 1e-6 * abs(exact) + 1e-9
    )
