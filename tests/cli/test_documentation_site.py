"""What is written from code and records is as it is written now."""

import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import highwater
from places import captured
from tables import deep

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = (
    "guide-h200.md",
    "capacities.svg",
    "session.svg",
    "reference/cli.md",
    "reference/python.md",
    "reference/statistics.md",
    "decisions/README.md",
    *(f"results/{name}.svg" for name in ("families/families", "h20/agreement", "layer/layer")),
    *(f"results/{name}.svg" for name in ("predict/errors", "speed/speed")),
    *sorted(f"models/{path.name}" for path in (DOCS / "models").glob("*.md")),
)
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)\s*=\s*["']?(?:https?:)?//[^"'\s>]*"""
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("documents")
    done = captured([sys.executable, DOCS / "generate.py", directory], cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_document_is_as_it_would_be_written_now(name, written):
    assert (DOCS / name).read_bytes() == (written / name).read_bytes(), (
        "`make documents` writes it anew"
    )


def test_no_generated_document_is_left_out(written):
    names = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    assert names == sorted(GENERATED)


def test_the_picture_is_for_dark_screens_too_and_tells_itself_in_words():
    text = (DOCS / "capacities.svg").read_text()
    drawn = ElementTree.fromstring(text)  # noqa: S314 - our own file
    (description,) = (each.text for each in drawn if each.tag.endswith("desc"))
    assert "Qwen3-0.6B, 1 GPU: Hugging Face" in description
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"class=\"figure[^>]*>([\d,]+)<", text) == re.findall(
        r" (\d[\d,]*\d)(?=,? |\.|,|$)", re.sub(r"Qwen3-[\d.]+B, \d GPUs?:", "", description)
    )


def test_the_site_builds_strictly_and_fetches_nothing_when_it_is_read(tmp_path):
    """With the guide's page of one model; `make test-all` has it whole."""
    site = tmp_path / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment |= {} if deep(1) else {"HIGHWATER_SITE_MODELS": "Qwen3-0.6B"}
    done = captured(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(site): path.read_text() for path in site.rglob("*.html")}
    assert {
        Path("index.html"),
        Path("guide-h200.html"),
        Path("guide-h200-page.html"),
        Path("reference/python.html"),
    } <= set(pages)
    assert {name: found for name, text in pages.items() if (found := FETCHED.findall(text))} == {}
    assert [
        name for name, text in pages.items() if re.search(r"^\| |^<p>\| ", text, re.MULTILINE)
    ] == [], "a table that is none"
    alone = {name: text for name, text in pages.items() if 'class="skip"' in text}
    assert {Path("guide-h200-page.html"), Path("report-example.html")} == set(alone)
    for name, text in alone.items():
        links = re.findall(r'href="([^"]+)"', *re.findall(r'<p class="home">(.*?)</p>', text))
        targets = [os.path.normpath(name.parent / link) for link in links]
        assert targets[0] == "index.html"
        assert all(Path(target) in pages for target in targets)
        towards = re.compile(rf'href="(?:[^"]*/)?{re.escape(name.name)}"')
        assert any(towards.search(page) for other, page in pages.items() if other not in alone), (
            f"no page of the site leads to {name}"
        )
        assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp)/", text), "a folder of a machine"
    assert (site / "guide-h200-page.html").stat().st_size < 1_300_000
    reference = pages[Path("reference/python.html")]
    assert [
        name
        for name in highwater.__all__
        if name != "__version__" and not re.search(rf"<h3[^>]*><code>{name}</code>", reference)
    ] == []
