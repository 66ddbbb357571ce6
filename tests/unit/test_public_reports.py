"""Public reports of other trainers' memory are as predicted, or what they lack is named."""

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs/results/other_trainers/reports.py"))
WITHIN = 0.10
"""Of a figure that was read off a driver or an allocator, by whoever reported it."""


def test_every_report_is_near_what_is_predicted_or_what_it_lacks_is_named():
    ran_out = [each for each in SCRIPT["compared"]() if "OUT_OF" in each.reported["outcome"]]
    assert len(ran_out) == 7
    assert [each.fits for each in ran_out] == [False] * 7
    every = SCRIPT["compared"]()
    figures = [each for each in every if each.reported["peak_gib"]]
    assert all(each.off is not None or each.missing for each in figures)
    near = [each.off for each in figures if each.off is not None]
    assert len(near) == 3
    assert max(map(abs, near)) <= WITHIN
    assert all(each.fits is not None or each.missing for each in every)


def test_of_ligers_kernels_the_loss_alone_is_between_all_of_them_and_none():
    asked = (
        "Llama-3.1-8B --gpus 1xH200-141GB --trainer transformers --lora 32 --length 65536 "
        "--allocator expandable --activations gpu --loss "
    )
    kernels = ("chunked", "chunked --liger loss", "full")
    found = [SCRIPT["predicted"](asked + words).cells[0].footprint for words in kernels]
    assert found == sorted(found, key=lambda each: each.allocated_bytes)
    assert len({each.allocated_bytes for each in found}) == 3
