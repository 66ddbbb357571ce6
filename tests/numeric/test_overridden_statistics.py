"""What a quantity can be put together from instead, and over what."""

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from engine_models import tiny_training
from highwater.engine.data.batches import Document, pack
from highwater.engine.training.statistics import QUANTITIES, Quantity, Statistics
from highwater.engine.training.statistics_log import StatisticsLog
from highwater.engine.training.step import Training, train_step
from highwater.errors import UsageError
from highwater.model.held_bytes import step_flops
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import RankMemory, StatisticsFiles, TrialSpec
from tables import table
from trial_specs import trial_in


def test_a_mean_has_its_own_sum_and_what_was_reset_is_in_no_export(mesh):
    statistics = Statistics(mesh, None, denominators={"nll": "n_tokens"})
    for name, part in (("nll", 6.0), ("entropy", 6.0), ("n_valid_tokens", 3), ("n_tokens", 12)):
        statistics.add(name, part)
    numbers = statistics.export(most_documents=0)
    assert (numbers["nll"], numbers["entropy"]) == (0.5, 2.0)
    statistics = Statistics(mesh, None)
    statistics.add("n_tokens", 5)
    statistics.reset()
    statistics.add("n_tokens", 7)
    assert statistics.export(most_documents=0)["n_tokens"] == 7


def test_a_quantity_of_ones_own_is_declared_added_to_and_told(mesh):
    statistics = Statistics(mesh, None, quantities={"my_metric": Quantity(how="sum")})
    statistics.add("my_metric", 2.5)
    statistics.add("my_metric", 4)
    assert statistics.export(most_documents=0)["my_metric"] == 6.5
    assert statistics.export(most_documents=0)["my_metric"] == 0, "nobody added anything"


def test_a_name_that_nobody_declared_is_refused_with_those_that_are(mesh):
    own = {"mine": Quantity(how="max")}
    with pytest.raises(UsageError, match="my_metric") as refusal:
        Statistics(mesh, None, quantities=own).add("my_metric", 1.0)
    assert "{'my_metric': Quantity(how='sum')}" in refusal.value.hint
    assert refusal.value.hint.partition("use one of ")[2].split(", ") == [*QUANTITIES, "mine"]


OVER = {"sum": None, "min": None, "max": None, "mean": "n_documents"}
"""What a quantity that is put together so is over."""


def told(mesh: DeviceMesh, how: Any, *values: Any, is_count: bool = False) -> Any:
    own = {"mine": Quantity(how=how, per=OVER[how], is_count=is_count)}
    statistics = Statistics(mesh, None, quantities=own)
    statistics.add("n_documents", 2)
    for value in values:
        statistics.add("mine", value)
    return statistics.export(most_documents=0)["mine"]


@pytest.mark.parametrize("how", OVER)
@pytest.mark.parametrize(
    "values",
    [
        *((math.nan, 2), (2, math.nan), (1, math.nan, 3), (math.inf, math.nan)),
        *((math.nan, -math.inf), (torch.tensor(math.nan), 2), (math.nan,)),
    ],
)
def test_a_nan_in_any_place_makes_a_number_nan(mesh, how, values):
    assert math.isnan(told(mesh, how, *values))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("how", OVER)
def test_an_infinity_that_was_added_is_told_and_is_not_nothing(mesh, how, value):
    assert told(mesh, how, value) == value


def test_only_what_nobody_added_to_has_no_smallest_and_largest(mesh):
    assert [told(mesh, how) for how in OVER] == [0, None, None, 0]
    assert (told(mesh, "min", math.inf, 2), told(mesh, "max", -math.inf, 2)) == (2, 2)
    assert (told(mesh, "min", 0), told(mesh, "max", 0)) == (0, 0)


@pytest.mark.parametrize(("divisor", "of"), [(math.nan, math.nan), (math.inf, 0.0), (0, None)])
def test_a_mean_over_a_sum_that_is_not_finite_is_not_one_whose_sum_is_missing(mesh, divisor, of):
    own = {"size": Quantity(how="sum"), "mine": Quantity(how="mean", per="size")}
    statistics = Statistics(mesh, None, quantities=own)
    statistics.add("mine", 5)
    statistics.add("size", divisor)
    assert repr(statistics.export(most_documents=0)["mine"]) == repr(of)


@pytest.mark.parametrize("how", ["sum", "min", "max"])
@pytest.mark.parametrize(
    "value", [2.5, -0.1, math.nan, math.inf, 2**53 + 1, torch.tensor(2.5), np.float32(0.5)]
)
def test_a_count_takes_whole_numbers_alone(mesh, how, value):
    with pytest.raises(UsageError, match="mine is a count") as refusal:
        told(mesh, how, value, is_count=True)
    assert "is_count" in refusal.value.hint
    whole = told(mesh, how, 3.0, True, torch.tensor(2), np.int64(3), is_count=True)
    assert (whole, type(whole)) == ({"sum": 9, "min": 1, "max": 3}[how], int)


def test_a_count_past_what_float64_counts_is_refused_and_forgotten(mesh):
    statistics = Statistics(mesh, None, quantities={"mine": Quantity(how="sum", is_count=True)})
    statistics.add("mine", 2**53)
    assert statistics.export(most_documents=0)["mine"] == 2**53
    for value in (2**53, 2):
        statistics.add("mine", value)
    with pytest.raises(UsageError, match="mine came to 9"):
        statistics.export(most_documents=0)
    assert statistics.export(most_documents=0)["mine"] == 0


@pytest.mark.parametrize(
    "value",
    [
        *(None, "3", "nan", b"3", [3], (), {}, 3j, Decimal(3), object(), 10**400),
        *(
            torch.tensor([3.0, 4.0]),
            torch.tensor([]),
            torch.tensor(3j),
            torch.empty((), device="meta"),
        ),
        *(np.array([3.0, 4.0]), np.array(["3"]), float, math.sqrt),
    ],
)
@pytest.mark.parametrize("how", OVER)
def test_what_is_no_number_is_refused(mesh, how, value):
    with pytest.raises(UsageError, match="mine cannot take") as refusal:
        told(mesh, how, value)
    assert "add('mine', 1)" in refusal.value.hint


@pytest.mark.parametrize(
    "value",
    [3, 3.0, np.float32(3), np.array([3]), torch.tensor(3), torch.tensor([[3.0]]), np.int8(3)],
)
def test_any_one_number_is_added(mesh, value):
    assert told(mesh, "sum", value, True, np.True_, torch.tensor(True)) == 6


@pytest.mark.parametrize(
    "quantities",
    [
        *(["m"], [], "m", 3, {"m"}, (("m", Quantity(how="sum")),)),
        *({"m": "sum"}, {"m": None}, {"m": Quantity}, {"m": {"how": "sum"}}, {"m": ["sum"]}),
        *({"": Quantity(how="sum")}, {" ": Quantity(how="sum")}, {3: Quantity(how="sum")}),
        {None: Quantity(how="sum")},
    ],
)
def test_what_is_no_declaration_is_refused_with_one(mesh, quantities):
    with pytest.raises(UsageError) as refusal:
        Statistics(mesh, None, quantities=quantities)
    typed = eval(refusal.value.hint.strip("`").removeprefix("quantities="), {"Quantity": Quantity})  # noqa: S307
    statistics = Statistics(mesh, None, quantities=typed)
    statistics.add("my_metric", 2.5)
    assert statistics.export(most_documents=0)["my_metric"] == 2.5


@pytest.mark.parametrize(
    "per", ["tokens", "loss", "nll", "model_flops", "step_time_s", ["n_tokens"]]
)
def test_a_denominator_that_cannot_be_is_refused_with_all_that_can(mesh, per):
    own = {"sizes": Quantity(how="sum"), "largest": Quantity(how="max")}
    with pytest.raises(UsageError, match="mine over") as refusal:
        Statistics(mesh, None, quantities={**own, "mine": Quantity(how="mean", per=per)})
    listed = refusal.value.hint.removeprefix("use one of ").partition(", or")[0].split(", ")
    assert listed == ["n_tokens", "n_valid_tokens", "prompt_tokens", "n_documents", "sizes"]
    for name in listed:
        made = Statistics(mesh, None, quantities={**own, "mine": Quantity(how="mean", per=name)})
        made.add("mine", 6)
        made.add(name, 2)
        assert made.export(most_documents=0)["mine"] == 3


@pytest.mark.parametrize(
    "added", [{"mine": 1.0}, {"mine": 1.0, "n_tokens": 5}, {"mine": 1.0, "nll": 1.0}]
)
def test_a_mean_without_its_denominator_is_refused_rather_than_told(mesh, added):
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
        ("mine", Quantity(how="mean", per="model_flops")),
        ("mine", Quantity(how="mean", per="n_tokens", is_count=True)),
        ("mine", Quantity(how="sum", per="n_tokens")),
        ("mine", Quantity(how="rate", per="step_time_s")),
        ("mine", Quantity(how="each")),
        ("mine", Quantity(how="median")),  # pyright: ignore[reportArgumentType]
        ("mine", Quantity(how="sum", group="node")),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(mesh, name, declared):
    with pytest.raises(UsageError) as error:
        Statistics(mesh, None, quantities={name: declared})
    assert {name, declared.per, declared.group} & set(error.value.problem.replace(":", "").split())
    assert error.value.hint


@pytest.mark.parametrize(
    ("groups", "denominators", "said"),
    table("overridden_statistics", "what_cannot_be_put_together_so_is_refused"),
)
def test_what_cannot_be_put_together_so_is_refused_by_name(mesh, groups, denominators, said):
    with pytest.raises(UsageError, match=said) as refusal:
        Statistics(mesh, None, groups=groups, denominators=denominators)
    assert refusal.value.hint


LENGTHS = (40, 7, 40)
H200_FLOPS_PER_S = 989e12


@pytest.fixture
def training(tmp_path: Path, mesh) -> Training:
    return tiny_training(tmp_path, "sft")


def test_rates_are_of_the_documents_that_there_were(training, tmp_path):
    micro_batches = [pack([Document(torch.arange(n), torch.arange(n))]) for n in LENGTHS]
    line = written(training, micro_batches, tmp_path, step_time_s=0.25)
    shape = load_model(str(tmp_path)).shape
    flops = sum(
        step_flops(shape, length_tokens=n, sequences=1, settings=Settings()) for n in LENGTHS
    )
    assert (line["tokens_per_s"], line["model_flops"]) == (sum(LENGTHS) / 0.25, flops)
    assert line["mfu"] == pytest.approx(flops / 0.25 / (2 * H200_FLOPS_PER_S))
    assert line["peak_reserved_bytes"] == [123]
    assert "peak_data_segment_bytes" not in line


def test_a_perplexity_past_all_numbers_is_null(training, tmp_path):
    ids = torch.arange(20)
    with torch.no_grad():
        training.policy.head.weight.mul_(1e6)
    line = written(training, [pack([Document(ids, ids)])], tmp_path, step_time_s=1.0)
    assert line["nll"] > 1000
    assert line["ppl_max"] is None


def test_a_full_disk_stops_no_training(training, tmp_path, capsys):
    ids = torch.arange(20)
    log = StatisticsLog(
        spec(tmp_path), StatisticsFiles(path="/dev/full"), training, device_name="CPU"
    )
    for step in (1, 2):
        loss, _ = train_step(training, [pack([Document(ids, ids)])])
        log.write(step, {"loss": float(loss)}, step_time_s=1.0, memory=RankMemory())
    assert capsys.readouterr().out.count("statistics are not written: ") == 1


def written(training: Training, micro_batches: list, folder: Path, *, step_time_s: float) -> dict:
    """The line of a step, on two H200s as far as rates are concerned."""
    files = StatisticsFiles(path=str(folder / "statistics.jsonl"))
    log = StatisticsLog(spec(folder), files, training, device_name="NVIDIA H200")
    loss, _ = train_step(training, micro_batches)
    memory = RankMemory(peak_reserved_bytes=123)
    log.write(1, {"loss": float(loss)}, step_time_s=step_time_s, memory=memory)
    (line,) = Path(files.path).read_text().splitlines()
    return json.loads(line)


def spec(folder: Path) -> TrialSpec:
    return trial_in(folder, device="cuda", memory_budget_bytes=None, layout=Layout(gpus=2))
