"""What kernels take for themselves, beside what H200s recorded."""

import json
from pathlib import Path

import pytest
import torch

from highwater.engine.tracer.allocation_recorder import WORKSPACES, aten, in_column_sums
from step_kernels import KINDS, REST, kind_of, table

H200, A100 = 132 * 2048, 108 * 2048
"""Threads at once."""


@pytest.mark.parametrize(
    ("rows", "columns", "partial_bytes", "semaphore_bytes"),
    [
        (40_960, 1024, 138_412_032, 32),
        (655_360, 128, 138_412_032, 4),
        (32_768, 2048, 138_412_032, 64),
        (8192, 2560, 138_936_320, 80),
        (65_536, 128, 67_108_864, 4),
        (2048, 5120, 83_886_080, 160),
        (16_384, 128, 16_777_216, 4),
        (81_920, 128, 83_886_080, 4),
        (8192, 5120, 138_936_320, 160),
    ],
)
def test_blocks_that_share_a_column_are_counted(rows, columns, partial_bytes, semaphore_bytes):
    """Norms' weight gradients of Qwen3-0.6B, 1.7B, 4B and 14B;
    docs/results/lab/trinity_trials.py, torch 2.11.
    """
    values = torch.empty(2, rows // 2, columns, dtype=torch.bfloat16, device="meta")
    assert in_column_sums((values, [0, 1], True), resident_threads=H200) == [
        partial_bytes,
        semaphore_bytes,
    ]
    assert in_column_sums((values, [0, -2]), resident_threads=H200) == [
        partial_bytes,
        semaphore_bytes,
    ]
    assert in_column_sums((values, [0, 1]), resident_threads=A100)[0] <= partial_bytes


@pytest.mark.parametrize(
    ("shape", "over"),
    [
        *(((512, 4096), [0]), ((40_960, 1024), [1]), ((40_960, 1024), None), ((8, 4096, 64), [0])),
        *(((0, 64), [0]), ((), []), ((4096,), [0])),
    ],
)
def test_short_sums_and_those_of_a_row_take_nothing_that_counts(shape, over):
    assert in_column_sums((torch.empty(shape, device="meta"), over), resident_threads=H200) == []


def test_flash_attention_takes_a_number_a_row_and_cudnn_all_of_it_in_one():
    query, key = (
        torch.empty(1, heads, 40_960, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 8)
    )
    flash, cudnn = (
        WORKSPACES[getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default](
            (None, query, key)
        )
        for kernel in ("flash", "cudnn")
    )
    assert flash == [2_621_440, 335_544_320, 167_772_160, 167_772_160]
    assert cudnn == [sum(flash) + 256]


def test_flash_attention_takes_heads_of_whole_32s():
    query, key = (
        torch.empty(1, heads, 4096, 40, dtype=torch.bfloat16, device="meta") for heads in (4, 1)
    )
    took = WORKSPACES[aten._scaled_dot_product_flash_attention_backward.default]((None, query, key))
    assert took == [4 * 4 * 4096, 4 * 4 * 4096 * 64, *[2 * 4 * 4096 * 40] * 2]


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


def test_there_are_records():
    assert RECORDS
