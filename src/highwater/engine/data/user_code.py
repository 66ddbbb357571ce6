"""A function of the user's, found by the name that an option gives: ``module:function``."""

import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from highwater.errors import UsageError


def user_function(source: str, *, what: str) -> Any:
    """The function that ``source`` names: the user's code, run as it is. No other code comes from
    the working directory. ``what`` is what it is for, in a message.
    """
    module, colon, name = source.partition(":")
    if not (module and colon and name):
        raise UsageError(
            f"{what} {source!r} is not module:function",
            hint="name both: `rewards:length` is the function `length` in rewards.py",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a random.py there is nobody's random
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = "check the name, and that it is in this folder, or that PYTHONPATH has its folder"
        raise UsageError(f"{what} {source!r}: {error}", hint=hint) from error


def refuse_uncallable(function: Any, keywords: Iterable[str], source: str, *, define: str) -> None:
    """Raise UsageError where a function cannot be called with these keywords; ``define`` is how one
    that can is written.
    """
    keywords = tuple(keywords)
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{source} cannot be called with {', '.join(keywords)}: {error}",
            hint=f"define it as `{define}`: names that it does not need go into `**_`",
        ) from error
