"""Pages of a report and of a memory profile as people read them: at every width, in the dark and on
paper, whoever wrote the study.
"""

import pickle
from pathlib import Path

import msgspec
import pytest
from conftest import SHOTS, STUDY, WIDTHS, every_fold_open, serious

from highwater import open_study, study_report, write_report
from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.pages.profile import profile_page

pytestmark = pytest.mark.pages
OFFLOADED = STUDY.with_name("edge-4b-1-chunked-offload.jsonl")
"""Not finished, with memory-only trials."""


@pytest.fixture(scope="module", params=[STUDY, OFFLOADED], ids=lambda path: path.stem)
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / f"report-{request.param.stem}.html"
    return write_report(path, study_report(request.param))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(WIDTHS))
def test_a_report_has_no_serious_finding_and_never_scrolls_sideways(
    reported, opened, screen, scheme
):
    page = opened(reported, width=WIDTHS[screen], scheme=scheme)
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{reported.stem}-{screen}-{scheme}.png", full_page=True)
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[screen]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_of_a_phone_has_the_answer_and_every_bar_is_whole(
    reported, opened, scheme
):
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
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.pdf(path=SHOTS / f"{reported.stem}.pdf")


def test_text_from_outside_does_nothing_in_a_report(opened, tmp_path):
    hostile = '"></title><script>alert(1)</script><img src=x onerror=alert(2)>'
    study = open_study(STUDY)
    model = msgspec.structs.replace(study.question.model, name=hostile)
    study = msgspec.structs.replace(
        study, question=msgspec.structs.replace(study.question, model=model, device_name=hostile)
    )
    page = opened(write_report(tmp_path / "hostile.html", study_report(study)))
    assert hostile in page.locator("h1").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 0
    assert hostile in page.locator("#answer-said").inner_text(), "as text"


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
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{drawn.stem}-{screen}-{scheme}.png", full_page=True)
    with every_fold_open(page):
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[screen]


def test_text_from_a_snapshot_does_nothing_on_its_page(opened, tmp_path):
    hostile = '"></title></svg><script>alert(1)</script><img src=x onerror=alert(2)>'
    frame = {"filename": f"/{hostile}.py", "line": 1, "name": hostile}
    entry = {"action": "alloc", "addr": 1, "size": 2**20, "frames": [frame] * 3}
    entry["user_metadata"] = hostile
    snapshot = tmp_path / "snapshot_rank00_<img src=x onerror=alert(3)>.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry]]}))
    path = tmp_path / "hostile.html"
    path.write_text(profile_page([memory_profile(snapshot)]))
    page = opened(path)
    assert hostile in page.locator("summary").first.inner_text()
    assert page.locator("script, img").count() == 0
