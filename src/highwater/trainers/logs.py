"""Logs of foreign trainers: plain lines with the process that wrote each, and the finished steps.

Terminal colours are removed, a progress bar that overwrites itself becomes a line for each state,
and prefixes of launchers and loggers (host, rank, process, time) are removed: a process's name
becomes the name of the line's stream.

Steps are read from dictionaries of Hugging Face's Trainer, from progress bars of training (not of
loading, tokenizing or an evaluation), from ``step 2/2``, and from lines with a step's number and a
loss, as torchtitan, verl and Megatron write. They are proof if the trainer sums up its training
(``train_runtime``), or if every step is shown, in order, each with its own loss: a last step alone
may have been read from a checkpoint, or planned. TRL's names are those of
``SFTTrainer.compute_loss`` and ``GRPOTrainer._log`` of trl 1.16.0; it prints numbers with four
digits, so token counts are compared to that precision.
"""

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple, cast

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_LINE_END = re.compile(r"\r\n|[\n\r]")
_HOOK = r"\[(?P<hook>rank\d{1,5})\]: ?"
"""Prefix of each line of an uncaught exception, written by torch.distributed's hook."""
OF_ANOTHER_TIME = (
    r"(?i:\b(?:(?:re|pre)?load(?:ed|ing)|resum|restore|restoring|checkpoint|best|dry|config"
    r"|estimat|replay|skip|simulat|cached|previous|history|would|planned)\w*)"
)
"""Words that mark a step's line as about another time than now."""
_PREFIX = re.compile(
    rf"{_HOOK}"
    r"|\[(?P<rank>(?:[A-Za-z_-]{1,20}[ :=]{0,2})?\d{1,5}(?:,\d{1,5})?)\](?:<std(?:out|err)>)?:? ?"
    r"|\((?P<pid>(?:[^()]{0,80} )?pid=\d{1,10}(?:, ip=[\w.:]{1,40})?)\) ?"  # Ray
    r"|\[?(?:(?:\d{4}[-/]\d\d[-/]\d\d|\d\d/\d\d/\d\d(?:\d\d)?|[A-Z][a-z]{2} [ \d]\d)[T ])?"
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?: [-|](?= ))? ?"
    r"|\[(?![^\]]*(?:WARN|ERROR|CRIT|FATAL))"
    rf"(?![^\].]*{OF_ANOTHER_TIME})[A-Za-z][^\[\]]{{0,60}}\]:? ?"
    r"|(?P<host>(?=[\w.-]*\d)(?![\w.-]*(?:Error|Exception|Exit|Interrupt|step|epoch|iter|loss))"
    r"[\w.-]{1,64})(?: *\| |:[ \t])"
)
"""A process's name or a time at the start of a line. A host's name must have a digit; other
prefixes are found by the traceback that they stand before."""
TRACEBACK = "Traceback (most recent call last):"
"""First line of an exception in Python, before its frames."""
_SOURCE = re.compile(r"\s{2,}[\w/.-]+\.py:\d+$")
"""Source file and line at the right edge of a log line, as rich writes."""

_NAME = re.compile(
    rf"(?!\S*(?:step|epoch|iter|loss|{OF_ANOTHER_TIME}))[\w.-]{{1,64}}(?: ?[:>|]| -) ",
    re.IGNORECASE,
)
"""A name before a line, without a meaning for steps."""
_BOX = re.compile(r"[╭┌][─ ]*$")
"""The corner of the box that rich draws around a traceback."""

_LONGEST = 8192
"""Most characters of a line that are read; lines for people are shorter."""
_LONGEST_PREFIX, _NEAR = 80, 8
"""Most characters of a prefix, and lines after a traceback's first that are searched for it."""


class LogLine(NamedTuple):
    """One line of a log."""

    stream: str
    """Name of the process that wrote the line, by its prefixes; empty without any."""
    text: str
    is_uncaught: bool = False
    """True if torch.distributed's hook wrote the line: it is of an exception that ended a rank."""


def log_lines(text: str) -> list[LogLine]:
    """The lines of a log, including states of progress bars, in the order of writing."""
    found = [_line(raw[:_LONGEST]) for raw in _LINE_END.split(_ANSI.sub("", text))]
    prefixes = _other_prefixes(found)
    lines: list[LogLine] = []
    for line in found:
        if prefixes is not None and (prefix := prefixes.match(line.text)) is not None:
            own = _line(line.text[prefix.end() :])
            stream = f"{line.stream} {prefix[0].strip()} {own.stream}".rstrip()
            line = LogLine(stream, own.text, line.is_uncaught or own.is_uncaught)
        before, header, after = line.text.partition(TRACEBACK)
        if header and before.strip() and not after.strip():
            # a progress bar leaves no line end before the text that follows
            lines += [line._replace(text=before), line._replace(text=header)]
        else:
            lines.append(line)
    return lines


def _line(raw: str) -> LogLine:
    """A line with its prefixes removed; prefixes that name a process give the stream."""
    names: list[str] = []
    is_uncaught = False
    while (found := _PREFIX.match(raw)) is not None:
        if found.lastgroup is not None:
            names.append(found[found.lastgroup])
        is_uncaught |= found.lastgroup == "hook"
        raw = raw[found.end() :]
    return LogLine(" ".join(dict.fromkeys(names)), _SOURCE.sub("", raw).rstrip(), is_uncaught)


def _other_prefixes(lines: Sequence[LogLine]) -> re.Pattern[str] | None:
    """Pattern of prefixes before tracebacks and of all lines, with any digits; None if none."""
    found: dict[str, None] = {}
    for at, line in enumerate(lines):
        before = _BOX.sub("", line.text.partition(TRACEBACK[:-1])[0])
        if before != line.text and before.strip() and len(before) <= _LONGEST_PREFIX:
            mask = re.sub(r"\d+", r"\\d+", re.escape(before))
            if any(re.match(mask, each.text) for each in lines[at + 1 : at + 1 + _NEAR]):
                found[mask] = None
    texts = [f"{line.text} " for line in lines if line.text and "%|" not in line.text]
    name = _NAME.match(texts[0]) if len(texts) > _NEAR else None
    if name is not None and all(text.startswith(name[0]) for text in texts):
        found[re.escape(name[0].rstrip()) + "(?: |$)"] = None
    return re.compile("|".join(found)) if found else None


_DICT = re.compile(r"\{'[^{}\n\r]*\}")
_DIGITS = 4
_ROUNDED = 0.5 * 10 ** (1 - _DIGITS)
"""Largest relative error of rounding to ``_DIGITS`` digits."""


def steps_of(
    text: str, *, step_tokens: int, shared_by: int = 1, counted: str = "num_tokens"
) -> int:
    """Number of steps that a trainer logged in order, each with a finite loss and the expected
    count of tokens: ``step_tokens`` per step, or ``shared_by`` times that if each of the GPUs that
    share a sequence counts it. ``counted``: name of the count in the log.
    """
    done = 0
    for step in logged_steps(text):
        tokens, expected = _number(step.get(counted)), (done + 1) * step_tokens
        counts = (expected, shared_by * expected)
        is_exact = any(math.isclose(tokens, count, rel_tol=_ROUNDED) for count in counts)
        if not math.isfinite(_number(step["loss"])) or not is_exact:
            break
        done += 1
    return done


def logged_steps(text: str) -> Iterator[Mapping[str, object]]:
    """Yield what Hugging Face's Trainer logged at each step, as dictionaries."""
    for found in _DICT.finditer(text):
        try:
            said: object = ast.literal_eval(found[0])
        except (ValueError, SyntaxError):
            continue
        if isinstance(said, dict) and "loss" in said and "epoch" in said:
            yield cast(Mapping[str, object], said)


def _number(value: object) -> float:
    """Value of a printed number, which newer versions put in quotes; NaN for other text."""
    try:
        return float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        return math.nan


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
"""Description of a training's progress bar; ``Tokenizing train dataset`` does not match."""
_NUMBERED = re.compile(
    r"\b(?:global_?)?(?P<what>step|iter(?:ation)?)\b['\"]?[\s:=#]{0,12}(?P<step>\d+)\b"
    r"(?: *?/ *(?P<all>\d+))?",
    re.IGNORECASE,
)
_FIELD = re.compile(r"[\w/.-]{1,60}['\"]?[:=] {0,9}['\"]?[-+]?(?:\d[\d.e+-]*|nan|inf)")
_LOGGER = re.compile(
    r"^(?:.*\b(?:INFO|DEBUG|NOTICE)\b[\W_]*(?:[\w.:<>]{1,80}\s*(?:[:|\])>]| -)\s*)?|.*\d%\|.*\])"
)
"""Words of a logger or a bar before the rest of a line."""
_BEFORE_A_STEP = re.compile(
    rf"(?:{_TRAINING}|trainer|rank|gpu|worker|node|loss|lr|step|iter(?:ation)?|\w{{1,40}}\.py"
    r"|\b[IW]\d{4}\b|(?<=\d)m?s\b|[\W\d_])*",
    re.IGNORECASE,
)
"""Other words that may stand before a step of training, besides figures. ``Preparation step``,
``Config: step`` and ``trainer_state: {`` do not match."""
_DOUBTED = re.compile(rf"{OF_ANOTHER_TIME}(?!['\"\s\w()/-]{{0,24}}[:=]\s{{0,12}}['\"]?[-+\d.])")
"""A word that marks a step's line as about another time, unless it is the name of a figure."""
_NOT_NOW = re.compile(
    r"\bdry[ -]run\b(?!\W{1,4}(?:false|no|off|0)\b)|\breplay(?:ing|ed)\b"
    r"|\b(?:log|output|history) of (?:\w+ ){0,2}(?:last|previous|earlier|old)\b",
    re.IGNORECASE,
)
"""A line that marks all lines after it as about another time."""
_LABELS = 4
"""Most labels of a line that are read: it may count epochs and iterations besides steps."""
_ELSEWHERE = re.compile(r"\b(?:eval|valid|val\b|test|infer|predict|warm-?up|calibr|sanity)", re.I)
"""Words for loops with steps and losses that are no training."""
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
"""Words of trainers before the first step begins."""
_RESUMED = re.compile(r"\bresum(?:ing|ed)\b", re.IGNORECASE)


class StepsShown(NamedTuple):
    """How many steps a log shows as done, and whether it shows the end."""

    steps: int = 0
    """Lower bound of the finished steps."""
    at: int | None = None
    """Index of the line that shows the last finished step; None if no line shows a step."""
    first_at: int | None = None
    """Index of the line that shows the first finished step; None if no line shows a step."""
    begins_at: int | None = None
    """Index of an earlier line that says that training begins; None without one."""
    is_over: bool = False
    """True if the trainer, or a match of the user's pattern, says that training is over."""
    has_each: bool = False
    """True if every step was shown, in order, with its own loss."""
    loss: float | None = None
    """The last training loss in the log; None without one."""

    @property
    def is_shown(self) -> bool:
        """True if any line shows a step, or the end of training."""
        return self.at is not None


class _Mark(NamedTuple):
    """A log line that shows a number of finished steps."""

    at: int
    steps: int
    is_over: bool = False
    series: tuple[str, str] = ("", "")
    """The line's stream, and the kind of counter in it."""


def progress_of(lines: Sequence[LogLine], *, steps: int, pattern: str | None = None) -> StepsShown:
    """Count done steps of ``steps`` in log lines: by ``pattern``, else by known formats."""
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
    """True if one counter in the log goes through all steps, with a loss by each."""
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
    """Lines that match the user's pattern; without a group ``step``, a match ends the training."""
    wanted = re.compile(pattern)
    for at, line in enumerate(lines):
        for found in wanted.finditer(line.text):
            named = found.groupdict().get("step") if "step" in wanted.groupindex else None
            if "step" not in wanted.groupindex:
                yield _Mark(at, steps, is_over=True)
            elif named is not None and named.isdecimal():
                yield _Mark(at, int(named), is_over=int(named) >= steps)


def _usual(lines: Sequence[LogLine], steps: int) -> Iterator[_Mark]:
    """Lines of known formats; bars without a description count only without dictionaries."""
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
    """True if the line's text before index ``at`` shows that it is not about training steps."""
    before = _LOGGER.sub("", _FIELD.sub("", text[:at]))
    return bool(
        _BEFORE_A_STEP.fullmatch(before) is None
        or _ELSEWHERE.search(before)
        or _DOUBTED.search(text)
    )


def _numbered(text: str) -> re.Match[str] | None:
    """Match of a training step's number, in a line that also has the total or a loss, or None."""
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
