"""The report of a benchmark of attentions: sentences follow from figures, and other figures make
other sentences; nothing is told of what was not measured.
"""

import json
import re

import pytest
from attention_figures import BOTH, bench, card, measured, row

from highwater.nouns.attention_bench import AttentionBench, BenchCheck, NotRun
from highwater.nouns.codec import to_json
from highwater.pages.attention.attention_conclusions import advice, answer, conclusions, labels
from highwater.pages.attention.attention_plots import plots
from highwater.pages.attention.attention_report import (
    attention_markdown,
    attention_page,
    attention_report,
    bench_document,
)
from highwater.pages.attention.attention_tables import predicted_table
from highwater.recommendation.attention_summary import attention_summary
from highwater.units import GIB, KIB, MIB

LENGTHS = (16_384, 32_768, 65_536, 131_072)
SECTIONS = [
    *("Measured on", "Executive summary", "Correctness", "Every implementation and mode"),
    *("Ratio to dense", "Bytes a token", "Scaling efficiency", "Other GPUs, predicted"),
    *("What to use", "Recompute and batch", "Conclusions"),
]


def compared(*, sparse_s: float, sparse_bytes: int, sparse_longest: int) -> AttentionBench:
    """Dense attention to 65,536 tokens and a block-sparse one beside it."""
    lengths = [length for length in (8192, *LENGTHS, 262_144) if length <= sparse_longest]
    return bench(
        [
            *measured("dense", LENGTHS[:3], token_s=1e-6, token_bytes=1024),
            row("dense", 131_072, result="ran out of memory", reason="CUDA out of memory"),
            *measured("block_sparse_5", lengths, token_s=sparse_s, token_bytes=sparse_bytes),
            row("block_sparse_5", 2 * lengths[-1], result="ran out of memory", reason="CUDA"),
        ]
    )


def said(found: AttentionBench) -> str:
    """All that is concluded."""
    return " ".join(conclusions(found, attention_summary(found)))


def test_figures_in_favour_of_sparse_attention_make_sentences_in_its_favour() -> None:
    found = compared(sparse_s=1e-7, sparse_bytes=512, sparse_longest=262_144)
    assert answer(found, attention_summary(found)).startswith(
        "block_sparse_5 held the longest sequence, 262,144 tokens, forward in 26.21 ms with 128.0 "
    )
    text = said(found)
    assert "block_sparse_5 holds 4 times as long a sequence as dense" in text
    assert "at 65,536 tokens block_sparse_5 is 10 times as fast as dense" in text
    assert "computing 5 % of the pairs" in text
    assert "faster at every length from 16,384 on" in text
    assert "from 512 bytes a token (block_sparse_5) to 1.0 KiB (dense)" in text


def test_the_opposite_figures_make_the_opposite_sentences() -> None:
    found = compared(sparse_s=4e-6, sparse_bytes=4096, sparse_longest=32_768)
    assert answer(found, attention_summary(found)).startswith(
        "dense held the longest sequence, 65,536 tokens"
    )
    text = said(found)
    assert "block_sparse_5 holds no longer a sequence than dense, 0.5 times as long" in text
    assert "at 32,768 tokens block_sparse_5 is slower than dense, which is 4 times as fast" in text
    assert "at no length up to there does leaving pairs out pay" in text
    assert "from 1.0 KiB a token (dense) to 4.0 KiB (block_sparse_5)" in text


def test_where_sparse_attention_begins_to_pay_is_the_length_from_which_it_stays_faster() -> None:
    found = bench(
        [
            *measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024),
            *(
                row("block_sparse_5", length, time_s, 512 * length)
                for length, time_s in zip(LENGTHS, (0.02, 0.03, 0.09, 0.04), strict=True)
            ),
        ]
    )
    text = said(found)
    assert "is 3.28 times as fast as dense" in text
    assert "it is faster from 131,072 tokens on, and not below" in text


def test_a_tie_at_the_longest_that_was_tried_says_that_it_is_not_known() -> None:
    rows = [
        *measured("dense", LENGTHS, token_s=2e-6, token_bytes=1024),
        *measured("block_sparse_5", LENGTHS, token_s=1e-6, token_bytes=1024),
    ]
    found = bench(rows)
    assert answer(found, attention_summary(found)) == (
        "all 2 held the longest sequence that was tried, 131,072 tokens, forward; the fastest of "
        "them block_sparse_5 in 0.13 s with 128.0 MiB allocated"
    )
    assert "which holds more is not known" in said(found)


def test_memory_that_grows_with_the_square_is_named_for_it() -> None:
    rows = [row("dense", length, 0.1, 4 * length**2) for length in LENGTHS]
    assert "memory grows faster than the length for dense" in said(bench(rows))
    line = [row("dense", length, 0.1, 4096 * length) for length in LENGTHS]
    assert "memory is linear in the length for dense" in said(bench(line))


def test_a_red_attention_is_told_and_has_no_number_anywhere() -> None:
    reason = "not equal to the reference, to 3e-02: output 4.1e-01 off"
    check = BenchCheck(
        implementation="dilated",
        mode="single",
        length_tokens=515,
        differences={"output": 0.41},
        tolerance=0.03,
        reason=reason,
    )
    found = bench(
        [
            *measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024),
            row("dilated", None, result="red", reason=reason),
        ],
        checks=(check,),
    )
    assert f"dilated is red and has no number: {reason}" in said(found)
    summary = attention_summary(found)
    for figures in (summary.ratios, summary.estimates, summary.predicted, summary.recompute):
        assert all(each.implementation != "dilated" for each in figures)
    (longest,) = [each for each in summary.longest if each.implementation == "dilated"]
    assert (longest.fits_tokens, longest.why, longest.row) == (None, "red", None)
    told = next(
        line for line in attention_markdown(found).splitlines() if line.startswith("| dilated ")
    )
    assert re.findall(r"\d", told) == []


def test_a_crash_is_no_answer_about_memory() -> None:
    found = bench(
        [
            *measured("dense", LENGTHS[:2], token_s=1e-6, token_bytes=1024),
            row("dense", 65_536, result="crashed", reason="RuntimeError: illegal address"),
        ]
    )
    assert "dense crashed at 65,536 tokens" in said(found)
    assert "which says nothing about its memory" in said(found)
    assert attention_summary(found).longest[0].why == "crashed"


def parallel(gain: float, *, ends: bool = False) -> AttentionBench:
    """Two GPUs, of which DataParallel makes so much, and a ring."""
    alone = measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024)
    both = [
        row(
            "dense",
            length,
            2e-6 * length / gain,
            1024 * length,
            mode="data parallel",
            batch=2,
            gpus=2,
        )
        for length in LENGTHS
    ]
    ring = [
        row("ring", length, 0.6e-6 * length, 512 * length, mode="ring", gpus=2)
        for length in (*LENGTHS, 262_144)
    ]
    end = [row("dense", 262_144, result="ran out of memory")] if ends else []
    return bench([*alone, *end, *both, *ring], gpus=2)


@pytest.mark.parametrize("gain", [1.9, 0.7])
def test_dataparallel_cannot_lengthen_a_sequence_whatever_it_brings(gain: float) -> None:
    found = parallel(gain)
    (line,) = [
        each for each in conclusions(found, attention_summary(found)) if "DataParallel" in each
    ]
    assert "cannot lengthen a sequence" in line
    assert "a single sequence leaves all others idle" in line
    assert f"{gain:.3g} times the tokens/s of one" in line
    assert "`highwater bench attention --implementations ring --gpus 2`" in line
    assert answer(found, attention_summary(found)).startswith("ring (ring, 2 GPUs) held ")


def test_efficiency_is_the_speed_up_for_each_gpu() -> None:
    by_mode = {each.mode: each for each in attention_summary(parallel(1.8)).efficiencies}
    assert by_mode["data parallel"].speedup == pytest.approx(1.8)
    assert by_mode["data parallel"].efficiency == pytest.approx(0.9)
    assert by_mode["ring"].speedup == pytest.approx(1 / 0.6)
    assert by_mode["ring"].length_ratio is None, "nothing longer was tried of either"
    ended = attention_summary(parallel(1.8, ends=True)).efficiencies[-1]
    assert (ended.mode, ended.length_ratio) == ("ring", 2)
    assert "ring over 2 GPUs, forward: faster than one GPU at 131,072 tokens" in said(parallel(1.8))


def trained(*, kept: int, forward_s: float, batch_gain: float) -> AttentionBench:
    """Both directions of dense attention at 32,768 tokens, and two sequences at once."""
    rows = [
        row("dense", 16_384, forward_s / 2, 50 * MIB),
        row("dense", 32_768, forward_s, 100 * MIB),
        row("dense", 16_384, 0.2, 100 * MIB, direction="forward+backward"),
        row(
            "dense",
            32_768,
            0.4,
            200 * MIB,
            direction="forward+backward",
            kept_for_backward_bytes=(kept,),
        ),
        row(
            "dense",
            32_768,
            0.8 / batch_gain,
            400 * MIB,
            direction="forward+backward",
            batch=2,
        ),
    ]
    return bench(rows)


def test_advice_on_recomputing_and_batches_follows_from_what_was_measured() -> None:
    first, batch = advice(attention_summary(trained(kept=100 * MIB, forward_s=0.1, batch_gain=1.5)))
    assert first == (
        "dense: recompute it where memory runs out. At 32,768 tokens it frees 100.0 MiB of a "
        "layer, 50% of the peak of one, and adds 25% to its time."
    )
    assert "2 sequences at once pay" in batch
    assert "1.5 times the tokens/s of one" in batch
    other, alone = advice(attention_summary(trained(kept=MIB, forward_s=0.3, batch_gain=0.95)))
    assert "keep it: recomputing frees too little" in other
    assert "adds 75% to its time" in other
    assert "one sequence at a time is enough" in alone


def test_nothing_is_advised_of_what_was_not_measured() -> None:
    found = bench(measured("dense", (1024, 2048), token_s=1e-6, token_bytes=1024))
    recompute, batch = advice(attention_summary(found))
    assert "not both measured" in recompute
    assert batch.startswith("batch: measured at 16,384 and 32,768 tokens alone")


def test_what_to_use_is_what_was_measured_to_hold_it_and_the_faster_of_two() -> None:
    slow = measured("dense_flex", LENGTHS, token_s=3e-6, token_bytes=1024)
    fast = measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024)
    ends = [
        row("dense", 196_608, result="took too long"),
        row("dense_flex", 196_608, result="crashed"),
    ]
    cases = attention_summary(bench([*slow, *fast, *ends])).use_cases
    assert [(case.from_tokens, case.to_tokens) for case in cases] == [
        (16_384, 32_768),
        (32_768, 65_536),
        (65_536, 131_072),
        (131_072, None),
    ]
    assert [case.exact and case.exact.implementation for case in cases] == [*["dense"] * 3, None]
    assert all(case.sparse is None for case in cases)
    assert cases[0].exact is not None
    assert cases[0].exact.is_measured
    assert cases[0].exact.time_s == pytest.approx(1e-6 * 32_768)


def test_past_the_longest_that_was_tried_a_choice_is_predicted_and_says_so() -> None:
    found = bench(measured("dense", (1024, 2048, 4096), token_s=1e-6, token_bytes=1024))
    case = attention_summary(found).use_cases[0]
    assert case.exact is not None
    assert not case.exact.is_measured
    assert case.exact.time_s is None
    assert "(predicted by memory alone)" in attention_markdown(found)


def test_a_sequence_that_a_ring_shares_is_predicted_in_proportion_to_its_gpus() -> None:
    shared = attention_summary(parallel(1.8)).use_cases[0].shared
    assert shared["8"] == 4 * shared["2"]
    assert shared["4"] == 2 * shared["2"]


def test_other_gpus_are_predicted_by_the_formula_and_labelled() -> None:
    found = bench(measured("dense", LENGTHS, token_s=1e-6, token_bytes=16 * KIB))
    summary = attention_summary(found)
    (a100,) = [each for each in summary.predicted if each.gpu == "A100-80GB"]
    peak = 16 * KIB * 131_072
    reserved = 16 * KIB * a100.tokens * (peak + MIB) / peak
    assert reserved <= a100.memory_bytes - 512 * MIB < 1.125 * reserved
    assert not a100.is_least
    assert "V100" not in {each.gpu for each in summary.predicted}, "nobody has read its memory"
    table = predicted_table(found, summary, "forward")
    assert table.title.startswith("predicted: ")
    assert table.footnotes[0].startswith("predicted from peaks on NVIDIA H100 80GB HBM3; nothing ")


def test_nothing_is_predicted_far_past_what_was_measured() -> None:
    found = bench(
        [
            *measured("dense", LENGTHS, token_s=1e-6, token_bytes=64 * KIB),
            *measured("block_sparse_5", (512, 1024, 2048), token_s=1e-6, token_bytes=64),
        ],
        device="cpu",
    )
    table = predicted_table(found, attention_summary(found), "forward")
    assert table.columns[2:] == ("dense", "block_sparse_5", "DataParallel")
    assert {row[3] for row in table.rows} == {f"≥ {64 * 2048:,}"}
    assert not [row for row in table.rows if "≥" in row[2]]
    assert "on the CPU, whose kernels allocate otherwise" in table.footnotes[0]


@pytest.mark.parametrize("lengths", [(512, 1024), (512, 1024, 2048), (4096,), (256, 131_072)])
def test_where_too_little_was_measured_a_report_says_so_and_has_no_row_of_least_lengths(
    lengths: tuple[int, ...],
) -> None:
    found = bench(measured("dense", lengths, token_s=1e-6, token_bytes=64))
    assert predicted_table(found, attention_summary(found), "forward").rows == ()
    sections = {section.title: section for section in attention_report(found).sections}
    (said,) = sections["Other GPUs, predicted"].lines
    assert said.startswith("too little was measured ")
    assert sections["Other GPUs, predicted"].tables == []
    assert "| ≥" not in attention_markdown(found).partition("## Other GPUs")[2]


def test_an_8_gb_card_is_predicted_with_what_it_cannot_do() -> None:
    found = bench(measured("dense", LENGTHS, token_s=1e-6, token_bytes=16 * KIB))
    summary = attention_summary(found)
    (card,) = [each for each in summary.predicted if each.gpu == "GTX-1080"]
    assert 7.5 * GIB < card.memory_bytes < 8 * GIB
    assert card.lacking == ("bf16", "flash attention")
    assert not [each for each in summary.predicted if each.lacking and each is not card]
    notes = predicted_table(found, summary, "forward").footnotes
    assert [note for note in notes if note.startswith("GTX-1080 has no bf16 and no flash")]


def test_other_gpus_have_a_column_of_dataparallel_that_lengthens_nothing() -> None:
    alone = bench(measured("dense", LENGTHS, token_s=1e-6, token_bytes=16 * KIB))
    for found, said in ((alone, "not measured"), (parallel(1.8), "1.8 times the tokens/s on 2")):
        table = predicted_table(found, attention_summary(found), "forward")
        assert table.columns[-1] == "DataParallel"
        assert table.rows
        for *_, cell in table.rows:
            assert cell.startswith("one a GPU; ")
            assert said in cell
        assert [note for note in table.footnotes if "none longer than one GPU holds" in note]


def test_a_big_card_that_stands_in_for_a_small_one_is_labelled() -> None:
    rows = measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024)
    (line,) = labels(bench(rows, memory_bytes=8 * GIB, machine=card("NVIDIA H200", 139 * GIB)))
    assert line == (
        "NVIDIA H200 with 8.00 GiB of its 139.00 GiB: it stands in for a card with so much (a GTX "
        "1080 has 8 GiB); times are its own, not that card's."
    )
    assert labels(bench(rows)) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_report_has_all_its_sections_in_order_however_much_was_measured(count: int) -> None:
    found = bench(
        [
            each
            for direction in BOTH
            for each in measured(
                "dense", LENGTHS[:count], token_s=1e-6, token_bytes=1024, direction=direction
            )
        ],
        not_run=(NotRun(implementation="ring", mode="ring", reason="it takes two GPUs"),),
    )
    assert [section.title for section in attention_report(found).sections] == SECTIONS
    markdown = attention_markdown(found)
    assert re.findall(r"^## (.*)$", markdown, re.MULTILINE) == SECTIONS
    assert markdown.index("2026-02-03T04:05:06") < markdown.index("## Executive summary")
    page = attention_page(found)
    assert re.findall(r"<h2 id=\"section-\d+\">(.*?)</h2>", page) == SECTIONS
    drawn = plots(found)
    assert len(drawn) == (4 if count else 0)
    assert page.count('<svg class="plot"') == len(drawn)
    assert [f"{plot.name}.svg" for plot in drawn] == re.findall(r"\]\((\S+\.svg)\)", markdown)


def test_every_measured_figure_is_in_the_tables() -> None:
    found = parallel(1.8)
    markdown = attention_markdown(found)
    for each in found.rows:
        assert f"| {each.length_tokens:,} " in markdown
    assert "1.8" in markdown
    assert "128.0 MiB" in markdown


def test_the_document_has_rows_and_what_follows_from_them_with_units_in_its_keys() -> None:
    document = json.loads(to_json(bench_document(parallel(1.8))))
    assert document["schema_version"] == 1
    keys = {(row["implementation"], row["mode"], row["length_tokens"]) for row in document["rows"]}
    assert len(keys) == len(document["rows"])
    assert {"time_s", "peak_allocated_bytes", "peak_reserved_bytes", "after_qkv_bytes"} <= set(
        document["rows"][0]
    )
    assert {"longest", "estimates", "predicted", "use_cases"} <= set(document["summary"])
    assert document["conclusions"]


def test_a_plot_places_a_longer_length_to_the_right_and_a_longer_time_higher() -> None:
    time, memory = plots(bench(measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024)))
    (line,) = time.lines
    places = [(point.x, point.y) for point in line.points]
    assert places == sorted(places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert line.points[0].text == "dense, 16,384 tokens: 16.38 ms"
    assert [tick.text for tick in memory.sizes] == ["16.0 MiB", "64.0 MiB"]
    assert [tick.text for tick in time.lengths] == ["16,384", "32,768", "65,536", "131,072"]
    assert all(time.left <= x <= time.width for x, _ in places)


def test_a_devices_name_stays_text_in_every_form() -> None:
    evil = card("<script>alert(1)</script> | `x`", 80 * GIB)
    found = bench(measured("dense", LENGTHS, token_s=1e-6, token_bytes=1024), machine=evil)
    assert "<script>" not in attention_page(found)
    assert "<script>" not in attention_markdown(found)
