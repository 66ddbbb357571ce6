"""The GPU's own code against float64: row kernels on odd sizes, logits beside them poisoned."""

import pytest
import torch

from closeness import assert_near, deviation, with_gradients
from highwater.engine.attention import recurrence as chunk_kernels
from highwater.engine.attention.dense import attend, select_kernel
from highwater.engine.attention.plain_block import reference_attention
from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.kernels import norm as norm_kernels
from highwater.engine.kernels import rotary as rotary_kernels
from highwater.engine.kernels import rows as row_kernels
from highwater.engine.models import loss as loss_module
from highwater.engine.models.requirements import prove_rows
from highwater.model.families import PLAIN, LogitTransform
from layer import measure as measure_layer
from loss import CONTENDERS, TOLERANCE, compare, measure

LAYER_BYTES = 52_500
"""Per token, Qwen3-0.6B: 35,500 in tensors and 16,400 that cuDNN takes for itself
(docs/results/layer/README.md)."""
ROW_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-3}
"""Norm-relative against float64 on the same logits; the gradient is stored in the logits' own
dtype."""
SWEEP_TOLERANCE = 5e-6
"""Norm-relative against float64."""
TRANSFORMS = {
    "plain": PLAIN,
    "scaled": LogitTransform(scale=0.0625),
    "divided": LogitTransform(scale=1 / 3.7),
    "capped": LogitTransform(soft_cap=30.0),
    "flattened": LogitTransform(soft_cap=0.5),
    "scaled and capped": LogitTransform(scale=0.6, soft_cap=0.9),
}


@pytest.mark.parametrize("kind", list(TRANSFORMS))
@pytest.mark.parametrize("dtype", list(ROW_TOLERANCE))
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 4095), (5, 4097), (129, 151_936)])
def test_row_kernels_equal_float64_and_touch_nothing_beside_their_rows(
    dtype, kind, rows, vocabulary
):
    transform = TRANSFORMS[kind]
    torch.manual_seed(0)
    wide = torch.full((rows + 2, vocabulary + 64), float("nan"), device="cuda", dtype=dtype)
    logits = wide[1 : rows + 1, :vocabulary]
    logits.copy_(torch.randn(rows, vocabulary, device="cuda") * 5)
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    upstream = torch.randn(2, rows, device="cuda")
    exact = logits.double()
    expected = row_kernels.statistics(exact, labels, transform)
    ours = row_kernels.statistics(logits, labels, transform)
    for name, mine, wanted in zip(ours._fields, ours, expected, strict=True):
        assert deviation(mine, wanted) < ROW_TOLERANCE[torch.float32] or vocabulary == 1, name
    row_kernels.backward_(exact, labels, expected, *upstream.double(), transform)
    row_kernels.backward_(logits, labels, ours, *upstream, transform)
    assert deviation(logits, exact) < ROW_TOLERANCE[dtype] or vocabulary == 1
    assert not logits.isnan().any()
    assert wide[0].isnan().all()
    assert wide[-1].isnan().all()
    assert wide[:, vocabulary:].isnan().all()


@pytest.mark.parametrize("kind", list(TRANSFORMS))
def test_row_kernels_are_proven_before_a_model_is_trained(kind):
    prove_rows(TRANSFORMS[kind], torch.device("cuda"))


@pytest.mark.parametrize("transform", [PLAIN, LogitTransform(soft_cap=2.0)])
def test_logits_of_minus_infinity_have_probability_zero_and_make_no_nan(transform):
    """Or, where they are capped, that of minus the cap; a gradient they have in neither case."""
    logits = torch.randn(2, 9000, device="cuda")
    logits[:, :8192] = float("-inf")
    labels = torch.tensor([8500, 8999], device="cuda")
    exact, ones = logits.double(), torch.ones(2, device="cuda")
    expected = row_kernels.statistics(exact, labels, transform)
    ours = row_kernels.statistics(logits, labels, transform)
    for mine, wanted in zip(ours, expected, strict=True):
        assert deviation(mine, wanted) < ROW_TOLERANCE[torch.float32]
    row_kernels.backward_(logits, labels, ours, ones, ones, transform)
    assert torch.equal(logits[:, :8192], torch.zeros_like(logits[:, :8192]))
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", list(ROW_TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 1), (3, 683), (129, 3072), (700_000, 3072)])
def test_gate_kernels_equal_float64(shape, dtype):
    torch.manual_seed(0)
    gate, up, gradient = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    rows = slice(
        max(0, shape[0] - 999), None
    )  # the last ones, whose offsets pass 2**31 in the largest
    exact = [t[rows].double() for t in (gate, up, gradient)]
    product, wanted = gate.clone(), exact[0].clone()
    gate_kernels.product_(product, up)
    gate_kernels.product_(wanted, exact[1])
    assert deviation(product[rows], wanted) < ROW_TOLERANCE[dtype]
    del product
    gate_kernels.backward_(gate, up, gradient)
    gate_kernels.backward_(*exact)
    for ours, expected in zip((gate, up, gradient), exact, strict=True):
        assert deviation(ours[rows], expected) < ROW_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(ROW_TOLERANCE))
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 1, 4), (5, 3, 12), (1031, 16, 128), (77, 64, 80), (560_000, 32, 128)]
)
def test_rotary_kernels_equal_float64(shape, has_norm, dtype):
    torch.manual_seed(0)
    tokens, heads, size = shape
    x = torch.randn(shape, device="cuda", dtype=dtype)
    upstream = torch.randn(heads, tokens, size, device="cuda", dtype=dtype).transpose(
        0, 1
    )  # as attention gives it back
    weight = torch.randn(size, device="cuda", dtype=dtype) if has_norm else None
    cosines, sines = torch.randn(2, tokens, size, device="cuda", dtype=dtype)
    out, scales = rotary_kernels.rotate(x, weight, 1e-6, cosines, sines)
    gradient, weight_gradient = rotary_kernels.backward(upstream, x, weight, scales, cosines, sines)
    rows = slice(
        max(0, tokens - 1031), None
    )  # the last ones, whose offsets pass 2**31 in the largest
    exact = [None if t is None else t.double() for t in (x[rows], weight)]
    positions = [t[rows].double() for t in (cosines, sines)]
    expected, wide_scales = rotary_kernels.rotate(*exact, 1e-6, *positions)
    wanted, wanted_weight = rotary_kernels.backward(
        upstream[rows].double(), *exact, wide_scales, *positions
    )
    assert deviation(out[rows], expected) < ROW_TOLERANCE[dtype]
    assert deviation(gradient[rows], wanted) < ROW_TOLERANCE[dtype]
    if weight_gradient is not None and wanted_weight is not None and tokens <= 1031:
        assert deviation(weight_gradient, wanted_weight) < ROW_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(ROW_TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 3), (5, 7, 256), (1031, 2560), (600_000, 4096)])
def test_norm_kernels_equal_float64_and_touch_nothing_beside_their_rows(shape, dtype):
    """With a weight in float32; rows lie apart, as those of heads beside gates."""
    torch.manual_seed(0)
    wide = torch.full((*shape[:-1], 2, shape[-1]), float("nan"), device="cuda", dtype=dtype)
    x = wide[..., 0, :]
    x.copy_(torch.randn(shape, device="cuda", dtype=dtype))
    gradient = torch.randn(shape, device="cuda", dtype=dtype)
    weight = 1 + torch.randn(shape[-1], device="cuda") / 9
    out, scales = norm_kernels.normed(x, weight, 1e-6)
    of_x, of_weight = norm_kernels.backward(gradient, x, weight, scales)
    rows = slice(max(0, shape[0] - 999), None)
    leaves = [each[rows].double().requires_grad_() for each in (x, gradient)]
    exact_weight = weight.double().requires_grad_()
    exact = leaves[0] * (leaves[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt() * exact_weight
    wanted = torch.autograd.grad(exact, (leaves[0], exact_weight), leaves[1])
    assert deviation(out[rows], exact) < ROW_TOLERANCE[dtype]
    assert deviation(of_x[rows], wanted[0], beside=1e-6) < ROW_TOLERANCE[dtype]
    if len(x) == len(leaves[0]):
        assert deviation(of_weight, wanted[1]) < ROW_TOLERANCE[torch.float32]
    assert wide[..., 1, :].isnan().all()


@pytest.mark.parametrize("chunks", [1, 2, 17])
@pytest.mark.parametrize(("heads", "size", "columns"), [(1, 6, 5), (4, 128, 128), (3, 96, 80)])
def test_the_sweep_over_chunks_equals_float64(chunks, heads, size, columns):
    """Operands are laid out as tokens' are, other numbers beside them poisoned."""
    torch.manual_seed(0)

    def numbers(last: int, scale: float) -> torch.Tensor:
        wide = torch.full((chunks, 64, heads + 1, last + 3), float("nan"), device="cuda")
        found = wide.transpose(1, 2)[:, 1:, :, :last]
        return found.copy_(torch.randn(found.shape, device="cuda") * scale)

    inputs = [
        numbers(columns, 1.0),
        numbers(size, 0.2 / size**0.5),
        numbers(size, 0.2 / size**0.5),
        torch.rand(chunks, heads, device="cuda"),
        torch.randn(heads, size, columns, device="cuda"),
    ]
    leaves = [each.detach().requires_grad_() for each in inputs]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    found = with_gradients(chunk_kernels.recurrence(*leaves), leaves)
    expected = with_gradients(chunk_kernels.recurrence(*wide), wide, rounded=torch.float32)
    assert_near(found, expected, SWEEP_TOLERANCE)


def test_one_layers_backward_pass_costs_what_it_is_said_to_cost():
    assert measure_layer("Qwen3-0.6B", device="cuda")["layer_bytes_per_token"] < LAYER_BYTES


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_losses_equal_float64(name, monkeypatch):
    monkeypatch.setitem(
        loss_module.CHUNK_BYTES, "cuda", 1
    )  # the smallest chunk: 1031 tokens make nine
    assert max(compare(CONTENDERS[name]).values()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "most"),
    [("full", 4.2), ("chunked", 0.05), ("full + entropy", 6.2), ("chunked + entropy", 0.05)],
)
def test_the_gradient_of_a_loss_is_what_it_is_said_to_be(name, most):
    logprob_gradient = measure(name, CONTENDERS[name])["bytes_per_token_vocabulary"]
    assert isinstance(logprob_gradient, float)
    assert logprob_gradient <= most


@pytest.mark.parametrize(
    "document_lengths",
    [
        *((33,), (7, 7, 7), (65, 1, 129)),
        # fronts by cuDNN, with and without queries that are left, and documents between them
        *((8200, 5), (3, 8192, 8800, 8300, 1), (8704, 8704, 130)),
    ],
)
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(16, 8), (4, 4), (4, 1)])
def test_packed_attention_equals_the_textbook(document_lengths, query_heads, kv_heads):
    torch.manual_seed(0)
    device, size, tokens = torch.device("cuda"), 128, sum(document_lengths)
    kernel = select_kernel(
        device, torch.bfloat16, query_heads=query_heads, kv_heads=kv_heads, head_dim=size
    )
    q, k, v = (
        torch.randn(tokens, heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    as_heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
    ours = attend(*as_heads, document_lengths=document_lengths, scaling=size**-0.5, kernel=kernel)[
        0
    ]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = reference_attention(*exact, document_lengths=document_lengths, scaling=size**-0.5)
    wanted = with_gradients([expected], exact, rounded=torch.bfloat16)
    assert_near(with_gradients([ours], (q, k, v)), wanted, TOLERANCE)
