"""Evaluation: the mean loss of batches that nothing is trained on, on one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_training import trained

from highwater.engine.data.batches import Document, pack
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.evaluation import evaluate
from highwater.engine.training.step import Training
from highwater.errors import UsageError


@pytest.fixture(params=["sft", "dpo", "rw"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    with process_mesh.alone(torch.device("cpu")):
        yield trained(tmp_path, request.param)


def test_no_micro_batches_are_refused_with_a_hint_that_works(training):
    with pytest.raises(UsageError, match="no micro-batches") as refused:
        evaluate(training, [])
    assert "`evaluate(training, [batch])`" in refused.value.hint
    documents = [Document(torch.arange(n), torch.arange(n), reward=float(n)) for n in (9, 7)]
    found = evaluate(training, [pack(documents)])
    assert found.counted == (1 if training.traits.pairs else 14)
    assert found.loss is not None
