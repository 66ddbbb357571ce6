"""Gradients in a trace: autograd hands some from their stream to the one where FSDP1 took its
vector apart, and adds them up where those of plain tensors are.
"""

from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
from forked_python import answer, forked
from gradient_graphs import GRAPHS, held, loss
from torch.profiler import ProfilerActivity, profile

from highwater.nouns.codec import from_json
from highwater.nouns.events import Allocate, Enter, EventLog, Free, GiveBack

COMPUTE, SIDE = 0, 7
"""Streams: of the backward pass, and of what took the vector apart in the forward pass."""
PART_BYTES = 4 * 2**20
"""Of each of its two parameters."""
TRACED = """
import os
from types import SimpleNamespace
import torch
from torch.distributed.fsdp._flat_param import FlatParamHandle
from highwater.engine.tracer import fake_cuda
from highwater.engine.tracer.fake_cuda import QuickFakeMode
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.nouns.codec import to_json
from highwater.nouns.events import EventLog

fake_cuda.install()
side = fake_cuda.Stream()
side.stream_id = 7
each = {"_numels": 2**20, "_shapes": (2**20,), "_contiguities": True, "_strides": (1,)}
each["_param_extensions"] = None
vector = SimpleNamespace(**{name: [of_one] * 2 for name, of_one in each.items()})
handle = SimpleNamespace(flat_param=vector, _fsdp_extension=None)

def events(*, is_used_twice=False, stream=None):
    recorder = AllocationRecorder()
    fake_cuda.heard_gradient[:] = [recorder.pass_on]
    with QuickFakeMode(), recorder:
        leaf = torch.ones(2**21, device="cuda", requires_grad=True)
        with torch.cuda.stream(side):
            one, other = FlatParamHandle._get_unflat_views_unaligned(handle, leaf * 1)
        loss = (one * 2).sum() + (other * 3).sum()
        if is_used_twice:
            loss = loss + (one * 5).sum()
        recorder.enter("backward")
        with torch.cuda.stream(stream):
            loss.backward()
        recorder.enter("over")
        recorder.wait()
        recorder.is_closed = True
    told = {"operators": tuple(recorder.operators), "events": tuple(recorder.events)}
    return EventLog(source="traced", versions={}, **told)

def waits(*, is_waited_for=False):
    recorder = AllocationRecorder()
    fake_cuda.heard_record_stream[:] = [recorder.lend]
    fake_cuda.heard_wait[:] = [recorder.wait_for]
    with QuickFakeMode(), recorder:
        lent = torch.empty(2**20, device="cuda")
        lent.record_stream(side)
        del lent
        if is_waited_for:
            torch.cuda.current_stream().wait_stream(side)
        for name in ("first wait", "second wait"):
            recorder.enter(name)
            torch.cuda.current_stream().synchronize()
        recorder.is_closed = True
    told = {"operators": tuple(recorder.operators), "events": tuple(recorder.events)}
    return EventLog(source="traced", versions={}, **told)

logs = {"apart": events(), "used twice": events(is_used_twice=True)}
logs["together"] = events(stream=side)
print(to_json(logs | {"side": waits(), "side, waited for": waits(is_waited_for=True)}), flush=True)
os._exit(0)  # the interpreter's end would let go of fakes that C++ still knows
"""
"""A vector taken apart on another stream, each part used; the backward pass on a stream of its own,
or on that one. Then a tensor that another stream uses, while the host waits twice for the current
one.
"""

Life = tuple[str, int, str]
"""What allocated a gradient of one part, on which stream, and its end: ``freed`` at once, or
``lent`` until the GPU is done."""


def test_a_gradient_is_freed_or_lent_where_autograd_goes_on_with_it():
    assert gradients("apart") == [("aten.mul.Tensor", COMPUTE, "lent")] * 2
    assert sorted(gradients("used twice")) == [
        ("aten.add.Tensor", SIDE, "freed"),
        *[("aten.mul.Tensor", COMPUTE, "lent")] * 3,
    ]


@pytest.mark.parametrize(
    ("name", "wait"), [("side, waited for", "first wait"), ("side", "second wait")]
)
def test_what_a_stream_uses_is_free_at_the_wait_for_one_that_waited_for_it(name, wait):
    assert list(dropwhile(lambda event: event != Enter(wait), logs()[name].events))[:2] == [
        Enter(wait),
        Free(1),
    ]
    assert [event for event in logs()[name].events if isinstance(event, GiveBack | Free)] == [
        GiveBack(1),
        Free(1),
    ]


def test_a_gradient_that_stays_on_its_stream_is_free_at_once():
    assert gradients("together") == [("aten.mul.Tensor", SIDE, "freed")] * 2


@pytest.mark.parametrize("name", ["apart", "used twice", "together"])
def test_parts_are_put_together_on_the_stream_where_they_were_taken_apart(name):
    log = logs()[name]
    kinds = [
        (log.operators[event.operator], event.bytes, event.stream)
        for event in log.events
        if isinstance(event, Allocate)
    ]
    assert [kind for kind in kinds if kind[0] == "aten.cat.default"] == [
        ("aten.cat.default", 2 * PART_BYTES, SIDE)
    ]


def gradients(name: str) -> list[Life]:
    log = logs()[name]
    backward = list(dropwhile(lambda event: event != Enter("backward"), log.events))
    over = backward.index(Enter("over"))
    return [
        (
            log.operators[event.operator],
            event.stream,
            "freed" if Free(event.id) in backward[:over] else "lent",
        )
        for event in backward
        if isinstance(event, Allocate) and event.bytes == PART_BYTES
        if Free(event.id) in backward[:over]
        or (GiveBack(event.id) in backward[:over] and Free(event.id) in backward[over:])
    ]


@cache
def logs() -> dict[str, EventLog]:
    """Traced in a process of its own: what lets fake CUDA tensors work is not undone."""
    done = forked(TRACED)
    assert done.returncode == 0, done.stderr
    return from_json(done.stdout, dict[str, EventLog])


HERE = str(Path(__file__).parent)


SUMMED = """
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
    done = forked(SUMMED, HERE, change)
    assert done.returncode
    assert problem in done.stderr


@cache
def as_traced(change: str = "") -> dict[str, list[str]]:
    """In a process of its own: what lets fake CUDA tensors work is not undone."""
    return answer(SUMMED, HERE, change)


def on_plain_tensors(name: str) -> list[str]:
    held.clear()
    of_name: Any = loss(name, "cpu")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        of_name.backward()
    return [event.name for event in profiled.events() if event.name in ("aten::add", "aten::add_")]
