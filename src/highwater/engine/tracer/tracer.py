"""Tracer: run a trial's own steps on fake CUDA tensors, and record what a rank allocates.

``python -m highwater.engine.tracer.tracer ORDER EVENTS`` runs in a process of its own, on any
machine: no number is computed, no GPU is used. The engine's own code runs; kernels that a CPU build
cannot run (fused attention and norm, Triton) are replaced by stubs with the same allocations. Plain
attention computes only the rows that take the most memory. Workspaces inside kernels are in
``allocation_recorder.py``. No size depends on a computed value: all experts are one product, with
the same number of rows wherever a router sends the tokens.
"""

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from highwater.engine.activations import host
from highwater.engine.data.batches import batches
from highwater.engine.models.build import read_config
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.tracer import (
    fake_cuda,
    highwater_step,
    kernel_stubs,
    transformers_step,
    trinity_step,
)
from highwater.engine.tracer.allocation_recorder import (
    WORKSPACES,
    AllocationRecorder,
    in_column_sums,
)
from highwater.engine.tracer.fake_cuda import QuickFakeMode
from highwater.engine.tracer.highwater_step import TracedTrainer
from highwater.engine.tracer.inplace_accumulation import InplaceAccumulation
from highwater.engine.training.rank_context import RankContext
from highwater.engine.training.rank_run import rehearsal_batch
from highwater.nouns.codec import write_whole
from highwater.nouns.events import EventLog, TraceOrder
from highwater.nouns.hardware import Kernel
from highwater.nouns.trainer import TrainerName
from highwater.nouns.trial import TrialSpec

aten: Any = torch.ops.aten
STEPS: Mapping[TrainerName, TracedTrainer] = {
    "highwater": highwater_step.TRACED,
    "trinity": trinity_step.TRACED,
    "transformers": transformers_step.TRACED,
}
"""The traced step of each trainer that has one; imported, as traces are kept by imports."""


def main() -> None:
    """Make the trace ordered by the file ``ORDER``, and write it to the file ``EVENTS``."""
    exit_code = 1
    try:
        order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TraceOrder)
        write_whole(Path(sys.argv[2]), msgspec.json.encode(trace(order)))
        exit_code = 0
    # a process edge: the process must end by the last line
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a normal exit would free fakes that C++ still refers to


def trace(order: TraceOrder) -> EventLog:
    """Return all allocations and frees of a rank on its device, from the model's first shard to the
    end of the last step. Of host memory only activations are counted.
    """
    spec, trainer = order.spec, STEPS[order.trainer]
    if spec.settings.lora is not None or trainer.needs_peft:
        # importing peft, and with it bitsandbytes, must not find the GPU that is faked below
        with suppress(ImportError):
            importlib.import_module("peft")
    fake_cuda.install()
    host.map_pinned = lambda size, *_: (torch.empty(size, dtype=torch.uint8), lambda: None)
    kernel_stubs.put(order.kernel)
    if spec.settings.optimizer != "adamw":
        kernel_stubs.put_low_bit()
    context = _context(spec, order.rank, order.kernel)
    config = read_config(
        spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope
    )
    source = batches(spec, vocab_size=config.vocab_size, data_rank=context.data_rank)
    whole = [[next(source) for _ in range(spec.micro_batches)] for _ in range(spec.steps)]
    rehearsal = rehearsal_batch(spec, context)
    sums = InplaceAccumulation()
    sums.learn(AllocationRecorder(sums))
    recorder = AllocationRecorder(sums)
    recorder.hidden = WORKSPACES | {
        aten.sum.dim_IntList: partial(in_column_sums, resident_threads=order.resident_threads)
    }
    trainer.set_up(recorder, context)
    fake_cuda.heard_record_stream.append(recorder.lend)
    fake_cuda.heard_gradient.append(recorder.pass_on)
    # On a single rank other streams only copy, and are done by then, as recorded on H200s.
    fake_cuda.heard_wait.append(
        recorder.wait_for if context.mesh.size() > 1 else lambda _: recorder.wait()
    )
    _mute_while_shapes_are_asked(recorder)
    kernel_stubs.put_one_group(recorder)
    gc.disable()  # a collection would free memory at moments that differ between processes
    with QuickFakeMode(allow_non_fake_inputs=True), recorder:
        training = trainer.begin(spec, context, rehearsal, recorder)
        for step in whole:
            with unset_fake_temporarily():
                own = [context.share_of(batch) for batch in step]
            trainer.before_step(recorder)
            trainer.step(training, own, recorder.enter)
            trainer.after_step(training, own)
        recorder.is_closed = True
    versions = {"torch": str(torch.__version__), "transformers": version("transformers")}
    return EventLog(
        source="traced",
        versions=versions,
        operators=tuple(recorder.operators),
        modules=tuple(recorder.modules),
        events=tuple(recorder.events),
        host_bytes=0 if training.host is None else training.host.memory.mapped_bytes,
    )


def _mute_while_shapes_are_asked(recorder: AllocationRecorder) -> None:
    propagator: Any = ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    ask = getattr(propagator, name)

    def muted(*args: Any, **kwargs: Any) -> Any:
        before, recorder.is_muted = recorder.is_muted, True
        try:
            return ask(*args, **kwargs)
        finally:
            recorder.is_muted = before

    setattr(propagator, name, muted)


def _context(spec: TrialSpec, rank: int, kernel: Kernel) -> RankContext:
    dist.init_process_group("fake", rank=rank, world_size=spec.layout.gpus, store=FakeStore())
    device = torch.device("cuda", 0)
    mesh = process_mesh.shard_mesh(spec.layout, device)
    return RankContext(
        device=device,
        kernel=kernel,
        mesh=mesh,
        shared=process_mesh.sequence_groups(spec.layout, mesh),
        nccl_bytes=0,
    )


if __name__ == "__main__":
    main()
