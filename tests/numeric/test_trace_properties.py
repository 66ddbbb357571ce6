"""What holds of real traces: monotone in length, vocabulary and layers; what persists and is saved
never grows with the GPUs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from traces import Kind, alive_at, requested_bytes, traced, trial

from highwater.memory.trace.replay import Alive, replay
from highwater.model.model import load_model
from highwater.nouns.events import EventLog
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings

CONFIG = {
    **json.loads(Path(load_model("tiny").directory, "config.json").read_text()),
    "vocab_size": 20_000,
}
TRIALS: dict[str, dict[str, Any]] = {
    "base": {},
    "longer": {"length_tokens": 5001},
    "more words": {"config": CONFIG | {"vocab_size": 20_001}},
    "more layers": {"config": CONFIG | {"num_hidden_layers": 3}},
    "2 shards": {"layout": Layout(gpus=2)},
    "2 share a sequence": {"layout": Layout(gpus=2, ulysses_degree=2)},
    "4 share a sequence": {
        "layout": Layout(gpus=4, ulysses_degree=4)
    },  # more than there are key heads
    "2 shards, FSDP1": {"layout": Layout(gpus=2), "settings": Settings(strategy="fsdp")},
    "offloaded": {"settings": Settings(offload=True, loss="chunked"), "length_tokens": 512},
    "offloaded, 2 shards": {
        "settings": Settings(offload=True, loss="chunked"),
        "length_tokens": 512,
        "layout": Layout(gpus=2),
    },
}
LARGER = ["longer", "more words", "more layers"]
MORE_GPUS = [
    ("base", "2 shards"),
    ("base", "2 share a sequence"),
    ("2 shards", "2 share a sequence"),
    ("2 share a sequence", "4 share a sequence"),
    ("offloaded", "offloaded, 2 shards"),
]
MAY_GROW = {
    ("aten.empty.memory_format", "backward", ""),
    ("aten.empty.memory_format", "forward", "model.layers.*"),
}
"""What FSDP2 lays gradients out in to reduce them, and what they are reduced to; what the layer
last gathered came in."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EventLog]:
    """Every trial's trace."""
    root = tmp_path_factory.mktemp("traces")
    specs = {
        name: trial(root / name, **{"config": CONFIG, "length_tokens": 4096} | asked)
        for name, asked in TRIALS.items()
    }
    return traced(specs, root)


@pytest.mark.parametrize("larger", LARGER)
def test_a_longer_sequence_and_a_larger_model_ask_for_more_in_every_phase(logs, larger):
    small, large = requested_bytes(logs["base"]), requested_bytes(logs[larger])
    assert small.keys() == large.keys()
    assert all(small[phase] <= large[phase] for phase in small)
    assert max(small.values()) < max(large.values())


@pytest.mark.parametrize(("fewer", "more"), MORE_GPUS)
def test_nothing_that_persists_or_is_saved_grows_with_the_gpus(logs, fewer, more):
    """States before the first forward pass; before the first backward pass these and all
    activations; each kind for itself.
    """
    for phase in ("forward", "backward"):
        before, after = alive_at(logs[fewer], phase), alive_at(logs[more], phase)
        assert sum(after.values()) > 0
        assert not {kind: size for kind, size in after.items() if size > before[kind]}


@pytest.mark.parametrize(("fewer", "more"), MORE_GPUS)
def test_what_grows_with_the_gpus_is_named_at_the_peak(logs, fewer, more):
    before, after = (replay(logs[name], allocator="expandable") for name in (fewer, more))
    sizes = {kind_of(alive): alive.bytes for alive in before.alive}
    grown = {kind_of(alive) for alive in after.alive if alive.bytes > sizes.get(kind_of(alive), 0)}
    assert grown <= MAY_GROW
    assert grown or after.peak_allocated_bytes <= before.peak_allocated_bytes


def test_there_is_growth_to_be_named(logs):
    """With the states in host memory, what reduces gradients is more than what is saved."""
    one, two = (
        replay(logs[name], allocator="expandable") for name in ("offloaded", "offloaded, 2 shards")
    )
    assert two.peak_allocated_bytes > one.peak_allocated_bytes


def kind_of(alive: Alive) -> Kind:
    return alive.operator, alive.phase, alive.module


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("allocator", ["native", "expandable"])
def test_no_replay_of_a_trace_reports_less_reserved_than_allocated(logs, name, allocator):
    free = replay(logs[name], allocator=allocator)
    assert (
        free.peak_reserved_bytes
        >= free.peak_allocated_bytes
        == max(free.allocated_by_phase.values())
    )
    for share in (1.0, 0.9, 0.5):
        tight = replay(
            logs[name], allocator=allocator, capacity_bytes=int(share * free.peak_reserved_bytes)
        )
        assert tight.fits or share < 1
        assert (
            tight.peak_allocated_bytes
            <= tight.peak_reserved_bytes
            <= share * free.peak_reserved_bytes
        )
