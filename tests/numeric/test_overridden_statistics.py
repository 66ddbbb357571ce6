"""What a quantity can be put together from instead, and over what; the rest is refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.statistics import Statistics
from highwater.errors import UsageError
from highwater.parallel import mesh as process_mesh
from highwater.spec.layout import Layout


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    device = torch.device("cpu")
    with process_mesh.alone(device):
        yield process_mesh.shard_mesh(Layout(), device)


def test_a_mean_is_divided_by_the_sum_that_is_asked_for(mesh: DeviceMesh) -> None:
    statistics = Statistics(mesh, None, denominators={"nll": "n_tokens"})
    for name, part in (("nll", 6.0), ("entropy", 6.0), ("n_valid_tokens", 3), ("n_tokens", 12)):
        statistics.add(name, part)
    numbers = statistics.export(most_documents=0)
    assert (numbers["nll"], numbers["entropy"]) == (0.5, 2.0)


def test_what_was_reset_is_in_no_export(mesh: DeviceMesh) -> None:
    statistics = Statistics(mesh, None)
    statistics.add("n_tokens", 5)
    statistics.reset()
    statistics.add("n_tokens", 7)
    assert statistics.export(most_documents=0)["n_tokens"] == 7


@pytest.mark.parametrize(
    ("groups", "denominators", "said"),
    [
        ({"perplexity": "all"}, {}, "perplexity"),
        ({"nll": "node"}, {}, "node"),
        ({"loss": "rank"}, {}, "loss"),
        ({"tokens_per_s": "rank"}, {}, "tokens_per_s"),
        ({"n_tokens_by_rank": "all"}, {}, "n_tokens_by_rank"),
        ({"ppl_avg": "rank"}, {}, "ppl_avg of rank"),
        ({}, {"nll": "tokens"}, "tokens"),
        ({}, {"nll": "entropy"}, "nll over entropy"),
        ({}, {"ppl_avg": "n_tokens"}, "ppl_avg over n_tokens"),
        ({}, {"n_tokens": "n_valid_tokens"}, "n_tokens over n_valid_tokens"),
    ],
)
def test_what_cannot_be_put_together_so_is_refused_by_name(
    mesh: DeviceMesh, groups: dict[str, Any], denominators: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refusal:
        Statistics(mesh, None, groups=groups, denominators=denominators)
    assert refusal.value.hint
