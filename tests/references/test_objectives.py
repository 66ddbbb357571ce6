"""Losses of a whole step against Hugging Face's own and what follows from the definitions."""

import math

import pytest
import torch
from torch import Tensor, nn

from references.documents import Document, predictions, scores, trained_tokens
from references.objectives import (
    Numbers,
    Router,
    group_relative,
    pairwise,
    preference,
    proximal,
    supervised,
)
from references.router import imbalance
from references.tiny import (
    VOCABULARY,
    dense,
    documents,
    language_model,
    scoring_model,
    with_experts,
)
from references.wide import float32_casts_lifted

LENGTHS = [7, 12, 5, 20]
NO_DIVERGENCE = Numbers(divergence=0.0)
TIGHT = 1e-12
"""Relative: some hundred roundings of float64."""


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def assert_same_gradients(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a - b).norm() <= TIGHT * max(b.norm().item(), 1e-6)


def sampled(model: nn.Module, step: list[Document], *, apart: float = 0.3) -> list[Document]:
    """The same documents with log-probabilities as an older policy gave them."""
    torch.manual_seed(5)
    known = []
    for one in step:
        logprobs = predictions(model, one).logprobs.detach()
        old = logprobs + apart * torch.randn_like(logprobs)
        known.append(
            Document(
                ids=one.ids, labels=one.labels, reward=one.reward, group=one.group, old_logprobs=old
            )
        )
    return known


@pytest.mark.parametrize("config", [dense, with_experts])
def test_the_supervised_loss_is_hugging_faces_with_the_steps_number_of_tokens(config):
    model, step = language_model(config()), documents(LENGTHS)
    theirs = torch.zeros((), dtype=torch.float64)
    for one in step:
        with float32_casts_lifted():
            out = model(
                input_ids=one.ids[None],
                labels=one.labels[None],
                num_items_in_batch=trained_tokens(step),
                use_cache=False,
            )
        theirs = theirs + out.loss
    ours = supervised(model, step)
    assert ours.item() == pytest.approx(theirs.item(), rel=TIGHT)
    assert_same_gradients(gradients(ours, model), gradients(theirs, model))


def test_with_the_routers_loss_it_is_hugging_faces_too():
    model, (one,) = language_model(with_experts()), documents([19])
    with float32_casts_lifted():
        theirs = model(
            input_ids=one.ids[None],
            labels=one.labels[None],
            output_router_logits=True,
            use_cache=False,
        ).loss
    ours = supervised(
        model, [one], router=Router(coefficient=model.config.router_aux_loss_coef, top_k=2)
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=TIGHT)
    assert_same_gradients(gradients(ours, model), gradients(theirs, model))


def test_the_routers_loss_is_a_mean_over_documents_by_their_tokens():
    model, step = language_model(with_experts()), documents(LENGTHS)
    each = [
        imbalance(predictions(model, one, router=True).router_logits, top_k=2).item()
        for one in step
    ]
    mean = sum(tokens * loss for tokens, loss in zip(LENGTHS, each, strict=True)) / sum(LENGTHS)
    router = Router(coefficient=0.7, top_k=2)
    assert supervised(model, step, router=router).item() == pytest.approx(
        supervised(model, step).item() + 0.7 * mean, rel=TIGHT
    )


def test_the_first_token_of_a_document_and_ignored_labels_are_not_trained():
    ids = torch.arange(6)
    labels = torch.tensor([0, -100, 2, 3, -100, 5])
    assert Document(ids=ids, labels=labels).trained.tolist() == [2, 3, 5]


def test_on_policy_the_gradient_is_that_of_advantage_times_log_probability():
    model = language_model(dense())
    step = documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0], group=[0, 0, 1, 1])
    loss = group_relative(model, model, step, numbers=NO_DIVERGENCE)
    advantages = [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5]  # of two rewards, whatever they are
    plain = -sum(
        a * predictions(model, one).logprobs.sum() for a, one in zip(advantages, step, strict=True)
    ) / trained_tokens(step)
    assert isinstance(plain, Tensor)
    for ours, theirs in zip(gradients(loss, model), gradients(plain, model), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm().item() + 1e-12  # the deviation's 1e-6


def test_old_log_probabilities_that_are_the_current_ones_change_nothing():
    model = language_model(dense())
    step = documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0], group=[0, 1, 0, 1])
    known = sampled(model, step, apart=0.0)
    without, given = group_relative(model, model, step), group_relative(model, model, known)
    half = group_relative(model, model, [known[0], step[1], step[2], known[3]])
    assert without.item() == pytest.approx(given.item(), rel=TIGHT)
    assert half.item() == pytest.approx(given.item(), rel=TIGHT)
    assert_same_gradients(gradients(without, model), gradients(given, model))


def test_a_document_without_old_log_probabilities_leaves_those_of_the_others_in_use():
    model = language_model(dense())
    step = documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0], group=[0, 1, 0, 1])
    known = sampled(model, step)
    losses = [group_relative(model, model, [*known[:n], *step[n:]]).item() for n in range(5)]
    assert len({round(loss, 12) for loss in losses}) == 5


def test_the_order_of_documents_is_of_no_consequence():
    model, reference = language_model(dense()), language_model(dense(), seed=3)
    known = sampled(model, documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0], group=[0, 1, 0, 1]))
    shuffled = [known[index] for index in (2, 0, 3, 1)]
    one, other = group_relative(model, reference, known), group_relative(model, reference, shuffled)
    assert one.item() == pytest.approx(other.item(), rel=TIGHT)


def test_the_reference_model_itself_diverges_by_nothing():
    model = language_model(dense())
    step = documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0], group=[0, 0, 1, 1])
    for estimator in ("k1", "k2", "k3"):
        apart = group_relative(model, model, step, estimator=estimator) - group_relative(
            model, model, step, numbers=NO_DIVERGENCE
        )
        assert apart.item() == 0.0


def test_the_divergence_counts_by_its_coefficient():
    model, reference = language_model(dense()), language_model(dense(), seed=3)
    step = documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0], group=[0, 0, 1, 1])
    pairs = [
        (predictions(model, one).logprobs, predictions(reference, one).logprobs) for one in step
    ]
    k2 = sum(((a - b) ** 2).sum().item() for a, b in pairs) / 2 / trained_tokens(step)
    with_k2 = group_relative(
        model, reference, step, estimator="k2", numbers=Numbers(divergence=0.01)
    )
    without = group_relative(model, reference, step, numbers=NO_DIVERGENCE)
    assert (with_k2 - without).item() == pytest.approx(0.01 * k2, rel=1e-10)


def test_an_even_distribution_has_the_entropy_of_its_vocabulary():
    model = language_model(dense())
    nn.init.zeros_(model.lm_head.weight)
    step = documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0])
    for loss in (
        lambda coefficient: group_relative(
            model, model, step, numbers=Numbers(entropy=coefficient)
        ),
        lambda coefficient: proximal(model, None, step, numbers=Numbers(entropy=coefficient))[0],
    ):
        assert (loss(0.0) - loss(0.001)).item() == pytest.approx(
            0.001 * math.log(VOCABULARY), rel=1e-10
        )


def test_whitened_on_policy_the_loss_is_zero_and_its_gradient_is_not():
    model, critic = language_model(dense()), scoring_model(dense(), seed=2)
    loss, of_critic = proximal(model, critic, documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0]))
    assert of_critic is not None
    assert abs(loss.item()) < 1e-14
    assert sum(gradient.norm().item() for gradient in gradients(loss, model)) > 0.1


def test_the_critic_is_moved_by_half_the_squared_error_to_its_returns():
    critic, step = scoring_model(dense(), seed=2), documents([8], reward=[1.5])
    _, loss = proximal(language_model(dense()), critic, step)
    values = scores(critic, step[0])[2:7]  # tokens 3 to 7, each scored one token earlier
    later, after, returns = 0.0, 0.0, []
    for index, value in reversed(list(enumerate(values.tolist()))):
        later = (1.5 if index == 4 else 0.0) + after - value + 0.95 * later
        after = value
        returns.append(later + value)
    plain = 0.5 * ((values - torch.tensor(returns[::-1], dtype=torch.float64)) ** 2).mean()
    assert loss.item() == pytest.approx(plain.item(), rel=TIGHT)
    assert_same_gradients(gradients(loss, critic), gradients(plain, critic))


def test_without_a_critic_there_is_no_loss_for_it():
    assert (
        proximal(language_model(dense()), None, documents(LENGTHS, reward=[1.0, 0.0, 0.5, 2.0]))[1]
        is None
    )


def test_equal_scores_cost_log_two_and_margins_their_logistic_loss():
    model = scoring_model(dense())
    a, b, c, d = documents(LENGTHS)
    assert pairwise(model, [(a, a)]).item() == pytest.approx(math.log(2), rel=TIGHT)
    margins = []
    for chosen, rejected in ((a, b), (c, d)):
        with float32_casts_lifted():
            of = [
                model(input_ids=one.ids[None], use_cache=False).logits.item()
                for one in (chosen, rejected)
            ]
        margins.append(of[0] - of[1])
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / 2
    assert pairwise(model, [(a, b), (c, d)]).item() == pytest.approx(expected, rel=TIGHT)


def test_a_policy_that_is_its_reference_prefers_nothing_and_is_pulled_by_half_of_beta():
    model = language_model(dense())
    a, b, c, d = documents(LENGTHS)
    loss = preference(model, model, [(a, b), (c, d)], numbers=Numbers(preference=0.4))
    assert loss.item() == pytest.approx(math.log(2), rel=TIGHT)
    of = [predictions(model, one).logprobs.sum() for one in (a, b, c, d)]
    plain = -0.4 / 2 * (of[0] - of[1] + of[2] - of[3]) / 2
    assert_same_gradients(gradients(loss, model), gradients(plain, model))


def test_a_preference_is_the_logistic_loss_of_what_hugging_face_says_of_completions():
    policy, reference = language_model(dense()), language_model(dense(), seed=3)
    step = documents(LENGTHS)
    likelier = []
    for one in step:
        with float32_casts_lifted():
            on, held = (
                model(input_ids=one.ids[None], labels=one.labels[None], use_cache=False).loss.item()
                for model in (policy, reference)
            )
        likelier.append(-(on - held) * len(one.trained))
    margins = [likelier[0] - likelier[1], likelier[2] - likelier[3]]
    for beta in (0.1, 0.7):
        expected = sum(math.log1p(math.exp(-beta * margin)) for margin in margins) / 2
        pairs = [(step[0], step[1]), (step[2], step[3])]
        found = preference(policy, reference, pairs, numbers=Numbers(preference=beta))
        assert found.item() == pytest.approx(expected, rel=TIGHT)


def test_what_a_preference_is_about_are_completions_and_the_routers_loss_is_of_all_tokens():
    policy, reference = language_model(with_experts()), language_model(with_experts(), seed=3)
    step = documents(LENGTHS)
    pairs = [(step[0], step[1]), (step[2], step[3])]
    router = Router(coefficient=0.7, top_k=2)
    apart = preference(policy, reference, pairs, router=router) - preference(
        policy, reference, pairs
    )
    each = [predictions(policy, one, router=True) for one in step]
    assert apart.item() == pytest.approx(router.loss(step, each).item(), rel=1e-11)
    whole = [Document(ids=one.ids, labels=one.ids) for one in step]
    prompts_too = preference(policy, reference, [(whole[0], whole[1]), (whole[2], whole[3])])
    assert prompts_too.item() != pytest.approx(preference(policy, reference, pairs).item())
