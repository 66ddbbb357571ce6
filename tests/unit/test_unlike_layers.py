"""Gemma 4: layers whose heads, keys and widths differ are read as their class has them, or refused
by the field that says so.
"""

from typing import Any

import pytest

from highwater.api.prediction import predict
from highwater.errors import ModelError, UsageError
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.formula.layers import Step, handed_bytes
from highwater.model.model import ModelShape
from highwater.nouns.cells import heads_obstacle, ring_obstacle
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora, adapter_matrices, refuse_no_target
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import OURS, TRAINERS
from highwater.recommendation.recommend import recommend
from tiny_models import written_model

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "sliding_window": 32,
    "global_head_dim": 48,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
    "use_double_wide_mlp": True,
}


def shape_of(tmp_path: Any, **changes: Any) -> ModelShape:
    return written_model(tmp_path, **{**GEMMA, **changes}).shape


def test_layers_differ_in_heads_keys_and_widths(tmp_path):
    shape = shape_of(tmp_path)
    kinds = [run.kind for run in shape.runs for _ in range(run.count)]
    assert [kind.attention.head_dim for kind in kinds] == [16, 48] * 3
    assert [kind.attention.window_tokens for kind in kinds] == [32, None] * 3
    assert [kind.attention.reads_earlier_keys for kind in kinds] == [False] * 4 + [True] * 2
    assert [kind.mlp.width for kind in kinds] == [192] * 4 + [384] * 2
    assert {kind.embedding_size for kind in kinds} == {8}
    assert [table.rows for table in shape.layer_tables] == [100, 48]
    assert shape.widest_head == 48


def test_heads_of_full_attention_are_read_of_either_form(tmp_path):
    ties = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    own = {"head_dim": 48, "num_key_value_heads": 1}
    written = {"per_layer_config": {"01": own, "3": own, "5": own}, "global_head_dim": None}
    assert shape_of(tmp_path, **ties) == shape_of(tmp_path, **ties, **written)
    assert shape_of(tmp_path).runs[1].kind.attention.kv_heads == 2
    assert shape_of(tmp_path, **ties).runs[1].kind.attention.kv_heads == 1
    shape = shape_of(tmp_path, num_global_key_value_heads=1)
    assert shape.runs[1].kind.attention.kv_heads == 2, "its class reads it with values as keys"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_moe_block": True}, "num_experts is None"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts is None"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"num_kv_shared_layers": 5}, "the last 5 of 6 layers"),
        ({"num_kv_shared_layers": 6}, "the last 6 of 6 layers"),
        ({"num_kv_shared_layers": 9}, "the last 9 of 6 layers"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers is '2'"),
        ({"hidden_size_per_layer_input": 0}, "no hidden_size_per_layer_input"),
        ({"global_head_dim": 0}, "global_head_dim is 0|head_dim is 0"),
        ({"per_layer_config": []}, "per_layer_config in"),
        ({"per_layer_config": {"1": {"head_dim": 48}}}, "per_layer_config in"),
        ({"per_layer_config": {"0": {"head_dim": 48}}}, "per_layer_config in"),
        (
            {"per_layer_config": {key: {"intermediate_size": 48} for key in "135"}},
            "per_layer_config in",
        ),
        (
            {"per_layer_config": {key: {"num_key_value_heads": 3} for key in "135"}},
            "4 query heads do not go with 3",
        ),
    ],
)
def test_what_its_class_does_not_build_is_refused_by_its_field(tmp_path, changes, said):
    with pytest.raises(ModelError, match=said) as refusal:
        shape_of(tmp_path, **changes)
    assert refusal.value.hint


def test_the_last_layer_attends_in_full_whatever_its_kind_is(tmp_path):
    kinds = [SLIDING, FULL, SLIDING, SLIDING]
    shape = shape_of(tmp_path, layer_types=kinds, num_hidden_layers=4, num_kv_shared_layers=0)
    assert shape.runs[-1].kind.attention.window_tokens is None


def test_no_ring_attends_with_heads_wider_than_kernels_take(tmp_path):
    assert ring_obstacle(shape_of(tmp_path), 16) is None
    wide = shape_of(tmp_path, global_head_dim=512)
    assert "heads of 512 numbers" in str(ring_obstacle(wide, 16))
    ties = {"attention_k_eq_v": True, "num_global_key_value_heads": 4}
    uneven = shape_of(tmp_path, num_attention_heads=12, num_key_value_heads=3, **ties)
    assert "3 key/value heads" in str(heads_obstacle(uneven, 4))


def test_layers_without_keys_have_no_adapters_on_them(tmp_path):
    shape = shape_of(tmp_path)
    lora = Lora(rank=4, alpha=8.0, targets="k_proj")
    counts = [len(adapter_matrices(run.kind, shape.model_type, lora)) for run in shape.runs]
    assert counts == [2] * 4 + [0] * 2
    with pytest.raises(UsageError, match="projection of embeddings for its layers"):
        refuse_no_target(shape, Lora(rank=4, alpha=8.0))


@pytest.mark.parametrize("name", ["gemma-4-E2B-text", "gemma-4-E4B-text", "gemma-4-31B-text"])
def test_memory_is_predicted_and_no_time_of_a_step_made_up(name):
    found = predict(name, gpus="8xH100-80GB", length=32_768)
    assert any(cell.capacity_tokens for cell in found.cells)
    assert all(cell.step is None for cell in found.cells)
    assert any("blocks of matrix products" in note for note in found.notes)
    with pytest.raises(UsageError, match="how fast heads of 512") as refusal:
        recommend(name, gpus="8xH100-80GB", length=32_768, aim="fastest")
    assert "--lightest" in str(refusal.value.hint)
    for trainer in {*TRAINERS} - {OURS}:
        with pytest.raises((ModelError, UsageError), match="gemma4_text"):
            predict(name, gpus="8xH100-80GB", length=32_768, trainer=trainer)


def test_layers_of_a_form_that_no_trace_had_are_refused(tmp_path):
    ties = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 512}
    model = written_model(tmp_path, **{**GEMMA, **ties})
    with pytest.raises(ModelError, match="no trace was read of their form"):
        refuse_unknown_family(model)


def test_keys_are_held_until_their_layer_is_recomputed_and_gradients_from_the_last_reader(tmp_path):
    """Six layers, of which the last two read keys of the third and fourth: 2 heads of 16 and 48."""
    shape = shape_of(tmp_path)
    step = Step(shape, Settings(), Layout(), length_tokens=64)
    windowed, full = 2 * 2 * 2 * 16, 2 * 2 * 2 * 48
    embeddings = [2 * 48 + 2 * 48 + 4 * 6 + 2 * 8 * behind for behind in range(6)]
    assert [handed_bytes(step, layers) - embeddings[6 - layers] for layers in range(6, 0, -1)] == [
        windowed + full,
        windowed + 2 * full,
        2 * windowed + full,
        windowed,
        0,
        0,
    ]
