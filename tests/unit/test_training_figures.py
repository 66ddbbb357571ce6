"""The figures of a training: what is said of evaluations before and after it."""

import pytest

from highwater.nouns.training import TrainingResult
from highwater.pages.training_lines import training_table


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        (((0, 5.5), (8, 5.25)), "5.500 before, 5.250 after"),
        (((8, 5.25),), "5.250 after step 8"),
        (((8, 5.25), (12, 5.125)), "5.250 after step 8, 5.125 after step 12"),
    ],
)
def test_a_held_out_loss_is_of_before_only_where_it_was_measured_then(evaluations, said):
    result = TrainingResult(
        status="done",
        step=12,
        steps=12,
        losses=(5.0,),
        evaluations=evaluations,
        output_directory="run",
    )
    assert ("held-out loss", said) in training_table(result).rows
