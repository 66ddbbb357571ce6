"""What holds of the formula: monotone for shapes, settings and layouts of any size, and as recorded
trials.
"""

from collections import Counter

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import highwater
from highwater.memory.formula.constants import PAGE_TABLE_BYTES, Footprint
from highwater.memory.formula.formula import FAMILIES, likely_footprint, upper_footprint
from highwater.memory.formula.layers import Step
from highwater.model.held_bytes import gradient_bytes, policy_parameters
from highwater.model.model import ModelShape, load_model
from highwater.model.model_place import catalog_names
from highwater.nouns.layout import Layout
from highwater.nouns.objective import TRAITS
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome
from highwater.units import MIB
from places import FOUND

FORMULAS = [pytest.param(upper_footprint, id="enough"), pytest.param(likely_footprint, id="likely")]
DEVICES = st.sampled_from(["cuda", "cuda", "cpu"])
LENGTHS = st.one_of(st.integers(2, 4096), st.integers(2, 2**22))
LATE = "backward of a layer"
"""The phase of one layer, which may be another one where gradients come as activations go."""
PERSISTENT = {"states", "process"}
SAVED = {"ids, cosines and sines", "kept by recompute", "activations of all layers"}
GROWS_WITH_SHARDS = {"gradient reduction", "layers, gathered", "NCCL"}
"""From one GPU to several a layer is gathered ahead, a sum is reduced to shares of it, and there is
the library that does both."""
GROWS_WITH_ULYSSES = {*GROWS_WITH_SHARDS, "one layer going backward", "NCCL, all-to-all"}
PUBLISHED = [shape for name in catalog_names() if not (shape := load_model(name).shape).layer_runs]
"""Shapes of the catalog whose fields can be changed one by one: they name no layers."""


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Decoders that nobody made, and those of the catalog."""
    if draw(st.booleans()):
        return draw(st.sampled_from(PUBLISHED))
    experts = draw(st.sampled_from([1, 1, 1, 8, 128]))
    kv_heads = 2 ** draw(st.integers(0, 5))
    return ModelShape(
        model_type=draw(st.sampled_from(FAMILIES)),
        hidden_size=64 * draw(st.integers(1, 128)),
        layers=draw(st.integers(1, 100)),
        query_heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=2 ** draw(st.integers(4, 8)),
        intermediate_size=64 * draw(st.integers(1, 512)),
        vocab_size=draw(st.integers(2, 300_000)),
        native_length_tokens=32_768,
        tied_embeddings=draw(st.booleans()),
        experts=experts,
        experts_per_token=min(experts, draw(st.integers(1, 8))),
    )


@st.composite
def rungs(draw: st.DrawFn) -> Settings:
    """Any settings but a token budget: it packs fewer sequences the longer they are."""
    objective = draw(st.sampled_from(sorted(TRAITS)))
    strategy = draw(st.sampled_from(["fsdp", "fsdp2"]))
    return Settings(
        objective=objective,
        strategy=strategy,
        allocator=draw(st.sampled_from(["native", "expandable"])),
        loss=draw(st.sampled_from(["full", "chunked"])),
        entropy=draw(st.sampled_from(["none", "full", "chunked"]))
        if TRAITS[objective].advantages != "none"
        else "none",
        critic=objective == "ppo" and draw(st.booleans()),
        offload=draw(st.sampled_from([False, True, *(["states"] if strategy == "fsdp2" else [])])),
        accumulates=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "layer", "all-but-attention"])),
        mlp_tiles=draw(st.sampled_from([None, 1, 4])),
        sequences_per_micro_batch=draw(
            st.sampled_from([2, 4] if TRAITS[objective].pairs else [1, 2, 3, 8])
        ),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    gpus, ulysses, copies = (2 ** draw(st.integers(0, 6)) for _ in range(3))
    return Layout(gpus=gpus, ulysses_degree=min(gpus, ulysses), replicate_degree=min(gpus, copies))


def terms(result: Footprint, rung: Settings) -> dict[tuple[str, str], int]:
    """Bytes by phase and term; without recompute a layer's backward pass works on what is kept of
    it, too, so that these two are one.
    """
    found = Counter({("outside", term.name): term.bytes for term in result.outside})
    for phase in result.phases:
        if phase.name == LATE and not (
            rung.keeps_gradients and not (rung.offloads_model and rung.strategy == "fsdp")
        ):
            continue
        for term in phase.terms:
            is_joined = rung.recompute == "none" and term.name == "one layer going backward"
            found[phase.name, "activations of all layers" if is_joined else term.name] += term.bytes
    return found


def assert_no_term_shrinks(one: Footprint, other: Footprint, rung: Settings) -> None:
    after = terms(other, rung)
    assert not {key: size for key, size in terms(one, rung).items() if size > after.get(key, 0)}


def assert_no_less(one: Footprint, other: Footprint) -> None:
    """In every phase, and so at the peak; nor in what is reserved and used for it, of the GPU and
    of the host.

    What is only cached may shrink as activations grow, by a block that then finds room in what they
    left: so it does in traces of 8B at 65,536 and 131,072 tokens (docs/results/lab/breakdown.json).
    """
    assert all(a.bytes <= b.bytes for a, b in zip(one.phases, other.phases, strict=True))
    for name in ("allocated_bytes", "needed_bytes", "host_bytes"):
        assert getattr(one, name) <= getattr(other, name)
    assert one.reserved_bytes - one.cached_bytes <= other.reserved_bytes - other.cached_bytes


@pytest.mark.parametrize("formula", FORMULAS)
@given(shapes(), rungs(), layouts(), DEVICES, LENGTHS, LENGTHS)
def test_a_longer_sequence_needs_no_less(formula, shape, rung, layout, device, one, other):
    short, long = (
        formula(Step(shape, rung, layout, length_tokens=length, device=device))
        for length in sorted((one, other))
    )
    assert_no_less(short, long)
    assert_no_term_shrinks(short, long, rung)
    if rung.strategy == "fsdp2" and rung.keeps_gradients:
        tables = 1 if shape.tied_embeddings or rung.objective == "rw" else 2
        in_float32 = 4 * tables * shape.vocab_size * shape.hidden_size
        left = short.cached_bytes - long.cached_bytes
        assert left in (0, in_float32), "all gradients of embedding and head, or nothing"


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("field", ["vocab_size", "layers", "intermediate_size"])
@given(shapes(), rungs(), layouts(), DEVICES, LENGTHS, st.integers(1, 300_000))
def test_a_larger_model_needs_no_less(formula, field, shape, rung, layout, device, length, more):
    larger = msgspec.structs.replace(shape, **{field: getattr(shape, field) + more})
    small, large = (formula(Step(each, rung, layout, length, device)) for each in (shape, larger))
    assert_no_less(small, large)
    assert_no_term_shrinks(small, large, rung)


@given(shapes(), rungs(), layouts(), DEVICES, LENGTHS)
def test_a_single_layer_goes_backward_as_the_last_one(shape, rung, layout, device, length):
    single = msgspec.structs.replace(shape, layers=1)
    _, last, other, *_ = upper_footprint(Step(single, rung, layout, length, device)).phases
    assert other.terms == last.terms


@given(shapes(), rungs(), layouts(), DEVICES, LENGTHS)
def test_more_shards_hold_no_more_of_what_persists_and_is_saved_and_what_grows_has_a_name(
    shape, rung, layout, device, length
):
    wider = msgspec.structs.replace(layout, gpus=2 * layout.gpus)
    both = (layout, wider)
    fewer, more = (upper_footprint(Step(shape, rung, each, length, device)) for each in both)
    assert_growth_is_named(fewer, more, rung, GROWS_WITH_SHARDS)


@given(shapes(), rungs(), layouts(), DEVICES, LENGTHS)
def test_a_higher_ulysses_degree_holds_no_more_unnamed(shape, rung, layout, device, length):
    """On the same GPUs, which share longer sequences, and on twice as many; there are heads and
    tokens for all.

    With fewer tokens than GPUs it is not so: each has one token before and after, and its keys are
    repeated for more heads.
    """
    degree = 2 * layout.ulysses_degree
    assume(shape.query_heads % degree == 0)
    assume(rung.sequences_per_micro_batch * length >= degree)
    for gpus in {max(layout.gpus, degree), 2 * layout.gpus}:
        higher = Layout(gpus=gpus, ulysses_degree=degree, replicate_degree=layout.replicate_degree)
        fewer, more = (
            upper_footprint(Step(shape, rung, each, length_tokens=length, device=device))
            for each in (layout, higher)
        )
        assert_growth_is_named(fewer, more, rung, GROWS_WITH_ULYSSES)


def assert_growth_is_named(
    fewer: Footprint, more: Footprint, rung: Settings, may_grow: set[str]
) -> None:
    before, after = terms(fewer, rung), terms(more, rung)
    grown = {key for key, size in after.items() if size > before.get(key, 0)}
    assert not {name for _, name in grown} & (PERSISTENT | SAVED)
    assert {name for _, name in grown} <= may_grow
    for old, new in zip(fewer.phases, more.phases, strict=True):
        if new.bytes > old.bytes and new.name in {phase for phase, _ in after}:
            assert any(phase == new.name for phase, _ in grown)
    if more.outside_bytes > fewer.outside_bytes:
        assert any(phase == "outside" for phase, _ in grown)


@given(shapes(), rungs(), layouts(), DEVICES, LENGTHS)
def test_one_micro_batch_needs_no_more_than_several(shape, rung, layout, device, length):
    both = [msgspec.structs.replace(rung, accumulates=accumulates) for accumulates in (False, True)]
    one, several = (upper_footprint(Step(shape, each, layout, length, device)) for each in both)
    assert all(a.bytes <= b.bytes for a, b in zip(one.phases, several.phases, strict=True))
    assert one.needed_bytes <= several.needed_bytes
    assert one.host == several.host
    if rung.offloads_model:
        assert one == several, "no activation wants the place of gradients in host memory"
    else:
        shards = layout.shard_degree
        saved = several.phases[0].bytes - one.phases[0].bytes
        assert saved == pytest.approx(gradient_bytes(shape, rung, shards=shards) / shards, abs=4)
        parameters = policy_parameters(shape, rung) * rung.trained_models
        assert saved >= 4 * parameters / shards - 4, "no GPU has less than its share"


ALLOCATED_TOLERANCE = 0.007
"""Relative: 0.1 % of nearly all; the native allocator counts what it rounds up as allocated."""
USED_TOLERANCE = 0.025
MEASURED = [
    (study.question.model.shape, trial.spec, trial.result)
    for study in (highwater.open_study(path) for path in sorted(FOUND.glob("qwen3-*.jsonl")))
    for trial in study.trials
    if trial.result is not None and trial.result.outcome in (Outcome.FIT, Outcome.OUT_OF_MEMORY)
]


@pytest.mark.parametrize(
    ("shape", "spec", "result"), MEASURED, ids=lambda value: getattr(value, "key", "")
)
def test_every_trial_on_an_h200_is_predicted(shape, spec, result):
    ours = upper_footprint(Step(shape, spec.settings, spec.layout, spec.length_tokens))
    (rank,) = result.ranks
    fits = ours.needed_bytes <= rank.budget.budget_bytes
    if result.outcome is Outcome.OUT_OF_MEMORY:
        assert not fits
        return
    measured = rank.memory.peak_allocated_bytes
    assert ours.allocated_bytes == pytest.approx(measured, rel=ALLOCATED_TOLERANCE)
    if spec.settings.allocator == "expandable":
        assert fits
        used_bytes = ours.within(rank.budget.budget_bytes).device_used_bytes
        assert used_bytes == pytest.approx(rank.memory.device_used_bytes, rel=USED_TOLERANCE)


OUTSIDE = [
    (study.question.model.shape, trial.spec, trial.result)
    for pattern in ("grpo-*.jsonl", "edge-*.jsonl", "long-*.jsonl")
    for study in (highwater.open_study(path) for path in sorted(FOUND.glob(pattern)))
    for trial in study.trials
    if trial.result is not None and trial.result.outcome.is_fit
]


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("shape", "spec", "result"), OUTSIDE, ids=lambda value: getattr(value, "key", "")
)
def test_what_lies_outside_the_allocator_is_known_to_a_few_page_tables(shape, spec, result):
    ours = upper_footprint(Step(shape, spec.settings, spec.layout, spec.length_tokens))
    is_pinned = any("pinned memory" in term.name for term in ours.outside)
    assert is_pinned == (spec.settings.offload or spec.settings.objective == "grpo")
    read = [rank.memory for rank in result.ranks]
    measured = max(each.device_used_bytes - each.peak_reserved_bytes for each in read)
    # Gradients on their way to the host had no pinned memory of their own when these trials ran:
    # 4B's are 8 MiB of tables. And what several GPUs take for themselves and NCCL is the most of
    # all that were read, by up to 5 MiB.
    tables = 4 if spec.settings.offload or spec.layout.gpus > 1 else 1
    slack = tables * PAGE_TABLE_BYTES + MIB // 4
    assert -PAGE_TABLE_BYTES <= ours.outside_bytes - measured < slack
