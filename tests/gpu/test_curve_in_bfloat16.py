"""200 steps on real text in bfloat16."""

import torch

from curve import STEPS, hugging_face_curve, our_curve, save_model
from highwater.engine.parallel.mesh import alone

TOLERANCE = 1e-3
"""Norm-relative, in bfloat16: both round activations to 8 bits, at different places."""


def test_two_hundred_steps_in_bfloat16_have_hugging_faces_loss_curve(tmp_path, record_property):
    gpu = torch.device("cuda", 0)
    directory = save_model(tmp_path / "model")
    with alone(gpu):
        ours = our_curve(directory, gpu, torch.bfloat16)
    theirs = hugging_face_curve(directory, gpu, torch.bfloat16)
    assert len(ours) == STEPS
    assert ours[-1] < 0.9 * ours[0], "it learns"
    deviation = float((ours - theirs).norm() / theirs.norm())
    record_property(
        "counted",
        f"losses {float(ours[0]):.4f} to {float(ours[-1]):.4f}, norm-relative deviation "
        f"{deviation:.1e}",
    )
    assert deviation < TOLERANCE
