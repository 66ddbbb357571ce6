"""Starting a trial: where its log goes, what its processes inherit, and what is refused before any
starts.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import MachineError
from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.codec import to_json
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome, RankReport, TrialSpec
from highwater.trials.engine_trial import EngineLauncher, read_reports
from highwater.trials.local import LocalRunner
from highwater.trials.simulated import FormulaLaw, SimulatedRunner
from highwater.trials.trial_process import log_path_of, trial_environment
from highwater.units import GIB
from places import question_of
from trial_specs import trial_of

AT_ONCE_S = 0.01
"""A timeout that ends a trial before its first process has read a line."""
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
    paths = []
    for attempt in (1, 2, 3):
        result = runner.run(cpu_spec(), attempt=attempt)
        assert (result.outcome, result.attempt) == (Outcome.TIMEOUT, attempt)
        paths.append(Path(result.log_path or ""))
        paths[-1].write_text(f"mine, {attempt}")
    assert [path.name for path in paths] == [
        f"model_len-4096{again}.log" for again in ("", ".attempt-2", ".attempt-3")
    ]
    assert [path.read_text() for path in paths] == ["mine, 1", "mine, 2", "mine, 3"]


def test_a_log_that_cannot_be_written_is_the_machines_fault_not_an_outcome(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(MachineError, match="could not be started") as refusal:
        LocalRunner(EngineLauncher(log_directory=tmp_path / "logs", timeout_s=AT_ONCE_S)).run(
            cpu_spec()
        )
    assert "`--log-dir`" in refusal.value.hint


@pytest.mark.parametrize(("allocator", "setting"), [("native", "False"), ("expandable", "True")])
def test_the_allocator_is_set_under_both_names_over_whatever_the_shell_has(
    monkeypatch, allocator, setting
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.5")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    environment = trial_environment(cuda_spec(settings=Settings(allocator=allocator)))
    assert environment["PYTORCH_ALLOC_CONF"] == f"expandable_segments:{setting}"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == f"expandable_segments:{setting}"


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
    mine = {
        "PYTHONPATH": "/my/code",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    assert trial_environment(cuda_spec()).items() >= mine.items()


def test_a_trial_counts_gpus_as_the_driver_does_whatever_the_shell_says(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert trial_environment(cuda_spec())["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_trial_on_the_cpu_sees_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert trial_environment(cpu_spec())["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"", "Input data was truncated"),
        (b'{"rank":1,"losses":[6.0,null]}', "Expected `float`, got `null`"),
        (b'{"rank":1,"surprise":1}', "unknown field `surprise`"),
        (b'{"rank":1,"device_name":"\xff"}', "invalid start byte"),
    ],
)
def test_a_report_that_cannot_be_read_counts_as_none_and_says_why(tmp_path, written, why):
    (tmp_path / "rank-000.json").write_text(to_json(RankReport(rank=0)))
    (tmp_path / "rank-001.json").write_bytes(written)
    reports, damaged = read_reports(tmp_path)
    assert reports == (RankReport(rank=0),)
    assert len(damaged) == 1
    assert "rank-001.json" in damaged[0]
    assert why in damaged[0]


def test_ranks_talk_to_each_other_on_an_interface_that_nobody_else_reaches(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")
        assert trial_environment(cuda_spec())[name] == trial_environment(cpu_spec())[name] == "lo"


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


def trial(length: int = 8192, *, model: str = "Qwen3-0.6B", **fields) -> TrialSpec:
    return trial_of(model, length_tokens=length, **fields)


def test_a_law_given_a_shape_does_not_read_the_models_directory():
    spec = trial(model_directory="/nowhere")
    assert FormulaLaw(shape=load_model("Qwen3-0.6B").shape)(spec) == FormulaLaw()(trial())


@given(BUDGETS, st.integers(1, 200 * GIB))
def test_a_trial_fits_exactly_when_what_the_driver_sees_is_within_the_budget(budget, needed):
    result = SimulatedRunner(lambda spec: needed).run(trial(memory_budget_bytes=budget))
    assert (result.outcome is Outcome.FIT) == (needed + CONTEXT_BYTES["cuda"] <= budget)
    if result.outcome is Outcome.FIT:
        assert result.peak_reserved_bytes == needed
        assert result.headroom_bytes == budget - CONTEXT_BYTES["cuda"] - needed
    else:
        assert result.outcome is Outcome.OUT_OF_MEMORY
        assert result.ranks[0].failure.kind == "device_memory"


@given(LAYOUTS, RUNGS)
def test_a_budget_is_context_nccl_and_what_is_left_for_the_allocator(layout, rung):
    spec = trial(layout=layout, settings=rung, memory_budget_bytes=80 * GIB)
    (rank, *_) = SimulatedRunner(FormulaLaw()).run(spec).ranks
    budget = rank.budget
    assert (budget.nccl_bytes > 0) == (layout.gpus > 1)
    assert (
        budget.context_bytes + budget.nccl_bytes + budget.allocator_cap_bytes
        == budget.budget_bytes
        == 80 * GIB
    )
    needed = footprint(Step(load_model("Qwen3-0.6B").shape, rung, layout, length_tokens=8192))
    assert rank.memory.peak_reserved_bytes == needed.needed_bytes - needed.outside_bytes
    assert rank.memory.device_used_bytes == needed.needed_bytes


def test_without_a_budget_the_card_is_the_limit_and_without_a_card_nothing_is():
    spec = trial()
    needs_ten = lambda spec: 10 * GIB  # noqa: E731
    assert (
        SimulatedRunner(needs_ten, device_total_bytes=10 * GIB).run(spec).outcome
        is Outcome.OUT_OF_MEMORY
    )
    assert (
        SimulatedRunner(needs_ten, device_total_bytes=12 * GIB).run(spec).headroom_bytes
        == 2 * GIB - CONTEXT_BYTES["cuda"]
    )
    assert SimulatedRunner(needs_ten).run(spec).outcome is Outcome.FIT


def test_on_the_cpu_the_budget_bounds_the_data_segment():
    spec = trial(device="cpu", memory_budget_bytes=4 * GIB, layout=Layout(gpus=2))
    result = SimulatedRunner(lambda spec: 3 * GIB).run(spec)
    assert [rank.memory.peak_data_segment_bytes for rank in result.ranks] == [3 * GIB, 3 * GIB]
    assert result.headroom_bytes == GIB


@pytest.mark.parametrize(
    "outcome", [outcome for outcome in Outcome if outcome is not Outcome.MEMORY_ONLY_FIT]
)
def test_a_law_may_name_the_outcome(outcome):
    result = SimulatedRunner(lambda spec: outcome).run(trial(), attempt=2)
    assert (result.outcome, result.attempt) == (outcome, 2)


def test_every_result_says_that_it_is_simulated_and_measures_no_time():
    for law in (FormulaLaw(), lambda spec: Outcome.CRASHED):
        result = SimulatedRunner(law).run(trial())
        assert result.simulated
        assert (result.tokens_per_s, result.step_time_s) == (None, None)


def test_what_a_law_raises_reaches_the_caller():
    def law(spec: TrialSpec) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SimulatedRunner(law).run(trial())
