"""What TRL needs, by formula: beside the edges that its trials found, and by its own source."""

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import highwater
from highwater.errors import HighwaterError, UsageError
from highwater.memory.formula.constants import Footprint
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.interval.calibration import edge_residuals, factors_of
from highwater.memory.interval.residuals import Residual, step_of
from highwater.memory.trainers import MEMORY
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Study
from highwater.nouns.trial import Outcome
from highwater.search.scheduler import search_cells
from highwater.store.journal import read_study
from highwater.trials.simulated import SimulatedRunner
from highwater.units import MIB
from tables import table
from trial_specs import answers_among, fits_up_to

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "other_trainers"
TRIED = ("one-gpu-trl", "two-gpus-ring-trl", "grpo-0.6b-24")
ALONE = Layout()
RING = Layout(gpus=2, ring_degree=2)


def study(name: str) -> Study:
    return read_study(RESULTS / "studies" / f"{name}.jsonl")


def needed(model: str, length: int, layout: Layout = ALONE, **settings: object) -> Footprint:
    shape = load_model(model).shape
    return MEMORY["trl"].formula(Step(shape, Settings(**settings), layout, length))


def learned(edges: tuple[Residual, ...]) -> tuple[float, float]:
    """The ends of the interval that these edges teach, as shares of a prediction."""
    most, least = [each.factor for each in edges], [each.least_factor for each in edges]
    factors = factors_of(most, "expandable", least=least)
    return factors.lower, factors.upper


def bundled() -> tuple[Residual, ...]:
    return MEMORY["trl"].residuals()


def test_the_edges_that_come_along_are_those_of_the_recorded_studies():
    sys.path.insert(0, str(RESULTS))
    try:
        import edges
    finally:
        sys.path.remove(str(RESULTS))
    assert edges.TARGET.read_text() == edges.edges()
    assert len(bundled()) == len(TRIED)


@pytest.mark.parametrize("name", TRIED)
def test_no_recorded_trial_is_outside_the_interval(name):
    recorded, (low, high) = study(name), learned(bundled())
    shape, total = recorded.question.model.shape, recorded.question.device_total_bytes
    assert total is not None
    for trial in recorded.trials:
        spec, result = trial.spec, trial.result
        step = Step(shape, spec.settings, spec.layout, spec.length_tokens)
        found = MEMORY["trl"].formula(step)
        caps = [rank.budget.allocator_cap_bytes for rank in result.ranks if rank.budget]
        given_bytes = min(caps) + found.outside_bytes
        if result.outcome is Outcome.FIT:
            assert found.needed_bytes * low <= given_bytes, spec.length_tokens
        else:
            assert result.outcome is Outcome.OUT_OF_MEMORY
            # PyTorch counts half a per cent less of a card than its driver
            assert found.needed_bytes * high > 0.995 * given_bytes, spec.length_tokens


@pytest.mark.parametrize("left_out", range(len(TRIED)))
def test_an_interval_of_the_other_edges_reaches_what_one_allows(left_out):
    every = bundled()
    low, high = learned(every[:left_out] + every[left_out + 1 :])
    assert low <= every[left_out].factor
    assert high >= every[left_out].least_factor


def test_an_edge_lies_between_what_it_was_given_at_both_lengths():
    recorded = study("two-gpus-ring-trl")

    def told(step: Step) -> Footprint:
        footprint = needed("Qwen3-4B", step.length_tokens, RING, loss="chunked")
        return msgspec.structs.replace(footprint, outside=())

    (edge,) = edge_residuals(recorded, told)
    shape = recorded.question.model.shape
    specs = [trial.spec for trial in recorded.trials]
    by_length = {spec.length_tokens: told(step_of(shape, spec)) for spec in specs}
    fit, ran_out = by_length[24_576].needed_bytes, by_length[32_768].needed_bytes
    assert (edge.length_tokens, edge.predicted_bytes) == (24_576, fit)
    assert edge.least_factor / edge.factor == pytest.approx(fit / ran_out, rel=1e-9)
    budgets = [rank.budget for rank in recorded.trials[0].result.ranks]
    (cap,) = {budget.allocator_cap_bytes for budget in budgets}
    assert 0.995 * cap < edge.measured_bytes < cap


def test_a_study_that_ran_out_nowhere_has_no_edge():
    recorded = study("one-gpu-trl")
    fits = tuple(t for t in recorded.trials if t.result and t.result.outcome is Outcome.FIT)
    learn = MEMORY["trl"].learn
    assert learn is not None
    with pytest.raises(UsageError, match="has no edge"):
        learn(msgspec.structs.replace(recorded, trials=fits), None)


@given(
    st.sampled_from(["Qwen3-0.6B", "Qwen3-30B-A3B", "gemma-2-2b"]),
    st.sampled_from(["sft", "grpo", "dpo", "rw"]),
    st.integers(512, 2**17),
    st.integers(1, 2**15),
    st.sampled_from([None, 16]),
)
def test_a_longer_sequence_never_needs_less_on_any_gpus(model, objective, length, more, lora):
    pairs = 2 if objective in ("rw", "dpo") else 1
    settings = {"objective": objective, "lora": lora, "sequences_per_micro_batch": pairs}
    one = needed(model, length, **settings)
    assert one.needed_bytes <= needed(model, length + more, **settings).needed_bytes
    several = [needed(model, length, Layout(gpus=gpus), **settings) for gpus in (2, 4, 8)]
    tensors = [each.allocated_bytes for each in several]
    assert tensors == sorted(tensors, reverse=True)


def test_grpo_keeps_the_keys_of_a_whole_group_while_it_generates():
    shape = load_model("Qwen3-0.6B").shape
    phases = needed("Qwen3-0.6B", 16_384, objective="grpo").phases
    (phase,) = [each for each in phases if each.name == "generation of completions"]
    bytes_of = {term.name: term.bytes for term in phase.terms}
    of_a_token = 28 * 2 * 8 * 128 * 2  # layers, keys and values, heads, their size, bfloat16
    assert bytes_of["keys and values of completions"] == 8 * 16_384 * of_a_token
    # parameters and both moments in float32: no gradient is there when a step begins
    assert bytes_of["states without gradients"] == 12 * shape.parameters
    # the recorded trial that ran out asked for 766 MiB, one product of the MLP for 8 prompts
    product = 8 * 16_320 * 3072 * 2
    assert product / MIB == pytest.approx(766, abs=2)
    assert 3 * product < bytes_of["a layer reading the prompts"] < 4 * product
    on_four = needed("Qwen3-0.6B", 16_384, Layout(gpus=4), objective="grpo")
    shared = {term.name: term.bytes for term in on_four.phases[0].terms}
    assert shared["keys and values of completions"] == 2 * 16_384 * of_a_token


def test_the_loss_is_a_tile_of_logits_beside_gradients_in_float32():
    shape = load_model("Qwen3-4B").shape
    (loss,) = [each for each in needed("Qwen3-4B", 32_768).phases if each.name == "loss"]
    bytes_of = {term.name: term.bytes for term in loss.terms}
    assert bytes_of["logits"] == 4096 * 32_768 * 2
    # summed in float32, and then beside its rounded copy
    assert bytes_of["gradient of the head"] == (4 + 2) * shape.vocab_size * shape.hidden_size
    hidden = 32_768 * shape.hidden_size
    assert bytes_of["gradient of the hidden states in float32"] == 4 * hidden
    assert bytes_of["hidden states"] == 3 * 2 * hidden  # they, a copy, their rounded gradient
    frozen = [each for each in needed("Qwen3-4B", 32_768, lora=16).phases if each.name == "loss"]
    assert "gradient of the head" not in [term.name for term in frozen[0].terms]


def test_no_reference_is_kept_and_the_launcher_is_on_the_first_gpu():
    shape = load_model("Qwen3-4B").shape
    ours = likely_footprint(Step(shape, Settings(objective="grpo"), Layout(), length_tokens=4096))
    theirs = needed("Qwen3-4B", 4096, objective="grpo")
    assert "offloaded states and reference" in [term.name for term in ours.host]
    assert [term.name for term in theirs.host] == ["processes"]
    outside = {term.name: term.bytes for term in theirs.outside}
    assert outside["context of TRL's launcher"] == 518 * MIB


@pytest.mark.parametrize(("name", "trials"), list(zip(TRIED, (2, 2, 2), strict=True)))
def test_a_search_of_trl_starts_where_the_formula_says_and_is_done_in(name, trials):
    recorded = study(name)
    (before,) = recorded.answers
    assert before.capacity_tokens is not None

    runner = SimulatedRunner(fits_up_to(before.capacity_tokens))
    (found,) = answers_among(search_cells(recorded.question, runner))
    assert found.capacity_tokens == before.capacity_tokens
    assert (found.does_not_fit_tokens, found.trials) == (before.does_not_fit_tokens, trials)
    assert trials < before.trials


@pytest.mark.parametrize(
    ("settings", "said", "instead"), table("trl_memory", "what_trl_cannot_be_told_is_refused_with")
)
def test_what_trl_cannot_be_told_is_refused_with_what_can(settings, said, instead):
    asked = {"gpus": "2xH200-141GB", "trainer": "trl", "length": "8k"}
    with pytest.raises(HighwaterError, match=said) as refused:
        highwater.predict("Qwen3-4B", **asked, **settings)
    assert refused.value.hint
    changed = {name: value for name, value in (settings | instead).items() if value is not None}
    assert highwater.predict("Qwen3-4B", **asked, **changed).answer is not None


def test_sequences_go_round_a_ring_where_nobody_names_a_degree():
    cells = highwater.predict("Qwen3-4B", gpus="4xH200-141GB", trainer="trl", length="8k").cells
    assert {each.cell.layout.ring_degree for each in cells} == {1, 2, 4}
    assert {each.cell.layout.ulysses_degree for each in cells} == {1}
    for model, asked in (("Qwen3-4B", {"objective": "grpo"}), ("gemma-2-2b", {})):
        found = highwater.predict(model, gpus="4xH200-141GB", trainer="trl", length="4k", **asked)
        assert {each.cell.layout.ring_degree for each in found.cells} == {1}


def test_a_study_of_trl_teaches_and_counts_once():
    asked = {"gpus": "1xH200-141GB", "trainer": "trl", "length": "8k"}
    known = highwater.predict("Qwen3-4B", **asked).calibration
    own = [RESULTS / "studies" / "one-gpu-trl.jsonl"]
    assert known == highwater.predict("Qwen3-4B", **asked, calibrate_with=own).calibration
    assert (known.edges, known.own_trials) == (3, 0)
