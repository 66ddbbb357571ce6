"""A guide's page says of 60 combinations what ``predict`` and ``guide --json`` say of them."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_chooser_in_a_browser import ask, lengths, said

from highwater import guide, predict, write_guide
from highwater.memory.capacity import Prediction
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import to_json
from highwater.nouns.study import Cell
from highwater.pages.guide import Guide, published_label
from highwater.pages.guide_page import guide_rows
from highwater.pages.prediction_tables import prediction_answer
from highwater.units import format_tokens
from setting_words import other_words

pytestmark = [pytest.mark.pages, pytest.mark.timeout(1200)]
MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Llama-3.1-8B")
KINDS, COUNTS = ("A100-80GB", "H200-141GB"), (1, 2, 8)
TRAININGS: dict[str, dict[str, Any]] = {"all": {}, "LoRA": {"lora": 16}}


class Place(NamedTuple):
    model: str
    kind: str
    gpus: int
    training: str

    def predicted(self, **more: Any) -> Prediction:
        where = f"{self.gpus}x{self.kind}"
        return predict(self.model, gpus=where, **TRAININGS[self.training], **more)

    def chosen_on(self, page: Any) -> None:
        for name, value in (("model", self.model), ("gpu", self.kind), ("gpus", str(self.gpus))):
            page.locator(f"#choose-{name}").select_option(value)
        bases = page.locator("#choose-basis option").all_inner_texts()
        (basis,) = (each for each in bases if ("LoRA" in each) == (self.training == "LoRA"))
        page.locator("#choose-basis").select_option(basis)


PLACES = [Place(*each) for each in product(MODELS, KINDS, COUNTS, TRAININGS)]


@pytest.fixture(scope="module")
def predictions() -> dict[Place, Prediction]:
    assert len(PLACES) == 60
    return {place: place.predicted() for place in PLACES}


@pytest.fixture(scope="module")
def made(predictions: dict[Place, Prediction], tmp_path_factory: pytest.TempPathFactory) -> Guide:
    """One guide of all of them, from what ``predict --json`` printed."""
    folder = tmp_path_factory.mktemp("predictions")
    files = [folder / f"{number}.json" for number in range(len(predictions))]
    for file, prediction in zip(files, predictions.values(), strict=True):
        file.write_text(to_json(prediction))
    return guide(*files)


@pytest.fixture(scope="module")
def written(made: Guide, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guide(tmp_path_factory.mktemp("guide") / "guide.html", made)


def test_every_combination_is_answered_as_predict_answers_it(predictions, written, opened):
    page = opened(written)
    for place, prediction in predictions.items():
        place.chosen_on(page)
        longest = prediction.answer and prediction.answer.capacity_tokens
        answered = lengths(page)
        if longest:
            ask(page, "")
            page.locator("#choose-length").blur()
            assert page.locator("#choose-length").input_value() == format_tokens(longest), place
        for length in {longest or answered[0], answered[len(answered) // 2]}:
            ask(page, length)
            asked = place.predicted(length=length)
            if asked.answer is None:
                assert said(page).startswith("No: "), place
            else:
                assert said(page) == prediction_answer(asked), place
                assert page.locator("#answer-for").inner_text().startswith(asked.answer.cell.label)
            assert other_words(page.locator("#answer-tables").inner_text()) == {}
            assert other_words(said(page)) == {}


def test_every_row_is_the_simplest_predicted_and_of_the_json(predictions, made, written, opened):
    rows = iter(guide_rows(made))
    shown = tables(opened(written))
    for table, (columns, *lines) in zip(made.tables, shown, strict=True):
        assert columns == ["max_model_len", *table.models]
        training = "LoRA" if "LoRA" in table.training else "all"
        for length, *entries in lines:
            tokens = int(length.replace(",", ""))
            for model, entry in zip(table.models, entries, strict=True):
                place = Place(model, table.device_name, table.gpus, training)
                wanted, cell = simplest_of(predictions[place], tokens)
                assert entry == wanted, (place, tokens)
                row = next(rows)
                assert (row["gpus"], row["max_model_len"], row["model"]) == (
                    *(table.gpus, tokens, model),
                )
                assert row["settings"] == (entry if cell is None else published_label(cell))
    assert next(rows, None) is None


def simplest_of(prediction: Prediction, tokens: int) -> tuple[str, Cell | None]:
    """What a table has to say of a length, and the simplest cell that fits it."""
    cells = sorted(prediction.cells, key=lambda each: simplicity(each.cell))
    is_open = False
    for each in cells:
        if each.capacity_tokens >= tokens:
            return f"{each.cell.words}{' ?' * is_open}", each.cell
        too_long = each.does_not_fit_tokens
        is_open |= too_long is None or tokens < too_long  # it was not asked of every length
    return "?" if is_open else "-", None


def tables(page: Any) -> list[list[list[str]]]:
    every = page.evaluate(
        """() => [...document.querySelectorAll("main table")].map((table) =>
          [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim())))"""
    )
    return [table for table in every if table[0][0] == "max_model_len"]


def test_no_neighbour_with_less_is_said_to_train_longer(predictions, written, opened):
    page = opened(written)
    shown = dict(bars(page))
    reached = {}
    for place in predictions:
        place.chosen_on(page)
        page.locator("#choose-length").blur()
        reached[place] = int(page.locator("#choose-length").input_value().replace(",", ""))
    for place, longest in reached.items():
        more = [place._replace(gpus=gpus) for gpus in COUNTS if gpus > place.gpus]
        more += [place._replace(kind=KINDS[1])] if place.kind == KINDS[0] else []
        more += [place._replace(training="LoRA")] if place.training == "all" else []
        for other in more:
            assert reached[other] >= longest, (place, other)
    assert shown
    for columns, *lines in tables(page):
        for column in range(1, len(columns)):
            none = [line[column] == "-" for line in lines]
            assert none == sorted(none), "what fits at a length fits at shorter ones"


def bars(page: Any) -> Iterator[tuple[str, int]]:
    for text in page.locator(".bars li > span:first-child").all_inner_texts():
        label, _, length = text.rpartition(": ")
        yield label, int(re.sub(r"\D", "", length) or 0)


def test_the_whole_page_has_one_word_for_each_setting(written, opened):
    text = opened(written).evaluate(
        """() => {
          for (const each of document.querySelectorAll("details")) each.open = true;
          for (const each of document.querySelectorAll("pre")) each.remove();
          return document.body.innerText;
        }"""
    )
    assert "Ulysses 2" in text
    assert other_words(text) == {}
