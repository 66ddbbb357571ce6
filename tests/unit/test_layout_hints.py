"""Layouts that cannot be are refused with flags that work: every one of them is asked for."""

import shlex
from itertools import product
from typing import Any

import pytest

from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.nouns.cells import cells_of
from highwater.nouns.declaration import MOST_GPUS_OF_A_MACHINE
from highwater.nouns.layout import Layout
from highwater.nouns.request import request_from

MOST = 8
"""The most of each number that is asked for."""
MODEL = "Qwen3-8B"
SHAPE = load_model(MODEL).shape


def refusal_of(gpus: int, *, within_machines: bool = False, **settings: Any) -> str | None:
    """The hint of a layout that cannot be; None where it can."""
    request = request_from({"model": MODEL, "gpus": [gpus], **settings})
    try:
        cells, _ = cells_of(request, SHAPE, "cuda", (gpus,), within_machines=within_machines)
    except UsageError as refused:
        return refused.hint
    assert all(cell.layout.gpus == gpus for cell in cells)
    return None


def offered(hint: str) -> list[dict[str, Any]]:
    """What the hint offers to type, as settings."""
    each = (shlex.split(flags) for flags in hint.split("`")[1::2])
    return [
        {
            flag.removeprefix("--"): [int(value)] if value.isdecimal() else value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }
        for words in each
    ]


@pytest.mark.parametrize("gpus", range(1, MOST + 1))
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_every_layout_that_a_hint_names_can_be(gpus, strategy):
    for ulysses, ring, copies in product(range(1, MOST + 1), repeat=3):
        asked = {"ulysses": [ulysses], "ring": [ring], "copies": [copies]}
        hint = refusal_of(gpus, strategy=strategy, **asked)
        if hint is not None:
            ways = offered(hint)
            assert ways
            for way in ways:
                assert refusal_of(gpus, strategy=strategy, **(asked | way)) is None, (asked, way)


@pytest.mark.parametrize("gpus", [17, 20, 24, 48, 64])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_of_several_machines_a_hint_names_copies_that_each_hold(gpus, strategy):
    for ulysses, ring, copies in product((1, 2, 3, 16), (1, 2, 3, 8), (1, 2, 3, 8, 64)):
        asked = {"ulysses": [ulysses], "ring": [ring], "copies": [copies], "strategy": strategy}
        hint = refusal_of(gpus, within_machines=True, **asked)
        if hint is None:
            layout = Layout(
                gpus=gpus, ulysses_degree=ulysses, ring_degree=ring, replicate_degree=copies
            )
            assert layout.shard_degree <= layout.machine_gpus <= MOST_GPUS_OF_A_MACHINE
            assert layout.machine_gpus % layout.context_degree == 0
        else:
            assert offered(hint)
            for way in offered(hint):
                assert refusal_of(gpus, within_machines=True, **(asked | way)) is None, (asked, way)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ({"ulysses": [2], "ring": [4]}, {"ulysses": [2], "ring": [3]}),
        ({"ulysses": [6]}, {"ulysses": [2], "ring": [3]}),
        ({"ulysses": [6], "copies": [4]}, {"ulysses": [2], "ring": [3], "copies": [3]}),
        (
            {"ulysses": [6], "copies": [2], "strategy": "fsdp"},
            {"ulysses": [2], "ring": [3], "copies": [1]},
        ),
        ({"ulysses": [2], "ring": [3], "copies": [4]}, {"copies": [3]}),
    ],
)
def test_the_first_layout_that_is_named_is_the_nearest_on_as_many_gpus(asked, nearest):
    hint = refusal_of(6, **({"strategy": "fsdp2"} | asked))
    assert hint is not None
    assert offered(hint)[0] == nearest


def test_of_several_numbers_one_that_is_kept_works_with_what_the_hint_changes():
    for counts, copies in product(([4, 6], [6, 8], [3, 5]), ([1, 4], [3, 4], [5])):
        asked = {"gpus": counts, "ulysses": [5, 7], "copies": copies, "strategy": "fsdp2"}
        with pytest.raises(UsageError) as refused:
            cells_of(request_from({"model": MODEL, **asked}), SHAPE, "cuda", tuple(counts))
        for way in offered(refused.value.hint or ""):
            changed = request_from({"model": MODEL, **(asked | way)})
            assert cells_of(changed, SHAPE, "cuda", tuple(counts))[0]
