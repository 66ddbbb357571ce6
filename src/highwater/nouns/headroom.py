"""Headroom: how much of a GPU a prediction is to leave free by default, and how sure it is that a
length fits, in a word.
"""

from typing import Literal

from highwater.units import GIB

Risk = Literal["safe", "likely", "tight"]
"""How sure a prediction is that a length fits. ``safe``: the default headroom is left, and even the
pessimistic end of the interval is below the GPU's memory; ``likely``: that end is below it;
``tight``: only the prediction itself is, and a trial has to tell."""

RISK_IN_WORDS = (
    "safe: 2 GiB or 3 % of a GPU, whichever is more, is left free, and even the pessimistic end of "
    "the prediction fits; likely: that end fits; tight: only the prediction itself fits, so that a "
    "trial has to tell"
)
_LEAST_BYTES = 2 * GIB
_SHARE = 3, 100
_MOST_SHARE = 8
"""Of a GPU with less than 16 GiB, an eighth is left free: 2 GiB would be much of it."""


def default_headroom_bytes(device_bytes: int) -> int:
    """Bytes that a prediction leaves free of a GPU of ``device_bytes`` unless asked otherwise."""
    part, of = _SHARE
    return min(max(_LEAST_BYTES, device_bytes * part // of), device_bytes // _MOST_SHARE)


def risk_of(
    *, headroom_bytes: int, pessimistic_bytes: int, device_bytes: int, whole_bytes: int | None
) -> Risk | None:
    """The risk of a length that leaves ``headroom_bytes`` by the prediction itself, and needs
    ``pessimistic_bytes`` by its upper end; None where not even the prediction fits.

    ``device_bytes`` are what training has of a GPU, ``whole_bytes`` the GPU's, where that is more.
    """
    if headroom_bytes < 0:
        return None
    if pessimistic_bytes > device_bytes:
        return "tight"
    kept_bytes = default_headroom_bytes(whole_bytes or device_bytes)
    return "safe" if headroom_bytes >= kept_bytes else "likely"
