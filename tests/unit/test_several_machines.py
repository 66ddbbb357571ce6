"""Predictions for GPUs of several machines: copies of what each machine holds."""

from typing import Any

import pytest

from highwater import predict
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, Prediction
from highwater.nouns.hardware import default_host, gpu_catalog, host_catalog, lacking
from highwater.nouns.layout import Layout
from highwater.recommendation.recommend import recommend
from highwater.speed import sheets
from highwater.trainers.targets import configured
from highwater.units import GIB

OF_COPIES = ("NCCL", "gradient reduction")
"""Terms that copies make larger: groups of their own, and a second layer's gradients on their
way."""
ZERO = {"trainer": "llamafactory", "deepspeed": "zero3-offload"}
KEPT_SHARE = 0.01
"""What the allocator keeps at the most besides its terms, as a share of them."""


def predicted(gpus: int, **settings: Any) -> Prediction:
    asked = {"length": "64k", "ulysses": [2], "host_memory": "256GiB"} | settings
    return predict("Qwen3-8B", gpus=f"{gpus}xH100-80GB", **asked)


def terms(of: CellPrediction) -> dict[str, int]:
    return {term.name: term.bytes for term in (*of.footprint.peak.terms, *of.footprint.outside)}


def host_states(of: CellPrediction) -> int:
    return sum(term.bytes for term in of.footprint.host if term.name.startswith("offloaded"))


def test_64_gpus_take_what_8_do_and_what_copies_take():
    one, several = predicted(8), predicted(64, copies=[8])
    for alone, copied in zip(one.cells, several.cells, strict=True):
        assert copied.cell.settings == alone.cell.settings
        assert copied.footprint.host_bytes == alone.footprint.host_bytes
        before, after = terms(alone), terms(copied)
        assert before.keys() == after.keys()
        more = {name: after[name] - before[name] for name in before if after[name] != before[name]}
        assert more
        assert set(more) <= set(OF_COPIES)
        used = copied.footprint.device_used_bytes - alone.footprint.device_used_bytes
        assert used == pytest.approx(sum(more.values()), rel=KEPT_SHARE)
    for few, many in zip(predicted(24, copies=[3]).cells, several.cells, strict=True):
        assert few.footprint == many.footprint


def test_what_was_measured_nowhere_is_said_once_and_a_configuration_is_of_one_machine():
    def said(notes: tuple[str, ...]) -> list[str]:
        return [note for note in notes if "was measured nowhere" in note]

    assert len(said(predicted(64, copies=[8]).notes)) == 1
    found = recommend("Qwen3-8B", gpus="64xH100-80GB", length="64k", copies=[8])
    assert len(said(found.notes)) == 1
    assert found.chosen.cell.layout.shard_degree == 8
    assert not said(predicted(16, copies=[2]).notes)
    with pytest.raises(UsageError, match="a configuration is of one machine"):
        configured("accelerate", found, found.chosen, model="Qwen3-8B")


def test_all_gpus_of_all_machines_share_the_states_and_each_machine_has_its_own_host():
    named = predict("Qwen3-8B", gpus="2x8xH100-80GB", length="64k")
    layouts = [each.cell.layout for each in named.cells]
    assert {(layout.shard_degree, layout.machine_gpus) for layout in layouts} == {(16, 8)}
    assert {layout.ulysses_degree for layout in layouts} == {1, 2, 4, 8}, "within a machine"
    assert [note for note in named.notes if note.startswith("2 machines of 8 GPUs")]
    asked = {"length": "32k", "ulysses": [1], "offload": True, "allocator": "expandable"}
    one = predict("Qwen3-8B", gpus="4xH100-80GB", **asked)
    shared, copied = (
        predict("Qwen3-8B", gpus="2x4xH100-80GB", copies=copies, **asked) for copies in ([1], [2])
    )
    for alone, both, several in zip(one.cells, shared.cells, copied.cells, strict=True):
        assert several.footprint.host_bytes == alone.footprint.host_bytes
        assert 2 * host_states(both) == host_states(alone) > 0


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 8, 24])
def test_states_are_shared_by_any_part_of_all_gpus(copies):
    cells = predict("Qwen3-8B", gpus="3x8xH100-80GB", length="64k", copies=[copies]).cells
    assert {cell.cell.layout.shard_degree for cell in cells} == {24 // copies}
    without = predict("Qwen3-8B", gpus="24xH100-80GB", length="64k", copies=[copies]).cells
    assert without == cells, "24 GPUs are three machines"


@pytest.mark.parametrize(
    ("gpus", "said"),
    [("2x17", "16 GPUs at the most"), ("129x8", "up to 1024"), ("0x8", "1 to 1024")],
)
def test_machines_that_cannot_be_are_refused_with_what_can(gpus, said):
    with pytest.raises(UsageError, match=said) as refusal:
        predict("Qwen3-8B", gpus=f"{gpus}xH100-80GB")
    flag, value = refusal.value.hint.split("`")[1].split()
    assert predict("Qwen3-8B", **{flag.removeprefix("--"): value}).cells
    with pytest.raises(UsageError, match="not as many on each of 2"):
        Layout(gpus=3, machines=2)


@pytest.mark.parametrize(
    ("model", "gpus", "length", "asked"),
    [
        ("Qwen3-30B-A3B", "2x2xH100-80GB", "64k", {"offload": False}),
        ("Qwen2.5-72B", "8xA100-80GB", "32k", {"host_memory": "1007GiB"}),
        ("Qwen2.5-72B", "8xA100-80GB", "32k", {"host_memory": "1007GiB", **ZERO}),
        ("Llama-3.1-70B", "1xH100-80GB", "128k", {"offload": False, "activations": "gpu"}),
        ("Qwen3-32B", "16xA100-40GB", "300k", {"offload": False, "activations": "gpu"}),
        ("Qwen3-32B", "8xH200-141GB", "400k", {"offload": False, "copies": [2]}),
    ],
)
def test_the_fewest_machines_that_do_are_offered_and_do_as_they_are_typed(
    model, gpus, length, asked
):
    asked = {"length": length, **asked}
    found = recommend(model, gpus=gpus, **asked)
    assert found.chosen is None
    (more,) = (each for each in found.alternatives if each.kind == "more GPUs")
    flag, typed = more.flags
    assert f"`{flag} {typed}`" in more.what
    assert recommend(model, gpus=typed, **asked).chosen.label == more.label
    machines, each, kind = typed.split("x", 2)
    named = gpus.split("x")
    assert int(each) == (int(named[1]) if len(named) == 3 else max(8, int(named[0])))
    fewer = f"{int(machines) - 1}x{each}x{kind}"
    chosen = recommend(model, gpus=fewer, **asked).chosen
    assert chosen is None or chosen.risk != "safe"


@pytest.mark.parametrize(
    ("device_name", "gpus", "gib"),
    [
        *(("H100-80GB", 8, 2048), ("NVIDIA H100 80GB HBM3", 4, 1024), ("H100-80GB", 1, 200)),
        *(("A100-80GB", 2, 288), ("RTX-4090", 1, 64), ("RTX-4090", 4, 64)),
        *(("A6000-48GB", 2, 200), ("H100-80GB", 16, None), ("H100-80GB", 0, None)),
        *(("H20-96GB", 8, None), ("a GPU of 80.00 GiB", 8, None)),
    ],
)
def test_host_memory_is_a_machines_with_as_many_gpus_or_a_share_of_it(device_name, gpus, gib):
    """Unknown of a machine that the catalog has not."""
    found = default_host(device_name, gpus)
    assert (found and found.host_bytes) == (gib and gib * GIB)
    assert found is None or found.source


def test_every_machine_has_gpus_that_train_and_every_nvidia_kind_of_them_a_data_sheet():
    kinds = {kind.name: kind for kind in gpu_catalog()}
    hosts = host_catalog()
    assert len({(host.kind, host.gpus) for host in hosts}) == len(hosts)
    assert all(not lacking(kinds[host.kind]) for host in hosts)
    assert all(host.machine and host.source and host.host_gib > 0 for host in hosts)
    trains = {k.name for k in kinds.values() if not lacking(k) and k.vendor == "NVIDIA"}
    assert set(sheets()) == trains
    assert all(sheet.source for sheet in sheets().values())
