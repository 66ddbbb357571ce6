"""Objectives x layouts x settings on real gloo processes against tests/references: the loss of a
step and every gradient.

`make test` runs cases in which every two values meet, `make test-all` those in which every three
do; all combinations of them are hundreds of thousands.

The references were written from the papers and from verl's and TRL's definitions by somebody who
had not read the engine.
"""

from itertools import product

import pytest
from cover_cases import PAIRED, cases, cases_for, save_models
from rank_groups import assert_close

from combinatorial import cover, meetings
from tables import deep

TOLERANCE = 1e-10
"""Norm-relative: summation order alone differs, all is float64."""


def test_every_two_values_meet_in_a_case():
    wanted = {meeting for box in PAIRED for meeting in meetings(box, 2)}
    met = {
        ((a, case[a]), (b, case[b]))
        for case in cases(2)
        for a, b in product(sorted(case.values), repeat=2)
        if a < b
    }
    assert wanted <= met


def test_cases_lie_within_the_constraints():
    boxes = ({"a": ("1", "2"), "b": ("x",)}, {"a": ("3",), "b": ("x", "y")})
    found = [(case["a"], case["b"]) for case in cover(boxes, strength=2, seed=0)]
    assert sorted(found) == [("1", "x"), ("2", "x"), ("3", "x"), ("3", "y")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strength", [2, *deep(3)])
@pytest.mark.parametrize("processes", [1, 2, 4, 3, 6, 8])
def test_every_combination_equals_its_reference(processes, strength, ranks):
    words = (ranks.models(save_models), str(strength))
    results = ranks.results("cover_cases", processes, *words, timeout_s=1100)
    names = [case.name for case in cases_for(processes, strength)]
    assert_close(results, dict.fromkeys(names, TOLERANCE), of=("loss", "gradient"))
