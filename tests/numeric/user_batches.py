"""Token batches as a user may write them, good and bad, for `--data user_batches:<name>`."""

import math
from collections.abc import Iterator
from typing import Any


def good(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * 30, [2] * (length_tokens - 30)]
    ids = [3] * (length_tokens - 1) + [4]
    labels = [-100] * (length_tokens - 1) + [4]
    yield [{"input_ids": ids, "labels": labels}]
    yield [
        {"input_ids": ids, "labels": labels, "logprobs": [math.nan] * (length_tokens - 1) + [-0.5]}
    ]


def too_long(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (length_tokens + 1)]


def two_as_one(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (2 * length_tokens)]


def uneven(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (length_tokens - 8), [2] * (length_tokens - 8), [3] * 16]


def label_outside(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [{"input_ids": [1] * length_tokens, "labels": [1] * (length_tokens - 1) + [11]}]


def label_of_another_trainer(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [{"input_ids": [1] * length_tokens, "labels": [-1] + [1] * (length_tokens - 1)}]


def untrained(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    while True:
        yield [{"input_ids": [1] * length_tokens, "labels": [1] + [-100] * (length_tokens - 1)}]


def trained_on_one_rank(*, data_rank: int, length_tokens: int, **_: Any) -> Iterator[Any]:
    labels = [-100] * (length_tokens - 1) + [2 if data_rank else -100]
    yield [{"input_ids": [1] * (length_tokens - 1) + [2], "labels": labels}]


def too_short(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1] * (length_tokens - 1)]


def outside(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[11] * length_tokens]


def no_documents(**_: Any) -> Iterator[Any]:
    yield []


def nothing(**_: Any) -> Iterator[Any]:
    yield from ()


def endless_reward(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [{"input_ids": [1] * length_tokens, "reward": math.inf}]


def unlikely(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [{"input_ids": [1] * length_tokens, "logprobs": [-math.inf] * length_tokens}]


def large_group(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [{"input_ids": [1] * length_tokens, "group": 2**63}]


def of_another_kind(field: str, value: Any, *, length_tokens: int) -> Iterator[Any]:
    yield [{"input_ids": [1] * length_tokens, field: value}]


def part_of_a_group(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("group", 0.9, length_tokens=length_tokens)


def group_in_words(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("group", "abc", length_tokens=length_tokens)


def reward_in_words(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("reward", "good", length_tokens=length_tokens)


def no_reward(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("reward", None, length_tokens=length_tokens)


def fractions(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[1.7] * length_tokens]


def truths(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[True] * length_tokens]


def fractions_as_labels(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("labels", [2.9] * length_tokens, length_tokens=length_tokens)


def misspelt(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("label", [-100] * length_tokens, length_tokens=length_tokens)


def masked(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    return of_another_kind("attention_mask", [0] * length_tokens, length_tokens=length_tokens)


def without_ids(**_: Any) -> Iterator[Any]:
    yield [{"labels": [1, 2]}]


def huge_ids(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [[2**70] * length_tokens]


def text(**_: Any) -> Iterator[Any]:
    yield ["a document"]


def nobody(**_: Any) -> Iterator[Any]:
    yield [None]


def one_number(**_: Any) -> Iterator[Any]:
    yield 5


def no_iterator(**_: Any) -> int:
    return 5


def without_keywords() -> Iterator[Any]:
    yield [[1]]


no_function = 5


def first_logprob_unknown(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    yield [
        {"input_ids": [1] * length_tokens, "logprobs": [math.nan] + [-0.5] * (length_tokens - 1)}
    ]
