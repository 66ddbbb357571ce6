"""What a benchmark of attentions says in sentences: every one follows from its figures, and other
figures make other sentences.
"""

from collections.abc import Iterator, Sequence

from highwater.memory.attention_fit import LEAST_LENGTHS
from highwater.nouns.attention_bench import IMPLEMENTATIONS, AttentionBench, Direction
from highwater.recommendation.attention_summary import (
    FAR,
    AttentionChoice,
    AttentionSummary,
    Entry,
    LongestLength,
    RatioToDense,
    UseCase,
    peak_bytes,
)
from highwater.units import counted, format_bytes, format_pass, format_tokens

WORDS: dict[Direction, str] = {
    "forward": "forward",
    "forward+backward": "forward and backward",
}
_PAYS = 1.1
"""Gain from which more sequences at once are worth their memory."""
_FREES = 0.1
"""Share of a peak from which recomputing frees enough to be worth its time."""
_AS_FAST = 0.05
"""Share by which two times may differ and still be told as the same."""


def answer(bench: AttentionBench, summary: AttentionSummary) -> str:
    """The answer in a sentence: the longest length of all, and that of dense attention."""
    direction = bench.order.directions[-1]
    found = [
        each
        for each in summary.longest
        if each.direction == direction
        and each.fits_tokens
        and each.implementation != "reference"
        and each.mode != "data parallel"
    ]
    if not found:
        return f"no attention held any length, {WORDS[direction]}"
    best = max(found, key=lambda each: (each.fits_tokens or 0, _tokens_per_s(each)))
    if len(found) > 1 and all(
        (each.fits_tokens, each.why) == (best.fits_tokens, "longest tried") for each in found
    ):
        return (
            f"all {len(found)} held the longest sequence that was tried, "
            f"{format_tokens(best.fits_tokens)} tokens, {WORDS[direction]}; the fastest of them "
            f"{best.implementation}{_where(best)}{_costs(best)}"
        )
    sentence = (
        f"{best.implementation}{_where(best)} held the longest sequence, "
        f"{held(best)} tokens, {WORDS[direction]}{_costs(best)}"
    )
    dense = _of(found, "dense")
    if dense is None or dense is best:
        return sentence
    if dense.fits_tokens == best.fits_tokens:
        return f"{sentence}; dense as many{_costs(dense)}"
    return f"{sentence}; dense {held(dense)}{_costs(dense)}"


def held(each: LongestLength) -> str:
    """``131,072``, ``≥ 131,072`` where nothing longer was tried, or ``-``."""
    is_least = each.why == "longest tried" and each.fits_tokens
    return f"{'≥ ' if is_least else ''}{format_tokens(each.fits_tokens)}"


def conclusions(bench: AttentionBench, summary: AttentionSummary) -> list[str]:
    """What the figures say, a sentence or two each."""
    return [
        *_about_red(bench),
        *_about_lengths(bench, summary),
        *_about_speed(bench, summary),
        *_about_memory(bench, summary),
        *_about_data_parallel(bench, summary),
        *_about_sharing(bench, summary),
    ]


def _about_red(bench: AttentionBench) -> Iterator[str]:
    for check in bench.checks:
        if check.reason:
            yield f"{check.implementation} is red and has no number: {check.reason}."
    for row in bench.rows:
        if row.result == "crashed":
            yield (
                f"{row.implementation} crashed at {format_tokens(row.length_tokens)} tokens, "
                f"{WORDS[row.direction]}, which says nothing about its memory: {row.reason}"
            )


def _about_lengths(bench: AttentionBench, summary: AttentionSummary) -> Iterator[str]:
    for direction in bench.order.directions:
        single = [
            each
            for each in summary.longest
            if each.direction == direction and each.mode == "single" and each.fits_tokens
        ]
        dense = _of(single, "dense")
        sparse = [each for each in single if IMPLEMENTATIONS[each.implementation].changes_model]
        if dense is None or not sparse:
            continue
        best = max(sparse, key=lambda each: each.fits_tokens or 0)
        if best.why == dense.why == "longest tried":
            yield (
                f"{WORDS[direction]}: dense and {best.implementation} both held the longest "
                f"length that was tried, {format_tokens(dense.fits_tokens)} tokens: which holds "
                f"more is not known from this."
            )
            continue
        ratio = (best.fits_tokens or 0) / (dense.fits_tokens or 1)
        least = "at least " if best.why == "longest tried" else ""
        compared = (
            f"{least}{ratio:.3g} times as long a sequence as dense"
            if ratio > 1
            else f"no longer a sequence than dense, {ratio:.3g} times as long"
        )
        yield (
            f"{WORDS[direction]}: {best.implementation} holds {compared}; dense ended at "
            f"{held(dense)} tokens ({dense.why}), {best.implementation} at {held(best)} "
            f"({best.why})."
        )


def _about_speed(bench: AttentionBench, summary: AttentionSummary) -> Iterator[str]:
    for direction in bench.order.directions:
        ratios = [
            each
            for each in summary.ratios
            if each.direction == direction
            and (each.mode, each.batch) == ("single", 1)
            and IMPLEMENTATIONS[each.implementation].changes_model
        ]
        if not ratios:
            continue
        longest = max(each.length_tokens for each in ratios)
        at_longest = [each for each in ratios if each.length_tokens == longest]
        best = max(at_longest, key=lambda each: each.speedup)
        share = _kept_share(bench, best)
        yield (
            f"{WORDS[direction]}: at {format_tokens(longest)} tokens {best.implementation} is "
            f"{_speed(best.speedup)}, computing {100 * share:.3g} % of the pairs; "
            f"{_crossing(ratios, best.implementation)}."
        )


def _speed(speedup: float) -> str:
    if abs(speedup - 1) <= _AS_FAST:
        return "as fast as dense"
    if speedup > 1:
        return f"{speedup:.3g} times as fast as dense"
    return (
        f"slower than dense, which is {1 / speedup:.3g} times as fast, and the fastest sparse one"
    )


def _crossing(ratios: Sequence[RatioToDense], name: str) -> str:
    """From which length on it is faster."""
    own = sorted(
        (each for each in ratios if each.implementation == name), key=lambda x: x.length_tokens
    )
    first = None
    for each in reversed(own):
        if each.speedup <= 1:
            break
        first = each.length_tokens
    if first is None:
        return "at no length up to there does leaving pairs out pay for what it costs"
    if len(own) == 1:
        return "shorter lengths were not measured"
    if first == own[0].length_tokens:
        return f"it is faster at every length from {format_tokens(first)} on"
    return f"it is faster from {format_tokens(first)} tokens on, and not below"


def _kept_share(bench: AttentionBench, ratio: RatioToDense) -> float:
    return next(
        row.kept_share or 0.0
        for row in bench.rows
        if (row.implementation, row.mode, row.direction, row.length_tokens, row.batch)
        == (ratio.implementation, ratio.mode, ratio.direction, ratio.length_tokens, ratio.batch)
    )


def _about_memory(bench: AttentionBench, summary: AttentionSummary) -> Iterator[str]:
    direction = bench.order.directions[-1]
    fits = {
        each.implementation: each.fit
        for each in summary.estimates
        if each.mode == "single" and each.direction == direction
    }
    square = [name for name, fit in fits.items() if fit.bytes_per_pair > 0 and name != "reference"]
    linear = {name: fit for name, fit in fits.items() if not fit.bytes_per_pair}
    if linear:
        least = min(linear, key=lambda name: linear[name].bytes_per_token)
        most = max(linear, key=lambda name: linear[name].bytes_per_token)
        first, last = (
            format_bytes_per_token(linear[name].bytes_per_token) for name in (least, most)
        )
        span = f"{first} a token"
        if first != last:
            span = f"from {first} a token ({least}) to {last} ({most})"
        yield (
            f"memory is linear in the length for {', '.join(linear)}, {WORDS[direction]}: {span}."
        )
    if square:
        yield (
            f"memory grows faster than the length for {', '.join(square)} over the lengths that "
            f"were measured."
        )


def too_little(summary: AttentionSummary) -> list[str]:
    """Which figures are missing because too few, or too short, lengths were measured."""
    known = {Entry(each.implementation, each.mode, each.direction) for each in summary.estimates}
    unknown = [
        entry_words(entry)
        for each in summary.longest
        if (entry := Entry(each.implementation, each.mode, each.direction)) not in known
        and each.fits_tokens
        and each.mode != "data parallel"
    ]
    lines: list[str] = []
    if unknown:
        lines.append(
            f"too little was measured of {'; '.join(unknown)}: bytes a token are told by "
            f"{LEAST_LENGTHS} lengths that fit, and nothing is predicted by fewer."
        )
    far = {each.gpu for each in summary.predicted}
    far -= {each.gpu for each in summary.predicted if not each.is_least}
    if far:
        longest = max(each.fit.longest_tokens for each in summary.estimates)
        lines.append(
            f"too little was measured for {counted(len(far), 'kind')} of GPUs: they hold more than "
            f"{FAR} times the {format_tokens(longest)} tokens that were the longest; measure "
            f"longer ones (`--max-length`)."
        )
    return lines


def format_bytes_per_token(count: float) -> str:
    """``35.0 KiB`` or ``812 bytes``."""
    return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count:.0f} bytes"


def _about_data_parallel(bench: AttentionBench, summary: AttentionSummary) -> Iterator[str]:
    found = [each for each in summary.efficiencies if each.mode == "data parallel"]
    if not found:
        return
    best = max(found, key=lambda each: each.speedup)
    name = "DataParallel" if bench.order.device == "cuda" else "One sequence for each process"
    yield (
        f"{name} cannot lengthen a sequence: each GPU has whole ones, and a single sequence leaves "
        f"all others idle. With one for each of {best.gpus} GPUs it brought "
        f"{best.speedup:.3g} times the tokens/s of one ({best.implementation}, "
        f"{WORDS[best.direction]}, {format_tokens(best.length_tokens)} tokens). For longer "
        f"sequences share each by a ring: `highwater bench attention --implementations ring "
        f"--gpus {best.gpus}`."
    )


def _about_sharing(bench: AttentionBench, summary: AttentionSummary) -> Iterator[str]:
    for each in summary.efficiencies:
        if each.mode == "data parallel":
            continue
        longer = (
            "" if each.length_ratio is None else f", and held {each.length_ratio:.3g} times as long"
        )
        alone = bench.order.alone(each.implementation)
        what = each.mode if each.implementation == each.mode else each.implementation
        verdict = "faster than one GPU" if each.speedup > 1 + _AS_FAST else "no faster than one GPU"
        yield (
            f"{what} over {each.gpus} GPUs, {WORDS[each.direction]}: {verdict} at "
            f"{format_tokens(each.length_tokens)} tokens, {each.speedup:.3g} times as fast "
            f"({each.efficiency:.0%} of {each.gpus}){longer} as {alone} on one."
        )


def advice(summary: AttentionSummary) -> list[str]:
    """On recomputing and on batches, from what was measured."""
    lines: list[str] = []
    for gain in summary.recompute:
        share = gain.freed_bytes / max(1, gain.peak_bytes)
        verdict = (
            "recompute it where memory runs out"
            if share >= _FREES
            else "keep it: recomputing frees too little"
        )
        lines.append(
            f"{gain.implementation}: {verdict}. At {format_tokens(gain.length_tokens)} tokens it "
            f"frees {format_bytes(gain.freed_bytes)} of a layer, {share:.0%} of the peak of one, "
            f"and adds {gain.added_time_share:.0%} to its time."
        )
    if not summary.recompute:
        lines.append("recompute: forward and backward were not both measured, so nothing is said.")
    names = dict.fromkeys(
        Entry(each.implementation, "single", each.direction) for each in summary.batches
    )
    for name, _, direction in names:
        own = [
            each
            for each in summary.batches
            if (each.implementation, each.direction) == (name, direction)
        ]
        best = max(own, key=lambda each: each.speedup)
        pays = (
            f"{best.batch} sequences at once pay"
            if best.speedup >= _PAYS
            else "one sequence at a time is enough, and leaves memory for longer ones"
        )
        lines.append(
            f"{name}, {WORDS[direction]}: {pays}. At {format_tokens(best.length_tokens)} tokens "
            f"{best.batch} sequences are {best.speedup:.3g} times the tokens/s of one."
        )
    if not summary.batches:
        lines.append(
            "batch: measured at 16,384 and 32,768 tokens alone, where nothing of it fits or was "
            "tried."
        )
    return lines


def use_case_lines(case: UseCase) -> list[str]:
    """What to use for a range of lengths on one GPU, and what sharing would add."""
    end = case.to_tokens
    reach = (
        "longer than what is asked" if end is None else f"{format_tokens(end)} tokens on one GPU"
    )
    lines: list[str] = []
    for choice, kind in (
        (case.exact, "the same model"),
        (case.sparse, "another model, to be trained so"),
    ):
        if choice is None:
            lines.append(f"{kind}: nothing that was measured holds {reach}")
        else:
            lines.append(f"{kind}: `{choice.implementation}`, {_choice_words(choice)}")
    if case.shared:
        lengths = ", ".join(
            f"{format_tokens(tokens)} on {count} GPUs" for count, tokens in case.shared.items()
        )
        lines.append(
            f"predicted by memory alone: with model parallelism a ring of dense attention holds up "
            f"to {lengths} (`--ring` of `highwater find` and `try`)"
        )
    return lines


def _choice_words(choice: AttentionChoice) -> str:
    label = "measured" if choice.is_measured else "predicted by memory alone"
    time = "" if choice.time_s is None else f", {format_pass(choice.time_s)} measured"
    return f"holds {format_tokens(choice.holds_tokens)} tokens ({label}{time})"


def labels(bench: AttentionBench) -> list[str]:
    """What a reader has to know of these figures."""
    order, machine = bench.order, bench.machine
    lines: list[str] = []
    if not bench.is_whole:
        lines.append("interrupted: these are the cases that had ended.")
    if order.device == "cpu":
        lines.append(
            "measured on the CPU at small sizes: it shows how memory and time grow, not what a GPU "
            "reaches; each process stands for a GPU."
        )
    elif order.memory_bytes is not None and order.memory_bytes < machine.memory_total_bytes:
        stands = " (a GTX 1080 has 8 GiB)" if order.memory_bytes == 8 << 30 else ""
        lines.append(
            f"{machine.device_name} with {format_bytes(order.memory_bytes)} of its "
            f"{format_bytes(machine.memory_total_bytes)}: it stands in for a card with so much"
            f"{stands}; times are its own, not that card's."
        )
    if order.same_qkv:
        lines.append("queries, keys and values are one tensor, counted once.")
    return lines


def _of(found: Sequence[LongestLength], name: str) -> LongestLength | None:
    return next((each for each in found if each.implementation == name), None)


def _where(each: LongestLength) -> str:
    return "" if each.mode == "single" else f" ({each.mode}, {counted(each.gpus, 'GPU')})"


def _costs(each: LongestLength) -> str:
    row = each.row
    if row is None or row.time_s is None:
        return ""
    return f" in {format_pass(row.time_s)} with {format_bytes(peak_bytes(row))} allocated"


def _tokens_per_s(each: LongestLength) -> float:
    row = each.row
    if row is None or not row.time_s:
        return 0.0
    return row.batch * (row.length_tokens or 0) / row.time_s


def entry_words(entry: Entry) -> str:
    """``dense, forward`` or ``dense, data parallel, forward``."""
    mode = "" if entry.mode in ("single", entry.implementation) else f", {entry.mode}"
    return f"{entry.implementation}{mode}, {WORDS[entry.direction]}"
