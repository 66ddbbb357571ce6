"""The loss stays where the logits are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from traces import traced, trial

from dispatched import Dispatched
from engine_models import tiny_training
from highwater.engine.data.batches import Document, pack
from highwater.engine.training.step import backward_of
from highwater.nouns.events import Allocate, EventLog
from highwater.nouns.layout import CHUNK_BYTES, Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import PROMPT_TOKENS
from tables import deep
from tiny_models import config_of
from torch_server import SERVER

BENCHMARK = Path(__file__).parents[2] / "benchmarks/local_loss.py"
aten: Any = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
"""Operators whose results the host waits for: ``float(tensor)``, a mask's positions, and what
``bool(tensor)`` is made of."""
VOCABULARY = 40_000
LENGTH = 20_000
SHARING = {"by heads": Layout(gpus=2, ulysses_degree=2), "by a ring": Layout(gpus=2, ring_degree=2)}
TRIALS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"objective": "grpo", "entropy": "full", "sequences_per_micro_batch": 2},
    "ppo": {"objective": "ppo", "critic": True},
    "dpo": {"objective": "dpo", "sequences_per_micro_batch": 2},
}
SHARED = [
    *(("sft", "full", "by heads"), ("dpo", "chunked", "by heads"), ("ppo", "full", "by heads")),
    *(("grpo", "full", "by a ring"), ("sft", "chunked", "by a ring")),
    *deep(
        *(
            ("sft", "chunked", "by heads"),
            ("dpo", "full", "by heads"),
            ("ppo", "chunked", "by heads"),
        ),
        *(("grpo", loss, "by heads") for loss in ("full", "chunked")),
        *(("grpo", "chunked", "by a ring"), ("sft", "full", "by a ring")),
    ),
]
TRAINED = {
    ("by heads", 1): LENGTH // 2 - 1,
    ("by heads", 2): LENGTH - PROMPT_TOKENS,
    ("by a ring", 1): LENGTH // 2,
    ("by a ring", 2): LENGTH,
}
"""Tokens that the rank of most trains, by the sequences of a micro-batch. Cut into halves: of one
sequence the second half is all trained, and nothing follows its last token; of two each half is
one sequence, its prompt first. Around a ring: the two middle chunks of each, before which the
prompt is."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EventLog]:
    folder = tmp_path_factory.mktemp("traced")
    config = config_of("tiny")
    return traced(
        {
            f"{name}, {loss}, {shared}": trial(
                folder / f"{name}-{loss}-{shared}",
                config | {"vocab_size": VOCABULARY},
                settings=Settings(loss=loss, **TRIALS[name]),
                layout=SHARING[shared],
                length_tokens=LENGTH,
            )
            for name, loss, shared in SHARED
        },
        folder,
    )


@pytest.mark.parametrize(("name", "loss", "shared"), SHARED)
def test_no_allocation_of_ranks_that_share_a_sequence_holds_gathered_logits(
    name, loss, shared, logs
):
    sequences = TRIALS[name].get("sequences_per_micro_batch", 1)
    own_bytes = 2 * VOCABULARY * TRAINED[shared, sequences]
    gathered_bytes = 2 * VOCABULARY * sequences * (LENGTH - PROMPT_TOKENS)
    log = logs[f"{name}, {loss}, {shared}"]
    largest = max(event.bytes for event in log.events if isinstance(event, Allocate))
    assert CHUNK_BYTES["cuda"] < own_bytes < gathered_bytes
    if loss == "full":
        assert largest == own_bytes
    else:
        assert largest <= CHUNK_BYTES["cuda"]


@pytest.mark.timeout(240)
def test_gathering_logits_takes_more_memory_than_a_loss_that_stays_local():
    sizes = ("--tokens", "1024", "--vocabulary", "2003", "--hidden", "16", "--rounds", "1")
    done = SERVER.run(str(BENCHMARK), "--device", "cpu", *sizes, within_s=200)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    peaks = row["peak_bytes"]
    least = min(peak for name, peak in peaks.items() if name.startswith("gathered"))
    # Of two ranks' logits half, and blocks of a fixed size that PyTorch's path on the CPU has.
    assert peaks["local, full"] < 0.75 * least
    assert row["time_ratio"].keys() == row["peak_ratio"].keys() == peaks.keys()


@pytest.mark.parametrize("objective", ["sft", "grpo", "ppo", "rw", "dpo"])
def test_the_host_waits_for_no_number_of_a_micro_batch(objective, alone, tmp_path):
    training = tiny_training(tmp_path, objective)
    ids = torch.arange(40)
    untrained = torch.full_like(ids, -100)
    micro_batches = [
        pack([Document(ids, ids, reward=1.0), Document(ids[:7], ids[:7])]),
        pack([Document(ids, untrained), Document(ids[:7], untrained[:7])]),
    ]
    called: list[Any] = []
    with Dispatched(lambda func, *_: called.append(func)):
        backward_of(training, micro_batches)
    assert len(called) > 100
    assert [str(func) for func in called if func in READS] == []


def test_a_trace_holds_the_logits_of_every_token_but_those_of_a_prompt(tmp_path):
    config = config_of("tiny")
    prompts = (0, 100, PROMPT_TOKENS)
    trials = {
        str(prompt): trial(
            tmp_path / f"model-{prompt}",
            config | {"vocab_size": VOCABULARY},
            length_tokens=8192,
            prompt_tokens=prompt,
        )
        for prompt in prompts
    }
    logs = traced(trials, tmp_path)
    for prompt in prompts:
        trained = 8192 - max(1, prompt)  # nothing predicts a sequence's first token
        sizes = {event.bytes for event in logs[str(prompt)].events if isinstance(event, Allocate)}
        assert max(sizes) - 2 * VOCABULARY * trained in range(512)
