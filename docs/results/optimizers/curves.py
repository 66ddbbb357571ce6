"""200 steps of a small model on real text, on the CPU, with each optimizer beside AdamW in float32.

``python docs/results/optimizers/curves.py`` writes ``curves.json`` beside this file: of each
optimizer the loss of every step, what its states take, and how far its curve is from AdamW's. Two
minutes on one core.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from highwater.engine.parallel.mesh import alone
from highwater.model.held_bytes import device_state_bytes
from highwater.model.model import load_model
from highwater.nouns.objective import OPTIMIZERS
from highwater.nouns.settings import Settings

TIMES_AS_WIDE = 4
"""So that every matrix but those of keys and values has moments of 8 bits."""
CASES = [
    *(Settings(optimizer=name, accumulates=False) for name in OPTIMIZERS),
    *(
        Settings(optimizer=name, parameters="bf16", accumulates=False)
        for name, traits in OPTIMIZERS.items()
        if not traits.is_exact
    ),
]


def main() -> None:
    """Train, and write what came of it."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "numeric"))
    from curve import HYPERPARAMETERS, STEPS, our_curve, save_model

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, alone(cpu):
        directory = save_model(Path(folder, "model"), times=TIMES_AS_WIDE)
        shape = load_model(directory).shape
        curves = [our_curve(directory, cpu, torch.float32, settings) for settings in CASES]
    exact = curves[0]
    found = [
        {
            "optimizer": settings.optimizer,
            "parameters": settings.parameters,
            "is_lossy": settings is not CASES[0],
            "state_bytes_per_parameter": round(
                device_state_bytes(shape, settings, device="cpu") / shape.parameters, 2
            ),
            "relative_distance": round(float((curve - exact).norm() / exact.norm()), 7),
            "largest_difference": round(float((curve - exact).abs().max()), 6),
            "loss_by_step": [round(loss, 6) for loss in curve.tolist()],
        }
        for settings, curve in zip(CASES, curves, strict=True)
    ]
    written = {
        "steps": STEPS,
        "parameters": shape.parameters,
        "learning_rate": HYPERPARAMETERS.learning_rate,
        "compute": "float32, on the CPU",
        "versions": {name: version(name) for name in ("torch", "torchao", "transformers")},
        "curves": found,
    }
    target = Path(__file__).with_name("curves.json")
    target.write_text(f"{json.dumps(written, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
