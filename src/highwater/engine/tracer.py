"""The tracer: a trial's own steps on fake CUDA tensors, at full depth and any length; writes what a rank allocates and frees.

``python -m highwater.engine.tracer ORDER EVENTS`` in a process of its own, on any machine: no number is computed, no GPU asked.
What runs is the engine's own code; what a CPU build cannot run is stood in for by what makes the same allocations: the fused
attention and norm, the Triton kernels. What a kernel takes for itself and gives back is in ``hidden_bytes.py``.
No size depends on a number: experts are one product over all of them, of as many rows wherever a router sends the tokens.
"""

import gc
import os
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from highwater.attention.dense import prove
from highwater.engine import fake_cuda, model, stand_ins, trinity
from highwater.engine.assemble import assemble
from highwater.engine.data import batches, shard
from highwater.engine.fake_dispatch import QuickFakeMode
from highwater.engine.gradient_sums import GradientSums
from highwater.engine.hidden_bytes import HIDDEN, in_column_sums
from highwater.engine.place import Place, compute_dtype
from highwater.engine.step import train_step
from highwater.engine.trial import rehearsal_batch, rehearse
from highwater.parallel import mesh as process_mesh
from highwater.spec.events import Allocate, Enter, Event, EventLog, Free, GiveBack, ReleaseCached, TraceOrder
from highwater.spec.hardware import Kernel
from highwater.spec.model import load_model
from highwater.spec.trial import TrialSpec

aten: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default


def main() -> None:
    """Trace what the first file orders into the second."""
    exit_code = 1
    try:
        order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TraceOrder)
        target = Path(sys.argv[2])
        unfinished = target.with_suffix(".partial")
        unfinished.write_bytes(msgspec.json.encode(trace(order)))
        unfinished.replace(target)
        exit_code = 0
    except Exception:  # noqa: BLE001 -- the edge of the process, which has to end as the next line has it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # the interpreter's end would let go of fakes that C++ still knows


def trace(order: TraceOrder) -> EventLog:
    """What a rank of the trial allocates and frees on its device, from the model's first shard to the end of the last step.

    What lies in host memory is not in it.
    """
    spec = order.spec
    fake_cuda.install()
    stand_ins.put(order.kernel)
    place = _place(spec, order.rank, order.kernel)
    source = batches(spec, vocab_size=_vocab_size(spec), data_rank=place.data_rank)
    whole = [[next(source) for _ in range(spec.micro_batches)] for _ in range(spec.steps)]
    rehearsal = rehearsal_batch(spec, place)
    sums = GradientSums()
    sums.learn(EventLedger(sums))
    ledger = EventLedger(sums)
    ledger.hidden = HIDDEN | {aten.sum.dim_IntList: partial(in_column_sums, resident_threads=order.resident_threads)}
    if order.trainer == "trinity":  # its traces are to lie on lines over the tokens, which these bytes do not
        ledger.hidden.pop(aten.embedding_dense_backward.default)
    elif place.mesh.size() > 1:
        ledger.most_awaited = _LENT_BY_FSDP1
    fake_cuda.heard_record_stream.append(ledger.lend)
    fake_cuda.heard_gradient.append(ledger.pass_on)
    fake_cuda.heard_wait.append(ledger.wait)
    _mute_while_shapes_are_asked(ledger)
    gc.disable()  # a collection would free at moments that another process does not
    with QuickFakeMode(allow_non_fake_inputs=True), ledger:
        if order.trainer == "trinity":
            trainer = trinity.assemble(spec, place)
            ledger.follow(trainer.policy)
        else:
            _prove_kernel(spec, place)
            trainer = assemble(spec, place)
            ledger.follow(trainer.policy)
            ledger.enter("rehearsal")
            rehearse(trainer, rehearsal)
            ledger.events.append(ReleaseCached())
        for step in whole:
            with unset_fake_temporarily():
                own = [shard(batch, degree=place.sequence_degree, rank=place.sequence_rank) for batch in step]
            if order.trainer == "trinity":  # before it sends the weights to its explorer: once they are there, and after each step
                ledger.release()
            train_step(trainer, own, enter=ledger.enter)
        ledger.is_closed = True
    versions = {"torch": str(torch.__version__), "transformers": version("transformers")}
    return EventLog(
        source="traced",
        versions=versions,
        operators=tuple(ledger.operators),
        modules=tuple(ledger.modules),
        events=tuple(ledger.events),
    )


class EventLedger(TorchDispatchMode):
    """Every storage on the device that an operator returns: its birth, its resizing, its end."""

    def __init__(self, sums: GradientSums | None = None) -> None:
        """Without ``sums`` that have learned, gradients are added up in copies."""
        super().__init__()
        self.events: list[Event] = []
        self.operators: dict[str, int] = {}
        self.modules: dict[str, int] = {"": 0}
        self.is_closed = False
        self.is_muted = False
        """While DTensor asks for shapes with tensors of the whole model's size, which no rank ever has."""
        self._count = 0
        self._ids: dict[int, list[int]] = {}
        """By storage: the id of its allocation now, 0 for none, its bytes and its stream."""
        self._within = [0]
        self._lent: dict[int, bool] = {}
        """Storages that a stream other than their own uses; whether FSDP1 said so, which waits for what it lends."""
        self._awaited: deque[tuple[int, int, bool]] = deque()
        """Allocations given back and not free yet, the oldest first: after how many launches, which, and whether FSDP1 lent it."""
        self._launches = 0
        self.most_awaited: int | None = None
        self.hidden = HIDDEN
        self._sums = sums or GradientSums()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled: no frame has to be kept from it at every call

    def follow(self, decoder: nn.Module) -> None:
        """Name what is allocated in a forward pass by the module that runs."""
        for name, module in decoder.named_modules():
            index = self.modules.setdefault(model.name_in_files(f"{name}.").rstrip("."), len(self.modules))
            module.register_forward_pre_hook(lambda *_, index=index: self._within.append(index), prepend=True)
            # Also where a recomputation ends in the middle of it.
            module.register_forward_hook(self._leave, always_call=True)

    def _leave(self, *_: object) -> None:
        self._within.pop()

    def enter(self, phase: str) -> None:
        """Told by the step which phase begins."""
        if phase == _FIRST_PHASE:
            self.wait()
        self.events.append(Enter(phase))

    def lend(self, tensor: Tensor, stream: fake_cuda.Stream) -> None:
        """A stream uses it (``record_stream``): if not its own, it is free, once given back, when the GPU is done there."""
        key = _key(tensor.untyped_storage())
        if key in self._ids and self._ids[key][2] != stream.stream_id:
            self._lent[key] = True

    def pass_on(self, gradient: Tensor, stream: fake_cuda.Stream) -> None:
        """Autograd goes on with it on a stream. A sum of gradients was made there: its allocation moves. Any other is lent."""
        record = self._ids.get(_key(gradient.untyped_storage()))
        if record is None or not record[0] or record[2] == stream.stream_id:
            return
        index, made = self._made(record[0])
        if made.operator == self.operators.get(str(aten.add.Tensor)):
            self.events[index] = msgspec.structs.replace(made, stream=stream.stream_id)
            record[2] = stream.stream_id
        else:
            self._lent.setdefault(_key(gradient.untyped_storage()), False)

    def _made(self, number: int) -> tuple[int, Allocate]:
        """Where among the events an allocation is, looked for from the newest."""
        return next(
            (index, event)
            for index, event in zip(range(len(self.events) - 1, -1, -1), reversed(self.events), strict=True)
            if isinstance(event, Allocate) and event.id == number
        )

    def __enter__(self) -> "EventLedger":
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2's way to give memory back and take it again
            resized = resize(storage, size)
            self._resized(storage)
            return resized

        storages: Any = torch.UntypedStorage
        storages.resize_ = watched
        self._resize = resize
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        storages: Any = torch.UntypedStorage
        storages.resize_ = self._resize
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types if kind is not FakeTensor):
            return NotImplemented  # a DTensor: its local operators come here by themselves
        if func is aten._local_scalar_dense.default and _device_of(args[0]).type == "cuda":
            self.wait()
            return True if args[0].dtype is torch.bool else 1  # nobody knows the number, and no memory depends on it
        if func in _QUADRATIC and args[0].ndim > 2:  # a router's is tokens x experts
            raise RuntimeError(f"{func} would hold tokens x tokens numbers: a fused attention runs on the GPUs that are meant")
        results = self._sums.operator(func, args)(*args, **kwargs)
        if not self.is_muted and not func.is_view:
            self._launches += 1
            self._await(self._launches - (0 if _waits_for_gpu(func, args, kwargs, results) else _LAUNCHES_AHEAD))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and _device_of(tensor).type == "cuda":
                self._see(tensor, str(func))
        takes = None if self.is_muted else self.hidden.get(func)
        hidden = takes(args) if takes is not None and _device_of(args[0]).type == "cuda" else []
        ids = [self._allocate(size, f"inside {func}") for size in hidden]
        self.events.extend(Free(number) for number in reversed(ids))
        return results

    def _see(self, tensor: Tensor, operator: str) -> None:
        if self.is_muted or is_traceable_wrapper_subclass_type(type(tensor)):
            return
        storage = tensor.untyped_storage()
        key = _key(storage)
        if key in self._ids:
            return
        size = storage.nbytes()
        record = [self._allocate(size, operator), size, fake_cuda.Stream.current.stream_id]
        self._ids[key] = record
        weakref.finalize(storage, self._gone, key, record).atexit = False

    def _resized(self, storage: torch.UntypedStorage) -> None:
        record = self._ids.get(_key(storage))
        size = storage.nbytes()
        if record is None or size == record[1]:
            return
        if record[0]:
            self._end(_key(storage), record[0])
        record[:] = [self._allocate(size, "resize_") if size else 0, size, fake_cuda.Stream.current.stream_id]

    def _gone(self, key: int, record: list[int]) -> None:
        self._ids.pop(key, None)
        if record[0] and not self.is_closed:
            self._end(key, record[0])
        self._lent.pop(key, None)  # another storage may come to the same place

    def _end(self, key: int, number: int) -> None:
        by_fsdp = self._lent.pop(key, None)
        if by_fsdp is None:
            self.events.append(Free(number))
            return
        self.events.append(GiveBack(number))
        self._awaited.append((self._launches, number, by_fsdp))
        if self.most_awaited is None:
            return
        of_fsdp = [launches for launches, _, is_fsdps in self._awaited if is_fsdps]
        if len(of_fsdp) > self.most_awaited:
            self._await(of_fsdp[-1 - self.most_awaited])

    def wait(self) -> None:
        """The host does, until the GPU has done all that it was told."""
        self._await(self._launches)

    def release(self) -> None:
        """The allocator gives back what is cached, once the GPU has done with it."""
        self.wait()
        self.events.append(ReleaseCached())

    def _await(self, launches: int) -> None:
        """The GPU has come so far."""
        while self._awaited and self._awaited[0][0] <= launches:
            self.events.append(Free(self._awaited.popleft()[1]))

    def _allocate(self, size: int, operator: str) -> int:
        self._count += 1
        index = self.operators.setdefault(operator, len(self.operators))
        self.events.append(Allocate(self._count, size, fake_cuda.Stream.current.stream_id, index, self._within[-1]))
        return self._count


def _key(storage: torch.UntypedStorage) -> int:
    """Where C++ has it: Python may make another object of the same storage."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage] -- nothing public tells


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _waits_for_gpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """A copy between the host and the GPU is over before the host goes on, unless it was told not to wait."""
    if func is aten.copy_.default:
        source, goes_on = args[1], kwargs.get("non_blocking", args[2:] == (True,))
    elif func is aten._to_copy.default:
        source, goes_on = args[0], kwargs.get("non_blocking", False)
    else:
        return False
    return not goes_on and _device_of(source).type != _device_of(result).type


_FIRST_PHASE = "experience"
"""Before it the host reads the loss of the step before, for which it waits until the GPU is done."""
_LAUNCHES_AHEAD = 1024
"""Kernels that the host may have launched and the GPU not run: CUDA's queue. With it FSDP1's trials on an H200 reserve at
most 0.5 % more than their traces, without 7.6 % (docs/results/predict)."""
_LENT_BY_FSDP1 = 4
"""Among several ranks FSDP1 gathers two units ahead at the most: their gathered parameters, and the shards that these
came from. Compared with no trial yet."""
_QUADRATIC = (aten._softmax.default, aten._safe_softmax.default)


def _mute_while_shapes_are_asked(ledger: EventLedger) -> None:
    propagator: Any = ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    ask = getattr(propagator, name)

    def muted(*args: Any, **kwargs: Any) -> Any:
        before, ledger.is_muted = ledger.is_muted, True
        try:
            return ask(*args, **kwargs)
        finally:
            ledger.is_muted = before

    setattr(propagator, name, muted)


def _place(spec: TrialSpec, rank: int, kernel: Kernel) -> Place:
    dist.init_process_group("fake", rank=rank, world_size=spec.layout.gpus, store=FakeStore())
    device = torch.device("cuda", 0)
    mesh = process_mesh.shard_mesh(spec.layout, device)
    return Place(device=device, kernel=kernel, mesh=mesh, sequence=process_mesh.sequence_group(spec.layout, mesh), nccl_bytes=0)


def _prove_kernel(spec: TrialSpec, place: Place) -> None:
    """What a rank does before it has a model: a native allocator cuts the first weights out of what this leaves."""
    shape = load_model(spec.model_directory).shape
    heads = {"query_heads": shape.query_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    prove(place.kernel, place.device, compute_dtype(place.device), **heads)


def _vocab_size(spec: TrialSpec) -> int:
    return model.read_config(spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope).vocab_size


if __name__ == "__main__":
    main()
