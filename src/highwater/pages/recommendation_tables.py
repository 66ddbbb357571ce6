"""Tables of a recommendation: the rung to take, why simpler ones do not do, what the next would
buy; or every rung that fits; and the page of a folder that is taken away, of which ``check.j2``
has the prose.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from highwater.memory.trainers import MEMORY
from highwater.model.rope import Yarn
from highwater.nouns.declaration import MOST_GPUS_OF_A_MACHINE
from highwater.nouns.environment import ENV_BEFORE_IN_WORDS, ENV_IN_WORDS
from highwater.nouns.recommendation import Alternative, Candidate, Recommendation, StepTime
from highwater.nouns.settings import settings_in_words, short_settings
from highwater.nouns.study import RISK_IN_WORDS
from highwater.nouns.trainer import (
    OURS,
    predicted_trainer,
    predicted_traits,
    step_in_words,
    trainer_title,
)
from highwater.pages.page import drawn_page
from highwater.pages.prediction_tables import assumed_host, caveat, star_of_yarn
from highwater.pages.table import Column, TextTable, table_of
from highwater.pages.text import plain
from highwater.trainers.emitted import Emitted
from highwater.units import counted, format_bytes, format_seconds, format_tokens

NEXT_SHOWN = 3
"""Rungs shown that train longer than what was shown before them."""
_LACKING = {"device": "of a GPU", "host": "of host memory"}


def _by(candidate: Candidate) -> str:
    return f"{candidate.source}, memory-only" if candidate.is_memory_only else candidate.source


_NAMES: tuple[Column[Candidate], ...] = (
    ("settings", lambda each: short_settings(each.cell.settings)),
    ("SP", lambda each: each.cell.layout.sharing),
    ("by", _by),
)
_BUDGET: tuple[Column[Candidate], ...] = (
    ("sequences", lambda each: str(each.cell.settings.sequences_per_micro_batch)),
    ("token budget", lambda each: format_tokens(each.token_budget_tokens)),
)


def _reach(found: Recommendation) -> Column[Candidate]:
    return "trains up to", lambda each: _capacity(each, found)


def _costs_of(found: Recommendation) -> Column[Candidate]:
    return "costs", lambda each: "; ".join(costs(each, found)) or "nothing"


def recommendation_tables(
    found: Recommendation, *, is_explained: bool = False
) -> tuple[TextTable, ...]:
    """The answer's tables, in the order in which they are read; one caveat comes last, or with
    ``is_explained`` all that is known of such answers.
    """
    if predicted_traits(found.trainer) is None:
        return (_tried_table(found),)
    tables: list[TextTable] = []
    if found.chosen is not None:
        tables.append(_chosen_table(found, found.chosen))
    if found.chosen is None or found.earlier:
        title = "why nothing simpler" if found.chosen else f"{_title(found)}: nothing fits"
        tables.append(
            table_of(
                title, found.earlier, *_NAMES, ("why not", reason), *_BUDGET, _reach(found), names=4
            )
        )
    if found.chosen is None and found.alternatives:
        tables.append(_alternative_table(found))
    longer = next_rungs(found)
    if found.chosen is not None and longer:
        tables.append(_next_table(found.chosen, longer, found))
    return (*tables[:-1], replace(tables[-1], footnotes=_footnotes(found, is_explained)))


def _tried_table(found: Recommendation) -> TextTable:
    """All that studies of a foreign trainer tried at a length, the simplest first."""
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
    """All settings that fit, the simplest first, with what each costs."""
    return table_of(
        f"{_title(found)}: all settings that fit",
        [candidate for candidate in found.candidates if candidate.fits],
        *_NAMES,
        _costs_of(found),
        *_BUDGET,
        ("headroom", lambda each: format_bytes(each.headroom_bytes)),
        _reach(found),
        ("a step", lambda each: _step(each)[0]),
        ("tokens/s", lambda each: _step(each)[1]),
        footnotes=_footnotes(found, is_explained),
        names=4,
    )


def next_rungs(found: Recommendation) -> tuple[Candidate, ...]:
    """The next rungs that buy something. Each trains longer than the chosen one and than those
    before it.
    """
    longest, bought = 0 if found.chosen is None else found.chosen.capacity_tokens, list[Candidate]()
    for candidate in found.later:
        if candidate.capacity_tokens > longest and len(bought) < NEXT_SHOWN:
            longest = candidate.capacity_tokens
            bought.append(candidate)
    return tuple(bought)


def costs(candidate: Candidate, found: Recommendation) -> tuple[str, ...]:
    """Costs of a rung, compared with the first of the ladder."""
    settings, layout = candidate.cell.settings, candidate.cell.layout
    said: list[str] = []
    if settings.allocator == "expandable":
        said.append("one environment variable")
    if settings.loss == "chunked":
        said.append("logits in chunks")
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
    if settings.offloads_model or settings.offloads_states:
        size = candidate.host_bytes
        host = "" if size is None else f"{format_bytes(size)} of it, "
        what = "states" if settings.offloads_model else "moments"
        said.append(f"{what} in host memory, {host}moved at every step")
    return tuple(said)


def reason(candidate: Candidate) -> str:
    """Say why a rung does not do: what it lacks, or, where trials say so, that memory ran out."""
    if candidate.source not in ("measured", "predicted"):
        return "does not fit"
    left_bytes, is_predicted = candidate.headroom_bytes, candidate.source == "predicted"
    if is_predicted and candidate.lacks_of == "device" and (left_bytes or -1) >= 0:
        return f"{candidate.risk}: leaves {format_bytes(left_bytes)} of a GPU"
    if candidate.lacks_bytes is not None and candidate.lacks_of is not None:
        least = "at least " if candidate.source == "measured" else ""
        return f"lacks {least}{format_bytes(candidate.lacks_bytes)} {_LACKING[candidate.lacks_of]}"
    return "host memory runs out" if candidate.lacks_of == "host" else "out of memory"


def _chosen_table(found: Recommendation, chosen: Candidate) -> TextTable:
    budget, environment = chosen.token_budget_tokens, "nothing to set"
    if chosen.cell.settings.allocator == "expandable":
        environment = f"{ENV_IN_WORDS}, before any process starts; {ENV_BEFORE_IN_WORDS}"
    rows = (
        ("settings", f"{short_settings(chosen.cell.settings)}{_degrees(chosen)}, {_by(chosen)}"),
        ("headroom", _headroom(chosen)),
        ("token budget", f"{format_tokens(budget)} a GPU: {_packed(chosen, found)}"),
        ("trains up to", f"{_capacity(chosen, found)} tokens, {chosen.capacity_source}"),
        ("step", _step_in_words(chosen.step_time)),
        ("costs", "; ".join(costs(chosen, found)) or "nothing"),
        ("environment", environment),
        ("positions", _positions(found.yarn, found)),
    )
    return TextTable(title=_title(found), columns=(), rows=rows, left_columns=2)


def _next_table(
    chosen: Candidate, longer: tuple[Candidate, ...], found: Recommendation
) -> TextTable:
    return table_of(
        "what the next would buy",
        longer,
        *_NAMES,
        _costs_of(found),
        *_BUDGET,
        _reach(found),
        ("more", lambda each: _more(each, chosen)),
        ("tokens/s", lambda each: _step(each)[1]),
        names=4,
    )


def _more(longer: Candidate, chosen: Candidate) -> str:
    """Tokens that the longer one trains more. ``-`` where the chosen one is at least what it is, or
    where a prediction and a measurement would be mixed.
    """
    if chosen.is_at_least or longer.capacity_source != chosen.capacity_source:
        return "-"
    gained = format_tokens(longer.capacity_tokens - chosen.capacity_tokens)
    return f"{'≥' if longer.is_at_least else ''}+{gained}"


def _alternative_table(found: Recommendation) -> TextTable:
    tried = {alternative.kind for alternative in found.alternatives}
    rows = [
        (
            *(each.kind, plain(each.what), _settings_of(each)),
            *(format_bytes(each.headroom_bytes), format_bytes(each.host_bytes)),
        )
        for each in found.alternatives
    ]
    if "more GPUs" not in tried:
        most = MOST_GPUS_OF_A_MACHINE
        none = f"none of up to {most} of this kind, nor twice or four times that"
        rows.append(("more GPUs", none, "-", "-", "-"))
    if "a larger GPU" not in tried:
        rows.append(("a larger GPU", "none of the catalog", "-", "-", "-"))
    return TextTable(
        title="what would do: predicted",
        columns=("", "what", "simplest settings", "headroom", "host memory"),
        rows=tuple(rows),
    )


def _settings_of(alternative: Alternative) -> str:
    """The simplest settings that fit then; ``-`` where nothing here is known to."""
    if alternative.cell is None:
        return "-"
    return f"{short_settings(alternative.cell.settings)}{alternative.cell.layout.suffix}"


def _title(found: Recommendation) -> str:
    each = f", {format_bytes(found.device_bytes)} each" if found.device_bytes else ""
    where = f"{found.gpus} x {plain(found.device_name)}{each}"
    rollout = f", besides {found.rollout_gpus} for rollout" if found.rollout_gpus else ""
    trainer = "" if found.trainer == OURS else f", trained by {trainer_title(found.trainer)}"
    return (
        f"{plain(found.model_name)}, {format_tokens(found.length_tokens)} tokens on "
        f"{where}{rollout}{trainer}"
    )


def _degrees(candidate: Candidate) -> str:
    """``, SP=2``, and how many sequences where they are fewer than by default."""
    shared = candidate.cell.layout.suffix
    if not candidate.is_lowered:
        return shared
    sequences = counted(candidate.cell.settings.sequences_per_micro_batch, "sequence")
    return f"{shared}, {sequences} a micro-batch"


def _capacity(candidate: Candidate, found: Recommendation) -> str:
    tokens, least = candidate.capacity_tokens, "≥" if candidate.is_at_least else ""
    star = "*" if tokens > found.native_length_tokens else ""
    return f"{least}{format_tokens(tokens)}{star}" if tokens else "none"


def _packed(candidate: Candidate, found: Recommendation) -> str:
    """``2 sequences of 65,536 over 2 GPUs``."""
    settings, degree = candidate.cell.settings, candidate.cell.layout.context_degree
    count = settings.sequences_per_micro_batch
    over = f" over {degree} GPUs" if degree > 1 else ""
    fewer = "each of more micro-batches" if settings.accumulates else "a step"
    lowered = f", below the default, so fewer tokens in {fewer}" if candidate.is_lowered else ""
    return f"{counted(count, 'sequence')} of {format_tokens(found.length_tokens)}{over}{lowered}"


def _step(candidate: Candidate) -> tuple[str, str]:
    """Seconds of a step and tokens per second, and by what where that is not by what it fits; ``-``
    where nobody knows.
    """
    step = candidate.step_time
    if step is None:
        return "-", "-"
    by = "" if step.source == candidate.source else f" {step.source}"
    return f"{format_seconds(step.time_s)}{by}", f"{step.tokens_per_s:,.0f}{by}"


def _step_in_words(step: StepTime | None) -> str:
    if step is None:
        return "unknown: no study here measured the speed of these settings, nor of such a GPU"
    takes, speed = format_seconds(step.time_s), f"{step.tokens_per_s:,.0f} tokens/s"
    figure = f"{takes} for {format_tokens(step.step_tokens)} tokens, {step.source}"
    if step.source == "measured":
        return f"{figure}: {speed}"
    if step.measured_length_tokens is None:
        return f"{takes} predicted, {speed}"
    at = format_tokens(step.measured_length_tokens)
    return f"{figure} from {speed}, measured at {at} tokens, at the same FLOP/s"


def _headroom(chosen: Candidate) -> str:
    if chosen.headroom_bytes is None:
        return "unknown"
    at = chosen.headroom_length_tokens
    measured = "" if at is None else f": measured at {format_tokens(at)} tokens"
    sure = "" if chosen.risk is None else f": {chosen.risk}"
    return f"{format_bytes(chosen.headroom_bytes)} of each GPU{sure}{measured}"


def _positions(yarn: Yarn | None, found: Recommendation) -> str:
    if yarn is None:
        return f"as the model has them, up to {format_tokens(found.native_length_tokens)}"
    block = ", ".join(f"{name}: {value}" for name, value in yarn.rope_parameters.items())
    length = yarn.max_position_embeddings
    return f"YaRN, rope_parameters {{{block}}}, max_position_embeddings {length}"


def _footnotes(found: Recommendation, is_explained: bool) -> tuple[str, ...]:
    if is_explained:
        return tuple(_explanations(found))
    is_predicted = found.chosen is not None and found.chosen.source == "predicted"
    cells, unlike = [each.cell for each in found.candidates], found.unlike if is_predicted else ()
    return (caveat(found.chosen, cells, unlike=unlike, star=_star(found)),)


def _star(found: Recommendation) -> tuple[str, ...]:
    longest = max((each.capacity_tokens for each in found.candidates), default=0)
    return star_of_yarn(longest, found.native_length_tokens)


def _explanations(found: Recommendation) -> Iterator[str]:
    yield from _star(found)
    yield RISK_IN_WORDS
    if found.rollout_gpus:
        own, rollout = found.gpus, found.rollout_gpus
        yield f"every count of GPUs is the trainer's, {own}: {rollout} of {own + rollout} roll out"
    if found.yarn is not None:
        yield (
            "YaRN: numerical stability needs the angles of such positions in float32, for bfloat16 "
            "counts without gaps to 256 only (Hugging Face's models and this engine compute them "
            "so); one factor scales every length, short texts too, and rollout and trainer need "
            "the same block, or their log-probabilities differ"
        )
    offloads = (
        each.cell.settings.offload is not False and each.fits and each.host_bytes is not None
        for each in found.candidates
    )
    if any(offloads) and not found.host_memory_bytes:
        yield (
            "offload is taken to find the host memory that it needs; `--host-memory` says how "
            "much there is"
        )
    yield from assumed_host(found.host_memory_bytes, found.usual_host)
    shown = (*([found.chosen] if found.chosen else []), *found.candidates)
    predicted = next((candidate for candidate in shown if candidate.source == "predicted"), None)
    if predicted is not None:
        yield from _about_predictions(found, predicted)
    for source, path in dict.fromkeys(
        (each.source, each.found_in) for each in found.candidates if each.source != "predicted"
    ):
        yield f"{source}: {plain(path)}"


def _about_predictions(found: Recommendation, first: Candidate) -> Iterator[str]:
    is_all = all(each.source == each.capacity_source == "predicted" for each in found.candidates)
    where = "predicted " if is_all else "where it says predicted: "
    known = predicted_trainer(found.trainer)
    if known is not None and MEMORY[known].residuals is not None:
        yield (
            f"{where}by formula, nothing was run, with {format_bytes(found.margin_bytes)} of "
            f"headroom: `{plain(first.found_in)} --explain` says more"
        )
    else:
        yield f"predicted, nothing was run: {found.accuracy}"
    if found.unlike:
        yield (
            f"not among the recorded trials, so nobody knows how good the predictions are "
            f"there: {plain(', '.join(found.unlike))}"
        )
    yield f"not in {'it' if is_all else 'what is predicted'}: {', '.join(found.not_modelled)}"


_STEPS = 10
"""Steps of a first run: the allocator's memory has long stopped to grow by then."""


def check_page(
    found: Recommendation, chosen: Candidate, emitted: Emitted, **told: str | Sequence[str]
) -> str:
    """The page's text. ``answer``: what was found, in a sentence; ``name``, ``package``: of the
    trainer; ``yours``: what the files leave to the user; ``command``: what was typed, but for the
    folder; ``roomier``: what asks for more headroom.
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
