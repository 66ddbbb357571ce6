"""The question of a prediction: all settings and layouts on GPUs, and the GPUs' memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from highwater.errors import ModelError, UsageError
from highwater.memory.capacity import (
    TRACED_ACCURACY,
    CellPrediction,
    FailedAllocation,
    MemoryLimit,
    Prediction,
)
from highwater.memory.formula.constants import MachineConstants
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.formula.rollout import SHARES
from highwater.memory.interval.calibration import Calibration
from highwater.memory.interval.residuals import PredictionMethod
from highwater.memory.trainers import (
    MEMORY,
    accuracy,
    by_replay,
    calibration_of,
    predict_untraced,
    refused_settings,
)
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.cells import heads_obstacle, ring_obstacle, simplicity
from highwater.nouns.cluster import Cluster
from highwater.nouns.hardware import (
    THIS_MACHINE,
    Machine,
    default_host,
    hour_dollars_of,
    runs_trials,
)
from highwater.nouns.layout import WIDEST_FUSED_HEAD
from highwater.nouns.objective import TRAITS
from highwater.nouns.plan import plan
from highwater.nouns.request import TOPICS, Request, request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question, counted_ranks, default_headroom_bytes
from highwater.nouns.trainer import OURS, TRAINERS, TrainerName, trainer_title
from highwater.nouns.trial import refuse_one_token
from highwater.speed import BASIS_IN_WORDS, MEASURED, cost_of, predicted_step, rates_of
from highwater.units import format_bytes, parse_memory

ZERO_NOTE = "ZeRO-3 is taken as FSDP2, which shards nearly so, without its buckets"
"""Note of a prediction with ZeRO-3 for a trainer whose formula has FSDP2 alone."""
KEPT_REFERENCE = "as written the file keeps a reference model on the GPU, which is not predicted"
"""Note of a prediction for a user's file whose reference does not run before training."""

HEADS_SHARE = "heads share a sequence among "
"""Beginning of a note that Ulysses cannot have all GPUs share one."""
UNMEASURED = {
    "deepspeed": "DeepSpeed is read off its source: allocated memory within 2 %; its allocator may "
    "reserve up to 2.9 x that, which PyTorch frees before it runs out",
    "paged": "paged moments are predicted by the source of bitsandbytes 0.50.2, and were never "
    "measured: they count as host memory, though CUDA keeps them on the GPU where there is room",
}
"""Notes of predictions whose settings were read off a source, not measured, by their names."""


def predicted_question(
    model: str,
    where: Cluster,
    trainer: TrainerName,
    length_tokens: int | None,
    settings: dict[str, Any],
) -> tuple[Question, tuple[str, ...]]:
    """The question with every rung, on a grid or at ``length_tokens``; and notes. ``settings`` are
    fields of ``Request``; UsageError for one that the trainer or the model cannot have.
    """
    settings = {"headroom": default_headroom_bytes(where.device_bytes), **settings}
    # trials of a foreign trainer without DeepSpeed: FSDP shards as ZeRO-3 does, and a note says so
    no_zero = TRAINERS[trainer].is_watched and TRAINERS[trainer].refused(["deepspeed"])
    is_zero = bool(no_zero) and settings.get("deepspeed") == "zero3"
    if is_zero:
        settings = without_zero(model, settings)
    if settings.get("rollout") and refused_settings(trainer, {"prompt_tokens": -1}):
        settings.pop("prompt_tokens", None)  # the rollout has them; the step has its own
    if length_tokens is not None:
        for row in TOPICS["lengths"]:
            if row.name in settings:
                raise UsageError(f"one length, and a {row.words}", hint=f"leave `{row.flag}` out")
        refuse_one_token(length_tokens)
        settings = settings | {"start_length": length_tokens, "max_length": length_tokens}
    plans = [
        plan(request, where.machine(), trainer=trainer, machines=where.machines)
        for request in _requests(model, where, trainer, settings)
    ]
    every = (cell for each in plans for cell in each.question.cells)
    # of cells that reach as far, the answer is the first: one without activations on the host
    cells = tuple(sorted(every, key=lambda cell: cell.settings.activations == "host"))
    question = plans[0].question.replace(cells=cells)
    notes = (ZERO_NOTE,) if is_zero else ()
    notes += plans[0].notes
    notes += _ring_notes(model, where, trainer, settings, question.grid.max_tokens)
    notes += tuple(_hardware_notes(where))
    shape = question.model.shape
    if shape.widest_head > WIDEST_FUSED_HEAD and trainer == OURS:
        notes += (BASIS_IN_WORDS["of_wide_heads"],)
    if shape.delta is not None and trainer == OURS:
        notes += (BASIS_IN_WORDS["of_an_operator"],)
    of_a_source = (n for n in UNMEASURED if getattr(cells[0].settings, n) not in ("none", False))
    return question, (*notes, *(UNMEASURED[name] for name in of_a_source))


_NEEDS_FSDP = {
    "ring": "a ring is FSDP2's context parallelism: with DeepSpeed there is none",
    "copies": "DeepSpeed's ZeRO shares states among all GPUs: there are no copies",
    "ulysses": "with DeepSpeed's own Ulysses only models with windows are predicted",
}


def without_zero(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with FSDP2 in the place of ZeRO-3, and with no ring. Raises UsageError for a typed
    way to share among GPUs that DeepSpeed lacks, or with which its own is not predicted.
    """
    degrees = request_from({"model": model, **settings}, keywords=True)
    for name, problem in _NEEDS_FSDP.items():
        has_own = name == "ulysses" and not load_model(model).shape.has_plain_attention
        if not has_own and {1, *(getattr(degrees, name) or ())} != {1}:
            hint = f"leave `--{name}` out, or DeepSpeed: FSDP2 shards as ZeRO-3 does, and has rings"
            raise UsageError(problem, hint=hint)
    return {**{n: v for n, v in settings.items() if n != "deepspeed"}, "ring": [1]}


def _requests(
    model: str, where: Cluster, trainer: TrainerName, settings: Mapping[str, Any]
) -> list[Request]:
    """One request for each value of offload: without; then, unless the settings fix it, with the
    moments on the host, and with all states on the host. ``cells_of`` makes ladders of each: with
    activations on the GPU and on the host, in every Ulysses degree that works.
    """
    refused = refused_settings(trainer, settings)
    if refused:
        flag = f"`--{refused[0].replace('_', '-')}`"
        title, always = trainer_title(trainer), MEMORY[trainer].fixed_fields({})
        hint = f"leave {flag} out"
        if refused[0] == "objective" and "objective" in always:
            hint = f"use `--objective {always['objective']}`, with which it is"
        if refused[0] == "liger" and not refused_settings(trainer, {"loss": "chunked"}):
            hint += " and use `--loss chunked`, as Liger's fused loss is"
        if refused[0] == "prompt_tokens":
            hint += ": lengths are of prompt and completion together"
        if refused[0] == "deepspeed":
            hint += ": states are sharded among GPUs as ZeRO-3 shards them, without a flag"
        objective = TRAITS.get(settings.get("objective", "sft"))
        is_of_trl = objective is not None and not objective.critic
        is_of_trl &= {*refused_settings("trl", settings)} <= {"deepspeed"}
        if refused[0] == "objective" and is_of_trl:
            hint = "use `--trainer trl`, whose step is predicted with it"
        raise UsageError(f"{title} is not predicted with {flag}", hint=hint)
    common: dict[str, Any] = {
        "model": model,
        "gpus": [where.gpus],
        **_default_degrees(model, where, trainer, settings),
        "device": "cuda",
        # Effects, in nouns/plan.py and nouns/trial_hardware.py: the grid is as fine past the native
        # length as before it; the proof is full; this machine's GPUs and host memory are not
        # checked; and the question is ``simulated``.
        "dry_run": True,
        **MEMORY[trainer].fixed_fields(settings),
    }
    if settings.get("offload") == "states" and not TRAINERS[trainer].offloads_states:
        raise UsageError(
            f"the trainer {trainer} has its moments in host memory only with all the rest",
            hint="use `--offload`, or leave `--offload states` out",
        )
    requested = [{**common, **settings}]
    # other optimizers do not update on the host, and a model in nf4 does not come from there
    may_offload = settings.get("optimizer", "adamw") == "adamw"
    may_offload &= settings.get("lora_base", "bf16") == "bf16"
    may_offload &= not TRAINERS[trainer].refused(["offload"])
    is_native = settings.get("allocator") == "native"
    if may_offload and "offload" not in settings and not is_native:
        offloaded = {"allocator": "expandable", "strategy": "fsdp2"}
        is_sharded = {**offloaded, **settings}["strategy"] == "fsdp2"
        has_states = TRAINERS[trainer].offloads_states and settings.get("lora") is None
        kinds = ("states", True) if has_states and is_sharded else (True,)
        requested += [{**common, **offloaded, "offload": what, **settings} for what in kinds]
    if not is_native and not TRAINERS[trainer].refused(["activations"]):
        requested = [{"activations": "auto", **fields} for fields in requested]
    return [request_from(fields, keywords=True) for fields in requested]


def _default_degrees(
    model: str, where: Cluster, trainer: TrainerName, settings: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Fields for the degrees to try if the user names none: of Ulysses, or of a ring."""
    rings, shape = TRAINERS[trainer].ring_objectives, load_model(model).shape
    if rings is None or not shape.has_plain_attention:
        return {"ulysses": _degrees(model, where, settings)}
    is_whole = where.machines > 1 or "ulysses" in settings or "copies" in settings
    objective = settings.get("objective", Settings().objective)
    if is_whole or objective not in rings:
        return {"ulysses": [1]}
    every = [degree for degree in range(1, where.gpus + 1) if where.gpus % degree == 0]
    return {"ulysses": [1], "ring": every}


def _degrees(model: str, where: Cluster, settings: Mapping[str, Any]) -> list[int]:
    """Ulysses degrees that work on these GPUs; with several machines, within one machine."""
    shape, own = load_model(model).shape, where.machine_gpus
    divisors = [degree for degree in range(1, own + 1) if own % degree == 0]
    works = [degree for degree in divisors if heads_obstacle(shape, degree) is None]
    if where.machines == 1:
        return works
    rings = request_from({"model": model, **settings}, keywords=True).ring
    return [n for n in works if n == 1 or any(own % (n * ring) == 0 for ring in rings)]


def _ring_notes(
    model: str,
    where: Cluster,
    trainer: TrainerName,
    settings: Mapping[str, Any],
    longest_tokens: int,
) -> tuple[str, ...]:
    """Note on GPUs left out by Ulysses, and on a ring that uses them; none if a degree is named."""
    is_named, traits = "ulysses" in settings or "ring" in settings, TRAINERS[trainer]
    has_no_heads = bool(traits.refused(["ulysses"])) or traits.ring_objectives is not None
    if where.machines > 1 or is_named or has_no_heads:
        return ()
    most = max(_degrees(model, where, settings))
    if most == where.gpus:
        return ()
    said = f"{HEADS_SHARE}{most} of {where.gpus} GPUs at the most"
    if traits.refused(["ring"]) or ring_obstacle(load_model(model).shape, longest_tokens):
        return (said,)
    ring = f"`--ulysses {most} --ring {where.gpus // most}`"
    return (f"{said}: {ring} shares it among all",)


def _hardware_notes(where: Cluster) -> Iterator[str]:
    """Notes on hardware that was never measured: several machines, and AMD's GPUs."""
    if where.machines > 1:
        yield (
            f"{where.machines} machines of {counted_ranks(where.machine_gpus, 'cuda')}: what NCCL "
            "takes between them, and how fast their network is, was measured nowhere, and is taken "
            "as within one; host memory is that of one"
        )
    if not runs_trials(where.device_name):
        yield (
            f"{where.device_name} is AMD's: predicted by what NVIDIA's libraries take beside "
            "tensors; nothing of it was measured, and no trial is run on it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionTask:
    """A question with all that its prediction needs and says: GPUs, limits, notes, prices."""

    question: Question
    where: Cluster
    memory_limit: MemoryLimit
    trainer: TrainerName
    calibration: Calibration | None
    method: PredictionMethod = "formula"
    length_tokens: int | None = None
    """The one length that was asked about; None: the longest that fits."""
    amount_tokens: int | None = None
    """Tokens of a training whose cost is asked for; None: it is not."""
    hour_dollars: float | None = None
    """Price of one GPU for an hour; None: the catalog's."""
    tried: FailedAllocation | None = None
    notes: tuple[str, ...] = ()


def prediction_of(task: PredictionTask, cells: tuple[CellPrediction, ...]) -> Prediction:
    """Return the prediction of a task, made of its predicted cells, with its notes and accuracy."""
    question = task.question
    where = task.where
    trainer = task.trainer
    is_one_length = task.length_tokens is not None
    cells = with_frontier(question, cells, is_one_length=is_one_length)
    native = None
    notes = task.notes
    if task.method == "trace":
        errors = TRACED_ACCURACY
    else:
        replayed = sum(cell.replayed is not None for cell in cells)
        errors = accuracy(question, trainer, replayed, task.calibration)
        if not is_one_length:
            native = at_native(question, task.memory_limit, trainer, task.calibration)
        if MEMORY[trainer].replay is not None:
            notes = (*notes, by_replay(replayed, len(cells)))
    found = Prediction(
        model_name=question.model.name,
        config_digest=question.model.config_digest,
        native_length_tokens=question.grid.native_length_tokens,
        trainer=trainer,
        gpus=where.gpus,
        device_name=where.device_name,
        device_bytes=where.device_bytes,
        memory_limit=task.memory_limit,
        margin_bytes=question.margin_bytes,
        length_tokens=task.length_tokens,
        cells=cells,
        native=native,
        tried=task.tried,
        method=task.method,
        accuracy=errors,
        calibration=task.calibration,
        notes=notes,
    )
    best = found.explained
    rope = best.cell.settings.rope
    scaled = yarn(question.model, length_tokens=best.reach_tokens, rope=rope)
    found = found.replace(yarn_factor=scaled and scaled.factor)
    first = native or best
    length_tokens = task.length_tokens or min(first.reach_tokens, found.native_length_tokens)
    assumed = assumed_attention(question, first.cell, length_tokens, trainer)
    found = found.replace(assumed=assumed)
    if first.reach_tokens:
        alone = alone_at(question, first.cell, first.reach_tokens)
        limit = with_most_share(alone, task.memory_limit, trainer, task.calibration)
        found = found.replace(memory_limit=limit)
    if task.amount_tokens is None or found.answer is None or best.step is None:
        return found
    hour = hour_dollars_of(where.device_name, task.hour_dollars)
    cost = cost_of(task.amount_tokens, best.step, gpus=where.gpus, hour_dollars=hour)
    return found.replace(cost=cost)


def assumed_attention(
    question: Question, cell: Cell, length_tokens: int, trainer: TrainerName
) -> str:
    """Sentence on the fused kernel that is predicted of a trainer by transformers, whose own choice
    for the model takes more: SDPA a mask of windows; else, as it neither caps scores nor has sinks,
    all scores. Empty if neither is so.
    """
    shape = question.model.shape
    rows = cell.settings.sequences_per_micro_batch
    if shape.window_tokens and not TRAINERS[trainer].refused(["liger"]):  # Hugging Face's step
        return (
            "Attention is taken as flash_attention_2; beside SDPA, transformers' own choice, "
            f"{shape.model_type}'s windows take a mask of length x length, "
            f"{format_bytes(rows * length_tokens**2)} at {length_tokens:,} tokens"
        )
    has_sinks = any(run.kind.attention.has_sinks for run in shape.runs)
    if not TRAINERS[trainer].is_watched or not (has_sinks or shape.caps_scores):
        return ""
    heads = rows * shape.query_heads
    scores = format_bytes(2 * heads * length_tokens**2 // cell.layout.ulysses_degree)
    return (
        f"Attention is taken as {'flex_attention' if has_sinks else 'flash_attention_2'}; "
        f"transformers' own choice for {shape.model_type} is eager, which holds the scores of all "
        f"heads, {scores} in bfloat16 at {length_tokens:,} tokens, several times in a layer"
    )


_GAIN = 1.2
"""Factor by which a slower cell on the frontier has to train longer, or to leave more memory."""


def with_frontier(
    question: Question, cells: Sequence[CellPrediction], *, is_one_length: bool
) -> tuple[CellPrediction, ...]:
    """Return the cells, marked ``is_on_frontier`` if no other trains nearly as long in less time.
    Cells that train no length are not, unless none trains any; at one length free memory counts.
    """
    pool = [cell for cell in cells if cell.capacity_tokens] or list(cells)
    reach = attrgetter("headroom_bytes" if is_one_length else "reach_tokens")
    times = {cell.cell: _token_s(question, cell.cell) for cell in pool}
    kept, longest = list[CellPrediction](), max(pool, key=reach)
    for each in sorted(pool, key=lambda c: (times[c.cell], -reach(c), simplicity(c.cell))):
        if not kept or reach(each) > max(reach(kept[-1]), _GAIN * reach(kept[-1])):
            kept.append(each)
    frontier = {each.cell for each in (*kept, longest)}
    return tuple(
        e.replace(is_on_frontier=e.cell in frontier, is_lowered=_is_lowered(question, e.cell))
        for e in cells
    )


def _is_lowered(question: Question, cell: Cell) -> bool:
    """True if other cells of a question have more sequences in a micro-batch."""
    rows = max(each.settings.sequences_per_micro_batch for each in question.cells)
    return cell.settings.sequences_per_micro_batch < rows


def _token_s(question: Question, cell: Cell) -> float:
    """Seconds a token at the native length, to order cells; by an H200's rates if unknown."""
    name = question.device_name if rates_of(question.device_name) else MEASURED
    step = predicted_step(
        question.model.shape,
        cell.settings,
        cell.layout,
        length_tokens=question.grid.native_length_tokens,
        device_name=name,
    )
    assert step is not None, "its rates are known"  # noqa: S101
    return step.time_s / step.step_tokens


def alone_at(question: Question, cell: Cell, length_tokens: int) -> Question:
    """The question with one cell and one length only."""
    grid = question.grid.replace(start_tokens=length_tokens, max_tokens=length_tokens)
    return question.replace(cells=(cell,), grid=grid)


def with_most_share(
    alone: Question, limit: MemoryLimit, trainer: TrainerName, known: Calibration | None
) -> MemoryLimit:
    """The limit with the largest vLLM share beside which one cell fits, unless one was typed."""
    rollout = limit.rollout
    if rollout is None or rollout.most_utilization is None:
        return limit
    most = rollout.gpu_memory_utilization or 0.0
    for share in SHARES:
        tried = limit.replace(rollout=rollout.replace(gpu_memory_utilization=share))
        if share > most and predict_untraced(alone, tried, trainer, known)[0].capacity_tokens:
            most = share
    return limit.replace(rollout=rollout.replace(most_utilization=most))


def at_native(
    question: Question, limit: MemoryLimit, trainer: TrainerName, known: Calibration | None
) -> CellPrediction | None:
    """The simplest cell that trains the native length; None if none does, or it is off the grid."""
    native = question.grid.native_length_tokens
    if not question.grid.start_tokens <= native <= question.grid.max_tokens:
        return None
    for cell in sorted(question.cells, key=simplicity):
        (found,) = predict_untraced(alone_at(question, cell, native), limit, trainer, known)
        if found.capacity_tokens:
            return found.replace(is_lowered=_is_lowered(question, cell))
    return None


def placed(question: Question, machine: Machine) -> Cell:
    """The cell of a single trial with ``--activations auto``: the fastest that is predicted to fit
    (for a dry run: in the named host memory), else the cell that lacks the fewest bytes of a GPU.
    """
    memory_bytes = question.memory_bytes
    if len(question.cells) == 1 or memory_bytes is None:
        return question.cells[0]
    try:
        refuse_unknown_family(question.model)
    except ModelError as error:
        error.hint = "use `--activations gpu` or `--activations host`: `auto` is by prediction"
        raise
    margin_bytes = question.margin_bytes or default_headroom_bytes(memory_bytes)
    question = question.replace(margin_bytes=margin_bytes)
    host_bytes = (question.simulated and question.host_memory_bytes) or machine.host_bytes
    limit = MemoryLimit(device_bytes=memory_bytes, host_bytes=host_bytes)
    found = predict_untraced(question, limit, OURS, calibration_of(question, OURS), extent="fit")
    fits = [each for each in found if each.capacity_tokens]
    if fits:
        return min(fits, key=lambda each: each.step.time_s if each.step else 0.0).cell
    lacking = [each for each in found if each.binding != "host"] or found
    return max(lacking, key=lambda each: each.headroom_bytes).cell


def with_usual_host(limit: MemoryLimit, where: Cluster) -> MemoryLimit:
    """The limit with the host memory of this machine, or of a usual machine with such GPUs, unless
    the user named it. For more GPUs a machine than any has: that of the largest machine.
    """
    if limit.host_bytes is not None and limit.usual_host is None:
        return limit
    if where.host_bytes is not None:
        return limit.replace(host_bytes=where.host_bytes, usual_host=THIS_MACHINE)
    each = (default_host(where.device_name, n) for n in range(where.machine_gpus, 0, -1))
    found = next((host for host in each if host is not None), None)
    host_bytes, machine = (found.host_bytes, found.machine) if found else (None, None)
    return limit.replace(host_bytes=host_bytes, usual_host=machine)


def memory_limit_of(
    where: Cluster,
    *,
    host_memory: str | int | None,
    reserved: str | int,
    constants: MachineConstants | None = None,
) -> MemoryLimit:
    """The memory of each GPU for training, and of the host: the usual host's if none is named.
    Raises UsageError if nothing is left of a GPU, and for sizes that are odd.
    """
    reserved_bytes = parse_memory(str(reserved))
    if reserved_bytes >= where.device_bytes:
        raise UsageError(
            f"{format_bytes(reserved_bytes)} are reserved of a GPU of "
            f"{format_bytes(where.device_bytes)}",
            hint="use a smaller `--reserved`, or leave it out",
        )
    host_bytes = None if host_memory is None else parse_memory(str(host_memory))
    if host_bytes == 0:
        hint = "give the machine's, for example `--host-memory 512GiB`, or leave it out"
        raise UsageError("a host without memory", hint=hint)
    limit = MemoryLimit(
        device_bytes=where.device_bytes - reserved_bytes, host_bytes=host_bytes, constants=constants
    )
    return with_usual_host(limit, where)
