"""The chooser in a browser: every combination shows what ``recommend`` and ``emit`` print."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from places import captured

pytestmark = pytest.mark.pages
CHOICES = ("model", "gpu", "gpus", "basis")


def printed(*words: str) -> str:
    here = {**os.environ, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    return captured(
        [sys.executable, "-m", "highwater", *words],
        env=here,
    ).stdout


def lengths(page: Any) -> list[int]:
    """Lengths that the page answers in full for what is chosen."""
    return page.evaluate(
        """() => {
          const { places } = JSON.parse(document.getElementById("chooser-data").textContent);
          const [model, gpu, gpus, basis] = ["model", "gpu", "gpus", "basis"]
            .map((name) => document.getElementById(`choose-${name}`).value);
          return places.find((each) => each.model === model && each.gpu === gpu
            && String(each.gpus) === gpus && each.basis === basis)
            .answers.map(({ length }) => length);
        }"""
    )


def ask(page: Any, length: int | str) -> None:
    page.locator("#choose-length").fill(str(length))


def said(page: Any) -> str:
    return page.locator("#answer-said").inner_text()


def combinations(page: Any, *names: str) -> Iterator[dict[str, str]]:
    """Every one, chosen in the page as a person does, one list after the other."""
    name, *later = names or CHOICES
    select = page.locator(f"#choose-{name}")
    for value in select.locator("option").evaluate_all(
        "each => each.map((option) => option.value)"
    ):
        if select.is_visible():  # the one choice of training is not asked for
            select.select_option(value)
        if later:
            for rest in combinations(page, *later):
                yield {name: value, **rest}
        else:
            for length in lengths(page):
                ask(page, length)
                yield {name: value, "length": str(length)}


def recommended(*words: str) -> dict[str, Any]:
    answer = json.loads(printed("recommend", *words, "--json"))
    del answer["candidates"]
    return answer


def test_every_answer_is_what_recommend_prints(small, opened):
    page = opened(small)
    seen = 0
    for chosen in combinations(page):
        gpus = f"{chosen['gpus']}x{chosen['gpu']}"
        words = (chosen["model"], "--gpus", gpus, "--length", chosen["length"])
        answer = recommended(*words)
        shown = page.locator("#answer-json").evaluate("each => each.textContent")
        assert json.loads(shown) == answer
        command = shlex.join(("highwater", "recommend", *words))
        assert page.locator("#command").inner_text() == command
        if answer["chosen"] is None:
            assert said(page).startswith("No: ")
        else:
            tokens = f"{int(chosen['length']):,} tokens"
            assert re.search(rf" trains {tokens}( \([\d.]+ x native [\d,]+\))? on ", said(page))
        seen += 1
    assert seen > 40


def test_what_was_chosen_stays_where_the_next_choice_has_it(mixed, opened):
    page = opened(mixed)
    page.locator("#choose-model").select_option("Qwen3-8B")
    page.locator("#choose-gpu").select_option("A100-80GB")
    page.locator("#choose-gpus").select_option("4")
    ask(page, "40960")
    page.locator("#choose-model").select_option("Qwen3-0.6B")
    kept = [page.locator(f"#choose-{name}").input_value() for name in ("gpu", "gpus", "length")]
    assert kept == ["A100-80GB", "4", "40960"]


def test_a_length_that_does_not_fit_elsewhere_says_so(mixed, opened):
    page = opened(mixed)
    page.locator("#choose-model").select_option("Qwen3-0.6B")
    page.locator("#choose-gpu").select_option("A100-80GB")
    page.locator("#choose-gpus").select_option("4")
    ask(page, "120k")
    assert said(page).startswith("Yes: Qwen3-0.6B trains 122,880 tokens")
    page.locator("#choose-gpus").select_option("1")
    assert not page.locator("#answer-said").is_visible() or said(page).startswith("No: ")
    assert page.locator("#choose-length").input_value() == "120k"


def test_any_length_is_answered_by_the_next_longer_one_and_names_its_command(small, opened):
    page = opened(small)
    page.locator("#choose-model").select_option("Qwen3-14B")
    page.locator("#choose-gpus").select_option("4")
    ask(page, "15,000")
    assert (
        "the next length that this page answers in full" in page.locator("#answer-for").inner_text()
    )
    *_, flag, length = shlex.split(page.locator("#command").inner_text())
    assert (flag, length) == ("--length", "15000")


def test_what_is_no_length_changes_nothing_and_a_longer_one_names_the_command(small, opened):
    page = opened(small)
    before, answer = page.locator("#choose-length").input_value(), said(page)
    ask(page, "long")
    assert said(page) == answer
    assert page.locator("#choose-length").get_attribute("aria-invalid") == "true"
    page.locator("#choose-model").focus()
    assert page.locator("#choose-length").input_value() == before
    ask(page, "8m")
    assert not page.locator("#answer").is_visible()
    assert "--length 8388608" in page.locator("#beyond-command").inner_text()


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_button_copies_what_emit_prints(configured, opened, key):
    page = opened(configured)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copied = 0
    for length in map(str, lengths(page)[:2]):
        ask(page, length)
        for target in page.locator("#choose-configuration option").all_inner_texts():
            page.locator("#choose-configuration").select_option(target)
            page.locator("#copy-configuration").focus()
            page.keyboard.press(key)
            page.get_by_text("Copied.").wait_for()
            words = ("--for", target, "Qwen3-14B", "--gpus", "2xA100-80GB", "--length", length)
            assert page.evaluate("navigator.clipboard.readText()") == printed("emit", *words)
            copied += 1
    assert copied == 4


def test_where_the_clipboard_is_closed_the_text_is_selected(configured, opened):
    page = opened(configured)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.locator("#copy-configuration").click()
    page.get_by_text("Selected: copy it with the keyboard.").wait_for()
    assert (
        page.evaluate("getSelection().toString()").strip()
        == page.locator("#configuration").inner_text().strip()
    )
