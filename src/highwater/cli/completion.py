"""``highwater completion``: the script by which a shell completes what is typed after
``highwater``.

shtab writes it from the grammar: commands, flags, and values that are one of a list. What it cannot
know is added here: names of models and kinds of GPUs, also after ``4x``. No completion starts
Python, and no other command imports shtab.
"""

import argparse
from collections.abc import Callable
from typing import get_args

from highwater.cli import console
from highwater.cli.flags import Shell
from highwater.cli.grammar import grammar
from highwater.cli.parser import Parser
from highwater.errors import EXIT_ANSWERED
from highwater.model.model_place import model_catalog
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.request import DECLARED

_MODELS, _GPUS = "_highwater_model_or_dir", "_highwater_gpus"
"""Functions of the script. A name with ``_dir`` tells shtab that what it completes may be a
directory."""
_FILES = {"FILE", "CSV", "STUDY", "SOURCE", "PATH"}
_FOLDERS = {"DIR"}
_SOURCED = {
    "bash": "source <(highwater completion bash)",
    "zsh": "source <(highwater completion zsh)",
    "fish": "highwater completion fish | source",
}
"""What completes in the shell that is open, by shell."""

_BASH = """\
{models}() (
  shopt -s nocasematch
  for name in {model_names}; do
    [[ $name == "$1"* ]] && printf '%s\\n' "$name"
  done
  compgen -d -- "$1"
)
{gpus}() (
  shopt -s nocasematch
  [[ $1 =~ ^([0-9]+x)* ]]
  count=${{BASH_REMATCH[0]}}
  for kind in {gpu_kinds}; do
    [[ $kind == "${{1#"$count"}}"* ]] && printf '%s\\n' "$count$kind"
  done
)
"""
_ZSH = """\
{models}() {{
  compadd -M 'm:{{a-zA-Z}}={{A-Za-z}}' -- {model_names}
  _files -/
}}
{gpus}() {{
  compset -P '[0-9]##x'
  compset -P '[0-9]##x'
  compadd -M 'm:{{a-zA-Z}}={{A-Za-z}}' -- {gpu_kinds}
}}
"""
_FISH = """\
function {models}
  printf '%s\\n' {model_names}
  __fish_complete_directories
end
function {gpus}
  set -l count (string match -r '^(?:[0-9]+x)*' -- (commandline -ct))
  for kind in {gpu_kinds}
    printf '%s\\n' "$count$kind"
  end
end
"""
_FUNCTIONS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Both functions, by shell: names in any case, as the catalogs know them."""


def completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell; the next command tries it at once."""
    console.answer_exactly(script(arguments.shell).rstrip("\n"))
    console.next_command(
        f"{_SOURCED[arguments.shell]}  (completes here; `--help` says where to keep it)"
    )
    return EXIT_ANSWERED


def script(shell: str) -> str:
    """The script that completes ``highwater`` in a shell."""
    from shtab import complete

    whole = grammar()
    for parser in (whole, *whole.commands.values()):
        _say_what_completes(parser)
    rows = model_catalog()
    models = (*(row.name for row in rows), *(name for row in rows for name in row.hub_ids))
    names = {
        "models": _MODELS,
        "gpus": _GPUS,
        "model_names": " ".join(dict.fromkeys(models)),
        "gpu_kinds": " ".join(kind.name for kind in gpu_catalog()),
    }
    return complete(whole, shell=shell, preamble=_FUNCTIONS[shell].format(**names))


def _say_what_completes(parser: Parser) -> None:
    """Tell shtab what each value is: by ``complete``, an attribute that it reads, or by choices."""
    for action in parser.arguments():
        if isinstance(action.metavar, str):  # zsh takes a colon for the end of it
            action.metavar = action.metavar.replace(":", " ")
        what = _value(action)
        if what is not None:
            vars(action)["complete"] = what
        elif action.dest in DECLARED and DECLARED[action.dest].kind is None:
            action.choices = DECLARED[action.dest].choices


def _value(action: argparse.Action) -> object:
    """What completes a value, as shtab has it; None where that says nothing."""
    if action.metavar == "MODEL":
        return _by_function(_MODELS)
    if action.dest == "cluster":
        return _by_function(_GPUS)
    if action.metavar in _FILES:
        return "file"
    return "directory" if action.metavar in _FOLDERS else None


def _by_function(name: str) -> dict[str, str]:
    """A function of the script, as each shell calls it."""
    called: dict[str, Callable[[str], str]] = {"fish": "({})".format}
    return {shell: called.get(shell, str)(name) for shell in get_args(Shell)}
