"""The page that answers without a server, opened from a disk."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHOTS, WIDTHS, check

from highwater.memory.capacity import Prediction
from highwater.nouns.codec import from_json
from highwater.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from answers_page import page as page_of
from answers_page import places_of

pytestmark = pytest.mark.pages
ASKED = (
    ("Qwen3-0.6B", "RTX-4090", "1", "all parameters", "32k"),
    ("Qwen3-0.6B", "A100-80GB", "4", "LoRA of rank 16", "131,072"),
    ("Qwen3-0.6B", "RTX-4090", "4", "QLoRA of rank 16", "40960"),
    ("Mixtral-8x7B-v0.1", "A100-80GB", "4", "LoRA of rank 16, on attention", "4096"),
    ("Mixtral-8x7B-v0.1", "RTX-4090", "1", "all parameters", "4096"),
)
"""Choices and a length, as they are typed; the last has no answer but no."""


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models, gpus, counts = ("Qwen3-0.6B", "Mixtral-8x7B-v0.1"), ("RTX-4090", "A100-80GB"), (1, 4)
    path = tmp_path_factory.mktemp("answers") / "index.html"
    path.write_text(
        page_of([each for name in models for each in places_of(name, gpus=gpus, counts=counts)])
    )
    return path


def shown(page):
    page.locator("#choosing").wait_for()
    return page


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked[:3]))
def test_what_is_shown_is_what_predict_says(answering, opened, asked):
    page = shown(opened(answering))
    for name, value in zip(("model", "gpu", "gpus", "basis"), asked, strict=False):
        page.locator(f"#choose-{name}").select_option(value)
    page.locator("#choose-length").fill(asked[-1])
    words = shlex.split(page.locator("#command").inner_text())
    assert words[:3] == ["highwater", "predict", asked[0]]
    assert words[words.index("--gpus") + 1] == f"{asked[2]}x{asked[1]}"
    done = subprocess.run(
        [sys.executable, "-m", *words, "--json"], capture_output=True, text=True, check=False
    )
    answer, said = from_json(done.stdout, Prediction).answer, page.locator("#answer-said")
    if answer is None:
        assert said.inner_text().startswith(f"No: {asked[0]} does not train at 4,096 tokens")
        assert not page.locator("#answer-configuration").is_visible()
        return
    assert answer.capacity_tokens == json.loads(done.stdout)["length_tokens"]
    peak = format_bytes(answer.footprint.needed_bytes)
    assert f"{answer.risk}, peak {peak}, {format_bytes(answer.headroom_bytes)} left" in (
        said.inner_text()
    )
    tables = page.locator("#answer-tables").inner_text()
    assert answer.cell.words in tables
    assert f"{format_bytes(answer.footprint.needed_bytes)} needed of " in tables
    assert f"{answer.step.tokens_per_s:,.0f} tokens/s" in tables
    assert "axolotl" in page.locator("#choose-configuration").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(WIDTHS))
def test_it_has_no_serious_finding_and_never_scrolls_sideways(answering, opened, screen, scheme):
    page = shown(opened(answering, width=WIDTHS[screen], scheme=scheme))
    page.screenshot(path=SHOTS / f"answers-{screen}-{scheme}.png", full_page=True)
    check(page, screen)
    box = page.locator("#choose-length").bounding_box()
    assert box["y"] + box["height"] <= 844, "all choices are on the first screen of a phone"


def test_everything_is_asked_and_copied_by_keyboard(answering, opened):
    page = shown(opened(answering))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.id")
        reached.append(name)
        if name == "choose-gpu":
            page.keyboard.press("ArrowDown")
        if name == "choose-length":
            page.keyboard.press("Control+A")
            page.keyboard.type("16k")
        if name == "copy-configuration":
            page.keyboard.press("Enter")
            break
    assert [name for name in reached if name] == [
        *[f"choose-{name}" for name in ("model", "gpu", "gpus", "basis", "length")],
        "choose-configuration",
        "copy-configuration",
    ]
    page.get_by_text("Copied.").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("highwater try Qwen3-0.6B --gpus 1 ")
    assert "--length 16384" in copied
    assert "trains 16,384 tokens on 1 x A100-80GB" in page.locator("#answer-said").inner_text()


def test_a_reader_hears_of_every_new_answer(answering, opened):
    page = shown(opened(answering))
    assert page.locator("#answer-said").get_attribute("role") == "status"
    before = page.locator("#answer-said").inner_text()
    page.locator("#choose-gpus").select_option("4")
    assert page.locator("#answer-said").inner_text() != before


def test_where_nothing_fits_the_fewest_gpus_that_would_do_are_named(answering, opened):
    page = shown(opened(answering))
    page.locator("#choose-gpu").select_option("RTX-4090")
    page.locator("#choose-length").fill("512k")
    said = page.locator("#answer-said").inner_text()
    tokens = "524,288 tokens (12.8 x native 40,960)"
    assert said.startswith(f"No: Qwen3-0.6B does not train at {tokens} on 1 x RTX-4090")
    assert "What would fit: 4 x RTX-4090 with " in said


def test_a_browser_that_cannot_unpack_it_is_told_what_it_needs(answering, opened, browser):
    assert opened(answering, script=False).locator("#without-script").is_visible()
    context = browser.new_context()
    context.add_init_script("delete window.DecompressionStream")
    page = context.new_page()
    page.goto(answering.as_uri())
    assert page.locator("#without-script").is_visible()
    assert not page.locator("#choosing").is_visible()
    assert "Firefox 113" in page.locator("#without-script").inner_text()
    context.close()
    assert not shown(opened(answering)).locator("#without-script").is_visible()
