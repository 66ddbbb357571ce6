"""The best evaluation of a run that goes on, where other data is held out than before."""

import pytest

pytest.importorskip("torch", reason="the data plane needs the train extra")

from highwater.engine.training_run import with_comparable_best
from highwater.spec.corpus import Corpus
from highwater.spec.training import RunState


def held_out(digest: str) -> Corpus:
    return Corpus(
        directory="/corpus",
        digest=digest,
        objective="sft",
        length_tokens=64,
        documents=1,
        units=1,
        tokens=9,
        trained_tokens=9,
        longest_tokens=9,
    )


def test_a_best_loss_is_not_compared_with_losses_over_other_data() -> None:
    state = RunState(
        step=4,
        best_step=2,
        best_loss=1.5,
        evaluation_digest="one",
        corpus_digest="c",
        run_digest="r",
    )
    assert with_comparable_best(state, held_out("one")) == state
    assert with_comparable_best(state, None) == state
    other = with_comparable_best(state, held_out("other"))
    assert (other.best_step, other.best_loss) == (None, None)
