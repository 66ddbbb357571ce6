"""Steps that a foreign trainer has done, by what its log shows of them.

Known without being told: the dictionaries of Hugging Face's Trainer, progress bars of training
(not those of loading, of tokenizing or of an evaluation), ``step 2/2``, and lines that have a
step's number and a loss, as torchtitan's, verl's and Megatron's do. They prove the steps where the
trainer sums its training up (``train_runtime``), or where every step is shown, in order, each with
a loss of its own: the last one alone may have been read from a checkpoint, or planned.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from highwater.trials.foreign_log import OF_ANOTHER_TIME, LogLine

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
_FIELD = re.compile(r"[\w/.-]{1,60}['\"]?[:=] {0,9}['\"]?[-+]?(?:\d[\d.e+-]*|nan|inf)")
_LOGGER = re.compile(
    r"^(?:.*\b(?:INFO|DEBUG|NOTICE)\b[\W_]*(?:[\w.:<>]{1,80}\s*(?:[:|\])>]| -)\s*)?|.*\d%\|.*\])"
)
"""What a logger or a bar wrote before the rest of a line."""
_BEFORE_A_STEP = re.compile(
    rf"(?:{_TRAINING}|trainer|rank|gpu|worker|node|loss|lr|step|iter(?:ation)?|\w{{1,40}}\.py"
    r"|\b[IW]\d{4}\b|(?<=\d)m?s\b|[\W\d_])*",
    re.IGNORECASE,
)
"""What else may stand before a step of training, figures aside. ``Preparation step``, ``Config:
step`` and ``trainer_state: {`` are none."""
_DOUBTED = re.compile(rf"{OF_ANOTHER_TIME}(?!['\"\s\w()/-]{{0,24}}[:=]\s{{0,12}}['\"]?[-+\d.])")
"""What makes of a step's line one about another time, if it is not the name of a figure."""
_NOT_NOW = re.compile(
    r"\bdry[ -]run\b(?!\W{1,4}(?:false|no|off|0)\b)|\breplay(?:ing|ed)\b"
    r"|\b(?:log|output|history) of (?:\w+ ){0,2}(?:last|previous|earlier|old)\b",
    re.IGNORECASE,
)
"""What makes every line after it one about another time."""
_LABELS = 4
"""Labels of a line that are looked at: it may count epochs and iterations beside its steps."""
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
    has_each: bool = False
    """Whether every step was shown, in order, with a loss of its own."""
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
    series: tuple[str, str] = ("", "")
    """Its stream, and what counts in it."""


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
        has_each=pattern is None and _has_each(lines, usual, steps, begins_at or 0),
        loss=losses[-1] if losses else None,
    )


def _has_each(lines: Sequence[LogLine], marks: Sequence[_Mark], steps: int, begins_at: int) -> bool:
    """Whether one series of marks goes through all the steps, with a loss after each, or before."""
    series: defaultdict[tuple[str, str], list[_Mark]] = defaultdict(list)
    for mark in marks:
        series[mark.series].append(mark)
    for (stream, _), own in series.items():
        counts = [0, *(mark.steps for mark in own)]
        if counts[-1] < steps or any(b - a not in (0, 1) for a, b in pairwise(counts)):
            continue
        has_loss = [line.stream == stream and _loss(line.text) is not None for line in lines]
        at = [next(mark.at for mark in own if mark.steps == step) for step in range(1, steps + 1)]
        after = pairwise((*at, len(lines)))
        before = pairwise((own[0].at if own[0].steps == 0 else begins_at, *(end + 1 for end in at)))
        if any(all(any(has_loss[a:b]) for a, b in spans) for spans in (after, before)):
            return True
    return False


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
    for at, (stream, text, _) in enumerate(lines):
        is_resumed |= first is None and _RESUMED.search(text) is not None
        if _NOT_NOW.search(text):
            return
        if (told := _HF_END.search(text) or _HF_STEP.search(text)) is not None:
            if _is_elsewhere(text, told.start()) or _ELSEWHERE.search(told[0]):
                continue
            if told.re is _HF_END:
                yield _Mark(at, steps, is_over=True) if _loss(text) else _Mark(at, 0)
            else:
                dictionaries[stream].add(text)
                yield _Mark(at, len(dictionaries[stream]), series=(stream, "dictionaries"))
        elif (bar := _BAR.match(text)) is not None:
            what = bar["what"].strip()
            if _OF_TRAINING.fullmatch(what) or not (what or has_dictionaries):
                yield _Mark(at, int(bar["step"]), series=(stream, f"bar of {bar['all']}"))
        elif (told := _numbered(text)) is not None:
            number, has_all = int(told["step"]), told["all"] is not None
            first = number if first is None else min(first, number)
            counted_from_0 = int(told["all"]) < steps if has_all else first == 0
            done = number + counted_from_0 - (max(first - 1, 0) if is_resumed else 0)
            yield _Mark(at, done, series=(stream, told["what"].lower()))


def _is_elsewhere(text: str, at: int) -> bool:
    """Whether what a line says from here on is said of another time, or is no training's."""
    before = _LOGGER.sub("", _FIELD.sub("", text[:at]))
    return bool(
        _BEFORE_A_STEP.fullmatch(before) is None
        or _ELSEWHERE.search(before)
        or _DOUBTED.search(text)
    )


def _numbered(text: str) -> re.Match[str] | None:
    """The number of a step of training in a line that says of how many it is, or has its loss."""
    found = [
        told
        for told in islice(_NUMBERED.finditer(text), _LABELS)
        if (told["all"] is not None or _LOSS.search(text)) and not _is_elsewhere(text, told.start())
    ]
    steps = (told for told in found if told["what"].lower() == "step")
    return next(steps, None) or next(iter(found), None)


def _loss(text: str) -> float | None:
    found = _LOSS.search(text)
    if found is None or _ELSEWHERE.match(text) or _DOUBTED.search(text):
        return None
    return float(found["loss"])
