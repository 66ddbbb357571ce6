"""The tree grows no further than it is: what `tools/walk.py` counts is held here."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WALK: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "walk.py"))
CEILINGS = {
    "src_lines": 72_145,
    "src_files": 287,
    "src_small_files": 9,
    "process_starts": 1,
    "decision_records": 25,
    "changelog_bytes": 3_000,
}
"""Lowered as the tree shrinks; raised by a feature alone, within what it was allowed (activations
in host memory: three files; head groups: one; tiles of experts: one; gated DeltaNet: two;
traces and predictions of it: 194 lines; one answer from every command: two; lengths of data: one;
reporters: one; the hardware of trials, which the catalog of GPUs no longer reads: one; a page that
is a chooser and nothing else: no file of Python, 84 lines; Hugging Face's step, traced and in
closed form: two, its law for four more trainers, a rollout beside them: one, and their users' own
files: one, of whose issue 26 lines were left; list prices: 22 lines; Gemma 4, its wide heads and
what its layers share: two, 389 lines; predictions of it: 124; its experts: 11; adapters on all of
it and the time of its steps: 113; own studies of any
trainer: 20, and vLLM's own settings where it has no room: the last 6; the delta rule's sweep over
chunks and norms that add 1, each a kernel beside its twin: four, 443 lines; the delta rule around
a ring: 221 lines; counts and prices of GPUs, which no issue allowed: 218; a user's own file
answered in its keys, vLLM in TRL's words, attention sinks and heads of 512 in other trainers, and
the dead ends of thirty blind questions: 473, ZeRO as thirteen steps had it: 18, a search that
starts above lengths that experts in tiles take less than: 16, what ten more questions asked for:
44, the fewest GPUs of every number, and vLLM's share: 39, and the changes of a user's file in the
order of what they free: 43; the tensor of an allocation that failed, and seven more answers that
strangers missed: 209, nine that they found wanting: 104, how far a user's own file trains, and
verl's read: 162, what strangers typed: 36, one answer of `predict` and `recommend`: 40, the
fewest of one kind and copies: 21, logits of a larger batch: 11, a reference that a file keeps:
20, counts of tokens as lengths: 45, what first lines lacked for strangers: 251, and shards of a
model in NF4: 59; what no issue allowed is paid for by merging)."""
WALKED = {
    "predict": {"modules": 83, "files": 52},
    "find": {"modules": 199, "files": 121},
    "train": {"modules": 209, "files": 117},
}


def test_the_tree_is_no_larger_than_it_was():
    counts: dict[str, int] = WALK["sizes"](ROOT)
    assert counts["src_lines"] > 10_000, "src is counted"
    assert {name: counts[name] for name, most in CEILINGS.items() if counts[name] > most} == {}


@pytest.mark.parametrize("words", WALK["COMMANDS"], ids=lambda words: words.partition(" ")[0])
def test_a_command_walks_through_no_more_than_it_did(words):
    counts: dict[str, int] = WALK["walked"](ROOT, words)
    ceilings = WALKED[words.partition(" ")[0]]
    assert counts["functions"] > 100, "functions are counted"
    assert {name: counts[name] for name, most in ceilings.items() if counts[name] > most} == {}
