"""Remedies: what is predicted to train a length where nothing asked about does: more GPUs, a larger one, another technique."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from highwater.prediction.asked import predict_by_formula
from highwater.prediction.candidates import Asked, first_fit
from highwater.spec.cluster import MOST_GPUS, Cluster
from highwater.spec.hardware import gpu_catalog, kind_of, lacking
from highwater.spec.recommendation import Candidate, Remedy
from highwater.units import format_bytes

MOST_GPUS_TRIED = 64
"""Every count of one machine is tried, then twice as many, up to here."""
_SMALLER_STATES_BYTES = 8
"""A parameter: weights, gradients and both moments in bfloat16, for one."""
_RESTRICTIONS = ("allocator", "loss", "ulysses", "recompute", "mlp_tiles", "strategy")
"""Settings that keep rungs, layouts or what saves memory out of what is tried."""


def remedies(asked: Asked, *, reserved_bytes: int, rollout_gpus: int) -> tuple[Remedy, ...]:
    """One of each kind, where there is one."""
    found = (
        more_gpus(asked, rollout_gpus=rollout_gpus),
        larger_gpu(asked, reserved_bytes=reserved_bytes, rollout_gpus=rollout_gpus),
        technique(asked),
    )
    return tuple(remedy for remedy in found if remedy is not None)


def more_gpus(asked: Asked, *, rollout_gpus: int = 0) -> Remedy | None:
    """The fewest of the same kind in one machine; where none of them do, twice a machine's, and twice that."""
    larger = (MOST_GPUS << doubled for doubled in range(1, (MOST_GPUS_TRIED // MOST_GPUS).bit_length()))
    for gpus in (*range(asked.where.gpus + 1, MOST_GPUS + 1), *larger):
        where = msgspec.structs.replace(asked.where, gpus=gpus)
        found = first_fit(replace(asked, where=where))
        if found is not None:
            machines = "" if gpus <= MOST_GPUS else ", on several machines, where nothing was ever measured"
            return _remedy("more GPUs", f"{gpus} x {where.device_name}{machines}", found, _gpu_flags(where, gpus + rollout_gpus))
    return None


def larger_gpu(asked: Asked, *, reserved_bytes: int = 0, rollout_gpus: int = 0) -> Remedy | None:
    """As many of the smallest kind in the catalog that does; of two with the same memory the first."""
    kinds = [kind for kind in gpu_catalog() if (kind.usable_bytes or 0) > asked.where.device_bytes and not lacking(kind)]
    for kind in sorted(kinds, key=lambda kind: kind.usable_bytes or 0):
        device_bytes = kind.usable_bytes or 0
        where = Cluster(
            gpus=asked.where.gpus,
            device_name=kind.name,
            device_bytes=device_bytes,
            compute_capability=kind.compute_capability,
        )
        room = msgspec.structs.replace(asked.room, device_bytes=device_bytes - reserved_bytes)
        found = first_fit(replace(asked, where=where, room=room))
        if found is not None:
            flags = _gpu_flags(where, where.gpus + rollout_gpus)
            remedy = _remedy("a larger GPU", f"{where.gpus} x {kind.name}", found, flags)
            return msgspec.structs.replace(remedy, without=("--gpu-memory",))
    return None


def technique(asked: Asked) -> Remedy:
    """The first change of settings that is predicted to fit; where none is, what takes the most."""
    for what, flags, without, changed in _changes(asked):
        found = first_fit(changed)
        if found is not None:
            return msgspec.structs.replace(_remedy("technique", what, found, flags), without=without)
    question, _ = asked.question(asked.budgets[-1], length_tokens=asked.length_tokens)
    cells = predict_by_formula(question, asked.room, asked.trainer, asked.known(question))
    nearest = max(cells, key=lambda predicted: predicted.headroom_bytes)
    if nearest.binding == "host":
        needs = format_bytes(min(each.footprint.host_bytes for each in cells if each.binding == "host"))
        return Remedy(kind="technique", what=f"more host memory than `--host-memory` says: {needs} at least")
    largest = max(nearest.footprint.peak.terms, key=lambda term: term.bytes)
    what = f"one that shrinks `{largest.name}`, {format_bytes(largest.bytes)} of what {nearest.cell.label} takes; none here does"
    return Remedy(kind="technique", what=what)


def _changes(asked: Asked) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...], Asked]]:
    """In words, flags to add, flags to leave out, and what is asked then."""
    for name in _RESTRICTIONS:
        if name in asked.settings:
            flag = f"--{name.replace('_', '-')}"
            settings = {key: value for key, value in asked.settings.items() if key != name}
            yield f"leaving `{flag}` out", (), (flag,), replace(asked, settings=settings)
    if asked.room.state_bytes_per_parameter > _SMALLER_STATES_BYTES:
        room = msgspec.structs.replace(asked.room, state_bytes_per_parameter=_SMALLER_STATES_BYTES)
        flags = ("--state-bytes-per-param", str(_SMALLER_STATES_BYTES))
        what = f"states of {_SMALLER_STATES_BYTES} bytes a parameter, where the trainer has such an optimizer"
        yield what, flags, (), replace(asked, room=room)


def _remedy(kind: str, what: str, found: Candidate, flags: tuple[str, ...]) -> Remedy:
    return msgspec.convert(
        {"kind": kind, "what": what, "flags": flags, "label": found.label, "headroom_bytes": found.headroom_bytes}, Remedy
    )


def _gpu_flags(where: Cluster, gpus: int) -> tuple[str, ...]:
    """What names these GPUs; empty for more than one may ask about."""
    if gpus > MOST_GPUS:
        return ()
    return ("--gpus", str(gpus) if kind_of(where.device_name) is None else f"{gpus}x{where.device_name}")
