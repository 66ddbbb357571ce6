"""Trains a Hugging Face model in a loop of one's own: chunked loss, offload, and with several ranks
a ring over which each sequence is shared.

    python examples/own_loop.py
    python -m highwater.engine.ranks --nproc 2 examples/own_loop.py
"""

import os
import sys
from pathlib import Path

from highwater.engine import Trainer

MODEL = (
    sys.argv[1] if len(sys.argv) > 1 else "tiny"
)  # a directory, an id of the Hub, a catalog name
LENGTH, STEPS = 512, 10
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def documents(number: int) -> list[list[int]]:
    """One micro-batch: this very file, a byte a token, cut where the length ends."""
    text = Path(__file__).read_bytes() * 2
    start = 97 * number % (len(text) - LENGTH)
    return [list(text[start : start + 200]), list(text[start + 200 : start + LENGTH])]


def main() -> None:
    settings = {"ring": RANKS, "loss": "chunked", "offload": True, "learning_rate": 1e-3}
    with Trainer(MODEL, length=LENGTH, **settings) as trainer:
        for step in range(STEPS):
            trainer.learning_rate = 1e-3 * (1 - step / STEPS)
            first = 2 * (step * trainer.data_parallel_degree + trainer.data_rank)
            done = trainer.step([documents(first), documents(first + 1)])
            if trainer.rank == 0:
                print(f"step {step + 1}: loss {done.loss:.4f}, {done.tokens} tokens")


if __name__ == "__main__":
    main()
