"""Trials of foreign trainers, judged from outside."""

import time
from typing import Any

import msgspec
import pytest
from foreign_trials import FRAMES, OOM, RAN_OUT, outcome, typed_trial
from hypothesis import given
from hypothesis import strategies as st

from highwater.nouns.trial import Outcome, RankMemory, RankReport
from highwater.trainers.logs import log_lines, progress_of
from highwater.trials.foreign_classify import ForeignEnding, classify_foreign, evidence_of
from highwater.trials.foreign_trial import bounded_allocator, memory_budget, past_the_bound
from highwater.units import GIB
from tables import table

STEP = "{{'loss': '{0}', 'grad_norm': '1.5', 'learning_rate': '2e-05', 'epoch': '0.5'}}\n"
STEPS = STEP.format(2.5) + STEP.format(2.25)
SUMMARY = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "============\n./train.py FAILED\n------------\nRoot Cause (first observed failure):\n"
    "[0]:\n  time      : 2026-01-01_00:00:00\n  rank      : 1 (local_rank: 1)\n"
    "  exitcode  : {0} (pid: 12)\n  error_file: <N/A>\n"
)


def by_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


GOOD = {
    "dictionaries": STEPS,
    "dictionaries of numbers": "{'loss': 2.5, 'epoch': 0.5}\n{'loss': 2.1, 'epoch': 1.0}\n",
    "the trainer's summary": "{'train_runtime': '3.1', 'train_loss': '2.3', 'epoch': '1'}\n",
    "a bar that overwrites itself": "\r  0%|          | 0/2 [00:00<?, ?it/s]"
    "\r 50%|█████     | 1/2 [00:01<00:01, loss=2.5]\r100%|██████████| 2/2 [00:02<00:00, loss=2.4]",
    "a bar of training": "Training:  50%|█████     | 1/2 [00:01<00:01,  1.0s/it]\nloss: 2.5\n"
    "Training: 100%|██████████| 2/2 [00:02<00:00,  1.0s/it]\nloss: 2.4\n",
    "a bar in colour": "\x1b[32mEpoch 0:  50%|\x1b[0m█ | 1/2 [00:01<00:01, train_loss=2.5]\r"
    "\x1b[32mEpoch 0: 100%|\x1b[0m██| 2/2 [00:02<00:00, train_loss=2.4]\n",
    "steps of all": "step 1/2: loss 2.5\nstep 2/2: loss 2.4\n",
    "torchtitan": "[titan] step:  1  loss:  8.2\n[titan] step:  2  loss:  7.9  memory: 10.1GiB\n",
    "counted from 0": "step 0 loss 8.2\nstep 1 loss 7.9\n",
    "Megatron": " iteration        1/       2 | lm loss: 8.1E+00 |\n"
    " iteration        2/       2 | lm loss: 7.9E+00 |\n",
    "verl": "step:1 - actor/pg_loss:0.1 - x:1\nstep:2 - actor/pg_loss:0.2 - x:1\n",
    "Ray": f"\x1b[36m(TrainWorker pid=12, ip=10.0.0.1)\x1b[0m {STEP.format(2.5)}"
    f"(TrainWorker pid=12, ip=10.0.0.1) {STEP.format(2.4)}",
}


@pytest.mark.parametrize("log", GOOD.values(), ids=GOOD)
def test_a_trial_whose_log_shows_its_steps_fits_where_it_exited_well(log):
    assert outcome(log, 0) is Outcome.FIT
    assert outcome(log + "\nerror: could not start\n", 0) is Outcome.CRASHED
    assert outcome("", 0) is Outcome.CRASHED
    for exit_code in (1, 2, 134, 137, 139, 255, None):
        assert not outcome(log, exit_code).tells


HARMLESS = {
    "advice": "hint: if CUDA out of memory occurs, lower --batch-size\n",
    "a setting": "PYTORCH_ALLOC_CONF helps with torch.OutOfMemoryError: CUDA out of memory\n",
    "a kernel that was tried before it begins": f"{RAN_OUT}another kernel\nStarting training\n",
}
UNCLEAR = {
    "a file": "reading MemoryError: a history of out of memory.txt\n",
    "a warning": "W0101 00:00:00 autotune.py:12] OutOfMemoryError: CUDA out of memory, skipped\n",
    "a kernel that was tried, maybe in the first step": f"{RAN_OUT}taking another kernel\n",
}


@pytest.mark.parametrize("text", (HARMLESS | UNCLEAR).values(), ids=HARMLESS | UNCLEAR)
def test_text_about_memory_spoils_no_good_log_and_proves_nothing_in_a_bad_one(text):
    expected = Outcome.FIT if text in HARMLESS.values() else Outcome.CRASHED
    assert outcome(text + STEPS, 0) is expected
    assert outcome(text + STEPS, 139) is Outcome.CRASHED
    assert outcome(text + STEP.format(2.5) + FRAMES + "KeyError: 'labels'\n") is Outcome.CRASHED


DEVICE_ERRORS = (OOM, *table("foreign_classify", "device"))
HOST_ERRORS = table("foreign_classify", "host")


@pytest.mark.parametrize("error", DEVICE_ERRORS)
def test_a_last_error_of_an_allocator_is_out_of_memory(error):
    raised = FRAMES + error + "\n"
    by_default = "".join(f"[default1]:{line}\n" for line in raised.splitlines())
    for log in (
        raised,
        STEP.format(2.5) + raised,
        "\r 50%|█████     | 1/2 [00:01<00:01,  1.0s/it]" + raised,
        by_rank(1, raised) + SUMMARY.format(1),
        raised if "\n" in error else by_default,
        f"2026-01-01 ERROR trainer: failed\n{raised}" + SUMMARY.format(1),
    ):
        assert outcome(log) is Outcome.OUT_OF_MEMORY, log


@pytest.mark.parametrize("error", HOST_ERRORS)
def test_host_memory_is_told_from_a_gpus(error):
    assert outcome(FRAMES + error + "\n") is Outcome.HOST_OUT_OF_MEMORY
    assert outcome(FRAMES + error + "\n", device="cpu") is Outcome.OUT_OF_MEMORY


def test_an_abort_has_its_last_words_and_the_kernel_is_believed_where_it_killed():
    abort = "terminate called after throwing an instance of '{}'\n  what():  {}\n"
    ran_out = abort.format("c10::OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")
    assert outcome(ran_out, 134) is Outcome.OUT_OF_MEMORY
    bad_alloc = abort.format("std::bad_alloc", "std::bad_alloc")
    assert outcome(bad_alloc, 134) is Outcome.HOST_OUT_OF_MEMORY
    assert outcome(abort.format("c10::Error", "no kernel image"), 134) is Outcome.CRASHED
    assert outcome(STEP.format(2), 137, kernel_kills=1) is Outcome.HOST_OUT_OF_MEMORY
    assert outcome(STEP.format(2), 137, kernel_kills=1, device="cpu") is Outcome.OUT_OF_MEMORY
    assert outcome(SUMMARY.format(-9), 1, kernel_kills=1) is Outcome.HOST_OUT_OF_MEMORY
    assert outcome(SUMMARY.format(-9), 1) is Outcome.CRASHED
    assert outcome(STEP.format(2), 137) is Outcome.CRASHED
    assert outcome(STEP.format(2), 1, kernel_kills=1) is Outcome.CRASHED
    assert outcome(STEPS, 0, kernel_kills=1) is Outcome.FIT


LOST_PEER = table("foreign_classify", "lost its peer")


@pytest.mark.parametrize("lost", LOST_PEER)
def test_a_rank_that_lost_its_peer_says_nothing_against_the_peers_error(lost):
    for log in (
        by_rank(1, RAN_OUT) + by_rank(0, FRAMES + lost) + SUMMARY.format(1),
        by_rank(0, FRAMES + lost) + by_rank(1, RAN_OUT),
        RAN_OUT + FRAMES + lost + "\n",
    ):
        assert outcome(log) is Outcome.OUT_OF_MEMORY
    assert outcome(by_rank(0, FRAMES + lost)) is Outcome.CRASHED


def test_the_first_rank_that_fails_decides_and_of_a_chain_the_cause():
    other = FRAMES + "KeyError: 'labels'"
    assert outcome(by_rank(1, RAN_OUT) + by_rank(0, other)) is Outcome.OUT_OF_MEMORY
    assert outcome(by_rank(0, other) + by_rank(1, RAN_OUT)) is Outcome.CRASHED
    # what was caught may have been written by a rank that went on
    caught = "".join(f"[default0]:{line}\n" for line in RAN_OUT.splitlines())
    failed = "".join(f"[default1]:{line}\n" for line in other.splitlines())
    assert outcome(caught + failed) is Outcome.CRASHED
    assert outcome(by_rank(1, RAN_OUT) + caught) is Outcome.OUT_OF_MEMORY
    caused = "\nThe above exception was the direct cause of the following exception:\n\n"
    handled = "\nDuring handling of the above exception, another exception occurred:\n\n"
    own = FRAMES + "trainer.errors.TrainingFailedError: see above\n"
    assert outcome(RAN_OUT + caused + own) is Outcome.OUT_OF_MEMORY
    assert outcome(RAN_OUT + handled + own) is Outcome.CRASHED
    assert outcome(FRAMES + "KeyError: 'x'\n" + handled + RAN_OUT) is Outcome.OUT_OF_MEMORY


def test_a_task_of_rays_has_its_own_error_below_the_drivers():
    driver = (
        'Traceback (most recent call last):\n  File "main.py", line 9, in main\n'
        "    ray.get(task)\nray.exceptions.RayTaskError({0}): \x1b[36mray::fit()\x1b[39m (pid=12)\n"
        '  File "train.py", line 3, in fit\n    x @ y\n{1}\n'
    )
    assert outcome(driver.format("OutOfMemoryError", OOM)) is Outcome.OUT_OF_MEMORY
    assert outcome(driver.format("KeyError", "KeyError: 'x'")) is Outcome.CRASHED
    low = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    assert outcome(FRAMES + low) is Outcome.HOST_OUT_OF_MEMORY


def test_a_pattern_of_the_users_takes_the_place_of_the_usual_signs():
    log = "update 1 ok\nupdate 2 ok\nsaved\n"
    assert outcome(log, 0) is Outcome.CRASHED
    assert outcome(log, 0, pattern="saved") is Outcome.FIT
    assert outcome(log, 0, pattern=r"update (?P<step>\d+) ok") is Outcome.FIT
    assert outcome(log, 0, pattern=r"update (?P<step>1) ok") is Outcome.CRASHED
    assert outcome(log, 0, pattern="finished") is Outcome.CRASHED
    assert outcome(STEPS, 0, pattern="finished") is Outcome.CRASHED
    assert outcome("", 0, pattern="") is Outcome.FIT
    assert outcome("", 1, pattern="") is Outcome.CRASHED
    assert outcome(RAN_OUT, 0, pattern="") is Outcome.CRASHED


def test_steps_may_be_told_by_whoever_prepared_the_trial():
    assert outcome("", 0, steps_done=2) is Outcome.FIT
    assert outcome(STEPS, 0, steps_done=1) is Outcome.CRASHED


def verdict(log: str, exit_code: int | None, **fields: Any):
    ending = ForeignEnding(exit_code=exit_code, timeout_s=60.0, log=log, **fields)
    return classify_foreign(typed_trial(), ending)


def test_a_timeout_says_how_far_it_came_and_words_that_a_trainer_does_not_take_are_said():
    found, reason = verdict(STEP.format(2.5), None, ended_for="timeout")
    assert found is Outcome.TIMEOUT
    assert "1 of 2 steps" in reason
    launcher = "Accelerate launch command: error: unrecognized arguments: --x\n"
    found, reason = verdict(f"usage: train.py [-h] ...\n{launcher}", 2)
    assert found is Outcome.CRASHED
    assert "unrecognized arguments: --x" in reason


@pytest.mark.parametrize(
    ("before", "who"), table("foreign_classify", "a_reason_names_whoever_ran_out_as_the_log_does")
)
def test_a_reason_names_whoever_ran_out_as_the_log_does(before, who):
    log = "".join(f"{before}{line}\n" for line in RAN_OUT.splitlines())
    assert verdict(log, 1) == (Outcome.OUT_OF_MEMORY, f"{who}{OOM}")


CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


FOLDED = "WARNING  batch 3: CUDA out of\n  memory, next"
WHOLE = (
    f"WARNING: skipping batch: RuntimeError: [enforce fail] . {CPU_ALLOCATOR}",
    *(f"WARNING skipping batch, {OOM}", "| WARN | OOM on batch 17, dropped"),
    "MemoryError caught, falling back to 512 tokens",
)
ALLOCATORS_LINES = {
    FOLDED: "WARNING  batch 3: CUDA out of memory, next",
    **{line: line for line in WHOLE},
}


@pytest.mark.parametrize(("line", "said"), ALLOCATORS_LINES.items())
def test_a_reason_names_the_line_of_the_allocator(line, said):
    found, reason = verdict(f"step 1/2 loss 2.5\n{line}\nstep 2/2 loss 2.4\n", 0)
    assert found is Outcome.CRASHED
    assert reason.endswith(f": {said}")


def test_a_hang_after_an_error_is_judged_by_the_error_where_that_is_certain():
    assert outcome(by_rank(1, RAN_OUT), None) is Outcome.OUT_OF_MEMORY
    assert outcome(RAN_OUT, None, ended_for="hang", is_stuck=True) is Outcome.OUT_OF_MEMORY
    assert outcome(RAN_OUT, None) is Outcome.TIMEOUT, "it may have been caught"
    assert outcome(FRAMES + "KeyError: 'x'\n", None, is_stuck=True) is Outcome.TIMEOUT
    assert evidence_of(typed_trial(), by_rank(1, RAN_OUT)).is_certain
    assert not evidence_of(typed_trial(), RAN_OUT).is_certain
    assert evidence_of(typed_trial(), RAN_OUT).has_run_out
    assert not evidence_of(typed_trial(), RAN_OUT + STEPS).has_run_out


WORDS = st.lists(
    st.sampled_from(
        [
            *("out of memory", "CUDA", "OutOfMemoryError", "torch.", ":", "\n", "\r", "ERROR"),
            *("MemoryError", "Killed", "[rank1]:", "(pid=3)", "step 1/2", "loss", "Traceback"),
            *("KeyError: 1", " ", "\x1b[31m", "100%|█| 2/2 [", "0", "RuntimeError"),
        ]
    ),
    max_size=30,
).map(lambda words: "".join(words))


@given(log=WORDS | st.text(), exit_code=st.sampled_from([0, 1, 2, 134, 137, 139, None]))
def test_no_log_is_too_odd_and_who_failed_never_fits(log, exit_code):
    found = outcome(log, exit_code)
    assert not found.is_fit or exit_code == 0
    if "Error" not in log and "Exception" not in log:
        assert not found.is_memory


def test_a_bar_becomes_a_line_for_each_state_and_prefixes_become_streams():
    lines = log_lines("\r 50%|█| 1/2 [\r100%|█| 2/2 [Traceback (most recent call last):\nx")
    assert [line.text for line in lines] == [
        *("", " 50%|█| 1/2 [", "100%|█| 2/2 [", "Traceback (most recent call last):", "x")
    ]
    assert {line.stream for line in log_lines("[default3]: x\n[default3]:y")} == {"default3"}
    assert progress_of(log_lines(STEPS), steps=2).loss == 2.25


def test_a_bound_is_the_allocators_share_and_whoever_is_far_past_it_is_seen():
    budget = memory_budget(msgspec.structs.replace(typed_trial(), memory_budget_bytes=40 * GIB))
    assert budget.allocator_cap_bytes + budget.context_bytes + budget.nccl_bytes == 40 * GIB
    assert bounded_allocator(typed_trial(), None) == {}
    assert bounded_allocator(typed_trial("cpu"), None) == {}

    def past(used_bytes: int | None) -> str | None:
        memory = RankMemory(device_used_bytes=used_bytes)
        return past_the_bound([RankReport(rank=0, memory=memory, budget=budget)])

    assert past(None) is None
    assert past(41 * GIB) is None
    assert "60.00 GiB" in (past(60 * GIB) or "")
    assert past_the_bound([RankReport(rank=0, memory=RankMemory(device_used_bytes=9))]) is None


def test_a_log_of_one_endless_line_is_read_in_no_time():
    more = (
        "1%|]INFO a:",
        "step 1/2 loss 1 INFO a.py ",
        "resumed a a=",
        "{'loss': 1",
        "1.py step 1",
    )
    for text in ("{", "a.", "[rank1]: ", "step 1 ", "ERROR ", "1%|", "\x1b[", *more):
        log = text * (2**21 // len(text))
        began = time.monotonic()
        assert not outcome(log, 1).tells
        assert time.monotonic() - began < 10, text
