"""Out of memory, for real: each rank that ran out says what was alive, without any profiling."""

from bisect import bisect_left
from pathlib import Path

import pytest
from processes import marked

import highwater
from highwater.api.search import prepare_trial
from highwater.nouns.profiling import Profiling
from highwater.nouns.request import request_from
from highwater.nouns.trial import Outcome, TrialResult
from highwater.store.logs import snapshot_lines
from tiny_models import write_model

pytestmark = pytest.mark.timeout(300)
WORDS, WIDTH, TOKENS = 50_000, 64, 4096
LOGITS_BYTES = 4 * WORDS * TOKENS // 2
"""The first half of a sequence is a prompt, of which no logits are made."""


@pytest.fixture
def wordy(tmp_path: Path) -> Path:
    """A model with so many words that its logits are nearly all of it."""
    return write_model(tmp_path / "wordy", vocab_size=WORDS, hidden_size=WIDTH)


def ran_out(model: Path, memory: str, *, gpus: int = 1, **settings: str) -> TrialResult:
    result = highwater.run_trial(
        str(model),
        TOKENS,
        device="cpu",
        memory=memory,
        gpus=[gpus],
        prompt_tokens=TOKENS // 2,
        log_dir=str(model.parent / "logs"),
        **settings,
    )
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    return result


def just_ran_out(model: Path, *, from_mib: int) -> TrialResult:
    """A trial with the most memory that it runs out of: what a process has imported differs from
    one environment to another by more than the losses' tensors are apart. By bisection.
    """
    found: dict[int, TrialResult] = {}

    def fits(mib: int) -> bool:
        asked = {"device": "cpu", "memory": f"{mib}MiB", "gpus": [1]}
        asked["prompt_tokens"] = TOKENS // 2
        result = highwater.run_trial(
            str(model), TOKENS, log_dir=str(model.parent / "logs"), **asked
        )
        if result.outcome is Outcome.OUT_OF_MEMORY:
            found[mib] = result
        return result.outcome is not Outcome.OUT_OF_MEMORY

    bisect_left(range(800, from_mib + 1, 20), True, key=fits)
    assert found, "it fits into everything"
    return found[max(found)]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_each_rank_that_ran_out_says_what_lives_and_what_had_no_room(wordy, strategy):
    result = ran_out(wordy, "560MiB", gpus=2, strategy=strategy)
    whole = 4 * (result.ranks[0].parameters or 0)
    failed = [rank.failure for rank in result.ranks if rank.failure and rank.failure.alive]
    assert failed
    for failure in failed:
        alive = failure.alive
        assert alive is not None
        # float32 shards of half the model: parameters, gradients, and two moments
        assert alive.parameters_bytes == pytest.approx(whole / 2, rel=0.01)
        assert alive.gradients_bytes == alive.parameters_bytes
        assert alive.optimizer_states_bytes == pytest.approx(2 * alive.parameters_bytes, rel=0.01)
        assert alive.requested_bytes == LOGITS_BYTES
        assert (alive.requested_by or "").startswith("highwater/engine/models/loss.py:")


def test_logits_that_are_alive_are_told_by_the_losss_frames(wordy):
    (rank,) = just_ran_out(wordy, from_mib=980).ranks
    assert rank.failure is not None
    assert rank.failure.phase in ("forward", "backward")
    assert rank.failure.alive is not None
    assert (rank.failure.alive.logits_bytes or 0) >= LOGITS_BYTES
    assert rank.failure.layer is None  # the loss is in no layer


def test_a_rank_that_was_killed_is_named_among_those_without_a_snapshot(mark, tiny):
    asked = {
        "device": "cpu",
        "memory": "1GiB",
        "gpus": [2],
        "data": "faulty_batches:killed_in_rank_1",
        "log_dir": "logs",
    }
    spec = prepare_trial(request_from({"model": str(tiny), **asked}, keywords=True), 32)
    result = highwater.run_trial(str(tiny), 32, **asked)
    *_, ended = snapshot_lines(spec, result, Profiling(ranks=(1,)))
    assert "rank 1 was ended" in ended
    assert marked(mark) == []
