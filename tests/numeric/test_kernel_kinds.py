"""The table of a step's kernels: kinds are read off names as GPUs have them, and the page has what
its records say.
"""

import json
from pathlib import Path

import pytest

from step_kernels import KINDS, REST, kind_of, table

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "speed"
RECORDS = sorted(RESULTS.glob("kernels-*.json"))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128",
            "attention",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, "
            "float, true>",
            "norms and rotations",
        ),
        ("_rotary_backward_kernel", "norms and rotations"),
        ("_triton_rope", "norms and rotations"),
        (
            "void at::native::(anonymous "
            "namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizer",
            "optimizer",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("_gate_backward_kernel", REST),
        ("liger_cross_entropy_kernel", REST),
        ("_row_statistics_kernel", REST),
    ],
)
def test_a_kernels_kind_is_read_off_its_name(kernel, kind):
    assert kind_of(kernel) == kind


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_page_has_the_table_of_each_record(record):
    printed = table(json.loads(record.read_text())["kernels"]).splitlines()
    assert len(printed) == 2 + len(KINDS) + 2
    assert "\n".join(printed) in (RESULTS / "README.md").read_text()


def test_kinds_add_up_to_all():
    cells = [
        line.split("|")
        for line in table(
            {"ours": {"nvjet_a": (1.0, 2), "Memcpy DtoD": (0.5, 3), "other": (0.25, 4)}}
        ).splitlines()
    ]
    assert cells[-1][2:4] == [" 1.750 ", " 9 "]
    assert sum(float(row[2]) for row in cells[2:-1]) == 1.75


def test_there_are_records():
    assert RECORDS
