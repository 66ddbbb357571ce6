"""The judge: exit status, signals, reports and log together give the one outcome."""

import errno
import math
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import CELL, study_of, trial

from highwater.nouns.control_group import kernel_kills, memory_limit
from highwater.nouns.layout import Layout
from highwater.nouns.oom import exhausted_memory, memory_aborted
from highwater.nouns.request import request_from
from highwater.nouns.trial import Device, Failure, Outcome, RankReport, TrialSpec
from highwater.store.logs import recorded_snapshots, snapshot_folder
from highwater.trials.classify import Ending, classify
from highwater.trials.diagnosis import MemoryDiagnosis, undiagnosed
from highwater.trials.ranks import RankExit
from highwater.trials.trial_process import log_path_of
from places import question_of
from tables import table

QUESTION = question_of(loss="full", allocator="native")


def error_of(name: str, text: str) -> BaseException:
    """An exception as PyTorch raises it: a RuntimeError of its own type."""
    module, _, kind = name.rpartition(".")
    return type(kind, (RuntimeError,), {"__module__": module})(text)


ABORTED = "terminate called after throwing an instance of '{}'\n  what():  {}\n"
"""How the C++ runtime ends a process whose exception nobody catches."""
MEMORY = {"device_memory": "OUT_OF_MEMORY", "host_memory": "HOST_OUT_OF_MEMORY"}
CUDA_TEXTS, HOST_TEXTS = table("classify", "device"), table("classify", "host")
NCCL = "torch.distributed.DistBackendError"
CUDA_ERRORS = (
    error_of("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0"),
    error_of("torch.OutOfMemoryError", "a text of a later release"),
    error_of("torch.AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be"),
    error_of(NCCL, "NCCL error\nLast error:\nCuda failure 2 'out of memory'"),
    *(RuntimeError(text) for text in CUDA_TEXTS),
)
HOST_ERRORS = (
    MemoryError(),
    MemoryError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    *(RuntimeError(text) for text in HOST_TEXTS),
)
UNMAPPED = "failed to map segment from shared object"
AMBIGUOUS = (
    RuntimeError("can't start new thread"),
    ImportError(f"libtorch_cuda.so: {UNMAPPED}"),
    OSError(f"/noexec/libtriton.so: {UNMAPPED}: Operation not permitted"),
)
"""Memory ran out, or threads are limited, or a disk is mounted noexec."""
OTHER_ERRORS = (
    ValueError("the tokenizer is broken"),
    FileNotFoundError(errno.ENOENT, "No such file", "/data/MemoryError-study/std::bad_alloc"),
    KeyError("CUDA out of memory"),
    ValueError("std::bad_alloc"),
    error_of("users.OutOfMemoryError", "of tokens"),
    error_of(NCCL, "NCCL error: Call to ibv_reg_mr failed with error Cannot allocate memory"),
    error_of(NCCL, "NCCL error: remote process exited or there was a network error"),
    *map(RuntimeError, table("classify", "neither")),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyError("memory"),
    *AMBIGUOUS,
)
ABORTS = tuple(ABORTED.format("c10::Error", text) for text in CUDA_TEXTS)
HOST_ABORTS = (
    ABORTED.format("std::bad_alloc", "std::bad_alloc"),
    *(ABORTED.format("c10::Error", text) for text in HOST_TEXTS),
)
SAID = (
    *(f"{type(error).__name__}: {error}" for error in (*CUDA_ERRORS, *HOST_ERRORS, *OTHER_ERRORS)),
    *ABORTS,
    *HOST_ABORTS,
)


def spec_of(*, device: Device = "cuda", gpus: int = 1) -> TrialSpec:
    spec = QUESTION.trial(QUESTION.cells[0], 4096)
    return msgspec.structs.replace(spec, device=device, layout=Layout(gpus=gpus))


def report(rank: int = 0, *, losses: tuple[float, ...] = (6.0, 5.9), **failure: Any) -> RankReport:
    failed = Failure(**{"kind": "error", "phase": "forward", **failure}) if failure else None
    return RankReport(rank=rank, losses=losses, failure=failed)


def ending(*reports: RankReport, exit_code: int | None = 0, log: str = "", **fields: Any) -> Ending:
    return Ending(exit_code=exit_code, timeout_s=30, reports=reports, log_tail=log, **fields)


def ended(output: str = "", **statuses: int) -> tuple[RankExit, ...]:
    """``rank_0=-9`` for a rank 0 that was ended by signal 9; each wrote ``output``."""
    return tuple(
        RankExit(rank=int(name.removeprefix("rank_")), status=status, output=output)
        for name, status in statuses.items()
    )


DAMAGED = "the report rank-001.json cannot be read: Input data was truncated"
EARLY = "Traceback (most recent call last):\nValueError: early\nmy.package.DiskError: on fire\n"
BROKEN = report(1, text="ValueError: broken", phase="data")
LOST = report(0, text="RuntimeError: Connection closed by peer")
SLOW = report(text="x", phase="backward")
NO_MEMORY = {kind: report(1, kind=kind, text="no") for kind in MEMORY}
TORN = msgspec.structs.replace(ending(report(0)), damaged_reports=(DAMAGED,))
DIED = ending(exit_code=1, log=f"{EARLY}OSError: of another", exits=ended(EARLY, rank_0=1))
ODD_RANKS = {
    (0, 1, 2): "report of rank 2",
    (0, 7): "report of rank 7",
    (-1, 0, 1): "report of rank -1",
    (0, 1, 1): "2 reports of rank 1",
}


def killed(number: int) -> Ending:
    return ending(LOST, exit_code=1, exits=ended(rank_1=-number, rank_0=1))


def failing(kind: str) -> Ending:
    failed = report(kind=kind, text="SomeError: first\nsecond", phase="backward")
    return ending(failed, exit_code=1, log="CUDA out of memory\nstd::bad_alloc")


VERDICTS: list[tuple[int, Ending, str, str, str]] = [
    (1, ending(report()), "FIT", "2 steps done, loss 5.900", ""),
    (1, ending(report(losses=(6.0,))), "CRASHED", "rank 0 did 1 of 2 steps", ""),
    (1, ending(report(), exit_code=139), "CRASHED", "", "139"),
    (1, ending(exit_code=None), "TIMEOUT", "not done after 30 s", ""),
    (2, ending(SLOW, exit_code=None, log="CUDA out of memory"), "TIMEOUT", "", "backward"),
    *(
        (2, ending(NO_MEMORY[kind], exit_code=code), outcome, "rank 1, forward: ", "")
        for kind, outcome in MEMORY.items()
        for code in (None, 1)
    ),
    (2, TORN, "CRASHED", "1 rank ", DAMAGED),
    (1, ending(exit_code=1, exits=ended(rank_0=-200)), "CRASHED", "", "signal 200"),
    (1, DIED, "CRASHED", "1 rank ", ": my.package.DiskError: on fire"),
    (2, ending(), "CRASHED", "2 ranks ", " 0"),
    (2, ending(BROKEN, exit_code=1, exits=ended(rank_1=1)), "CRASHED", "rank 1, data: ", ""),
    *((2, ending(*map(report, r)), "CRASHED", "", said) for r, said in ODD_RANKS.items()),
    *(
        (2, killed(number), "CRASHED", f"rank 1 was ended by signal {number} ({name})", "")
        for number, name in ((9, "SIGKILL"), (11, "SIGSEGV"), (6, "SIGABRT"), (7, "SIGBUS"))
    ),
    *(
        (1, failing(kind), outcome, "rank 0, backward: ", "SomeError: first")
        for kind, outcome in (MEMORY | {"error": "CRASHED"}).items()
    ),
]
"""How many GPUs, how a trial ended, and its outcome with how its reason starts and what it has."""


@pytest.mark.parametrize(("gpus", "ending", "outcome", "start", "said"), VERDICTS)
def test_how_a_trial_ended_has_one_outcome_and_says_why(gpus, ending, outcome, start, said):
    verdict = classify(spec_of(gpus=gpus), ending)
    assert verdict.outcome == outcome
    assert verdict.reason.startswith(start)
    assert said in verdict.reason
    assert "second" not in verdict.reason


@pytest.mark.parametrize(("depth", "said"), [(1, "the last layer"), (2, "the last 2 layers")])
def test_a_memory_only_trial_is_never_a_fit_and_says_no_loss(depth, said):
    spec = msgspec.structs.replace(spec_of(), attention_depth=depth)
    outcome, reason = classify(spec, ending(report()))
    assert outcome is Outcome.MEMORY_ONLY_FIT
    assert said in reason
    assert "loss" not in reason
    assert (outcome.tells, outcome.is_memory) == (True, False)
    assert classify(spec, ending(report(losses=(6.0,)))).outcome is Outcome.CRASHED
    no_memory = ending(report(kind="device_memory", text="no memory"), exit_code=1)
    assert classify(spec, no_memory).outcome is Outcome.OUT_OF_MEMORY


@given(log=st.lists(st.sampled_from(SAID)).map("\n".join))
def test_no_text_in_the_log_of_a_good_trial_makes_it_a_bad_one(log):
    good = ending(report(), log=log, exits=ended(log, rank_0=0), kernel_kills=1)
    assert classify(spec_of(), good).outcome is Outcome.FIT


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("depth", [None, 1])
def test_a_loss_or_a_norm_that_is_no_number_is_never_a_fit(value, depth):
    spec = msgspec.structs.replace(spec_of(), attention_depth=depth)
    odd_norm = msgspec.structs.replace(report(), gradient_norms=(value, 1.0))
    for wrong in (report(losses=(6.0, value)), odd_norm):
        verdict = classify(spec, ending(wrong))
        assert verdict.outcome is Outcome.CRASHED
        assert verdict.reason.startswith("rank 0 ")


SPENT = {"is_spent": lambda: True}
ON_GPU, ON_CPU = {"device": "cuda"}, {"device": "cpu"}
RAN_OUT = [
    *((error, ON_GPU, "device_memory") for error in CUDA_ERRORS),
    *((error, ON_GPU, "host_memory") for error in HOST_ERRORS),
    *((error, ON_CPU, "device_memory") for error in HOST_ERRORS),
    *((error, where, None) for error in OTHER_ERRORS for where in (ON_GPU, ON_CPU)),
    *((error, ON_GPU | SPENT, "host_memory") for error in AMBIGUOUS),
    *((error, ON_CPU | SPENT, "device_memory") for error in AMBIGUOUS),
    *((error, ON_CPU | SPENT, None) for error in OTHER_ERRORS if error not in AMBIGUOUS),
]
"""An error, where it came, and the memory that ran out: on the CPU the host's is the device's; an
error with several causes is of memory only where there is none left."""


@pytest.mark.parametrize(("error", "where", "exhausted"), RAN_OUT)
def test_every_error_of_device_memory_that_ran_out_is_known(error, where, exhausted):
    assert exhausted_memory(error, **where) == exhausted


def test_an_exception_whose_text_is_broken_is_no_error_of_memory():
    class BrokenError(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    assert exhausted_memory(BrokenError(), **ON_GPU, **SPENT) is None


OUT_OF_RANGE = ABORTED.format("c10::Error", "index out of range")


@pytest.mark.parametrize(
    ("output", "exhausted"),
    [*((o, "device_memory") for o in ABORTS), *((o, "host_memory") for o in HOST_ABORTS)],
)
def test_the_last_words_of_a_rank_that_aborted_say_which_memory_ran_out(output, exhausted):
    assert memory_aborted(f"a line before\n{output}", device="cuda") == exhausted
    assert memory_aborted(f"{output}{OUT_OF_RANGE}", device="cuda") is None

    def judged(own: str, other: str, **log: str):
        aborted = RankExit(rank=1, status=-signal.SIGABRT, output=own)
        exits = (aborted, RankExit(rank=0, status=1, output=other))
        return classify(spec_of(gpus=2), ending(exit_code=134, exits=exits, **log))

    assert judged(output, "").outcome == MEMORY[exhausted]
    verdict = judged("", output, log=output)
    assert verdict.outcome is Outcome.CRASHED
    assert verdict.reason.startswith("rank 1 ")
    assert "SIGABRT" in verdict.reason


@pytest.mark.parametrize(
    "said", [f"{type(error).__name__}: {error}" for error in (*CUDA_ERRORS, *HOST_ERRORS)]
)
def test_what_was_said_before_an_abort_is_not_why_it_aborted(said):
    assert memory_aborted(f"{said}\n{OUT_OF_RANGE}", device="cuda") is None
    other = "pure virtual method called"
    assert memory_aborted(f"{said}\n{other}", device="cuda") is None


@given(at=st.permutations([1.0, 2.0, 3.0, 4.0]))
def test_the_rank_that_failed_first_gives_the_reason(at):
    reports = [report(r, text=f"Error: of rank {r}", at_unix_s=at_s) for r, at_s in enumerate(at)]
    verdict = classify(spec_of(gpus=4), ending(*reports, exit_code=1))
    first = at.index(1.0)
    assert verdict == (Outcome.CRASHED, f"rank {first}, forward: Error: of rank {first}")


@given(rank=st.integers(0, 3), kind=st.sampled_from([*MEMORY]), silent=st.booleans())
def test_memory_that_ran_out_in_one_rank_is_the_reason_for_all(rank, kind, silent):
    lost = "RuntimeError: Connection closed by peer"
    peers = [report(other, text=lost, at_unix_s=1.0) for other in range(4) if other != rank]
    first = report(rank, kind=kind, text="no memory", at_unix_s=2.0)
    left = ending(*peers[: 1 if silent else 3], first, exit_code=1)
    verdict = classify(spec_of(gpus=4), left)
    assert verdict.outcome.is_memory
    assert verdict.reason == f"rank {rank}, forward: no memory"


@pytest.mark.parametrize(
    ("device", "status", "kills", "outcome"),
    [
        ("cpu", -signal.SIGKILL, 1, Outcome.OUT_OF_MEMORY),
        ("cuda", -signal.SIGKILL, 1, Outcome.HOST_OUT_OF_MEMORY),
        *((device, -signal.SIGKILL, 0, Outcome.CRASHED) for device in ("cpu", "cuda")),
        *((device, -11, 1, Outcome.CRASHED) for device in ("cpu", "cuda")),
        *((device, 1, 1, Outcome.CRASHED) for device in ("cpu", "cuda")),
    ],
)
def test_a_sigkill_is_memory_only_where_the_kernel_killed(device, status, kills, outcome):
    left = ending(exit_code=137, exits=ended(rank_0=status), kernel_kills=kills)
    assert classify(spec_of(device=device), left).outcome is outcome


@given(said=st.sampled_from(SAID), status=st.sampled_from([1, 3, -9, -11, -15]))
def test_a_rank_that_did_not_abort_did_not_run_out_of_memory_whatever_it_wrote(said, status):
    left = ending(exit_code=1, log=said, exits=ended(said, rank_0=status))
    assert classify(spec_of(), left).outcome is Outcome.CRASHED


_failures = st.builds(
    Failure,
    kind=st.sampled_from(["device_memory", "host_memory", "error"]),
    phase=st.sampled_from(["setup", "forward"]),
    text=st.text(max_size=40),
    at_unix_s=st.none() | st.floats(0, 2e9),
)
_losses = st.lists(st.floats(), max_size=3).map(tuple)
_reports = st.builds(
    RankReport, rank=st.integers(-1, 4), losses=_losses, failure=st.none() | _failures
)
_texts = st.text(max_size=60) | st.sampled_from(SAID)
_exits = st.builds(RankExit, rank=st.integers(0, 3), status=st.integers(-70, 255), output=_texts)
_endings = st.builds(
    Ending,
    exit_code=st.none() | st.integers(0, 255),
    timeout_s=st.floats(1, 1e6),
    reports=st.lists(_reports, max_size=5).map(tuple),
    exits=st.lists(_exits, max_size=4).map(tuple),
    log_tail=_texts,
    kernel_kills=st.integers(0, 2),
)


@given(ending=_endings, device=st.sampled_from(["cpu", "cuda"]))
def test_every_ending_has_one_outcome_with_a_reason_and_a_fit_needs_all_right(ending, device):
    outcome, reason = classify(spec_of(device=device, gpus=4), ending)
    assert reason
    assert not re.search(r"[\r\n]", reason)
    is_whole = sorted(r.rank for r in ending.reports) == [0, 1, 2, 3]
    all_did_their_steps = all(
        r.failure is None and len(r.losses) >= 2 and all(map(math.isfinite, r.losses))
        for r in ending.reports
    )
    assert (outcome is Outcome.FIT) == (ending.exit_code == 0 and is_whole and all_did_their_steps)
    assert (outcome is Outcome.TIMEOUT) <= (ending.exit_code is None)
    if ending.exit_code is not None and not all(-1 < r.rank < 4 for r in ending.reports):
        assert outcome is Outcome.CRASHED


V1 = "35 31 0:32 {root} {at} rw,relatime - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 {root} {at} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
UNUSUAL = (
    b"50 31 0:40 / /x rw,relatime - tmpfs  rw\n51 31 0:41 / /d\xe9 rw - ext4 /dev/b rw\n"
    b"52 31 0:42 / /- rw - ext4 - rw\n\n"
)
"""Mounted from nothing; on a path that is not UTF-8; on a hyphen; and no line at all."""
OTHER = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n1 2 0:1 / / rw - "
    "ext4 /dev/vda rw\n"
)


@pytest.mark.parametrize(
    ("groups", "mount", "root", "below"),
    [
        ("0::/user.slice/a.scope\n", V2, "/", "user.slice/a.scope/memory.events"),
        ("0::/\n", V2, "/", "memory.events"),  # a container's own root
        ("0::/docker/1\n", V2, "/docker/1", "memory.events"),  # one that is told its whole name
        ("5:cpu:/b\n4:memory:/a\n0::/\n", V1, "/", "a/memory.oom_control"),
        ("4:cpu,memory:/docker/1/a\n", V1, "/docker/1", "a/memory.oom_control"),
    ],
)
def test_the_groups_own_count_is_read(tmp_path, groups, mount, root, below):
    mounted = tmp_path / "mounted"
    counter = mounted / below
    counter.parent.mkdir(parents=True)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom 5\noom_kill 3\noom_group_kill 1\n")
    (tmp_path / "cgroup").write_text(groups)
    mounts = OTHER + mount.format(root=root, at=mounted)
    (tmp_path / "mountinfo").write_bytes(UNUSUAL + mounts.encode())
    assert kernel_kills(tmp_path) == 3


def test_where_nobody_counts_no_kill_is_proven(tmp_path):
    assert kernel_kills(tmp_path) == 0
    (tmp_path / "cgroup").write_text("0::/gone\n")
    (tmp_path / "mountinfo").write_text(OTHER + V2.format(root="/", at=tmp_path))
    assert kernel_kills(tmp_path) == 0


@pytest.mark.parametrize(
    ("groups", "mount", "limits", "found"),
    [
        ("0::/a/b\n", V2, {"a/b/memory.max": "max\n"}, None),
        ("0::/a/b\n", V2, {"a/b/memory.max": "5368709120\n"}, 5368709120),
        ("0::/a/b\n", V2, {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/\n", V2, {"memory.max": "8192\n"}, 8192),
        ("4:memory:/a\n", V1, {"a/memory.limit_in_bytes": "1024\n"}, 1024),
    ],
)
def test_the_limit_is_the_least_of_the_group_and_outer_ones(tmp_path, groups, mount, limits, found):
    for name, text in limits.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mount.format(root="/", at=tmp_path / "mounted"))
    assert memory_limit(tmp_path) == found


OOM = Outcome.OUT_OF_MEMORY
STUDY = study_of(
    *(trial(4096, Outcome.FIT), trial(8192, Outcome.CRASHED)),
    *(trial(12_288, OOM), trial(10_240, OOM)),
)


def request(folder: Path, **changes: object):
    return request_from(
        {"model": "Qwen3-0.6B", "log_dir": str(folder), "device": "cuda", **changes}, keywords=True
    )


def test_the_first_out_of_memory_is_repeated_and_only_once(tmp_path):
    found = undiagnosed(request(tmp_path), STUDY)
    assert found is STUDY.trials[2]
    log = log_path_of(tmp_path, found.spec, "rung")
    folder = snapshot_folder(log.with_suffix(".attempt-2.log"))
    snapshot = folder / "step_1" / "snapshot_rank01.pickle"
    snapshot.parent.mkdir(parents=True)
    snapshot.touch()
    assert recorded_snapshots(log) == (snapshot,)
    assert undiagnosed(request(tmp_path), STUDY) is None


@pytest.mark.parametrize("changes", [{"no_diagnose": True}, {"memory_profiler": "0"}])
def test_none_is_repeated_where_none_is_asked_for(tmp_path, changes):
    assert undiagnosed(request(tmp_path, **changes), STUDY) is None


def test_nothing_is_repeated_that_no_gpu_ran(tmp_path):
    for spec, result in (
        ({"device": "cpu", "memory_budget_bytes": 1 << 30}, {}),
        ({}, {"simulated": True}),
        ({}, {"outcome": Outcome.HOST_OUT_OF_MEMORY}),
    ):
        found = STUDY.trials[2]
        spec = msgspec.structs.replace(found.spec, **spec)
        result = msgspec.structs.replace(found.result, **result)
        changed = msgspec.structs.replace(found, spec=spec, result=result)
        assert undiagnosed(request(tmp_path), study_of(changed)) is None


def test_a_note_names_the_snapshot_and_says_where_it_ended_otherwise():
    spec = STUDY.question.trial(CELL, 12_288)
    path = Path("logs/a model/snapshot_rank00.pickle")
    done = MemoryDiagnosis(spec=spec, outcome=Outcome.OUT_OF_MEMORY, snapshots=(path,))
    assert "`highwater profile 'logs/a model/snapshot_rank00.pickle'`" in done.note
    assert "ended as" not in done.note
    fitted = msgspec.structs.replace(done, outcome=Outcome.FIT)
    assert "ended as FIT" in fitted.note
    assert "left no snapshot" in msgspec.structs.replace(fitted, snapshots=()).note
    assert "busy" in MemoryDiagnosis(spec=spec, problem="the GPU is busy").note
