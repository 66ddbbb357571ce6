"""Settings, lengths and sizes, and how they are written."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater import units
from highwater.errors import UsageError
from highwater.model.held_bytes import step_flops
from highwater.model.model import load_model
from highwater.nouns import trial as nouns
from highwater.nouns.codec import from_builtins, from_json, to_builtins, to_json
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Grid
from highwater.search.scheduler import search_cells
from highwater.trials.simulated import SimulatedRunner
from places import question_of
from tables import table
from trial_specs import answers_among, grid_of


@pytest.mark.parametrize(
    ("settings", "said", "hint", "mended"),
    table("settings", "settings_that_exclude_each_other_are_refused"),
)
def test_settings_that_exclude_each_other_are_refused_usefully(settings, said, hint, mended):
    with pytest.raises(UsageError) as refusal:
        Settings(**settings)
    assert refusal.value.problem.startswith(said)
    assert hint in (None, refusal.value.hint)
    if said.startswith("the objective rw"):
        mended = mended | {"sequences_per_micro_batch": 2}
    Settings(**(settings | mended))


@given(st.integers(2, 2**20), st.sampled_from([1, 2, 4, 8]), st.integers(1, 2**21))
def test_a_token_budget_holds_as_many_sequences_as_fit_and_no_more(length, degree, budget):
    settings = Settings(token_budget_tokens=budget)
    held = settings.sequences(length, context_degree=degree)
    assert held * length <= budget * degree < (held + 1) * length
    assert (held > 0) == (length <= settings.longest_tokens(context_degree=degree))


@given(st.integers(8, 2**20), st.sampled_from([1, 2, 4, 8]))
def test_the_published_default_budget_is_two_sequences(length, degree):
    budget = -(-2 * length // degree)
    assert Settings(token_budget_tokens=budget).sequences(length, context_degree=degree) == 2


def trial(length: int, **fields) -> nouns.TrialSpec:
    question = question_of(**fields)
    return question.trial(question.cells[0], length)


def test_a_length_that_the_budget_does_not_hold_is_refused_with_one_that_works():
    with pytest.raises(UsageError, match=r"budget of 8192 .* 10000") as refusal:
        trial(10_000, token_budget="8k")
    assert "`--token-budget 10000`" in refusal.value.hint
    assert trial(10_000, token_budget=10_000).sequences == 1
    assert trial(10_000, token_budget=20_000, gpus=[2], ulysses=[2]).sequences == 4


@pytest.mark.parametrize("objective", ["rw", "dpo"])
def test_a_token_budget_of_pairs_needs_no_number_of_sequences_and_packs_pairs(objective):
    assert trial(10_000, objective=objective, token_budget=39_999).sequences == 2
    with pytest.raises(UsageError, match="each GPU gets of one pair of 10000"):
        trial(10_000, objective=objective, token_budget=19_999)


def test_a_search_ends_where_its_token_budget_does():
    rung = {"loss": "chunked", "allocator": "expandable"}
    question = question_of(token_budget="20k", resolution="4k", **rung)
    (answer,) = answers_among(search_cells(question, SimulatedRunner(lambda _: 0)))
    assert (answer.capacity_tokens, answer.limit) == (20_480, "ceiling")
    assert answer.reason.startswith("20,480 tokens fit, ")
    assert "token budget" in answer.reason


def test_a_critic_is_the_work_of_a_second_model():
    shape = load_model("Qwen3-0.6B").shape

    def flops(**settings):
        return step_flops(shape, length_tokens=8192, sequences=2, settings=Settings(**settings))

    of_two = flops(objective="ppo", critic=True)
    assert of_two * 3 == flops(objective="ppo") * 7, "and its values beforehand"


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    spans = {"start_tokens": (2, 20_000), "step_tokens": (1, 5000)}
    spans |= {"native_length_tokens": (1, 50_000), "beyond_step_tokens": (1, 20_000)}
    drawn = {name: draw(st.integers(*span)) for name, span in spans.items()}
    return Grid(**drawn, max_tokens=drawn["start_tokens"] + draw(st.integers(0, 500_000)))


def published(native: int, *, ceiling: int = 200_000) -> Grid:
    return grid_of(4096, ceiling, native=native, beyond=native // 4)


def test_the_usual_grid_steps_by_4096_up_to_the_native_length_then_by_a_quarter_of_it():
    """A native length off the grid is passed by one small step."""
    on, off = published(40960), published(10_000)
    lengths = [on.length(index) for index in (1, 2, 9, 10, 11, 12)]
    assert lengths == [4096, 8192, 36864, 40960, 51200, 61440]
    assert [off.length(index) for index in (1, 2, 3, 4)] == [4096, 8192, 12288, 14788]


@given(grids(), st.integers(min_value=1, max_value=200))
def test_the_index_of_a_length_is_the_index_it_came_from_and_lengths_grow_with_it(grid, index):
    length = grid.length(index)
    assert grid.index_at_most(length) == index
    assert grid.index_at_most(length - 1) == index - 1
    assert length < grid.length(index + 1)


@given(grids())
def test_no_length_is_above_the_ceiling_and_the_next_one_is(grid):
    assert grid.length(grid.size) <= grid.max_tokens < grid.length(grid.size + 1)


def test_a_grid_without_lengths_is_refused():
    odd = [("start_tokens", 1), ("max_tokens", 4095)]
    odd += [(f"{name}_tokens", 0) for name in ("start", "step", "beyond_step")]
    for field, tokens in odd:
        with pytest.raises(UsageError):
            msgspec.structs.replace(grid_of(4096, 8192), **{field: tokens})


@pytest.mark.parametrize(
    ("parse", "read"),
    [
        (
            units.parse_bytes,
            {"80GiB": 80 * units.GIB, "79.15 GiB": 84986665369, "512MiB": 512 * 1024**2},
        ),
        (units.parse_bytes, {"1_000": 1000, "2tib": 2048 * units.GIB, "64 GB": 64 * 10**9}),
        (units.parse_memory, {"0": 0, "512KiB": 512 * 1024, "84986665369": 84986665369}),
        (units.parse_memory, {"80GiB": 80 * units.GIB}),
        (units.parse_tokens, {"32768": 32768, "128k": 131072, "1m": 1048576, "1.5k": 1536}),
        (units.parse_tokens, {"4,096": 4096}),
        (units.parse_seconds, {"2400": 2400.0, "40m": 2400.0, "1h30m": 5400.0, "90s": 90.0}),
        (units.parse_seconds, {"1.5h": 5400.0}),
    ],
)
def test_sizes_and_lengths_are_binary_and_times_take_hours_minutes_and_seconds(parse, read):
    assert {text: parse(text) for text in read} == read


@pytest.mark.parametrize(
    ("text", "hinted", "meant"),
    [
        *(("80G", "74GiB", 80e9), ("80g", "74GiB", 80e9), ("80 g", "74GiB", 80e9)),
        *(("500G", "465GiB", 500e9), ("2T", "1862GiB", 2e12), ("1.5G", "1430MiB", 1.5e9)),
        *(("64m", "61MiB", 64e6), ("300k", "292KiB", 300e3)),
    ],
)
def test_an_unclear_memory_size_is_refused_with_a_binary_one_that_is_no_more(text, hinted, meant):
    with pytest.raises(UsageError) as refusal:
        units.parse_bytes(text)
    assert refusal.value.hint.endswith(f"`{hinted}`")
    assert 0.98 * meant < units.parse_bytes(hinted) <= meant


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((units.parse_bytes, text) for text in ("", "GiB", "-1GiB", "1e9", "80 parsecs", "--")),
        *((units.parse_tokens, text) for text in ("0", "0.3", "1.0001k", "12 miles", "-5")),
        *((units.parse_seconds, text) for text in ("0", "0s", "soon", "-40m", "40 minutes")),
    ],
)
def test_what_is_no_size_length_or_time_is_refused(parse, text):
    with pytest.raises(UsageError):
        parse(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_printed_size_is_within_half_of_its_last_digit(count):
    assert abs(units.parse_bytes(units.format_bytes(count)) - count) <= 0.0051 * units.GIB


@given(st.integers(min_value=1, max_value=units.MOST_TOKENS))
def test_a_printed_length_reads_back_as_itself(count):
    assert units.parse_tokens(units.format_tokens(count)) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.314, "2.31 s"), (41.2, "41 s"), (245, "4m 05s"), (3725, "1h 02m"), (None, "-")],
)
def test_a_time_is_printed_as_one_says_it(seconds, text):
    assert units.format_seconds(seconds) == text


_SECONDS = st.floats(min_value=0, allow_infinity=False)
_BYTES = st.none() | st.integers(min_value=0, max_value=2**45)
_SPECS = st.builds(
    nouns.TrialSpec,
    model_name=st.text(min_size=1),
    model_directory=st.text(),
    config_digest=st.text(alphabet="0123456789abcdef", min_size=16, max_size=16),
    device=st.just("cuda"),
    layout=st.sampled_from([Layout(gpus=n, ulysses_degree=sp) for n in (2, 4, 8) for sp in (1, 2)]),
    settings=st.builds(Settings),
    length_tokens=st.integers(min_value=2, max_value=2**30),
    memory_budget_bytes=_BYTES,
    data=st.none(),
)
_REPORTS = st.builds(
    nouns.RankReport,
    rank=st.integers(min_value=0, max_value=7),
    failure=st.none() | st.builds(nouns.Failure, hint=st.none() | st.text()),
    memory=st.builds(nouns.RankMemory, peak_reserved_bytes=_BYTES, device_used_bytes=_BYTES),
    budget=st.none(),
    losses=st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
    step_times_s=st.lists(_SECONDS).map(tuple),
    saves=st.lists(st.builds(nouns.Save, time_s=_SECONDS), max_size=3).map(tuple),
)
_RESULTS = st.builds(
    nouns.TrialResult,
    outcome=st.sampled_from(nouns.Outcome),
    ranks=st.lists(_REPORTS, max_size=3).map(tuple),
    log_path=st.none(),
)


@given(_SPECS | _RESULTS)
def test_a_specification_and_a_result_survive_json_on_one_line(record):
    text = to_json(record)
    assert "\n" not in text
    assert from_json(text, type(record)) == record
    assert from_builtins(to_builtins(record), type(record)) == record


@given(_SPECS, st.text())
def test_the_key_of_a_trial_is_of_its_length_and_not_of_where_the_model_lies(spec, elsewhere):
    for name in ("model_directory", "checkpoint_directory"):
        assert msgspec.structs.replace(spec, **{name: elsewhere}).key == spec.key
    assert msgspec.structs.replace(spec, length_tokens=spec.length_tokens + 1).key != spec.key


@pytest.mark.parametrize("text", ['{"gpus": 1, "gpu": 2}', '{"gpus": "1"}', '{"gpus": 1'])
def test_what_is_not_the_noun_is_refused(text):
    with pytest.raises(msgspec.MsgspecError):
        from_json(text, Layout)
