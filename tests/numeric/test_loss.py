"""Log-probabilities and entropies against log_softmax in float64; of a family, with its factor or
its cap, against its own class.
"""

import dataclasses
import math
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from closeness import assert_near, with_gradients
from dispatched import Dispatched
from family_models import TINY, VOCABULARY, randomise
from highwater.engine.data.batches import Document, pack, shard
from highwater.engine.kernels import rows as row_kernels
from highwater.engine.kernels.rows import RowStatistics
from highwater.engine.models import loss as loss_module
from highwater.engine.models.decoder import MicroBatchStatistics
from highwater.engine.models.loss import LogitRange, chunk_rows, token_statistics
from highwater.engine.models.requirements import prove_rows
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.engine.training import objectives
from highwater.engine.training.objectives import sft, sft_logprob_gradient
from highwater.engine.training.step import Training, backward_of
from highwater.errors import MachineError
from highwater.model.families import PLAIN, LogitTransform, logit_transform_of
from references.policy import clipped, divergence

TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 1e-2}
"""Norm-relative against float64 on the same inputs; bfloat16 keeps 8 bits and rounds logits and
their gradients once each."""
TRANSFORMS = {
    "plain": PLAIN,
    "scaled": LogitTransform(scale=0.0625),
    "divided": LogitTransform(scale=1 / 3.7),
    "capped": LogitTransform(soft_cap=0.7),
    "scaled and capped": LogitTransform(scale=0.6, soft_cap=0.9),
}
"""What families make of logits: Cohere, Granite, Gemma; and both at once."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("path", ["full", "chunked"])
@pytest.mark.parametrize("kind", list(TRANSFORMS))
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 2), (127, 11), (128, 1009), (301, 1009)])
def test_logprobs_and_entropies_equal_those_of_log_softmax(
    dtype, path, kind, tokens, vocabulary, monkeypatch
):
    monkeypatch.setitem(
        loss_module.CHUNK_BYTES, "cpu", 1
    )  # the smallest chunk: 301 tokens make three
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 16, dtype=getattr(torch, dtype), requires_grad=True)
    weight = (torch.randn(vocabulary, 16) / 4).to(getattr(torch, dtype)).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    transform = TRANSFORMS[kind]
    ours = token_statistics(hidden, weight, labels, loss=path, transform=transform)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    log_p = torch.log_softmax(logits_of(*wide, transform), -1)
    expected = (log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    found, wanted = with_gradients(ours, (hidden, weight)), with_gradients(expected, wide)
    assert_near(found, wanted, TOLERANCE[dtype])


def logits_of(
    hidden: torch.Tensor, weight: torch.Tensor, transform: LogitTransform
) -> torch.Tensor:
    logits = hidden @ weight.T * transform.scale
    if transform.soft_cap is not None:
        logits = torch.tanh(logits / transform.soft_cap) * transform.soft_cap
    return logits


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", list(TRANSFORMS))
@pytest.mark.parametrize("tokens", [0, 1, 128, 301])
def test_forward_gradients_are_those_of_going_backward(dtype, kind, tokens, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", 1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 16, dtype=getattr(torch, dtype), requires_grad=True)
    weight = (torch.randn(1009, 16) / 4).to(getattr(torch, dtype)).requires_grad_()
    labels = torch.randint(1009, (tokens,))
    found = []
    for logprob_gradient in (sft_logprob_gradient(trained_tokens=7), None):
        statistics = token_statistics(
            hidden,
            weight,
            labels,
            loss="chunked",
            transform=TRANSFORMS[kind],
            logprob_gradient=logprob_gradient,
        )
        loss = sft(statistics.logprobs_N, trained_tokens=7)
        found.append((*statistics, *torch.autograd.grad(loss, (hidden, weight))))
    for forward, backward in zip(*found, strict=True):
        assert torch.equal(forward, backward)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_known_gradient_saves_computing_logits_twice(loss, monkeypatch):
    """``full`` has them once anyway."""
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", 1)
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(11, (256,))
    flops = []
    for logprob_gradient in (None, -1.0):
        with FlopCounterMode(display=False) as counter:
            (
                -token_statistics(
                    hidden, weight, labels, loss=loss, logprob_gradient=logprob_gradient
                ).logprobs_N.sum()
            ).backward()
        flops.append(counter.get_total_flops())
    logits = 2 * 256 * 8 * 11
    assert flops[0] - flops[1] == (logits if loss == "chunked" else 0)


def test_sft_tells_its_loss_the_gradient_that_its_objective_has_and_no_other_does():
    """Of all trained tokens, not of one micro-batch's."""
    batches = [pack([Document(ids, ids)]) for ids in (torch.arange(5), torch.arange(9))]
    for asked, logprob_gradient in (
        ("sft", sft_logprob_gradient(trained_tokens=4 + 8)),
        ("ppo", None),
    ):
        policy = Listening()
        mesh: Any = SimpleNamespace(size=lambda: 1, device_type="cpu")
        training = Training(
            policy=policy,
            optimizer=torch.optim.SGD(policy.parameters()),
            mesh=mesh,
            objective=asked,
        )
        backward_of(
            training,
            batches
            if asked == "sft"
            else [dataclasses.replace(batch, rewards=(1.0,)) for batch in batches],
        )
        assert policy.gradients_told == [logprob_gradient, logprob_gradient]


class Listening(torch.nn.Module):
    """A policy whose log-probabilities are all one parameter."""

    gives_scalars = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.gradients_told: list[float | None] = []

    def forward(self, *batch: Any) -> MicroBatchStatistics:
        _, _, positions_N, _, _, logprob_gradient = batch
        self.gradients_told.append(logprob_gradient)
        return MicroBatchStatistics(
            self.weight.expand(len(positions_N)), torch.zeros(len(positions_N)), None
        )


def test_entropies_of_a_loss_with_a_known_gradient_are_no_part_of_it():
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    statistics = token_statistics(
        hidden, weight, torch.tensor([0, 5, 10]), loss="chunked", logprob_gradient=1.0
    )
    assert statistics.logprobs_N.requires_grad
    assert not statistics.entropies_N.requires_grad


@pytest.mark.parametrize(("loss", "logprob_gradient"), [("chunked", 1.0), ("full", None)])
def test_what_was_made_forward_is_handed_over_once(loss, logprob_gradient):
    """A second backward pass of ``full`` is an error, too, and not a wrong gradient."""
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = token_statistics(
        hidden, weight, torch.tensor([0, 5, 10]), loss=loss, logprob_gradient=logprob_gradient
    ).logprobs_N.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


@pytest.mark.parametrize("trained_tokens", [0, 1, 3, 30_719, 1_000_003])
def test_the_log_probability_gradient_of_sft_is_what_autograd_finds(trained_tokens):
    for dtype in (torch.float32, torch.float64):
        logprobs = torch.randn(5, dtype=dtype, requires_grad=True)
        (found,) = torch.autograd.grad(sft(logprobs, trained_tokens=trained_tokens), logprobs)
        assert torch.equal(
            found, torch.full_like(found, sft_logprob_gradient(trained_tokens=trained_tokens))
        )


def test_a_logit_of_minus_infinity_has_probability_zero_and_makes_no_nan():
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [2.0, 2.0, float("-inf")]])
    labels = torch.tensor([2, 0])
    of = row_kernels.statistics(logits, labels)
    assert of.entropy_N[1] == pytest.approx(math.log(2))
    row_kernels.backward_(logits, labels, of, torch.ones(2), torch.ones(2))
    assert logits[0, 1] == logits[1, 2] == 0.0
    assert logits.isfinite().all()


def test_a_capped_logit_of_minus_infinity_is_minus_the_cap_and_has_no_gradient():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], dtype=torch.float64)
    capped = torch.tensor([[0.0, -2.0, 2 * math.tanh(0.5)]], dtype=torch.float64)
    labels, transform = torch.tensor([2]), LogitTransform(soft_cap=2.0)
    of = row_kernels.statistics(logits, labels, transform)
    assert of.logprob_N.item() == pytest.approx(capped.log_softmax(-1)[0, 2].item(), rel=1e-14)
    one = torch.ones(1, dtype=torch.float64)
    row_kernels.backward_(logits, labels, of, one, one, transform)
    assert logits[0, 1] == 0.0
    assert logits.isfinite().all()


@pytest.mark.parametrize("path", ["full", "chunked"])
@pytest.mark.parametrize("logprob_gradient", [None, -1.0])
@pytest.mark.parametrize("kind", list(TRANSFORMS))
def test_the_range_is_that_of_the_logits_that_the_softmax_sees(
    kind, logprob_gradient, path, monkeypatch
):
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", 1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(301, 16, requires_grad=True), torch.randn(11, 16)
    transform, seen = TRANSFORMS[kind], LogitRange()
    token_statistics(
        hidden,
        weight,
        torch.randint(11, (301,)),
        loss=path,
        transform=transform,
        logprob_gradient=logprob_gradient,
        logit_range=seen,
    )
    logits = logits_of(hidden.detach(), weight, transform)
    of_tokens = logits.double().amin(1).sum().item(), logits.double().amax(1).sum().item()
    assert seen.read() == pytest.approx(
        (logits.min().item(), logits.max().item(), *of_tokens), rel=1e-6
    )
    seen.reset()
    assert seen.read() == (None, None, 0, 0)


@pytest.mark.parametrize("kind", list(TRANSFORMS))
def test_logits_are_scaled_and_capped_without_a_second_buffer_as_wide(kind, monkeypatch):
    """Blocks of rows aside: the largest tensor that either pass makes is one block."""
    monkeypatch.setattr(row_kernels, "_LOGITS_BYTES", 4 * 1009)
    logits, labels = torch.randn(64, 1009), torch.randint(1009, (64,))
    ones = torch.ones(64)
    made: list[int] = []
    with Dispatched(lambda *call: made.append(widest(*call))):
        of = row_kernels.statistics(logits, labels, TRANSFORMS[kind])
        row_kernels.backward_(logits, labels, of, ones, ones, TRANSFORMS[kind])
    assert 0 < max(made) <= 1009


def widest(_func: object, args: Any, out: Any) -> int:
    """The numbers of the largest storage that an operator made."""
    given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
    made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    return max((t.numel() for t in made if t.untyped_storage().data_ptr() not in given), default=0)


@pytest.mark.parametrize("path", ["full", "chunked"])
def test_a_rank_without_a_trained_token_has_a_loss_of_zero_and_zero_gradients(path):
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = sft(
        token_statistics(hidden, weight, torch.zeros(0, dtype=torch.long), loss=path).logprobs_N,
        trained_tokens=7,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_chunk_holds_what_its_bytes_allow():
    rows = chunk_rows(torch.empty(1000, 8))
    assert rows % 128 == 0
    assert rows * 1000 * 4 <= loss_module.CHUNK_BYTES["cpu"] < (rows + 128) * 1000 * 4


LOG_RATIOS = [
    *map(math.log, (0.05, 0.5, 1.1, 1.25, 1.3, 2.9, 3.5)),
    *(-1000.0, -90.0, -20.5, 20.5, 30.0, 90.0, 1000.0),
]
"""Within both clips, outside either, past the dual one, and far apart."""


@pytest.mark.parametrize("log_ratio", LOG_RATIOS)
def test_losses_of_a_token_and_their_gradients_are_those_of_the_references(log_ratio):
    """Of a token far from the other policy, too: finite, and without a gradient where clipped."""
    for advantage, dual in product((-2.0, 0.0, 2.0), (3.0, 0)):
        clip = {"low": 0.2, "high": 0.28, "dual": dual}
        loss = partial(objectives.clip_loss, trained_tokens=1)
        found = token(loss, log_ratio, torch.tensor([advantage]), **clip)
        reference = partial(clipped, **clip | {"dual": dual or 1e12})
        wanted = token(reference, log_ratio, torch.tensor([advantage]))
        assert found == pytest.approx(wanted, rel=1e-6)
        assert math.isfinite(found[0])
        assert abs(log_ratio) <= 20 or found[1] == 0
    for estimator in ("k1", "k2", "k3"):
        loss = partial(objectives.divergence, coefficient=2.0, trained_tokens=1)
        found = token(loss, log_ratio, estimator=estimator)
        wanted = token(divergence, log_ratio, estimator=estimator)
        assert found == pytest.approx([2 * each for each in wanted], rel=1e-6, abs=5e-7)
        assert all(map(math.isfinite, found))


def test_a_documents_log_ratio_is_summed_over_its_tokens_however_many_they_are():
    documents = torch.tensor([0, 0, 2, 2, 2])
    ratios = torch.tensor([0.5, -1.5, 1.0, 2.0, 3.0], requires_grad=True)
    sums = objectives.document_sums(ratios, documents, documents=4)
    assert sums.tolist() == [-1.0, 0.0, 6.0, 0.0]
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert ratios.grad.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    long = torch.full((2**20,), 0.1)
    (whole,) = objectives.document_sums(long, torch.zeros(2**20, dtype=torch.long), documents=1)
    assert whole.item() == pytest.approx(2**20 * float(long[0]), rel=1e-12)


@pytest.mark.parametrize("margin", [-1000.0, -2.0, 0.0, 0.5, 1000.0])
def test_a_preference_costs_the_logistic_loss_of_its_margin(margin):
    ratios = torch.tensor([3.0 + margin, 3.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    loss = objectives.preference(ratios, beta=0.4, pairs=2)
    logistic = max(0.0, -0.4 * margin) + math.log1p(math.exp(-abs(0.4 * margin)))
    assert loss.item() == pytest.approx((logistic + math.log(2)) / 2, rel=1e-12)
    loss.backward()
    wrong = 1 / (1 + math.exp(min(700.0, 0.4 * margin)))
    pulls = [-0.2 * wrong, 0.2 * wrong, -0.1, 0.1]
    assert ratios.grad.tolist() == pytest.approx(pulls, rel=1e-12)


def test_a_reward_is_compared_with_its_group_and_alone_with_nothing():
    found = objectives.group_advantages([1.0, 5.0, 3.0, 7.0], [9, -1, 9, 4])
    assert found == pytest.approx([-math.sqrt(0.5), 5.0, math.sqrt(0.5), 7.0], rel=2e-6)
    assert objectives.group_advantages([2.0, 2.0], [0, 0]) == [0.0, 0.0]
    for reward in (5.0, -2.0, 0.0, 1e4):  # verl's formula, with a mean of 0 and a deviation of 1
        assert objectives.group_advantages([reward], [0]) == [reward / (1 + 1e-6)]


def test_documents_without_logprobs_leave_those_of_their_micro_batch_alone():
    ids = torch.arange(4)
    known = torch.tensor([-0.1, -0.2, -0.3, -0.4])
    sampled, unknown = Document(ids, ids, old_logprobs_L=known), Document(ids[:2], ids[:2])
    found = pack([unknown, sampled, unknown]).old_logprobs_N
    assert found[1:4].tolist() == known[1:].tolist()
    assert found[[0, 4]].isnan().all()
    assert pack([unknown, unknown]).old_logprobs_N is None
    row = pack([unknown, sampled, unknown])
    halves = [
        shard(row, SequenceLayout(row.document_lengths, 2), rank=rank).old_logprobs_N
        for rank in (0, 1)
    ]
    assert torch.equal(torch.cat(halves).nan_to_num(1.0), found.nan_to_num(1.0))


def token(loss: Any, log_ratio: float, *rest: Any, **numbers: Any) -> tuple[float, float]:
    """A token's loss and its gradient in the log-probability, the other policy's being 0."""
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    value = loss(logprobs, torch.zeros(1), *rest, **numbers)
    value.backward()
    return value.item(), logprobs.grad.item()


OF_FAMILIES = {"float64": 1e-10, "float32": 5e-6}
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
PROVEN = (*list(TRANSFORMS.values())[1:], LogitTransform(soft_cap=30.0))


@pytest.mark.parametrize("dtype", list(OF_FAMILIES))
@pytest.mark.parametrize("how", ["full", "chunked", "known gradient"])
@pytest.mark.parametrize("family", [name for name in CASES if name in CONFIG_MAPPING])
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
    assert float((loss - expected).detach().abs() / expected.detach()) <= OF_FAMILIES[dtype]
    for name, ours, theirs in zip(dict(model.named_parameters()), found, wanted, strict=True):
        floor = max(float(theirs.norm()), 1e-3 * norm)
        assert float((ours - theirs).norm()) / floor <= OF_FAMILIES[dtype], name


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


@pytest.mark.parametrize("transform", PROVEN)
def test_rows_are_proven_where_they_are_right(transform):
    prove_rows(transform, torch.device("cpu"))


@pytest.mark.parametrize("forgets", ["statistics", "backward_"])
@pytest.mark.parametrize("transform", PROVEN)
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
