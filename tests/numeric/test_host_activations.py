"""Activations in host memory: the same numbers, nothing left on the device."""

import weakref

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, Qwen3Config, SeedOssConfig

from closeness import assert_equal
from engine_models import assembled, forward, on_meta, packed, recomputed
from highwater.engine.activations.host import HostActivations, PinnedPlaces
from highwater.engine.activations.recompute import recompute_layers, seeded
from highwater.engine.data.batches import Batch
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.fill import Fill
from highwater.engine.training.experience import forward_batch
from highwater.engine.training.step import train_step
from highwater.errors import ModelError, UsageError
from highwater.nouns.settings import ActivationPlan, Settings
from highwater.units import GIB, MIB
from tiny_models import SIZES, TINY, write_model
from trial_specs import trial_in

CPU = torch.device("cpu")
LAYERS = 5
SHAPE = SIZES | {"num_hidden_layers": LAYERS, "max_position_embeddings": 128}
PLAIN = Qwen3Config(**SHAPE)
DROPS = SeedOssConfig(**SHAPE, attention_dropout=0.0, residual_dropout=0.3, initializer_range=0.2)
ON_HOST = [("layer", 1), ("layer", 3), ("layer", LAYERS), ("all-but-attention", 1)]


def built(config: PreTrainedConfig, recompute: str, host: HostActivations | None = None) -> Decoder:
    model = on_meta(config, loss="chunked")
    recomputed(model.layers, recompute, host=host)
    Fill(model, None, device=CPU, seed=3).one_unit(model)
    return model.train()


def host_of(layers_on_gpu: int = 1, budget_bytes: int = GIB) -> HostActivations:
    return HostActivations(CPU, layers_on_gpu=layers_on_gpu, budget_bytes=budget_bytes)


def batch(*lengths: int) -> Batch:
    return packed(*(torch.arange(length) % 64 for length in lengths))


def loss_of(model: Decoder, one: Batch) -> "torch.Tensor":
    with seeded(seed=0, rank=0, step=1, device=CPU):
        return -forward(model, one).logprobs_N.mean()


def gradients(model: Decoder, *batches: Batch) -> list["torch.Tensor"]:
    model.zero_grad()
    for each in batches:
        loss_of(model, each).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("config", [PLAIN, DROPS])
@pytest.mark.parametrize(("recompute", "layers_on_gpu"), ON_HOST)
def test_gradients_are_those_without_bit_by_bit(config, recompute, layers_on_gpu):
    steps = (batch(24, 9), batch(40), batch(7, 7, 7)), (batch(3),), (batch(64), batch(64))
    plain, ours = built(config, recompute), built(config, recompute, host_of(layers_on_gpu))
    for step in steps:
        assert_equal(gradients(ours, *step), gradients(plain, *step))


@pytest.mark.parametrize("recompute", ["layer", "all-but-attention"])
def test_passes_without_a_gradient_and_abandoned_ones_change_nothing(recompute):
    host = host_of()
    plain, ours = built(PLAIN, recompute), built(PLAIN, recompute, host)
    wanted = gradients(plain, batch(24))
    mapped: set[int] = set()
    for disturb in 2 * (
        lambda: forward_batch(ours, [batch(50)], device=CPU),
        lambda: loss_of(ours, batch(33)),  # whose backward pass never comes
    ):
        disturb()
        assert_equal(gradients(ours, batch(24)), wanted)
        mapped.add(host.memory.mapped_bytes)
    first, *later = sorted(mapped)
    assert len(later) == 1, "places of the abandoned pass are used again"
    assert first < later[0]


class Follow(nn.Module):
    """Passes hidden states on, and notes them."""

    def __init__(self, seen: list[weakref.ref]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, hidden: "torch.Tensor") -> "torch.Tensor":
        out = hidden * 2
        self.seen.append(weakref.ref(out.untyped_storage()))
        return out


@pytest.mark.parametrize("layers_on_gpu", [1, 2, LAYERS])
def test_after_the_forward_pass_the_device_holds_the_last_layers_inputs_alone(layers_on_gpu):
    seen: list[weakref.ref] = []
    layers = nn.ModuleList(Follow(seen) for _ in range(LAYERS))
    recompute_layers(layers, host=host_of(layers_on_gpu))
    hidden = torch.ones(1, 6, 8, requires_grad=True) * 1
    for layer in layers:
        hidden = layer(hidden)
    *inputs, output = (each() is not None for each in seen)
    assert output
    # the first layer's input is nobody's output
    plan = ActivationPlan(layers=LAYERS, layers_on_gpu=layers_on_gpu)
    assert inputs == [layer >= plan.layers_on_host for layer in range(1, LAYERS)]


def test_memory_is_mapped_once_for_steps_of_one_size_and_anew_for_longer_ones():
    host = host_of()
    model = built(PLAIN, "layer", host)
    mapped = []
    for length in (8, 64, 64, 16, 64, 128):
        gradients(model, batch(length))
        mapped.append(host.memory.mapped_bytes)
    on_host, number = LAYERS - 1, 4
    each = [on_host * length * SHAPE["hidden_size"] * number for length in (8, 64, 64, 64, 64, 128)]
    assert mapped == each


def test_a_place_that_is_large_enough_is_taken_before_a_new_one_and_the_smallest_of_them():
    memory = PinnedPlaces(CPU, budget_bytes=100)
    small, large = memory.take(10), memory.take(60)
    memory.give(large)
    memory.give(small)
    assert memory.take(8) is small
    assert memory.take(8) is large
    assert memory.mapped_bytes == 70


def test_host_memory_is_told_when_it_is_mapped_and_refused_past_the_budget():
    memory, told = PinnedPlaces(CPU, budget_bytes=MIB), list[int]()
    memory.mapped = lambda: told.append(memory.mapped_bytes)
    first, _ = memory.take(40), memory.take(50)
    memory.give(first)
    memory.take(30)
    assert told == [40, 90]
    model = built(PLAIN, "layer", host_of(budget_bytes=2 * 64 * 32 * 4))
    gradients(model, batch(16))
    with pytest.raises(MemoryError, match="more of host memory"):
        gradients(model, batch(64))
    assert PinnedPlaces(CPU, budget_bytes=MIB).take(MIB).bytes == MIB


def test_a_family_that_hands_hidden_states_over_by_name_is_refused():
    layers = nn.ModuleList([Follow([])])
    recompute_layers(layers, host=host_of())
    with pytest.raises(ModelError, match="by name"):
        layers[0](hidden=torch.ones(1, 2, 2, requires_grad=True))


class AddPair(nn.Module):
    """Takes two tensors that look alike."""

    def forward(self, hidden: "torch.Tensor", other: "torch.Tensor") -> "torch.Tensor":
        return (hidden * other).sin()


def test_another_argument_that_looks_like_the_hidden_states_stays():
    def run(layers: nn.ModuleList) -> tuple["torch.Tensor", ...]:
        start, other = (torch.linspace(0, 1, 12).view(1, 3, 4).requires_grad_() for _ in range(2))
        hidden = start
        for layer in layers:
            hidden = layer(hidden, other)
        return torch.autograd.grad(hidden.sum(), (start, other))

    plain, ours = (nn.ModuleList(AddPair() for _ in range(3)) for _ in range(2))
    recompute_layers(ours, host=host_of())
    assert_equal(run(ours), run(plain))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activations": "host", "recompute": "none"}, "moves a recomputed layer's input"),
        ({"layers_on_gpu": 2}, "all layers keep their activations there"),
        ({"activations": "host", "layers_on_gpu": 0}, "0 layers on the GPU"),
    ],
)
def test_settings_without_sense_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Settings(**settings)


@pytest.mark.parametrize("layers_on_gpu", range(1, LAYERS + 1))
def test_a_plan_has_a_layer_its_next_one_and_those_that_stay_on_the_gpu(layers_on_gpu):
    plan = Settings(activations="host", layers_on_gpu=layers_on_gpu).activation_plan(LAYERS)
    for layer in range(LAYERS):
        there = {j for j in range(layer + 1) if j >= plan.layers_on_host}
        if plan.layers_on_host:
            there |= {layer, max(0, layer - 1)}
        assert set(range(plan.first_on_gpu(layer), layer + 1)) == there


@pytest.mark.usefixtures("alone")
def test_a_step_takes_no_more_host_memory_than_is_named(tmp_path):
    """Of the memory that is named, activations get their share, and none that the states take."""
    tight, roomy = (
        assembled(
            trial_in(
                write_model(tmp_path / str(named), TINY),
                activations="host",
                loss="chunked",
                host_memory_bytes=named,
            )
        )
        for named in (1024, GIB)
    )
    with pytest.raises(MemoryError, match="more of host memory than the share"):
        train_step(tight, [batch(64)])
    train_step(roomy, [batch(64)])
    assert 1024 < roomy.host.memory.mapped_bytes < GIB
