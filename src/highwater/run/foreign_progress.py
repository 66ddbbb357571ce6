"""Steps that a foreign trainer has done, by what its log shows of them.

Known without being told: the dictionaries of Hugging Face's Trainer, progress bars of training
(not those of loading, of tokenizing or of an evaluation), ``step 2/2``, and lines that have a
step's number and a loss, as torchtitan's, verl's and Megatron's do.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from highwater.run.foreign_log import LogLine

_HF_STEP = re.compile(r"\{.{0,400}?['\"]loss['\"]: ")
_HF_END = re.compile(r"\{.{0,400}?['\"]train_runtime['\"]: ")
_BAR = re.compile(
    r"^(?P<what>[^|%]{0,80}?):?\s*\d{1,3}%\|.{0,200}\|\s*(?P<step>\d+)/(?P<all>\d+) \["
)
_TRAINING = r"(?:train(?:ing)?|epoch|global|optimi[sz]er|completed|finished|update)"
_OF_TRAINING = re.compile(
    rf"(?:{_TRAINING}|steps?|iter(?:ation)?s?)(?: ?progress| steps?| epoch)?[\s\d/\[\]]*",
    re.IGNORECASE,
)
"""The description of a training's progress bar; ``Tokenizing train dataset`` is none."""
_NUMBERED = re.compile(
    r"\b(?:global_?)?(?P<what>step|iter(?:ation)?)\b['\"]?[\s:=#]{0,12}(?P<step>\d+)\b"
    r"(?: *?/ *(?P<all>\d+))?",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"[|:,;\])>/]\s*| - ")
_BEFORE_A_STEP = re.compile(rf"(?:{_TRAINING}|[\s\d_({{'\"*=])*", re.IGNORECASE)
"""What stands before a step of training, after the last mark of punctuation: ``Preparation step``
and ``Resuming training from step`` are none."""
_ELSEWHERE = re.compile(r"\b(?:eval|valid|val\b|test|infer|predict|warm-?up|calibr|sanity)", re.I)
"""What has steps and losses too, and is no training."""
_LOSS = re.compile(
    r"(?<!eval[_ ])(?<!val[_ ])(?<!test[_ ])(?<!validation[_ ])loss(?: train)?['\"]?\s{0,4}[:=]?"
    r"\s{0,12}['\"]?(?P<loss>[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?))\b",
    re.IGNORECASE,
)
_BEGINS = re.compile(
    r"\brunning training\b|\b(?:start|begin)(?:ing|s)? (?:the )?train(?:ing)?\b"
    r"|\btraining (?:has )?(?:start|begin|began|begun)",
    re.IGNORECASE,
)
"""How trainers say that the first step is about to begin."""
_RESUMED = re.compile(r"\bresum(?:ing|ed)\b", re.IGNORECASE)


class StepsShown(NamedTuple):
    """What a log shows of the steps."""

    steps: int = 0
    """Steps that are done, at least."""
    at: int | None = None
    """Index of the line that shows the last of them; None: no line shows any."""
    first_at: int | None = None
    """Index of the line that shows the first of them."""
    begins_at: int | None = None
    """Index of the line before those that says that training begins; None where none does."""
    is_over: bool = False
    """Whether the trainer said that its training is over, or the user's pattern that it is."""
    loss: float | None = None
    """The last loss of training that the log has; None: it has none."""

    @property
    def is_shown(self) -> bool:
        """Whether any line shows a step, or the training's end."""
        return self.at is not None


class _Mark(NamedTuple):
    """A line that shows how many steps are done."""

    at: int
    steps: int
    is_over: bool = False


def progress_of(lines: Sequence[LogLine], *, steps: int, pattern: str | None = None) -> StepsShown:
    """What the lines show of ``steps`` steps, by a pattern or by the usual signs."""
    usual = list(_usual(lines, steps))
    marks = list(_matched(lines, pattern, steps)) if pattern else usual
    done = [mark for mark in marks if mark.steps]
    first_at = min((mark.at for mark in done), default=None)
    begun = [mark.at for mark in usual if not mark.steps]
    begun += [at for at, line in enumerate(lines) if _BEGINS.search(line.text)]
    begins_at = min(begun, default=None)
    if first_at is not None and begins_at is not None and begins_at >= first_at:
        begins_at = None
    most = max((mark.steps for mark in done), default=0)
    losses = [loss for line in lines[begins_at:] if (loss := _loss(line.text)) is not None]
    return StepsShown(
        steps=most,
        at=next((mark.at for mark in done if mark.steps == most), None),
        first_at=first_at,
        begins_at=begins_at,
        is_over=any(mark.is_over for mark in done),
        loss=losses[-1] if losses else None,
    )


def _matched(lines: Sequence[LogLine], pattern: str, steps: int) -> Iterator[_Mark]:
    """Lines that the user's pattern finds."""
    wanted = re.compile(pattern)
    for at, line in enumerate(lines):
        for found in wanted.finditer(line.text):
            named = found.groupdict().get("step") if "step" in wanted.groupindex else None
            if "step" not in wanted.groupindex:
                yield _Mark(at, steps, is_over=True)
            elif named is not None and named.isdecimal():
                yield _Mark(at, int(named), is_over=int(named) >= steps)


def _usual(lines: Sequence[LogLine], steps: int) -> Iterator[_Mark]:
    """Lines of the usual kinds. Each process may print a step's dictionary; and where there are
    some, a bar without a description may be of anything.
    """
    dictionaries: defaultdict[str, set[str]] = defaultdict(set)
    has_dictionaries = any(_HF_STEP.search(line.text) for line in lines)
    first, is_resumed = None, False
    for at, line in enumerate(lines):
        text = line.text
        is_resumed |= first is None and _RESUMED.search(text) is not None
        if _HF_END.search(text):
            yield _Mark(at, steps, is_over=True) if _loss(text) else _Mark(at, 0)
        elif (told := _HF_STEP.search(text)) is not None:
            if not _ELSEWHERE.search(told[0]):
                dictionaries[line.stream].add(text)
                yield _Mark(at, len(dictionaries[line.stream]))
        elif (bar := _BAR.match(text)) is not None:
            what = bar["what"].strip()
            if _OF_TRAINING.fullmatch(what) or not (what or has_dictionaries):
                yield _Mark(at, int(bar["step"]))
        elif (told := _numbered(text)) is not None:
            number, has_all = int(told["step"]), told["all"] is not None
            first = number if first is None else min(first, number)
            counted_from_0 = int(told["all"]) < steps if has_all else first == 0
            yield _Mark(at, number + counted_from_0 - (max(first - 1, 0) if is_resumed else 0))


def _numbered(text: str) -> re.Match[str] | None:
    """The number of a step of training in a line that says of how many it is, or has its loss."""
    found = [
        told
        for told in _NUMBERED.finditer(text)
        if _BEFORE_A_STEP.fullmatch(_CLAUSE.split(text[: told.start()])[-1])
        and not _ELSEWHERE.search(text[: told.start()])
        and (told["all"] is not None or _LOSS.search(text))
    ]
    steps = (told for told in found if told["what"].lower() == "step")
    return next(steps, None) or next(iter(found), None)


def _loss(text: str) -> float | None:
    found = None if _ELSEWHERE.match(text) else _LOSS.search(text)
    return None if found is None else float(found["loss"])
