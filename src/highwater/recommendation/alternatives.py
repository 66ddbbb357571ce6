"""Alternatives: changes predicted to train a length if nothing that was requested does (more GPUs,
larger GPUs, another technique); and recommendations from studies of unpredicted trainers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from highwater.errors import UsageError
from highwater.memory.capacity import MemoryLimit
from highwater.memory.formula.rollout import SHARES
from highwater.memory.from_trials import as_measured, obstacle, with_margin
from highwater.memory.question import with_usual_host
from highwater.memory.trainers import predict_untraced
from highwater.model.model import load_model
from highwater.nouns.cells import heads_obstacle
from highwater.nouns.cluster import Cluster
from highwater.nouns.declaration import USUAL_GPUS_OF_A_MACHINE, flag_of, words_of
from highwater.nouns.hardware import gpu_catalog, lacking, runs_trials
from highwater.nouns.objective import TRAITS
from highwater.nouns.recommendation import Alternative, AlternativeKind, Candidate, Recommendation
from highwater.nouns.request import DECLARED
from highwater.nouns.study import Cell, Study, counted_ranks
from highwater.nouns.trainer import TRAINERS, AnyTrainer, trainer_title
from highwater.recommendation.candidates import Goal, first_fit, token_budget, unknown_candidate
from highwater.units import GIB, counted, format_bytes, parse_memory

_MOST_MACHINES = 16
"""Machines tried at the most, each with all its GPUs."""
_LORA_RANK = 32
_RESTRICTIONS = (
    *("allocator", "loss", "ring", "ulysses", "recompute", "mlp_tiles", "strategy"),
    "attention_head_groups",
)
"""Settings that keep rungs, layouts or savings of memory from being tried."""


_Change = tuple[str, tuple[str, ...], tuple[str, ...], Goal]
"""A change to try: in words, flags to add, flags to leave out, and the changed goal."""


def alternatives(goal: Goal, *, reserved_bytes: int, rollout_gpus: int) -> tuple[Alternative, ...]:
    """Find one alternative of each kind, if it has any: its first change that fits."""
    more = _first("more GPUs", _more_gpus(goal, rollout_gpus))
    if more is not None and more.cell is not None and more.cell.settings.uses_host:
        in_place = replace(goal, settings={**goal.settings, "offload": False, "activations": "gpu"})
        alone = _first("more GPUs", _more_gpus(in_place, rollout_gpus))
        if alone is not None and alone.cell is not None:
            how_many = f"{more.how_many}, {alone.cell.layout.gpus} without"
            more = more.replace(how_many=how_many * bool(more.how_many))
    is_whole = goal.where.machine_gpus >= USUAL_GPUS_OF_A_MACHINE  # then one more is at hand
    found = (
        *(_first("technique", _rollouts(goal)), _first("technique", _rearranged(goal)), more),
        None
        if more and is_whole
        else _first("a larger GPU", _larger_gpus(goal, reserved_bytes, rollout_gpus)),
        _more_host_memory(goal),
        _first("technique", _techniques(goal)) or _needed_technique(goal),
    )
    return tuple(alternative for alternative in found if alternative is not None)


def _first(kind: AlternativeKind, changes: Iterable[_Change]) -> Alternative | None:
    tight = ""
    for what, flags, without, goal in changes:
        with suppress(UsageError):  # where named degrees make no layout here
            found, gpus = first_fit(goal), goal.where.gpus
            if found is not None and found.fits:
                do = f"{'are the fewest that ' * (goal.where.machines == 1)}do safely{tight}"
                do += " with host memory" * found.cell.settings.uses_host
                return Alternative(
                    kind=kind,
                    what=what,
                    how_many=f"{what} {do}" if kind == "more GPUs" else "",
                    flags=flags,
                    without=without,
                    label=found.label,
                    cell=found.cell,
                    headroom_bytes=found.headroom_bytes,
                    host_bytes=found.host_bytes,
                )
            tight = f" ({gpus} is {found.risk})" if found is not None else tight
    return None


def _more_gpus(goal: Goal, rollout_gpus: int) -> Iterator[_Change]:
    """More GPUs of the same kind, the fewest first; beyond one machine, more such machines."""
    for where in _larger_clusters(goal, rollout_gpus):
        larger = replace(goal, where=where, memory_limit=with_usual_host(goal.memory_limit, where))
        flags = ("--gpus", where.replace(gpus=where.gpus + rollout_gpus).typed)
        what = f"{where.gpus} x {where.device_name}"
        if where.machines > 1:
            what += f" on {where.machines} machines (`{' '.join(flags)}`)"
        yield what, flags, (), larger


def _larger_clusters(goal: Goal, rollout_gpus: int) -> Iterator[Cluster]:
    """Clusters with more GPUs of the kind, fewest first: of one machine, then of whole machines;
    GPUs for rollout are of one machine.
    """
    where, rollout = goal.where.replace(host_bytes=None), goal.memory_limit.rollout
    degree = 1 if rollout is None or rollout.own_gpus else rollout.rollout_tensor_parallel
    own = where.machine_gpus
    if where.machines == 1:
        own = max(own, USUAL_GPUS_OF_A_MACHINE)
        for gpus in range(where.gpus + 1, own + 1):
            if gpus % degree == 0:
                yield where.replace(gpus=gpus)
    for machines in range(where.machines + 1, 1 if rollout_gpus else _MOST_MACHINES + 1):
        yield where.replace(gpus=machines * own, machines=machines)


def _larger_gpus(goal: Goal, reserved_bytes: int, rollout_gpus: int) -> Iterator[_Change]:
    """As many GPUs of each larger kind, smallest first; AMD's only if the requested are AMD's."""
    has_trials = runs_trials(goal.where.device_name)
    kinds = [
        kind
        for kind in gpu_catalog()
        if (kind.usable_bytes or 0) > goal.where.device_bytes
        and not lacking(kind)
        and runs_trials(kind.name) == has_trials
    ]
    for kind in sorted(kinds, key=lambda kind: kind.usable_bytes or 0):
        device_bytes = kind.usable_bytes or 0
        where = goal.where.replace(
            device_name=kind.name,
            device_bytes=device_bytes,
            compute_capability=kind.compute_capability,
            host_bytes=None,
        )
        left_bytes = device_bytes - reserved_bytes
        limit = goal.memory_limit.replace(device_bytes=left_bytes)
        memory_limit = with_usual_host(limit, where)
        if memory_limit.host_bytes is None:  # unknown: no more than now
            memory_limit = limit
        larger = replace(goal, where=where, memory_limit=memory_limit)
        flags = ("--gpus", where.replace(gpus=where.gpus + rollout_gpus).typed)
        yield f"{where.gpus} x {kind.name}", flags, ("--gpu-memory",), larger


def _more_host_memory(goal: Goal) -> Alternative | None:
    """The host memory with which the same GPUs train the length; None if no amount helps."""
    if goal.memory_limit.host_bytes is None:
        return None
    limit = goal.memory_limit.replace(host_bytes=None, usual_host=None)
    found = _first("more host memory", [("", (), (), replace(goal, memory_limit=limit))])
    if found is None or found.host_bytes is None:
        return None
    size = -(-found.host_bytes // GIB)
    flags = ("--host-memory", f"{size}GiB")
    return found.replace(what=f"{size} GiB of host memory", flags=flags)


def _needed_technique(goal: Goal) -> Alternative:
    """The largest memory term of the nearest cell, if no change is predicted to fit."""
    question, _ = goal.question(goal.budgets[-1], length_tokens=goal.length_tokens)
    cells = predict_untraced(question, goal.memory_limit, goal.trainer, goal.known(question))
    nearest = min(cells, key=lambda predicted: predicted.lacks_bytes or 0)
    largest = max(nearest.footprint.peak.terms, key=lambda term: term.bytes)
    size = format_bytes(largest.bytes)
    what = f"one that shrinks `{largest.name}`, {size} of the nearest; none here does"
    if nearest.binding == "host" and goal.memory_limit.usual_host is None:
        least = min(each.footprint.host_needed_bytes for each in cells if each.binding == "host")
        needs = f"{format_bytes(least)} at least"
        what = f"more host memory than `--host-memory` says: {needs}"
    return Alternative(kind="technique", what=what)


def _rearranged(goal: Goal) -> Iterator[_Change]:
    """The same training on the same GPUs: fewer sequences at once, one copy of the states where
    several were typed or stand in a user's file, and ZeRO-3 where that was ZeRO-2.
    """
    settings = goal.settings
    for rows in halved(goal):
        fewer = replace(goal, settings={**settings, "sequences_per_micro_batch": rows})
        flags = ("--sequences-per-micro-batch", str(rows))
        yield f"{counted(rows, 'sequence')} a micro-batch", flags, (), fewer
    is_sharded = settings.get("lora_base") != "nf4" or TRAINERS[goal.trainer].shards_packed
    if settings.get("copies", [1] if is_sharded or goal.where.gpus == 1 else None) != [1]:
        one = replace(goal, settings={**settings, "copies": [1]})
        yield "one copy of the states, in shards (FSDP, as ZeRO-3)", ("--copies", "1"), (), one
    if settings.get("deepspeed") == "zero2":
        all_of_them = replace(goal, settings={**settings, "deepspeed": "zero3"})
        yield "ZeRO-3, which shards parameters too", ("--deepspeed", "zero3"), (), all_of_them


def halved(goal: Goal) -> Iterator[int]:
    """Fewer sequences of a micro-batch than the goal has, half as many each time; no half pair."""
    together = TRAITS[goal.settings.get("objective", "sft")].documents_together
    rows = goal.sequences
    while rows > together:
        rows = max(together, rows // 2 // together * together)
        yield rows


def _techniques(goal: Goal) -> Iterator[_Change]:
    """Yield changes of settings, in the order in which they are tried."""
    for name in _RESTRICTIONS:
        if name in goal.settings:
            flag = flag_of(name)
            settings = {key: value for key, value in goal.settings.items() if key != name}
            yield f"leaving `{flag}` out", (), (flag,), replace(goal, settings=settings)
    yield from _rings(goal)
    if TRAINERS[goal.trainer].settings is None and goal.settings.get("micro_batches") != 1:
        one = replace(goal, settings={**goal.settings, "micro_batches": 1})
        yield "one micro-batch a step", ("--micro-batches", "1"), (), one
    yield from _other_trainings(goal)


def _rollouts(goal: Goal) -> Iterator[_Change]:
    """Changes of vLLM's memory: sharing its model among GPUs, then more of each GPU, then less."""
    asked = goal.memory_limit.rollout
    if asked is None:
        return
    shape, gpus = load_model(goal.model).shape, asked.own_gpus or goal.where.gpus
    parts = {gpus, *(run.kind.attention.query_heads for run in shape.runs)}
    degrees = [n for n in (2, 4, 8) if not any(part % n for part in parts)]
    shared = [("vLLM's model on several GPUs", "rollout_tensor_parallel", each) for each in degrees]
    taken, name = asked.gpu_memory_utilization or 0, "gpu_memory_utilization"
    more = [("more of each GPU for vLLM", name, each) for each in SHARES if each > taken]
    less = [("less of each GPU for vLLM", name, each) for each in SHARES[::-1] if each < taken]
    for what, name, value in (*shared, *more, *less):
        rollout = asked.replace(**{name: value})
        limit = goal.memory_limit.replace(rollout=rollout)
        yield what, tuple(words_of({name: value})), (), replace(goal, memory_limit=limit)


def _other_trainings(goal: Goal) -> Iterator[_Change]:
    """Yield changes of the training: low-bit optimizer states, adapters, a low-bit base model."""
    others: list[tuple[str, dict[str, object]]] = []
    if "lora" not in goal.settings:
        few_bits: dict[str, object] = {"optimizer": "adamw-8bit"}
        both = {**few_bits, "parameters": "bf16"}
        others.append(("moments of 8 bits, which are lossy", few_bits))
        others.append(("moments of 8 bits and parameters in bf16, which are lossy", both))
        others.append(("AdamW in float32, its states in host memory", {"optimizer": "adamw"}))
        what = f"LoRA, another training: adapters of rank {_LORA_RANK} beside a frozen model"
        others.append((what, {"lora": _LORA_RANK}))
    is_known = goal.where.gpus == 1 or TRAINERS[goal.trainer].shards_packed
    if "lora_base" not in goal.settings and is_known:
        rank = goal.settings.get("lora", _LORA_RANK)
        what = f"QLoRA, which is lossy: adapters of rank {rank} beside a frozen model in 4 bits"
        others.append((what, {"lora": rank, "lora_base": "nf4"}))
    traits, own = TRAINERS[goal.trainer], {"optimizer": "adamw", **goal.settings}
    for what, settings in others:
        if traits.refused([*settings]) or settings.items() <= own.items():
            continue
        changed = replace(goal, settings={**goal.settings, **settings})
        yield what, tuple(words_of(settings)), (), changed


def _rings(goal: Goal) -> Iterator[_Change]:
    """The smallest ring, beside the most GPUs that share heads, with which a length fits."""
    shape, gpus = load_model(goal.model).shape, goal.where.gpus
    traits = TRAINERS[goal.trainer]
    if gpus == 1 or traits.refused(["ring"]) or traits.ring_objectives is not None:
        return  # there is none, or it is tried anyway
    divisors = [degree for degree in range(1, gpus + 1) if gpus % degree == 0]
    heads = [degree for degree in divisors if heads_obstacle(shape, degree) is None]
    every: dict[str, object] = {"ulysses": heads, "ring": divisors[1:]}
    shared = replace(goal, settings={**goal.settings, **every})
    found = _first("technique", [("", (), (), shared)])
    if found is not None and found.cell is not None:
        layout = found.cell.layout
        degrees = {"ulysses": [layout.ulysses_degree], "ring": [layout.ring_degree]}
        what = f"a ring, so that {layout.context_degree} GPUs share each sequence"
        changed = replace(goal, settings={**goal.settings, **degrees})
        yield what, tuple(words_of(degrees)), (), changed


def tried_recommendation(
    model: str,
    *,
    length_tokens: int,
    where: Cluster,
    memory_limit: MemoryLimit,
    trainer: AnyTrainer,
    studies: Sequence[Study],
    settings: Mapping[str, Any],
) -> Recommendation:
    """Recommend the simplest settings in a foreign trainer's studies; UsageError if none."""
    others = [name for name in settings if name != "headroom"]
    if others:
        row, title = DECLARED[others[0]], trainer_title(trainer)
        problem = f"a {row.words}, and what is recommended is what studies of {title} found"
        raise UsageError(problem, hint=f"leave `{row.flag}` out")
    read, margin_bytes = load_model(model), parse_memory(str(settings.get("headroom", 0)))
    found: dict[Cell, Candidate] = {}
    notes: list[str] = []
    for recorded in studies:
        study = with_margin(recorded, margin_bytes)
        why = obstacle(study, read, where.device_name, memory_limit, trainer)
        told = {} if why else measured_cells(study, where.gpus, length_tokens)
        if not told:
            ranks = counted_ranks(where.gpus, "cuda")
            notes.append(
                f"{study.path} is not used: {why or f'it has no answer for this length on {ranks}'}"
            )
        found = told | found
    if not found:
        raise UsageError(
            f"no study has trials of {trainer_title(trainer)} at {length_tokens} tokens: "
            + ("; ".join(notes) or "none is named"),
            hint="leave `--trainer` out, or name a study of it with `--study`",
        )
    candidates = tuple(sorted(found.values(), key=lambda each: each.order))
    return Recommendation(
        model_name=read.name,
        native_length_tokens=read.shape.native_length_tokens,
        trainer=trainer,
        length_tokens=length_tokens,
        gpus=where.gpus,
        device_name=where.device_name,
        device_bytes=where.device_bytes,
        margin_bytes=margin_bytes,
        default_sequences=1,
        chosen=next((each for each in candidates if each.fits), None),
        candidates=candidates,
        yarn=None,
        accuracy="by real trials; peaks are sampled from outside, and a shorter one is missed",
        notes=tuple(notes),
    )


def measured_cells(study: Study, gpus: int, length_tokens: int) -> dict[Cell, Candidate]:
    """What a study's trials prove at a length, by cell: the candidates that fit or do not."""
    found_in = study.path or "a study"
    unknown = (
        unknown_candidate(
            cell, token_budget(cell, length_tokens), source="measured", found_in=found_in
        )
        for cell in study.question.cells
        if cell.layout.gpus == gpus
    )
    told = ((each.cell, as_measured(each, study, length_tokens)) for each in unknown)
    return {cell: found for cell, found in told if found is not None}
