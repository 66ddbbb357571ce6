"""A trial's step on fake CUDA tensors, as the tracer runs it, under PyTorch's own memory trackers:
their peak of allocated bytes.

``python docs/results/lab/trackers.py TRACKER ORDER ANSWER``: ``docs/results/lab/peers.py``
starts it, a process for each. Private parts of PyTorch, as 2.13 has them: ``distributed._tools``
(the trackers), ``_subclasses``, ``utils._python_dispatch``.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from highwater.engine.data.batches import batches, shard
from highwater.engine.models import build as model
from highwater.engine.tracer import fake_cuda, kernel_stubs, tracer
from highwater.engine.training.rank_run import assemble, rehearsal_batch, rehearse
from highwater.engine.training.step import Training, train_step
from highwater.nouns.events import TraceOrder


def main() -> None:
    """Answer with the peak, or with what the tracker says instead."""
    which, source, target = sys.argv[1:]
    order = msgspec.json.decode(Path(source).read_bytes(), type=TraceOrder)
    if os.environ.get("HIGHWATER_PEERS_UNFUSED"):
        model.fuse_attentions = lambda _: 0  # as the engine was when the trial was measured
    began = time.monotonic()
    answer: dict[str, Any] = {"versions": {"torch": str(torch.__version__)}}
    try:
        peak = tracked(which, order)
        answer |= {
            "peak_allocated_bytes": peak[torch.device("cuda", 0)]["Total"],
            "kinds": kinds(peak),
        }
    except Exception as error:  # noqa: BLE001 -- what it says is the result
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]  # a bare assertion says nothing
        answer["error"] = f"{type(error).__name__}: {said[0]}"
    answer["seconds"] = round(time.monotonic() - began, 1)
    Path(target).write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the tracer ends


class Numbers(TorchDispatchMode):
    """Gives a number where the step asks a fake tensor for one, as the tracer does: the trackers
    cannot.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and tracer._device_of(args[0]).type == "cuda"
        ):
            return True if args[0].dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


def tracked(which: str, order: TraceOrder) -> dict[torch.device, dict[str, int]]:
    """The tracker's snapshot at its peak, by device, then by kind."""
    spec = order.spec
    fake_cuda.install()
    kernel_stubs.put(order.kernel)
    context = tracer._context(spec, order.rank, order.kernel)
    source = batches(spec, vocab_size=tracer._vocab_size(spec), data_rank=context.data_rank)
    whole = [next(source) for _ in range(spec.micro_batches)]
    own = [
        shard(batch, degree=context.sequence_degree, rank=context.sequence_rank) for batch in whole
    ]
    rehearsal = rehearsal_batch(spec, context)
    with FakeTensorMode(allow_non_fake_inputs=True), Numbers():
        training = assemble(spec, context)
        rehearse(training, rehearsal)
        with tracker_of(which, training) as tracker:
            # Their own advice for a module that is called again.
            train_step(
                training,
                own,
                enter=lambda phase: tracker.reset_mod_stats() if phase == "forward" else None,
            )
        return tracker.get_tracker_snapshot("peak")


def tracker_of(which: str, training: Training) -> MemTracker:
    """A tracker told of all that lives before the step."""
    if which == "FSDPMemTracker":
        return FSDPMemTracker(training.policy, training.optimizer)
    tracker = MemTracker()
    for decoder, optimizer in training.trained:
        tracker.track_external(decoder, optimizer)
    tracker.track_external(training.reference)
    return tracker


def kinds(peak: dict[torch.device, dict[str, int]]) -> dict[str, int]:
    """Bytes on the device at the peak, by the tracker's own names."""
    device = peak[torch.device("cuda", 0)]
    return {
        str(getattr(kind, "value", kind)): size
        for kind, size in device.items()
        if size and kind != "Total"
    }


if __name__ == "__main__":
    main()
