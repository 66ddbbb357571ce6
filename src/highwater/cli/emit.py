"""``highwater emit``: what is recommended, as another trainer's configuration on stdout."""

import argparse
import shlex

from highwater.cli import console
from highwater.cli.flags import named_model
from highwater.cli.recommend import EXAMPLE, found_for, words_again
from highwater.emit.targets import TARGETS, choice, configured, refuse_unknown_settings
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO


def emit(arguments: argparse.Namespace) -> int:
    """Print the configuration; where nothing fits there is none, and the document is what
    `recommend --json` prints.
    """
    _, settings = named_model(arguments, arguments.studies, example=EXAMPLE)
    refuse_unknown_settings(arguments.for_, settings)
    arguments.trainer = TARGETS[arguments.for_].predicted_for
    found = found_for(arguments)
    console.notes(found.notes)
    again = ("highwater", "recommend", arguments.model, *words_again(arguments))
    chosen = choice(found)
    if chosen is None:
        name = TARGETS[arguments.for_].name
        which = "nothing fits" if found.chosen is None else f"nothing fits that {name} can be told"
        console.talk(f"{which}: there is nothing to configure")
        if arguments.json:
            console.answer_json(found)
            return EXIT_ANSWERED_NO
        console.next_command(shlex.join(again))
        return EXIT_ANSWERED_NO
    emitted = configured(arguments.for_, found, chosen, model=arguments.model)
    if arguments.json:
        console.answer_json(emitted)
    else:
        console.answer_exactly(emitted.text.rstrip("\n"))
        console.next_command(shlex.join((*again, "--list")))
    return EXIT_ANSWERED
