"""Gradients in a trace are added up where those of plain tensors are."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

from forked_python import answer, forked
from gradient_graphs import GRAPHS, held, loss
from torch.profiler import ProfilerActivity, profile

TRACED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from gradient_graphs import GRAPHS, loss
from highwater.engine.tracer import fake_cuda, inplace_accumulation as inplace_accumulation
from highwater.engine.tracer.fake_cuda import QuickFakeMode
from highwater.engine.tracer.inplace_accumulation import InplaceAccumulation
from highwater.engine.tracer.allocation_recorder import AllocationRecorder

class Listening(InplaceAccumulation):
    def operator(self, func, args):
        chosen = super().operator(func, args)
        if func.name() == "aten::add.Tensor":
            asked.append(chosen.name().partition(".")[0])
        return chosen

fake_cuda.install()
exec(sys.argv[2])
asked = []
sums = Listening()
sums.learn(AllocationRecorder(sums))
told = {}
for name in GRAPHS:
    with QuickFakeMode(), AllocationRecorder(sums):
        of_name = loss(name, "cuda")
        asked = []
        of_name.backward()
        told[name], asked = asked, []
print(json.dumps(told), flush=True)
os._exit(0)  # the interpreter's end would let go of fakes that C++ still knows
"""
"""What each graph's sums are in a trace, in their order, after some change of what they are told
by."""


@pytest.mark.parametrize("name", GRAPHS)
def test_a_traced_sum_is_in_place_where_it_is_on_plain_tensors(name):
    assert as_traced()[name] == on_plain_tensors(name)


def test_the_graphs_have_sums_of_both_kinds_and_no_formula_has_one():
    kinds = [kind for name in GRAPHS for kind in on_plain_tensors(name)]
    assert min(kinds.count("aten::add"), kinds.count("aten::add_")) > 5
    changed = as_traced("inplace_accumulation._is_the_engines = lambda: True")
    assert [name for name, kinds in as_traced().items() if kinds != changed[name]] == [
        "added up in C++"
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "inplace_accumulation._ENGINES_SUM = b'another'",
            "does not show where autograd adds gradients up",
        ),
        ("inplace_accumulation._Counts = lambda *_: 0", "does not show who holds a gradient"),
    ],
)
def test_a_pytorch_that_cannot_be_told_by_is_an_error(change, problem):
    done = forked(TRACED, HERE, change)
    assert done.returncode
    assert problem in done.stderr


@cache
def as_traced(change: str = "") -> dict[str, list[str]]:
    """In a process of its own: what lets fake CUDA tensors work is not undone."""
    return answer(TRACED, HERE, change)


def on_plain_tensors(name: str) -> list[str]:
    held.clear()
    of_name: Any = loss(name, "cpu")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        of_name.backward()
    return [event.name for event in profiled.events() if event.name in ("aten::add", "aten::add_")]
