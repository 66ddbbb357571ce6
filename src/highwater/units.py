"""Units: parse and print bytes, tokens and seconds. Nothing else in the project rounds.

Bytes are printed in binary units (1 GiB = 1024³ bytes); "GB" is read as 10⁹, and "G" is refused,
never guessed. ``128k`` tokens are 131,072.
"""

import math
import re

from highwater.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_DECIMAL_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""Bytes of a decimal unit by its first letter; ``80G`` may mean one, too."""
_BINARY_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4}
_BYTE_UNITS = _BINARY_UNITS | {f"{each}b": size for each, size in _DECIMAL_UNITS.items()}
_TOKEN_UNITS = {"": 1, "k": KIB, "m": MIB}
_SECOND_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
MOST_BYTES = 1 << 60
"""Largest size in bytes that is read, an EiB: anything larger is a typing error."""
MOST_TOKENS = 1 << 30
"""Largest length in tokens: 1,073,741,824."""
MOST_SECONDS = 366 * 86_400.0
"""Longest time in seconds: a year."""
_LINE = 40
_NUMBER = re.compile(r"\s*(\d+(?:[_,]\d{3})*|\d*\.\d+|\d+\.\d*)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Parse ``"80GiB"``, ``"79.15 GiB"``, ``"64GB"`` (64,000,000,000) or a plain count to bytes,
    rounded down. Raises UsageError for anything else, and for "80G", which may be either.
    """
    number, unit = _split(text, what="a memory size", example="80GiB")
    decimal = _DECIMAL_UNITS.get(unit)
    if decimal is not None:
        meant = binary_size(int(min(number * decimal, MOST_BYTES)))
        raise UsageError(
            f"memory size {text!r} has an unclear unit",
            hint=f"write it in binary units: `{meant}`",
        )
    if unit not in _BYTE_UNITS:
        raise UsageError(
            f"memory size {text!r} has an unknown unit",
            hint="use KiB, MiB, GiB or TiB, for example `80GiB`",
        )
    if number * _BYTE_UNITS[unit] > MOST_BYTES:
        raise UsageError(
            f"memory size {_short(text)} is more than any machine has",
            hint="give its own, for example `80GiB`",
        )
    return int(number * _BYTE_UNITS[unit])


def last_digit_bytes(text: str) -> float:
    """Bytes of one in the last digit of a size: of ``"20.9GiB"`` a tenth of a GiB."""
    unit = text.lstrip("0123456789.,_ ")
    decimals = text.removesuffix(unit).partition(".")[2].strip()
    return parse_bytes(f"1{unit}") / 10 ** len(decimals)


def binary_size(count: int) -> str:
    """Write a count of bytes as a user types it, rounded down by up to 5 %: ``465GiB`` for
    500,000,000,000. Never more, so that no plan counts on memory that does not exist.
    """
    name, unit = next(
        (each for each in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if count >= 20 * each[1]),
        ("B", 1),
    )
    return f"{count // unit}{name}"


def parse_memory(text: str) -> int:
    """Parse the size of a GPU's or host's memory, or a part of it, like ``parse_bytes``. Below a
    MiB a unit is required, except for 0: ``"79.15"`` is hardly 79 bytes.
    """
    count = parse_bytes(text)
    number, unit = _split(text, what="a memory size", example="80GiB")
    if unit or not 0 < number < MIB:
        return count
    meant = f"{_plain(number)}{'GiB' if number <= KIB else 'MiB'}"
    raise UsageError(f"a memory size of {_plain(number)} bytes", hint=f"give the unit: `{meant}`")


def parse_tokens(text: str) -> int:
    """Parse ``"32768"``, ``"128k"`` (131,072) or ``"1m"`` (1,048,576) to tokens; at least 1."""
    one, comma, other = text.partition(",")
    if comma and one[-1:].lower() in _TOKEN_UNITS and other:
        raise UsageError(
            f"{_short(text)} are several lengths",
            hint=f"ask once for each: `{one}`, then `{other}`",
        )
    number, unit = _split(text, what="a length in tokens", example="32k")
    if unit not in _TOKEN_UNITS:
        raise UsageError(
            f"length {text!r} has an unknown unit", hint="give tokens, for example `32768` or `32k`"
        )
    tokens = number * _TOKEN_UNITS[unit]
    if tokens > MOST_TOKENS:
        raise UsageError(
            f"length {_short(text)} is past the longest that is tried, {MOST_TOKENS:,}",
            hint=f"use `{MOST_TOKENS}` or less",
        )
    if tokens != int(tokens) or tokens < 1:
        raise UsageError(
            f"length {text!r} is not a whole number of tokens, 1 or more",
            hint="for example `32768` or `32k`",
        )
    return int(tokens)


def parse_amount(text: str) -> int:
    """Parse a number of tokens to train on, ``"500M"`` (500,000,000), ``"2B"`` or a plain count."""
    number, unit = _split(text, what="a number of tokens", example="500M")
    tokens = number * {"": 1, **_DECIMAL_UNITS, "b": 10**9}.get(unit, 0)
    if not 1 <= tokens <= MOST_BYTES:
        raise UsageError(f"{_short(text)} tokens to train on", hint="for example `--tokens 500M`")
    return int(tokens)


def parse_share(share: str | float) -> float:
    """Parse a share above 0 and up to 1: ``0.98``, or ``"98%"``, or ``98`` of a hundred."""
    read = re.fullmatch(r"(\d+(?:\.\d*)?)( ?%)?", str(share))
    number = float(read[1]) if read else 0.0
    number /= 100 if read and (read[2] or number > 1) else 1
    if not 0 < number <= 1:
        raise UsageError(f"{share} is no share of all", hint="for example `98%`")
    return number


def parse_price(price: str | float | None) -> float | None:
    """Parse the price of one GPU for an hour, ``2.5`` or ``"$2.50/h"``; None stays None."""
    read = None if price is None else re.fullmatch(r"\$?(\d+(\.\d*)?)(/h)?", str(price))
    if price is not None and read is None:
        raise UsageError(f"a price of {price} an hour", hint="for example `--price 2.50`")
    return float(read[1]) if read else None


def parse_seconds(text: str) -> float:
    """Parse ``"2400"``, ``"40m"``, ``"1h30m"`` or ``"90s"`` to seconds; more than 0."""
    compact = text.replace(" ", "").lower()
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        seconds = float(compact)
    elif re.fullmatch(r"(\d+(\.\d+)?[hms])+", compact):
        seconds = sum(
            float(n) * _SECOND_UNITS[u] for n, u in re.findall(r"(\d+(?:\.\d+)?)([hms])", compact)
        )
    else:
        raise UsageError(f"{text!r} is not a time", hint="for example `40m`, `90s` or `1h30m`")
    if seconds <= 0:
        raise UsageError(f"the time {text!r} is not above zero", hint="for example `40m`")
    if seconds > MOST_SECONDS:
        raise UsageError(
            f"the time {_short(text)} is more than a year",
            hint="for example `40m`, at most `8784h`",
        )
    return seconds


def counted(count: int, what: str) -> str:
    """Write a count with its noun: ``1 sequence``, ``2 sequences``, ``2 processes``."""
    several = "es" if what.endswith("s") else "s"
    return f"{count} {what}{'' if count == 1 else several}"


def format_bytes(count: int | None) -> str:
    """Write ``79.15 GiB``, or MiB below one GiB; ``-`` for None (unknown)."""
    if count is None:
        return "-"
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB"


def format_tokens(count: int | None) -> str:
    """Write ``131,072``; ``-`` for None (unknown)."""
    return "-" if count is None else f"{count:,}"


def format_seconds(seconds: float | None) -> str:
    """Write ``2.31 s``, ``4m 05s`` or ``1h 02m``; ``-`` for None (unknown)."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


def format_rate(tokens_per_s: float | None) -> str:
    """Write tokens per second as ``12,346``; ``-`` for None (unknown)."""
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def format_share(share: float | None) -> str:
    """Write ``43.2%``; ``-`` for None (unknown)."""
    return "-" if share is None else f"{share:.1%}"


def format_pass(seconds: float | None) -> str:
    """Write ``1.72 ms`` below 0.1 s, else like ``format_seconds``: for times often much shorter."""
    if seconds is None or seconds >= 0.1:
        return format_seconds(seconds)
    return f"{1000 * seconds:.2f} ms"


def _split(text: str, *, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"{_short(text)} is not {what}", hint=f"for example `{example}`")
    number = float(match[1].replace("_", "").replace(",", ""))
    if number == math.inf:
        raise UsageError(
            f"{_short(text)} is more than any machine has", hint=f"for example `{example}`"
        )
    return number, match[2].lower()


def _short(text: str) -> str:
    """Quote the typed text; only its beginning if it is longer than a line."""
    return repr(text if len(text) <= _LINE else f"{text[:_LINE]}…")


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
