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


def untrained(*, length_tokens: int, **_: Any) -> Iterator[Any]:
    while True:
        yield [{"input_ids": [1] * length_tokens, "labels": [1] + [-100] * (length_tokens - 1)}]


def trained_on_one_rank(*, data_rank: int, length_tokens: int, **_: Any) -> Iterator[Any]:
    labels = [-100] * (length_tokens - 1) + [2 if data_rank else -100]
    yield [{"input_ids": [1] * (length_tokens - 1) + [2], "labels": labels}]


def nothing(**_: Any) -> Iterator[Any]:
    yield from ()


def without_keywords() -> Iterator[Any]:
    yield [[1]]


def no_iterator(**_: Any) -> int:
    return 5


no_function = 5


def once(batch_of: Callable[[int], Any]) -> Callable[..., Iterator[Any]]:
    """A source of one batch, whatever is made of the length."""

    def source(*, length_tokens: int, **_: Any) -> Iterator[Any]:
        yield batch_of(length_tokens)

    return source


def one_document(**fields: Any) -> Callable[..., Iterator[Any]]:
    """A source of a document of the whole length, with these fields beside its ids."""
    return once(lambda length: [{"input_ids": [1] * length, **fields}])


def of_tokens(**fields_of: Callable[[int], list[Any]]) -> Callable[..., Iterator[Any]]:
    """The same with fields that have a value for every token."""
    return once(
        lambda length: [
            {"input_ids": [1] * length, **{name: of(length) for name, of in fields_of.items()}}
        ]
    )


too_long = once(lambda length: [[1] * (length + 1)])
two_as_one = once(lambda length: [[1] * (2 * length)])
uneven = once(lambda length: [[1] * (length - 8), [2] * (length - 8), [3] * 16])
too_short = once(lambda length: [[1] * (length - 1)])
no_documents = once(lambda _: [])
outside = once(lambda length: [[11] * length])
fractions = once(lambda length: [[1.7] * length])
truths = once(lambda length: [[True] * length])
huge_ids = once(lambda length: [[2**70] * length])
without_ids = once(lambda _: [{"labels": [1, 2]}])
text = once(lambda _: ["a document"])
nobody = once(lambda _: [None])
one_number = once(lambda _: 5)
endless_reward = one_document(reward=math.inf)
large_group = one_document(group=2**63)
part_of_a_group = one_document(group=0.9)
group_in_words = one_document(group="abc")
reward_in_words = one_document(reward="good")
no_reward = one_document(reward=None)
unlikely = of_tokens(logprobs=lambda length: [-math.inf] * length)
fractions_as_labels = of_tokens(labels=lambda length: [2.9] * length)
label_outside = of_tokens(labels=lambda length: [1] * (length - 1) + [11])
label_of_another_trainer = of_tokens(labels=lambda length: [-1] + [1] * (length - 1))
misspelt = of_tokens(label=lambda length: [-100] * length)
masked = of_tokens(attention_mask=lambda length: [0] * length)
first_logprob_unknown = of_tokens(logprobs=lambda length: [math.nan] + [-0.5] * (length - 1))
