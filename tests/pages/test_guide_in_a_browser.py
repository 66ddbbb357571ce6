"""A guide's page as people read it."""

import msgspec
import pytest
from conftest import SHOTS, WIDTHS, check, every_fold_open

from highwater import guide
from highwater.pages.chooser import places
from highwater.pages.guide import Guide, guide_tables
from highwater.pages.guide_page import guide_page

pytestmark = pytest.mark.pages


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(WIDTHS))
def test_a_page_has_no_serious_finding_and_never_scrolls_sideways(mixed, opened, screen, scheme):
    page = opened(mixed, width=WIDTHS[screen], scheme=scheme)
    page.screenshot(path=SHOTS / f"guide-{screen}-{scheme}.png", full_page=True)
    check(page, screen)
    with every_fold_open(page):
        check(page, screen)


@pytest.mark.parametrize("screen", list(WIDTHS))
def test_bars_and_their_figures_are_on_the_screen(mixed, opened, screen):
    page = opened(mixed, width=WIDTHS[screen])
    ends = page.locator(".bars span").evaluate_all(
        "each => each.map((span) => span.getBoundingClientRect().right)"
    )
    assert len(ends) > 40
    assert max(ends) <= WIDTHS[screen]
    cut = page.locator(".bars li > span").evaluate_all(
        "each => each.filter((span) => span.scrollWidth > span.clientWidth + 1).length"
    )
    assert cut == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_of_a_phone_has_the_answer_and_the_length(mixed, opened, scheme):
    page = opened(mixed, width=WIDTHS["phone"], scheme=scheme)
    page.screenshot(path=SHOTS / f"guide-first-screen-{scheme}.png")
    for name in ("answer-said", "choose-length"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 844, name
        assert box["x"] + box["width"] <= WIDTHS["phone"], name


def test_what_is_dark_is_dark(mixed, opened):
    shades = {
        scheme: opened(mixed, scheme=scheme).evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        for scheme in ("light", "dark")
    }
    assert shades == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


def test_without_script_a_page_says_what_to_do_instead_and_has_every_table(mixed, opened):
    with_script, without = opened(mixed), opened(mixed, script=False)
    assert without.locator("#without-script").is_visible()
    assert not without.locator("#choosing").is_visible()
    assert not with_script.locator("#without-script").is_visible()
    assert with_script.locator("#choosing").is_visible()
    both = [page.locator("#answer-said").inner_text() for page in (without, with_script)]
    assert both[0] == both[1], "the answer is there without, and the same"
    static = "main table:not(#answer table)"
    assert without.locator(static).count() == with_script.locator(static).count() > 20


def test_paper_has_what_is_folded_and_no_buttons(mixed, opened):
    page = opened(mixed)
    inside = page.locator("#answer-json")
    assert not inside.is_visible()
    page.emulate_media(media="print")
    assert inside.is_visible()
    assert not page.locator("#copy-configuration").is_visible()
    assert not page.locator("#choose-model").is_visible()
    assert page.locator("#answer-said").is_visible()
    page.pdf(path=SHOTS / "guide.pdf")


def test_a_keyboard_reaches_every_choice_in_order_and_the_answer_follows(mixed, opened):
    page = opened(mixed)
    page.locator("#choose-model").focus()
    reached = []
    for _ in range(5):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert reached == [f"choose-{name}" for name in ("model", "gpu", "gpus", "basis", "length")]
    first = page.locator("#answer-said").inner_text()
    page.locator("#choose-length").fill("4k")
    assert page.locator("#answer-said").inner_text() != first
    assert page.locator("#answer-said").get_attribute("role") == "status"


def test_a_keyboard_sees_where_it_is(mixed, opened):
    page = opened(mixed)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("#choose-model").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_text_from_outside_does_nothing_in_a_browser(opened, tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    (table,) = guide(predict=["Qwen3-0.6B"], gpus=["1xA100-80GB"]).tables
    own = tuple(
        msgspec.structs.replace(
            each, model_name=hostile, device_name=hostile, found_in=hostile, source="published"
        )
        for each in table.capacities
    )
    made = Guide(tables=guide_tables(own), notes=(hostile,))
    path = tmp_path / "hostile.html"
    path.write_text(guide_page(made, places(made)), encoding="utf-8")
    page = opened(path)
    assert page.locator("#choose-model").input_value() == hostile
    assert (page.locator("img").count(), page.locator("script").count()) == (0, 2)
