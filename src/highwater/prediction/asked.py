"""Asked: the question of a prediction, every rung and layout on GPUs that need not be here, and the memory that it is about."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from highwater.errors import UsageError
from highwater.prediction.calibration import Calibration, calibrate
from highwater.prediction.capacity import CellPrediction, Room, predict_cells
from highwater.prediction.residuals import Method, Residual, shipped_residuals
from highwater.prediction.shipped import predict_trinity
from highwater.spec.bounds import MOST_STATE_BYTES
from highwater.spec.cluster import Cluster
from highwater.spec.events import Trainer
from highwater.spec.model import load_model
from highwater.spec.plan import plan, refuse_past_window, ulysses_obstacle
from highwater.spec.published import PUBLISHED_SETTINGS
from highwater.spec.request import Request, request_from
from highwater.spec.study import Question
from highwater.units import format_bytes, parse_memory

_TRINITY_SETTINGS = frozenset(
    (
        *("ulysses", "allocator", "offload", "sequences_per_micro_batch", "token_budget", "rope"),
        *("margin", "start_length", "resolution", "max_length"),
    )
)
"""What that trainer's formula depends on, what names a grid, and how positions are scaled, which takes no memory."""


def predicted_question(
    model: str, where: Cluster, trainer: Trainer, length_tokens: int | None, settings: dict[str, Any]
) -> tuple[Question, tuple[str, ...]]:
    """Every rung, on a grid or at one length; and the notes of its plan."""
    named = [name for name in ("start_length", "resolution", "max_length") if length_tokens is not None and name in settings]
    if named:
        raise UsageError(f"one length, and a {named[0].replace('_', ' ')}", hint=f"leave `--{named[0].replace('_', '-')}` out")
    if length_tokens is not None and length_tokens < 2:
        raise UsageError("a length of 1 token", hint="use `--length 2` or more: one to read, one to predict")
    in_windows = trainer != "highwater"
    if length_tokens is not None:
        settings = settings | {"start_length": length_tokens, "max_length": length_tokens}
        if not in_windows:
            refuse_past_window(load_model(model), length_tokens, flag="--length")
    plans = [plan(request, where.machine(), in_windows=in_windows) for request in _requests(model, where.gpus, trainer, settings)]
    cells = tuple(cell for each in plans for cell in each.question.cells)
    return msgspec.structs.replace(plans[0].question, cells=cells), plans[0].notes


def _requests(model: str, gpus: int, trainer: Trainer, settings: Mapping[str, Any]) -> list[Request]:
    """What is asked of each ladder: without offload and, unless the settings say, with it; every Ulysses degree that works."""
    shape = load_model(model).shape
    degrees = [degree for degree in range(1, gpus + 1) if ulysses_obstacle(shape, gpus=gpus, degree=degree) is None]
    common: dict[str, Any] = {"model": model, "gpus": [gpus], "ulysses": degrees, "device": "cuda", "dry_run": True}
    if trainer == "trinity":
        same = ("objective", "entropy", *(() if "token_budget" in settings else ("sequences_per_micro_batch",)))
        common |= {name: getattr(PUBLISHED_SETTINGS["vanilla"], name) for name in same} | {"loss": "full", "strategy": "fsdp"}
        refused = sorted(set(settings) - _TRINITY_SETTINGS)
        if refused:
            name = refused[0].replace("_", "-")
            raise UsageError(f"the trainer trinity is not known with another {name}", hint=f"leave `--{name}` out")
        if settings.get("offload"):  # no published rung offloads with the native allocator
            common |= {"allocator": PUBLISHED_SETTINGS["env+offload"].allocator}
    ladders = [{**common, **settings}]
    if "offload" not in settings and settings.get("allocator") != "native":
        ladders.append({**common, "allocator": "expandable", "strategy": "fsdp2", "offload": True, **settings})
    requests = [request_from(asked, keywords=True) for asked in ladders]
    if trainer == "trinity":  # its configuration offloads by FSDP2 alone
        requests = [msgspec.structs.replace(each, strategy="fsdp2") if each.offload else each for each in requests]
    return requests


def calibration_of(
    question: Question, room: Room, trainer: Trainer, *, method: Method = "formula", own: Sequence[Residual] = ()
) -> Calibration | None:
    """What the intervals of a question are learned from; None for a trainer whose trials nobody recorded."""
    if trainer != "highwater":
        return None
    return calibrate(
        question, method, shipped=shipped_residuals(), own=own, state_bytes_per_parameter=room.state_bytes_per_parameter
    )


def predict_by_formula(question: Question, room: Room, trainer: Trainer, known: Calibration | None) -> tuple[CellPrediction, ...]:
    """Every cell in closed form; the reference system's by replay, where its trace comes along."""
    return predict_trinity(question, room) if trainer == "trinity" else predict_cells(question, room, trainer, known)


def room_in(where: Cluster, *, host_memory: str | int | None, reserved: str | int, state_bytes_per_param: int) -> Room:
    """What each GPU has for training; raises UsageError where nothing is left, or for sizes that cannot be."""
    reserved_bytes = parse_memory(str(reserved))
    if reserved_bytes >= where.device_bytes:
        raise UsageError(
            f"{format_bytes(reserved_bytes)} are reserved of a GPU of {format_bytes(where.device_bytes)}",
            hint="use a smaller `--reserved`, or leave it out",
        )
    host_bytes = None if host_memory is None else parse_memory(str(host_memory))
    if host_bytes == 0:
        raise UsageError("a host without memory", hint="give the machine's, for example `--host-memory 512GiB`, or leave it out")
    if state_bytes_per_param < 1:
        raise UsageError(f"{state_bytes_per_param} bytes of states a parameter", hint="for example `--state-bytes-per-param 8`")
    if state_bytes_per_param > MOST_STATE_BYTES:
        problem = f"more than {MOST_STATE_BYTES} bytes of states a parameter"
        raise UsageError(problem, hint="for example `--state-bytes-per-param 8`")
    return Room(
        device_bytes=where.device_bytes - reserved_bytes,
        host_bytes=host_bytes,
        state_bytes_per_parameter=state_bytes_per_param,
    )
