"""The edges of TRL's recorded trials, which ``predict --trainer trl`` learns its interval from.

    python docs/results/other_trainers/edges.py

writes them beside the formula, as ``highwater/trainers/trl/trl_edges.json``.
"""

from pathlib import Path

from highwater.nouns.codec import to_json
from highwater.store.journal import read_study
from highwater.trainers.trl import MEMORY

HERE = Path(__file__).parent
STUDIES = ("one-gpu-trl", "two-gpus-ring-trl", "grpo-0.6b-24")
TARGET = HERE.parents[2] / "src" / "highwater" / "trainers" / "trl" / "trl_edges.json"


def edges() -> str:
    """The file's text, a line for each edge."""
    studies = (read_study(HERE / "studies" / f"{name}.jsonl") for name in STUDIES)
    lines = [to_json(each) for study in studies for each in MEMORY.learn(study, None)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    TARGET.write_text(edges(), encoding="utf-8")
