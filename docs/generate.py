"""Writes the documents that follow from code and records: the H200 guide, a page a popular model,
the pictures, the references of the command line, of Python and of the statistics.

``make documents`` runs it; tests/cli/test_documentation_site.py says when that is due. ``--site
DIRECTORY`` writes what only the documentation site has: the guide and a report as pages.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from charts import pictures
from model_pages import model_pages
from picture import picture
from python_page import python_page
from session import session
from statistics_page import statistics_page

from highwater import guide, study_report, write_guide, write_report
from highwater.cli.grammar import Parser, commands
from highwater.cli.search_context_length_capacity import grammar
from highwater.pages.guide import Guide
from highwater.pages.guide_page import guide_markdown

ROOT = Path(__file__).resolve().parents[1]
STUDIES = "docs/results/find/*.jsonl"
REPORTED = "docs/results/find/qwen3-4b-79gib.jsonl"
"""The study whose report the site has."""
PREDICTED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
GPUS = tuple(f"{count}xH200-141GB" for count in (1, 2, 4, 8))
COMMAND = f"highwater guide {STUDIES} --predict {' '.join(PREDICTED)} --gpus {' '.join(GPUS)}"
OF_THE_H200 = f"""\
This is the guide of the H200, from this project's own studies; \
[docs/results/find](results/find/README.md) says how they were made.

- **measured** on whole cards (139.80 GiB): 0.6B, 1.7B and 4B on one GPU, 8B on two and on four; \
what is marked ≥ is the longest that was tried there. Most studies were allowed **79.15 GiB** \
of each card, GRPO on four GPUs among them, which is what an A100-80GB has: their capacities are \
the least that a whole H200 holds, and stand in tables of their own.
- **predicted**, in tables of their own, too: whole cards, 1 to 8 of them, models up to 32B.

`{COMMAND}` makes it."""


def documents() -> dict[str, str]:
    """Every document by its path below docs/."""
    title, _, rest = guide_markdown(_guide()).partition("\n\n")
    return {
        "guide-h200.md": f"{title}: H200\n\n{OF_THE_H200}\n\n{rest}",
        "capacities.svg": picture(),
        "session.svg": session(),
        "reference/cli.md": "\n".join(_command_line()),
        "reference/python.md": python_page(),
        "reference/statistics.md": statistics_page(),
        "decisions/README.md": "\n".join(_decisions()),
        **pictures(),
        **model_pages(),
    }


def _guide(predicted: Sequence[str] = PREDICTED) -> Guide:
    studies = sorted(path.relative_to(ROOT) for path in ROOT.glob(STUDIES))
    return guide(*studies, predict=predicted, gpus=GPUS)


def _decisions() -> Iterator[str]:
    yield "# Decisions"
    yield ""
    yield (
        "Half a page each, of what stands: context, choice, price. One that no longer stands is "
        "rewritten or goes; git has what it was."
    )
    yield ""
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        yield f"- [{title}]({path.name})"


def _command_line() -> Iterator[str]:
    yield "# The command line"
    yield ""
    yield (
        "Every command and flag, from the grammar that reads them. The answer goes to stdout, "
        "talk to stderr; `--json` prints one"
    )
    yield "document with a version. [Exit codes](exit-codes.md) say how it ended."
    for name, each in commands().items():
        yield from _command(f"highwater {name}", each)
    yield from _command("search_context_length_capacity", grammar())


def _command(name: str, parser: Parser) -> Iterator[str]:
    """A heading, what it does, and a table of its flags for each group."""
    text = (parser.description or "").partition(": ")[2] or parser.description or ""
    yield from (
        "",
        f"## {name}",
        "",
        f"{text[:1].upper() + text[1:].rstrip('.')}.",
        "",
        "For example:",
        "",
        *(f"    {example}" for example in parser.examples),
    )
    formatter = argparse.HelpFormatter(prog=name)
    for group in parser._action_groups:
        actions = [
            each
            for each in group._group_actions
            if each.dest != "help" and each.help != argparse.SUPPRESS
        ]
        if not actions:
            continue
        what = (
            "arguments"
            if not actions[0].option_strings
            else "flags"
            if group.title == "options"
            else group.title
        )
        yield from ("", f"| {what} | |", "|---|---|")
        for action in actions:
            explained = formatter._expand_help(action) if action.help else ""
            yield f"| {_cell(_spelled(action))} | {_cell(explained)} |"


def _cell(text: str) -> str:
    """Our own text in a table: its `code` stays code."""
    return text.replace("|", "\\|")


def _spelled(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    several = " ..." if action.nargs in ("+", "*") else ""
    return f"{names} `{value}{several}`".strip()


def main() -> None:
    """Write them below docs/, or below another directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "docs")
    parser.add_argument("--site", action="store_true", help="what only the site has")
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    os.chdir(ROOT)  # so that the guide names its sources alike, wherever this is called
    if arguments.site:
        # a page answers for any length, which takes seconds a model: a test asks for fewer
        predicted = os.environ.get("HIGHWATER_SITE_MODELS", "").split() or PREDICTED
        write_guide(directory / "guide-h200-page.html", _guide(predicted))
        write_report(directory / "report-example.html", study_report(REPORTED))
        return
    for name, text in documents().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
