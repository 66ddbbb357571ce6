"""What the site adds to its pages: folded tables, the H200 guide as a page, a report, and links
between pages of the site and those that stand alone.
"""

import posixpath
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

HERE = Path(__file__).parent
GUIDE, REPORT = "guide-h200-page.html", "report-example.html"
ALONE = '<a class="skip" href="#content">'
"""What every page of ours that stands alone has, and no page of the site."""
LINKS = {
    "guide-h200.md": f"[The same as a page, which answers for any length]({GUIDE})",
    "guides/guide.md": f"[A guide as a page](../{GUIDE}) · [a report as a page](../{REPORT})",
    "results/find/README.md": f"[The report of one of these studies](../../{REPORT})",
}
"""Links to pages that only the site has, below the titles of others."""
WHENCE = {
    GUIDE: ("guide-h200.html", "the H200 guide"),
    REPORT: ("results/find/index.html", "the studies"),
}
"""Where a page that stands alone belongs to; all others to the page beside or above them."""


def on_files(files: Any, config: Any) -> Any:
    """What is not kept in the repository."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, HERE / "generate.py", "--site", folder], check=True)
        for path in Path(folder).iterdir():
            files.append(
                File.generated(config, path.name, content=path.read_text(encoding="utf-8"))
            )
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Tables within a folded part are Markdown here too, as they are where the repository is
    read; pages that stand alone are linked.
    """
    link = LINKS.get(page.file.src_uri)
    if link is not None:
        title, _, rest = markdown.partition("\n\n")
        markdown = f"{title}\n\n{link}\n\n{rest}"
    return markdown.replace("<details>", '<details markdown="1">')


def on_post_build(config: Any) -> None:
    """Lead back to the site from every page that stands alone."""
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        if ALONE in text:
            links = _links_back(site, path.relative_to(site))
            path.write_text(text.replace(ALONE, f"{links}\n{ALONE}", 1), encoding="utf-8")


def _links_back(site: Path, name: Path) -> str:
    above = next(each for each in name.parents if (site / each / "index.html").is_file())
    where, what = WHENCE.get(str(name), (str(above / "index.html"), "the results"))
    folder = str(name.parent)
    home, whence = (posixpath.relpath(each, folder) for each in ("index.html", where))
    return f'<p class="home"><a href="{home}">highwater</a> › <a href="{whence}">{what}</a></p>'
