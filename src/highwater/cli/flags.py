"""The flags of the command line that set a request, written from the settings' declarations."""

import argparse
from collections.abc import Sequence
from typing import Any

from msgspec.structs import fields

from highwater.errors import UsageError
from highwater.nouns.declaration import SWITCH, CommandName, Setting
from highwater.nouns.declared_settings import DECLARED, TOPICS, Topic
from highwater.nouns.request import Request, choices


def add_settings(
    parser: argparse.ArgumentParser, command: CommandName, *topics: Topic, heading: str
) -> None:
    """Give the parser the flags of these topics that a command takes; one that is not typed leaves
    no trace in the namespace.
    """
    section = parser.add_argument_group(heading)
    for row in (row for topic in topics for row in TOPICS[topic] if command in row.commands):
        options: dict[str, Any] = {
            "dest": row.name,
            "default": argparse.SUPPRESS,
            "help": _help(row, command),
        }
        if row.kind is SWITCH:
            options["action"] = "store_true"
        else:
            options["metavar"] = _metavar(row)
            if row.is_list:
                options["nargs"] = "+"
            elif row.stands_alone:
                options |= {"nargs": "?", "const": True}
        section.add_argument(row.flag, **options)


def add_trained(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    what_for: str = "what is predicted is trained so: ",
) -> None:
    """Give the parser flags of settings that say what is trained, None where they are not typed."""
    for row in (DECLARED[name] for name in names):
        what = f"{what_for}{row.help}".replace("%", "%%")
        parser.add_argument(row.flag, dest=row.name, metavar=_metavar(row), help=what)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give the parser ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_output(parser: argparse.ArgumentParser, forms: str) -> None:
    """Give the parser ``-o``, the new file that an answer goes to in one of these forms."""
    parser.add_argument("-o", "--output", metavar="FILE", help=f"write it into a new file: {forms}")


def typed_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was typed, by the field of ``Request`` that it sets."""
    typed = {
        name: value
        for name, value in vars(arguments).items()
        if name in DECLARED and value is not None
    }
    for row in DECLARED.values():
        values = typed.get(row.name)
        if (
            row.is_list
            and isinstance(values, list)
            and values
            and "model" not in typed
            and not values[-1].lstrip("-").isdecimal()
        ):
            # `--gpus 1 2 MODEL`: argparse gives all three to the flag
            typed |= {"model": values[-1], row.name: values[:-1]}
        if row.stands_alone and isinstance(values, str) and values:
            value = {"true": True, "false": False}.get(values.lower(), values)
            if value == values and value not in choices(row.name) and "model" not in typed:
                # `--offload MODEL`: argparse gives it to the flag
                typed["model"], value = values, True
            typed[row.name] = value
    return typed


def named_model(
    arguments: argparse.Namespace, others: list[str], *, example: str
) -> tuple[str, dict[str, Any]]:
    """The model that was typed, and the settings; raises UsageError without a model.

    ``others`` are the values of a flag before the model, which argparse takes for one more of them.
    """
    if arguments.model is None and len(others) > 1:
        arguments.model = others.pop()
    settings = typed_values(arguments)
    vars(arguments).update(settings)
    model = settings.pop("model", None)
    if model is None:
        raise UsageError(
            "no model is named",
            hint=f"name a directory, an id of the Hub or a catalog model: `{example}`",
        )
    return str(model), settings


def typed_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The memory that GPUs and their machine have for training, as keywords of ``predict``."""
    names = ("gpu_memory", "host_memory", "reserved")
    return {name: getattr(arguments, name) for name in names}


def _metavar(row: Setting) -> str | None:
    if row.kind is None:
        return f"{{{','.join(choices(row.name))}}}"
    return row.metavar or row.kind.metavar


def _help(row: Setting, command: CommandName) -> str:
    """What the setting is, and its default unless that is nothing, or said already."""
    default = next(field.default for field in fields(Request) if field.name == row.name)
    said = row.helps.get(command, row.help)
    named = row.defaults.get(command)
    if named is None and (default in (None, False, 0) or "default" in said):
        shown = ""
    else:
        shown = f" (default: {named or _spelled(default)})"
    return f"{said}{shown}".replace("%", "%%")


def _spelled(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
