"""Host memory of machines elsewhere: of the smallest that has as many GPUs, or a share of it."""

import pytest

from highwater.nouns.cluster import cluster
from highwater.nouns.hardware import default_host, gpu_catalog, host_catalog, kind_of, lacking
from highwater.speed import sheets
from highwater.units import GIB


@pytest.mark.parametrize(
    ("device_name", "gpus", "gib"),
    [
        ("H100-80GB", 8, 2048),
        ("NVIDIA H100 80GB HBM3", 4, 1024),
        ("H100-80GB", 1, 200),
        ("A100-80GB", 2, 288),
        ("RTX-4090", 1, 64),
        ("RTX-4090", 4, 64),
        ("A6000-48GB", 2, 200),
    ],
)
def test_host_memory_is_that_of_a_machine_with_as_many_gpus_or_a_share_of_it(
    device_name, gpus, gib
):
    found = default_host(device_name, gpus)
    assert found is not None
    assert found.host_bytes == gib * GIB
    assert found.source


@pytest.mark.parametrize(
    ("device_name", "gpus"),
    [("H100-80GB", 16), ("H100-80GB", 0), ("H20-96GB", 8), ("a GPU of 80.00 GiB", 8)],
)
def test_host_memory_of_a_machine_that_the_catalog_has_not_is_unknown(device_name, gpus):
    assert default_host(device_name, gpus) is None


def test_every_machine_has_gpus_of_the_catalog_that_train():
    kinds = {kind.name: kind for kind in gpu_catalog()}
    assert len({(host.kind, host.gpus) for host in host_catalog()}) == len(host_catalog())
    assert all(not lacking(kinds[host.kind]) for host in host_catalog())
    assert all(host.machine and host.source and host.host_gib > 0 for host in host_catalog())


def test_every_nvidia_kind_that_trains_has_a_data_sheet_with_its_source():
    known = {k.name for k in gpu_catalog() if not lacking(k) and k.vendor == "NVIDIA"}
    assert set(sheets()) == known
    assert all(sheet.source for sheet in sheets().values())


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("2xA6000-48GB", "A6000-48GB"),
        ("2xa6000", "A6000-48GB"),
        ("NVIDIA RTX A6000", "A6000-48GB"),
        ("RTX 6000 Ada", "RTX-6000-Ada-48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000-96GB"),
        ("8xH800-80GB", "H800-80GB"),
        ("8xA800-80GB", "A800-80GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("8xB300", "B300"),
        ("8xMI325X-256GB", "MI325X-256GB"),
        ("4xL40S", "L40S"),
        ("4xA10G", "A10G-24GB"),
    ],
)
def test_a_name_that_people_type_means_the_card_of_that_name(typed, kind):
    named = cluster(typed, gpu_memory_bytes=None, machine=None)
    found = kind_of(named.device_name)
    assert found is not None
    assert found.name == kind
