"""Faults of one trial: real processes, real training steps."""

import ipaddress
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from processes import marked

import highwater
from fork_server import ForkServer
from highwater.api.search import prepare_trial
from highwater.nouns.codec import from_json
from highwater.nouns.environment import Profiling
from highwater.nouns.request import request_from
from highwater.nouns.trial import Outcome, TrialResult
from highwater.store.logs import snapshot_lines
from tiny_models import write_model

pytestmark = pytest.mark.timeout(600)
HANGS_S = (10, 40, 160)
"""Time limits of a trial that hangs in its second step: where one ends it on its way there, on a
machine that is busy, the next is tried."""
Attempt = Callable[..., TrialResult]


@pytest.fixture
def attempt(mark: str, tiny: Path) -> Attempt:

    def attempt(
        data: str | None,
        *,
        model: Path = tiny,
        length: int = 32,
        gpus: int = 1,
        timeout: str = "2m",
    ) -> TrialResult:
        source = f"faulty_batches:{data}" if data else None
        result = highwater.run_trial(
            str(model),
            length,
            device="cpu",
            memory="1GiB",
            gpus=[gpus],
            data=source,
            timeout=timeout,
            log_dir="logs",
        )
        assert marked(mark) == []
        return result

    return attempt


def log_of(result: TrialResult) -> str:
    assert result.log_path is not None
    return Path(result.log_path).read_text()


def test_a_worker_that_is_killed_with_9_is_a_crash_that_names_the_signal(attempt):
    result = attempt("killed_in_rank_1", gpus=2)
    assert "MemoryError" in log_of(result)
    told = (Outcome.CRASHED, "rank 1 was ended by signal 9 (SIGKILL)")
    assert (result.outcome, result.reason) == told, "the wording, here alone"


@pytest.mark.parametrize(
    ("data", "gpus", "outcome", "reason"),
    [
        ("crashing_in_rank_1", 2, Outcome.CRASHED, "rank 1, data: .*the tokenizer is broken"),
        ("allocating_in_rank_1", 2, Outcome.OUT_OF_MEMORY, "rank 1, data: .*"),
        ("leaving_with_0", 1, Outcome.CRASHED, ".*left no report.*"),
        (
            *("aborting_for_bad_alloc", 1, Outcome.OUT_OF_MEMORY),
            "rank 0 was aborted without a report: its last words say that memory ran out.*",
        ),
        ("raising_what_is_no_text", 1, Outcome.CRASHED, r".* \\udcff\\udcfe\.txt"),
    ],
    ids=[
        "an exception in one rank, not what its peers saw of it",
        "memory that one rank alone exhausts",
        "exit status 0 without a result",
        "an abort for want of memory",
        "an error that is no text",
    ],
)
def test_a_fault_has_its_outcome_and_its_reason(attempt, data, gpus, outcome, reason):
    result = attempt(data, gpus=gpus)
    assert result.outcome is outcome, result.reason
    assert re.fullmatch(reason, result.reason, re.DOTALL)
    assert result.exit_code == 0 or data != "leaving_with_0"


def test_an_endless_exception_is_kept_in_part_and_without_tokens(mark, tiny, tmp_path, capfd):
    study = highwater.find(
        str(tiny),
        device="cpu",
        memory="1GiB",
        loss="full",
        start_length=32,
        resolution=32,
        max_length=32,
        data="faulty_batches:talking_without_end",
        timeout="2m",
        log_dir="logs",
        study="study.jsonl",
    )
    result = study.trials[-1].result
    assert result.outcome is Outcome.CRASHED
    assert "RuntimeError: HF_TOKEN=[hidden] xxx" in result.reason
    assert result.ranks[0].failure.text.endswith("Bearer [hidden]")
    written = Path("study.jsonl").read_text()
    assert len(written) < 100_000
    for text in (written, log_of(result), "".join(capfd.readouterr())):
        assert "hf_abc" not in text
        assert "abcdefgh12345678" not in text
    assert len(log_of(result)) < 100_000
    assert "faulty_batches.py" in log_of(result), "the traceback is there"


def test_a_good_trial_with_tracebacks_in_its_log_fits(attempt):
    result = attempt("noisy")
    assert "Traceback" in log_of(result)
    assert "CUDA out of memory" in log_of(result)
    assert result.outcome is Outcome.FIT
    assert len(result.ranks[0].losses) == 2


def test_a_hang_that_no_signal_but_9_ends_is_a_timeout_and_no_process_is_left(attempt, tmp_path):
    for limit_s in HANGS_S:
        result = attempt("hanging", timeout=f"{limit_s}s")
        if (tmp_path / "hangs").exists():
            break
    assert (tmp_path / "hangs").exists(), result.reason
    assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, None)
    assert result.wall_s >= limit_s


def test_a_length_whose_logits_exceed_the_limit_is_out_of_memory(attempt, wide):
    result = attempt(None, model=wide, length=4096)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.reason.startswith("rank 0, forward: ")


def test_a_data_source_that_does_not_exist_is_the_users_to_mend(attempt):
    with pytest.raises(highwater.HighwaterError, match="'faulty_batches:nothing'"):
        attempt("nothing")


def test_nobody_beyond_this_machine_can_reach_a_process_of_a_trial(attempt, tmp_path):
    result = attempt("telling_who_listens", gpus=2)
    assert result.outcome is Outcome.FIT, result.reason
    listening = json.loads((tmp_path / "listening").read_text())
    assert [address for address in listening if not ipaddress.ip_address(address).is_loopback] == []
    assert len(listening) <= 2 * 2, "gloo alone listens, once for each rank and group"


WITHIN_S = 240
GROUP_BYTES = 448 * 2**20
"""Enough for a trial of two forked processes that takes nothing more; less than what each may take
of its 1 GiB besides what it shares with the process that it is forked from."""


@pytest.fixture
def attempt_in(mark: str, fork_server: ForkServer, tiny: Path) -> Callable[..., TrialResult]:
    return partial(_attempt_in, fork_server, tiny)


def _attempt_in(server: ForkServer, model: Path, group: Path, data: str, gpus: int) -> TrialResult:
    code = f"""
open({str(group / "cgroup.procs")!r}, "w").write("0")
import highwater
from highwater.nouns.codec import to_json
words = dict(device="cpu", memory="1GiB", gpus=[{gpus}], data="faulty_batches:{data}")
words.update(timeout="2m", log_dir="logs")
print(to_json(highwater.run_trial({str(model)!r}, 32, **words)))
"""
    done = server.run(f"-c{code}", within_s=WITHIN_S, environment=os.environ)
    assert done.returncode == 0, done.stderr
    return from_json(done.stdout, TrialResult)


def test_a_rank_that_the_kernel_kills_for_want_of_memory_ran_out_of_it(attempt_in, groups):
    result = attempt_in(groups(GROUP_BYTES), "filling_the_control_group", 2)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert "the kernel killed rank 1" in result.reason


def test_a_rank_that_is_killed_while_others_run_out_of_memory_did_not(attempt_in, groups, tmp_path):
    (tmp_path / "group").write_text(str(groups(16 * 2**20)))
    before = _kills_on_this_machine()
    result = attempt_in(groups(GROUP_BYTES * 4), "killed_while_another_group_runs_out", 1)
    assert result.outcome is Outcome.CRASHED
    assert "SIGKILL" in result.reason
    assert _kills_on_this_machine() > before


def _kills_on_this_machine() -> int:
    (line,) = (
        line
        for line in Path("/proc/vmstat").read_text().splitlines()
        if line.startswith("oom_kill ")
    )
    return int(line.split()[1])


WORDS, WIDTH, TOKENS = 50_000, 64, 4096
LOGITS_BYTES = 4 * WORDS * TOKENS // 2
"""The first half of a sequence is a prompt, of which no logits are made."""


@pytest.fixture
def wordy(mark: str, tmp_path: Path) -> Path:
    """A model with so many words that its logits are nearly all of it."""
    return write_model(tmp_path / "wordy", vocab_size=WORDS, hidden_size=WIDTH)


def ran_out(model: Path, memory: str, *, gpus: int = 1, **settings: str) -> TrialResult:
    result = highwater.run_trial(
        str(model),
        TOKENS,
        device="cpu",
        memory=memory,
        gpus=[gpus],
        prompt_tokens=TOKENS // 2,
        log_dir=str(model.parent / "logs"),
        **settings,
    )
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    return result


def just_ran_out(model: Path, *, from_mib: int) -> TrialResult:
    """A trial with the most memory that it runs out of: what a process has imported differs from
    one environment to another by more than the losses' tensors are apart. By bisection.
    """
    found: dict[int, TrialResult] = {}

    def fits(mib: int) -> bool:
        asked = {"device": "cpu", "memory": f"{mib}MiB", "gpus": [1]}
        asked["prompt_tokens"] = TOKENS // 2
        ended = highwater.run_trial(str(model), TOKENS, log_dir=str(model.parent / "logs"), **asked)
        if ended.outcome is Outcome.OUT_OF_MEMORY:
            found[mib] = ended
        return ended.outcome is not Outcome.OUT_OF_MEMORY

    bisect_left(range(800, from_mib + 1, 20), True, key=fits)
    assert found, "it fits into everything"
    return found[max(found)]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_each_rank_that_ran_out_says_what_lives_and_what_had_no_room(wordy, strategy):
    result = ran_out(wordy, "560MiB", gpus=2, strategy=strategy)
    whole = 4 * (result.ranks[0].parameters or 0)
    failed = [rank.failure for rank in result.ranks if rank.failure and rank.failure.alive]
    assert failed
    for failure in failed:
        alive = failure.alive
        # float32 shards of half the model: parameters, gradients, and two moments
        assert alive.parameters_bytes == pytest.approx(whole / 2, rel=0.01)
        assert alive.gradients_bytes == alive.parameters_bytes
        assert alive.optimizer_states_bytes == pytest.approx(2 * alive.parameters_bytes, rel=0.01)
        assert alive.requested_bytes == LOGITS_BYTES
        assert (alive.requested_by or "").startswith("highwater/engine/models/loss.py:")


def test_logits_that_are_alive_are_told_by_the_losss_frames(wordy):
    (rank,) = just_ran_out(wordy, from_mib=980).ranks
    assert rank.failure.phase in ("forward", "backward")
    assert (rank.failure.alive.logits_bytes or 0) >= LOGITS_BYTES
    assert rank.failure.layer is None  # the loss is in no layer


def test_a_rank_that_was_killed_is_named_among_those_without_a_snapshot(mark, tiny):
    asked = {
        "device": "cpu",
        "memory": "1GiB",
        "gpus": [2],
        "data": "faulty_batches:killed_in_rank_1",
        "log_dir": "logs",
    }
    spec = prepare_trial(request_from({"model": str(tiny), **asked}, keywords=True), 32)
    result = highwater.run_trial(str(tiny), 32, **asked)
    *_, ended = snapshot_lines(spec, result, Profiling(ranks=(1,)))
    assert "rank 1 was ended" in ended
    assert marked(mark) == []
