"""Recorded answers: what capacities that somebody found say of one length, as a recommendation.

Nothing is predicted, nothing looked up.
"""

from collections.abc import Iterator, Sequence

from highwater.errors import ModelError
from highwater.model.model import load_model
from highwater.model.rope import Yarn, yarn, yarn_parameters
from highwater.nouns.capacities import Capacity, in_order
from highwater.nouns.cells import simplicity
from highwater.nouns.hardware import kind_of
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import counted_ranks
from highwater.nouns.trainer import predicted_traits
from highwater.pages.guide.guide import cell_label
from highwater.pages.guide.guide_parts import ORIGINS
from highwater.recommendation.candidates import token_budget


def known_recommendation(
    own: Sequence[Capacity], length_tokens: int, *, others: Sequence[Capacity] = ()
) -> Recommendation:
    """Recommend the simplest of ``own`` that is known to fit.

    ``own`` are capacities of one model on as many GPUs of one kind, from one source; ``others`` are
    the same on other numbers of GPUs: where nothing fits, the fewest that do are named. What nobody
    knows is a note.
    """
    first, kind = own[0], kind_of(own[0].device_name)
    candidates = tuple(_candidate(each, length_tokens) for each in _best(own, length_tokens))
    chosen = next((candidate for candidate in candidates if candidate.fits), None)
    return Recommendation(
        model_name=first.model_name,
        native_length_tokens=first.native_length_tokens,
        trainer=first.trainer,
        length_tokens=length_tokens,
        gpus=first.cell.layout.gpus,
        device_name=first.device_name,
        device_bytes=0 if kind is None else kind.usable_bytes or 0,
        margin_bytes=first.margin_bytes,
        default_sequences=first.cell.settings.sequences_per_micro_batch,
        chosen=chosen,
        candidates=candidates,
        yarn=_yarn(first, length_tokens) if predicted_traits(first.trainer) else None,
        accuracy=ORIGINS[first.source],
        notes=tuple(_notes(own, length_tokens, chosen, others)),
    )


def _best(own: Sequence[Capacity], length_tokens: int) -> list[Capacity]:
    """Capacities that tell of the length, the simplest first.

    Of those that are as simple the best counts, as in a guide.
    """
    best: dict[tuple[int, ...], Capacity] = {}
    for each in in_order(tuple(own)):
        key, fits = simplicity(each.cell), each.fits(length_tokens)
        if fits is not None and (key not in best or (fits and not best[key].fits(length_tokens))):
            best[key] = each
    return list(best.values())


def _candidate(capacity: Capacity, length_tokens: int) -> Candidate:
    settings = capacity.cell.settings
    return Candidate(
        cell=capacity.cell,
        is_lowered=False,
        token_budget_tokens=settings.token_budget_tokens
        or token_budget(capacity.cell, length_tokens),
        fits=bool(capacity.fits(length_tokens)),
        source=capacity.source,
        found_in=capacity.found_in,
        is_memory_only=capacity.is_memory_only,
        headroom_bytes=None,
        capacity_tokens=capacity.capacity_tokens,
        capacity_source=capacity.source,
        is_at_least=capacity.does_not_fit_tokens is None,
    )


def _notes(
    own: Sequence[Capacity],
    length_tokens: int,
    chosen: Candidate | None,
    others: Sequence[Capacity],
) -> Iterator[str]:
    known = {each.cell for each in own if each.fits(length_tokens) is not None}
    simpler = (
        c.cell
        for c in in_order(tuple(own))
        if chosen is None or simplicity(c.cell) < simplicity(chosen.cell)
    )
    unknown = dict.fromkeys(cell_label(cell) for cell in simpler if cell not in known)
    if unknown:
        yield f"nobody knows whether these fit: {', '.join(unknown)}"
    if chosen is None:
        fitting = [each for each in in_order(tuple(others)) if each.fits(length_tokens)]
        fewest = min(fitting, key=lambda each: each.cell.layout.gpus, default=None)
        if fewest is not None:
            gpus = counted_ranks(fewest.cell.layout.gpus, "cuda")
            yield (
                f"what fits in this guide, with the fewest GPUs: {cell_label(fewest.cell)} on "
                f"{gpus}, {fewest.source}"
            )


def _yarn(capacity: Capacity, length_tokens: int) -> Yarn | None:
    """YaRN as the model has it; without the model, by its native length alone."""
    try:
        model = load_model(capacity.model_name)
    except ModelError:
        model = None
    if model is not None and capacity.config_digest in (None, model.config_digest):
        return yarn(model, length_tokens=length_tokens)
    native = capacity.native_length_tokens
    if length_tokens <= native:
        return None
    factor = length_tokens / native
    parameters = yarn_parameters(factor, native_length_tokens=native)
    return Yarn(factor=factor, rope_parameters=parameters, max_position_embeddings=length_tokens)
