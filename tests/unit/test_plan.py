"""Plans: a request and a machine make a question, or an error before anything starts."""

import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import MachineError, UsageError
from highwater.model import held_bytes
from highwater.model.layer_kind import Matrices
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from highwater.model.rope import yarn
from highwater.nouns.corpus import pieces
from highwater.nouns.hardware import CPU_SEARCH, Machine
from highwater.nouns.layout import Layout
from highwater.nouns.plan import Plan, plan, plan_trial
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.units import GIB, MIB
from places import H200, NO_GPU, machine_with, write_safetensors
from tables import table
from tiny_models import write_model, written_model


def planned(machine: Machine, **settings: Any) -> Plan:
    return plan(request_from({"model": "Qwen3-0.6B", **settings}), machine)


def planned_trial(machine: Machine, length_tokens: int, **settings: Any) -> TrialSpec:
    return plan_trial(request_from({"model": "Qwen3-0.6B", **settings}), machine, length_tokens)


@pytest.mark.parametrize(
    ("present", "counts"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])],
)
def test_by_default_every_rung_is_searched_on_every_power_of_two_of_gpus(present, counts):
    cells = planned(machine_with(present)).question.cells
    rungs = ("nothing set", "expandable", "expandable, chunked loss")
    gpus = [f"{count} GPU{'s' if count > 1 else ''}" for count in counts]
    assert [cell.label for cell in cells] == [f"{rung}, {each}" for each in gpus for rung in rungs]


def test_more_gpus_than_present_are_refused_with_a_count_that_works():
    with pytest.raises(MachineError, match=r"8 GPUs .* 2 ") as refusal:
        planned(machine_with(2), gpus=[1, 2, 4, 8])
    assert refusal.value.hint == "use `--gpus 1 2`"
    planned(machine_with(2), gpus=[1, 2])


@pytest.mark.parametrize(
    ("settings", "length", "said"),
    [
        ({"attention_depth": 28}, 131_072, "Qwen3-0.6B has 28 layers"),
        ({"attention_depth": 0}, 131_072, "an attention depth of 0"),
        ({"attention_depth": 1}, 131_071, "cannot be cut"),
    ],
)
def test_a_memory_only_trial_that_would_be_none_is_refused(settings, length, said):
    with pytest.raises(UsageError, match=said) as refusal:
        planned_trial(machine_with(1), length, **settings)
    named = re.search(r"`--length (\d+)`", refusal.value.hint)
    if named:
        planned_trial(machine_with(1), int(named[1]), **settings)


def test_a_search_proves_by_memory_under_the_time_limit_of_a_trial():
    by_memory, in_full = (
        planned(machine_with(1), timeout="5m", proof=proof).question for proof in ("memory", "full")
    )
    assert (by_memory.proof, by_memory.timeout_s) == ("memory", 300)
    assert (in_full.proof, in_full.timeout_s) == ("full", None), "no answer depends on it"
    cell = by_memory.cells[0]
    assert by_memory.trial(cell, 8192).key == in_full.trial(cell, 8192).key
    assert by_memory.trial(cell, 8192, memory_only=True).attention_depth == 1


def test_a_model_of_one_layer_has_nothing_to_save(tmp_path):
    directory = str(write_model(tmp_path / "one", num_hidden_layers=1))
    with pytest.raises(UsageError, match="one layer"):
        planned(machine_with(1), model=directory, proof="memory")


@given(st.integers(2, 3_000_000), st.sampled_from(["cuda", "cpu"]))
def test_pieces_cut_a_run_evenly_into_lengths_that_kernels_treat_alike(tokens, device):
    count = pieces(tokens, device)
    if count is None or count == 1:
        assert count is None or tokens <= 16_384
        return
    assert tokens % count == 0
    shortest, longest = (4096, 16_384) if device == "cuda" else (768, 1535)
    assert shortest <= tokens // count <= longest


@given(st.integers(1, 1024))
def test_every_length_of_the_usual_grid_can_be_cut(steps):
    assert pieces(4096 * steps, "cuda") is not None
    assert pieces(4096 * steps, "cpu") is not None


def test_without_a_gpu_the_search_is_on_the_cpu_where_that_or_a_memory_limit_is_named():
    with_torch = msgspec.structs.replace(NO_GPU, versions={"torch": "2.13.0"})
    for machine, hint in ((with_torch, CPU_SEARCH), (NO_GPU, "`highwater predict Qwen3-0.6B ")):
        with pytest.raises(UsageError, match="neither the CPU nor a memory limit is") as refusal:
            planned(machine)
        assert hint in refusal.value.hint
    question = planned(NO_GPU, memory="2GiB").question
    assert (question.device, question.device_name, len(question.cells)) == ("cpu", "CPU", 2)


@pytest.mark.parametrize(
    ("free_bytes", "settings", "limit_bytes"),
    [
        (20 * GIB, {}, 8 * GIB),
        (64 * GIB, {"gpus": [1, 2]}, 8 * GIB),
        (12 * GIB, {}, 6 * GIB),
        (12 * GIB, {"gpus": [1, 2]}, 3 * GIB),
        (12 * GIB, {"gpus": [2], "max_concurrent_trials": 2}, GIB + GIB // 2),
        (12 * GIB + 9 * MIB, {}, 6 * GIB),
        (GIB, {"gpus": [1, 2]}, 256 * MIB),
        (64 * MIB, {}, 128 * MIB),
    ],
)
def test_on_the_cpu_the_limit_is_a_share_of_half_of_the_free(free_bytes, settings, limit_bytes):
    """A search, one trial and a foreign trainer have one answer; who names a limit has that."""
    machine = msgspec.structs.replace(NO_GPU, host_memory_available_bytes=free_bytes)
    found = planned(machine, device="cpu", **settings)
    assert found.question.memory_budget_bytes == limit_bytes
    (note,) = [note for note in found.notes if "--memory" in note]
    (again,) = re.findall(r"`--memory (\w+)`", note)
    asked = planned(NO_GPU, device="cpu", memory=again, **settings)
    assert asked.question.key == found.question.key
    assert not [note for note in asked.notes if "no `--memory`" in note]
    alone = {**settings, "gpus": [max(settings.get("gpus", [1]))]}
    request = request_from({"model": "Qwen3-0.6B", "device": "cpu", **alone})
    assert plan_trial(request, machine, 256).memory_budget_bytes == limit_bytes


@pytest.mark.parametrize(
    ("settings", "said"), table("plan", "settings_that_cannot_work_are_refused")
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        planned(machine_with(1), **settings)


def test_random_weights_are_said_wherever_something_trains_with_them(tmp_path):
    model = write_model(tmp_path / "m")
    file = model / "model.safetensors"
    reward = {"objective": "rw", "sequences_per_micro_batch": 2}

    def said(**settings: Any) -> str:
        return "".join(planned(machine_with(1), model=str(model), gpus=[1], **settings).notes)

    assert said().startswith("random weights: m ")
    nothing = {"device": "cuda", "memory": "80GiB", "dry_run": True}
    assert planned(NO_GPU, model=str(model), **nothing).notes == ()
    write_safetensors(file, {"model.embed_tokens.weight": ("F32", (1000, 64))})
    assert said() == ""
    assert said(**reward).startswith("random weights in the head")
    write_safetensors(file, {"score.weight": ("F32", (1, 64))})
    assert said(**reward) == ""


def besides_weights(result: Plan) -> tuple[str, ...]:
    return tuple(note for note in result.notes if not note.startswith("random weights"))


def test_what_this_machine_cannot_run_is_refused():
    with pytest.raises(MachineError, match=r"9 processes .* 2 CPU") as refusal:
        planned(NO_GPU, memory="100MiB", gpus=[9], device="cpu")
    assert refusal.value.hint == "use `--gpus 8` or fewer"
    planned(NO_GPU, memory="100MiB", gpus=[8], device="cpu")
    planned(NO_GPU, memory="100MiB", gpus=[64], device="cpu", dry_run=True)
    other = msgspec.structs.replace(H200, index=1, name="NVIDIA A100-SXM4-80GB")
    both = msgspec.structs.replace(NO_GPU, gpus=(H200, other))
    with pytest.raises(UsageError, match="different kinds") as refusal:
        planned(both)
    assert "`CUDA_VISIBLE_DEVICES=0`" in refusal.value.hint


def test_a_length_that_is_named_is_searched_to_on_the_cpu_too():
    assert planned(NO_GPU, memory="2GiB").question.grid.max_tokens == 8192
    assert planned(NO_GPU, memory="2GiB", start_length="16k").question.grid.max_tokens == 16384
    assert planned(NO_GPU, memory="2GiB", max_length="64k").question.grid.max_tokens == 65536


def test_degrees_that_cannot_share_a_sequence_are_skipped_and_said():
    result = planned(machine_with(4), gpus=[1, 4], ulysses=[1, 2, 3])
    layouts = [(cell.layout.gpus, cell.layout.ulysses_degree) for cell in result.question.cells]
    assert layouts[::3] == [(1, 1), (4, 1), (4, 2)]
    assert len(besides_weights(result)) == 3
    assert any(note.startswith("Ulysses 3 on 4 GPUs is skipped") for note in result.notes)


def test_a_degree_that_does_not_divide_the_heads_is_skipped(tmp_path):
    model = str(write_model(tmp_path / "m", num_attention_heads=6, num_key_value_heads=6))
    with pytest.raises(UsageError, match=r"4 .* 6 query heads"):
        planned(machine_with(4), model=model, gpus=[4], ulysses=[4])


@pytest.mark.parametrize(("kv_heads", "refused"), [(4, [3, 6]), (6, [4]), (12, []), (1, [])])
def test_sp_and_the_kv_heads_have_to_divide_one_another(tmp_path, kv_heads, refused):
    model = str(write_model(tmp_path / "m", num_attention_heads=12, num_key_value_heads=kv_heads))
    degrees = [1, 2, 3, 4, 6, 12]
    result = planned(machine_with(12), model=model, gpus=[12], ulysses=degrees)
    tried = {cell.layout.ulysses_degree for cell in result.question.cells}
    assert tried == set(degrees) - set(refused)
    for degree in refused:
        why = f"{degree} and the model's {kv_heads} key/value heads do not divide each other"
        assert any(note.startswith(f"Ulysses {degree} ") and why in note for note in result.notes)


def test_a_model_with_its_own_rope_scaling_is_searched_up_to_its_maximum():
    result = planned(machine_with(1), model="Llama-3.1-8B")
    assert result.question.grid.max_tokens == 131072
    assert "`--rope yarn`" in result.notes[0]
    scaled = {"model": "Llama-3.1-8B", "rope": "yarn"}
    assert planned(machine_with(1), **scaled).question.grid.max_tokens == 1024**2
    assert planned_trial(machine_with(1), 262144, **scaled).length_tokens == 262144


def test_scaling_that_grows_with_the_length_has_no_end_and_needs_no_yarn(tmp_path):
    grows = {"rope_type": "dynamic", "factor": 2.0}
    model = str(write_model(tmp_path / "m", rope_scaling=grows))
    result = planned(machine_with(1), model=model)
    assert result.question.grid.max_tokens == 1024**2
    assert besides_weights(result) == ()
    assert planned_trial(machine_with(1), 8192, model=model).length_tokens == 8192
    assert yarn(load_model(model), length_tokens=8192) is None
    assert yarn(load_model(model), length_tokens=8192, rope="yarn") is not None
    fixed = str(write_model(tmp_path / "fixed", rope_scaling={**grows, "alpha": 1000.0}))
    assert planned(machine_with(1), model=fixed).question.grid.max_tokens == 4096


@pytest.mark.parametrize("rope", ["auto", "yarn"])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 2},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ],
)
def test_a_rope_for_each_kind_of_layer_is_not_scaled(tmp_path, rope, config):
    model = str(write_model(tmp_path / "m", **config))
    result = planned(machine_with(1), model=model, rope=rope)
    assert result.question.grid.max_tokens == 4096
    assert any("RoPE for each kind" in note for note in result.notes)
    with pytest.raises(UsageError, match="RoPE for each kind") as refusal:
        planned_trial(machine_with(1), 8192, model=model, rope=rope)
    assert refusal.value.hint == "use `--length 4096`"


def test_yarn_is_refused_where_a_family_cannot_have_it_or_not_in_its_files(tmp_path):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scales = {"short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 1024}
    longrope = {"rope_scaling": {"rope_type": "longrope", **factors, **scales}}
    phimoe, phi3 = (
        str(write_model(tmp_path / name, model_type=name, attention_dropout=0.0, **longrope))
        for name in ("phimoe", "phi3")
    )
    saved = {"model": phi3, "save_hf": "last"}
    no_rope = ({"model": phimoe}, "phimoe scales cosines", "--rope")
    for asked, said, flag in (no_rope, (saved, r"phi3 .* no YaRN", "--save-hf")):
        with pytest.raises(UsageError, match=said) as refusal:
            planned(machine_with(1), **asked, rope="yarn")
        assert refusal.value.hint == f"leave `{flag}` out"
        assert planned(machine_with(1), **asked).question.grid.max_tokens == 4096
    assert planned(machine_with(1), model=phi3, rope="yarn").question.grid.max_tokens == 1024**2


@pytest.mark.parametrize("rope", ["auto", "yarn"])
def test_a_model_without_rope_is_searched_up_to_its_native_length_by_any_rope(tmp_path, rope):
    model = str(write_model(tmp_path / "m", model_type="opt", max_position_embeddings=10_000))
    result = planned(machine_with(1), model=model, rope=rope)
    grid = result.question.grid
    assert [grid.length(index) for index in range(1, grid.size + 1)] == [4096, 8192]
    (note,) = besides_weights(result)
    assert "10,000" in note
    assert "opt has no RoPE" in note


def test_a_trial_past_positions_without_rope_is_refused_with_a_length_that_works(tmp_path):
    model = str(write_model(tmp_path / "m", model_type="opt", max_position_embeddings=2048))
    problem = "4,096 .* 2,048 .*opt has no RoPE"
    with pytest.raises(UsageError, match=problem) as refusal:
        planned_trial(machine_with(1), 4096, model=model, rope="yarn")
    assert refusal.value.hint == "use `--length 2048`"
    assert planned_trial(machine_with(1), 2048, model=model).length_tokens == 2048
    with pytest.raises(UsageError, match=problem) as refusal:
        planned(machine_with(1), model=model)
    assert "`--start-length 2048`" in refusal.value.hint
    assert planned(machine_with(1), model=model, start_length=2048).question.grid.size == 1


def test_one_trial_takes_the_cheapest_rung_unless_another_is_named():
    assert planned_trial(machine_with(2), 4096).settings.label == "vanilla"
    named = {"loss": "chunked", "allocator": "expandable", "gpus": [2]}
    trial = planned_trial(machine_with(2), 4096, **named)
    assert (trial.settings.label, trial.layout.gpus) == ("Env + chunked", 2)


def test_offloaded_states_that_the_host_cannot_hold_are_refused_before_anything_starts():
    asked = {"model": "Qwen3-4B", "offload": True}
    with pytest.raises(MachineError, match=r"Qwen3-4B on 1 GPU .* 24\.00 GiB") as refusal:
        planned(machine_with(1), **asked)
    assert refusal.value.hint == "leave `--offload` out"
    planned(machine_with(1), **asked | {"offload": False})
    planned(machine_with(1), **asked, dry_run=True)
    dpo = {"model": "Qwen3-14B", "objective": "dpo", "sequences_per_micro_batch": 2}
    with pytest.raises(MachineError, match="the reference of Qwen3-14B on 1 GPU take") as refusal:
        planned(machine_with(1), **dpo)
    assert refusal.value.hint == "use `--objective rw`, which has no reference"
    planned(machine_with(1), **dpo | {"objective": "rw"})
    larger = msgspec.structs.replace(machine_with(4), host_memory_total_bytes=128 * GIB)
    assert besides_weights(planned(larger, **asked)) == ()


@pytest.mark.parametrize("name", catalog_names())
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_offloaded_states_take_16_or_20_bytes_a_parameter_and_pinned_rounding(name, gpus):
    shape = load_model(name).shape
    in_matrices = sum(count * rows * size for count, rows, size in held_bytes.matrices(shape))
    assert in_matrices == pytest.approx(shape.parameters, rel=1e-3)

    def of_a_parameter(**settings: Any) -> float:
        held = held_bytes.host_state_bytes(shape, Settings(**settings), layout=Layout(gpus=gpus))
        return held / shape.parameters

    assert 15.99 <= of_a_parameter(offload=True) < 20
    assert 1.99 <= of_a_parameter(objective="grpo") < 4, "the reference, in bfloat16"
    assert of_a_parameter() == 0
    assert 20 <= of_a_parameter(strategy="fsdp", offload=True) < 28


def test_offloaded_gradients_of_layers_with_and_without_experts_have_their_own_blocks(tmp_path):
    def staged(dense_layers: int) -> int:
        sizes = {"num_hidden_layers": 12, "intermediate_size": 8192, "model_type": "glm4_moe"}
        shape = written_model(tmp_path, **sizes, first_k_dense_replace=dense_layers).shape
        return held_bytes.staged_gradient_bytes(
            shape, Settings(offload=True), layout=Layout(gpus=2)
        )

    found = [staged(dense) for dense in (0, 1, 3, 4, 9)]
    assert found == sorted(found), "three layers of experts are among them all the time"
    assert found[2:] == [found[2]] * 3, "of those without, three at the most"
    assert staged(12) < found[0]


@pytest.mark.parametrize("name", catalog_names())
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_fsdp2s_offloaded_gradients_pass_through_blocks_for_a_few_layers(name, gpus):
    shape = load_model(name).shape
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    outside += sum(each.rows * each.row_size for each in shape.layer_tables)
    layers = Counter[tuple[Matrices, ...]]()
    for run in shape.runs:  # layers of other matrices pass through other blocks
        layers[run.kind.matrices] += run.count
    passing = 0
    for of_one, count in layers.items():
        numbers = sum(each.number * each.rows * each.row_size for each in of_one)
        passing += min(count, held_bytes.STAGED_LAYERS) * numbers

    def staged(**settings: Any) -> int:
        return held_bytes.staged_gradient_bytes(
            shape, Settings(**settings), layout=Layout(gpus=gpus)
        )

    alone = staged(offload=True)
    assert 0.99 < alone / (4 * (outside + passing)) <= 2
    for elsewhere in ({}, {"strategy": "fsdp", "offload": True}, {"objective": "grpo"}):
        assert staged(**elsewhere) == 0
    assert staged(objective="ppo", critic=True, offload=True) == alone, "one model after the other"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "fsdp2"}, ()),
        ({"strategy": "fsdp"}, ("FSDP1 offloads parameters and optimizer states; a gradient",)),
        (
            {"device": "cpu", "memory": "1GiB"},
            ("on the CPU lengths end", "on the CPU offload chan"),
        ),
    ],
)
def test_what_offload_does_not_do_is_said(settings, said):
    notes = besides_weights(planned(machine_with(1), offload=True, **settings))
    assert len(notes) == len(said)
    assert all(note.startswith(start) for note, start in zip(notes, said, strict=True))
    assert not any("offload" in note for note in planned(machine_with(1), **settings).notes)
