"""``highwater emit``: what is recommended, as another trainer's configuration on stdout."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from highwater.cli import console
from highwater.cli.recommendation import found_for, words_again
from highwater.emit.accelerate import accelerate
from highwater.emit.areal import areal
from highwater.emit.emitted import PREDICTED_FOR, Emitted, Target
from highwater.emit.torchtitan import torchtitan
from highwater.emit.trinity import trinity
from highwater.emit.trl import trl
from highwater.emit.verl import verl
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO
from highwater.spec.recommendation import Candidate, Recommendation


class Emit(Protocol):
    """Makes the configuration of one trainer."""

    def __call__(self, found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
        """Of a recommendation whose chosen rung is ``chosen``."""
        ...


_TARGETS: Mapping[Target, Emit] = {
    "trinity": trinity,
    "verl": verl,
    "areal": areal,
    "trl": trl,
    "torchtitan": torchtitan,
    "accelerate": accelerate,
}


def emit(arguments: argparse.Namespace) -> int:
    """Print the configuration; where nothing fits there is none, and the document is what `recommend --json` prints."""
    arguments.trainer = PREDICTED_FOR[arguments.for_]
    found = found_for(arguments)
    console.notes(found.notes)
    again = ("highwater", "recommend", arguments.model, *words_again(arguments))
    if found.chosen is None:
        console.talk("nothing fits: there is nothing to configure")
        if arguments.json:
            console.answer_json(found)
            return EXIT_ANSWERED_NO
        console.next_command(shlex.join(again))
        return EXIT_ANSWERED_NO
    path = Path(arguments.model).expanduser()
    emitted = _TARGETS[arguments.for_](found, found.chosen, model_path=str(path.resolve()) if path.is_dir() else None)
    if arguments.json:
        console.answer_json(emitted)
    else:
        console.answer(emitted.text.rstrip("\n"))
        console.next_command(shlex.join((*again, "--list")))
    return EXIT_ANSWERED
