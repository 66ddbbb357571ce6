"""The chooser in a browser: for every combination that it offers it shows what ``recommend`` and
``emit`` print.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Opened

pytestmark = pytest.mark.pages
CHOICES = ("model", "gpu", "gpus", "basis", "length")


def printed(*words: str) -> str:
    """What the command line prints."""
    here = {**os.environ, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "highwater", *words],
        capture_output=True,
        text=True,
        env=here,
        check=False,
    ).stdout


def combinations(page: Any, *names: str) -> Iterator[dict[str, str]]:
    """Every one, chosen in the page as a person does, one list after the other."""
    name, *later = names or CHOICES
    select = page.locator(f"#choose-{name}")
    for value in select.locator("option").evaluate_all(
        "each => each.map((option) => option.value)"
    ):
        if select.is_visible():  # the one choice of training is not asked for
            select.select_option(value)
        for rest in combinations(page, *later) if later else ({},):
            yield {name: value, **rest}


def shown(page: Any) -> dict[str, Any]:
    """The whole answer."""
    return json.loads(page.locator("#answer-json").evaluate("each => each.textContent"))


def recommended(*words: str) -> dict[str, Any]:
    """What ``recommend --json`` prints, but the candidates."""
    answer = json.loads(printed("recommend", *words, "--json"))
    del answer["candidates"]
    return answer


def test_every_answer_is_what_recommend_prints(small: Path, opened: Opened) -> None:
    page = opened(small)
    seen = 0
    for chosen in combinations(page):
        words = (
            chosen["model"],
            "--gpus",
            f"{chosen['gpus']}x{chosen['gpu']}",
            "--length",
            chosen["length"],
        )
        answer = recommended(*words)
        assert shown(page) == answer
        assert page.locator("#command").inner_text() == shlex.join(
            ("highwater", "recommend", *words)
        )
        said = page.locator("#answer-said").inner_text()
        if answer["chosen"] is None:
            assert said == "Nothing that is known fits."
            assert (
                page.locator("#answer-tables").get_by_text("what would do: predicted").count() == 1
            )
        else:
            assert said.endswith(f": {answer['chosen']['source']}")
        seen += 1
    assert seen > 40


def test_the_tables_are_those_that_recommend_prints(small: Path, opened: Opened) -> None:
    page = opened(small)
    for length in ("4096", "65536", "131072"):
        page.locator("#choose-model").select_option("Qwen3-14B")
        page.locator("#choose-gpus").select_option("4")
        page.locator("#choose-length").select_option(length)
        text = " ".join(
            printed("recommend", "Qwen3-14B", "--gpus", "4xA100-80GB", "--length", length).split()
        )
        cells = page.locator(
            "#answer-tables :is(caption, th, td), #answer-notes li"
        ).all_inner_texts()
        assert [cell for cell in cells if " ".join(cell.split()) not in text.replace("`", "")] == []
        assert len(cells) > 15


def test_every_answer_from_trials_is_what_recommend_prints_with_the_study(
    mixed: Path, opened: Opened
) -> None:
    page = opened(mixed)
    seen = 0
    for chosen in combinations(page):
        if not chosen["basis"].endswith("measured, else predicted"):
            continue
        program, verb, *words = shlex.split(page.locator("#command").inner_text())
        assert (program, verb) == ("highwater", "recommend")
        assert shown(page) == recommended(*words)
        seen += 1
    assert seen > 8


def test_what_was_chosen_stays_where_the_next_choice_has_it(mixed: Path, opened: Opened) -> None:
    page = opened(mixed)
    page.locator("#choose-model").select_option("Qwen3-8B")
    page.locator("#choose-gpu").select_option("A100-80GB")
    page.locator("#choose-gpus").select_option("4")
    page.locator("#choose-length").select_option("40960")
    page.locator("#choose-model").select_option("Qwen3-0.6B")
    kept = {name: page.locator(f"#choose-{name}").input_value() for name in CHOICES}
    assert (kept["gpu"], kept["gpus"], kept["length"]) == ("A100-80GB", "4", "40960")


def test_it_opens_with_what_the_tables_answer_and_so_it_does_for_every_model_and_gpu(
    mixed: Path, opened: Opened
) -> None:
    page = opened(mixed)
    seen = set()
    for name in ("model", "gpu", "gpus"):
        for value in page.locator(f"#choose-{name} option").evaluate_all(
            "each => each.map((option) => option.value)"
        ):
            page.locator(f"#choose-{name}").select_option(value)
            entries = page.locator("#answer-entries").inner_text()
            assert entries.startswith("In the tables of this guide: ")
            assert "nothing that was tried fits" not in entries
            assert "nobody knows" not in entries
            assert not page.locator("#answer-said").inner_text().startswith("Nothing")
            seen.add(page.locator("#choose-length").input_value())
    assert len(seen) > 1


def test_a_length_that_another_model_does_not_reach_becomes_the_longest_that_it_does(
    mixed: Path, opened: Opened
) -> None:
    page = opened(mixed)
    page.locator("#choose-model").select_option("Qwen3-0.6B")
    page.locator("#choose-gpu").select_option("A100-80GB")
    page.locator("#choose-gpus").select_option("4")
    assert page.locator("#choose-length").input_value() == "40960", (
        "the native length, before any is chosen"
    )
    page.locator("#choose-gpus").select_option("1")
    page.locator("#choose-length").select_option("28672")
    page.locator("#choose-model").select_option("Qwen3-14B")
    assert page.locator("#choose-length").input_value() == "28672", (
        "a row of that table too: it says what does not fit"
    )
    page.locator("#choose-model").select_option("Qwen3-0.6B")
    page.locator("#choose-gpus").select_option("4")
    page.locator("#choose-length").select_option("122880")
    page.locator("#choose-gpus").select_option("1")
    assert page.locator("#choose-length").input_value() == "28672"


def test_published_answers_are_labelled_so(mixed: Path, opened: Opened) -> None:
    page = opened(mixed)
    page.locator("#choose-model").select_option("Qwen3-8B")
    page.locator("#choose-gpu").select_option("A100-80GB")
    page.locator("#choose-gpus").select_option("4")
    page.locator("#choose-length").select_option("102400")
    assert (
        page.locator("#choose-basis").input_value() == "Trinity-RFT, grpo with entropy: published"
    )
    assert page.locator("#answer-said").inner_text() == "Env + Offload, 4 GPUs, SP=4: published"
    assert not page.locator("#answer-again").is_visible()
    assert "max_token_len_per_gpu: 51200" in page.locator("#configuration").inner_text()


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_button_copies_what_emit_prints(configured: Path, opened: Opened, key: str) -> None:
    page = opened(configured)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copied = 0
    lengths = page.locator("#choose-length option").evaluate_all(
        "each => each.map((option) => option.value)"
    )
    for length in lengths[:2]:
        page.locator("#choose-length").select_option(length)
        for target in page.locator("#choose-configuration option").all_inner_texts():
            page.locator("#choose-configuration").select_option(target)
            page.locator("#copy-configuration").focus()
            page.keyboard.press(key)
            page.get_by_text("Copied.").wait_for()
            words = ("--for", target, "Qwen3-32B", "--gpus", "2xA100-80GB", "--length", length)
            assert page.evaluate("navigator.clipboard.readText()") == printed("emit", *words)
            copied += 1
    assert copied == 4


def test_where_the_clipboard_is_closed_the_text_is_selected(
    configured: Path, opened: Opened
) -> None:
    page = opened(configured)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.locator("#copy-configuration").click()
    page.get_by_text("Selected: copy it with the keyboard.").wait_for()
    assert (
        page.evaluate("getSelection().toString()").strip()
        == page.locator("#configuration").inner_text().strip()
    )
