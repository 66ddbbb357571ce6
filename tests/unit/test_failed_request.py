"""The line of a trial that ran out of memory: from what a rank reported to the setting to try."""

import re
from pathlib import Path

import msgspec
import pytest
from studies import HOSTILE, QUESTION, report_of, study_of, trial

from highwater.cli.grammar import parse
from highwater.memory.snapshot.attribution import CATEGORIES, CATEGORY_WORDS
from highwater.memory.snapshot.memory_profile import ADVICE
from highwater.nouns.codec import from_json
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import AliveMemory, Failure, Outcome, RankReport, TrialResult
from highwater.pages.study_answer import answer_table, trial_table
from highwater.pages.study_commands import alive_rows, request_line, setting_of
from highwater.pages.study_page import study_markdown, study_page
from highwater.units import GIB
from trial_specs import answer_of

STATES = {"parameters_bytes": 3 * GIB, "gradients_bytes": 3 * GIB}
STATES |= {"optimizer_states_bytes": 6 * GIB, "unattributed_bytes": 0}
OTHERS = {"activations_bytes": 5 * GIB, "logits_bytes": 4 * GIB, "communication_bytes": GIB}
OF_THE_CARD = {"allocated_bytes": 22 * GIB, "reserved_bytes": 23 * GIB, "device_free_bytes": 0}
OF_THE_CARD |= {"largest_free_bytes": GIB // 2, "requested_bytes": 4 * GIB}
LOGITS = AliveMemory(
    **STATES, **OTHERS, **OF_THE_CARD, requested_by="highwater/models/loss.py:90 forward"
)
MICRO_BATCH = "one-micro-batch"
VANILLA = Settings(loss="full", allocator="native")


def result_of(alive: AliveMemory | None, **failure: object) -> TrialResult:
    """A trial of which the second rank ran out first."""
    said = {"kind": "device_memory", "phase": "backward", "text": "out", "at_unix_s": 1.0}
    late = Failure(kind="error", phase="forward", text="lost its peer", at_unix_s=2.0)
    first = Failure(**{**said, "alive": alive, **failure})
    ranks = (RankReport(rank=0, failure=late), RankReport(rank=1, failure=first))
    return TrialResult(outcome=Outcome.OUT_OF_MEMORY, reason="out", ranks=ranks)


def test_a_line_says_where_what_how_much_and_what_to_try():
    line = request_line(result_of(LOGITS, layer=27), VANILLA, Layout())
    assert line == (
        "backward of layer 27: no room for 4.00 GiB of logits; optimizer states 6.00 GiB alive; "
        "1.00 GiB fragmented → chunked loss"
    )
    assert request_line(result_of(None), VANILLA, Layout()) is None
    assert list(alive_rows(result_of(LOGITS), Layout(gpus=2, ring_degree=2))) == [
        "alive on rank 1, d0r1u0"
    ]


def test_the_line_of_the_guide_is_what_a_recorded_trial_has():
    docs = Path(__file__).parents[2] / "docs"
    recorded = from_json((docs / "results/profiler/runs_out.json").read_bytes(), TrialResult)
    line = request_line(recorded, VANILLA, Layout())
    guide = (docs / "guides/out-of-memory.md").read_text()
    shown = " ".join(re.findall(r"```text\n(.*?)```", guide, re.DOTALL)[0].split())
    assert shown == f"nothing set, 1 GPU: 65,536 tokens, {line}"


def changed(**sizes: int) -> AliveMemory:
    nothing = {name: 0 for name in AliveMemory.__struct_fields__ if name.endswith("_bytes")}
    return AliveMemory(**{**nothing, "requested_bytes": GIB, **sizes})


IN_PIECES = changed(allocated_bytes=GIB, reserved_bytes=3 * GIB, logits_bytes=GIB)
ACTIVATIONS, MOMENTS = changed(activations_bytes=9 * GIB), changed(optimizer_states_bytes=9 * GIB)
ADDED_UP = changed(optimizer_states_bytes=9 * GIB, gradients_bytes=3 * GIB)


@pytest.mark.parametrize(
    ("alive", "settings", "setting"),
    [
        (LOGITS, VANILLA, "chunked loss"),
        (LOGITS, Settings(loss="chunked"), None),
        (IN_PIECES, VANILLA, "expandable segments"),
        (IN_PIECES, Settings(allocator="expandable"), "chunked loss"),
        (ACTIVATIONS, Settings(recompute="none"), "recompute"),
        (ACTIVATIONS, Settings(recompute="layer"), "context parallel"),
        (MOMENTS, VANILLA, "offload"),
        (MOMENTS, Settings(offload=True), None),
        (ADDED_UP, VANILLA, MICRO_BATCH),
        (ADDED_UP, Settings(accumulates=False), "offload"),
        (changed(communication_bytes=9 * GIB), VANILLA, "smaller buckets"),
        (changed(unattributed_bytes=9 * GIB), VANILLA, None),
        (changed(), VANILLA, None),
    ],
)
def test_the_setting_to_try_is_one_that_is_not_there_yet(alive, settings, setting):
    assert setting_of(alive, settings, Layout()) == setting
    assert setting is None or setting in ADVICE


def test_where_copies_have_states_of_their_own_fewer_copies_are_tried_first():
    layout = Layout(gpus=4, replicate_degree=2)
    assert setting_of(ADDED_UP, VANILLA, layout) == "fewer copies"
    assert setting_of(ACTIVATIONS, VANILLA, layout) == "context parallel"


def test_on_the_cpu_nothing_is_advised_by_what_alone_is_counted():
    counted = {"parameters_bytes": GIB, "gradients_bytes": GIB, "optimizer_states_bytes": 2 * GIB}
    assert setting_of(AliveMemory(**counted), VANILLA, Layout(gpus=2, replicate_degree=2)) is None
    asked = {"requested_bytes": 4 * GIB, "requested_by": LOGITS.requested_by}
    assert setting_of(AliveMemory(**counted, **asked), VANILLA, Layout()) == "chunked loss"


def test_whatever_is_advised_can_be_typed():
    asked = {words for text in ADVICE.values() for words in re.findall(r"--[a-z-]+(?: \w+)?", text)}
    assert len(asked) >= len(ADVICE)
    for words in asked - {"--offload"}:
        flag, value = words.split()
        assert parse(["find", "Qwen3-0.6B", flag, value]).model == "Qwen3-0.6B"
    assert parse(["find", "Qwen3-0.6B", "--offload"]).offload


def test_every_category_has_its_words():
    assert set(CATEGORY_WORDS) == set(CATEGORIES)


def test_the_tables_of_a_trial_and_of_a_study_have_the_line_and_nothing_acts_in_it():
    cell = QUESTION.cells[0]
    hostile = msgspec.structs.replace(LOGITS, requested_by=f"highwater/{HOSTILE}.py:1 {HOSTILE}")
    result = result_of(hostile, phase=HOSTILE)
    recorded = msgspec.structs.replace(trial(8192, Outcome.OUT_OF_MEMORY), result=result)
    answer = answer_of(cell, 4096, 8192)
    table = answer_table(study_of(trial(4096, Outcome.FIT), recorded, answers=(answer,)))
    (line,) = (note for note in table.footnotes if "no room for 4.00 GiB" in note)
    report = report_of(study_of(recorded))
    rows = dict(trial_table(recorded.spec, result).rows)
    assert "optimizer states 6.00 GiB" in rows["alive on rank 1"]
    for text in (study_page(report), study_markdown(report), rows["out of memory"]):
        assert "no room for 4.00 GiB" in text
    for text in (study_page(report), study_markdown(report), line, *rows.values()):
        assert not {"\x1b", "\u202e"} & set(text)
