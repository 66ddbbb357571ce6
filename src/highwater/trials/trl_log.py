"""What TRL and other trainers on transformers' own say of their steps: a dict in Python's words for
each, printed where the first process logs. Names of TRL's: ``SFTTrainer.compute_loss`` and
``GRPOTrainer._log`` of trl 1.16.0.

Numbers are printed with four digits, so a count of tokens is compared as far as it is said.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from typing import cast

_DICT = re.compile(r"\{'[^{}\n\r]*\}")
_DIGITS = 4
_ROUNDED = 0.5 * 10 ** (1 - _DIGITS)
"""The largest share by which rounding to so many digits changes a number."""


def steps_of(
    text: str, *, step_tokens: int, shared_by: int = 1, counted: str = "num_tokens"
) -> int:
    """Steps that a trainer logged in order, each with a finite loss and with as many tokens as it
    should have seen by then: ``step_tokens`` in every step, or as many times that as GPUs share a
    sequence and count it each. ``counted``: the name of that count.
    """
    done = 0
    for step in logged_steps(text):
        tokens, expected = _number(step.get(counted)), (done + 1) * step_tokens
        is_exact = _is(tokens, expected) or _is(tokens, shared_by * expected)
        if not math.isfinite(_number(step["loss"])) or not is_exact:
            break
        done += 1
    return done


def logged_steps(text: str) -> Iterator[Mapping[str, object]]:
    """The line of each step, as the trainer's names have it."""
    for found in _DICT.finditer(text):
        try:
            said: object = ast.literal_eval(found[0])
        except (ValueError, SyntaxError):
            continue
        if isinstance(said, dict) and "loss" in said and "epoch" in said:
            yield cast(Mapping[str, object], said)


def _is(number: float, expected: int) -> bool:
    return math.isclose(number, expected, rel_tol=_ROUNDED)


def _number(value: object) -> float:
    """A number that was printed, with quotes in newer versions; NaN for anything else."""
    try:
        return float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        return math.nan
