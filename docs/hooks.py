"""What the site adds to its pages: folded tables, and the H200 guide as a page."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

HERE = Path(__file__).parent


def on_files(files: Any, config: Any) -> Any:
    """What is not kept in the repository."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, HERE / "generate.py", "--site", folder], check=True)
        for path in Path(folder).iterdir():
            files.append(
                File.generated(config, path.name, content=path.read_text(encoding="utf-8"))
            )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Tables within a folded part are Markdown here too, as they are where the repository is
    read.
    """
    return markdown.replace("<details>", '<details markdown="1">')
