"""Reward models, PPO, rings, FSDP1's offload and experts, traced: beside the closed form, shapes,
and a real step on the CPU.
"""

from itertools import accumulate, dropwhile, takewhile
from typing import Any

import pytest
import torch

pytest.importorskip("torchao", reason="moments of few bits need the low-bit extra")

from forked_python import answer
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import (
    RING,
    SHARED,
    alive_at,
    formula_bytes,
    peak_bytes,
    requested_bytes,
    shape_of,
    traced,
    trial,
)

from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.memory.trace.replay import replay
from highwater.model.held_bytes import device_state_bytes, gradient_bytes
from highwater.model.model import load_model
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from tables import deep
from tiny_models import config_of, sized

TINY = config_of("tiny") | {"vocab_size": 20_000}
EXPERTS = sized(1024, 128, 2, (2, 1), head_dim=64, max_position_embeddings=32_768)
EXPERTS |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
EXPERTS |= {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 6}
EXPERTS |= {"router_aux_loss_coef": 0.001, "output_router_logits": False}
"""Many experts per token, and small ones: at the peak most bytes are copies of tokens for them."""
WIDE = EXPERTS | {"moe_intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2}
"""Few and wide ones, as Mixtral has them: at the peak most bytes are their products."""
DEEP = TINY | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "vocab_size": 256,
}
"""Nearly all of its parameters are in its layers, each a small part of them."""
WIDE_HEADS = DEEP | {"head_dim": 128}
"""At the peak most bytes are queries, keys, values and what a ring passes of their gradients."""
MANY_HEADS = WIDE_HEADS | {"num_attention_heads": 8, "num_key_value_heads": 4}
PLAIN_HEADS = MANY_HEADS | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
"""Without norms of queries and keys."""
GROUPED = {"attention_head_groups": 2, "config": MANY_HEADS, "length_tokens": 16_384}
SCALED = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0}
"""Factors of logits and of what attention and MLP return."""
MORE_EXPERTS = EXPERTS | {"num_attention_heads": 8, "num_key_value_heads": 4}
WINDOWS = WIDE_HEADS | {
    "model_type": "ministral",
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Layers of two kinds in turn, of which one reads a part of each document."""
CHUNKED = {"loss": "chunked"}
TWO = {"gpus": 2}
PAIRS = {"objective": "rw", "sequences_per_micro_batch": 2}
PREFERENCES = {"objective": "dpo", "sequences_per_micro_batch": 2}
CRITIC = {"objective": "ppo", "critic": True}
ONE = {**CHUNKED, "accumulates": False, "micro_batches": 1}
SHORT = {"config": DEEP, "length_tokens": 64}
MANY_LAYERS = {"config": DEEP | {"num_hidden_layers": 8}, "length_tokens": 64}
FSDP = {**MANY_LAYERS, "strategy": "fsdp", "offload": True}
HEAD = {
    "config": TINY | {"vocab_size": 80_000, "tie_word_embeddings": False},
    "length_tokens": 32,
    **TWO,
}
"""Most of its parameters are the head's."""
KEPT = {"recompute": "all-but-attention"}
LOSSY = ("adamw-8bit", "adamw-bf16")
"""Optimizers that need torchao."""
BF16 = {**ONE, "parameters": "bf16"}
TRIALS: dict[str, dict[str, Any]] = {
    "rw": PAIRS,
    "dpo": PREFERENCES,
    "dpo, shared": {**PREFERENCES, **CHUNKED, **SHARED},
    "ring": {**CHUNKED, "offload": True, "config": WIDE_HEADS, **RING},
    "ring, copies": {
        **CHUNKED,
        "config": WIDE_HEADS,
        "gpus": 4,
        "ring_degree": 2,
        "replicate_degree": 2,
    },
    "windows": {**CHUNKED, "config": WINDOWS},
    "windows, output norms": {**CHUNKED, "config": WINDOWS | {"model_type": "olmo3"}},
    "windows, shared": {**CHUNKED, **KEPT, "config": WINDOWS, **SHARED},
    "ppo": {"objective": "ppo"},
    "ppo, critic": CRITIC,
    "ppo, critic, shared": {**CRITIC, **SHARED},
    "fsdp, offload": {**FSDP, "micro_batches": 2},
    "fsdp, offload, 2 shards": {**FSDP, **TWO},
    "fsdp2, offload": {**MANY_LAYERS, "offload": True},
    "one micro-batch": {**ONE, **SHORT},
    "one micro-batch, 2 shards": {**ONE, **SHORT, **TWO},
    "one micro-batch, longer": {**ONE, "config": DEEP, **SHARED},
    "one micro-batch, fsdp": {**ONE, "strategy": "fsdp", "config": DEEP, **TWO},
    "one micro-batch, critic": {**ONE, **CRITIC},
    "one micro-batch, head alone": {**ONE, **HEAD},
    "head groups": {**CHUNKED, **GROUPED},
    "head groups, kept": {**CHUNKED, **KEPT, **GROUPED, "config": PLAIN_HEADS},
    "head groups, shared": {**CHUNKED, **GROUPED, **SHARED},
    "head groups, kept, shared": {**CHUNKED, **KEPT, **GROUPED, **SHARED, "config": PLAIN_HEADS},
    "head groups, windows": {**CHUNKED, **GROUPED, "config": WINDOWS},
    "head groups, host": {**CHUNKED, **KEPT, **GROUPED, "activations": "host"},
    "head groups, adapters": {**CHUNKED, **GROUPED, "attention_head_groups": 4, "lora": 8},
    "head groups, experts": {**CHUNKED, "attention_head_groups": 2, "config": MORE_EXPERTS},
    "scaled, logits": {"config": TINY | SCALED | {"vocab_size": 80_000}},
    "scaled, layers": {**CHUNKED, "config": DEEP | SCALED},
    "scaled, heads": {**CHUNKED, "config": WIDE_HEADS | SCALED},
    "scaled, no recompute": {"recompute": "none", "config": DEEP | SCALED},
    "scaled, shared": {**CHUNKED, "config": DEEP | SCALED, **SHARED},
    **{
        f"{name}, {gpus} shards": {**CHUNKED, **SHORT, "optimizer": name, "gpus": gpus}
        for name in LOSSY
        for gpus in (1, 2)
    },
    **{
        f"adamw-8bit, bf16 parameters, {gpus} shards": {
            **BF16,
            **SHORT,
            "optimizer": "adamw-8bit",
            "gpus": gpus,
        }
        for gpus in (1, 2)
    },
    "adamw-bf16, bf16 parameters, head alone": {**BF16, **HEAD, "optimizer": "adamw-bf16"},
    "adamw-8bit, update": {
        **ONE,
        "optimizer": "adamw-8bit",
        "length_tokens": 32,
        "config": TINY | {"vocab_size": 80_000},
    },
    "adamw-8bit, one micro-batch": {**ONE, **SHORT, "optimizer": "adamw-8bit", **TWO},
    "experts": {"config": EXPERTS},
    "experts, longer": {"config": EXPERTS, "length_tokens": 32_768},
    "balanced experts": {"config": EXPERTS | {"output_router_logits": True}},
    "wide experts": {"config": WIDE},
    "wide experts, longer": {"config": WIDE, "length_tokens": 32_768},
    "experts, tiles": {"config": EXPERTS, "length_tokens": 65_536},
    "experts, tiles of a GPU": {"config": EXPERTS, "length_tokens": 131_072, **SHARED},
    "experts, tiles asked for": {"config": WIDE, "recompute": "none", "mlp_tiles": 5},
    "experts, heavy weights": {
        "config": EXPERTS | {"moe_intermediate_size": 1024, "num_experts": 32},
        "mlp_tiles": 32,
        **TWO,
    },
}
LENGTH = 16_384
USUAL = {"config": TINY, "length_tokens": LENGTH}
OTHERS = ("rw", "fsdp, offload", "fsdp, offload, 2 shards", "fsdp2, offload")
"""Whose peak is told below."""
EXPERTS_ALONE = [name for name in TRIALS if "experts" in name and "groups" not in name]
BESIDE_THE_FORMULA = [name for name in TRIALS if name not in (*OTHERS, *EXPERTS_ALONE)]
EVERYDAY = deep(*BESIDE_THE_FORMULA) or (
    *("ppo, critic", "dpo, shared", "ring, copies", "windows, shared", "scaled, heads"),
    *("one micro-batch, 2 shards", "one micro-batch, critic", "one micro-batch, head alone"),
    *("head groups, kept, shared", "head groups, windows", "head groups, adapters"),
    *("adamw-8bit, bf16 parameters, 2 shards", "adamw-bf16, bf16 parameters, head alone"),
)
"""One of each term, and of each way to divide it."""
FORMULA_TOLERANCE = 0.01
"""Relative: what is no larger than one row of numbers per token is no term of the formula."""
CPU_TOLERANCE = 0.005
"""Relative: the CPU's norms and attention keep another few numbers per token."""
REAL = [
    pytest.param("Qwen3-0.6B", 32_768, PAIRS, Layout(), id="rw"),
    *deep(
        pytest.param(
            "Qwen3-0.6B", 65_536, {**PREFERENCES, "loss": "chunked"}, Layout(gpus=4), id="dpo"
        ),
        pytest.param(
            "Llama-3.1-8B",
            131_072,
            {**CHUNKED, "lora": 32, "attention_head_groups": 4},
            Layout(),
            id="head groups",
        ),
        pytest.param(
            "Qwen3-0.6B",
            131_072,
            {"objective": "ppo", "critic": True, "loss": "chunked"},
            Layout(),
            id="ppo",
        ),
        pytest.param(
            "Qwen3-30B-A3B",
            131_072,
            {"loss": "chunked"},
            Layout(gpus=8, ulysses_degree=8),
            id="experts",
        ),
    ),
]
REAL_TOLERANCE = 0.001
"""Relative: beside a whole model, a few rows of numbers per token are less than that."""
ON_THE_CPU = """
import sys, torch
import layer
from highwater.engine.training.step import backward_of
from highwater.engine.parallel.mesh import join_alone

join_alone(torch.device("cpu"))
model, mesh = layer.model_of(sys.argv[1], torch.device("cpu", 0), None)
trainer = layer.training_of(model, mesh)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "mlp.gate." in name:
            parameter.mul_(float(sys.argv[2]))
peaks = []
for tokens in (256, 4096, 6144):  # the first makes the gradients
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        backward_of(trainer, [layer.batch_of(tokens)])
    found = profile.profiler.kineto_results.events()
    events = [event for event in found if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    peaks.append(most)
print((peaks[2] - peaks[1]) / 2048)
"""
"""Bytes per token at the peak, by what the CPU's allocator tells the profiler: nothing watches the
operators. Of fewer tokens blocks of a fixed size are not full."""


@pytest.mark.parametrize("name", [*EVERYDAY, *EXPERTS_ALONE])
def test_a_step_peaks_where_the_formula_says(specs, logs, name):
    said = formula_bytes(specs[name])
    assert peak_bytes(logs[name]) == pytest.approx(said, rel=FORMULA_TOLERANCE)


def test_a_critic_has_parameters_gradients_and_moments_of_its_own(specs, logs):
    shape = shape_of(specs["ppo"])
    # tied: the embedding stays, a number per token comes to it
    critic = shape.parameters + shape.hidden_size
    alone, both = (
        sum(alive_at(logs[name], "rehearsal").values()) for name in ("ppo", "ppo, critic")
    )
    assert alone == pytest.approx(16 * shape.parameters, rel=1e-3)
    assert both - alone == pytest.approx(16 * critic, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in EVERYDAY if name.startswith("one micro")])
def test_gradients_of_one_micro_batch_are_there_from_its_backward_pass_to_its_update(
    specs, logs, name
):
    shape, shards = shape_of(specs[name]), specs[name].layout.shard_degree
    trained = [shape.parameters] + (
        [shape.parameters + shape.hidden_size] if specs[name].settings.critic else []
    )
    lasting = 12 * sum(trained) / shards
    log, states = logs[name], alive_at_each_entry(logs[name])
    for phase in ("rehearsal", "experience", "forward"):
        of_ids = 0.01 * lasting
        assert states[phase] == pytest.approx([lasting] * len(states[phase]), abs=of_ids), phase
    each_update = [lasting + 4 * parameters / shards for parameters in reversed(trained)]
    assert states["optimizer"] == pytest.approx(each_update * specs[name].steps, rel=0.01)
    assert sum(alive_at(log, "the end").values()) == pytest.approx(lasting, rel=0.01)


@pytest.mark.parametrize("name", [name for name in EVERYDAY if name.startswith(LOSSY)])
def test_moments_of_few_bits_take_what_is_counted(specs, logs, name):
    """From the start; and an update makes little besides, a piece at a time."""
    spec, shape = specs[name], shape_of(specs[name])
    shards = spec.layout.shard_degree
    states = device_state_bytes(shape, spec.settings, device="cuda", shards=shards) // shards
    if not spec.settings.accumulates:
        states -= gradient_bytes(shape, spec.settings) // shards
    assert sum(alive_at(logs[name], "rehearsal").values()) == pytest.approx(states, rel=3e-4)


def alive_at_each_entry(log: EventLog) -> dict[str, list[int]]:
    """Bytes that are alive as each phase begins, every time."""
    alive, found = dict[int, int](), dict[str, list[int]]()
    for event in log.events:
        match event:
            case Allocate():
                alive[event.id] = event.bytes
            case Free() | GiveBack():
                alive.pop(event.id, None)
            case Enter():
                found.setdefault(event.phase, []).append(sum(alive.values()))
            case _:
                pass
    return found


def test_a_reference_leaves_the_device_between_its_layers(specs, logs):
    states = sum(alive_at(logs["dpo"], "rehearsal").values())
    assert states == pytest.approx(16 * shape_of(specs["dpo"]).parameters, rel=1e-3)
    beforehand = requested_bytes(logs["dpo"])["experience"]
    assert beforehand > states, "it runs"
    assert beforehand < requested_bytes(logs["dpo"])["forward"]


def test_a_reward_model_has_states_and_no_logits(specs, logs):
    shape = shape_of(specs["rw"])
    states = sum(alive_at(logs["rw"], "rehearsal").values())
    assert states == pytest.approx(16 * (shape.parameters + shape.hidden_size), rel=1e-3)
    largest = max(event.bytes for event in logs["rw"].events if isinstance(event, Allocate))
    assert largest < 2 * LENGTH * shape.vocab_size / 10
    pairs, ppo = (
        replay(logs[name], allocator="expandable", workspaces_bytes=()).peak_allocated_bytes
        for name in ("rw", "ppo")
    )
    assert pairs < ppo / 4


def test_fsdp1s_offload_leaves_the_gpu_a_float32_gradient_until_the_backward_pass_ends(specs, logs):
    parameters = shape_of(specs["fsdp, offload"]).parameters
    for name, gpus in (("fsdp, offload", 1), ("fsdp, offload, 2 shards", 2)):
        for phase in ("rehearsal", "experience", "optimizer"):
            assert sum(alive_at(logs[name], phase).values()) < 0.01 * parameters
        assert 1 < requested_bytes(logs[name])["backward"] / (4 * parameters / gpus) < 1.4
    assert requested_bytes(logs["fsdp2, offload"])["backward"] < 0.5 * 4 * parameters


def test_fsdp1s_gradients_are_gathered_where_their_parameters_were_taken_apart(logs):
    """Autograd runs a node on the stream of its forward pass: so did H200s
    (docs/results/lab/trinity_trials.py). There, too, FSDP1 frees the unit, so that nothing is
    lent that the backward pass gathers.
    """
    log = logs["fsdp, offload, 2 shards"]
    after = dropwhile(lambda event: event != Enter("backward"), log.events)
    backward = [
        event
        for event in takewhile(lambda event: event != Enter("optimizer"), after)
        if isinstance(event, Allocate)
    ]
    gathered, gradients = (
        [event for event in backward if log.operators[event.operator] == name and event.stream != 0]
        for name in ("resize_", "aten.cat.default")
    )
    largest = max(event.bytes for event in gathered)
    assert {event.stream for event in gathered if event.bytes == largest} == {
        event.stream for event in gradients
    }
    assert sum(event.bytes == largest for event in gradients) == 2 * 8, (
        "of each micro-batch and layer"
    )
    of_layers = [event for event in gathered if event.bytes == largest]
    phases = accumulate(
        log.events,
        lambda phase, event: event.phase if isinstance(event, Enter) else phase,
        initial="",
    )
    units = {
        event.id
        for event, phase in zip(log.events, phases, strict=False)
        if event in of_layers and phase == "backward"
    }
    given_back = {event.id for event in log.events if isinstance(event, GiveBack)}
    assert given_back & {event.id for event in gradients}
    assert units
    assert not units & given_back


def test_a_copy_to_the_host_that_is_waited_for_frees_what_other_streams_used(logs):
    """On one GPU FSDP1 copies each unit's gradient to the host and waits: what it gave back is free
    before the next unit's is.
    """
    log = logs["fsdp, offload"]
    # On the main stream lie the gradients of a layer's parameters, which autograd lends and not
    # FSDP1.
    units = {event.id for event in log.events if isinstance(event, Allocate) and event.stream != 0}
    waiting, most, phase = set[int](), 0, ""
    for event in log.events:
        match event:
            case GiveBack() if phase == "backward" and event.id in units:
                waiting.add(event.id)
            case Free():
                waiting.discard(event.id)
            case _:
                phase = getattr(event, "phase", phase)
        most = max(most, len(waiting))
    assert 1 <= most <= 4


def test_experts_hold_copies_of_each_token_and_none_of_their_gradients(specs, logs):
    shape = shape_of(specs["experts"])
    hidden, width, chosen = shape.hidden_size, shape.intermediate_size, shape.experts_per_token
    # The copy, gate and up, the activation, its product with up, what comes out, its gradient, and
    # that times weight and output.
    copies = 2 * chosen * (hidden + 2 * width + width + width + hidden + hidden + 2 * hidden)
    logprob_gradient = experts_bytes_per_token(logs)
    assert (
        copies
        < logprob_gradient
        < copies + 2 * (10 * hidden + 3 * (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim)
    )
    assert "aten.index_put.default" not in logs["experts"].operators, (
        "a gradient is added up in place"
    )


def test_wide_experts_hold_their_products_and_one_gradient_of_each(specs, logs):
    """And what a GPU computes in one kernel is not taken apart because this PyTorch has none for
    it.
    """
    shape = shape_of(specs["wide experts"])
    products = 2 * 6 * shape.experts_per_token * shape.intermediate_size
    logprob_gradient = experts_bytes_per_token(logs, "wide experts")
    assert products < logprob_gradient < 1.5 * products
    assert "aten.silu_backward.default" in logs["wide experts"].operators
    assert "aten.sigmoid.default" not in logs["wide experts"].operators


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "factors"), [("experts", (1, *deep(0))), *deep(("wide experts", (1,)))]
)
def test_experts_cost_a_token_what_they_cost_on_the_cpu_wherever_the_tokens_go(
    specs, logs, name, factors
):
    """Wide ones but for one of its hidden states, more or less; each of their products is six."""
    hidden = 2 * shape_of(specs[name]).hidden_size
    model = specs[name].model_directory
    measured, *all_to_the_same = (answer(ON_THE_CPU, model, str(factor)) for factor in factors)
    assert {*all_to_the_same} <= {measured}
    allowed = hidden if name == "wide experts" else CPU_TOLERANCE * measured
    assert experts_bytes_per_token(logs, name) == pytest.approx(measured, abs=allowed)


def test_a_quadratic_attention_is_an_error_and_a_router_is_none():
    with FakeTensorMode(), AllocationRecorder():
        torch.softmax(torch.empty(64, 64), dim=-1)
        with pytest.raises(RuntimeError, match="tokens x tokens"):
            torch.softmax(torch.empty(1, 2, 64, 64), dim=-1)


def test_a_token_of_qwen3_30b_a3b_takes_60_kb_of_a_layer_beside_its_attentions_kernel(tmp_path):
    model = config_of("Qwen3-30B-A3B")
    config = model | {"num_hidden_layers": 2, "vocab_size": 1024}
    trials = {
        str(length): trial(tmp_path / "model", config, length_tokens=length, loss="chunked")
        for length in (131_072, 196_608)
    }
    one, two = (peak_bytes(log) for log in map(traced(trials, tmp_path).__getitem__, trials))
    shape = load_model(str(tmp_path / "model")).shape
    query, hidden = shape.query_heads * shape.head_dim, shape.hidden_size
    # q's gradient in float32, and k's and v's for every query head
    kernel, inputs = 4 * query + 2 * 2 * query, 2 * 2 * hidden
    assert (two - one) / 65_536 - kernel - inputs < 60_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "length", "settings", "layout"), REAL)
def test_real_models_peak_where_the_formula_says(tmp_path, model, length, settings, layout):
    layers = deep(config_of(model)["num_hidden_layers"]) or (6,)
    config = config_of(model) | {"num_hidden_layers": layers[0]}
    spec = trial(
        tmp_path / "model",
        config,
        length_tokens=length,
        settings=Settings(**settings),
        layout=layout,
    )
    log = traced({"real": spec}, tmp_path)["real"]
    assert peak_bytes(log) == pytest.approx(formula_bytes(spec), rel=REAL_TOLERANCE)


def experts_bytes_per_token(logs: dict[str, EventLog], name: str = "experts") -> float:
    one, other = (peak_bytes(logs[each]) for each in (name, f"{name}, longer"))
    return (other - one) / (32_768 - LENGTH)
