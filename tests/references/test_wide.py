"""Lifted casts: a model is float64 from the tokens to the loss."""

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from references.tiny import dense, language_model
from references.wide import float32_casts_lifted


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
