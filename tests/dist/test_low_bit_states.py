"""Optimizers with moments of few bits on 1 and 2 processes."""

import pytest

pytest.importorskip("torchao", reason="moments of few bits need the low-bit extra")

from low_bit_cases import CONFIG, LOSSY

from tiny_models import write_model


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_moments_of_few_bits_are_sharded_counted_saved_and_loaded(processes, ranks, tmp_path):
    write_model(tmp_path, CONFIG)
    found = ranks.results("low_bit_cases", processes, tmp_path)
    assert set(found) == set(LOSSY)
    for name, of_ranks in found.items():
        assert len(of_ranks) == processes
        for rank in of_ranks:
            assert rank["same gradients"], f"{name}: those of AdamW, bit by bit"
            assert rank["allocated"] == rank["counted"], name
            assert rank["loaded"], name
            assert rank["goes on"], name
            assert rank["copies"], name
            assert rank["written"] > 0, name
