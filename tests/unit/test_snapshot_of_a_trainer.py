"""The profile of a real snapshot: two steps of Hugging Face's Trainer, recorded on an H200."""

from pathlib import Path

import pytest

from highwater.memory.snapshot.memory_profile import memory_profile

RECORDED = Path(__file__).parents[2] / "docs/results/profiler/trainer/snapshot_rank00.pickle"


def test_a_snapshot_of_hugging_faces_trainer_has_a_name_for_what_was_alive():
    profile = memory_profile(RECORDED)
    parameters = 4 * (32_000 * 512 * 2 + 4 * (512 * 512 * 3 + 3 * 512 * 1536))
    assert profile.bytes_of("unattributed") <= 0.05 * profile.allocated_bytes
    assert profile.bytes_of("parameters") == pytest.approx(parameters, rel=0.02)
    assert profile.bytes_of("optimizer_states") == pytest.approx(2 * parameters, rel=0.02)
    assert profile.bytes_of("logits") >= 4 * 4 * 1024 * 32_000


def test_the_largest_place_in_it_is_an_operator_where_no_program_has_a_line():
    """What an operator of the backward pass takes is no gradient that stays, and unwinding asked
    for nothing.
    """
    profile = memory_profile(RECORDED)
    first = profile.places[0]
    assert (first.place, first.category) == ("aten::nll_loss_backward", "backward_pass")
    assert profile.bytes_of("backward_pass") == pytest.approx(4 * 4 * 1024 * 32_000, rel=0.05)
    assert not [each.place for each in profile.places if "unwind" in each.place]
    assert profile.places[4].place == "qwen3/modeling_qwen3.py:82 forward"
