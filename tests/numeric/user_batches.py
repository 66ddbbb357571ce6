"""Token batches as a user may write them, good and bad, for `--data user_batches:<name>`."""

from collections.abc import Iterator
from typing import Any


def good(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * 30, [2] * (length_tokens - 30)]
    ids = [3] * (length_tokens - 1) + [4]
    yield [{"input_ids": ids, "labels": [-100] * (length_tokens - 1) + [4]}]


def too_long(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (length_tokens + 1)]


def too_short(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (length_tokens - 1)]


def outside(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[11] * length_tokens]


def no_documents(**_: Any) -> Iterator[Any]:
    yield []


def nothing(**_: Any) -> Iterator[Any]:
    yield from ()
