"""Constants of a machine: refused without a GPU, summed by name, drawn a row for each thing."""

import argparse
import json
from pathlib import Path

import pytest

from highwater.cli.doctor import _constants_table, doctor
from highwater.errors import MachineError
from highwater.launch.probe import probe
from highwater.prediction.constants import (
    CONTEXT_BYTES,
    CONTEXT_OF_SEVERAL_BYTES,
    CUBLAS_WORKSPACES_BYTES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_BYTES,
)
from highwater.spec.codec import from_builtins
from highwater.spec.constants import Constants, Reading
from highwater.units import MIB


def reading(name: str, outside: int, kept: int = 0) -> Reading:
    return Reading(name=name, outside_bytes=outside * MIB, allocator_bytes=kept * MIB)


ONE = Constants(device_name="a GPU", gpus=1, versions={}, readings=(reading("context", 600), reading("cuBLAS", 60, 32)))
TWO = Constants(device_name="a GPU", gpus=2, versions={}, readings=(reading("context", 600), reading("NCCL group", 300)))


def test_readings_add_up_by_name_and_what_is_not_there_is_nothing() -> None:
    assert ONE.outside_bytes("context", "cuBLAS", "NCCL group") == 660 * MIB


def test_the_table_has_a_row_for_each_thing_and_a_column_for_each_count() -> None:
    table = _constants_table((ONE, TWO))
    assert table.columns == ("", "1 GPU", "2 GPUs")
    assert table.rows == (
        ("context", "600.0 MiB", "600.0 MiB"),
        ("cuBLAS", "60.0 MiB (32.0 MiB)", "-"),
        ("NCCL group", "-", "300.0 MiB"),
        ("outside the allocator, together", "660.0 MiB", "900.0 MiB"),
    )


@pytest.mark.skipif(bool(probe().gpus), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(MachineError, match="no GPU is visible"):
        doctor(argparse.Namespace(measure=True, json=False))


def test_the_constants_of_predictions_are_those_that_were_read_on_an_h200() -> None:
    document = json.loads((Path(__file__).parents[2] / "docs" / "results" / "predict" / "constants-h200.json").read_text())
    one, two, four = from_builtins(document["constants"], tuple[Constants, ...])
    assert [each.gpus for each in (one, two, four)] == [1, 2, 4]
    alone = sum(reading.outside_bytes for reading in one.readings)
    assert CONTEXT_BYTES["cuda"] == pytest.approx(alone, rel=0.005)
    ours = [reading.name for reading in one.readings if reading.name != "FSDP2"]
    for each in (two, four):
        assert CONTEXT_OF_SEVERAL_BYTES["cuda"] == pytest.approx(each.outside_bytes(*ours), rel=0.015)
        assert NCCL_BYTES[each.gpus] == pytest.approx(each.outside_bytes("NCCL group", "NCCL collectives"), rel=0.002)
        assert NCCL_ALL_TO_ALL_BYTES[each.gpus] == pytest.approx(each.outside_bytes("NCCL all-to-all"), rel=0.02)
    kept = [reading.allocator_bytes for reading in one.readings if reading.name in ("cuBLAS", "cuBLAS, backward")]
    assert tuple(kept) == CUBLAS_WORKSPACES_BYTES
