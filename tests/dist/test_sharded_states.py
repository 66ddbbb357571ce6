"""Moments in host memory, and of few bits, on 1 and 2 processes."""

import low_bit_cases
import pytest
from host_state_cases import CONFIG, SAVED_AS_OTHERS, cases_for

from tables import deep
from tiny_models import write_model

PADDING_BYTES = 2 * 4 * CONFIG["hidden_size"]
"""A row of the embedding and one of the head, in float32."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_moments_on_the_host_train_save_and_go_on_as_on_the_gpu(processes, ranks, tmp_path):
    write_model(tmp_path, CONFIG)
    found = ranks.results("host_state_cases", processes, tmp_path)
    assert set(found) == {*cases_for(processes)}
    for name, of_ranks in found.items():
        assert len(of_ranks) == processes
        models = 2 if "critic" in name else 1
        for rank in of_ranks:
            assert rank["optimizers"] == ["HostStateAdamW"] * models, name
            assert rank["clipped"], name
            assert rank["same norms"], name
            assert rank["same"], name
            if name in SAVED_AS_OTHERS and not deep(name):
                continue
            assert set(rank["loaded"].values()) == {True}, (name, rank["loaded"])
            goes_on = rank["goes on"]
            assert models == 2 or set(goes_on.values()) == {True}, (name, goes_on)
        # Of uneven shards what the first rank has is counted, and states as a whole. FSDP2 pads the
        # last rank's; a critic is counted with a head.
        made, counted = of_ranks[0]["buffers"]
        assert made == counted, name
        if models == 1:
            allocated, counted = (
                sum(each) for each in zip(*(r["states"] for r in of_ranks), strict=True)
            )
            assert allocated == pytest.approx(counted, abs=PADDING_BYTES), name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_moments_of_few_bits_are_sharded_counted_saved_and_loaded(processes, ranks, tmp_path):
    pytest.importorskip("torchao", reason="moments of few bits need the low-bit extra")
    write_model(tmp_path, low_bit_cases.CONFIG)
    found = ranks.results("low_bit_cases", processes, tmp_path)
    assert set(found) == set(low_bit_cases.LOSSY)
    for name, of_ranks in found.items():
        assert len(of_ranks) == processes
        for rank in of_ranks:
            assert rank["same gradients"], f"{name}: those of AdamW, bit by bit"
            assert rank["allocated"] == rank["counted"], name
            assert rank["loaded"], name
            assert rank["goes on"], name
            assert rank["copies"], name
            assert rank["written"] > 0, name
