"""The guide: the published one cell for cell, what it says where nobody knows."""

import csv
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markup import Page, markdown_rows

from highwater import guide, open_study, predict
from highwater.errors import UsageError
from highwater.memory.capacity_table import PUBLISHED_SETTINGS
from highwater.nouns.capacities import Capacity, study_capacities
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import to_json
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, MemoryOnlyFit, Study, usual_grid
from highwater.pages.chooser import places
from highwater.pages.guide import Guide, guide_tables, published_label
from highwater.pages.guide_page import guide_markdown, guide_page, guide_rows
from highwater.pages.text import escaped
from places import DATA, FOUND, question_of
from tiny_models import write_model
from trial_specs import answer_of

TABLE = DATA / "published_capacity_a100_80gb.csv"
STUDY = FOUND / "qwen3-0.6b-79gib-full.jsonl"
LONG = FOUND / "long-0.6b-79gib.jsonl"
COLUMNS = ("gpu", "gpus", "max_model_len", "model", "settings")
GRID = usual_grid(40960)
ENV_CHUNKED: dict[str, Any] = {"allocator": "expandable", "loss": "chunked"}


def of_rows(*rows: str, folder: Path) -> Guide:
    path = folder / "table.csv"
    lines = ("gpu,settings,gpus,sp,model,max_model_len", *(f"A100-80GB,{row}" for row in rows))
    path.write_text("\n".join(lines))
    return guide(path)


def labels(made: Guide, model: str = "Qwen3-0.6B") -> dict[int, str]:
    rows = [row for row in guide_rows(made) if row["model"] == model]
    return {int(row["max_model_len"]): str(row["settings"]) for row in rows}


def test_the_published_guide_follows_from_the_published_table_cell_for_cell():
    with (DATA / "published_guide_a100_80gb.csv").open(encoding="utf-8", newline="") as file:
        published = [tuple(row.values()) for row in csv.DictReader(file)]
    rows = guide_rows(guide(TABLE))
    assert len(published) == 265
    assert [tuple(str(row[column]) for column in COLUMNS) for row in rows] == published
    assert {row["source"] for row in rows} == {"published"}


def test_offload_is_the_best_of_saving_weights_and_not(tmp_path):
    both = ("env+offload,1,1,Qwen3-0.6B,8192", "env+offload+never,1,1,Qwen3-0.6B,12288")
    offloaded = dict.fromkeys((4096, 8192, 12288), "Env + Offload")
    for rows in (both, both[::-1]):
        assert labels(of_rows(*rows, folder=tmp_path)) == {**offloaded, 16384: "-"}


def test_what_is_named_although_something_simpler_is_unknown_is_marked(tmp_path):
    def page(vanilla: str, env: str) -> str:
        rows = (f"vanilla,1,1,Qwen3-0.6B,{vanilla}", f"env,1,1,Qwen3-0.6B,{env}")
        return guide_markdown(of_rows(*rows, folder=tmp_path))

    marked, simplest = page("", "4096"), page("4096", "")
    assert ["4,096", "expandable ?"] in markdown_rows(marked)
    assert "nobody knows" in marked
    assert ["4,096", "nothing set"] in markdown_rows(simplest), "no rung before it"
    assert "nobody knows" not in guide_markdown(guide(TABLE))


def test_a_table_from_a_spreadsheet_is_read_and_what_one_does_not_know_another_may(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(
        "gpu,settings,gpus,sp,model,max_model_len\r\nA100-80GB,env,1,1,Qwen3-0.6B, \r\n",
        encoding="utf-8-sig",
    )
    assert labels(guide(path)) == {4096: "?"}
    rows = ("vanilla,1,1,Qwen3-0.6B,", "vanilla,1,1,Qwen3-0.6B,4096")
    assert labels(of_rows(*rows, folder=tmp_path)) == {4096: "vanilla", 8192: "-"}


SETTINGS = st.sampled_from(list(PUBLISHED_SETTINGS.values()))
LAYOUTS = st.sampled_from([Layout(gpus=4, ulysses_degree=degree) for degree in (1, 2, 4)])


@st.composite
def tables(draw: st.DrawFn) -> tuple[Capacity, ...]:
    """Capacities of one model on 4 GPUs, with brackets of any width."""
    every = st.builds(Cell, layout=LAYOUTS, settings=SETTINGS)
    named = {"model_name": "m", "config_digest": "d", "device_name": "g", "found_in": "f"}
    named |= {"native_length_tokens": 40960, "source": "measured"}
    found = []
    for cell in draw(st.lists(every, min_size=1, max_size=8, unique=True)):
        fits = draw(st.integers(0, 8))
        fails = draw(st.none() | st.integers(fits + 1, 12))
        edge = {"capacity_tokens": GRID.length(fits) if fits else 0}
        edge["does_not_fit_tokens"] = fails and GRID.length(fails)
        found.append(Capacity(**named, **edge, cell=cell))
    return tuple(found)


@given(tables())
def test_a_column_ends_one_row_after_the_last_length_that_fits_and_claims_no_more_than_is_known(
    capacities,
):
    (table,) = guide_tables(capacities)
    indices = range(1, GRID.index_at_most(max(each.capacity_tokens for each in capacities)) + 2)
    assert [tokens for tokens, _ in table.rows] == [GRID.length(index) for index in indices]
    for tokens, (choice,) in table.rows:
        fitting = [each for each in capacities if each.capacity_tokens >= tokens]
        assert (choice.capacity is None) == (not fitting)
        if choice.capacity is not None:
            least = min(simplicity(each.cell) for each in fitting)
            assert simplicity(choice.capacity.cell) == least
        elif choice.label == "-":
            assert all((each.does_not_fit_tokens or math.inf) <= tokens for each in capacities)


@pytest.mark.parametrize(
    ("gpus", "settings", "label"),
    [
        (2, {}, "SP=2"),
        (1, {}, "vanilla"),
        (2, ENV_CHUNKED, "Env + chunked + SP=2"),
        (1, {**ENV_CHUNKED, "offload": True}, "Env + Offload + chunked"),
    ],
)
def test_our_own_rungs_are_joined_like_the_published_ones(gpus, settings, label):
    layout = Layout(gpus=gpus, ulysses_degree=gpus)
    assert published_label(Cell(layout=layout, settings=Settings(**settings))) == label


def answer(
    cell: Cell, fits: int | None, fails: int | None, memory_only: int | None = None
) -> CellAnswer:
    nothing = {"peak_reserved_bytes": None, "headroom_bytes": None}
    held = memory_only and MemoryOnlyFit(length_tokens=memory_only, **nothing)
    limit = "memory" if fails else "inconclusive"
    return answer_of(cell, fits, fails, limit=limit, memory_only=held)


def guide_of(*answers: tuple[int | None, ...]) -> Guide:
    """The guide of studies of one cell on one GPU, one for each of these answers."""
    asked = msgspec.structs.replace(ONE_GPU, cells=ONE_GPU.cells[:1])
    studies = (Study(question=asked, answers=(answer(asked.cells[0], *each),)) for each in answers)
    found = [each for study in studies for each in study_capacities(study)]
    return Guide(tables=guide_tables(found))


ONE_GPU = question_of(gpus=[1])
IN_MEMORY = {4096: "vanilla", 8192: "vanilla", 12288: "vanilla (memory-only)", 16384: "-"}


def test_a_study_knows_what_its_trials_told_and_no_more():
    question = msgspec.structs.replace(ONE_GPU, simulated=False, device_name="NVIDIA H200")
    vanilla, env, chunked = question.cells
    answers = (answer(vanilla, 8192, 12288), answer(env, None, None))
    found = study_capacities(Study(question=question, answers=answers))
    known = [(each.cell, each.capacity_tokens, each.does_not_fit_tokens) for each in found]
    assert known == [(vanilla, 8192, 12288), (env, 0, None), (chunked, 0, None)]
    ((source, device),) = {(each.source, each.device_name) for each in found}
    assert source == "measured"
    assert re.fullmatch(r"H200-141GB .* 80\.00 GiB", device)
    whole = msgspec.structs.replace(question, memory_budget_bytes=None)
    unbounded = study_capacities(Study(question=whole, answers=answers))
    assert {each.device_name for each in unbounded} == {"H200-141GB"}
    told = {4096: "vanilla", 8192: "vanilla", 12288: "?"}
    assert labels(Guide(tables=guide_tables(found))) == told


def test_a_memory_only_proof_is_named_as_one():
    made = guide_of((8192, 16384, 12288))
    assert labels(made) == IN_MEMORY
    page = guide_markdown(made)
    told = "8,192, 12,288 memory-only"
    assert f"Qwen3-0.6B {told}" in page, "in a summary"
    assert any(told in row for row in markdown_rows(page))
    assert "nothing was trained" in page


@pytest.mark.parametrize("order", [1, -1])
def test_what_one_file_trained_in_full_counts_before_what_memory_holds_in_another(order):
    assert labels(guide_of(*((4096, 16384, 12288), (8192, 16384))[::order])) == IN_MEMORY


def test_what_was_simulated_is_not_said_to_be_measured():
    page = guide_markdown(guide_of((8192, 12288)))
    assert "simulated" in page
    assert "measured" not in page


def test_predicted_measured_and_published_stand_in_tables_of_their_own():
    made = guide(TABLE, STUDY, predict=["Qwen3-0.6B"], gpus=["1xA100-80GB"])
    ones = [(each.device_name.split()[0], each.source) for each in made.tables if each.gpus == 1]
    assert ones == [
        *(("A100-80GB", "published"), ("H200-141GB", "measured"), ("A100-80GB", "predicted"))
    ]
    for table in made.tables:
        assert {each.source for each in table.capacities} == {table.source}
    sections = r"(?m)^## .*: (published|measured|predicted) \("
    assert re.findall(sections, guide_markdown(made)) == ["published", "measured", "predicted"]


def test_two_models_of_one_name_are_refused_with_a_guide_of_each(tmp_path):
    other = str(write_model(tmp_path / "Qwen3-0.6B", max_position_embeddings=40960))
    with pytest.raises(UsageError, match=r"a model Qwen3-0\.6B, .* two") as refused:
        guide(TABLE, predict=[other], gpus=["1xA100-80GB"])
    assert [shlex.split(words) for words in refused.value.hint.split("`")[1::2]] == [
        ["highwater", "guide", str(TABLE)],
        ["highwater", "guide", "--predict", other, "--gpus", "1xA100-80GB"],
    ]
    assert guide(TABLE).tables
    assert guide(predict=[other], gpus=["1xA100-80GB"]).tables
    path = tmp_path / "p.json"
    path.write_text(to_json(predict(other, gpus="1xA100-80GB")))
    with pytest.raises(UsageError, match="two models"):
        guide(STUDY, path)


def test_what_speaks_against_an_answer_is_said_too(tmp_path):
    lines = [json.loads(line) for line in STUDY.read_text().splitlines()]
    answered = next(line["answer"] for line in lines if line["kind"] == "cell_answered")
    against = "6,000 tokens did not fit, 7,000 tokens did"
    answered |= {"monotone": False, "contradictions": [against]}
    path = tmp_path / "s.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    made = guide(path)
    said = f"{path}: {open_study(path).answers[0].cell.label}: not monotone: {against}"
    assert said in made.notes
    assert escaped(said) in guide_markdown(made)


def test_another_trainer_and_another_objective_stand_in_tables_of_their_own():
    ours = guide(predict=["Qwen3-0.6B"], gpus=["1xA100-80GB"])
    theirs = guide(predict=["Qwen3-0.6B"], gpus=["1xA100-80GB"], trainer="trinity")
    sources = [STUDY, FOUND / "grpo-0.6b-1.jsonl"]
    trained = [table.training.split(", ")[:2] for table in (ours.tables[0], theirs.tables[0])]
    assert trained == [["highwater", "sft"], ["Trinity-RFT", "grpo with entropy"]]
    assert len({table.training for table in guide(*sources).tables}) == 2


def test_gpu_counts_are_the_trainers_and_one_gpu_is_warned_of_once():
    page = guide_markdown(guide(TABLE))
    assert "the trainer alone" in page
    (warning,) = re.findall(r".*Warning: .*", page)
    assert ": Qwen3-4B, Qwen3-8B, Qwen3-14B." in warning
    assert "Warning: " not in guide_markdown(guide(predict=["Qwen3-0.6B"], gpus=["2xA100-80GB"]))


def test_the_configuration_for_long_contexts_and_token_budgets_are_that_trainers():
    page = guide_markdown(guide(TABLE))
    model = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])["model"]
    assert model["model_path"] == "${oc.env:MODEL_PATH,Qwen/Qwen3-0.6B}"
    assert {"max_prompt_tokens", "max_model_len"} < set(model)
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 40960}
    assert model["rope_scaling"] == yarn | {"factor": "${oc.decode:${oc.env:FACTOR}}"}
    assert "51,200: 1.25, 61,440: 1.5" in page
    assert "reaches the rollout alone" in page
    page = guide_markdown(guide(TABLE))
    for name in ("ppo_max_token_len", "log_prob_max_token_len", "trainer.max_token_len"):
        assert f"{name}_per_gpu" in page
    assert "use_dynamic_bsz" in page
    assert ["4", "61,440", "30,720"] in markdown_rows(page), "of 122,880 tokens"


@pytest.mark.parametrize(
    ("fits", "fails", "shown"),
    [
        *((0, None, "?"), (0, 4096, "-"), (0, 16384, "&lt; 16,384")),
        *((8192, None, "≥8,192"), (8192, 9000, "8,192")),
    ],
)
def test_a_capacity_says_how_much_is_known(fits, fails, shown):
    page = guide_markdown(guide_of((fits, fails))).partition("## Capacities")[2]
    assert ["1", "1", shown] in markdown_rows(page)


def test_a_guide_of_other_trainings_is_made_of_their_predictions(tmp_path):
    path = tmp_path / "p.json"
    for settings, said in (
        ({"lora": 16, "lora_base": "nf4"}, "LoRA of rank 16 beside a model in NF4"),
        ({"optimizer": "adamw-8bit"}, "moments of 8 bits"),
    ):
        path.write_bytes(msgspec.json.encode(predict("Qwen3-4B", gpus="1xRTX-4090", **settings)))
        (table,) = guide(path).tables
        assert said in table.training


@pytest.fixture(scope="module")
def made() -> Guide:
    return guide(TABLE, predict=["Qwen3-0.6B", "Qwen3-8B"], gpus=["4xH200-141GB"])


def test_a_page_has_every_row_of_the_guide(made):
    seen: list[tuple[int, str, list[str]]] = []
    rows = iter(Page(guide_page(made)).rows)
    for table in made.tables:
        assert next(row for row in rows if row[0] == "max_model_len")[1:] == list(table.models)
        for tokens, choices in table.rows:
            length, *cells = next(rows)
            seen.append((table.gpus, length, cells))
            assert length == f"{tokens:,}"
            shown = [cell.removesuffix(" ?") for cell in cells]
            assert shown == [choice.label for choice in choices]
    assert not any(row[0] == "max_model_len" for row in rows)
    nothing, env, host = "nothing set", "expandable", "expandable, states on host"
    assert (2, "16,384", [nothing, nothing, env, host, host]) in seen


def test_a_bar_is_as_long_as_its_length_and_shows_what_was_trained(made):
    text = guide_page(guide(TABLE))
    assert '<td class="figure">122,880*</td>' in text
    (bar,) = re.findall(r"<span>4 GPUs, [^:]*: 122,880</span><span class=.bar.>(.*?)</span>", text)
    assert 'style="width:100.0%"' in bar
    text = guide_page(guide(LONG, FOUND / "qwen3-0.6b-79gib-chunked.jsonl"))
    trained = round(262144 / 671744 * 100, 1)
    held = f'<span class="memory-only" style="width:{round(100 - trained, 1)}%"></span>'
    said = "Qwen3-0.6B: 262,144, 671,744 memory-only"
    bar = f'<span class="bar"><span style="width:{trained}%"></span>{held}</span>'
    assert f"<span>1 GPU, {said}</span>{bar}" in text
    (summary,) = re.findall("<summary>(.* memory-only)</summary>", text)
    assert summary.endswith(f", measured: {said.replace(': ', ' ')}")


def test_a_page_opens_with_the_longest_length_and_its_contents_come_later(made):
    found_places = places(made)
    first, text = found_places[0], guide_page(made, found_places)
    assert first.longest_tokens is not None
    page = Page(text)
    assert f"{first.model_name} trains {first.longest_tokens:,} tokens" in page.text("p")
    order = ['id="choose-length"', 'id="answer-said"', 'aria-label="Contents"']
    found = [text.index(each) for each in (*order, 'id="words"', "<table")]
    assert found == sorted(found)


def test_speed_is_predicted_for_our_own_trainer_and_labelled_so(made):
    rows = [row for row in guide_rows(made) if row["tokens_per_s"]]
    assert {(row["speed_source"], row["source"]) for row in rows} == {("predicted", "predicted")}
    trained = [row for row in guide_rows(made) if row["source"] == "predicted"]
    assert all((row["settings"] in "-?") == (row["tokens_per_s"] is None) for row in trained)
    last = [row for row in rows if row["model"] == "Qwen3-8B"][-1]
    shown = f"{last['tokens_per_s']:,.0f} at {last['max_model_len']:,}: "
    text = guide_page(made, places(made))
    assert f'<td class="figure">{shown}' in text.replace("figure ", "figure")
    assert shown in guide_markdown(made)
    assert "Tokens a second, predicted" in Page(text).text("caption")


def test_text_from_outside_begins_no_heading_and_no_list():
    lines = [f"- {escaped(each)}" for each in ("# a", "- b", "+ c", "#d")]
    page = MarkdownIt().render("\n".join(lines))
    assert (page.count("<ul>"), page.count("<li>"), page.count("<h1>")) == (1, 4, 0)
    assert escaped("-") == "-", "nothing fits, in a table"
