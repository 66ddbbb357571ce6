"""Runners, as far as they can be tried without an engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.errors import MachineError
from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.codec import to_json
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer
from highwater.nouns.trial import (
    Launch,
    OnPhase,
    Outcome,
    RankReport,
    TrialEndedError,
    TrialResult,
    TrialSpec,
    unheard,
)
from highwater.search.cell_outcomes import CellAnswered, SearchEvent, TrialFinished, TrialStarted
from highwater.search.scheduler import recorded_search, search_cells
from highwater.store.journal import open_journal, read_study
from highwater.trials.engine_trial import EngineLauncher, read_reports
from highwater.trials.local import LocalRunner
from highwater.trials.simulated import SimulatedRunner, UpperFormula
from highwater.trials.trial_process import log_path_of, trial_environment
from highwater.units import GIB
from places import examples, machine_with, question_of
from runner_contract import RunnerContract
from trial_specs import trial_of

QUESTION = question_of(gpus=[1, 2, 4], ulysses=[1, 2])
SHAPE = QUESTION.model.shape
WAITS_S = 30


class TestSimulatedRunner(RunnerContract):
    takes_time = False

    @pytest.fixture
    def runner(self) -> SimulatedRunner:
        def law(spec: TrialSpec) -> int | Outcome:
            return (
                Outcome.CRASHED if spec.length_tokens == 5000 else UpperFormula(shape=SHAPE)(spec)
            )

        return SimulatedRunner(law)

    def fitting(self, number: int) -> TrialSpec:
        return QUESTION.trial(QUESTION.cells[0], 4096 * (number + 1))

    def too_long(self) -> TrialSpec:
        return QUESTION.trial(QUESTION.cells[0], 2**20)

    def crashing(self) -> TrialSpec:
        return QUESTION.trial(QUESTION.cells[0], 5000)


class SideBySide:
    """A runner of several places, whose trials end in any order."""

    def __init__(self, places: int, *, killed_after: int | None = None) -> None:
        self._simulated = SimulatedRunner(UpperFormula(shape=SHAPE))
        self._pool = ThreadPoolExecutor(places)
        self._lock = threading.Lock()
        self._places = places
        self._killed_after = killed_after
        self.running: list[TrialSpec] = []
        self.most = 0
        self.launched: list[tuple[str, int, int]] = []

    def has_room(self, spec: TrialSpec) -> bool:
        with self._lock:
            return len(self.running) < self._places

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard):
        with self._lock:
            self.running.append(launch.spec)
            self.most = max(self.most, len(self.running))
            cells = [(spec.layout, spec.settings) for spec in self.running]
            assert len(set(cells)) == len(cells), "a cell has one trial at a time"
            self.launched.append((launch.spec.key, launch.attempt, launch.repeat))
            is_killed = len(self.launched) == self._killed_after
        return self._pool.submit(self._run, launch, is_killed)

    def _run(self, launch: Launch, is_killed: bool) -> TrialResult:
        try:
            if is_killed:
                raise KeyboardInterrupt
            threading.Event().wait(hash(launch.spec.key) % 3 / 1000)
            return self._simulated.run(launch.spec, attempt=launch.attempt, repeat=launch.repeat)
        finally:
            with self._lock:
                self.running.remove(launch.spec)

    def close(self) -> None:
        self._pool.shutdown()


def answers(events: list[SearchEvent]) -> dict[Cell, CellAnswer]:
    return {event.answer.cell: event.answer for event in events if isinstance(event, CellAnswered)}


def told(answer: CellAnswer) -> tuple[int | None, int | None, str, bool]:
    return answer.reach_tokens, answer.does_not_fit_tokens, answer.limit, answer.monotone


@pytest.mark.parametrize("method", ["bisect", "linear"])
@pytest.mark.parametrize("places", [1, 2, 3, 8])
def test_cells_that_are_searched_side_by_side_have_the_answers_of_one_after_another(places, method):
    question = msgspec.structs.replace(QUESTION, method=method)
    alone = answers(list(search_cells(question, SimulatedRunner(UpperFormula(shape=SHAPE)))))
    runner = SideBySide(places)
    together = answers(list(search_cells(question, runner)))
    runner.close()
    assert set(together) == set(question.cells)
    for cell in question.cells:
        assert told(together[cell]) == told(alone[cell])
    assert (runner.most > 1) == (places > 1)


def test_a_runner_of_one_place_has_the_events_of_a_search_without_any():
    def shown(event: SearchEvent) -> object:
        return event.answer if isinstance(event, CellAnswered) else (type(event), event.spec.key)

    runner = SideBySide(1)
    one = [shown(each) for each in search_cells(QUESTION, runner)]
    none = search_cells(QUESTION, SimulatedRunner(UpperFormula(shape=SHAPE)))
    assert one == [shown(each) for each in none]
    runner.close()


@settings(max_examples=examples(25), deadline=None)
@given(places=st.integers(1, 6), kill=st.integers(1, 40))
def test_a_parallel_search_that_was_killed_runs_nothing_twice(tmp_path_factory, places, kill):
    path: Path = tmp_path_factory.mktemp("study") / "study.jsonl"
    first, second = SideBySide(places, killed_after=kill), SideBySide(places)
    with suppress(KeyboardInterrupt), open_journal(path, QUESTION) as journal:
        list(recorded_search(QUESTION, first, journal))
    first.close()
    over = [trial for trial in read_study(path).trials if trial.result is not None]
    ended = {(trial.spec.key, trial.attempt, trial.repeat) for trial in over}
    with open_journal(path, QUESTION) as journal:
        events = list(recorded_search(QUESTION, second, journal))
    second.close()
    assert not ended & set(second.launched)
    assert len(set(second.launched)) == len(second.launched)
    study = read_study(path)
    assert study.complete
    assert study.unproven == ()
    assert len(answers(events)) == len(QUESTION.cells)
    started = [event for event in events if isinstance(event, TrialStarted)]
    fresh = [e for e in events if isinstance(e, TrialFinished) and not e.is_recorded]
    assert len(started) == len(fresh) == len(second.launched)


@dataclass
class Waiting:
    """A launcher whose trials wait until they are let go, or ended."""

    ends: dict[int, list[Outcome]] = field(default_factory=dict)
    """Outcomes by length, launch by launch; FIT where there is none."""
    launched: list[tuple[int, tuple[str, ...] | None]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def launch(
        self, launch: Launch, *, gpus: Any, ended: threading.Event, on_phase: OnPhase
    ) -> TrialResult:
        self.launched.append((launch.spec.length_tokens, gpus))
        on_phase("waiting")
        while not self.go.wait(0.01):
            if ended.is_set():
                raise TrialEndedError
        left = self.ends.get(launch.spec.length_tokens)
        outcome = left.pop(0) if left else Outcome.FIT
        return TrialResult(outcome=outcome, reason="as it was told", attempt=launch.attempt)


def trial(number: int = 0, *, gpus: int = 1, **changes: object) -> TrialSpec:
    cell = Cell(layout=Layout(gpus=gpus), settings=Settings(**changes))
    return QUESTION.trial(cell, 4096 + number)


def places_of(launcher: Waiting) -> list[tuple[str, ...] | None]:
    return [gpus for _, gpus in launcher.launched]


def test_each_trial_has_gpus_of_its_own_and_as_many_run_as_there_are():
    launcher = Waiting()
    runner = LocalRunner(launcher, machine=machine_with(4))
    assert runner.has_room(trial(gpus=4))
    futures = []
    for number, gpus in enumerate((1, 2, 1)):
        assert runner.has_room(trial(number, gpus=gpus))
        futures.append(runner.submit(Launch(spec=trial(number, gpus=gpus))))
    assert not runner.has_room(trial(9))
    launcher.go.set()
    assert [future.result(timeout=WAITS_S).outcome for future in futures] == [Outcome.FIT] * 3
    taken = [gpu for gpus in places_of(launcher) for gpu in gpus or ()]
    assert sorted(taken) == ["0", "1", "2", "3"]
    assert runner.has_room(trial(9, gpus=4))


def test_gpus_of_another_kind_are_left_alone():
    machine = machine_with(3)
    other = msgspec.structs.replace(machine.gpus[1], name="NVIDIA L4", memory_total_bytes=2**34)
    machine = msgspec.structs.replace(machine, gpus=(machine.gpus[0], other, machine.gpus[2]))
    launcher = Waiting()
    launcher.go.set()
    runner = LocalRunner(launcher, machine=machine)
    runner.submit(Launch(spec=trial(gpus=2))).result(timeout=WAITS_S)
    assert places_of(launcher) == [("0", "2")]


def test_a_trial_that_keeps_states_in_host_memory_runs_alone():
    launcher = Waiting()
    runner = LocalRunner(launcher, machine=machine_with(4))
    offloads = trial(1, offload=True)
    first = runner.submit(Launch(spec=trial()))
    assert not runner.has_room(offloads)
    launcher.go.set()
    first.result(timeout=WAITS_S)
    launcher.go.clear()
    alone = runner.submit(Launch(spec=offloads))
    assert not runner.has_room(trial(2))
    launcher.go.set()
    alone.result(timeout=WAITS_S)


SMALL_HOST = msgspec.structs.replace(machine_with(8), host_memory_available_bytes=2**30)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"machine": SMALL_HOST}, 2),  # a process takes half a GiB
        ({"machine": machine_with(8), "most_trials": 1}, 1),
        ({"machine": machine_with(8), "most_trials": 3}, 3),
    ],
    ids=["host memory", "one", "three"],
)
def test_host_memory_or_whoever_says_a_number_bounds_the_trials_that_run_at_a_time(asked, most):
    runner = LocalRunner(Waiting(), **asked)
    for number in range(most):
        assert runner.has_room(trial(number))
        runner.submit(Launch(spec=trial(number)))
    assert not runner.has_room(trial(most))
    runner.close()


def test_host_memory_that_ran_out_beside_others_is_tried_again_alone():
    no_host = Outcome.HOST_OUT_OF_MEMORY
    launcher = Waiting(ends={4096: [no_host], 4097: [no_host, no_host]})
    runner = LocalRunner(launcher, machine=machine_with(4))
    futures = [runner.submit(Launch(spec=trial(number))) for number in range(3)]
    launcher.go.set()
    results = [future.result(timeout=WAITS_S).outcome for future in futures]
    assert results == [Outcome.FIT, no_host, Outcome.FIT]
    assert sorted(length for length, _ in launcher.launched) == [4096, 4096, 4097, 4097, 4098]
    alone = Waiting(ends={4096: [no_host]})
    alone.go.set()
    first = LocalRunner(alone, machine=machine_with(4)).submit(Launch(spec=trial()))
    assert first.result(timeout=WAITS_S).outcome is no_host
    assert len(alone.launched) == 1, "nobody was beside it"


def test_closing_ends_every_trial_and_what_a_launcher_raises_is_heard():
    launcher = Waiting(ends={4096: [Outcome.HOST_OUT_OF_MEMORY]})
    runner = LocalRunner(launcher, machine=machine_with(4))
    futures = [runner.submit(Launch(spec=trial(number))) for number in range(3)]
    runner.close()
    for future in futures:
        with pytest.raises(TrialEndedError):
            future.result(timeout=WAITS_S)
    assert runner.has_room(trial(gpus=4))

    class Broken(Waiting):
        def launch(self, *_: object, **__: object) -> TrialResult:
            raise OSError("the disk is on fire")

    runner = LocalRunner(Broken(), machine=machine_with(1))
    with pytest.raises(OSError, match="on fire"):
        runner.run(trial())
    assert runner.has_room(trial())


AT_ONCE_S = 0.01
"""A timeout that ends a local_trial before its first process has read a line."""
EXPANDABLE = question_of(loss="chunked", allocator="expandable")
ON_CPU = question_of(loss="full", device="cpu", memory="1GiB")


def cuda_spec(**changes: Any) -> TrialSpec:
    return msgspec.structs.replace(EXPANDABLE.trial(EXPANDABLE.cells[0], 8192), **changes)


def cpu_spec() -> TrialSpec:
    return ON_CPU.trial(ON_CPU.cells[0], 4096)


def test_a_log_lies_where_its_layout_and_rung_say():
    spec = cuda_spec(layout=Layout(gpus=8, ulysses_degree=4))
    folder = Path("logs/Qwen3-0.6B/gpu-8/sp-4")
    assert log_path_of(Path("logs"), spec, "rung") == folder / "env+chunked" / "model_len-8192.log"
    assert log_path_of(Path("logs"), spec, "published") == folder / "model_len-8192.log"


def test_no_log_is_ever_overwritten(tmp_path):
    runner = LocalRunner(EngineLauncher(log_directory=tmp_path, timeout_s=AT_ONCE_S))
    kept: list[Path] = []
    for attempt, again in ((1, ""), (2, ".attempt-2"), (3, ".attempt-3")):
        result = runner.run(cpu_spec(), attempt=attempt)
        assert (result.outcome, result.attempt) == (Outcome.TIMEOUT, attempt)
        kept.append(Path(result.log_path or ""))
        assert kept[-1].name == f"model_len-4096{again}.log"
        kept[-1].write_text(f"mine, {attempt}")
    assert [path.read_text() for path in kept] == ["mine, 1", "mine, 2", "mine, 3"]


def test_a_log_that_cannot_be_written_is_the_machines_fault_not_an_outcome(tmp_path):
    (tmp_path / "logs").write_text("a file")
    launcher = EngineLauncher(log_directory=tmp_path / "logs", timeout_s=AT_ONCE_S)
    with pytest.raises(MachineError, match="could not be started") as refusal:
        LocalRunner(launcher).run(cpu_spec())
    assert "`--log-dir`" in refusal.value.hint


OURS = {
    "CUDA_DEVICE_ORDER": ("FASTEST_FIRST", "PCI_BUS_ID"),
    "GLOO_SOCKET_IFNAME": ("eth0", "lo"),
    "NCCL_SOCKET_IFNAME": ("eth0", "lo"),
    "PYTORCH_ALLOC_CONF": ("garbage_collection_threshold:0.5", "expandable_segments:{}"),
    "PYTORCH_CUDA_ALLOC_CONF": ("max_split_size_mb:32", "expandable_segments:{}"),
}
"""What the shell has, and what a trial has whatever it is: ranks meet where nobody else does."""


@pytest.mark.parametrize(("allocator", "setting"), [("native", "False"), ("expandable", "True")])
def test_what_a_trial_says_itself_is_said_over_the_shells(monkeypatch, allocator, setting):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name, (typed, _) in OURS.items():
        monkeypatch.setenv(name, typed)
    environment = trial_environment(cuda_spec(settings=Settings(allocator=allocator)))
    for name, (_, own) in OURS.items():
        assert environment[name] == own.format(setting)
    on_the_cpu = trial_environment(cpu_spec())
    assert (on_the_cpu["GLOO_SOCKET_IFNAME"], on_the_cpu["CUDA_VISIBLE_DEVICES"]) == ("lo", "")


@pytest.mark.parametrize(
    "name",
    [
        *("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_HIP_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"),
        *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NCCL_BUFFSIZE"),
        *("PYTHONOPTIMIZE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "PET_NNODES", "PET_NPROC_PER_NODE"),
        *("PET_RDZV_ENDPOINT", "MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID"),
    ],
)
def test_what_would_change_a_trial_is_not_inherited(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert name not in trial_environment(cuda_spec())
    assert name not in trial_environment(cpu_spec())


def test_everything_else_of_the_users_environment_is(monkeypatch):
    mine = {"PYTHONPATH": "/my/code", "CUDA_VISIBLE_DEVICES": "3", "NCCL_NVLS_ENABLE": "0"}
    mine |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    assert trial_environment(cuda_spec()).items() >= mine.items()


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"", "Input data was truncated"),
        (b'{"rank":1,"losses":[6.0,null]}', "Expected `float`, got `null`"),
        (b'{"rank":1,"surprise":1}', "unknown field `surprise`"),
        (b'{"rank":1,"device_name":"\xff"}', "utf-8"),
    ],
)
def test_a_report_that_cannot_be_read_counts_as_none_and_says_why(tmp_path, written, why):
    (tmp_path / "rank-000.json").write_text(to_json(RankReport(rank=0)))
    (tmp_path / "rank-001.json").write_bytes(written)
    reports, damaged = read_reports(tmp_path)
    assert reports == (RankReport(rank=0),)
    assert len(damaged) == 1
    assert "rank-001.json" in damaged[0]
    assert why.lower() in damaged[0].lower()


BUDGETS = st.integers(GIB // 2, 200 * GIB)
RUNGS = st.builds(
    Settings,
    allocator=st.sampled_from(["native", "expandable"]),
    loss=st.sampled_from(["full", "chunked"]),
    recompute=st.sampled_from(["none", "layer"]),
    strategy=st.sampled_from(["fsdp", "fsdp2"]),
    offload=st.booleans(),
)
LAYOUTS = st.sampled_from(
    [Layout(), Layout(gpus=4), Layout(gpus=4, ulysses_degree=2), Layout(gpus=8, ulysses_degree=8)]
)


def local_trial(length: int = 8192, *, model: str = "Qwen3-0.6B", **fields) -> TrialSpec:
    return trial_of(model, length_tokens=length, **fields)


@given(BUDGETS, st.integers(1, 200 * GIB))
def test_a_trial_fits_exactly_when_what_the_driver_sees_is_within_the_budget(budget, needed):
    result = SimulatedRunner(lambda spec: needed).run(local_trial(memory_budget_bytes=budget))
    assert (result.outcome is Outcome.FIT) == (needed + CONTEXT_BYTES["cuda"] <= budget)
    if result.outcome is Outcome.FIT:
        assert result.peak_reserved_bytes == needed
        assert result.headroom_bytes == budget - CONTEXT_BYTES["cuda"] - needed
    else:
        assert result.outcome is Outcome.OUT_OF_MEMORY
        assert result.ranks[0].failure.kind == "device_memory"


@given(LAYOUTS, RUNGS)
def test_a_budget_is_context_nccl_and_what_is_left_for_the_allocator(layout, rung):
    spec = local_trial(layout=layout, settings=rung, memory_budget_bytes=80 * GIB)
    (rank, *_) = SimulatedRunner(UpperFormula(shape=SHAPE)).run(spec).ranks
    budget = rank.budget
    assert (budget.nccl_bytes > 0) == (layout.gpus > 1)
    parts = budget.context_bytes + budget.nccl_bytes + budget.allocator_cap_bytes
    assert parts == budget.budget_bytes == 80 * GIB
    needed = upper_footprint(Step(load_model("Qwen3-0.6B").shape, rung, layout, length_tokens=8192))
    assert rank.memory.peak_reserved_bytes == needed.needed_bytes - needed.outside_bytes
    assert rank.memory.device_used_bytes == needed.needed_bytes


def test_without_a_budget_the_card_is_the_limit_and_on_the_cpu_the_data_segment():
    def of_a_card(total_bytes: int | None) -> TrialResult:
        runner = SimulatedRunner(lambda _: 10 * GIB, device_total_bytes=total_bytes)
        return runner.run(local_trial())

    assert of_a_card(10 * GIB).outcome is Outcome.OUT_OF_MEMORY
    assert of_a_card(12 * GIB).headroom_bytes == 2 * GIB - CONTEXT_BYTES["cuda"]
    assert of_a_card(None).outcome is Outcome.FIT
    spec = local_trial(device="cpu", memory_budget_bytes=4 * GIB, layout=Layout(gpus=2))
    result = SimulatedRunner(lambda spec: 3 * GIB).run(spec)
    assert [rank.memory.peak_data_segment_bytes for rank in result.ranks] == [3 * GIB, 3 * GIB]
    assert result.headroom_bytes == GIB


def test_every_result_says_that_it_is_simulated_and_measures_no_time():
    for law in (UpperFormula(shape=SHAPE), lambda spec: Outcome.CRASHED):
        result = SimulatedRunner(law).run(local_trial())
        assert result.simulated
        assert (result.tokens_per_s, result.step_time_s) == (None, None)
