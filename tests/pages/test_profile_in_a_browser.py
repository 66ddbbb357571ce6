"""A memory profile's page as people read it: at every width, in the dark, whoever wrote the
snapshot.
"""

import pickle
from pathlib import Path

import pytest
from conftest import SHOTS, WIDTHS, every_fold_open, serious

from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.pages.profile import profile_page

pytestmark = pytest.mark.pages
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
