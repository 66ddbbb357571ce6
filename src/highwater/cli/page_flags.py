"""The flags of the commands that show what was recorded: studies, and snapshots of memory."""

import argparse

from highwater.cli.flags import add_json, add_output


def show_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater show``."""
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="a study's file; default: the newest one"
    )
    parser.add_argument(
        "--as",
        dest="as_",
        choices=("table", "published", "lines", "json"),
        default="table",
        help="how to show it",
    )
    _add_newest_study(parser)


def report_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater report``."""
    parser.add_argument(
        "study", nargs="?", metavar="STUDY", help="a study's file; default: the newest one"
    )
    add_output(parser, ".html, .md, .csv or .json; default: print Markdown")
    add_json(parser)
    _add_newest_study(parser)


def profile_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flags of ``highwater profile``."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a snapshot that `torch.cuda.memory._dump_snapshot` wrote, a timeline of "
        "`highwater predict --exact`, or a folder of ranks' snapshots, of which the fullest is "
        "shown; two: side by side",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page into a new file: timeline and flame graph"
    )
    add_json(parser)


def _add_newest_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        default="./logs",
        help="where to look for the newest study (default: ./logs)",
    )
