"""Tables of a benchmark of attentions."""

from collections.abc import Iterator, Sequence

from highwater.nouns.attention_bench import (
    IMPLEMENTATIONS,
    AttentionBench,
    BenchCheck,
    BenchRow,
    Direction,
)
from highwater.pages.attention.attention_conclusions import (
    WORDS,
    answer,
    entry_words,
    format_bytes_per_token,
    held,
    labels,
)
from highwater.pages.text import plain
from highwater.pages.text_table import TextTable
from highwater.recommendation.attention_summary import (
    FAR,
    AttentionSummary,
    LongestLength,
    MemoryEstimate,
    entries,
    rows_of,
)
from highwater.units import format_bytes, format_pass, format_seconds, format_tokens


def longest_table(bench: AttentionBench, summary: AttentionSummary) -> TextTable:
    """The answer: the longest length of each, and what it costs there."""
    return TextTable(
        title=answer(bench, summary),
        columns=(
            *("implementation", "mode", "direction", "longest", "time", "kept", "peak allocated"),
            *("peak reserved", "ended by"),
        ),
        rows=tuple(map(_longest_row, summary.longest)),
        footnotes=(
            *labels(bench),
            *(f"not run: {each.implementation}: {plain(each.reason)}" for each in bench.not_run),
        ),
        left_columns=3,
    )


def _longest_row(each: LongestLength) -> tuple[str, ...]:
    row = each.row
    figures = ("-",) * 4 if row is None else _figures(row)
    fails = "" if each.fails_tokens is None else f" at {format_tokens(each.fails_tokens)}"
    return (
        each.implementation,
        each.mode,
        WORDS[each.direction],
        held(each),
        *figures,
        f"{each.why}{fails}",
    )


def _figures(row: BenchRow) -> tuple[str, str, str, str]:
    return (
        format_pass(row.time_s),
        format_share(row.kept_share),
        per_gpu(row.peak_allocated_bytes),
        per_gpu(row.peak_reserved_bytes),
    )


def format_share(share: float | None) -> str:
    """``5.5 %``, with three figures."""
    return "-" if share is None else f"{100 * share:.3g} %"


def per_gpu(sizes: Sequence[int]) -> str:
    """One size where all GPUs have the same to what is printed, else each GPU's."""
    told = list(dict.fromkeys(map(format_bytes, sizes)))
    if len(told) <= 1:
        return told[0] if told else "-"
    return " / ".join(map(format_bytes, sizes))


def case_tables(bench: AttentionBench) -> Iterator[TextTable]:
    """A table for each implementation, mode and direction, with a row for each case."""
    for entry in entries(bench):
        rows = rows_of(bench, entry, batches=True)
        yield TextTable(
            title=f"{entry_words(entry)}: {IMPLEMENTATIONS[entry.implementation].what}",
            columns=(
                *("length", "batch", "result", "time", "kept", "after Q/K/V"),
                *("peak allocated", "peak reserved"),
            ),
            rows=tuple(map(_case_row, rows)),
            footnotes=tuple(
                f"{format_tokens(row.length_tokens)}: {plain(row.reason)}"
                for row in rows
                if row.reason
            ),
            left_columns=0,
        )


def _case_row(row: BenchRow) -> tuple[str, ...]:
    time, share, allocated, reserved = _figures(row)
    return (
        format_tokens(row.length_tokens),
        str(row.batch),
        row.result,
        time,
        share,
        per_gpu(row.after_qkv_bytes),
        allocated,
        reserved,
    )


def ratio_table(summary: AttentionSummary, direction: Direction) -> TextTable:
    """How many times as fast as dense each is, by length; ``-`` where either has no time."""
    own = [each for each in summary.ratios if each.direction == direction and each.batch == 1]
    lengths = sorted({each.length_tokens for each in own})
    names = list(dict.fromkeys((each.implementation, each.mode) for each in own))
    by_cell = {
        (each.implementation, each.mode, each.length_tokens): f"{each.speedup:.3g}" for each in own
    }
    return TextTable(
        title=f"times as fast as dense on one GPU, {WORDS[direction]}",
        columns=("implementation", *map(format_tokens, lengths)),
        rows=tuple(
            (name, *(by_cell.get((name, mode, length), "-") for length in lengths))
            for name, mode in names
        ),
        left_columns=1,
    )


def estimate_table(summary: AttentionSummary) -> TextTable:
    """The formula of each, and how far a measured peak is from it."""
    return TextTable(
        title="peak allocated = overhead + bytes a token × length (+ bytes a pair × length²)",
        columns=(
            *("implementation", "mode", "direction", "overhead", "a token", "a pair"),
            *("largest error", "lengths", "reserved / allocated"),
        ),
        rows=tuple(map(_estimate_row, summary.estimates)),
        left_columns=3,
    )


def _estimate_row(each: MemoryEstimate) -> tuple[str, ...]:
    return (
        each.implementation,
        each.mode,
        WORDS[each.direction],
        format_bytes(round(each.fit.overhead_bytes)),
        format_bytes_per_token(each.fit.bytes_per_token),
        f"{each.fit.bytes_per_pair:.3g} bytes" if each.fit.bytes_per_pair else "-",
        f"{100 * each.fit.largest_error:.1f} %",
        f"{each.fit.points}, to {format_tokens(each.fit.longest_tokens)}",
        f"{each.reserved_ratio:.2f}",
    )


def efficiency_table(summary: AttentionSummary) -> TextTable:
    """What several GPUs bring."""
    return TextTable(
        title="tokens/s of several GPUs, of one GPU's at the same length",
        columns=(
            *("implementation", "mode", "direction", "GPUs", "length", "speed-up", "efficiency"),
            "longest, of one GPU's",
        ),
        rows=tuple(
            (
                each.implementation,
                each.mode,
                WORDS[each.direction],
                str(each.gpus),
                format_tokens(each.length_tokens),
                f"{each.speedup:.3g}",
                f"{each.efficiency:.0%}".replace("%", " %"),
                "-" if each.length_ratio is None else f"{each.length_ratio:.3g}",
            )
            for each in summary.efficiencies
        ),
        left_columns=3,
    )


def predicted_table(
    bench: AttentionBench, summary: AttentionSummary, direction: Direction
) -> TextTable:
    """Predicted: the longest lengths on other kinds of GPUs; none of a kind that holds more than
    can be said of everything.
    """
    own = [each for each in summary.predicted if each.direction == direction]
    names = list(dict.fromkeys((each.implementation, each.mode) for each in own))
    kinds = dict.fromkeys(
        (each.gpu, each.memory_bytes, each.lacking) for each in own if not each.is_least
    )
    by_cell = {
        (each.gpu, each.implementation, each.mode): (
            f"{'≥ ' if each.is_least else ''}{format_tokens(each.tokens)}"
        )
        for each in own
    }
    where = (
        "from peaks on the CPU, whose kernels allocate otherwise"
        if bench.order.device == "cpu"
        else f"from peaks on {plain(bench.machine.device_name)}"
    )
    return TextTable(
        title=f"predicted: longest length on other GPUs, {WORDS[direction]}, by memory alone",
        columns=("GPU", "memory", *(_column(name, mode) for name, mode in names), "DataParallel"),
        rows=tuple(
            (
                gpu,
                format_bytes(memory),
                *(by_cell[gpu, name, mode] for name, mode in names),
                _in_data_parallel(summary, direction),
            )
            for gpu, memory, _ in kinds
        ),
        footnotes=(
            f"predicted {where}; nothing is said about time, nor about more than {FAR} times the "
            f"longest length that was measured (≥)",
            "DataParallel: whole sequences on each GPU, none longer than one GPU holds",
            *(
                f"{gpu} has no {' and no '.join(lacking)}: it is its memory alone that is "
                f"predicted, and kernels that need them do not run there"
                for gpu, _, lacking in kinds
                if lacking
            ),
        ),
        left_columns=1,
    )


def _in_data_parallel(summary: AttentionSummary, direction: Direction) -> str:
    """What DataParallel does to throughput."""
    gains = [
        each
        for each in summary.efficiencies
        if (each.mode, each.direction) == ("data parallel", direction)
    ]
    if not gains:
        return "one a GPU; tokens/s not measured"
    best = max(gains, key=lambda each: each.speedup)
    return f"one a GPU; {best.speedup:.3g} times the tokens/s on {best.gpus}"


def _column(name: str, mode: str) -> str:
    return name if mode in ("single", name) else f"{name}, {mode}"


def machine_table(bench: AttentionBench) -> TextTable:
    """Date, hardware, versions, and what was asked."""
    order, machine = bench.order, bench.machine
    processes = "1 process" if order.gpus == 1 else f"{order.gpus} processes"
    gpus = f"{order.gpus} x " if order.device == "cuda" else f"{processes} on "
    allowed = "all of it" if order.memory_bytes is None else format_bytes(order.memory_bytes)
    rows = (
        ("date", bench.made_at),
        ("hardware", f"{gpus}{plain(machine.device_name)}"),
        ("memory", format_bytes(machine.memory_total_bytes)),
        ("allowed for each GPU" if order.device == "cuda" else "allowed for each process", allowed),
        ("before any tensor", format_bytes(machine.outside_bytes)),
        ("fused kernel", machine.kernel or "none"),
        ("heads", f"{order.heads} of queries, {order.kv_heads} of keys and values"),
        ("head size", str(order.head_dim)),
        ("dtype", order.dtype),
        *((f"pattern of {name}", str(pattern)) for name, pattern in order.patterns.items()),
        *(
            (("segments and rates", f"{order.segment_lengths}, {order.dilation_rates}"),)
            if order.segment_lengths
            else ()
        ),
        ("longest pass", format_seconds(order.timeout_s)),
        *((name, plain(version)) for name, version in machine.versions.items()),
        ("command", plain(" ".join(bench.command))),
    )
    return TextTable(
        title="what was measured on", columns=("what", "which"), rows=rows, left_columns=2
    )


def check_table(bench: AttentionBench) -> TextTable:
    """Each beside the reference: norm-relative differences, and the verdict."""
    return TextTable(
        title="beside the textbook formula in float64: norm-relative difference",
        columns=("implementation", "length", "output", "gradients", "allowed", "verdict"),
        rows=tuple(
            (
                _column(check.implementation, check.mode),
                format_tokens(check.length_tokens),
                _worst(check, "output"),
                _worst(check, *(name for name in check.differences if name != "output")),
                f"{check.tolerance:.0e}",
                "red" if check.reason else "equal",
            )
            for check in bench.checks
        ),
        left_columns=1,
    )


def _worst(check: BenchCheck, *names: str) -> str:
    """The largest of some differences; ``nan`` for no number, ``-`` where none is there."""
    found = [check.differences.get(name, 0.0) for name in names if check.differences]
    if not found:
        return "-"
    return "nan" if None in found else f"{max(each or 0.0 for each in found):.1e}"
