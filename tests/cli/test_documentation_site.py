"""What is written from code and records is as it is written now."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import highwater
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
    done = subprocess.run(
        [sys.executable, DOCS / "generate.py", directory],
        cwd=directory,
        capture_output=True,
        text=True,
    )
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


def test_a_models_page_says_what_is_predicted_what_was_measured_and_what_goes_wrong():
    pages = {path.stem: path.read_text() for path in (DOCS / "models").glob("*.md")}
    assert len(pages) == 31, "thirty and their index"
    index = pages.pop("README")
    for name, text in pages.items():
        assert f"({name}.md)" in index
        assert text.startswith(f"# {name}\n")
        parts = re.findall(r"^## (.*)", text, re.MULTILINE)
        assert parts[2:] == ["Settings", "Traps", "Measured"], parts
        assert "**Predicted**: nothing was run" in text
        letters = set(re.findall(r"/s, (\w+) ", text))
        assert letters == set(re.findall(r"^- \*\*(\w+)\*\*: .*`--allocator", text, re.MULTILINE))
    assert (
        "| 4 x H200-141GB | expandable, chunked loss, Ulysses 4 | 32,768 | 1,081,344 |"
        in (pages["Qwen3-8B"])
    )
    assert "No search of this model is recorded here" in pages["phi-4"]
    assert "**Router loss:**" in pages["Mixtral-8x7B-v0.1"]
    assert "**29 of 34 layers read the last 1,024 tokens alone.**" in pages["gemma-3-4b-text"]


def test_the_h200_guide_has_every_study_and_says_what_they_were_allowed():
    guide = (DOCS / "guide-h200.md").read_text()
    assert all(
        f"docs/results/find/{path.name} " in guide
        for path in (DOCS / "results" / "find").glob("*.jsonl")
    )
    assert "Most studies were allowed **79.15 GiB** of each card" in guide
    assert re.findall(r"^## (H200-141GB.*): (measured|predicted) ", guide, re.MULTILINE) == [
        ("H200-141GB with 79.15 GiB", "measured"),
        ("H200-141GB with 79.15 GiB", "measured"),
        ("H200-141GB", "measured"),
        ("H200-141GB", "predicted"),
    ]


def test_the_picture_is_for_dark_screens_too_and_tells_itself_in_words():
    text = (DOCS / "capacities.svg").read_text()
    drawn = ElementTree.fromstring(text)  # noqa: S314 - our own file
    (description,) = (each.text for each in drawn if each.tag.endswith("desc"))
    assert "Qwen3-0.6B, 1 GPU: Hugging Face" in description
    assert "prefers-color-scheme: dark" in text
    figures = re.findall(r"class=\"figure[^>]*>([\d,]+)<", text)
    assert figures == re.findall(
        r" (\d[\d,]*\d)(?=,? |\.|,|$)", re.sub(r"Qwen3-[\d.]+B, \d GPUs?:", "", description)
    )


def test_the_site_builds_strictly_and_fetches_nothing_when_it_is_read(tmp_path):
    """With the guide's page of one model; `make test-all` has it whole."""
    site = tmp_path / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment |= {} if deep(1) else {"HIGHWATER_SITE_MODELS": "Qwen3-0.6B"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
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
        back = re.findall(r'<p class="home">(.*?)</p>', text)
        links = re.findall(r'href="([^"]+)"', *back)
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
