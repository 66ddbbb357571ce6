"""Steps that a foreign trainer has done, by what its log shows of them.

Known without being told: the dictionaries of Hugging Face's Trainer, progress bars of training
(not those of loading or of tokenizing, which have a description), ``step 2/2``, and lines that have
a step's number and a loss, as torchtitan's, verl's and Megatron's do.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from highwater.run.foreign_log import LogLine

_HF_STEP = re.compile(r"\{.{0,400}?['\"]loss['\"]: ")
_HF_END = re.compile(r"\{.{0,400}?['\"]train_runtime['\"]: ")
_BAR = re.compile(
    r"^(?P<what>[^|%]{0,80}?):?\s*\d{1,3}%\|.{0,200}\|\s*(?P<step>\d+)/(?P<all>\d+) \["
)
_OF_TRAINING = re.compile(
    r"(?:train(?:ing)?|epoch|steps?|iter(?:ation)?s?)(?: ?progress| steps?)?[\s\d/\[\]]*",
    re.IGNORECASE,
)
"""The description of a training's progress bar; ``Tokenizing train dataset`` is none."""
_OF_ALL = re.compile(
    r"\b(?:global_?)?(?:step|iter(?:ation)?)\b['\"]?[\s:=#]{0,12}(?P<step>\d+) *?/ *(?P<all>\d+)",
    re.IGNORECASE,
)
_NUMBERED = re.compile(
    r"\b(?:global_?)?(?:step|iter(?:ation)?)\b['\"]?[\s:=#]{0,12}(?P<step>\d+)\b", re.IGNORECASE
)
_LOSS = re.compile(
    r"loss['\"]?\s{0,4}[:=]?\s{0,12}['\"]?(?P<loss>[-+]?(?:nan|inf(?:inity)?"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?))\b",
    re.IGNORECASE,
)


class StepsShown(NamedTuple):
    """What a log shows of the steps."""

    steps: int = 0
    """Steps that are done, at least."""
    at: int | None = None
    """Index of the line that shows the last of them; None: no line shows any."""
    before: int | None = None
    """Index of the line that shows the last but one; None where none does."""
    is_over: bool = False
    """Whether the trainer said that its training is over."""
    loss: float | None = None
    """The last loss that stands in such a line."""

    @property
    def is_shown(self) -> bool:
        """Whether any line shows a step, or the training's end."""
        return self.at is not None

    @property
    def has_loss(self) -> bool:
        """Whether the last loss is a number, as far as a log told one."""
        return self.loss is None or math.isfinite(self.loss)


def progress_of(lines: Sequence[LogLine], *, steps: int, pattern: str | None = None) -> StepsShown:
    """What the lines show of ``steps`` steps, by a pattern or by the usual signs."""
    marks = _matched(lines, pattern, steps) if pattern else _usual(lines, steps)
    found = StepsShown()
    for at, done, is_over in marks:
        loss = _loss(lines[at].text)
        if done > found.steps or found.at is None:
            found = found._replace(steps=done, at=at, before=found.at)
        found = found._replace(
            is_over=found.is_over or is_over, loss=found.loss if loss is None else loss
        )
    return found


def _matched(lines: Sequence[LogLine], pattern: str, steps: int) -> Iterator[tuple[int, int, bool]]:
    """Lines that the user's pattern finds: index, steps done, whether that is all."""
    wanted = re.compile(pattern)
    for at, line in enumerate(lines):
        for found in wanted.finditer(line.text):
            named = found.groupdict().get("step") if "step" in wanted.groupindex else None
            if "step" not in wanted.groupindex:
                yield at, steps, True
            elif named is not None and named.isdecimal():
                yield at, int(named), int(named) >= steps


def _usual(lines: Sequence[LogLine], steps: int) -> Iterator[tuple[int, int, bool]]:
    """Lines of the usual kinds: index, steps done, whether the trainer says that it is over."""
    dictionaries, first = 0, 1
    for at, line in enumerate(lines):
        text = line.text
        if _HF_END.search(text):
            yield at, steps, True
        elif _HF_STEP.search(text):
            dictionaries += 1
            yield at, dictionaries, False
        elif (bar := _BAR.match(text)) is not None:
            if not bar["what"].strip() or _OF_TRAINING.fullmatch(bar["what"].strip()):
                yield at, int(bar["step"]), False
        elif (told := _OF_ALL.search(text)) is not None:
            yield at, int(told["step"]), False
        elif (told := _NUMBERED.search(text)) is not None and _LOSS.search(text):
            number = int(told["step"])
            first = min(first, number)  # 0 where steps are counted from there
            yield at, number + 1 - first, False


def _loss(text: str) -> float | None:
    found = _LOSS.search(text)
    return None if found is None else float(found["loss"])
