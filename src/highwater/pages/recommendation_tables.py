"""Tables of a recommendation: the rung to use, why not simpler rungs, what longer ones would gain,
or every rung that fits; and the text page of a written folder, from the template ``check.j2``.
"""

from collections.abc import Sequence
from dataclasses import replace

from highwater.memory.trainers import MEMORY
from highwater.nouns.environment import ENV_BEFORE_IN_WORDS, ENV_IN_WORDS
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import settings_in_words, shared_training, short_settings
from highwater.nouns.study import RISK_IN_WORDS
from highwater.nouns.trainer import (
    OURS,
    predicted_trainer,
    predicted_traits,
    step_in_words,
    trainer_title,
)
from highwater.pages.page import drawn_page, template_lines
from highwater.pages.prediction_tables import assumed_host, caveat, rung_words, star_of_yarn
from highwater.pages.table import Column, TextTable, table_of, values_table
from highwater.pages.text import plain
from highwater.trainers.emitted import Emitted
from highwater.units import format_bytes, format_seconds, format_tokens

_TEMPLATE = "recommendation.txt.j2"
_ROWS_BESIDE = 2
"""Number of settings with longer lengths that an answer shows beside those to take."""
NEXT_SHOWN = 3
"""Number of rungs shown that each train longer than the one before."""
_LACKING = {"device": "of a GPU", "host": "of host memory"}


def _by(candidate: Candidate) -> str:
    return f"{candidate.source}, memory-only" if candidate.is_memory_only else candidate.source


_NAMES: tuple[Column[Candidate], ...] = (
    ("settings", lambda each: short_settings(each.cell.settings)),
    ("Ulysses", "cell.layout.sharing"),
    ("by", _by),
)
_BUDGET: tuple[Column[Candidate], ...] = (
    ("sequences", "cell.settings.sequences_per_micro_batch"),
    ("token budget", "token_budget_tokens"),
)


def _reach(found: Recommendation) -> Column[Candidate]:
    return "trains up to", lambda each: _capacity(each, found)


def _costs_of(found: Recommendation) -> Column[Candidate]:
    return "costs", lambda each: "; ".join(costs(each, found)) or "nothing"


def recommendation_tables(
    found: Recommendation, *, is_explained: bool = False
) -> tuple[TextTable, ...]:
    """All tables in reading order, with one caveat, or with all notes if ``is_explained``."""
    if predicted_traits(found.trainer) is None:
        return (_tried_table(found),)
    tables = [] if found.chosen is None else [_chosen_table(found, found.chosen)]
    tables.append(telling_table(found, is_whole=True))
    notes = _footnotes(found, found.candidates, is_explained=is_explained)
    return (*tables[:-1], replace(tables[-1], footnotes=notes))


def telling_table(found: Recommendation, *, is_whole: bool = False) -> TextTable:
    """Table of the recommended settings, between the nearest simpler ones and the next longer ones,
    with a caveat. ``is_whole``: all simpler ones, and the costs of each.
    """
    if predicted_traits(found.trainer) is None:
        return _tried_table(found)
    chosen, simpler = found.chosen, found.earlier
    longer = next_rungs(found)[: NEXT_SHOWN if is_whole else _ROWS_BESIDE]
    if not is_whole:
        most = 1 if chosen else _ROWS_BESIDE + 2
        nearest = sorted(simpler, key=lambda c: (-c.capacity_tokens, c.lacks_bytes or 0))[:most]
        simpler = tuple(each for each in simpler if each in nearest)
    rows = (*simpler, *([chosen] if chosen else ()), *longer)
    trained = shared_training(each.cell.settings for each in rows)
    sources = {_by(each) for each in rows}
    shared = (f", {trained}" if trained else "") + (
        f": {min(sources)}" if len(sources) == 1 else ""
    )

    def at_length(each: Candidate) -> str:
        fits = f"the {found.aim}" if each == chosen else "fits"
        return fits if each.fits else reason(each) if is_whole else reason(each).split(" of a ")[0]

    footnotes = _footnotes(found, rows, is_explained=False)
    if any(each.lacks_of == "device" and each.lacks_bytes for each in rows):
        spare = format_bytes(found.margin_bytes)
        footnotes = (f"lacks: with {spare} to spare; {footnotes[0]}",)
    is_timed = any(each.step_time is not None for each in rows)
    why = "" if "--explain" in footnotes[0] else "; why: `--explain`"
    return table_of(
        f"{_title(found)}{shared if chosen else f'{shared}: nothing fits'}",
        rows,
        ("settings", lambda each: rung_words(each, trained)),
        ("Ulysses", "cell.layout.sharing"),
        ("by", _by) if len(sources) > 1 else None,
        ("this length", at_length),
        _costs_of(found) if is_whole else None,
        *(_BUDGET if is_whole else ()),
        _reach(found),
        ("tokens/s", lambda each: _step(each)[1]) if chosen and is_timed else None,
        names=3 + (len(sources) > 1) + is_whole,
        footnotes=(f"{footnotes[0]}{why}",) if chosen else footnotes,
    )


def _tried_table(found: Recommendation) -> TextTable:
    """Table of a foreign trainer's cells that studies tried at a length, the simplest first."""
    return table_of(
        f"{_title(found)}: measured",
        found.candidates,
        *_NAMES[:2],
        ("this length", lambda each: "fits" if each.fits else reason(each)),
        ("trains up to", lambda each: _capacity(each, found).rstrip("*")),
        ("headroom, sampled", _headroom),
        footnotes=(found.accuracy, *dict.fromkeys(plain(c.found_in) for c in found.candidates)),
    )


def rung_list(found: Recommendation, *, is_explained: bool = False) -> TextTable:
    """Table of all settings that fit, the simplest first, with the costs of each."""
    return table_of(
        f"{_title(found)}: all settings that fit",
        [candidate for candidate in found.candidates if candidate.fits],
        *_NAMES,
        _costs_of(found),
        *_BUDGET,
        ("headroom", "headroom_bytes"),
        _reach(found),
        ("a step", lambda each: _step(each)[0]),
        ("tokens/s", lambda each: _step(each)[1]),
        footnotes=_footnotes(found, found.candidates, is_explained=is_explained),
        names=4,
    )


def next_rungs(found: Recommendation) -> tuple[Candidate, ...]:
    """The next rungs, each longer than the chosen rung and all before it."""
    longest, bought = 0 if found.chosen is None else found.chosen.capacity_tokens, list[Candidate]()
    for candidate in found.later:
        if candidate.capacity_tokens > longest and len(bought) < NEXT_SHOWN:
            longest = candidate.capacity_tokens
            bought.append(candidate)
    return tuple(bought)


def costs(candidate: Candidate, found: Recommendation) -> tuple[str, ...]:
    """Costs of a rung in words, compared with the first rung of the ladder."""
    settings, layout = candidate.cell.settings, candidate.cell.layout
    said: list[str] = []
    if settings.allocator == "expandable":
        said.append("one environment variable")
    if settings.loss == "chunked":
        said.append("a chunked loss")
    if layout.context_degree > 1:
        said.append(
            f"an exchange in every layer, data parallel {layout.data_parallel_degree} instead of "
            f"{layout.gpus}"
        )
    if candidate.is_lowered:
        fewer = found.default_sequences / settings.sequences_per_micro_batch
        several, one = f"{fewer:g} times the micro-batches", f"1/{fewer:g} of a step's tokens"
        said.append(several if settings.accumulates else one)
    if settings.lora is not None:
        base = " in 4 bits: lossy" if settings.lora_base == "nf4" else ""
        said.append(f"another training: adapters beside a frozen model{base}")
    if not settings.optimizer_traits.is_exact:
        said.append("updates that are rounded: lossy")
    if settings.recompute == "all-but-attention":
        said.append("memory for what attention returned, which is not computed again")
    if settings.attention_head_groups > 1:
        said.append("queries, keys and values projected once more")
    if settings.activations == "host":
        said.append("activations in host memory, copied while layers compute")
    if settings.offloads_model or settings.offloads_states:
        size = candidate.host_bytes
        host = "" if size is None else f"{format_bytes(size)} of it, "
        what = "states" if settings.offloads_model else "moments"
        said.append(f"{what} in host memory, {host}moved at every step")
    return tuple(said)


def reason(candidate: Candidate) -> str:
    """Reason why a rung does not fit: the missing memory, or a trial that ran out."""
    if candidate.source not in ("measured", "predicted"):
        return "does not fit"
    left_bytes, is_predicted = candidate.headroom_bytes, candidate.source == "predicted"
    if is_predicted and candidate.lacks_of == "device" and (left_bytes or -1) >= 0:
        if candidate.risk is None:  # the GPU has room, but vLLM's share of it does not
            return "vLLM's share holds no such sequence"
        return f"{candidate.risk}: leaves {format_bytes(left_bytes)} of a GPU"
    if candidate.lacks_bytes is not None and candidate.lacks_of is not None:
        least = "at least " if candidate.source == "measured" else ""
        return f"lacks {least}{format_bytes(candidate.lacks_bytes)} {_LACKING[candidate.lacks_of]}"
    return "host memory runs out" if candidate.lacks_of == "host" else "out of memory"


def _chosen_table(found: Recommendation, chosen: Candidate) -> TextTable:
    lines = template_lines(
        _TEMPLATE,
        "chosen",
        found=found,
        words=chosen.cell.words,
        by=_by(chosen),
        headroom=_headroom(chosen),
        capacity=_capacity(chosen, found),
        costs="; ".join(costs(chosen, found)) or "nothing",
        env={"words": ENV_IN_WORDS, "before": ENV_BEFORE_IN_WORDS},
    )
    return values_table(_title(found), lines, columns=())


def _title(found: Recommendation) -> str:
    each = f", {format_bytes(found.device_bytes)} each" if found.device_bytes else ""
    where = f"{found.gpus} x {plain(found.device_name)}{each}"
    rollout = f", besides {found.rollout_gpus} for rollout" if found.rollout_gpus else ""
    aim = "" if found.aim == "simplest" else f", the {found.aim}"
    trainer = "" if found.trainer == OURS else f", trained by {trainer_title(found.trainer)}"
    return (
        f"{plain(found.model_name)}, {format_tokens(found.length_tokens)} tokens on "
        f"{where}{rollout}{trainer}{aim}"
    )


def _capacity(candidate: Candidate, found: Recommendation) -> str:
    sure = "" if candidate.likely_risk is None else f", {candidate.likely_risk}"
    tokens = candidate.likely_tokens if sure else candidate.capacity_tokens
    least = "≥" if candidate.is_at_least and not sure else ""
    star = "*" if tokens > found.native_length_tokens else ""
    return f"{least}{format_tokens(tokens)}{star}{sure}" if tokens else "none"


def _step(candidate: Candidate) -> tuple[str, str]:
    """Texts of step time and tokens per second, with the source if it differs; ``-``: unknown."""
    step = candidate.step_time
    if step is None:
        return "-", "-"
    by = "" if step.source == candidate.source else f" {step.source}"
    return f"{format_seconds(step.time_s)}{by}", f"{step.tokens_per_s:,.0f}{by}"


def _headroom(chosen: Candidate) -> str:
    if chosen.headroom_bytes is None:
        return "unknown"
    at = chosen.headroom_length_tokens
    measured = "" if at is None else f": measured at {format_tokens(at)} tokens"
    sure = "" if chosen.risk is None else f": {chosen.risk}"
    return f"{format_bytes(chosen.headroom_bytes)} of each GPU{sure}{measured}"


def _footnotes(
    found: Recommendation, rows: Sequence[Candidate], *, is_explained: bool
) -> tuple[str, ...]:
    candidates, chosen = found.candidates, found.chosen
    longest = max((each.capacity_tokens for each in rows), default=0)
    star = star_of_yarn(longest, found.native_length_tokens)
    if not is_explained:
        is_predicted = chosen is not None and chosen.source == "predicted"
        cells, unlike = [each.cell for each in candidates], found.unlike if is_predicted else ()
        return (caveat(chosen, cells, unlike=unlike, star=star),)
    fitting = [each for each in candidates if each.fits and each.host_bytes is not None]
    shown = (*([chosen] if chosen else []), *candidates)
    known = predicted_trainer(found.trainer)
    others = ((each.source, each.found_in) for each in candidates if each.source != "predicted")
    return template_lines(
        _TEMPLATE,
        "explanations",
        found=found,
        star=star,
        risk_in_words=RISK_IN_WORDS,
        offloads=any(each.cell.settings.offload is not False for each in fitting),
        assumed_host=assumed_host(found.host_memory_bytes, found.usual_host),
        predicted=next((each for each in shown if each.source == "predicted"), None),
        is_by_formula=known is not None and MEMORY[known].residuals is not None,
        others=list(dict.fromkeys(others)),
    )


_STEPS = 10
"""Steps of a first run: the allocator's memory stops growing well before."""


def check_page(
    found: Recommendation, chosen: Candidate, emitted: Emitted, **told: str | Sequence[str]
) -> str:
    """Render the text page of a written folder. ``answer``: the recommendation in a sentence;
    ``name``, ``package``: the trainer's; ``yours``: steps left to the user; ``command``: the typed
    command, without the folder; ``roomier``: a command for more headroom.
    """
    cell = chosen.cell
    return drawn_page(
        "check.j2",
        form="text",
        found=found,
        chosen=chosen,
        emitted=emitted,
        settings=settings_in_words(cell.settings, cell.layout, is_scaled=found.yarn is not None),
        used_bytes=found.device_bytes - found.reserved_bytes - (chosen.headroom_bytes or 0),
        risk_in_words=RISK_IN_WORDS,
        step=step_in_words(found.trainer),
        steps=_STEPS,
        **told,
    )
