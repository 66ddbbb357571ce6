"""The judge: exit status, signals, reports and log together give the one outcome; text alone never does."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import question_of

from highwater.launch.outcome import Ending, Verdict, judge
from highwater.spec.layout import Layout
from highwater.spec.oom import exhausted_memory
from highwater.spec.trial import Device, Failure, FailureKind, Outcome, RankReport, TrialSpec

QUESTION = question_of(loss="full", allocator="native")
CUDA_SPELLINGS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB",
    "RuntimeError: CUDA error: out of memory",
    "AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "torch.distributed.DistBackendError: NCCL error: unhandled cuda error, NCCL version 2.28.9\n"
    "Last error:\nCuda failure 2 'out of memory'",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77\nLast error:\nFailed to CUDA calloc async 608 bytes",
    "node:1:1 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 'out of memory'",
    "terminate called after throwing an instance of 'c10::Error'\n  what():  cudaErrorMemoryAllocation",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "RuntimeError: CUDA driver error: out of memory",
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
    "RuntimeError: cuMemMap(ptr, size, 0, handle, 0) failed: out of memory",
    "RuntimeError: cuMemCreate returned CUDA_ERROR_OUT_OF_MEMORY",
    "RuntimeError: cuMemSetAccess: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`",
)
HOST_SPELLINGS = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)",
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "MemoryError",
    "OSError: [Errno 12] Cannot allocate memory",
    "RuntimeError: can't start new thread",
    "ImportError: libtorch_cuda.so: failed to map segment from shared object",
    "RuntimeError: cuMemHostAlloc failed: out of memory",
    "RuntimeError: cuMemAllocHost returned CUDA_ERROR_OUT_OF_MEMORY",
)
OTHER_ERRORS = (
    "ValueError: the tokenizer is broken",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle, m, n, k)`",
    "RuntimeError: CUDA driver error: invalid argument",
    "RuntimeError: Triton Error [CUDA]: invalid device context",
    "RuntimeError: cuMemMap failed: invalid argument",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "OSError: [Errno 28] No space left on device",
    "KeyError: 'memory'",
)


def spec_of(*, device: Device = "cuda", gpus: int = 1) -> TrialSpec:
    """A trial of 2 steps."""
    question = QUESTION
    spec = question.trial(question.cells[0], 4096)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return TrialSpec(**{**fields, "device": device, "layout": Layout(gpus=gpus)})


def report(rank: int = 0, *, losses: tuple[float, ...] = (6.0, 5.9), **failure: Any) -> RankReport:
    """What a rank wrote; with a failure's fields, one that failed."""
    failed = Failure(**{"kind": "error", "phase": "forward", **failure}) if failure else None
    return RankReport(rank=rank, losses=losses, failure=failed)


def ending(*reports: RankReport, exit_code: int | None = 0, log: str = "", host_kills: int = 0) -> Ending:
    return Ending(exit_code=exit_code, timeout_s=30, reports=reports, log_tail=log, host_kills=host_kills)


def summary(**exits: int) -> str:
    """The end of torchrun's log: ``rank_0=-9`` for a rank 0 that was ended by signal 9."""
    entries = [
        f"[{rank}]:\n  time      : 2026-01-01_00:00:00\n  host      : node\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {100 + int(rank)})  (SIG)\n  error_file: <N/A>\n"
        for rank, code in ((name.removeprefix("rank_"), code) for name, code in exits.items())
    ]
    return "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nworker FAILED\n" + "".join(entries)


def test_steps_done_and_exit_status_0_are_a_fit() -> None:
    assert judge(spec_of(), ending(report())) == Verdict(Outcome.FIT, "2 steps done, loss 5.900")


@pytest.mark.parametrize(("depth", "said"), [(1, "the last layer"), (2, "the last 2 layers")])
def test_a_memory_only_trial_is_never_a_fit_and_says_no_loss(depth: int, said: str) -> None:
    spec = msgspec.structs.replace(spec_of(), attention_depth=depth)
    verdict = judge(spec, ending(report()))
    assert verdict == Verdict(Outcome.MEMORY_ONLY_FIT, f"2 steps done, with attention over whole documents in {said} only")
    assert verdict.outcome.tells
    assert not verdict.outcome.is_memory
    assert judge(spec, ending(report(losses=(6.0,)))).outcome is Outcome.CRASHED
    assert judge(spec, ending(report(kind="device_memory", text="no memory"), exit_code=1)).outcome is Outcome.OUT_OF_MEMORY


@given(log=st.lists(st.sampled_from((*CUDA_SPELLINGS, *HOST_SPELLINGS, *OTHER_ERRORS, summary(rank_0=-9)))).map("\n".join))
def test_no_text_in_the_log_of_a_good_trial_makes_it_a_bad_one(log: str) -> None:
    assert judge(spec_of(), ending(report(), log=log, host_kills=1)).outcome is Outcome.FIT


def test_a_rank_that_stopped_early_without_an_error_is_a_crash() -> None:
    verdict = judge(spec_of(), ending(report(losses=(6.0,))))
    assert verdict == Verdict(Outcome.CRASHED, "rank 0 did 1 of 2 steps")


def test_success_in_every_report_does_not_outweigh_a_launcher_that_failed() -> None:
    verdict = judge(spec_of(), ending(report(), exit_code=139))
    assert verdict.outcome is Outcome.CRASHED
    assert "139" in verdict.reason


def test_time_that_is_up_is_a_timeout_whatever_error_was_reported() -> None:
    assert judge(spec_of(), ending(exit_code=None)) == Verdict(Outcome.TIMEOUT, "not done after 30 s")
    failed = report(kind="error", text="ValueError: x", phase="backward")
    verdict = judge(spec_of(gpus=2), ending(failed, exit_code=None, log="CUDA out of memory"))
    assert verdict == Verdict(Outcome.TIMEOUT, "not done after 30 s; a rank had failed in backward")


@pytest.mark.parametrize(("kind", "outcome"), [("device_memory", "OUT_OF_MEMORY"), ("host_memory", "HOST_OUT_OF_MEMORY")])
def test_memory_that_a_rank_says_ran_out_is_the_outcome_even_if_its_peers_hung_until_time_was_up(
    kind: FailureKind, outcome: str
) -> None:
    verdict = judge(spec_of(gpus=2), ending(report(1, kind=kind, text="no memory"), exit_code=None))
    assert verdict == Verdict(Outcome(outcome), "rank 1, forward: no memory")


def test_a_rank_whose_report_cannot_be_read_is_silent_and_the_reason_names_the_report() -> None:
    damaged = "the report rank-001.json cannot be read: Input data was truncated"
    left = msgspec.structs.replace(ending(report(0), exit_code=0), damaged_reports=(damaged,))
    verdict = judge(spec_of(gpus=2), left)
    assert verdict == Verdict(Outcome.CRASHED, f"1 rank left no report; the launcher exited with 0; {damaged}")


@pytest.mark.parametrize("text", CUDA_SPELLINGS)
def test_every_spelling_of_device_memory_that_ran_out_is_known(text: str) -> None:
    assert exhausted_memory(text, device="cuda") == "device_memory"
    assert exhausted_memory(f"some lines before\n{text}\nand after", device="cuda") == "device_memory"


@pytest.mark.parametrize("text", HOST_SPELLINGS)
def test_host_memory_is_told_from_device_memory_and_on_the_cpu_is_the_device(text: str) -> None:
    assert exhausted_memory(text, device="cuda") == "host_memory"
    assert exhausted_memory(text, device="cpu") == "device_memory"


@pytest.mark.parametrize("text", OTHER_ERRORS)
def test_other_errors_do_not_speak_of_memory_that_ran_out(text: str) -> None:
    assert exhausted_memory(text, device="cuda") is None
    assert exhausted_memory(text, device="cpu") is None


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [("device_memory", Outcome.OUT_OF_MEMORY), ("host_memory", Outcome.HOST_OUT_OF_MEMORY), ("error", Outcome.CRASHED)],
)
def test_a_report_decides_what_its_text_only_illustrates(kind: FailureKind, outcome: Outcome) -> None:
    failed = report(kind=kind, text="SomeError: first line\nsecond line", phase="backward")
    verdict = judge(spec_of(), ending(failed, exit_code=1, log="CUDA out of memory\nstd::bad_alloc"))
    assert verdict == Verdict(outcome, "rank 0, backward: SomeError: first line")


@given(at=st.permutations([1.0, 2.0, 3.0, 4.0]))
def test_the_rank_that_failed_first_gives_the_reason(at: list[float]) -> None:
    reports = [report(rank, text=f"Error: of rank {rank}", at_unix_s=seconds) for rank, seconds in enumerate(at)]
    verdict = judge(spec_of(gpus=4), ending(*reports, exit_code=1))
    assert verdict == Verdict(Outcome.CRASHED, f"rank {at.index(1.0)}, forward: Error: of rank {at.index(1.0)}")


@given(rank=st.integers(0, 3), kind=st.sampled_from(["device_memory", "host_memory"]), silent=st.booleans())
def test_memory_that_ran_out_in_one_rank_is_the_reason_for_all(rank: int, kind: FailureKind, silent: bool) -> None:
    lost = "RuntimeError: Connection closed by peer"
    peers = [report(other, text=lost, at_unix_s=1.0) for other in range(4) if other != rank]
    reports = [*peers[: 1 if silent else 3], report(rank, kind=kind, text="no memory", at_unix_s=2.0)]
    verdict = judge(spec_of(gpus=4), ending(*reports, exit_code=1))
    assert verdict.outcome.is_memory
    assert verdict.reason == f"rank {rank}, forward: no memory"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (6, "SIGABRT"), (7, "SIGBUS")])
def test_a_rank_ended_by_a_signal_is_a_crash_that_names_it(number: int, name: str) -> None:
    lost = report(0, text="RuntimeError: Connection closed by peer")
    verdict = judge(spec_of(gpus=2), ending(lost, exit_code=1, log=summary(rank_0=1, rank_1=-number)))
    assert verdict == Verdict(Outcome.CRASHED, f"rank 1 was ended by signal {number} ({name})")


def test_a_signal_without_a_name_is_still_a_crash() -> None:
    verdict = judge(spec_of(), ending(exit_code=1, log=summary(rank_0=-200)))
    assert verdict == Verdict(Outcome.CRASHED, "rank 0 was ended by signal 200 (unknown)")


@pytest.mark.parametrize(("device", "outcome"), [("cpu", Outcome.OUT_OF_MEMORY), ("cuda", Outcome.HOST_OUT_OF_MEMORY)])
def test_a_sigkill_is_memory_only_where_the_kernel_says_that_it_killed(device: Device, outcome: Outcome) -> None:
    log = summary(rank_0=-9)
    assert judge(spec_of(device=device), ending(exit_code=1, log=log, host_kills=1)).outcome is outcome
    assert judge(spec_of(device=device), ending(exit_code=1, log=log)).outcome is Outcome.CRASHED
    assert judge(spec_of(device=device), ending(exit_code=1, log=summary(rank_0=-11), host_kills=1)).outcome is Outcome.CRASHED


@given(text=st.sampled_from((*CUDA_SPELLINGS, *HOST_SPELLINGS)), number=st.sampled_from([9, 15]))
def test_who_was_killed_by_somebody_else_did_not_run_out_of_memory_whatever_the_log_says(text: str, number: int) -> None:
    verdict = judge(spec_of(), ending(exit_code=1, log=f"{text}\n{summary(rank_0=-number)}"))
    assert verdict.outcome is Outcome.CRASHED


@pytest.mark.parametrize("exit_status", [1, -6, -11])
@pytest.mark.parametrize(
    ("text", "outcome"),
    [(text, Outcome.OUT_OF_MEMORY) for text in CUDA_SPELLINGS] + [(text, Outcome.HOST_OUT_OF_MEMORY) for text in HOST_SPELLINGS],
)
def test_a_rank_that_died_in_native_code_is_judged_by_what_its_log_said(text: str, outcome: Outcome, exit_status: int) -> None:
    log = f"{text}\n{summary(rank_0=-15, rank_1=exit_status)}"
    assert judge(spec_of(gpus=2), ending(exit_code=1, log=log)).outcome is outcome


def test_a_rank_that_vanished_with_an_error_in_its_log_is_a_crash_with_that_error() -> None:
    log = "Traceback (most recent call last):\nValueError: early\nmy.package.DiskError: on fire\n" + summary(rank_0=1)
    verdict = judge(spec_of(), ending(exit_code=1, log=log))
    assert verdict.outcome is Outcome.CRASHED
    assert verdict.reason == (
        "1 rank left no report; the launcher exited with 1; the last error in the log: my.package.DiskError: on fire"
    )


def test_ranks_that_left_nothing_at_all_are_a_crash_even_with_exit_status_0() -> None:
    assert judge(spec_of(gpus=2), ending()) == Verdict(Outcome.CRASHED, "2 ranks left no report; the launcher exited with 0")


def test_a_reported_error_beside_a_rank_that_torchrun_ended_is_the_reason() -> None:
    failed = report(1, text="ValueError: broken", phase="data")
    verdict = judge(spec_of(gpus=2), ending(failed, exit_code=1, log=summary(rank_0=-15, rank_1=1)))
    assert verdict == Verdict(Outcome.CRASHED, "rank 1, data: ValueError: broken")


_reports = st.lists(
    st.builds(
        RankReport,
        rank=st.integers(0, 3),
        losses=st.lists(st.floats(), max_size=3).map(tuple),
        failure=st.none()
        | st.builds(
            Failure,
            kind=st.sampled_from(["device_memory", "host_memory", "error"]),
            phase=st.sampled_from(["setup", "forward"]),
            text=st.text(max_size=40),
            at_unix_s=st.none() | st.floats(0, 2e9),
        ),
    ),
    max_size=4,
    unique_by=lambda report: report.rank,
).map(tuple)
_endings = st.builds(
    Ending,
    exit_code=st.none() | st.integers(0, 255),
    timeout_s=st.floats(1, 1e6),
    reports=_reports,
    log_tail=st.text(max_size=60) | st.sampled_from((*CUDA_SPELLINGS, summary(rank_0=-9, rank_1=1))),
    host_kills=st.integers(0, 2),
)


@given(ending=_endings, device=st.sampled_from(["cpu", "cuda"]))
def test_every_ending_has_one_outcome_with_a_reason_in_a_line_and_a_fit_needs_everything_to_be_right(
    ending: Ending, device: Device
) -> None:
    outcome, reason = judge(spec_of(device=device, gpus=4), ending)
    assert reason
    assert not re.search(r"[\r\n]", reason)
    everything_right = (
        ending.exit_code == 0 and len(ending.reports) == 4 and all(r.failure is None and len(r.losses) >= 2 for r in ending.reports)
    )
    assert (outcome is Outcome.FIT) == everything_right
    out_of_memory = any(r.failure is not None and r.failure.kind != "error" for r in ending.reports)
    assert (outcome is Outcome.TIMEOUT) == (ending.exit_code is None and not out_of_memory)
