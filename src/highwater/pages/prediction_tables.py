"""Predictions and recommendations in sentences: what fits, with which settings, the headroom, the
speed. Then tables: capacities by rung, bytes by term; and the caveat below a table, or all notes
(``prediction.txt.j2``).
"""

import math
import re
from collections.abc import Sequence
from itertools import compress, pairwise
from typing import TYPE_CHECKING

from highwater.memory.capacity import Binding, CellPrediction, Prediction
from highwater.memory.formula.constants import GENERATION, Term
from highwater.memory.formula.rollout import ON_PAPER
from highwater.memory.interval.calibration import least_residuals
from highwater.memory.interval.residuals import PredictionMethod, unlike_cell
from highwater.memory.question import HEADS_SHARE, KEPT_REFERENCE
from highwater.memory.trace.replay import Replayed
from highwater.memory.trainers import MEMORY, UNTIMED
from highwater.model.held_bytes import PROCESS_BYTES
from highwater.model.rope import YARN_IN_USE
from highwater.nouns.cluster import nameless
from highwater.nouns.hardware import THIS_MACHINE, runs_trials
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Rollout
from highwater.nouns.recommendation import Alternative, Candidate, FileChange, Recommendation
from highwater.nouns.settings import (
    Settings,
    listed,
    settings_in_words,
    shared_training,
    short_settings,
)
from highwater.nouns.study import HOST_KEPT, RISK_IN_WORDS, Cell, Risk
from highwater.nouns.trainer import (
    OURS,
    REGISTRY,
    TRAINERS,
    AnyTrainer,
    predicted_as,
    predicted_trainer,
    predicted_traits,
    step_in_words,
)
from highwater.pages.page import template_lines
from highwater.pages.table import TextTable, table_of
from highwater.pages.text import plain
from highwater.speed import BASIS_IN_WORDS, Cost
from highwater.units import GIB, counted, format_bytes, format_seconds, format_share, format_tokens

if TYPE_CHECKING:
    from highwater.api.data_lengths import DataLengths, KeptLength
    from highwater.api.gpu_choice import GpuChoice
    from highwater.trainers.user_file import FileSettings

_LACKS = {
    "device": "of each GPU",
    "host": "of host memory",
    "rollout": "of vLLM's KV cache for one sequence (`--gpu-memory-utilization`)",
}
_SURE: dict[Risk | None, str] = {"safe": "Yes", "likely": "Likely", "tight": "Tight", None: "Yes"}
"""First word of an answer about one length; older files have no risk."""


def in_lines(answer: str) -> str:
    """Put line ends into an answer: before long settings, the longest length, alternatives, a time
    that is unknown, and beside a rollout whose step is predicted.
    """
    source = "|Predicted as " * (" beside vLLM at " in answer)
    starts = "The longest |What |Nearest is|(In its|Attention is|No time of) "
    return re.sub(rf"(?<=\.) (?=With (?!.{{1,45}}\.( |$))|{starts}{source})", "\n", answer)


def prediction_answer(
    prediction: Prediction,
    *,
    longest: Prediction | None = None,
    alternatives: Sequence[Alternative] = (),
    changed: Recommendation | None = None,
    as_saved: Prediction | None = None,
    read: "FileSettings | None" = None,
    farthest: Prediction | None = None,
    fuller: Prediction | None = None,
) -> str:
    """Sentences on how far a model trains, and with which settings; at one length, whether it
    trains. If nothing fits, they name what would: a shorter length, from ``longest``, the
    prediction of the same question without a length; ``alternatives``; and changes to the user's
    own file, from ``changed``. ``as_saved``: the prediction with weights in bf16, to be named too.
    Of a user's own file that is ``read`` two lines say first how far it trains: as it is written
    (``longest``), and with changes (``farthest``). ``fuller`` has the cost with ``fuller_rows``.
    """
    answer, known = prediction.answer, prediction.calibration
    source = predicted_as(prediction.trainer, known.own_trials if known else 0)
    how_many = _how_many(alternatives)
    in_bf16 = _in_bf16(answer, as_saved)
    if read is not None and longest is not None and farthest is not None:
        text = _of_file(prediction, read, longest.explained, farthest.answer, changed)
    elif answer is None:
        text = _nothing(prediction, source + in_bf16, longest, alternatives)
    else:
        text = _answered(prediction, answer, source + in_bf16, how_many, fuller)
    text += "".join(f" {each}." for each in _said(prediction.notes))
    text += "" if prediction.memory_limit.rollout is None else f" {ON_PAPER}"
    text += _of_objective(prediction.explained.cell, prediction.trainer)
    if prediction.explained.footprint.peak.name == GENERATION:
        text += " Generation by transformers ends it, whose keys and values are of a whole batch:"
        text += " `--rollout vllm` has a cache of its own size."
    return text if prediction.tried is None else f"{_of_allocation(prediction)}\n{text}"


def _of_file(
    prediction: Prediction,
    read: "FileSettings",
    within: CellPrediction,
    best: CellPrediction | None,
    changed: Recommendation | None,
) -> str:
    """Lines on a user's own file: whose step is predicted, if its length fits as written, or which
    change it needs first, how far it trains so (``within``), and with changes (``best``).
    """
    shown, native_tokens = prediction.explained, prediction.native_length_tokens
    asked = prediction.length_tokens or shown.does_not_fit_tokens or 0
    usual = (prediction.memory_limit.host_bytes, prediction.memory_limit.usual_host)
    source, (nearest, lacks_bytes) = predicted_as(prediction.trainer), _nearest(prediction)
    left_bytes, of_host = shown.headroom_bytes, " of host memory" * (nearest.binding == "host")
    lacks_bytes = lacks_bytes if of_host else max(-left_bytes, 0) or lacks_bytes
    fits, left = "does not fit", f"{format_bytes(lacks_bytes)}{of_host} short"
    if read.held_tokens is not None and read.held_tokens < asked:
        left = "beyond its token budget"
    elif prediction.answer is not None:
        fits, left = "fits", f"{shown.risk}, {format_bytes(max(0, left_bytes))} left"
    tokens = max(asked * (fits == "fits"), within.reach_tokens)
    so = "so" if read.required else "as written"
    far = f"{so} {format_tokens(tokens)} train"
    if not tokens:
        far = f"{so} not even {format_tokens(min(asked, within.does_not_fit_tokens or asked))}"
    second = f"No setting in it that saves memory {'trains longer' if tokens else 'changes that'}."
    made = read.changes_to(best.cell, best.reach_tokens) if best else ()
    fewest = changed.changes if changed and fits != "fits" else ()
    if fewest:
        change = fewest[0].words.partition(" (beside")[0]
        left += f": change to {change}{' first' * (len(fewest) > 1)}"
    if best is not None and made and best.reach_tokens > tokens:
        far += "" if fewest else f", with changes {format_tokens(best.reach_tokens)}"
        _, *told = _facts_of(best, *usual, is_scaled=True, is_second=True)
        what = listed([*made, *["YaRN"] * (best.reach_tokens > native_tokens)])
        second = f"The longest, {_tokens(best.reach_tokens, native_tokens)}, takes {what}: "
        second += f"{', '.join(filter(None, told))}."
    which = f"{plain(read.source)} at {format_tokens(asked)} tokens {fits} {_gpus(prediction)}"
    source += f", not as written but with {listed(read.required)}" * bool(read.required)
    first = f"P{source[1:]}: {which}, {left}; {far}."
    chosen, is_scaled = prediction.answer or (changed and changed.chosen), asked > native_tokens
    if chosen is None:
        would = _would_fit(changed.alternatives if changed else (), is_scaled=is_scaled)
        return f"{first}\n{second}\n{would or _lacking(prediction)}"
    how, *told = _facts_of(chosen, *usual, is_scaled=is_scaled)
    words = f"As written, with {how}"
    if fits != "fits" or read.required:
        made = listed(read.changes_to(chosen.cell, asked)) or "nothing"
        made = _changed(fewest) if fewest else f"change to {made}"
        if beside := re.search(r" \(beside .*?\)", made):
            second = second.replace(beside[0], "")
        words = f"For {format_tokens(asked)} tokens {made}"
    return f"{first}\n{words}: {'; '.join(filter(None, told))}.\n{second}"


def _of_allocation(prediction: Prediction) -> str:
    """Sentence on the tensor that failed to be allocated (``tried``), and what makes it smaller."""
    tried, settings = prediction.tried, prediction.explained.cell.settings
    assert tried is not None  # noqa: S101 (who calls has asked)
    (first, *others), asked = tried.tensors, format_bytes(tried.bytes)
    if not tried.is_known:
        near = listed([f"{each.name} ({format_bytes(each.bytes)})" for each in tried.tensors])
        return f"No single tensor of this step has {asked}; nearest are {near}."
    from highwater.trainers.user_file import FILE_WORDS  # only a failure needs it

    words, together = FILE_WORDS.get(prediction.trainer), settings.traits.documents_together
    has_liger = not TRAINERS[prediction.trainer].refused(["liger"])
    loss = "use_liger_kernel=True" if has_liger else "--loss chunked"
    rows = f"--sequences-per-micro-batch {together}"
    if words is not None and words.length:
        loss, rows = f"{words.fused[-1]}: true", f"{words.rows}: 1"
    whose = "Liger's fused" if has_liger else "a chunked"
    fewer = f"`{rows}` or " * (settings.sequences_per_micro_batch > together)
    shrunk = {
        "loss": f"{whose} loss (`{loss}`) does without them",
        "attention": "flash attention does without them",
        "tokens": f"{fewer}a shorter length makes them smaller",
        "sharding": "more GPUs share them",
    }
    names = " or ".join((first.name, *(each.name for each in others[:1])))
    sizes = " x ".join(f"{each:,}" for each in first.sizes)
    return f"{asked} are the {names}, {sizes} bytes: {shrunk[first.shrunk_by]}."


def _in_bf16(answer: CellPrediction | None, as_saved: Prediction | None) -> str:
    """Sentences, after a full stop, on how far bf16 weights train; empty if as far as float32's."""
    narrow = as_saved and as_saved.answer
    if not as_saved or not narrow or (answer and answer.reach_tokens == narrow.reach_tokens):
        return ""
    flags = f"--optimizer {narrow.cell.settings.optimizer} --parameters bf16"
    tokens = f"{format_tokens(narrow.reach_tokens)} tokens train (`{flags}`)"
    said = f"With weights in float32: as transformers 5 loads most files, in bf16, {tokens}"
    return f". {said}.{_on_gpus(as_saved, narrow)}".removesuffix(".")


def _answered(
    prediction: Prediction,
    answer: CellPrediction,
    source: str,
    how_many: str,
    fuller: Prediction | None,
) -> str:
    """Sentences on a length that trains: the one asked about; else the native length, if any cell
    trains it, and then the longest; else the longest alone. ``_sentences_on`` names their parts.
    """
    model, asked = plain(prediction.model_name), prediction.length_tokens
    where = f"{_where(prediction)}{how_many and f' ({how_many})'}"
    if (cost := prediction.cost) is not None:
        bill, less = _bill(cost, prediction.gpus), fuller and fuller.answer and fuller.cost
        if fuller and less and less.time_s < 0.95 * cost.time_s:
            rows = fuller.explained.cell.settings.sequences_per_micro_batch
            fuller_bill = f"{_bill(less, fuller.gpus)} with `--sequences-per-micro-batch {rows}`"
            bill = f"{fuller_bill}, or {bill.partition(' take ')[-1]} without"
        source += f". {bill}"
    source += prediction.assumed and f". {prediction.assumed}"
    longest_tokens = answer.reach_tokens
    native_tokens = prediction.native_length_tokens
    limit, rollout = prediction.memory_limit, prediction.memory_limit.rollout
    usual = (limit.host_bytes, limit.usual_host)

    def sentences(claim: str, cell: CellPrediction, length_tokens: int) -> str:
        return _sentences_on(
            f"{claim} on {where}",
            cell,
            *usual,
            trainer=prediction.trainer,
            source=source,
            peaks="" if asked and rollout else _peak_phase(prediction, cell),  # a table says it
            is_scaled=length_tokens > native_tokens,
        )

    if asked is not None:
        source += _in_its_file(answer.cell, prediction.trainer, asked)
        claim = f"{_SURE[answer.risk]}: {model} trains {_tokens(asked, native_tokens, rollout)}"
        return sentences(claim, answer, asked)
    reach = f"{_at_least(answer, native_tokens)}{format_tokens(longest_tokens)}"
    at_native = prediction.native
    if at_native is None:
        may = "trains" if answer.capacity_tokens else "may train"
        claim = f"{model} {may} up to {reach} tokens"
        claim += _in_brackets(_response(rollout, longest_tokens))
        text = sentences(claim, answer, longest_tokens)
        return f"{text}{_beside(prediction, answer)}"
    claim = f"{model} trains its native {format_tokens(native_tokens)} tokens"
    if longest_tokens <= native_tokens:
        fails_tokens = answer.does_not_fit_tokens
        is_last = ["the longest it was made for"] * (fails_tokens is None)
        claim += _in_brackets([*is_last, *_response(rollout, native_tokens)])
        text = sentences(claim, at_native, native_tokens)
        text += "" if fails_tokens is None else f" {format_tokens(fails_tokens)} do not fit."
        return f"{text}{_on_gpus(prediction, at_native)}"
    longest = f"longest: {reach}"
    if prediction.trainer != OURS and (shared := _sharing(answer.cell.layout)):
        whole = [e.capacity_tokens for e in prediction.cells if not _sharing(e.cell.layout)]
        own = f"{format_tokens(max(whole))}; " if any(whole) else ""
        longest = f"longest: {own}by {' x '.join(shared)}: {reach}"
    claim += _in_brackets([*_response(rollout, native_tokens), longest])
    text = sentences(claim, at_native, native_tokens)
    how, facts, host = _facts_of(answer, *usual, is_scaled=True, is_second=True)
    how = how.removeprefix(f"{shared_training([at_native.cell.settings])}, ")
    what = ", ".join(filter(None, (facts, host)))
    return f"{text} The longest is {reach} tokens with {how}: {what}.{_beside(prediction, answer)}"


def _said(notes: Sequence[str]) -> list[str]:
    """Those of the notes that an answer says too, as sentences: what nobody predicts."""
    unpredicted = (UNTIMED, KEPT_REFERENCE)
    return [f"{each[0].upper()}{each[1:]}" for each in notes if each.startswith(unpredicted)]


def _bill(cost: Cost, gpus: int) -> str:
    """Text: ``A million tokens take 1m 48s, 0.12 GPU-hours, 0.21 dollars``, of all GPUs."""
    size, name = (10**6, "million") if cost.tokens % 10**9 else (10**9, "billion")
    many = f"A {name}" if cost.tokens == size else f"{cost.tokens / size:,.6g} {name}"
    hours = gpus * cost.time_s / 3600
    money = "" if cost.dollars is None else f", {cost.dollars:,.2f} dollars"
    shown = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"  # three digits, or no fraction
    return f"{many} tokens take {format_seconds(cost.time_s)}, {shown} GPU-hours{money}"


def fuller_rows(prediction: Prediction) -> int | None:
    """Sequences of a micro-batch that keep a GPU busy; None if those in an answer with a cost do,
    or if there is none.
    """
    length_tokens, cell = prediction.length_tokens, prediction.explained.cell
    if prediction.cost is None or length_tokens is None or cell.settings.token_budget_tokens:
        return None
    degree, together = cell.layout.context_degree, cell.settings.traits.documents_together
    if cell.settings.sequences_per_micro_batch * length_tokens >= _FEW_TOKENS * degree:
        return None
    return -(-_FEW_TOKENS * degree // (together * length_tokens)) * together


def choice_answer(choice: "GpuChoice") -> str:
    """Sentence on the GPUs that train a length for the least money; without all prices, on those
    with the least memory; of one kind, on the fewest.
    """
    best, source = choice.offers[0], predicted_as(choice.trainer)
    model = f"{plain(choice.model_name)}{_for_trainer(choice.trainer)}"
    tokens = _tokens(choice.length_tokens, choice.native_length_tokens)
    if best.trained is None:
        most = max(each.gpus for each in choice.offers)
        kinds = listed([*dict.fromkeys(each.device_name for each in choice.offers)])
        return f"No: {model} does not train at {tokens} on up to {most} of {kinds}, {source}."
    is_scaled = choice.length_tokens > choice.native_length_tokens
    which, dollars = "smallest", ""
    if best.million_dollars is not None:
        which, dollars = "cheapest", f" for {best.million_dollars:,.2f} dollars a million tokens"
    elif best.hour_dollars is not None:
        hour = f"{best.hour_dollars:,.2f} dollars"
        which, dollars = "cheapest", f" by the hour, {hour} (its time is not predicted)"
    which = "fewest" if choice.is_one_kind else which
    alone = [e for e in choice.offers if e.trained and not e.trained.cell.settings.uses_host]
    least = min(alone, key=lambda each: each.gpus * each.device_bytes, default=best)
    if which == "cheapest" and least is not best:
        dollars += f" (smallest: {least.gpus} x {plain(least.device_name)})"
    claim = (
        f"{best.gpus} x {plain(best.device_name)} {'is' if best.gpus == 1 else 'are'} the {which} "
        f"of these to train {model} at {tokens}{dollars}"
    )
    host = (best.host_memory_bytes, best.usual_host)
    source += best.assumed and f". {best.assumed}"
    source += "" if best.cost is None else f". {_bill(best.cost, best.gpus)}"
    text = _sentences_on(
        *(claim, best.trained, *host), trainer=choice.trainer, source=source, is_scaled=is_scaled
    )
    return f"{text}{_of_objective(best.trained.cell, choice.trainer)}"


def choice_table(choice: "GpuChoice") -> TextTable:
    """Table with a row for each kind of GPU, the cheapest first; or for each number of one kind."""
    trained = shared_training(e.trained.cell.settings for e in choice.offers if e.trained)
    is_timed = any(each.trained and each.trained.step for each in choice.offers)
    return table_of(
        f"{plain(choice.model_name)}, {format_tokens(choice.length_tokens)} tokens"
        f"{trained and f', {trained}'}: predicted by formula",
        choice.offers,
        ("GPUs", lambda each: f"{each.gpus} x {plain(each.device_name)}"),
        ("fewest", lambda each: str(each.fewest_gpus or "-")),
        ("dollars, 1h", lambda each: _dollars(each.hour_dollars)),
        ("dollars, 1M", lambda each: _dollars(each.million_dollars)) if is_timed else None,
        ("tokens/s", "trained.step.tokens_per_s") if is_timed else None,
        ("Ulysses", lambda each: each.trained.cell.layout.sharing if each.trained else "-"),
        (
            "settings",
            lambda e: short_settings(e.trained.cell.settings, but=trained) if e.trained else "none",
        ),
        names=1,
        footnotes=(
            "fewest: of 1 to 8, or as typed; settings: the fastest; `recommend`: the simplest",
        ),
    )


def _dollars(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.2f}"


def _of_objective(cell: Cell, trainer: AnyTrainer) -> str:
    """Sentence on what lengths mean for pairs, and on the number of sequences in a micro-batch."""
    most, title = _usual_rows(cell, trainer), REGISTRY[trainer].title
    if cell.settings.traits.documents_together == 2:
        return " Lengths are of one sequence of a pair."
    if most == 1 or cell.settings.sequences_per_micro_batch > 1:
        return ""
    return f" {title}'s own default is {most} sequences (`--sequences-per-micro-batch {most}`)."


def _usual_rows(cell: Cell, trainer: AnyTrainer) -> int:
    """Sequences a micro-batch by a trainer's own default, where it trains on what was generated."""
    known = predicted_traits(trainer)
    generates = cell.settings.traits.advantages != "none"
    return known.usual_sequences if known and generates else 1


def _by_its_file(cell: Cell, trainer: AnyTrainer) -> str:
    """Text of what a trainer's file must say for an answer to hold, as its own default is another:
    sequences a micro-batch, and a reference that runs before training; empty if nothing.
    """
    known, rows = predicted_traits(trainer), cell.settings.sequences_per_micro_batch
    if _usual_rows(cell, trainer) > 1:
        return f", micro-batch {rows}"
    first = known.reference_first if known and cell.settings.has_second_model else ""
    return first and f" with `{first}`"


def _in_its_file(cell: Cell, trainer: str, length_tokens: int) -> str:
    """Sentence, after a full stop, on two fields of a trainer that counts a GPU's tokens."""
    field, degree = REGISTRY[trainer].tokens_field, cell.layout.ulysses_degree
    tokens = -(-cell.settings.sequences_per_micro_batch * length_tokens // degree)
    tokens = cell.settings.token_budget_tokens or tokens
    said = f"`ulysses_sequence_parallel_size` is {degree}, and `{field}` {tokens}"
    return f". In its file `use_dynamic_bsz` is true, {said}" * bool(field)


def recommendation_answer(found: Recommendation, target: str | None = None) -> str:
    """Sentences on the settings to use for a length, and the source of that; without any that fit,
    on alternatives. ``target``: the trainer that the answer is for, if not the predicted one.
    """
    if (chosen := found.chosen) is None:
        source = predicted_as(found.trainer) if predicted_traits(found.trainer) else "measured"
        tokens = _tokens(found.length_tokens, found.native_length_tokens)
        text = f"No: {plain(found.model_name)} does not train at {tokens} on "
        fits_shorter = any(each.capacity_tokens for each in found.candidates)
        ended = _ended_by(found, fits_shorter=fits_shorter)
        text += f"{_where(found, target)}{ended}{_but_on(found.alternatives, source)}"
        is_scaled = found.length_tokens > found.native_length_tokens
        text = f"{text} {_would_fit(found.alternatives, is_scaled=is_scaled)}".rstrip()
        is_beside = any(each.rollout_sequences is not None for each in found.candidates)
        return f"{text} {ON_PAPER}" if is_beside else text
    outside = "" if target is None else chosen.cell.settings.traits.outside_step
    return (
        f"{_chosen(found, chosen, target)}"
        f"{_of_objective(chosen.cell, found.trainer)}{outside and f' {outside}'}"
        f"{'' if chosen.rollout_sequences is None else f' {ON_PAPER}'}"
    )


def _chosen(found: Recommendation, chosen: Candidate, target: str | None = None) -> str:
    """Sentences on the settings chosen for a length; before them what a user's own file lacks, and
    the changes to it, the change that frees the most first.
    """
    claim, written = f"{_SURE[chosen.risk]}: ", found.as_written
    if written is not None:
        left, surely = written.headroom_bytes or 0, " surely" * (written.risk is not None)
        lacks = f"{format_bytes(abs(left))} {'short' if left < 0 else 'left'}"
        if written.lacks_of == "host":
            lacks = f"{format_bytes(written.lacks_bytes or 0)} of host memory short"
        claim = f"Not{surely} as {plain(found.own_file or '')} is written, {lacks}: "
    if any(each.frees_bytes is None for each in found.changes):
        claim = f"Not predicted as {plain(found.own_file or '')} is written: "
    if found.changes:
        claim += f"{_changed(found.changes)}{' ' if len(found.changes) > 1 else ', and '}"
    source = predicted_as(found.trainer) if chosen.source == "predicted" else chosen.source
    source += "" if target in (None, found.trainer) else f" for {step_in_words(found.trainer)}"
    source = "measured, in memory alone" if chosen.is_memory_only else source
    source += found.assumed and f". {found.assumed}"
    source += _in_its_file(chosen.cell, target or found.trainer, found.length_tokens)
    tokens = _tokens(found.length_tokens, found.native_length_tokens, found.rollout)
    where, how_many = _where(found, target), _how_many(found.alternatives)
    claim += f"{plain(found.model_name)} trains {tokens} on {where}{how_many and f' ({how_many})'}"
    host, is_scaled = (found.host_memory_bytes, found.usual_host), found.yarn is not None
    return _sentences_on(
        *(claim, chosen, *host), trainer=found.trainer, source=source, is_scaled=is_scaled
    )


def _changed(changes: Sequence[FileChange]) -> str:
    """Text of the changes to a user's file, the one that frees the most first."""
    (change, *others), freed_bytes = changes, changes[0].frees_bytes
    frees = "" if freed_bytes is None else f" (frees {format_bytes(freed_bytes)})"
    more = f"; with {listed([each.words for each in others])} as well" if others else ""
    return f"change to {change.words}{' first' * bool(others)}{frees}{more}"


def _tokens(length_tokens: int, native_tokens: int, rollout: Rollout | None = None) -> str:
    """Text of a length, its multiple of the native length if it is longer, and ``_response``."""
    times = f"{length_tokens / native_tokens:.3g} x native {format_tokens(native_tokens)}"
    notes = [times] * (length_tokens > native_tokens) + _response(rollout, length_tokens)
    return f"{format_tokens(length_tokens)} tokens{_in_brackets(notes)}"


def _response(rollout: Rollout | None, length_tokens: int) -> list[str]:
    """Text of what a sequence beside a rollout holds; of its tokens, those that a prompt leaves."""
    if rollout is None or rollout.prompt_tokens is None:
        return ["prompt and response"] * (rollout is not None)
    left_tokens = length_tokens - rollout.prompt_tokens
    return [f"response: {format_tokens(left_tokens)}"] * (left_tokens > 0)


def _sharing(layout: Layout) -> list[str]:
    """Text of the degrees by which GPUs share a sequence: ``Ulysses 2``, ``ring 4``."""
    degrees = (("Ulysses", layout.ulysses_degree), ("ring", layout.ring_degree))
    return [f"{name} {degree}" for name, degree in degrees if degree > 1]


def _in_brackets(notes: Sequence[str]) -> str:
    return f" ({', '.join(notes)})" if notes else ""


def _for_trainer(trainer: AnyTrainer, target: str | None = None) -> str:
    """Text: `` for TRL 1.16``, or who writes the files; empty for our engine."""
    row = REGISTRY[target or trainer]
    trained = row.trained or f"{row.title}'s trainer"
    by = f" with {row.title}" if predicted_traits(trainer) is None else f" for {trained}"
    return "" if trainer == OURS else by


def _where(found: Prediction | Recommendation, target: str | None = None) -> str:
    """Text: ``4 x A100-80GB``, the trainer if not our engine, and vLLM's share unless typed."""
    by = _for_trainer(found.trainer, target)
    apart = found.rollout_gpus if isinstance(found, Recommendation) else 0
    by += f" and {apart} for rollout" if apart else ""
    rollout = found.memory_limit.rollout if isinstance(found, Prediction) else found.rollout
    if rollout is not None and (most := rollout.most_utilization) is not None:
        taken = rollout.gpu_memory_utilization or 0.0
        fits = f" ({f'up to {most}' if most > taken else 'no more'} fits)"
        by += f" beside vLLM at {taken}{fits * bool(most)}"
    return f"{_gpus(found)}{by}"


def _but_on(alternatives: Sequence[Alternative], source: str) -> str:
    """End of a No, on how many GPUs suffice, and a sentence on the source of both."""
    how_many = _how_many(alternatives)
    return f"{how_many and f'; {how_many}'}. {source[:1].upper()}{source[1:]}."


def _how_many(alternatives: Sequence[Alternative]) -> str:
    """Text on how many GPUs suffice, where that is more than those of the question; else empty."""
    return next((plain(each.how_many) for each in alternatives if each.how_many), "")


def _gpus(found: Prediction | Recommendation) -> str:
    if found.device_name == nameless(found.device_bytes):
        gpus = "a GPU" if found.gpus == 1 else f"{found.gpus} GPUs"
        return f"{gpus} of {format_bytes(found.device_bytes)}"
    return f"{found.gpus} x {plain(found.device_name)}"


def _beside(prediction: Prediction, answer: CellPrediction) -> str:
    """Sentences on YaRN's factor, the longest length that may just fit, and the GPUs alone."""
    said = ""
    if prediction.yarn_factor is not None:
        stretched = f"{prediction.yarn_factor:.3g} times: published models go up to {YARN_IN_USE}"
        said = f" YaRN stretches {stretched}."
    is_longer = answer.capacity_tokens and answer.likely_edge_tokens > answer.capacity_tokens
    if is_longer and prediction.native is None:
        edge = format_tokens(answer.likely_edge_tokens)
        said += f" Up to {edge} may fit, with nothing to spare."
    return said + _on_gpus(prediction, answer)


def _on_gpus(prediction: Prediction, answer: CellPrediction) -> str:
    """Sentence on the longest length without offload, if the answer offloads anything."""
    on_gpus = [e.capacity_tokens for e in prediction.cells if not e.cell.settings.uses_host]
    if not answer.cell.settings.uses_host or not any(on_gpus):
        return ""
    return f" On the GPUs alone: {format_tokens(max(on_gpus))}."


def _nothing(
    prediction: Prediction,
    source: str,
    longest: Prediction | None,
    others: Sequence[Alternative],
) -> str:
    """Sentences: nothing fits, and what would fit, or else what the nearest settings lack."""
    asked, shortest = prediction.length_tokens, prediction.explained.does_not_fit_tokens
    native_tokens = prediction.native_length_tokens
    what = f"at {_tokens(asked or shortest or 0, native_tokens)}{'' if asked else ' or more'}"
    text = f"No: {plain(prediction.model_name)} does not train {what} on "
    shorter, fewer = None if longest is None else longest.answer, ()
    fits_shorter = shorter is not None and shorter.capacity_tokens > 0
    text += f"{_where(prediction)}{_ended_by(prediction, fits_shorter=fits_shorter)}"
    text += _but_on(others, source)
    if shorter is not None and shorter.capacity_tokens:
        is_scaled = shorter.capacity_tokens > native_tokens
        how, *_ = _facts_of(shorter, None, None, is_scaled=is_scaled)
        fewer = (f"{format_tokens(shorter.capacity_tokens)} tokens here with {how}",)
    would = _would_fit(others, fewer, is_scaled=(asked or 0) > native_tokens)
    return f"{text} {would or _lacking(prediction)}".rstrip()


def _in_words(alternative: Alternative, *, is_scaled: bool) -> str:
    """Text of an alternative: the flags to add, or for other GPUs the settings."""
    if alternative.kind in ("technique", "more host memory"):
        typed = " ".join(alternative.flags)
        return f"{plain(alternative.what)} (`{typed}`)" if typed else plain(alternative.what)
    assert alternative.cell is not None  # noqa: S101 (who calls has asked)
    how = settings_in_words(
        alternative.cell.settings,
        alternative.cell.layout,
        host_bytes=alternative.host_bytes,
        is_scaled=is_scaled,
    )
    return f"{plain(alternative.what)} with {how}"


def _would_fit(
    alternatives: Sequence[Alternative], shorter: Sequence[str] = (), *, is_scaled: bool
) -> str:
    fitting = [each for each in alternatives if each.cell is not None]
    would = [*shorter, *(_in_words(each, is_scaled=is_scaled) for each in fitting)]
    return f"What would fit: {'; or '.join(would)}." if would else ""


def _ended_by(found: Prediction | Recommendation, *, fits_shorter: bool) -> str:
    """Words after a No on the one thing that ends it, or on the memory that each GPU lacks."""
    if isinstance(found, Prediction):
        rows, usual = found.cells, found.memory_limit.usual_host
        there_bytes = found.memory_limit.host_bytes or 0
        lacks = [each.footprint.host_needed_bytes - there_bytes for each in rows]
        of_host = [each.binding == "host" for each in rows]
        held = [each.footprint.rollout and each.footprint.rollout.sequences for each in rows]
    else:
        rows, usual = found.candidates, found.usual_host
        lacks = [each.lacks_bytes or 0 for each in rows]
        of_host = [each.lacks_of == "host" and each.lacks_bytes is not None for each in rows]
        held = [each.rollout_sequences for each in rows]
    left = ((each.headroom_bytes or 0) >= 0 for each in rows)  # GPUs alone would have room
    has_room = [is_host and fits for is_host, fits in zip(of_host, left, strict=True)]
    if any(has_room) and (all(of_host) or usual is None):
        least = format_bytes(min(compress(lacks, has_room)))
        return f": it lacks {least} of host memory"
    if {*held} == {0}:
        return ": vLLM's share of each GPU holds no such sequence"
    copies = min((each.cell.layout.replicate_degree for each in rows), default=1)
    if copies > 1:
        return f" with {copies} copies of the states"
    traits = predicted_traits(found.trainer)
    said = [each.partition(":")[0] for each in found.notes if each.startswith(HEADS_SHARE)]
    alone = ""
    if found.gpus > 1 and traits is not None and traits.refused(["ulysses"]):
        alone = " with each sequence on one GPU (others are not predicted)"
    elif said and fits_shorter:
        return f": {said[0]}"
    of_gpus = compress(rows, [not is_host for is_host in of_host])
    short = [*map(_short_bytes, of_gpus)]
    return f"{alone}, {format_bytes(min(short))} short" if short and min(short) else alone


def _short_bytes(found: CellPrediction | Candidate) -> int:
    """Bytes that a GPU lacks, as the column ``headroom`` has them; else for what must be spare."""
    return max(0, -(found.headroom_bytes or 0)) or found.lacks_bytes or 0


def _nearest(prediction: Prediction) -> tuple[CellPrediction, int]:
    """The cell that lacks least, of GPUs before host memory, and the bytes that it lacks."""
    nearest = min(prediction.cells, key=lambda each: (each.binding == "host", _short_bytes(each)))
    if nearest.binding != "host":
        return nearest, _short_bytes(nearest)
    there_bytes = prediction.memory_limit.host_bytes or 0
    return nearest, nearest.footprint.host_needed_bytes - there_bytes


def _lacking(prediction: Prediction) -> str:
    """Sentence on the cell that lacks least, of GPUs before host memory, and on what it lacks."""
    nearest, lacks_bytes = _nearest(prediction)
    how = settings_in_words(nearest.cell.settings, nearest.cell.layout)
    lacks = f"{format_bytes(lacks_bytes)} {_LACKS.get(nearest.binding, '')}"
    return f"Nearest is {how}, which lacks {lacks}."


def _sentences_on(
    claim: str,
    found: CellPrediction | Candidate,
    host_memory_bytes: int | None,
    usual_host: str | None,
    *,
    trainer: AnyTrainer,
    source: str,
    peaks: str = "",
    is_scaled: bool,
) -> str:
    """Sentences on a cell that trains. ``peaks``: the phase in which its memory peaks. Their parts:

    Qwen3-8B trains 40,960 tokens on 4 x A100-80GB with host memory: [claim]
    safe, peak 41.97 GiB, 2.43 GiB left, about 9,217 tokens/s. [facts]
    Predicted for highwater. A million tokens take 1m 48s, 0.12 GPU-hours. [source, more]
    With a chunked loss and the layers' activations in host memory; [how]
    45.75 GiB of host memory. [host]
    """
    usual = host_memory_bytes, usual_host
    settings = found.cell.settings
    known = predicted_trainer(trainer)
    fixed = MEMORY[known].fixed_fields({}) if known else {}
    rows = fixed.get("sequences_per_micro_batch") or settings.traits.documents_together
    is_large = _usual_rows(found.cell, trainer) == 1 and settings.sequences_per_micro_batch > rows
    how, facts, host = _facts_of(found, *usual, peaks=peaks, is_scaled=is_scaled, is_large=is_large)
    claim += " with host memory" * settings.uses_host + _in_brackets(_sharing(found.cell.layout))
    claim += _by_its_file(found.cell, trainer)
    text = f"{claim}{': ' * bool(facts)}{facts}. {source[:1].upper()}{source[1:]}."
    return f"{text} With {how}{'; ' * bool(host)}{host}."


def _facts_of(
    found: CellPrediction | Candidate,
    host_memory_bytes: int | None,
    usual_host: str | None,
    *,
    peaks: str = "",
    is_scaled: bool,
    is_large: bool = False,
    is_second: bool = False,
) -> tuple[str, str, str]:
    """The parts ``how``, ``facts`` and ``host`` of ``_sentences_on``; ``host`` is empty if little
    is used. ``is_large``: a micro-batch has more sequences than usually. ``is_second``: for
    the second cell of an answer, without peak and tokens/s.
    """
    is_predicted = True
    if isinstance(found, Candidate):
        host_bytes, step, held = found.host_bytes, found.step_time, found.rollout_sequences
        is_predicted = found.source == "predicted"
    else:
        host_bytes, step, rollout = found.footprint.host_bytes, found.step, found.footprint.rollout
        held = rollout and rollout.sequences
    settings, layout, host = found.cell.settings, found.cell.layout, ""
    said = [] if found.risk is None else [str(found.risk)]
    if found.risk == "likely" and (host_bytes or 0) > HOST_KEPT * (host_memory_bytes or math.inf):
        said = ["likely, with little host memory left"]
    if found.headroom_bytes is not None:
        left = format_bytes(max(0, found.headroom_bytes))
        if found.peak_bytes is None or not is_predicted or is_second:
            said.append(f"{left} of each GPU left")
        else:
            peak = f"peak {format_bytes(found.peak_bytes)}{peaks and f' while {peaks}'}"
            said += [peak, f"{left} left"]
    if step is not None:
        alone = " without generation" * bool(found.cell.settings.traits.outside_step)
        speed = f"{step.tokens_per_s:,.0f} tokens/s"
        said.append(speed if is_second else f"about {speed}{alone}")
    if host_bytes is not None and host_bytes > layout.machine_gpus * PROCESS_BYTES:
        of_host = _of_host(host_memory_bytes, usual_host, settings)
        host = f"{format_bytes(host_bytes)} of host memory{of_host}"
    if held is not None:
        holds = f"vLLM holds {counted(held, 'such sequence')} at once"
        host = f"{host}; {holds}" if host else holds
    how = settings_in_words(
        settings,
        layout,
        says_rows=found.is_lowered or is_large,
        is_scaled=is_scaled,
        after_claim=not is_second,
    )
    return how, ", ".join(said), host


def _of_host(host_bytes: int | None, machine: str | None, settings: Settings) -> str:
    """Text on the host memory that is assumed, or that it is unknown, if settings use it."""
    if not settings.uses_host or machine == THIS_MACHINE:
        return ""
    if host_bytes is None:
        return " (how much there is nobody said: `--host-memory`)"
    return "" if machine is None else f" (of {format_bytes(host_bytes)}, assumed)"


_OF_A_RISK: dict[Risk | None, str] = {
    "tight": "tight: only the prediction itself fits, its pessimistic end does not",
    "likely": "likely: even the pessimistic end fits, but little is left",
}
_FEW_TOKENS = 4096
"""Tokens of a GPU's micro-batch below which its matrix products are too small to keep it busy."""
_UNLIKE_NAMED = 4
"""Most unmeasured properties that a caveat names one by one."""


def caveat(
    answer: CellPrediction | Candidate | None,
    cells: Sequence[Cell],
    *,
    unlike: Sequence[str],
    star: Sequence[str],
) -> str:
    """The caveat below a table: that little headroom is left, or which properties of the ``cells``
    were never measured (``unlike``); else where to read more. ``star``: what a star means.
    """
    says, then = "`--explain` says how good such answers were", ""
    here = () if answer is None else unlike_cell(unlike, answer.cell, cells)
    if here:
        named = here if len(here) <= _UNLIKE_NAMED else (*here[:2], f"{len(here) - 2} more")
        says, then = f"not measured yet with {plain(listed(named))}", ": try it first"
    if answer is not None and answer.risk in _OF_A_RISK:
        says, then = _OF_A_RISK[answer.risk], "; try it first"
    if then and not all(map(runs_trials, unlike)):
        then = "; no trial runs there"
    return "; ".join((*star, f"{says}{then}"))


def star_of_yarn(longest_tokens: int, native_length_tokens: int) -> tuple[str, ...]:
    """Text on the meaning of a star, if a table's longest length is past the native length."""
    if longest_tokens <= native_length_tokens:
        return ()
    return (f"* past the native length of {format_tokens(native_length_tokens)}: YaRN",)


def assumed_host(host_bytes: int | None, machine: str | None) -> tuple[str, ...]:
    """Note on the host memory that is assumed because the user gave none, and its source."""
    if machine is None or host_bytes is None:
        return ()
    size = format_bytes(host_bytes)
    if machine == THIS_MACHINE:
        return (f"host memory is this machine's, {size}; `--host-memory` says of another",)
    return (
        f"host memory is taken as {size} ({plain(machine)}); `--host-memory` says what yours has",
    )


_LONGEST_BAR = 16
"""Length of the longest bar in characters."""
_METHODS: dict[PredictionMethod, str] = {"formula": "formula", "trace": "traced steps, replayed"}
_BINDINGS: dict[Binding, str] = {
    "device": "GPU memory",
    "host": "host memory",
    "rollout": "vLLM's KV cache",
    "ceiling": "the longest length in question",
}


def prediction_table(
    prediction: Prediction, *, is_explained: bool = False, is_whole: bool = False
) -> TextTable:
    """A table of the longest length and the speed of a few cells (``_telling``); at one length,
    whether each cell trains it, and its headroom. One caveat follows. ``is_whole``: all cells.
    ``is_explained``: the whole frontier, with what limits each cell, the interval of its memory and
    its peak phase, and all notes.
    """
    at_length = prediction.length_tokens is not None
    native_tokens = prediction.native_length_tokens
    has_counts = len({each.cell.layout.gpus for each in prediction.cells}) > 1
    is_timed = any(each.step is not None for each in prediction.cells)
    is_wide = is_explained or is_whole

    def ended(each: CellPrediction) -> str:
        binding, fails = _BINDINGS[each.binding], each.does_not_fit_tokens
        if at_length:
            return "-" if each.capacity_tokens else binding
        return binding if fails is None else f"{format_tokens(fails)}: {binding}"

    shown = prediction.cells if is_whole else _telling(prediction, is_every=is_explained)
    left = len(prediction.cells) - len(shown)
    beaten = (f"{counted(left, 'more setting')}: `--all`",) if left else ()
    trained = shared_training(each.cell.settings for each in shown)
    title = f"{_title(prediction)}{trained and f', {trained}'}"
    return table_of(
        f"{title}: predicted by {_METHODS[prediction.method]}",
        shown,
        ("settings", lambda each: rung_words(each, trained)),
        ("GPUs", "cell.layout.gpus") if has_counts else None,
        ("Ulysses", "cell.layout.sharing"),
        ("fits", _fits)
        if at_length
        else ("trains up to", lambda each: _reach(each, native_tokens)),
        ("may reach", lambda each: _length(each.likely_edge_tokens, native_tokens))
        if is_wide and not at_length
        else None,
        ("a step", "step.time_s") if is_timed and is_wide else None,
        ("tokens/s", "step.tokens_per_s") if is_timed else None,
        ("headroom", "headroom_bytes") if is_wide or at_length else None,
        ("host memory", "footprint.host_bytes") if is_wide else None,
        ("ended by", ended) if is_explained else None,
        ("GPU memory", _device_memory) if is_explained else None,
        ("peak in", "peak_phase") if is_explained else None,
        names=1 + has_counts,
        footnotes=_footnotes(prediction, beaten, is_explained=is_explained),
    )


def rung_words(rung: CellPrediction | Candidate, but: str) -> str:
    """Short words for a row's settings without those of all rows (``but``); with the sequences of
    a micro-batch where they are fewer than by default.
    """
    settings = rung.cell.settings
    rows = f", micro-batch {settings.sequences_per_micro_batch}" * rung.is_lowered
    return f"{short_settings(settings, but=but)}{rows}"


_MOST_SHOWN = 5
"""Most rows of an answer without a length. With a length, whose sentence says more, two fewer."""


def _telling(prediction: Prediction, *, is_every: bool) -> Sequence[CellPrediction]:
    """The simplest cell, the longest, and the frontier between them. Of many, cells that are hardly
    longer than the one before are left out, unless ``is_every``.
    """
    ends = (prediction.simplest.cell, prediction.explained.cell)
    shown = [each for each in prediction.cells if each.is_on_frontier or each.cell in ends]
    shown.sort(key=lambda each: (each.capacity_tokens, each.headroom_bytes))
    most = _MOST_SHOWN if prediction.length_tokens is None else _MOST_SHOWN - 2
    most = 2 if prediction.answer is None else most  # the answer's sentences say what would fit
    most = most if prediction.memory_limit.rollout is None else len({*ends})  # a table follows
    while len(shown) > most and not is_every:
        gains = [
            (e.reach_tokens / (one.reach_tokens or 1), e.headroom_bytes - one.headroom_bytes, n)
            for n, (one, e) in enumerate(pairwise(shown), 1)
            if e.cell not in ends
        ]
        del shown[min(gains)[-1] if gains else 0]  # else the first, which gains on none before it
    return shown


def _footnotes(
    prediction: Prediction, beaten: tuple[str, ...], *, is_explained: bool
) -> tuple[str, ...]:
    limit, known = prediction.memory_limit, prediction.calibration
    longest = max((each.likely_edge_tokens for each in prediction.cells), default=0)
    star = star_of_yarn(prediction.length_tokens or longest, prediction.native_length_tokens)
    star = (*star, *beaten)
    if not is_explained:
        cells, unlike = [each.cell for each in prediction.cells], known.unlike if known else ()
        return (caveat(prediction.answer, cells, unlike=unlike, star=star),)
    steps = (each.step for each in prediction.cells if each.step is not None)
    return template_lines(
        "prediction.txt.j2",
        "explanations",
        prediction=prediction,
        star=star,
        risk_in_words=RISK_IN_WORDS,
        assumed_host=assumed_host(limit.host_bytes, limit.usual_host),
        least=None if known is None else least_residuals(known.coverage),
        speed_bases=list(dict.fromkeys(BASIS_IN_WORDS[step.basis] for step in steps)),
    )


def term_table(predicted: CellPrediction) -> TextTable:
    """Table of bytes by term and phase, with bars for one phase; of a trace, by kind of tensor."""
    if predicted.replayed is not None:
        return _tensor_table(predicted, predicted.replayed)
    footprint = predicted.footprint
    phases: dict[str, Sequence[Term]] = {
        f"{each.name}{' (the peak)' * (each is footprint.peak)}, {format_bytes(each.bytes)}": (
            each.terms
        )
        for each in footprint.phases
    }
    phases["reserved besides"] = footprint.besides
    phases["outside the allocator"] = footprint.outside
    phases["host"] = footprint.host
    if footprint.rollout is not None:
        phases["vLLM generates"] = (*footprint.rollout.awake, *footprint.rollout.resting)
    rows = [
        (name if index == 0 else "", term)
        for name, terms in phases.items()
        for index, term in enumerate(sorted(terms, key=lambda term: -term.bytes))
    ]
    largest = max(term.bytes for _, term in rows)
    return table_of(
        f"{predicted.cell.label}, bytes by term: predicted",
        rows,
        ("phase", lambda row: row[0]),
        ("term", lambda row: row[1].name),
        ("", lambda row: _bar(row[1].bytes, largest)),
        ("GiB", lambda row: f"{row[1].bytes / GIB:.2f}"),
        footnotes=(
            f"{format_bytes(footprint.device_used_bytes)} of the GPU: the peak, reserved besides, "
            "and outside the allocator; the allocator only keeps "
            f"{format_bytes(footprint.cached_bytes)} of it, and headroom counts that as left",
        ),
    )


def rollout_tables(prediction: Prediction) -> tuple[TextTable, ...]:
    """Two tables of a GPU's bytes in the explained cell: while a rollout generates, and while the
    step trains. They are never added up. Empty without a rollout.
    """
    told, asked = prediction.explained, prediction.memory_limit.rollout
    footprint, rollout = told.footprint, told.footprint.rollout
    if rollout is None or asked is None:
        return ()
    training = footprint.device_used_bytes - footprint.cached_bytes
    awake, asleep = (sum(each.bytes for each in kept) for kept in (rollout.awake, rollout.asleep))
    bars = (
        ("vLLM generates", awake, rollout.bytes - awake, None),
        ("the step trains", asleep, training - asleep, footprint.host_bytes),
    )
    ends = "vLLM's KV cache ends the length (`--gpu-memory-utilization`); "
    said = ends * (told.binding == "rollout")
    cache = next((each.bytes for each in rollout.awake if each.name == "KV cache"), 0)
    length = told.reach_tokens or prediction.length_tokens
    table = table_of(
        f"{rung_words(told, '')}, {format_tokens(length or 0)} tokens, one GPU: vLLM on paper",
        bars,
        ("while", lambda bar: bar[0]),
        ("in all", lambda bar: format_bytes(bar[1] + bar[2])),
        ("vLLM", lambda bar: format_bytes(bar[1])),
        ("training", lambda bar: format_bytes(bar[2])),
        ("host memory", lambda bar: "-" if bar[3] is None else format_bytes(bar[3])),
        footnotes=(
            f"{said}of vLLM's {asked.gpu_memory_utilization} x "
            f"{format_bytes(prediction.device_bytes)} the KV cache has {format_bytes(cache)}; "
            f"{counted(rollout.engines, 'engine')}, sleep level {asked.sleep_level}",
        ),
    )
    return (table,)


def _peak_phase(prediction: Prediction, cell: CellPrediction) -> str:
    """The side whose memory is larger, training or vLLM; empty if no rollout shares the GPUs."""
    footprint, asked = cell.footprint, prediction.memory_limit.rollout
    if asked is None or asked.own_gpus or footprint.rollout is None:
        return ""
    training = footprint.device_used_bytes - footprint.cached_bytes
    return "training" if footprint.rollout.bytes < training else "vLLM generates"


def _bar(size: int, largest: int) -> str:
    return "#" * round(_LONGEST_BAR * size / largest)


_MOST_WORDS = 30
"""Most words of a first line that names the longest document, too."""


def data_answer(found: "DataLengths") -> str:
    """Sentence on the length that holds a share of the documents whole, and on how far GPUs train.
    Further lines: documents that are cut, tokens kept by the shortest sufficient length and by the
    next, time and cost of a pass.
    """
    name = plain(found.data[0]) + (" and others" if len(found.data) > 1 else "")
    documents = f"{found.documents:,} document{'s' * (found.documents > 1)}"
    is_estimate = found.bytes_per_token is not None
    held = "about " * is_estimate + format_tokens(found.whole_tokens)
    first = f"{name}: {held} tokens hold {100 * found.whole_share:.4g} % of {documents} whole"
    then = ""
    if found.trained_by is not None:
        reach = found.reach_tokens and _tokens(found.reach_tokens, found.native_length_tokens)
        then = f"; {plain(found.trained_by)} {f'up to {reach}' if reach else 'none'}"
    longest = f" (longest: {format_tokens(found.longest_tokens)})"
    longest *= len(f"{first}{longest}{then}".split()) <= _MOST_WORDS
    whole = ": none is cut" * ((found.reach_tokens or 0) >= found.longest_tokens)
    whole *= found.cut is None and len(f"{first}{longest}{then}{whole}".split()) <= _MOST_WORDS
    lines = [f"{first}{longest}{then}{whole}"]
    if found.cut is not None:
        longer, at = found.documents - found.cut.documents, format_tokens(found.cut.length_tokens)
        cut = (
            f"{longer:,} of {documents} ({longer / found.documents:.1%}) "
            f"{'is' if longer == 1 else 'are'} longer than {at} tokens; cut there, "
            f"{'about ' * is_estimate}{_of(found.cut, found)} of your tokens are left"
        )
        lines = (
            [f"{name}: {cut}", f"{held.capitalize()}{lines[0].partition(held)[2]}"]
            if found.is_asked
            else [*lines, cut]
        )
    enough = found.enough
    longer = next((e for e in found.lengths if e.length_tokens > enough.length_tokens), None)
    is_last = bool(longer and enough.trained and not longer.trained)
    said = (
        f"{format_tokens(enough.length_tokens)} tokens"
        f"{', the longest that train here,' if is_last else ''} keep {_of(enough, found)} of your "
        f"tokens, and {_of_all(enough.documents, found.documents)} of the documents whole"
    )
    step, next_step = (each and each.trained and each.trained.step for each in (enough, longer))
    if longer is not None:
        said += f"; {format_tokens(longer.length_tokens)} keep {_of(longer, found)}"
        if is_last:
            said += ", and do not train here"
        elif step and next_step:
            said += f", and a step takes {next_step.time_s / step.time_s:.1f} times as long"
    lines.append(said)
    meant = found.cut if found.cut and found.cut.epoch_s is not None else enough
    if meant.trained and meant.epoch_s is not None:
        cost = Cost(tokens=meant.kept_tokens, time_s=meant.epoch_s, dollars=meant.epoch_price)
        bill = _bill(cost, meant.trained.cell.layout.gpus).partition(" take ")[-1]
        passed = f"One pass at {format_tokens(meant.length_tokens)} takes about"
        lines.append(f"{passed} {bill}, predicted")
    lines += _said(found.notes)
    if meant.trained and (outside := meant.trained.cell.settings.traits.outside_step):
        lines.append(outside.removesuffix("."))
    if (each := found.bytes_per_token) is not None:
        counts = "`highwater data --model FOLDER` counts"
        lines.append(f"No tokenizer here, {each} bytes a token: {counts}")
    return "\n".join(f"{line}." for line in lines)


def _of(kept: "KeptLength", found: "DataLengths") -> str:
    return _of_all(kept.kept_tokens, found.tokens)


def _of_all(some: int, all_of_them: int) -> str:
    """Text of a share; ``all`` only if it is."""
    return "all" if some == all_of_them else f"{min(0.999, some / all_of_them):.1%}"


def data_table(found: "DataLengths", *, is_whole: bool) -> TextTable:
    """Table of documents by length, the tokens that each length keeps, and the time of a pass. With
    GPUs: the shortest sufficient length, a few before it and the next, or all if ``is_whole``.
    """
    before = dict(zip(found.lengths[1:], (e.documents for e in found.lengths), strict=False))
    own = {each: each.documents - before.get(each, 0) for each in found.lengths}
    is_trained = any(each.trained for each in found.lengths)
    is_timed = any(each.trained and each.trained.step for each in found.lengths)
    trained = shared_training(e.trained.cell.settings for e in found.lengths if e.trained)
    last = found.lengths.index(found.enough) + 2
    shown = found.lengths if is_whole or not is_trained else found.lengths[max(0, last - 4) : last]
    left = len(found.lengths) - len(shown)
    how = "counted" if found.bytes_per_token is None else "estimated from bytes"
    how = "predicted" if is_trained else how  # which of the two: by the answer's sentences
    return table_of(
        f"{found.documents:,} document{'s' * (found.documents > 1)}, {found.tokens:,} tokens, "
        f"the longest {found.longest_tokens:,}{trained and f', {trained}'}: {how}",
        shown,
        ("up to", "length_tokens"),
        None if is_trained else ("", lambda each: _bar(own[each], max(own.values()))),
        ("documents", lambda each: f"{own[each]:,}"),
        ("whole", lambda each: format_share(each.documents / found.documents)),
        ("of the tokens", lambda each: format_share(each.kept_tokens / found.tokens)),
        (
            "settings",
            lambda e: e.trained.cell.words.removeprefix(f"{trained}, ") if e.trained else "none",
        )
        if is_trained
        else None,
        ("a step", "trained.step.time_s") if is_timed else None,
        ("one pass", "epoch_s") if is_timed else None,
        ("dollars", lambda each: _dollars(each.epoch_price))
        if any(each.epoch_price is not None for each in found.lengths)
        else None,
        names=2 - is_trained,
        footnotes=(f"{counted(left, 'more length')}: `--all`",) * bool(left),
    )


def _tensor_table(predicted: CellPrediction, replayed: Replayed) -> TextTable:
    largest = max((alive.bytes for alive in replayed.alive), default=0) or 1
    return table_of(
        f"{predicted.cell.label}, tensors alive at the peak, in {replayed.phase}: traced",
        replayed.alive,
        ("allocated by", "operator"),
        ("module", lambda alive: alive.module or "-"),
        ("in", "phase"),
        ("tensors", "count"),
        ("", lambda alive: _bar(alive.bytes, largest)),
        ("GiB", lambda alive: f"{alive.bytes / GIB:.2f}"),
        footnotes=template_lines("prediction.txt.j2", "tensor_notes", replayed=replayed),
    )


def _title(prediction: Prediction) -> str:
    asked, title = prediction.length_tokens, REGISTRY[prediction.trainer].title
    length = "" if asked is None else f", {_length(asked, prediction.native_length_tokens)} tokens"
    trainer = "" if prediction.trainer == OURS else f", trained by {title}"
    is_nameless = prediction.device_name == nameless(prediction.device_bytes)
    each = "" if is_nameless else f", {format_bytes(prediction.device_bytes)} each"
    return f"{plain(prediction.model_name)} on {_gpus(prediction)}{each}{length}{trainer}"


def _fits(predicted: CellPrediction) -> str:
    """How surely a length fits, ``safe`` to ``tight``; or ``no``, with any limit but the GPU."""
    if predicted.risk is None:
        has_room = predicted.headroom_bytes >= 0 and predicted.binding != "ceiling"
        no = f"no: {_BINDINGS[predicted.binding]}" if has_room else "no"
        return "yes" if predicted.capacity_tokens else no
    if not predicted.capacity_tokens and predicted.risk == "safe":
        return "no"  # it leaves less than the headroom that was asked for
    return predicted.risk


def _at_least(predicted: CellPrediction, native_length_tokens: int) -> str:
    """``≥`` if no longer length was predicted although one could be; else empty."""
    tokens, is_last = predicted.capacity_tokens, predicted.does_not_fit_tokens is None
    return "≥" if tokens and is_last and tokens != native_length_tokens else ""


def _reach(each: CellPrediction, native_tokens: int) -> str:
    """Longest length; if no length leaves the headroom, the one that may fit and how surely."""
    if not each.capacity_tokens and each.risk is not None:
        return f"{_length(each.likely_edge_tokens, native_tokens)}, {each.risk}"
    return f"{_at_least(each, native_tokens)}{_length(each.capacity_tokens, native_tokens)}"


def _length(tokens: int, native_length_tokens: int) -> str:
    star = "*" if tokens > native_length_tokens else ""
    return f"{format_tokens(tokens)}{star}" if tokens else "none"


def _device_memory(predicted: CellPrediction) -> str:
    """Interval of the GPU's memory, or the prediction itself if there is no interval."""
    ends = predicted.interval
    if ends is None:
        return format_bytes(predicted.device_used_bytes)
    return f"{format_bytes(ends.low_bytes)} to {format_bytes(ends.high_bytes)}"
