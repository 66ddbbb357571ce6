"""What the allocator keeps until memory runs short: as much as in traces, and nothing that a length needs."""

import msgspec
import pytest

from highwater.prediction.formula import likely_footprint
from highwater.prediction.terms import Footprint
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.units import GIB

SFT = Settings(allocator="expandable", loss="chunked")
GRPO = Settings(allocator="expandable", objective="grpo", entropy="full", sequences_per_micro_batch=2)


def found(model: str, gpus: int, length: int, settings: Settings = SFT) -> Footprint:
    """With as much SP as GPUs."""
    layout = Layout(gpus=gpus, ulysses_degree=gpus)
    return likely_footprint(load_model(model).shape, settings, layout, length_tokens=length)


@pytest.mark.parametrize(
    ("model", "gpus", "length", "settings", "traced_gib"),
    [
        ("Qwen3-8B", 4, 32_768, SFT, 48.29),
        ("Qwen3-8B", 4, 65_536, SFT, 46.45),
        ("Qwen3-8B", 8, 65_536, SFT, 32.50),
        ("Qwen3-8B", 8, 131_072, SFT, 30.67),
        ("Qwen3-8B", 4, 8192, GRPO, 48.74),
        ("Qwen3-14B", 4, 32_768, SFT, 77.74),
        ("Qwen3-4B", 4, 8192, SFT, 19.99),
    ],
)
def test_short_sequences_reserve_what_their_traces_do(
    model: str, gpus: int, length: int, settings: Settings, traced_gib: float
) -> None:
    """Source: docs/results/predict/terms.json."""
    assert found(model, gpus, length, settings).reserved_bytes / GIB == pytest.approx(traced_gib, abs=0.7)


def test_a_longer_sequence_can_reserve_less_but_never_needs_less() -> None:
    short, longer = found("Qwen3-8B", 8, 65_536), found("Qwen3-8B", 8, 131_072)
    assert short.reserved_bytes > longer.reserved_bytes + GIB
    assert short.needed_bytes < longer.needed_bytes


def test_a_gpu_of_its_own_keeps_the_same_at_any_length() -> None:
    assert found("Qwen3-8B", 1, 1024).cached_bytes == found("Qwen3-8B", 1, 131_072).cached_bytes


def test_a_reward_model_has_no_head_to_gather_or_reduce() -> None:
    reward = Settings(allocator="expandable", objective="rw", sequences_per_micro_batch=2)
    whole, half = (found("Qwen3-8B", 8, 4096, settings).cached_bytes for settings in (SFT, reward))
    assert half == whole // 2


def test_nothing_stays_cached_where_there_is_no_room_for_it() -> None:
    short = found("Qwen3-8B", 4, 32_768)
    assert short.within(short.needed_bytes + GIB).cached_bytes == GIB
    assert short.within(short.needed_bytes - GIB).cached_bytes == 0


@pytest.mark.parametrize(("gpus", "length", "traced_gib"), [(1, 65_536, 39.38), (2, 131_072, 30.69)])
def test_fsdp1s_late_gradients_lie_in_nothing_that_activations_left(gpus: int, length: int, traced_gib: float) -> None:
    """Traced with torch 2.13. Without them the formula had a quarter and a third less."""
    settings = msgspec.structs.replace(SFT, strategy="fsdp", offload=True)
    assert found("Qwen3-4B", gpus, length, settings).reserved_bytes / GIB == pytest.approx(traced_gib, rel=0.06)
