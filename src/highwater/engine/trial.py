"""One trial on one rank: join, measure what is outside the allocator, build, take the steps, report."""

import math
import os
import time
from importlib.metadata import version

import msgspec
import torch
from torch.cuda.nccl import version as nccl_version
from transformers.utils import logging as transformers_logging

from highwater.attention.dense import Kernel, register, select_kernel
from highwater.engine import measure
from highwater.engine.data import Batch, batches, pack
from highwater.engine.model import LanguageModel, build, read_config
from highwater.engine.step import backward_of, make_optimizer, train_step
from highwater.errors import MachineError
from highwater.parallel import mesh as process_mesh
from highwater.spec.model import load_model
from highwater.spec.trial import MemoryBudget, RankReport, TrialSpec
from highwater.units import format_bytes

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
REHEARSAL_TOKENS = 256


class Trial:
    """The state of a trial that a report can be made of at any time, also after a failure."""

    def __init__(self, spec: TrialSpec) -> None:
        self.spec = spec
        self.phase = "setup"
        self.report = RankReport(rank=int(os.environ["RANK"]), versions=_versions())
        self.watch: measure.MemoryWatch | None = None

    def run(self) -> None:
        """Do all steps. Raises whatever stops them; ``snapshot`` then says how far they came."""
        transformers_logging.set_verbosity_error()
        device, kernel, mesh, nccl_bytes = self._set_up()
        self.phase = "build"
        model = self._build(kernel, mesh)
        optimizer = make_optimizer(model)
        source = batches(self.spec, vocab_size=model.causal_lm.config.vocab_size, data_rank=mesh.get_local_rank())
        self._divide_budget(model, optimizer, mesh, device, nccl_bytes)
        for _ in range(self.spec.steps):
            self.phase = "data"
            micro_batches = [next(source) for _ in range(self.spec.micro_batches)]
            self._step(model, optimizer, micro_batches, mesh, device)
        self.phase = "report"
        self._stay_within_budget()

    def snapshot(self) -> RankReport:
        """The report as of now, memory peaks included."""
        return self._with(memory=self.watch.peaks()) if self.watch else self.report

    def _set_up(self) -> tuple[torch.device, Kernel, torch.distributed.DeviceMesh, int]:
        """The device, its attention kernel, the joined mesh, and what NCCL took of the device for it."""
        spec = self.spec
        device = torch.device("cpu")
        if spec.device == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            _refuse_unfit(device)
        shape = load_model(spec.model_directory).shape
        kernel = select_kernel(
            device, compute_dtype(device), query_heads=shape.query_heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim
        )
        before_nccl = self._settle(device)
        process_mesh.join(device)
        mesh = process_mesh.shard_mesh(spec.layout, device)
        process_mesh.warm_up(mesh)
        nccl_bytes = 0
        if spec.device == "cuda":
            torch.cuda.synchronize(device)
            nccl_bytes = max(0, measure.outside_allocator_bytes(device) - before_nccl)
        self.watch = measure.MemoryWatch(device)
        self.report = self._with(
            attention_kernel=kernel,
            allocator_settings={name: os.environ.get(name, "") for name in ALLOCATOR_VARIABLES},
            device_name=torch.cuda.get_device_name(device) if spec.device == "cuda" else "CPU",
        )
        return device, kernel, mesh, nccl_bytes

    def _settle(self, device: torch.device) -> int:
        """Create the context and cuBLAS's handles; bytes then in use outside the allocator."""
        if device.type != "cuda":
            return 0
        a = torch.ones(256, 256, device=device, dtype=compute_dtype(device), requires_grad=True)
        (a @ a).sum().backward()
        torch.cuda.synchronize(device)
        return measure.outside_allocator_bytes(device)

    def _divide_budget(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        mesh: torch.distributed.DeviceMesh,
        device: torch.device,
        nccl_bytes: int,
    ) -> None:
        """Give the allocator what the budget leaves, once everything outside it is there."""
        limit = self.spec.memory_budget_bytes
        if device.type == "cuda":
            self._rehearse(model, optimizer, mesh)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            budget = measure.divide_budget(device, budget_bytes=limit, nccl_bytes=nccl_bytes)
        else:
            assert limit is not None
            budget = MemoryBudget(budget_bytes=limit, context_bytes=0, nccl_bytes=0, allocator_cap_bytes=limit)
        self.report = self._with(budget=budget)
        self.watch = measure.MemoryWatch(device)

    def _rehearse(self, model: LanguageModel, optimizer: torch.optim.Optimizer, mesh: torch.distributed.DeviceMesh) -> None:
        """Forward and backward of a few tokens: the driver loads kernels when they are first used, outside the allocator."""
        ids = torch.zeros(min(REHEARSAL_TOKENS, self.spec.length_tokens), dtype=torch.long)
        backward_of([pack([(ids, ids)])], model, mesh=mesh)
        optimizer.zero_grad(set_to_none=False)

    def _stay_within_budget(self) -> None:
        """A trial that fit by taking more than its budget, outside the allocator, did not fit."""
        assert self.watch is not None
        used, budget = self.watch.peaks().device_used_bytes, self.report.budget
        if used is not None and budget is not None and used > budget.budget_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {format_bytes(used)} used on the device, {format_bytes(budget.budget_bytes)} allowed: "
                "what is outside the allocator grew after the first step began"
            )

    def _build(self, kernel: Kernel, mesh: torch.distributed.DeviceMesh) -> LanguageModel:
        spec = self.spec
        config = read_config(spec.model_directory, length_tokens=spec.length_tokens, rope=spec.settings.rope)
        model = build(
            config,
            directory=spec.model_directory,
            mesh=mesh,
            attention=register(kernel),
            loss=spec.settings.loss,
            recompute=spec.settings.recompute,
            compute_dtype=compute_dtype(torch.device(mesh.device_type)),
            seed=spec.seed,
        )
        self.report = self._with(parameters=sum(p.numel() for p in model.parameters()))
        return model

    def _step(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        micro_batches: list[Batch],
        mesh: torch.distributed.DeviceMesh,
        device: torch.device,
    ) -> None:
        _synchronize(device)
        began = time.perf_counter()
        first = self.report.first_step_at_unix_s or time.time()
        loss, norm = train_step(model, optimizer, micro_batches, mesh=mesh, enter=self._enter)
        values = {"loss": float(loss), "gradient norm": float(norm)}  # waits for the device
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"the {name} of step {len(self.report.losses) + 1} is {value}")
        self.report = self._with(
            losses=(*self.report.losses, values["loss"]),
            gradient_norms=(*self.report.gradient_norms, values["gradient norm"]),
            step_times_s=(*self.report.step_times_s, time.perf_counter() - began),
            first_step_at_unix_s=first,
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self.watch:
            self.watch.sample()

    def _with(self, **changes: object) -> RankReport:
        return msgspec.structs.replace(self.report, **changes)


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs; float32 on the CPU, where bfloat16 products are slow."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _refuse_unfit(device: torch.device) -> None:
    """Raise MachineError for a GPU without bfloat16 or flash attention."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise MachineError(
            f"{name} has neither bfloat16 nor flash attention (compute capability {capability[0]}.{capability[1]})",
            hint="use a GPU of compute capability 8.0 or newer, for example an A100",
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("highwater", "torch", "transformers")}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(str(part) for part in nccl_version())
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found
