"""Token batches as a user may write them, good and bad, for `--data user_batches:<name>`."""

from collections.abc import Iterator
from typing import Any


def good(**_: Any) -> Iterator[Any]:
    yield [[1, 2, 3], [4, 5]]
    yield [{"input_ids": [3, 4], "labels": [-100, 4]}]


def too_long(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (length_tokens + 1)]


def outside(**_: Any) -> Iterator[Any]:
    yield [[1, 11]]


def no_documents(**_: Any) -> Iterator[Any]:
    yield []


def nothing(**_: Any) -> Iterator[Any]:
    yield from ()
