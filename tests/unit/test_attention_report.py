"""The report of a benchmark of attentions."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from attention_figures import BOTH, bench, measured, row
from hypothesis import given
from hypothesis import strategies as st

from highwater.nouns import attention_bench as nouns
from highwater.nouns.codec import to_json
from highwater.nouns.trial import Device
from highwater.pages import attention
from highwater.pages.table import TextTable
from highwater.recommendation.attention_summary import attention_summary, memory_fit
from highwater.units import GIB, KIB, MIB

LENGTHS = (16_384, 32_768, 65_536, 131_072)
SECTIONS = [
    *("Longest lengths", "What to use", "Measured on", "Correctness"),
    *("Every implementation and mode", "Ratio to dense", "Scaling efficiency"),
    "Other GPUs, predicted",
]


def tables(found: nouns.AttentionBench, section: str) -> list[TextTable]:
    (those,) = [each.tables for each in attention.report_sections(found) if each.title == section]
    return list(those)


def answer(found: nouns.AttentionBench) -> str:
    return attention.bench_document(found).answer


def held(name: str = "dense", lengths: tuple[int, ...] = LENGTHS, token: int = 1024, **row: Any):
    """Rows of an attention that takes 1 µs and so many bytes a token, unless others are named."""
    return measured(name, lengths, **{"token_s": 1e-6, "token_bytes": token, **row})


def compared(*, sparse_s: float, sparse_longest: int) -> nouns.AttentionBench:
    """Dense attention to 65,536 tokens and a block-sparse one beside it."""
    lengths = tuple(each for each in (8192, *LENGTHS, 262_144) if each <= sparse_longest)
    ran_out = {"result": "ran out of memory", "reason": "CUDA out of memory"}
    dense = [*held(lengths=LENGTHS[:3]), row("dense", 131_072, **ran_out)]
    sparse = [*held("block_sparse_5", lengths, 512, token_s=sparse_s)]
    return bench([*dense, *sparse, row("block_sparse_5", 2 * lengths[-1], **ran_out)])


def test_the_answer_is_the_longest_of_all_and_costs_are_compared():
    sparse = "block_sparse_5 holds 262,144 tokens, forward, in 26.21 ms; dense 65,536 in 65.54 ms"
    assert answer(compared(sparse_s=1e-7, sparse_longest=262_144)) == sparse
    dense = "dense holds 65,536 tokens, forward, in 65.54 ms"
    assert answer(compared(sparse_s=4e-6, sparse_longest=32_768)) == dense
    nothing = bench([row("dense", 16_384, result="ran out of memory")])
    assert answer(nothing) == "no attention held any length, forward"
    (table,) = tables(compared(sparse_s=1e-7, sparse_longest=262_144), "Ratio to dense")
    assert table.columns == ("implementation", "16,384", "32,768", "65,536")
    assert table.rows == (("block_sparse_5", "10", "10", "10"),)
    for power, factor, (token, pair) in ((1, 4096, ("4,096", "0")), (2, 4, ("0", "4"))):
        rows = [row("dense", length, 0.1, factor * length**power) for length in LENGTHS]
        table = tables(bench(rows), "Other GPUs, predicted")[-1]
        at = table.columns.index("bytes per token")
        assert table.rows[0][at : at + 2] == (token, pair)


def test_a_red_attention_is_told_and_has_no_number_anywhere():
    reason = "not equal to the reference, to 3e-02: output 4.1e-01 off"
    off = {"differences": {"output": 0.41}, "tolerance": 0.03, "reason": reason}
    check = nouns.BenchCheck(implementation="dilated", mode="single", length_tokens=515, **off)
    red = row("dilated", None, result="red", reason=reason)
    found = bench([*held(), red], checks=(check,))
    (checks,) = tables(found, "Correctness")
    assert checks.rows[0][-1] == reason
    summary = attention_summary(found)
    for figures in (summary.estimates, summary.predicted):
        assert all(each.implementation != "dilated" for each in figures)
    (longest,) = [each for each in summary.longest if each.implementation == "dilated"]
    assert (longest.fits_tokens, longest.why, longest.row) == (None, "red", None)
    lines = attention.attention_markdown(found).splitlines()
    assert re.findall(r"\d", next(line for line in lines if line.startswith("| dilated "))) == []


def parallel(gain: float, *, ends: bool = False, token_bytes: int = 1024) -> nouns.AttentionBench:
    two: dict[str, Any] = {"mode": "data parallel", "batch": 2, "gpus": 2}
    both = [row("dense", n, 2e-6 * n / gain, token_bytes * n, **two) for n in LENGTHS]
    ring = held("ring", (*LENGTHS, 262_144), token_bytes // 2, token_s=0.6e-6, mode="ring", gpus=2)
    end = [row("dense", 262_144, result="ran out of memory")] if ends else []
    return bench([*held(token=token_bytes), *end, *both, *ring], gpus=2)


@pytest.mark.parametrize("gain", [1.9, 0.7])
def test_dataparallel_cannot_lengthen_a_sequence_whatever_it_brings(gain):
    (table,) = tables(parallel(gain), "Scaling efficiency")
    by_mode = {line[1]: line for line in table.rows}
    assert by_mode["data parallel"][table.columns.index("speedup")] == f"{gain:.3g}"
    (note,) = table.footnotes
    assert "cannot lengthen one" in note
    assert "a single sequence leaves all other GPUs idle" in note
    assert "`--implementations ring` shares each sequence" in note
    assert answer(parallel(gain)).startswith("ring over 2 GPUs holds ")


def test_what_to_use_is_what_was_measured_to_hold_it_and_the_faster_of_two():
    slow, fast = held("dense_flex", token_s=3e-6), held()
    sparse, late = held("window", (*LENGTHS, 262_144), token_s=1e-7), {"result": "took too long"}
    ends = [row("dense", 196_608, **late), row("dense_flex", 196_608, result="crashed")]
    cases = attention_summary(bench([*slow, *fast, *ends, *sparse])).use_cases
    ranges = [(case.from_tokens, case.to_tokens) for case in cases]
    assert ranges == [*itertools.pairwise(LENGTHS), (131_072, None)]
    assert [case.exact for case in cases] == ["dense", "dense", "dense", None]
    assert [case.sparse for case in cases] == ["window"] * 4


def test_lengths_that_one_gpu_does_not_hold_are_for_those_that_share_them():
    cases = attention_summary(parallel(1.8, ends=True)).use_cases
    assert [case.exact for case in cases] == ["dense", "dense", "dense", "ring"]


def test_nothing_is_advised_of_what_was_not_measured():
    found = bench(held(lengths=(1024, 2048, 4096)))
    cases = attention_summary(found).use_cases
    assert {(case.exact, case.sparse) for case in cases} == {(None, None)}
    (lines,) = [
        each.lines for each in attention.report_sections(found) if each.title == "What to use"
    ]
    assert len(lines) == 4, "one line a use case"
    assert all("none measured holds them" in line for line in lines)


def test_other_gpus_are_predicted_by_the_formula_and_labelled():
    found = bench(held(token=16 * KIB))
    summary = attention_summary(found)
    (a100,) = [each for each in summary.predicted if each.gpu == "A100-80GB"]
    peak = 16 * KIB * 131_072
    reserved = 16 * KIB * a100.tokens * (peak + MIB) / peak
    assert reserved <= a100.memory_bytes - 512 * MIB < 1.125 * reserved
    assert not a100.is_least
    assert "H200-141GB-NVL" not in {each.gpu for each in summary.predicted}, (
        "nobody has read its memory"
    )
    table = attention.predicted_table(found, summary, "forward")
    assert table.title.startswith("predicted: ")
    assert table.footnotes[0].startswith("predicted from peaks on NVIDIA H100 80GB HBM3; nothing ")


def test_nothing_is_predicted_far_past_what_was_measured():
    short = held("block_sparse_5", (512, 1024, 2048), 64)
    found = bench([*held(token=64 * KIB), *short], device="cpu")
    table = attention.predicted_table(found, attention_summary(found), "forward")
    assert table.columns[2:] == ("dense", "block_sparse_5", "DataParallel")
    assert {row[3] for row in table.rows} == {f"≥ {64 * 2048:,}"}
    assert not [row for row in table.rows if "≥" in row[2]]
    assert "on the CPU, whose kernels allocate otherwise" in table.footnotes[0]


@pytest.mark.parametrize("lengths", [(512, 1024), (512, 1024, 2048), (4096,), (256, 131_072)])
def test_where_too_little_was_measured_a_report_says_so_and_has_no_row_of_least_lengths(lengths):
    found = bench(held(lengths=lengths, token=64))
    assert attention.predicted_table(found, attention_summary(found), "forward").rows == ()
    sections = {section.title: section for section in attention.report_sections(found)}
    (said,) = sections["Other GPUs, predicted"].lines
    assert said.startswith("too little was measured ")
    assert "| ≥" not in attention.attention_markdown(found).partition("## Other GPUs")[2]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_report_has_all_its_sections_in_order_however_much_was_measured(count):
    forward, both = (held(lengths=LENGTHS[:count], direction=each) for each in BOTH)
    alone = nouns.NotRun(implementation="ring", mode="ring", reason="it takes two GPUs")
    found = bench([*forward, *both], not_run=(alone,))
    markdown = attention.attention_markdown(found)
    assert re.findall(r"^## (.*)$", markdown, re.MULTILINE) == SECTIONS
    assert "2026-02-03T04:05:06" in markdown
    notes = attention.longest_table(found, attention_summary(found)).footnotes
    assert "not run: ring: it takes two GPUs" in notes


def test_every_measured_figure_is_in_the_tables():
    found = parallel(1.8)
    cases = tables(found, "Every implementation and mode")
    columns = ("length", "batch", "result", "time", "kept", "after Q/K/V")
    assert {each.columns for each in cases} == {(*columns, "peak allocated", "peak reserved")}

    def mib(of_directions: Any) -> str:
        return f"{of_directions[0] / MIB:.1f} MiB"

    told = {(line[0], line[1], line[5], line[6]) for table in cases for line in table.rows}
    for r in found.rows:
        figures = (mib(r.after_qkv_bytes), mib(r.peak_allocated_bytes))
        assert (f"{r.length_tokens:,}", str(r.batch), *figures) in told
    assert len(told) == len(
        {(r.length_tokens, r.batch, r.peak_allocated_bytes) for r in found.rows}
    )


def test_the_document_has_rows_and_what_follows_from_them_with_units_in_its_keys():
    document = json.loads(to_json(attention.bench_document(parallel(1.8))))
    rows, summary = document["rows"], document["summary"]
    assert document["schema_version"] == 1
    keys = {(row["implementation"], row["mode"], row["length_tokens"]) for row in rows}
    assert len(keys) == len(rows)
    assert {"time_s", "peak_allocated_bytes", "peak_reserved_bytes"} <= set(rows[0])
    assert "after_qkv_bytes" in rows[0]
    assert {"longest", "estimates", "predicted", "efficiencies", "use_cases"} == set(summary)


LONGEST = 1 << 24
STARTS: dict[Device, int] = {"cpu": 512, "cuda": 4096}


def searched(
    device: Device, most: int, fits: Callable[[int], bool], *, named: tuple[int, ...] = ()
) -> dict[int, bool]:
    order = nouns.BenchOrder(device=device, implementations=("dense",), lengths=named)
    tried: dict[int, bool] = {}
    while (length := order.next_length(tried, most=most)) is not None:
        assert length not in tried, "no length is tried twice"
        tried[length] = fits(length)
    return tried


@given(
    longest=st.integers(nouns.LEAST_TOKENS, LONGEST - 1), device=st.sampled_from(["cpu", "cuda"])
)
def test_what_memory_holds_is_found_to_an_eighth_of_its_doubling(longest, device):
    tried = searched(device, LONGEST, lambda length: length <= longest)
    longest_fit = max(length for length, fits in tried.items() if fits)
    shortest_failed = min(length for length, fits in tried.items() if not fits)
    step = (1 << (longest_fit.bit_length() - 1)) // 8
    assert longest_fit <= longest < shortest_failed
    assert shortest_failed - longest_fit == step
    assert all(length % step == 0 for length in (longest_fit, shortest_failed))
    start = STARTS[device]
    doublings = max(0, (longest // start).bit_length()) + max(0, (start // longest).bit_length())
    assert len(tried) <= doublings + 1 + 3, "three cuts of the last doubling"


@pytest.mark.parametrize("fits", [True, False])
def test_named_lengths_are_all_tried_once_whatever_becomes_of_them(fits):
    tried = searched("cpu", 512, lambda _: fits, named=(300, 100, 300, 200))
    assert list(tried) == [100, 200, 300]


LENGTHS_ATTENTION_FIT = (4096, 8192, 16_384, 32_768, 49_152)


@given(overhead=st.integers(0, 512 * MIB), token=st.integers(64, 64 * KIB), cut=st.integers(3, 5))
def test_a_linear_memory_is_found_again_with_its_overhead(overhead, token, cut):
    lengths = LENGTHS_ATTENTION_FIT[:cut]
    fit = memory_fit([(length, overhead + token * length) for length in lengths])
    assert fit.bytes_per_token == pytest.approx(token, rel=1e-3)
    assert fit.overhead_bytes == pytest.approx(overhead, rel=1e-3, abs=KIB)
    assert fit.bytes_per_pair == 0
    assert fit.largest_error < 1e-6
    assert (fit.points, fit.longest_tokens) == (cut, lengths[-1])


def fitted(peak: Callable[[int], int]):
    fit = memory_fit([(length, peak(length)) for length in LENGTHS_ATTENTION_FIT])
    assert fit is not None
    return fit


def test_no_term_is_below_zero_where_peaks_bend_the_other_way():
    fit = memory_fit([(1000, 5000), (2000, 7000), (4000, 9000), (8000, 10_000)])
    assert min(fit.overhead_bytes, fit.bytes_per_token, fit.bytes_per_pair) >= 0
    assert fit.largest_error > 0.05, "it says how far off it is"


@given(free=st.integers(MIB, 200 * GIB))
def test_a_predicted_length_fits_and_an_eighth_of_its_doubling_more_does_not(free):
    fit = fitted(lambda length: 100 * KIB + 768 * length)
    longest = fit.longest_within(free)
    step = max(1, (1 << (longest.bit_length() - 1)) // 8)
    assert fit.peak_bytes(longest) <= free < fit.peak_bytes(longest + step)
    assert longest % step == 0


def test_what_short_sequences_take_at_once_is_no_square_of_the_length():
    """A window's scores, all of them at hand up to some length: from there on memory is linear."""
    fit = fitted(lambda length: min(4 * length**2, 2**23) + 768 * length)
    assert fit.bytes_per_pair == 0
    assert fit.peak_bytes(2**20) == pytest.approx(768 * 2**20 + 2**23, rel=0.05)
