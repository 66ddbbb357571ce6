"""The gated delta rule, traced: a full group of tokens and the last one stand for all of a row."""

import json

import pytest
from forked_python import answer

BOTH = """
import json, os, sys
from types import SimpleNamespace
import torch
from highwater.engine.attention.gated_delta import DeltaHeads, DeltaPlan, gated_delta
from highwater.engine.attention import recurrence
from highwater.engine.tracer import fake_cuda, kernel_stubs
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.engine.tracer.fake_cuda import QuickFakeMode
from highwater.engine.tracer.inplace_accumulation import InplaceAccumulation
from highwater.nouns.events import Allocate

HEADS = DeltaHeads(2, 4, 32, 48)

def made(tokens, device):
    sizes = [(tokens, sum(HEADS.channels)), (tokens, 4, 48), (tokens, 4), (tokens, 4)]
    found = [torch.rand(size, device=device) for size in (*sizes, (sum(HEADS.channels), 4), (48,))]
    found[2] = -found[2]
    found[:2] = (each.bfloat16() for each in found[:2])
    return [each.requires_grad_() for each in found]

def step(inputs):
    tokens = len(inputs[0])
    out = gated_delta(*inputs, heads=HEADS, document_lengths=(tokens,), norm_epsilon=1e-6)
    torch.autograd.grad(out, inputs, torch.empty_like(out))

def really(tokens):
    inputs = made(tokens, "cpu")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        step(inputs)
    found = profile.profiler.kineto_results.events()
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return peak(event.nbytes() for event in events)

def peak(changes):
    alive = most = 0
    for change in changes:
        alive += change
        most = max(most, alive)
    return most

def traced(tokens):
    with QuickFakeMode(allow_non_fake_inputs=True), recorder:
        inputs = made(tokens, "cuda")
        begins = len(recorder.events)
        step(inputs)
        events = recorder.events[begins:]
        sizes = {e.id: e.bytes for e in events if isinstance(e, Allocate)}
        # what an earlier row gives back late is none of this one's
        return peak(
            e.bytes if isinstance(e, Allocate) else -sizes.get(e.id, 0)
            for e in events
        )

lengths = json.loads(sys.argv[1])
fake_cuda.install()
sums = InplaceAccumulation()
sums.learn(AllocationRecorder(sums))
recorder = AllocationRecorder(sums)
every = DeltaPlan.groups
kernel_stubs.put_one_group(recorder)
recurrence._triton = lambda: SimpleNamespace(sweep=lambda *_: None)
# the second time is recorded of the first
found = [traced(tokens) for tokens in lengths * 2]
DeltaPlan.groups = every
measured = [really(tokens) for tokens in lengths]
print(json.dumps([measured, found]), flush=True)
os._exit(0)
"""
LENGTHS = [500, 2048, 3000, 6144]
TOLERANCE = 0.001
"""Relative: documents' numbers, which are on the CPU already, are copied to a GPU."""


@pytest.mark.timeout(300)
def test_a_traced_row_takes_what_it_takes_on_the_cpu():
    measured, found = answer(BOTH, json.dumps(LENGTHS))
    assert found == pytest.approx(measured * 2, rel=TOLERANCE)
    assert measured[3] > measured[1] > measured[0]
