"""AdamW with moments of few bits, on one process: torchao's own moments, a bound on each update,
and what is kept.

The bound: both optimizers start from the same moments m, v; one of them keeps them rounded, with
errors of at most e_m and e_v for each number; both then see the same gradient g. With M = b1 m + (1
- b1) g, V = b2 v + (1 - b2) g^2, root = sqrt(V) / c + eps and c the root of the second correction,
an update is rate M / root, and so

    |update - exact| <= rate (b1 e_m / root' + |M| |root' - root| / (root root')),
    |root' - root| <= min(sqrt(b2 e_v), b2 e_v / sqrt(V)) / c,

root' being that of the rounded moments, which the optimizer knows. In 8 bits a number is off by
half of what lies between two codes at the most, 0.9 / 64 (signed) or 0.9 / 128 (squares) times the
largest of its block, which torchao takes to be 1e-12 at the least: e_m = 0.9 / 128 max |m|, e_v =
0.9 / 256 max v. In bfloat16, of 8 significant bits, by what lies between two numbers: e_m = 2^-7
|m|, e_v = 2^-7 v.
"""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, cast

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from engine_models import on_meta
from highwater.engine.models.fused import nf4
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training import low_bit
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.out_of_memory import stored
from highwater.engine.training.step import clip
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import OPTIMIZERS, QUANTIZED_BLOCK
from tiny_models import SIZES

pytest.importorskip("torchao", reason="moments of few bits need the low-bit extra")

LOSSY = ("adamw-8bit", "adamw-bf16")
RATE, DECAY = 1e-3, 0.1
NUMBERS = Hyperparameters(learning_rate=RATE, weight_decay=DECAY)
BETA1, BETA2, EPSILON = NUMBERS.adam_beta1, NUMBERS.adam_beta2, NUMBERS.adam_epsilon
SLACK = 1e-5
"""Relative, of the bound, and of the update: arithmetic in float32."""
MEANS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """What torchao and bitsandbytes would compile, the latter of odd shapes, is not."""
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        yield


def weights(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(96, 128, bias=bias, dtype=dtype)


def optimizer_of(model: nn.Module, name: Any) -> torch.optim.Optimizer:
    return make_optimizer(model, NUMBERS, name=name)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype, copy=True)
    optimizer.step()


def gradients_of(model: nn.Module, scale: float = 1.0) -> list[Tensor]:
    """Of very different sizes, row by row, as those of embeddings are."""
    return [
        scale * torch.randn_like(p) * torch.logspace(-3, 0, len(p))[:, None]
        if p.ndim > 1
        else scale * torch.randn_like(p)
        for p in model.parameters()
    ]


def test_eight_bits_are_torchaos_own():
    """Codes and scales bit by bit."""
    ours, theirs = weights(bias=True), weights(bias=True)
    optimizer = optimizer_of(ours, "adamw-8bit")
    judge = AdamW8bit(
        [
            {"params": [theirs.weight], "weight_decay": DECAY},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        lr=RATE,
    )
    for _ in range(10):
        gradients = gradients_of(ours)
        step(ours, optimizer, gradients)
        step(theirs, judge, gradients)
    for name in MEANS:
        own, other = optimizer.state[ours.weight][name], judge.state[theirs.weight][name]
        assert isinstance(own, OptimState8bit)
        assert torch.equal(own.codes, other.codes)
        assert torch.equal(own.scale, other.scale)
        of_bias = optimizer.state[ours.bias][name]
        assert torch.equal(of_bias, judge.state[theirs.bias][name]), "too small: in float32"
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=10 * RATE * 1e-4)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_an_update_is_within_its_bound_of_adamws(name, scale):
    exact, rounded = weights(), weights()
    judge, optimizer = optimizer_of(exact, "adamw"), optimizer_of(rounded, name)
    steps = 5
    for _ in range(steps):
        step(exact, judge, gradients_of(exact, scale))
    mean, squares = (judge.state[exact.weight][each].double() for each in MEANS)
    state = optimizer.state[rounded.weight]
    state["step"].fill_(steps)
    for each in MEANS:
        low_bit._write(state[each], judge.state[exact.weight][each])
    with torch.no_grad():
        rounded.weight.copy_(exact.weight)
    before = exact.weight.detach().double()
    kept_mean, kept_squares = (wide(state[each]) for each in MEANS)
    (gradient,) = gradients_of(exact, scale)
    step(exact, judge, [gradient])
    step(rounded, optimizer, [gradient])

    off_mean, off_squares = errors(name, mean, squares)
    assert ((kept_mean - mean).abs() <= (1 + SLACK) * off_mean).all()
    assert ((kept_squares - squares).abs() <= (1 + SLACK) * off_squares).all()
    gradient = gradient.double()
    new_mean = BETA1 * mean + (1 - BETA1) * gradient
    new_squares, own_squares = (
        BETA2 * each + (1 - BETA2) * gradient**2 for each in (squares, kept_squares)
    )
    correction = (1 - BETA2 ** (steps + 1)) ** 0.5
    root, own_root = (each.sqrt() / correction + EPSILON for each in (new_squares, own_squares))
    off = BETA2 * off_squares
    off_root = torch.minimum(off.sqrt(), off / new_squares.sqrt()) / correction
    rate = RATE / (1 - BETA1 ** (steps + 1))
    bound = rate * (BETA1 * off_mean / own_root + new_mean.abs() * off_root / (root * own_root))
    difference = (rounded.weight.double() - exact.weight.double()).abs()
    arithmetic = SLACK * (exact.weight.double() - before).abs() + 2**-23 * before.abs()
    assert (difference <= (1 + SLACK) * bound + arithmetic).all()
    moved = exact.weight.double() - before * (1 - RATE * DECAY)
    assert difference.norm() < 0.05 * moved.norm(), "most are far from the bound"
    assert difference.norm() > 1e-4 * moved.norm(), "and it is lossy"


def errors(name: str, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    if name == "adamw-bf16":
        return 2**-7 * mean.abs(), 2**-7 * squares
    return 0.9 / 128 * largest_of_block(mean), 0.9 / 256 * largest_of_block(squares)


def largest_of_block(moment: Tensor) -> Tensor:
    blocks = moment.abs().reshape(-1, QUANTIZED_BLOCK)
    return blocks.amax(1, keepdim=True).clip(1e-12).expand_as(blocks).reshape(moment.shape)


def wide(moment: Tensor) -> Tensor:
    return (moment.dequantize() if isinstance(moment, OptimState8bit) else moment).double()


@pytest.mark.parametrize("name", LOSSY)
def test_a_mean_of_squares_shrinks_as_fast_as_gradients_do(name):
    """Rounded to the nearest one in bfloat16 would stay: a thousandth less is nearer to itself."""
    steps = 500
    model = weights()
    optimizer = optimizer_of(model, name)
    step(model, optimizer, [torch.ones_like(model.weight)])
    before = wide(optimizer.state[model.weight]["exp_avg_sq"]).mean()
    for _ in range(steps):
        step(model, optimizer, [torch.zeros_like(model.weight)])
    after = wide(optimizer.state[model.weight]["exp_avg_sq"]).mean()
    assert float(after / before) == pytest.approx(BETA2**steps, rel=0.005)


@pytest.mark.parametrize("name", LOSSY)
def test_a_parameter_in_bf16_moves_as_far_as_in_float32_on_average(name):
    """By updates of a hundredth of what lies between two numbers: to the nearest it would stay."""
    steps, rate = 500, 2**-7 / 100
    numbers = Hyperparameters(learning_rate=rate, weight_decay=0.0)
    model = nn.Linear(96, 128, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.5)
    optimizer = make_optimizer(model, numbers, name=name)
    for _ in range(steps):
        step(model, optimizer, [torch.ones_like(model.weight)])
    assert 1.5 - model.weight.detach().float().mean().item() == pytest.approx(
        steps * rate, rel=0.01
    )
    assert model.weight.dtype is torch.bfloat16
    assert len(model.weight.unique()) > 2, "each number by itself"
    moments = [wide(optimizer.state[model.weight][each]).mean() for each in MEANS]
    assert moments == pytest.approx([1, 1 - BETA2**steps], rel=0.01), "as of float32"


@pytest.mark.parametrize("name", LOSSY)
def test_pieces_of_a_shard_are_updated_as_the_whole(name, monkeypatch):
    """But for the numbers that are drawn, and to which neighbour they round."""
    whole, cut = weights(), weights()
    whole_optimizer, cut_optimizer = optimizer_of(whole, name), optimizer_of(cut, name)
    for _ in range(3):
        gradients = gradients_of(whole)
        step(whole, whole_optimizer, gradients)
        with monkeypatch.context() as context:
            context.setattr(low_bit, "PIECE", 5 * QUANTIZED_BLOCK)  # does not divide the shard
            step(cut, cut_optimizer, gradients)
    if name == "adamw-8bit":
        assert torch.equal(whole.weight, cut.weight)
    torch.testing.assert_close(whole.weight, cut.weight, rtol=0, atol=0.1 * RATE)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_drawn_follows_from_the_step_and_leaves_other_draws_alone(name):
    one, other = weights(), weights()
    optimizers = optimizer_of(one, name), optimizer_of(other, name)
    torch.manual_seed(2)
    expected = torch.rand(3)
    for _ in range(3):
        gradients = gradients_of(one)
        torch.manual_seed(2)
        step(one, optimizers[0], gradients)
        assert torch.equal(torch.rand(3), expected)
        step(other, optimizers[1], gradients)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_alive_counts_codes_and_scales(name):
    model = weights(bias=True)
    optimizer = optimizer_of(model, name)
    for parameter in model.parameters():
        own = [
            part.untyped_storage().nbytes()
            for each in MEANS
            for part in stored(optimizer.state[parameter][each])
        ]
        assert sum(own) == OPTIMIZERS[name].moments_bytes(parameter.numel())


FAMILIES = [
    transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4),
    transformers.Starcoder2Config(**SIZES, use_bias=True),
    transformers.OlmoConfig(**SIZES),
]


@pytest.mark.parametrize("config", FAMILIES, ids=[config.model_type for config in FAMILIES])
def test_what_decays_is_what_transformers_trainer_lets_decay(config):
    model = on_meta(config).to_empty(device="cpu")
    decays = set(
        transformers.Trainer.get_decay_parameter_names(cast(transformers.Trainer, None), model)
    )
    optimizer = make_optimizer(model, Hyperparameters(weight_decay=0.3))
    found = {id(p): one["weight_decay"] for one in optimizer.param_groups for p in one["params"]}
    wanted = {name: 0.3 if name in decays else 0.0 for name, _ in model.named_parameters()}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == wanted
    assert len(found) == sum(len(one["params"]) for one in optimizer.param_groups)


def test_adamw_is_set_as_it_is_asked_for():
    asked = Hyperparameters(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    for group in make_optimizer(torch.nn.Linear(2, 2), asked).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.95), 1e-6)


@pytest.mark.parametrize(("most", "factor"), [(10.0, 1.0), (1.0, 0.2), (0.25, 0.05), (0.0, 1.0)])
def test_a_gradient_is_clipped_to_the_norm_that_is_asked_for(most, factor, alone):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = clip(model, mesh=process_mesh.shard_mesh(Layout(), torch.device("cpu")), max_norm=most)
    assert norm.item() == 5
    assert model.weight.grad.tolist()[0] == pytest.approx([3 * factor, 4 * factor], rel=1e-6)


def test_the_norm_of_gradients_in_bf16_is_in_float32(alone):
    """In bfloat16, of 8 bits, it would be 64."""
    model = torch.nn.Linear(64, 65, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))
    assert clip(model, mesh=mesh, max_norm=0).item() == pytest.approx(4160**0.5, rel=1e-6)


pytest.importorskip("bitsandbytes", reason="a model in NF4 needs the qlora extra")

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 256), (96, 40), (43, 45), (2, 3), (1, 64)])
def test_a_packed_weight_is_bitsandbytes(shape, dtype):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if weight.numel() % 2 and version("bitsandbytes") == "0.49.0":
        pytest.skip("bitsandbytes 0.49.0 packs no odd count of numbers on the CPU")
    codes, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    theirs = dequantize_4bit(codes, state)
    ours = nf4.packed(weight, nf4.scale_table(CPU))
    assert torch.equal(ours.data[: codes.numel()], codes.flatten())
    assert torch.equal(ours.whole(), theirs)
    assert ours.whole().dtype is dtype


@pytest.mark.parametrize("shape", [(512, 256), (256, 128), (96, 40), (6, 5)])
def test_halves_are_those_of_the_whole_and_as_small_where_blocks_allow(shape):
    ours = nf4.packed(torch.randn(*shape), nf4.scale_table(CPU))
    for half, rows in zip(nf4.halves(ours), ours.whole().chunk(2), strict=True):
        unpacked = nf4.whole(half)
        assert torch.equal(unpacked, rows)
        is_cut = shape[0] * shape[1] // 2 % (64 * 256) == 0
        assert unpacked.untyped_storage().nbytes() == rows.nbytes * (1 if is_cut else 2)


def test_a_packed_layer_has_the_gradient_of_its_input_and_keeps_nothing_whole():
    plain = nn.Linear(48, 32).requires_grad_(requires_grad=False)
    layer = nf4.Nf4Linear(plain)
    x = torch.randn(2, 5, 48, requires_grad=True)
    assert torch.equal(layer(x), plain(x)), "until it is packed it is what it was"
    layer.pack(nf4.scale_table(CPU))
    assert not [name for name, _ in layer.named_parameters() if name == "weight"]
    unpacked = nf4.whole(nf4.weight_of(layer))
    out = layer(x)
    torch.testing.assert_close(out, nn.functional.linear(x, unpacked, plain.bias))
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * out.detach() @ unpacked)
