"""The report of a benchmark of attentions as people read it: at every width, in the dark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHOTS, WIDTHS, Opened, serious

pytestmark = pytest.mark.pages


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes on the CPU measured at small sizes."""
    folder = tmp_path_factory.mktemp("attention")
    words = ("--device", "cpu", "--gpus", "2", "--max-length", "1k", "--out", "found")
    some = ("--implementations", "dense", "window", "block_sparse", "dilated", "ring")
    done = subprocess.run(
        [sys.executable, "-m", "highwater", "bench", "attention", *words, *some],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "found" / "attention.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(WIDTHS))
def test_a_report_of_attentions_has_no_serious_finding_and_never_scrolls_sideways(
    drawn: Path, opened: Opened, screen: str, scheme: str
) -> None:
    page = opened(drawn, width=WIDTHS[screen], scheme=scheme)
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"attention-{screen}-{scheme}.png", full_page=True)
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[screen]


def test_every_plot_is_drawn_and_no_label_leaves_its_picture(drawn: Path, opened: Opened) -> None:
    page = opened(drawn)
    assert page.locator("svg.plot").count() == 4
    outside = page.evaluate(
        """[...document.querySelectorAll("svg.plot")].flatMap(svg => {
            const all = svg.getBoundingClientRect()
            return [...svg.querySelectorAll("text, circle")].filter(each => {
                const own = each.getBoundingClientRect()
                return own.left < all.left - 1 || own.right > all.right + 1
                    || own.bottom > all.bottom + 1
            }).map(each => each.textContent)
        })"""
    )
    assert outside == []


def test_a_plot_stands_alone_as_a_file(drawn: Path, opened: Opened) -> None:
    page = opened(drawn.with_name("time-forward.svg"))
    assert page.locator("circle").count() >= 8
