"""Logs of other trainers, each judged as whoever reads it with care concludes: no length is said to
fit that was not shown to, none not to fit that memory did not end.

60 of them were written by someone who had not read the code that judges them; the others here are
variations of what was found wrong: other hosts, other prefixes, other trainers' words.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.trials.foreign_classify import ForeignEnding, classify_foreign
from places import question_of

FOLDER = Path(__file__).parents[1] / "data" / "foreign_logs"
EXPECTED: list[dict[str, Any]] = json.loads((FOLDER / "expectations.json").read_text("utf-8"))
NAMES = [each["name"] for each in EXPECTED]
QUESTION = question_of(loss="full", allocator="native")


def trial(*, device: str = "cuda", steps: int = 2, pattern: str | None = None) -> TrialSpec:
    foreign = ForeignTrainer(trainer="command", command=("train", "{length}"), done_pattern=pattern)
    spec = QUESTION.trial(QUESTION.cells[0], 4096)
    spec = msgspec.structs.replace(spec, foreign=foreign, steps=steps)
    if device == "cpu":
        spec = msgspec.structs.replace(spec, device="cpu", memory_budget_bytes=2**30)
    return spec


def judged(log: str, exit_code: int | None, *, kernel_kills: int = 0, **named: Any) -> str:
    """The outcome in lower case; ``inconclusive`` where it says nothing about memory."""
    ending = ForeignEnding(
        exit_code=exit_code,
        ended_for=None if exit_code is not None else "timeout",
        timeout_s=60.0,
        log=log,
        kernel_kills=kernel_kills,
    )
    outcome = classify_foreign(trial(**named), ending).outcome
    return outcome.value.lower() if outcome.tells else "inconclusive"


def judged_as(expected: dict[str, Any], log: str) -> str:
    return judged(
        log,
        expected["exit_code"],
        kernel_kills=expected["kernel_kills"],
        device=expected["device"],
        steps=expected["steps"],
        pattern=expected["done_pattern"],
    )


def log_of(expected: dict[str, Any]) -> str:
    return (FOLDER / f"{expected['name']}.log").read_bytes().decode()


@pytest.mark.parametrize("expected", EXPECTED, ids=NAMES)
def test_a_log_is_judged_as_its_reader_concludes(expected):
    assert judged_as(expected, log_of(expected)) == expected["outcome"], expected["why"]


def test_of_the_60_none_fits_that_does_not_and_none_is_said_not_to_that_does():
    found = [(each["outcome"], judged_as(each, log_of(each))) for each in EXPECTED]
    assert len(found) == 60
    assert [pair for pair in found if pair[1] == "fit" and pair[0] != "fit"] == []
    assert [pair for pair in found if "memory" in pair[1] and pair[0] != pair[1]] == []
    assert sum(said == "inconclusive" for said, _ in found) >= 15, "there is something to get wrong"


PREFIXES: dict[str, Callable[[int, str], str]] = {
    "pdsh": lambda _, line: f"worker-1: {line}",
    "an address": lambda _, line: f"10.0.0.7: {line}",
    "srun": lambda _, line: f"3: {line}",
    "a host without a number": lambda _, line: f"alpha: {line}",
    "a whole host's name": lambda _, line: f"gpu-a.cluster.local: {line}",
    "a time in brackets": lambda at, line: f"[2026-11-26 10:00:{at % 60:02d},123] {line}",
    "kubectl's time": lambda at, line: f"2026-11-26T10:00:{at % 60:02d}.123456789Z {line}",
    "Ray": lambda _, line: f"(RayWorker pid=12, ip=10.0.0.7) {line}",
    "torchrun": lambda _, line: f"[default0]:{line}",
    "docker compose": lambda _, line: f"trainer-1  | {line}",
    "a pod": lambda _, line: f"[pod/train-0/main] {line}",
    "a host and a rank": lambda _, line: f"node07: [default1]:{line}",
    "mpirun": lambda _, line: f"[1,3]<stdout>: {line}",
    "a time and a rank": lambda at, line: f"2026-11-26 10:00:{at % 60:02d} [rank: 2] {line}",
    "a script that logs": lambda at, line: f"2026-11-26 10:00:{at % 60:02d},1 - run.sh - {line}",
    "an arrow": lambda _, line: f"gpu1> {line}",
    "line ends of Windows": lambda _, line: f"{line}\r",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_what_stands_before_every_line_changes_no_verdict(
    prefix,
):
    for expected in EXPECTED:
        lines = log_of(expected).split("\n")
        log = "\n".join(prefix(at, line) for at, line in enumerate(lines))
        assert judged_as(expected, log) == expected["outcome"], expected["name"]


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 1.20 GiB is free."
)
FRAMES = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    x @ y\n'
RAN_OUT = f"{FRAMES}{OOM}\n"
DICTIONARIES = "{'loss': 2.5, 'epoch': 0.5}\n{'loss': 2.4, 'epoch': 1.0}\n"
STEPS = "step 1/2 loss 2.5\nstep 2/2 loss 2.4\n"
SUMMARY = "{'train_runtime': 3.1, 'train_loss': 2.4, 'epoch': 1.0}\n"
BAR = "100%|██████████| 2/2 [00:02<00:00,  1.0s/it]\n"

NO_FIT = {
    # an allocation that failed while steps were done
    "a warning beside a step": "step 1/2 loss 2.5\nWARNING: CUDA out of memory, skipping batch\n"
    "step 2/2 loss 2.4\n",
    "the sentence in a warning": f"{DICTIONARIES}WARNING:train:{OOM}; batch left out\n",
    "three letters": "step 1/2 loss 2.5\n| WARN | OOM on batch 17, dropped\nstep 2/2 loss 2.4\n",
    "before the first step": f"{RAN_OUT}{STEPS}",
    "a retry in the first step": f"***** Running training *****\n{RAN_OUT}retrying\n{STEPS}",
    "an attempt before training is said to begin": f"{RAN_OUT}retrying\nStarting training\n{STEPS}",
    "a batch before it": f"OOM with a batch of 8, taking 4\nRunning training\n{STEPS}",
    "a smaller batch": f"Starting training\nDecreasing batch size to: 4.\n{STEPS}",
    "a sentence over two lines": "step 1/2 loss 2.5\n[10:00:01] WARNING  batch 3: CUDA out of\n"
    "                    memory, next\nstep 2/2 loss 2.4\n",
    "a failed allocation by other words": "step 1/2 loss 2.5\nhost allocation of 2 GiB failed\n"
    "step 2/2 loss 2.4\n",
    "a library's code": f"step 1/2 loss 2.5\ncublas: CUBLAS_STATUS_ALLOC_FAILED, again\n{STEPS}",
    "after the steps": f"{STEPS}saving failed: DefaultCPUAllocator: can't allocate memory\n",
    "a warning before the first step": f"ran out of memory, batch skipped\n{STEPS}",
    # what is no step of training
    "preparation": f"Preparation step 1/2\nPreparation step 2/2\nloss: 2.0\n{BAR[:0]}",
    "calibration": "calibration step 1/2, loss 0.5\ncalibration step 2/2, loss 0.4\n",
    "a warm-up": "warmup iteration 1 loss 2.5\nwarmup iteration 2 loss 2.4\n",
    "a checkpoint": "Saved checkpoint at step 2/2\nlast loss: 2.5\n",
    "a checkpoint that was read": "Loaded checkpoint of step 2, loss 2.41\n",
    "resumed from the last": "Resuming training from step 2/2\nloss 2.3\nnothing to do\n",
    "resumed before the last": "Resumed the run at step 1\nstep 2/2 loss 2.4\n",
    "resumed far on": "resuming from checkpoint-1000\nstep 1001 loss 1.2\n",
    "a summary of no steps": "{'train_runtime': 0.01, 'train_loss': 0.0, 'epoch': 1.0}\n",
    "an evaluation": "eval step 1/2 loss 2.5\neval step 2/2 loss 2.4\n",
    "a validation": "Validation: step 1/2, loss: 2.5\nValidation: step 2/2, loss: 2.4\n",
    "an evaluation's dictionaries": "{'eval': {'loss': 2.5}}\n{'eval': {'loss': 2.4}}\n",
    "bars of data": "Map: 100%|███| 2/2 [00:00<00:00]\nGenerating train split: 100%|███| 2/2 [00:00"
    "<00:00]\nTraining data: 100%|███| 2/2 [00:00<00:00]\nloss: 2.4\n",
    "an evaluation's bar after one step": f"{{'loss': 2.5, 'epoch': 0.5}}\n{BAR}",
    "one step by each of two ranks": "[default0]:{'loss': 2.5, 'epoch': 0.5}\n"
    "[default1]:{'loss': 2.7, 'epoch': 0.5}\n",
    "one step, written twice": 2 * "{'loss': 2.5, 'epoch': 0.5}\n",
    # another time's steps, each with a loss
    "a loaded checkpoint's": "Loaded checkpoint: step=2 loss=2.31\ndone\n",
    "a loaded checkpoint's, each": "Loaded: step=1 loss=2.4\nLoaded: step=2 loss=2.31\n",
    "the best model's": "best model so far: step 2 loss 2.1\nskipped training\n",
    "the end of a checkpoint's": "max_steps reached: step 2 of 2, loss 2.2 (loaded from "
    "checkpoint-2)\n",
    "a state's dictionaries": "".join(
        f"trainer_state: {each}\n" for each in DICTIONARIES.splitlines()
    ),
    "a history's dictionaries": "".join(
        f"last run: {each}\n" for each in DICTIONARIES.splitlines()
    ),
    "a state's summary": f"state: {SUMMARY}",
    "a dry run's": "".join(f"{each} (dry run)\n" for each in STEPS.splitlines()),
    "a dry run's, by its head": f"Dry run, nothing is trained:\n{STEPS}",
    "a dry run's, by a mark": "".join(f"[dry-run] {each}\n" for each in STEPS.splitlines()),
    "a setting's": "Config: step=2 loss=0.5 weights\nok\n",
    "settings, each": "Config: step=1 loss=0.4\nConfig: step=2 loss=0.5\n",
    "an estimate's": "Estimated: step: 2  loss: 10.99 at initialisation\n",
    "an estimate's, each": "".join(f"Estimate, {each}\n" for each in STEPS.splitlines()),
    "a replay's": f"Replaying the log of last run:\n{DICTIONARIES}{SUMMARY}",
    "a replay's, then an error": f"old log:\n{DICTIONARIES}{SUMMARY}error: could not start\n",
    "an error after them": f"{STEPS}ERROR: no such device\n",
    "an exception after them": f"{STEPS}RuntimeError: no such device\n",
    "a traceback after them": f"{STEPS}{SUMMARY}{FRAMES}KeyError: 'x'\n",
    "an old log, searched": "".join(f"old.log:{each}\n" for each in STEPS.splitlines()),
    "steps that are skipped": "".join(f"{each}, skipped\n" for each in STEPS.splitlines()),
    "steps that were restored": "".join(f"restored {each}\n" for each in STEPS.splitlines()),
    "steps of the run before": "".join(f"previous run: {each}\n" for each in STEPS.splitlines()),
    "a plan": "".join(f"would do {each}\n" for each in STEPS.splitlines()),
    # not every step, or not each with its loss
    "the last step alone": "step 2/2 loss 2.4\n",
    "the last step alone, often": 3 * "step 2/2 loss 2.4\n",
    "steps backwards": "step 2/2 loss 2.4\nstep 1/2 loss 2.5\n",
    "one loss for both": "step 1/2\nstep 2/2\nloss: 2.4\n",
    "a bar's end": f"train loss 2.5\n{BAR}train loss 2.4\n",
    "an epoch's bar's end": "Epoch 1: 100%|███| 2/2 [00:02<00:00, loss=2.4]\n",
    "one of two ranks each": "[default0]:step 1/2 loss 2.5\n[default1]:step 2/2 loss 2.4\n",
    "steps of two kinds": "iteration 1/2 loss 2.5\nstep 2/2 loss 2.4\n",
    # steps without a proof
    "a bar alone": BAR,
    "a bar of training alone": f"Training: {BAR}",
    "steps alone": "step 1/2\nstep 2/2\n",
    "a loss that is an evaluation's": "step 1/2\nstep 2/2\neval_loss: 2.3\nval loss: 2.2\n",
    "a loss that is none": "step 1/2 loss nan\nstep 2/2 loss nan\n",
}


@pytest.mark.parametrize("log", NO_FIT.values(), ids=NO_FIT)
def test_what_is_not_shown_to_have_trained_is_no_fit(log):
    assert judged(log, 0) == "inconclusive"


FITS = {
    "advice before training": "hint: CUDA out of memory? lower --batch-size\n" + STEPS,
    "a kernel that was tried before training began": f"{RAN_OUT}using another kernel\n"
    f"***** Running training *****\n{STEPS}",
    "a table of no such failures": f"{STEPS}| CUDA OOMs: 0 | cudaMalloc retries: 0 |\n",
    "a good word at the end": f"{STEPS}done without out of memory errors; no OOM\n",
    "a loss on a line of its own": "step 1/2\nloss: 2.5\nstep 2/2\nloss: 2.4\n",
    "a bar and a loss before each": f"train loss 2.5\n 50%|█ | 1/2 [00:01<00:01]\ntrain loss 2.4\n"
    f"{BAR}",
    "an epoch's bar with its loss": "Epoch 1:  50%|██ | 1/2 [00:01<00:01, loss=2.5]\r"
    "Epoch 1: 100%|███| 2/2 [00:02<00:00, loss=2.4]\n",
    "the trainer's own end": f"step 2/2\n{SUMMARY}",
    "the end after a bar": f"{BAR.rstrip()}{SUMMARY}",
    "figures that have such names": "step 1/2 loss 2.5 | skipped iterations: 0 | best loss: 2.5\n"
    "step 2/2 loss 2.4 | skipped iterations: 0 | best loss: 2.4\n",
    "a checkpoint that was loaded first": f"loaded checkpoint shards, resume: False\n{STEPS}",
    "a checkpoint that is saved after them": f"{STEPS}saved checkpoint-2, best loss 2.4\n",
    "glog": "I0101 10:00:01.123456 1234 train.py:88] step: 1, loss: 2.5\n"
    "I0101 10:00:02.123456 1234 train.py:88] step: 2, loss: 2.4\n",
    "seconds and a name": "[  1.2s] trainer: step 1 loss 2.5\n[  2.2s] trainer: step 2 loss 2.4\n",
    "figures before the step": "lr: 1e-5, loss: 2.5, step: 1\nlr: 9e-6, loss: 2.4, step: 2\n",
    "a figure that is an error": f"{STEPS}error: 0.02\nErrors: 0\n",
    "an exception that the interpreter ignored": f"{STEPS}Exception ignored in: <function f>\n"
    f"{FRAMES}ImportError: sys.meta_path is None\n",
    "LitGPT": "Epoch 1 | iter 1 step 1 | loss train: 2.512, val: n/a | iter time: 90.1 ms\n"
    "Epoch 1 | iter 2 step 2 | loss train: 2.401, val: n/a | iter time: 80.3 ms\n",
    "nanoGPT": "step 0: train loss 10.81, val loss 10.82\niter 0: loss 10.80, time 300.1ms\n"
    "iter 1: loss 10.11, time 200.1ms\n",
    "MaxText": "completed step: 0, seconds: 9.1, loss: 10.8\ncompleted step: 1, loss: 10.5\n",
    "JSON": '{"step": 1, "loss": 2.5, "lr": 1e-5}\n{"step": 2, "loss": 2.4, "lr": 1e-5}\n',
    "a logger's names": "INFO:trainer.loop:epoch 1, step 1, loss=2.5\n"
    "INFO:trainer.loop:epoch 1, step 2, loss=2.4\n",
    "columns": "2026-11-26 10:00:01 | INFO | Epoch 1 | Step 1/2 | Loss 2.51\n"
    "2026-11-26 10:00:02 | INFO | Epoch 1 | Step 2/2 | Loss 2.42\n",
}


@pytest.mark.parametrize("log", FITS.values(), ids=FITS)
def test_steps_with_a_proof_beside_them_fit(log):
    assert judged(log, 0) == "fit"
    assert judged(log, 1) == "inconclusive"


def lost_as(text: str, *, before: str = "") -> str:
    return f"step 1/2 loss 2.5\n{before}{FRAMES}{text}\n"


NOT_MEMORYS = {
    "Java's": "java.lang.OutOfMemoryError: Java heap space",
    "Spark's": "pyspark.errors.exceptions.OutOfMemoryError: executor 3 lost",
    "DuckDB's": "duckdb.OutOfMemoryException: Out of Memory Error: could not allocate block",
    "SQLAlchemy's": "sqlalchemy.exc.OperationalError: (psycopg2.errors.OutOfMemory) out of memory",
    "Redis's": "redis.exceptions.OutOfMemoryError: command not allowed when used memory > max",
    "somebody's own": "shop.cache.OutOfMemoryError: the cache's 2 GiB are full",
    "without a module": "OutOfMemoryError: the replay buffer is full",
    "a replay's": "replay.errors.MemoryError: no such episode",
    "a quotation": f"RuntimeError: the last run ended with: {OOM}",
    "a quotation in quotes": f"RuntimeError: cannot resume '{OOM}'",
    "a quotation over two lines": f"ValueError: the last run said\n{OOM}",
    "a check of a log": f"AssertionError: {OOM}",
    "a limit of another kind": "RuntimeError: CUDA error: too many resources requested for launch",
    "a quota": "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: quota of requests",
}


@pytest.mark.parametrize("error", NOT_MEMORYS.values(), ids=NOT_MEMORYS)
def test_an_error_that_is_not_of_the_trainings_memory_is_none(error):
    assert judged(lost_as(error), 1) == "inconclusive"


WENT_ON = {
    "left out a batch": f"{RAN_OUT}batch 3 skipped\n",
    "warned of it": "WARNING trainer: batch 3 left out\n"
    + RAN_OUT.replace("<module>", "step")
    + "loss is stuck, giving up\n",
    "tried again": f"{RAN_OUT}retrying with batch size 4\nstopped by the user's callback\n",
    "took less": f"{RAN_OUT}reducing batch size from 8 to 4\naborted: too few samples\n",
    "did the step after it": f"{RAN_OUT}step 1/2 loss 2.5\nstopped by the user's callback\n",
    "had done all its steps": f"{STEPS}Evaluating\n{RAN_OUT}",
    "did so as a rank": "".join(f"[rank0]: {line}\n" for line in RAN_OUT.splitlines())
    + "[rank0]: skipping this batch\n[rank0]: stopped by the user's callback\n",
}


@pytest.mark.parametrize("log", WENT_ON.values(), ids=WENT_ON)
def test_an_error_after_which_training_went_on_did_not_end_it(log):
    assert judged(log, 1) == "inconclusive"
    assert judged(log, 139) == "inconclusive"


BROKEN = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator:\n"
    "can't allocate memory: you tried to allocate 12884901888 bytes. Error code 12"
)
HIDDEN = {
    "behind a group's bars": "  + Exception Group Traceback (most recent call last):\n"
    '  |   File "t.py", line 1, in <module>\n  | ExceptionGroup: one failed (1 sub-exception)\n'
    "  +-+---------------- 1 ----------------\n"
    + "".join(f"    | {line}\n" for line in RAN_OUT.splitlines())
    + "    +------------------------------------\n",
    "in a replica": f"{FRAMES}torch.OutOfMemoryError: Caught OutOfMemoryError in replica 1 on "
    "device 1.\nOriginal Traceback (most recent call last):\n  File ...\n" + OOM + "\n",
    "logged without its type": f"2026-11-26 10:00:00 | ERROR | main:run:12 - {OOM[24:]}\n",
    "logged by rich": "[10:00:00] ERROR    CUDA out of memory. Tried to allocate 2.00   run.py:12\n"
    "                    GiB. GPU 0 has a total capacity of 79.1 GiB\n",
    "after a warning about something else": f"[WARNING|m.py:3] use_cache is off now\n{RAN_OUT}",
    "of the driver": f"{FRAMES}RuntimeError: CUDA driver error: out of memory\n",
    "of AMD": f"{FRAMES}RuntimeError: HIP error: out of memory\n",
    "of NCCL, in its warning": "gpu3:12:34 [0] include/alloc.h:67 NCCL WARN Cuda failure 2 'out of "
    f"memory'\n{FRAMES}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, "
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n\n",
    "of NCCL, over many lines": f"{FRAMES}torch.distributed.DistBackendError: NCCL error in: "
    "NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:\nFailed to CUDA calloc 8388608 bytes\n",
    "of accelerate": f"{FRAMES}RuntimeError: No executable batch size found, reached zero.\n",
    "a host's lines among another's": "".join(
        f"alpha: {mine}\nbeta: {theirs}\n"
        for mine, theirs in zip(
            RAN_OUT.splitlines(),
            (FRAMES + "ConnectionResetError: [Errno 104] Connection reset by peer").splitlines(),
            strict=True,
        )
    ),
    "launchers' words after it": f"{RAN_OUT}wandb: synced\nsrun: error: n1: task 0: Exited with "
    "exit code 1\nslurmstepd: error: *** STEP 12.0 CANCELLED ***\n",
}


@pytest.mark.parametrize("log", HIDDEN.values(), ids=HIDDEN)
def test_memory_that_ran_out_is_found_where_it_is_hidden(log):
    assert judged(log, 1) == "out_of_memory"


@pytest.mark.parametrize(
    "prefix", ["", "worker-1: ", "10.0.0.7: ", "[2026-11-26 10:00:00] ", "3: "]
)
def test_a_hosts_sentence_is_found_over_two_lines(prefix):
    log = "".join(f"{prefix}{line}\n" for line in f"{FRAMES}{BROKEN}".splitlines())
    assert judged(log, 1, device="cpu") == "out_of_memory"
    assert judged(log, 1) == "host_out_of_memory"


def test_a_pattern_of_the_users_is_a_proof_and_no_excuse_for_a_failed_allocation():
    log = "update 1\nupdate 2\nsaved\n"
    assert judged(log, 0, pattern="saved") == "fit"
    for said in ("OOM, batch skipped", OOM, "ran out of memory; next", "MemoryError: caught"):
        warned = f"update 1\n{said}\nupdate 2\nsaved\n"
        assert judged(warned, 0, pattern=r"update (?P<step>\d+)") == "inconclusive"
        assert judged(f"{said}\n{log}", 0, pattern="") == "inconclusive"
    assert Outcome.FIT.tells
