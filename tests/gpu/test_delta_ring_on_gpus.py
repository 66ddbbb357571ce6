"""A gated DeltaNet layer around a ring of two GPUs: as near to float64 as one GPU's."""

import pytest
from real_trials import reports_of

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
    for report in reports_of(GPUS, "delta_ring_on_gpus.py", tmp_path):
        for case, deviations in report.items():
            assert len(deviations) > 8, "output, input and every weight"
            for name, (ring, alone) in deviations.items():
                assert ring < (OF_FEW if name in FEW else TOLERANCE), (case, name)
                assert ring < 1.3 * alone or name in FEW, (case, name)
