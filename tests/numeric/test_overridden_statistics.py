"""What a quantity can be put together from instead, and over what, and what a caller may declare;
the rest is refused by name.
"""

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.training.statistics import Statistics
from highwater.errors import UsageError
from highwater.nouns.quantities import QUANTITIES, Quantity


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


def test_a_quantity_of_ones_own_is_declared_added_to_and_told(mesh: DeviceMesh) -> None:
    statistics = Statistics(mesh, None, quantities={"my_metric": Quantity(how="sum")})
    statistics.add("my_metric", 2.5)
    statistics.add("my_metric", 4)
    assert statistics.export(most_documents=0)["my_metric"] == 6.5
    assert statistics.export(most_documents=0)["my_metric"] == 0, "nobody added anything"


def test_a_name_that_nobody_declared_is_refused_with_those_that_are(mesh: DeviceMesh) -> None:
    own = {"mine": Quantity(how="max")}
    with pytest.raises(UsageError, match="my_metric") as refusal:
        Statistics(mesh, None, quantities=own).add("my_metric", 1.0)
    assert "{'my_metric': Quantity(how='sum')}" in refusal.value.hint
    listed = refusal.value.hint.partition("use one of ")[2].split(", ")
    assert listed == [*QUANTITIES, "mine"]


@pytest.mark.parametrize(
    "added", [{"mine": 1.0}, {"mine": 1.0, "n_tokens": 5}, {"mine": 1.0, "nll": 1.0}]
)
def test_a_mean_without_its_denominator_is_refused_rather_than_told(
    mesh: DeviceMesh, added: dict[str, float]
) -> None:
    own = {"mine": Quantity(how="mean", per="n_documents")}
    statistics = Statistics(mesh, None, quantities=own)
    for name, value in added.items():
        statistics.add(name, value)
    with pytest.raises(UsageError, match="mean over n_") as refusal:
        statistics.export(most_documents=0)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("nll", Quantity(how="sum")),
        ("loss", Quantity(how="max")),
        ("mine", Quantity(how="mean")),
        ("mine", Quantity(how="mean", per="perplexity")),
        ("mine", Quantity(how="mean", per="mine")),
        ("mine", Quantity(how="mean", per="nll")),
        ("mine", Quantity(how="mean", per="document")),
        ("mine", Quantity(how="mean", per="n_valid_documents")),
        ("mine", Quantity(how="sum", per="n_tokens")),
        ("mine", Quantity(how="rate", per="step_time_s")),
        ("mine", Quantity(how="each")),
        ("mine", Quantity(how="median")),  # pyright: ignore[reportArgumentType]
        ("mine", Quantity(how="sum", group="node")),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(
    mesh: DeviceMesh, name: str, declared: Quantity
) -> None:
    with pytest.raises(UsageError) as refusal:
        Statistics(mesh, None, quantities={name: declared})
    assert {name, declared.per, declared.group} & set(
        refusal.value.problem.replace(":", "").split()
    )
    assert refusal.value.hint


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
