"""Token batches as a user may write them, good and bad, for `--data user_batches:<name>`."""

import math
from collections.abc import Callable, Iterator
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


def no_documents(**_: Any) -> Iterator[Any]:
    yield []


def nothing(**_: Any) -> Iterator[Any]:
    yield from ()


def one_document(**fields: Any) -> Callable[..., Iterator[Any]]:
    """A source of documents of the whole length, with these fields beside their ids."""

    def source(*, length_tokens: int, **_: Any) -> Iterator[Any]:
        yield [{"input_ids": [1] * length_tokens, **fields}]

    return source


def of_tokens(**values: Any) -> Callable[..., Iterator[Any]]:
    """The same with fields that have one value for every token."""

    def source(*, length_tokens: int, **_: Any) -> Iterator[Any]:
        fields = {name: [value] * length_tokens for name, value in values.items()}
        yield [{"input_ids": [1] * length_tokens, **fields}]

    return source


def of_ids(token: Any) -> Callable[..., Iterator[Any]]:
    """A source of documents of one token over and over."""

    def source(*, length_tokens: int, **_: Any) -> Iterator[Any]:
        yield [[token] * length_tokens]

    return source


endless_reward = one_document(reward=math.inf)
large_group = one_document(group=2**63)
part_of_a_group = one_document(group=0.9)
group_in_words = one_document(group="abc")
reward_in_words = one_document(reward="good")
no_reward = one_document(reward=None)
unlikely = of_tokens(logprobs=-math.inf)
fractions_as_labels = of_tokens(labels=2.9)
misspelt = of_tokens(label=-100)
masked = of_tokens(attention_mask=0)
outside = of_ids(11)
fractions = of_ids(1.7)
truths = of_ids(True)
huge_ids = of_ids(2**70)


def without_ids(**_: Any) -> Iterator[Any]:
    yield [{"labels": [1, 2]}]


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
