"""Failures of other trainers."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import marked

from highwater.nouns.codec import from_json
from highwater.nouns.trainer import ForeignTrainer
from highwater.nouns.trial import Launch, Outcome, TrialEndedError, TrialResult, TrialSpec, unheard
from highwater.trials.foreign_trial import ForeignLauncher
from highwater.trials.local import LocalRunner
from highwater.units import GIB, MIB
from runner_contract import RunnerContract
from trial_specs import trial_of

pytestmark = pytest.mark.timeout(300)

SILENT_S = 2.0
"""Silence that is taken for a hang here; half a minute where trainers are real."""
LIMIT_S = 120.0

PREAMBLE = """
import os, signal, subprocess, sys, time, traceback

class OutOfMemoryError(RuntimeError):
    pass

OutOfMemoryError.__module__ = "torch"
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"

def ran_out():
    raise OutOfMemoryError(TEXT)

def step(number, of=2):
    print(f"step {number}/{of} loss {3 - number / 10:.3f}", flush=True)

def bar(number):
    print(f"\\r{number * 50:3d}%|{'#' * number}| {number}/2 [00:01<00:01, loss=2.5]", end="",
          file=sys.stderr, flush=True)

def as_rank(rank, error):
    for line in traceback.format_exception(error):
        for each in line.splitlines():
            print(f"[rank{rank}]: {each}", file=sys.stderr, flush=True)
"""

Judge = Callable[..., TrialResult]


def spec_of(
    model: Path, words: tuple[str, ...], *, device: Any = "cuda", length: int = 4096, **of: Any
) -> TrialSpec:
    return trial_of(
        model,
        device=device,
        length_tokens=length,
        memory_budget_bytes=GIB if device == "cpu" else None,
        foreign=ForeignTrainer(trainer="command", command=words, **of),
    )


@pytest.fixture
def judge(mark: str, tiny: Path, tmp_path: Path) -> Judge:
    """Runs a script as a trainer, and returns what it is judged; nothing of it is left."""

    def judge(code: str, *, timeout_s: float = LIMIT_S, **of: Any) -> TrialResult:
        script = tmp_path / "train.py"
        script.write_text(PREAMBLE + textwrap.dedent(code))
        words = of.pop("words", (sys.executable, str(script)))
        launcher = ForeignLauncher(
            log_directory=tmp_path / "logs", timeout_s=timeout_s, silent_s=SILENT_S
        )
        launch = Launch(spec=spec_of(tiny, words, **of))
        result = launcher.launch(launch, gpus=None, ended=threading.Event(), on_phase=unheard)
        assert marked(mark) == []
        assert result.log_path is not None
        assert not list(Path(result.log_path).parent.glob("highwater-*")), "its folder is gone"
        return result

    return judge


GOOD = {
    "a step that takes long and says nothing, after an error that was caught": """
        try:
            ran_out()
        except OutOfMemoryError:
            traceback.print_exc()
        print("Starting training", file=sys.stderr, flush=True)
        ends = time.monotonic() + 3 * 2.0
        while time.monotonic() < ends:  # works a third of the time: a twentieth is no silence
            busy = time.monotonic() + 0.01
            while time.monotonic() < busy:
                sum(range(1000))
            time.sleep(0.02)
        step(1), step(2)
    """,
    "megabytes of a progress bar": """
        for _ in range(40_000):
            bar(1)
        bar(2)
    """,
    "a process that stays behind": """
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        step(1), step(2)
    """,
}


@pytest.mark.parametrize("code", GOOD.values(), ids=GOOD)
def test_a_trainer_that_did_its_steps_fits(judge, code):
    result = judge(code)
    assert result.outcome is Outcome.FIT, result.reason


OUT_OF_MEMORY = {
    "an exception that nobody caught": "step(1), ran_out()",
    "a hang of its peer": """
        if sys.argv[-1] == "peer":
            step(1)
            time.sleep(0.5)
            ran_out()
        subprocess.Popen([sys.executable, __file__, "peer"])
        time.sleep(600)
    """,
    "a hang of its peer that spins, while its own process hangs in the end": """
        try:
            step(1), ran_out()
        except OutOfMemoryError as error:
            as_rank(0, error)
        while True:
            sum(range(1000))
    """,
    "an abort in C++": """
        print("terminate called after throwing an instance of 'c10::OutOfMemoryError'")
        print(f"  what():  {TEXT}", flush=True)
        os.abort()
    """,
}


@pytest.mark.parametrize("code", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_trainer_whose_last_error_is_an_allocators_does_not_fit(judge, code):
    result = judge(code)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert result.wall_s < LIMIT_S


NEITHER = {
    "a log of which the beginning is not read": """
        for _ in range(33):
            print("x" * 2**20)
        step(1), step(2)
    """,
    "swallowed without a word, and exited 0": """
        try:
            step(1), ran_out()
        except OutOfMemoryError:
            sys.exit(0)
    """,
    "a segmentation fault after one that was caught": """
        try:
            ran_out()
        except OutOfMemoryError:
            traceback.print_exc()
        os.kill(os.getpid(), signal.SIGSEGV)
    """,
    "killed by somebody": """
        print("MemoryError: out of memory", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    "a collective that timed out": """
        for line in (
            "[rank0]:[E101 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 600000 ms",
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            "  what():  [Rank 0] Watchdog caught collective operation timeout",
        ):
            print(line, flush=True)
        os.abort()
    """,
}


@pytest.mark.parametrize("code", NEITHER.values(), ids=NEITHER)
def test_what_proves_neither_says_nothing_about_memory(judge, code):
    result = judge(code)
    assert result.outcome is Outcome.CRASHED, result.reason
    assert result.reason


def test_host_memory_that_runs_out_on_a_gpu_is_the_hosts(judge):
    code = "step(1)\nbytearray(2**62)"
    assert judge(code).outcome is Outcome.HOST_OUT_OF_MEMORY
    assert judge(code, device="cpu").outcome is Outcome.OUT_OF_MEMORY


def test_a_hang_without_an_error_is_a_timeout_that_says_how_far_it_came(judge):
    result = judge("step(1)\ntime.sleep(600)", timeout_s=3 * SILENT_S)
    assert result.outcome is Outcome.TIMEOUT
    assert "1 of 2 steps" in result.reason


def test_real_steps_on_the_cpu_fit_below_a_limit_and_run_out_of_it(judge):
    words = (sys.executable, str(Path(__file__).with_name("plain_steps.py")), "{length}")
    fits = judge("", device="cpu", words=words)
    assert fits.outcome is Outcome.FIT, fits.reason
    assert 100 * MIB < fits.peak_reserved_bytes < GIB
    too_long = judge("", device="cpu", words=words, length=2**20)
    assert too_long.outcome is Outcome.OUT_OF_MEMORY, too_long.reason


TORCHRUN = """
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
if dist.get_rank() == 1:
    step(1), ran_out()
dist.barrier()
"""


def test_a_rank_of_torchruns_that_runs_out_is_found_among_what_its_peers_say(judge, tmp_path):
    # -P: torchrun is forked from what has imported it; its ranks start as ever
    run = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for tee in ((), ("--tee", "3")):
        result = judge(TORCHRUN, words=(sys.executable, *run, *tee, str(tmp_path / "train.py")))
        assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason


def test_a_process_that_the_kernel_kills_for_want_of_memory_is_found(mark, groups, tiny, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pages = bytearray(2**30)\npages[::4096] = b'1' * len(pages[::4096])\n")
    code = f"""
open({str(groups(512 * MIB) / "cgroup.procs")!r}, "w").write("0")
import highwater
from highwater.nouns.codec import to_json
words = dict(device="cpu", memory="4GiB", trainer="command", log_dir="logs")
words["command"] = "{sys.executable} {script} {{length}}"
print(to_json(highwater.run_trial({str(tiny)!r}, 32, **words)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result = from_json(done.stdout, TrialResult)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert "the kernel killed" in result.reason


class TestRunnerOfOtherTrainers(RunnerContract):
    @pytest.fixture
    def runner(self, mark: str, tiny: Path, tmp_path: Path) -> LocalRunner:
        self.tiny, self.folder = tiny, tmp_path
        launcher = ForeignLauncher(log_directory=tmp_path / "logs", timeout_s=LIMIT_S)
        return LocalRunner(launcher, most_trials=2)

    def trial(self, code: str, length: int) -> TrialSpec:
        script = self.folder / f"train-{length}.py"
        script.write_text(PREAMBLE + code)
        words = (sys.executable, str(script))
        return spec_of(self.tiny, words, device="cpu", length=length)

    def fitting(self, number: int) -> TrialSpec:
        return self.trial("step(1), step(2)", 32 * (number + 1))

    def too_long(self) -> TrialSpec:
        return self.trial("bytearray(2**33)", 8192)

    def crashing(self) -> TrialSpec:
        return self.trial("{}['labels']", 48)

    def endless(self) -> TrialSpec:
        return self.trial("time.sleep(600)", 56)


LOST_LOGS = {
    "removed": "os.remove(log)",
    "replaced by a pipe": "os.remove(log); os.mkfifo(log)",
    "moved": "os.rename(log, log + '.old')",
    "its folder removed": "import shutil; shutil.rmtree(os.path.dirname(log))",
    "replaced by a folder": "os.remove(log); os.mkdir(log)",
}
"""What a trainer may do to its own log."""


@pytest.mark.parametrize("ending", ["fits", "crashes"])
@pytest.mark.parametrize("how", LOST_LOGS)
def test_a_trainer_that_loses_its_log_is_judged_by_what_it_wrote(how, ending, judge):
    last = "" if ending == "fits" else "{}['labels']"
    result = judge(f"""
        log = os.readlink("/proc/self/fd/1")
        step(1)
        {LOST_LOGS[how]}
        time.sleep(1.5)  # it is looked at meanwhile
        step(2)
        {last}
    """)
    assert result.outcome is (Outcome.FIT if ending == "fits" else Outcome.CRASHED), result.reason
    assert ending == "fits" or "KeyError" in result.reason


def test_a_log_that_is_cut_is_judged_by_what_is_left(judge):
    result = judge("""
        step(1), step(2)
        os.truncate(os.readlink("/proc/self/fd/1"), 0)
        time.sleep(1.5)
    """)
    assert result.outcome is Outcome.CRASHED, result.reason


def test_what_is_ended_leaves_no_process_and_no_folder(mark, tiny, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PREAMBLE + "subprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n")
    launcher = ForeignLauncher(log_directory=tmp_path / "logs", timeout_s=LIMIT_S)
    launch = Launch(spec=spec_of(tiny, (sys.executable, str(script))))
    ended = threading.Event()
    threading.Timer(SILENT_S, ended.set).start()
    with pytest.raises(TrialEndedError):
        launcher.launch(launch, gpus=None, ended=ended, on_phase=unheard)
    assert marked(mark) == []
    assert not list((tmp_path / "logs").rglob("highwater-*"))
