"""Predicted seconds of a step beside recorded ones.

``python docs/results/speed/predicted.py`` (no GPU) prints a row for each split of steps.py, and the
trials that are furthest off.
"""

from statistics import median, quantiles
from typing import get_args

from steps import Split, TimedStep, steps

from highwater.model.model import load_model
from highwater.speed import predicted_step

SHOWN = 8


def error(step: TimedStep) -> float:
    """Predicted over measured, less one."""
    found = predicted_step(
        load_model(step.model_name).shape,
        step.settings,
        step.layout,
        length_tokens=step.length_tokens,
        device_name=step.device_name,
        micro_batches=step.micro_batches,
    )
    assert found is not None  # noqa: S101
    return found.time_s / step.seconds - 1


def main() -> None:
    """Print the table, then the furthest of those that are held out."""
    every = [(step, error(step)) for step in steps()]
    print("| split | trials | median error | 95th percentile | largest |\n|---|---|---|---|---|")
    for split in get_args(Split):
        off = [abs(each) for step, each in every if step.split == split]
        high = quantiles(off, n=20, method="inclusive")[-1]
        print(f"| {split} | {len(off)} | {median(off):.1%} | {high:.1%} | {max(off):.1%} |")
    held_out = [each for each in every if each[0].split == "held out"]
    for step, off in sorted(held_out, key=lambda each: -abs(each[1]))[:SHOWN]:
        name = f"{step.source}: {step.model_name}, {step.settings.label}, {step.layout.gpus} GPUs"
        print(f"{name}, {step.length_tokens:,} tokens: {step.seconds:.2f} s, {off:+.0%}")


if __name__ == "__main__":
    main()
