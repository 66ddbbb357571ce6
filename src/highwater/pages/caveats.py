"""What a reader has to know beside an answer: the one line below its table, and whose host memory
is taken.
"""

from collections.abc import Sequence

from highwater.nouns.headroom import Risk
from highwater.nouns.host_memory import THIS_MACHINE
from highwater.nouns.settings_words import listed
from highwater.pages.text import plain
from highwater.units import format_bytes, format_tokens

_OF_A_RISK: dict[Risk, str] = {
    "tight": "tight: only the prediction itself fits, its pessimistic end does not; try it first",
    "likely": "likely: even the pessimistic end fits, but little is left; try it first",
}


def caveat(risk: Risk | None, unlike: Sequence[str], *, star: Sequence[str] = ()) -> str:
    """The one line below a table: that little is left, or what of it nobody has measured
    (``unlike``), else where more is said.

    ``star`` comes first: what a star in the table means.
    """
    says = "`--explain` says what from, and how good such answers were"
    if unlike:
        says = (
            f"nobody has measured this with {plain(listed(unlike))} yet: try it before you rely "
            "on it; `--explain` says more"
        )
    if risk is not None:
        says = _OF_A_RISK.get(risk, says)
    return "; ".join((*star, says))


def star_of_yarn(longest_tokens: int, native_length_tokens: int) -> tuple[str, ...]:
    """What a star means, where the longest length of a table is past the native one."""
    if longest_tokens <= native_length_tokens:
        return ()
    return (f"* past the native length of {format_tokens(native_length_tokens)}: YaRN",)


def assumed_host(host_bytes: int | None, machine: str | None) -> tuple[str, ...]:
    """Which machine's host memory is taken because nobody said how much there is."""
    if machine is None or host_bytes is None:
        return ()
    size = format_bytes(host_bytes)
    if machine == THIS_MACHINE:
        return (f"host memory is this machine's, {size}; `--host-memory` says of another",)
    return (
        f"host memory is taken as {size} ({plain(machine)}); `--host-memory` says what yours has",
    )
