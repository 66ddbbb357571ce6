"""A gated DeltaNet layer around a ring of two GPUs: as near to float64 as one GPU's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from highwater.trials.probe import probe

TOLERANCE = 1e-2
FEW = ("A_log", "dt_bias")
"""A number a head, so that how they round is chance."""
OF_FEW = 3e-2
GPUS = 2


@pytest.mark.timeout(300)
def test_a_state_crosses_gpus_and_is_as_exact_as_on_one(tmp_path):
    if len(probe().gpus) < GPUS:
        pytest.skip("needs 2 GPUs")
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("delta_ring_on_gpus.py"), tmp_path],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(GPUS)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(GPUS)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors[-3000:]
    reports = sorted(tmp_path.glob("*.json"))
    assert len(reports) == GPUS
    for report in reports:
        for case, deviations in json.loads(report.read_text()).items():
            assert len(deviations) > 8, "output, input and every weight"
            for name, (ring, alone) in deviations.items():
                assert ring < (OF_FEW if name in FEW else TOLERANCE), (case, name)
                assert ring < 1.3 * alone or name in FEW, (case, name)
