import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.formula.constants import CONTEXT_BYTES, FILLED_SHARE
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.trials.simulated import FormulaLaw, SimulatedRunner
from highwater.units import GIB
from trial_specs import trial_of

BUDGETS = st.integers(GIB // 2, 200 * GIB)
LENGTHS = st.integers(2, 2**21)
RUNGS = st.builds(
    Settings,
    allocator=st.sampled_from(["native", "expandable"]),
    loss=st.sampled_from(["full", "chunked"]),
    recompute=st.sampled_from(["none", "layer"]),
    strategy=st.sampled_from(["fsdp", "fsdp2"]),
    offload=st.booleans(),
)
LAYOUTS = st.sampled_from(
    [Layout(), Layout(gpus=4), Layout(gpus=4, ulysses_degree=2), Layout(gpus=8, ulysses_degree=8)]
)


def trial(length: int = 8192, *, model: str = "Qwen3-0.6B", **fields) -> TrialSpec:
    return trial_of(model, length_tokens=length, **fields)


@given(st.sampled_from(catalog_names()), LAYOUTS, RUNGS, LENGTHS, LENGTHS)
def test_no_length_needs_less_memory_than_a_shorter_one(model, layout, rung, one, other):
    short, long = (
        trial(length, model=model, layout=layout, settings=rung) for length in sorted((one, other))
    )
    assert FormulaLaw()(short) <= FormulaLaw()(long)


@given(st.sampled_from(catalog_names()), LAYOUTS, RUNGS, LENGTHS)
def test_each_saving_setting_needs_no_more_memory_than_its_opposite(model, layout, rung, length):
    spec = trial(length, model=model, layout=layout, settings=rung)
    savings = [{"allocator": "expandable"}, {"recompute": "layer"}, {"offload": True}]
    # below that its sum of the head's gradient, in float32, may weigh more than the logits it saves
    if length >= 2**18:
        savings.append({"loss": "chunked"})
    for saving in savings:
        saved = msgspec.structs.replace(spec, settings=msgspec.structs.replace(rung, **saving))
        sums = 0
        if "recompute" in saving and length < 2**13:
            # Over the tiles of an MLP its gradients are summed in float32, however short the
            # sequence.
            shape = load_model(model).shape
            sums = (
                4 * 3 * shape.hidden_size * shape.intermediate_size / FILLED_SHARE[rung.allocator]
            )
        assert FormulaLaw()(saved) <= FormulaLaw()(spec) + sums


def test_a_law_given_a_shape_does_not_read_the_models_directory():
    spec = trial(model_directory="/nowhere")
    assert FormulaLaw(shape=load_model("Qwen3-0.6B").shape)(spec) == FormulaLaw()(trial())


@given(BUDGETS, st.integers(1, 200 * GIB))
def test_a_trial_fits_exactly_when_what_the_driver_sees_is_within_the_budget(budget, needed):
    result = SimulatedRunner(lambda spec: needed).run(trial(memory_budget_bytes=budget))
    assert (result.outcome is Outcome.FIT) == (needed + CONTEXT_BYTES["cuda"] <= budget)
    if result.outcome is Outcome.FIT:
        assert result.peak_reserved_bytes == needed
        assert result.headroom_bytes == budget - CONTEXT_BYTES["cuda"] - needed
    else:
        assert result.outcome is Outcome.OUT_OF_MEMORY
        assert result.ranks[0].failure.kind == "device_memory"


@given(LAYOUTS, RUNGS)
def test_a_budget_is_context_nccl_and_what_is_left_for_the_allocator(layout, rung):
    spec = trial(layout=layout, settings=rung, memory_budget_bytes=80 * GIB)
    (rank, *_) = SimulatedRunner(FormulaLaw()).run(spec).ranks
    budget = rank.budget
    assert (budget.nccl_bytes > 0) == (layout.gpus > 1)
    assert (
        budget.context_bytes + budget.nccl_bytes + budget.allocator_cap_bytes
        == budget.budget_bytes
        == 80 * GIB
    )
    needed = footprint(Step(load_model("Qwen3-0.6B").shape, rung, layout, length_tokens=8192))
    assert rank.memory.peak_reserved_bytes == needed.needed_bytes - needed.outside_bytes
    assert rank.memory.device_used_bytes == needed.needed_bytes


def test_without_a_budget_the_card_is_the_limit_and_without_a_card_nothing_is():
    spec = trial()
    needs_ten = lambda spec: 10 * GIB  # noqa: E731
    assert (
        SimulatedRunner(needs_ten, device_total_bytes=10 * GIB).run(spec).outcome
        is Outcome.OUT_OF_MEMORY
    )
    assert (
        SimulatedRunner(needs_ten, device_total_bytes=12 * GIB).run(spec).headroom_bytes
        == 2 * GIB - CONTEXT_BYTES["cuda"]
    )
    assert SimulatedRunner(needs_ten).run(spec).outcome is Outcome.FIT


def test_on_the_cpu_the_budget_bounds_the_data_segment():
    spec = trial(device="cpu", memory_budget_bytes=4 * GIB, layout=Layout(gpus=2))
    result = SimulatedRunner(lambda spec: 3 * GIB).run(spec)
    assert [rank.memory.peak_data_segment_bytes for rank in result.ranks] == [3 * GIB, 3 * GIB]
    assert result.headroom_bytes == GIB


@pytest.mark.parametrize(
    "outcome", [outcome for outcome in Outcome if outcome is not Outcome.MEMORY_ONLY_FIT]
)
def test_a_law_may_name_the_outcome(outcome):
    result = SimulatedRunner(lambda spec: outcome).run(trial(), attempt=2)
    assert (result.outcome, result.attempt) == (outcome, 2)


def test_every_result_says_that_it_is_simulated_and_measures_no_time():
    for law in (FormulaLaw(), lambda spec: Outcome.CRASHED):
        result = SimulatedRunner(law).run(trial())
        assert result.simulated
        assert (result.tokens_per_s, result.step_time_s) == (None, None)


def test_what_a_law_raises_reaches_the_caller():
    def law(spec: TrialSpec) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SimulatedRunner(law).run(trial())
