"""Pages in a headless Chromium: without one, or without what drives it, these tests fail."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from highwater import guide, write_guide

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "pages"
STUDY = ROOT / "docs" / "results" / "find" / "qwen3-0.6b-card-full.jsonl"
TABLE = ROOT / "tests" / "data" / "published_capacity_a100_80gb.csv"
WIDTHS = {"phone": 390, "desktop": 1280}
_SERIOUS = ("serious", "critical")

Opened = Callable[..., Any]
"""A page of playwright's, by the file's path, a width and a colour scheme."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/pages" in str(item.path):
            item.add_marker(pytest.mark.pages)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or the one that HIGHWATER_CHROMIUM names."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail(
            "playwright is not installed: `make test-pages`, or `pip install '.[pages]'` in the "
            "checkout of highwater"
        )
    program = (
        os.environ.get("HIGHWATER_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
    )
    if program is None:
        pytest.fail(
            "there is no Chromium: `apt-get install chromium` (Debian), or name one, "
            "`HIGHWATER_CHROMIUM=/path/to/chrome`"
        )
    SHOTS.mkdir(parents=True, exist_ok=True)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=flags)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """Opens pages; in the end nothing may have been said to the console."""
    troubles: list[str] = []
    contexts: list[Any] = []

    def opened(
        path: Path, *, width: int = WIDTHS["desktop"], scheme: str = "light", script: bool = True
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=script,
            reduced_motion="reduce",
        )
        contexts.append(context)
        page = context.new_page()
        url = path.as_uri()
        page.on(
            "console", lambda message: troubles.append(f"console: {message.type} {message.text}")
        )
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                None if request.url == url else troubles.append(f"request: {request.url}")
            ),
        )
        page.on(
            "dialog",
            lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        )
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def check(page: Any, screen: str) -> None:
    """It has no serious finding, and never scrolls sideways."""
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[screen]


def serious(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found
        if each["impact"] in _SERIOUS
        for node in each["nodes"]
    ]


@contextmanager
def every_fold_open(page: Any) -> Iterator[None]:
    """With everything shown that is folded away."""
    folded = page.locator("details:not([open])")
    count = folded.count()
    page.evaluate(
        "for (const each of document.querySelectorAll('details:not([open])')) { each.open = true; "
        "each.dataset.was = '' }"
    )
    yield
    page.evaluate(
        "for (const each of document.querySelectorAll('details[data-was]')) { each.open = false }"
    )
    assert folded.count() == count


Factory = pytest.TempPathFactory


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: Factory) -> Path:
    gpus = ["1xH200-141GB", "4xH200-141GB"]
    made = guide(STUDY, TABLE, predict=["Qwen3-0.6B", "Qwen3-8B"], gpus=gpus)
    return write_guide(tmp_path_factory.mktemp("pages") / "mixed.html", made)


@pytest.fixture(scope="session")
def small(tmp_path_factory: Factory) -> Path:
    """A guide whose every combination is asked again of the command line."""
    made = guide(predict=["Qwen3-0.6B", "Qwen3-14B"], gpus=["1xA100-80GB", "4xA100-80GB"])
    return write_guide(tmp_path_factory.mktemp("pages") / "small.html", made)


@pytest.fixture(scope="session")
def configured(tmp_path_factory: Factory) -> Path:
    """A guide for Trinity-RFT's trainer, which has configurations to copy."""
    made = guide(predict=["Qwen3-14B"], gpus=["2xA100-80GB"], trainer="trinity")
    return write_guide(tmp_path_factory.mktemp("pages") / "configured.html", made)
