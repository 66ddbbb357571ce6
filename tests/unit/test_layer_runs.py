"""Layers as runs of a kind: sums are over runs, peaks over kinds, and cuts change nothing."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_formula_properties import DEVICES, LENGTHS, layouts, rungs, shapes

from highwater.errors import ModelError
from highwater.memory.formula import layers as formula
from highwater.memory.formula.formula import likely_footprint, upper_footprint
from highwater.memory.formula.layers import Step
from highwater.model.held_bytes import (
    checkpoint_bytes,
    device_state_bytes,
    host_state_bytes,
    layer_input_bytes,
    matrices,
    pinned_state_bytes,
    staged_gradient_bytes,
    step_flops,
)
from highwater.model.layer_kind import AttentionKind, LayerKind, LayerRun, MlpKind, runs_of
from highwater.model.model import Model, ModelShape, load_model
from highwater.model.model_place import catalog_names
from highwater.nouns.cells import heads_obstacle, ring_obstacle
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.layout import Layout
from highwater.nouns.plan import other_class
from highwater.nouns.settings import Settings
from tiny_models import written_model

HIDDEN = 512
FULL = AttentionKind(query_heads=16, kv_heads=4, head_dim=64)
WINDOWED = msgspec.structs.replace(FULL, window_tokens=1024)
DENSE = MlpKind(width=4096)
EXPERTS = MlpKind(width=256, experts=64, experts_per_token=8)
MIXTURE = {"model_type": "glm4_moe", "num_hidden_layers": 6, "n_routed_experts": 8}
MIXTURE |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}


def kind(attention: AttentionKind = FULL, mlp: MlpKind = DENSE) -> LayerKind:
    return LayerKind(hidden_size=HIDDEN, attention=attention, mlp=mlp)


def run(count: int, of: LayerKind) -> LayerRun:
    return LayerRun(count=count, kind=of)


def shape_with(*runs: LayerRun) -> ModelShape:
    """A shape of these runs; what its own fields say of layers is nobody's size."""
    return ModelShape(
        query_heads=1,
        kv_heads=1,
        head_dim=1,
        intermediate_size=1,
        model_type="qwen3",
        hidden_size=HIDDEN,
        layers=sum(each.count for each in runs),
        vocab_size=1000,
        native_length_tokens=32_768,
        tied_embeddings=False,
        layer_runs=runs,
    )


@st.composite
def kinds(draw: st.DrawFn, hidden_size: int) -> LayerKind:
    kv_heads = 2 ** draw(st.integers(0, 5))
    experts = draw(st.sampled_from([1, 1, 8, 64]))
    heads = {"query_heads": kv_heads * draw(st.integers(1, 8)), "kv_heads": kv_heads}
    window, has_sinks = draw(st.none() | st.integers(1, 2**20)), draw(st.booleans())
    reads = {"window_tokens": window, "has_sinks": has_sinks}
    attention = AttentionKind(**heads, head_dim=2 ** draw(st.integers(4, 8)), **reads)
    widths = {"width": 64 * draw(st.integers(1, 512)), "shared_width": 64 * draw(st.integers(0, 8))}
    routed = {"experts": experts, "experts_per_token": min(experts, draw(st.integers(1, 8)))}
    mlp = MlpKind(**widths, matrices=draw(st.sampled_from([2, 3])), **routed)
    return LayerKind(hidden_size=hidden_size, attention=attention, mlp=mlp)


@st.composite
def shapes_of_kinds(draw: st.DrawFn) -> ModelShape:
    """Decoders whose layers are alike, as the catalog's, or of up to three kinds in any order."""
    shape = draw(shapes())
    if draw(st.booleans()):
        return shape
    some = draw(st.lists(kinds(shape.hidden_size), min_size=1, max_size=3))
    counts = st.tuples(st.integers(1, 20), st.sampled_from(some))
    # families whose layers were learned have no layers but those
    shape = msgspec.structs.replace(shape, model_type="llama")
    return with_runs(shape, runs_of(draw(st.lists(counts, min_size=1, max_size=5))))


def with_runs(shape: ModelShape, runs: tuple[LayerRun, ...]) -> ModelShape:
    layers = sum(each.count for each in runs)
    return msgspec.structs.replace(shape, layers=layers, layer_runs=runs)


def cut(runs: tuple[LayerRun, ...], layers: int) -> tuple[LayerRun, ...]:
    """The same layers, with a run that ends behind the first ``layers`` ones."""
    parts: list[LayerRun] = []
    for each in runs:
        before = min(each.count, max(0, layers))
        layers -= each.count
        parts += [run(count, each.kind) for count in (before, each.count - before) if count]
    return tuple(parts)


@given(shapes_of_kinds(), rungs(), layouts(), DEVICES, LENGTHS, st.data())
def test_cutting_a_run_in_two_alike_changes_nothing(shape, rung, layout, device, length, data):
    place = data.draw(st.integers(0, shape.layers))
    parts = with_runs(shape, cut(shape.runs, place))
    assert len(parts.runs) - len(shape.runs) in (0, 1)
    asked = (rung, layout, device, length)
    assert figures(parts, *asked) == figures(shape, *asked)


def figures(
    shape: ModelShape, rung: Settings, layout: Layout, device: Any, length: int
) -> tuple[object, ...]:
    flops = step_flops(shape, length_tokens=length, sequences=2, settings=rung)
    formulas = (upper_footprint, likely_footprint)
    return (
        shape.parameters,
        shape.matmul_parameters,
        shape.window_tokens,
        sum(number * rows * size for number, rows, size in matrices(shape)),
        flops,
        layer_input_bytes(shape),
        checkpoint_bytes(shape, rung, device),
        device_state_bytes(shape, rung, device=device),
        host_state_bytes(shape, rung, layout=layout),
        pinned_state_bytes(shape, rung, layout=layout),
        staged_gradient_bytes(shape, rung, layout=layout),
        *(each(Step(shape, rung, layout, length, device)) for each in formulas),
    )


PAIRS = {
    "dense first layers, then experts": (kind(mlp=DENSE), kind(mlp=EXPERTS)),
    "a window, then full attention": (kind(attention=WINDOWED), kind()),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_adds_up_is_the_sum_of_what_each_kind_has(pair):
    one, other = pair
    both = shape_with(run(2, one), run(5, other))
    parts = shape_with(run(2, one)), shape_with(run(5, other))
    outside = both.parameters_outside_layers
    assert outside == (2 * 1000 + 1) * HIDDEN, "embedding, head and the last norm"
    assert both.parameters - outside == sum(each.parameters - outside for each in parts)
    head = 1000 * HIDDEN
    assert both.matmul_parameters - head == sum(each.matmul_parameters - head for each in parts)
    assert layer_input_bytes(both) == sum(map(layer_input_bytes, parts)) == 2 * 7 * HIDDEN

    def attention_and_layers(shape: ModelShape) -> int:
        flops = step_flops(shape, length_tokens=4096, sequences=1, settings=Settings())
        return flops - 6 * head * 4096

    assert attention_and_layers(both) == sum(map(attention_and_layers, parts))
    for recompute in ("none", "layer", "all-but-attention"):
        of_both, *of_parts = (kept_bytes(each, recompute) for each in (both, *parts))
        assert of_both == sum(of_parts) > 0
    table, rest = block_bytes(head), block_bytes(outside)
    for strategy, of_outside in (("fsdp2", 2 * table), ("fsdp", 2 * rest)):
        offload = Settings(strategy=strategy, offload=True)  # type: ignore[arg-type]
        shapes = (both, *parts)
        of_both, *of_parts = (pinned_state_bytes(each, offload, layout=Layout()) for each in shapes)
        assert of_both - of_outside == sum(each - of_outside for each in of_parts) > 0


def block_bytes(parameters: int) -> int:
    return 1 << (4 * parameters - 1).bit_length()


def kept_bytes(shape: ModelShape, recompute: Any) -> int:
    step = Step(shape, Settings(recompute=recompute), Layout(), length_tokens=2048)
    loss, *_ = upper_footprint(step).phases
    names = ("activations of all layers", "kept by recompute")
    (kept,) = (term.bytes for term in loss.terms if term.name in names)
    return kept


def test_gradients_of_layers_whose_tensors_have_one_size_share_their_blocks():
    def staged(*runs: LayerRun) -> int:
        offload = Settings(offload=True)
        return staged_gradient_bytes(shape_with(*runs), offload, layout=Layout(gpus=2))

    windowed, full, experts = kind(attention=WINDOWED), kind(), kind(mlp=EXPERTS)
    assert staged(run(4, windowed), run(4, full)) == staged(run(8, full)) == staged(run(3, full))
    outside = staged(run(3, full)) + staged(run(3, experts)) - staged(run(3, full), run(3, experts))
    assert outside == 2 * 2 * block_bytes(1000 * HIDDEN // 2), "embedding and head, on two GPUs"


@given(shapes_of_kinds(), rungs(), layouts(), DEVICES, LENGTHS)
def test_the_backward_peak_is_the_most_of_all_layers(shape, rung, layout, device, length):
    assume(shape.layers > 1)
    step = Step(shape, rung, layout, length, device)
    # of what is shared unevenly gradients are divided over the layers by their parameters
    assume(not any(step.uneven(each.kind) for each in shape.runs))
    layers = [each.kind for each in shape.runs for _ in range(each.count)]
    found = upper_footprint(Step(shape, rung, layout, length_tokens=length, device=device))
    _, last, other, *_ = found.phases
    on_the_host = rung.offloads_model and device == "cuda"
    come_late = rung.strategy == "fsdp" if on_the_host else not rung.keeps_gradients
    gradient_bytes = 4 if come_late else 0

    def of_layers(number: int) -> float:
        """One layer going backward, with what all before it keep and gradients of later ones."""
        kept = sum(formula.kept_bytes(step.layer(each)) for each in layers[: number + 1])
        gathered = layers[number].parameters
        if layout.shard_degree > 1 and number:
            gathered += layers[number - 1].parameters
        reduced = layers[number + 1].parameters if number + 1 < len(layers) else 0
        own = formula.working_set_bytes(step.layer(layers[number]))
        on_their_way = (2 if layout.replicate_degree > 1 else 1) * reduced
        behind = sum(each.parameters for each in layers[number + 1 :])
        come = gradient_bytes * behind / layout.shard_degree
        gathered_bytes = step.element_bytes * gathered + 4 * on_their_way
        return step.tokens * kept + own + gathered_bytes + come

    beside = last.bytes - of_layers(len(layers) - 1)
    most = max(map(of_layers, range(len(layers) - 1)))
    assert other.bytes - beside == pytest.approx(most, abs=4, rel=0)
    names = "kept by recompute", "activations of all layers", "one layer going backward"
    names = (*names, "layers, gathered", "gradient reduction")
    assert beside == sum(term.bytes for term in last.terms if term.name not in names)


@pytest.mark.parametrize("length", [1, 2, 1023, 1024, 1025, 4096, 100_000])
def test_attention_within_a_window_is_as_many_flops_as_pairs_of_tokens_that_read_each_other(length):
    shapes = (shape_with(run(3, kind(attention=each))) for each in (WINDOWED, FULL))
    windowed, full = (attention_flops(shape, length) for shape in shapes)
    window = WINDOWED.window_tokens
    per_pair = 3 * 3 * 2 * 2 * FULL.head_dim * FULL.query_heads  # 3 layers, 3 passes, 2 products
    pairs = sum(min(place + 1, window) for place in range(length))
    # A triangle of n tokens is n²/2 here, not n(n + 1)/2: PaLM's figure.
    assert windowed == per_pair * (2 * pairs - min(length, window)) // 2
    assert windowed == full if length <= window else windowed < full


def attention_flops(shape: ModelShape, length: int) -> int:
    flops = step_flops(shape, length_tokens=length, sequences=1, settings=Settings())
    return flops - 6 * shape.matmul_parameters * length


def layers_of(folder: Path, **config: Any) -> list[tuple[int, int | None, int, int]]:
    shape = written_model(folder, **config).shape
    assert sum(each.count for each in shape.runs) == shape.layers
    kinds = [(each.count, each.kind.attention, each.kind.mlp) for each in shape.runs]
    return [(count, one.window_tokens, mlp.experts, mlp.width) for count, one, mlp in kinds]


EXAONE = MIXTURE | {"model_type": "exaone_moe"}
SPARSE, DENSE_ONES = "sparse", ["dense", "dense"]
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        (MIXTURE | {"first_k_dense_replace": 2}, [(2, None, 1, 192), (4, None, 8, 32)]),
        (MIXTURE | {"first_k_dense_replace": 0}, [(6, None, 8, 32)]),
        (MIXTURE | {"first_k_dense_replace": 9}, [(6, None, 1, 192)]),
        (
            EXAONE
            | {"mlp_layer_types": [SPARSE, *DENSE_ONES, SPARSE, SPARSE, "dense"]}
            | {"sliding_window_pattern": 1},
            [(1, None, 8, 32), (2, None, 1, 192), (2, None, 8, 32), (1, None, 1, 192)],
        ),
        (
            GEMMA | {"sliding_window_pattern": 3},
            [*[(2, 512, 1, 192), (1, None, 1, 192)] * 2, (2, 512, 1, 192)],
        ),
        (
            EXAONE | {"first_k_dense_replace": 1, "sliding_window": 512},
            [(1, 512, 1, 192), (2, 512, 8, 32), (1, None, 8, 32), (2, 512, 8, 32)],
        ),
    ],
)
def test_layers_of_unlike_mlps_or_windows_are_runs_of_their_own(tmp_path, config, runs):
    assert layers_of(tmp_path, **config) == runs


WITH_WINDOWS = {
    **dict.fromkeys(("Mistral-7B-v0.1", "gemma-2-2b", "gemma-2-9b", "gemma-2-27b"), 4096),
    **dict.fromkeys(("Olmo-3-7B-Instruct", "Olmo-3.1-32B-Instruct"), 4096),
    **dict.fromkeys(("gemma-3-270m", "gemma-3-1b-pt"), 512),
    **dict.fromkeys(("gemma-3-4b-text", "gemma-3-12b-text", "gemma-3-27b-text"), 1024),
    **dict.fromkeys(("gemma-4-E2B-text", "gemma-4-E4B-text"), 512),
    **dict.fromkeys(("gemma-4-26B-A4B-text", "gemma-4-31B-text"), 1024),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), 128),
    **dict.fromkeys(("Phi-3.5-mini-instruct", "Phi-4-mini-instruct"), 262_144),
}
"""The models of the catalog whose documents name their layers, and their windows."""


@pytest.mark.parametrize("name", catalog_names())
def test_a_catalog_model_is_one_run_and_its_document_is_what_it_was(name):
    shape = load_model(name).shape
    assert from_json(to_json(shape), ModelShape) == shape
    if name in WITH_WINDOWS:
        assert shape.window_tokens == WITH_WINDOWS[name]
        return
    if shape.delta is not None:  # three layers of it, then one of attention
        assert [run.count for run in shape.runs] == [3, 1] * (shape.layers // 4)
        return
    assert len(shape.runs) == 1
    assert "layer_runs" not in to_json(shape)


def test_runs_that_are_not_the_layers_or_too_many_are_refused(tmp_path):
    whole = shape_with(run(3, kind()), run(2, kind(mlp=EXPERTS)))
    for changes in ({"layers": 6}, {"hidden_size": 64}, {"layer_runs": ()}):
        with pytest.raises(ModelError, match="the runs of a qwen3 are not its") as refusal:
            msgspec.structs.replace(whole, **changes)
        assert refusal.value.hint
    with pytest.raises(ModelError, match="describes 2147483647 layers") as refusal:
        written_model(tmp_path, num_hidden_layers=2**31 - 1)
    assert refusal.value.hint == "check its num_hidden_layers"


def linear_model(folder: Path, **fields: Any) -> Model:
    """A Qwen3.5 of its class's usual sizes, which are those of the 9B, but for some fields."""
    text = {"model_type": "qwen3_5_text", **fields}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(str(folder))


def test_layers_with_a_state_are_read_as_runs_between_those_that_attend(tmp_path):
    shape = linear_model(tmp_path).shape
    assert shape.parameters == 8_953_803_264
    assert [run.count for run in shape.runs] == [3, 1] * 8
    state, softmax = (run.kind.attention for run in shape.runs[:2])
    assert state.delta is not None
    assert (state.channels, state.query_heads, state.kv_heads) == (8192, 32, 16)
    assert (softmax.is_gated, softmax.delta, softmax.query_size) == (True, None, 4096)
    assert not shape.has_plain_attention
    kinds = ["full_attention", "linear_attention"]
    named = linear_model(tmp_path, num_hidden_layers=2, layer_types=kinds).shape
    assert [run.kind.attention.delta is None for run in named.runs] == [True, False]
    assert from_json(to_json(named), ModelShape) == named


def test_a_state_costs_flops_of_the_length_alone_and_gpus_share_it_by_key_heads(tmp_path):
    shape, settings = linear_model(tmp_path).shape, Settings()
    length, twice = (
        step_flops(shape, length_tokens=tokens, sequences=1, settings=settings)
        for tokens in (4096, 8192)
    )
    of_softmax = 8 * 3 * 2 * 4096 * (8192**2 - 2 * 4096**2)
    assert twice - 2 * length == of_softmax
    shape = linear_model(tmp_path, linear_num_key_heads=4).shape
    assert heads_obstacle(shape, 4) is None
    assert "4 key heads of linear attention" in heads_obstacle(shape, 8)
    assert ring_obstacle(shape, None) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"linear_num_key_heads": 5}, "32 value heads do not go with 5 key heads"),
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "layers of sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    ],
)
def test_a_state_of_which_no_layer_can_be_built_is_refused_by_its_field(tmp_path, fields, said):
    with pytest.raises(ModelError, match=said):
        linear_model(tmp_path, **fields)


def test_linear_attention_is_refused_to_trainers_that_nobody_has_compared(tmp_path):
    model = linear_model(tmp_path)
    assert other_class(model, "highwater") is None
    assert "nobody has compared how trl trains them" in str(other_class(model, "trl"))
