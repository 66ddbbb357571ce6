"""Pages of a report and of a memory profile as people read them."""

from pathlib import Path

import pytest
from conftest import SHOTS, STUDY, WIDTHS, check, every_fold_open

from highwater import study_report, write_report
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.pages.profile import profile_page

pytestmark = pytest.mark.pages
OFFLOADED = STUDY.with_name("edge-4b-1-chunked-offload.jsonl")


@pytest.fixture(scope="module", params=[STUDY, OFFLOADED], ids=lambda path: path.stem)
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / f"report-{request.param.stem}.html"
    return write_report(path, study_report(request.param))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(WIDTHS))
def test_a_report_has_no_serious_finding_nor_scrolls_sideways(reported, opened, screen, scheme):
    page = opened(reported, width=WIDTHS[screen], scheme=scheme)
    page.screenshot(path=SHOTS / f"{reported.stem}-{screen}-{scheme}.png", full_page=True)
    check(page, screen)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phones_first_screen_has_the_answer_and_whole_bars(reported, opened, scheme):
    page = opened(reported, width=WIDTHS["phone"], scheme=scheme)
    box = page.locator("#answer-said").bounding_box()
    assert box["y"] + box["height"] <= 844
    ends = page.locator(".lane span, .memory-rows p, .ticks span").evaluate_all(
        "each => each.map((part) => part.getBoundingClientRect().right)"
    )
    assert max(ends) <= WIDTHS["phone"]


def test_a_report_on_paper_has_every_table_and_no_navigation(reported, opened):
    page = opened(reported, width=720)
    page.emulate_media(media="print")
    tables = page.locator("table")
    assert tables.count() >= 6
    assert all(tables.nth(index).is_visible() for index in range(tables.count()))
    assert not page.locator("nav").is_visible()
    page.pdf(path=SHOTS / f"{reported.stem}.pdf")


SNAPSHOTS = sorted((Path(__file__).parents[1] / "data" / "snapshots").glob("*.pickle"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / f"profile-{request.param}.html"
    path.write_text(profile_page([memory_profile(each) for each in SNAPSHOTS[-request.param :]]))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(WIDTHS))
def test_a_profile_has_no_serious_finding_and_never_scrolls_sideways(drawn, opened, screen, scheme):
    page = opened(drawn, width=WIDTHS[screen], scheme=scheme)
    page.screenshot(path=SHOTS / f"{drawn.stem}-{screen}-{scheme}.png", full_page=True)
    with every_fold_open(page):
        check(page, screen)
