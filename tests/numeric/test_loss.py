"""Log-probabilities against log_softmax in float64: values and both gradients, several chunks, odd sizes, no token at all."""

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from highwater.engine import loss as loss_module  # noqa: E402
from highwater.engine.loss import chunk_rows, token_logprobs  # noqa: E402
from highwater.engine.objective import sft  # noqa: E402

TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 1e-2}
"""Norm-relative against float64 on the same inputs; bfloat16 keeps 8 bits and rounds logits and their gradients once each."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("path", ["full", "chunked"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 2), (127, 11), (128, 1009), (301, 1009)])
def test_logprobs_equal_log_softmax(dtype: str, path: str, tokens: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", 1)  # the smallest chunk: 301 tokens make three
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 16, dtype=getattr(torch, dtype), requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=getattr(torch, dtype), requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    upstream = torch.randn(tokens, dtype=torch.float64)
    ours = token_logprobs(hidden, weight, labels, loss=path)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = torch.log_softmax(wide[0] @ wide[1].T, -1).gather(1, labels[:, None])[:, 0]
    gradients = torch.autograd.grad(ours, (hidden, weight), upstream.to(ours.dtype))
    wanted = torch.autograd.grad(expected, wide, upstream)
    for a, b in zip((ours, *gradients), (expected, *wanted), strict=True):
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("path", ["full", "chunked"])
def test_a_rank_without_a_trained_token_has_a_loss_of_zero_and_zero_gradients(path: str) -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = sft(token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), loss=path), trained_tokens=7)
    loss.backward()
    assert float(loss) == 0.0
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_second_backward_of_full_is_an_error_and_not_a_wrong_gradient() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = token_logprobs(hidden, weight, torch.tensor([0, 5, 10]), loss="full").sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


def test_a_chunk_holds_what_its_bytes_allow() -> None:
    weight = torch.empty(1000, 8)
    rows = chunk_rows(weight)
    assert rows % 128 == 0
    assert rows * 1000 * 4 <= loss_module.CHUNK_BYTES["cpu"] < (rows + 128) * 1000 * 4
