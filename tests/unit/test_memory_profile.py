"""Memory profiles: what was alive when it counts, of snapshots whose every allocation is known."""

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup import Page

from highwater.memory.snapshot.attribution import _RULES_OF
from highwater.memory.snapshot.memory_profile import MemoryProfile, memory_profile
from highwater.memory.trace.replay import replay, timeline
from highwater.nouns.events import Allocate, Enter, EventLog, Free
from highwater.pages.profile import advice, answer, category_table, profile_page
from highwater.units import MIB, format_bytes
from write_snapshots import ENGINE, LINEAR, MAIN, SITE, STEP, Program, megatron, trainer

SNAPSHOTS = Path(__file__).parents[1] / "data" / "snapshots"
OF_MEGATRON = SNAPSHOTS / "snapshot_rank00_p0d1c0t0.pickle"
OF_A_TRAINER = SNAPSHOTS / "trainer_out_of_memory.pickle"
FREED = ("??", 0, "c10::StorageImpl::release_resources()")


def written(folder: Path, program: Program, name: str = "snapshot") -> Path:
    path = folder / f"{name}.pickle"
    path.write_bytes(pickle.dumps(program.snapshot()))
    return path


def sizes(profile: MemoryProfile) -> dict[str, int]:
    return {each.category: each.bytes // MIB for each in profile.categories if each.bytes}


def test_the_recorded_snapshots_are_what_their_programs_write():
    for path, program in ((OF_MEGATRON, megatron()), (OF_A_TRAINER, trainer())):
        assert pickle.loads(path.read_bytes()) == program.snapshot()  # noqa: S301 -- ours


def test_a_snapshot_of_megatron_has_its_rank_and_its_categories_at_the_peak():
    profile = memory_profile(OF_MEGATRON)
    assert (profile.rank, profile.coordinates) == (0, ("p0", "d1", "c0", "t0"))
    assert (profile.moment, profile.allocated_bytes) == ("peak", 162 * MIB)
    held = {"parameters": 48, "gradients": 48, "activations": 20, "logits": 40}
    assert sizes(profile) == held | {"communication": 6}
    assert profile.places[0].place == "distributed/param_and_grad_buffer.py:640 __init__"
    assert profile.places[0].bytes == 48 * MIB
    assert "MiB" in answer(profile)


def test_out_of_memory_says_what_was_free_or_in_pieces_and_what_helps(tmp_path):
    profile = memory_profile(OF_A_TRAINER)
    assert (profile.moment, profile.requested_bytes) == ("out of memory", 128 * MIB)
    assert profile.device_free_bytes == 5 * MIB
    states = {"parameters": 30, "gradients": 30, "optimizer_states": 60}
    assert sizes(profile) == states | {"activations": 8, "logits": 128}
    assert profile.reserved_bytes == 266 * MIB
    assert (profile.free_bytes, profile.largest_free_bytes) == (10 * MIB, 10 * MIB)
    assert advice(profile) == "chunked loss"
    program = Program()
    for address in [program.allocate(40 * MIB, MAIN) for _ in range(4)][::2]:
        program.free(address, FREED)
    program.run_out(60 * MIB, 0, MAIN)
    profile = memory_profile(written(tmp_path, program))
    assert (profile.free_bytes, profile.largest_free_bytes) == (80 * MIB, 40 * MIB)
    assert advice(profile) == "expandable segments"


def test_segments_that_went_after_the_moment_are_put_back(tmp_path):
    program = Program()
    first = program.allocate(100 * MIB, MAIN)
    program.allocate(20 * MIB, MAIN)
    program.run_out(90 * MIB, 0, MAIN)
    program.free(first, FREED)
    gone = program.segments.pop(0)
    program._record("segment_free", gone["address"], gone["total_size"], ())
    profile = memory_profile(written(tmp_path, program))
    assert profile.moment == "out of memory"
    assert (profile.allocated_bytes, profile.reserved_bytes) == (120 * MIB, 120 * MIB)
    assert profile.free_bytes == 0


def test_what_was_there_before_the_first_event_is_counted_and_said(tmp_path):
    program = Program(max_entries=4)
    program.allocate(50 * MIB, MAIN)  # alive in the end: the segments know its stack
    second = program.allocate(30 * MIB, MAIN)
    program.free(second, FREED)  # of which only the end is in the trace: two events
    program.allocate(10 * MIB, (f"{SITE}/torch/optim/adamw.py", 118, "_init_group"), MAIN)
    profile = memory_profile(written(tmp_path, program))
    assert (profile.events, profile.allocated_bytes) == (4, 80 * MIB)
    assert profile.before_bytes == 80 * MIB
    assert "max_entries" in " ".join(category_table([profile]).footnotes)


def test_a_snapshot_without_a_trace_says_what_was_alive_in_the_end(tmp_path):
    program = Program(max_entries=1)
    program.allocate(50 * MIB, (f"{SITE}/torch/optim/adamw.py", 118, "_init_group"), MAIN)
    document = program.snapshot()
    document["device_traces"] = [[]]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(document))
    profile = memory_profile(tmp_path / "s.pickle")
    assert sizes(profile) == {"optimizer_states": 50}
    assert profile.timeline == ()
    assert "No events were recorded" in Page(profile_page([profile])).text("p")


ZERO_GRAD = ((f"{SITE}/torch/nn/modules/module.py", 2970, "zero_grad"), MAIN)
MM_BACKWARD = (("??", 0, "torch::autograd::generated::MmBackward0::apply"), ENGINE)


@pytest.mark.parametrize(("is_phase", "stack"), [(True, ()), (False, MM_BACKWARD)])
@pytest.mark.parametrize("ends", ["in the pass", "after it", "nobody knows"])
def test_what_lasts_after_a_backward_pass_is_a_gradient(tmp_path, ends, is_phase, stack):
    program = Program()
    program.phase = "backward of layer 3" if is_phase else ""
    made = program.allocate(30 * MIB, *stack)
    program.free(program.allocate(100 * MIB, *stack), *stack)
    if ends == "in the pass":
        program.free(made, *stack)
    if ends != "nobody knows":
        program.phase = "optimizer" if is_phase else ""
        program.allocate(MIB, *(() if is_phase else ((f"{SITE}/torch/optim/adam.py", 1, "step"),)))
    if ends == "after it":
        program.free(made, *ZERO_GRAD)
    gradients = {"gradients": 30, "backward_pass": 100}
    found = sizes(memory_profile(written(tmp_path, program)))
    assert found == (gradients if ends == "after it" else {"backward_pass": 130})


def test_what_a_backward_pass_needs_on_its_way_is_no_state_to_put_elsewhere(tmp_path):
    program = Program()
    program.allocate(30 * MIB, (f"{SITE}/torch/nn/modules/linear.py", 106, "__init__"), MAIN)
    program.phase = "backward"
    program.run_out(64 * MIB, 0)
    program.allocate(90 * MIB)
    program.run_out(64 * MIB, 0)
    profile = memory_profile(written(tmp_path, program))
    assert sizes(profile) == {"parameters": 30, "backward_pass": 90}
    assert advice(profile) is None


@pytest.mark.parametrize(
    ("path", "is_shown"),
    [
        ("/home/me/torch/train.py", True),
        ("/opt/torch/.venv/lib/python3.12/site-packages/transformers/trainer.py", True),
        ("C:\\torch\\Lib\\site-packages\\accelerate\\accelerator.py", True),
        (f"{SITE}/torch/nn/functional.py", False),
        (f"{SITE}/torch/_tensor.py", False),
        ("/usr/lib/python3/dist-packages/torch/utils/_contextlib.py", False),
        ("/workspace/pytorch/torch/autograd/__init__.py", False),
        ("C:\\venv\\Lib\\site-packages\\torch\\_ops.py", False),
        ("RegisterCUDA_0.cpp", False),
    ],
)
def test_a_place_is_a_line_of_the_program_wherever_it_is_installed(tmp_path, path, is_shown):
    program = Program()
    program.allocate(MIB, (path, 7, "run"), MAIN)
    (place,) = memory_profile(written(tmp_path, program)).places
    assert place.place.endswith(":7 run") == is_shown
    assert is_shown or place.place == "work/pretrain.py:88 main"


def test_rules_for_this_engine_are_for_no_other_program_below_a_folder_of_its_name(tmp_path):
    program = Program()
    home = "/home/me/highwater/models/.venv/lib/python3.12/site-packages"
    program.allocate(MIB, (f"{home}/torch/optim/adamw.py", 118, "_init_group"), MAIN)
    program.allocate(2 * MIB, LINEAR, (f"{home}/other/program.py", 3, "clip"), STEP)
    found = sizes(memory_profile(written(tmp_path, program)))
    assert found == {"optimizer_states": 1, "activations": 2}


SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5000)), max_size=60)


@given(SIZES, st.integers(1, 200))
def test_the_peak_is_that_of_the_part_of_the_history_that_was_kept(tmp_path_factory, steps, kept):
    """Against a count of what is alive after each step, from the first that was kept."""
    program = Program(max_entries=kept)
    alive: dict[int, tuple[int, int]] = {}
    levels, ends = [0], [0]
    for slot, size in steps:
        if slot in alive:
            program.free(alive.pop(slot)[0], FREED)
        else:
            alive[slot] = program.allocate(size, MAIN), size
        levels.append(sum(size for _, size in alive.values()))
        ends.append(len(program.trace))
    profile = memory_profile(written(tmp_path_factory.mktemp("s"), program))
    dropped = max(0, len(program.trace) - kept)
    # of a free whose request was dropped, the end alone says that it was there
    possible = [level for level, end in zip(levels, ends, strict=True) if end >= dropped]
    before = [level for level, end in zip(levels, ends, strict=True) if end <= dropped][-1]
    assert profile.allocated_bytes in (max(possible), max(*possible, before))


def test_a_prediction_is_read_like_a_snapshot_and_has_the_replays_peak(tmp_path):
    log = EventLog(
        source="traced",
        versions={},
        operators=("aten.mm.default", "aten.add.Tensor", "aten.empty_like.default"),
        modules=("", "model.layers.3"),
        events=(
            *(Allocate(1, 100 * MIB, 0, 2), Enter("forward"), Allocate(2, 40 * MIB, 0, 1, 1)),
            *(Allocate(3, 60 * MIB, 0, 0), Enter("backward"), Free(2)),
            *(Allocate(4, 10 * MIB, 0, 0), Allocate(5, 50 * MIB, 0, 1, 1)),
            *(Allocate(6, 20 * MIB, 0, 0), Free(6), Free(5), Enter("optimizer")),
            Allocate(7, MIB, 0, 1),
        ),
    )
    path = tmp_path / "timeline.pickle"
    path.write_bytes(timeline(log, allocator="native", workspaces_bytes=()))
    profile = memory_profile(path)
    replayed = replay(log, allocator="native", workspaces_bytes=())
    assert profile.is_traced
    assert profile.allocated_bytes == replayed.peak_allocated_bytes
    # of the backward pass: a gradient that stays, a layer that is recomputed, and one on the way
    held = {"parameters": 100, "logits": 60, "gradients": 10, "activations": 50}
    assert sizes(profile) == held | {"backward_pass": 20}
    assert profile.places[2].place == "model.layers.* aten.add.Tensor"
    measured = memory_profile(OF_A_TRAINER)
    beside = category_table([profile, measured])
    ours, theirs = (each.bytes_of("logits") for each in (profile, measured))
    row = next(row for row in beside.rows if row[0].startswith("logits"))
    more = format_bytes(theirs - ours)
    assert row[1:] == (format_bytes(ours), format_bytes(theirs), f"+{more}")
    assert len(Page(profile_page([profile, measured])).all("svg")) >= 4


def test_the_rules_for_this_engine_name_files_and_functions_that_are_there():
    source = Path(__file__).parents[2] / "src"
    files = list(source.glob("highwater/**/*.py"))
    for rule in _RULES_OF["ours"]:
        named = [path for path in files if re.search(rule.file, str(path.relative_to(source)))]
        found = [path.read_text() for path in named]
        assert found, rule
        defined = {name for text in found for name in re.findall(r"def (\w+)\(", text)}
        assert any(re.search(rule.name, name) for name in defined), rule


def test_a_page_draws_every_category():
    profiles = [memory_profile(path) for path in sorted(SNAPSHOTS.glob("*.pickle"))]
    for shown in (profiles, profiles[:1], profiles[1:]):
        page = Page(profile_page(shown))
        drawn = {attributes.get("class") for attributes in page.all("polygon")}
        alive = {category for profile in shown for category in sizes(profile)}
        assert drawn == alive | {"optimizer_states"}, "of Megatron's, after the peak"
        boxes = [each for each in page.all("rect") if "box" in (each.get("class") or "")]
        assert len(boxes) == sum(len(profile.flame_graph) for profile in shown)


def test_a_flame_graph_holds_each_frame_inside_its_caller():
    profile = memory_profile(OF_A_TRAINER)
    ends = {(b.depth, b.start_bytes, b.start_bytes + b.bytes) for b in profile.flame_graph}
    assert sum(end - start for depth, start, end in ends if depth == 0) == profile.allocated_bytes
    for depth, start, end in ends:
        callers = [(first, last) for level, first, last in ends if level == depth - 1]
        assert not depth or any(first <= start and end <= last for first, last in callers)


RECORDED = Path(__file__).parents[2] / "docs/results/profiler/trainer/snapshot_rank00.pickle"


def test_a_snapshot_of_hugging_faces_trainer_has_a_name_for_what_was_alive():
    profile = memory_profile(RECORDED)
    parameters = 4 * (32_000 * 512 * 2 + 4 * (512 * 512 * 3 + 3 * 512 * 1536))
    assert profile.bytes_of("unattributed") <= 0.05 * profile.allocated_bytes
    assert profile.bytes_of("parameters") == pytest.approx(parameters, rel=0.02)
    assert profile.bytes_of("optimizer_states") == pytest.approx(2 * parameters, rel=0.02)
    assert profile.bytes_of("logits") >= 4 * 4 * 1024 * 32_000
