"""Trial seconds: how long a trial is expected to take, before any trial has told.

From the launch of its processes to their end: what starting takes, and the predicted steps. Known
where the rates of the GPU are. It says which trials are worth their time, and nothing of memory.
"""

from highwater.model.footprint import host_state_bytes
from highwater.nouns.study import Question
from highwater.nouns.trial import TrialSpec
from highwater.speed.step_seconds import predicted_step

LAUNCH_S = 20.0
"""From launch to first step: 12 to 25 s in the trials of docs/results/find."""
_HOST_FILLED_BYTES_PER_S = 2e9
"""States that a rank lays into host memory in a second before its first step. Source: the searches
with offload there, which took 28 to 75 s to start."""
_RAN_OUT_STEPS = 0.2
"""Steps that a trial takes before memory runs out: mostly in the first micro-batch."""


def trial_s(question: Question, spec: TrialSpec) -> float | None:
    """Seconds that a trial that fits is predicted to take; None where nobody knows the GPU's rates,
    of data of a user's own, of a foreign trainer, and on the CPU.
    """
    step_s = step_time_s(question, spec)
    return None if step_s is None else _launch_s(question, spec) + spec.steps * step_s


def ran_out_s(question: Question, spec: TrialSpec) -> float | None:
    """Seconds until a trial that does not fit has ended; None where nobody knows."""
    step_s = step_time_s(question, spec)
    return None if step_s is None else _launch_s(question, spec) + _RAN_OUT_STEPS * step_s


def step_time_s(question: Question, spec: TrialSpec) -> float | None:
    """Seconds of one step of a trial; None where nobody knows."""
    if spec.device != "cuda" or spec.data is not None or spec.foreign is not None:
        return None
    predicted = predicted_step(
        question.model.shape,
        spec.settings,
        spec.layout,
        length_tokens=spec.length_tokens,
        device_name=question.device_name,
        micro_batches=spec.micro_batches,
        attention_depth=spec.attention_depth,
    )
    return None if predicted is None else predicted.time_s


def _launch_s(question: Question, spec: TrialSpec) -> float:
    on_host = host_state_bytes(question.model.shape, spec.settings, layout=spec.layout)
    return LAUNCH_S + on_host / spec.layout.gpus / _HOST_FILLED_BYTES_PER_S
