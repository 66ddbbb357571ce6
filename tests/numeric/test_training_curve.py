"""200 steps on real text: our packed, sharded, recomputed, chunked training has Hugging Face's loss
curve.
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")
sys.path.insert(0, str(Path(__file__).parent))

from curve import STEPS, hugging_face_curve, our_curve, save_model

from highwater.parallel.mesh import alone

TOLERANCE = 1e-6
"""Norm-relative, in float32: 200 updates have rounded in another order of summation."""


@pytest.mark.timeout(240)
def test_two_hundred_steps_on_real_text_have_hugging_faces_loss_curve(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    directory = save_model(tmp_path / "model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small are slower on several
    try:
        with alone(cpu):
            ours = our_curve(directory, cpu, torch.float32)
        theirs = hugging_face_curve(directory, cpu, torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert len(ours) == STEPS
    assert ours[-1] < 0.9 * ours[0], "it learns"
    assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE
