"""Hugging Face's step: the closed form equals traces of the very step."""

import json

import pytest
from traces import trace

import highwater
from highwater.errors import UsageError
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.model.model import load_model
from highwater.nouns.events import TraceOrder
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.trainers.hugging_face import footprint
from places import RESULTS
from tables import deep
from tiny_models import sized, write_model
from trial_specs import trial_of

SIZES = sized(8192, 1024, 6, (8, 2), head_dim=128, intermediate_size=3584)
SIZES |= {"max_position_embeddings": 65_536, "tie_word_embeddings": False}
NARROW_STATES = {"parameters": "bf16", "optimizer": "adamw-bf16"}
NARROW = {**NARROW_STATES, "accumulates": False}
QLORA = {"lora": 16, "lora_base": "nf4"}


@pytest.mark.parametrize(
    ("family", "length", "changes"),
    [
        ("llama", 16_384, {"lora": 16}),
        ("qwen3", 4096, {"accumulates": False}),
        ("qwen3", 4096, QLORA),
        *deep(
            ("llama", 16_384, QLORA),
            ("mistral", 4096, QLORA | {"activations": "host"}),
            ("mistral", 4096, {"lora": 16}),
            ("qwen3", 4096, {"lora": 16}),
            ("qwen2", 16_384, {}),
            ("llama", 4096, {"accumulates": False}),
            ("llama", 16_384, NARROW),
            ("llama", 16_384, {"lora": 16, "activations": "host"}),
        ),
    ],
    ids=str,
)
def test_the_closed_form_is_what_a_trace_of_the_step_takes(tmp_path, family, length, changes):
    settings = Settings(**changes)
    one = {} if settings.accumulates else {"micro_batches": 1}
    model = write_model(tmp_path / "model", {**SIZES, "model_type": family})
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": None}))
    spec = trial_of(model, settings=settings, length_tokens=length, **one)
    log = trace(TraceOrder(spec=spec, trainer="transformers"), tmp_path / "log")
    traced = replay(log, allocator="expandable").peak_allocated_bytes
    step = Step(load_model(str(model)).shape, settings, spec.layout, length, prompt_tokens=0)
    assert footprint(step).allocated_bytes == pytest.approx(traced, rel=0.01)


def recorded(path: str, contender: str) -> tuple[str, int, int]:
    found = json.loads((RESULTS / path).read_text())
    (row,) = found["rows"]
    return found["model"], row["length_tokens"], row["peak_reserved_bytes"][contender]


@pytest.mark.parametrize(
    ("path", "contender", "activations"),
    [
        ("lora/step_32k.json", "liger", "gpu"),
        ("activations/step_131072.json", "liger-offload", "host"),
    ],
)
def test_what_a_gpu_reserved_for_peft_with_liger_is_predicted(path, contender, activations):
    model, length, reserved = recorded(path, contender)
    settings = Settings(
        allocator="expandable", loss="chunked", lora=32, activations=activations, accumulates=False
    )
    step = Step(load_model(model).shape, settings, Layout(gpus=1), length, prompt_tokens=0)
    assert footprint(step).reserved_bytes == pytest.approx(reserved, rel=0.02)


def steps_on_gpus():
    cells = json.loads((RESULTS / "other_trainers" / "step_cells.json").read_text())
    for name, row in cells.items():
        if row.get("measured", {}).get("outcome") == "fit" and not name.startswith("edge"):
            yield pytest.param(row, id=name)


@pytest.mark.parametrize("row", list(steps_on_gpus()))
def test_what_transformers_own_trainer_allocated_on_gpus_is_predicted(row):
    case, found = row["case"], row["measured"]
    settings = Settings(
        allocator="expandable",
        loss="chunked" if case["liger"] else "full",
        activations="host" if case["offload"] else "gpu",
        lora=case["lora"],
        accumulates=case["micro_batches"] > 1,
        deepspeed=case.get("zero") or "none",
        deepspeed_bucket=case.get("bucket") or None,
        **NARROW_STATES if case["narrow"] else {},
    )
    layout = Layout(gpus=case["gpus"], replicate_degree=1 if case["sharded"] else case["gpus"])
    shape = load_model(case["model"]).shape
    said = footprint(Step(shape, settings, layout, case["length_tokens"], prompt_tokens=0))
    assert said.allocated_bytes == pytest.approx(found["allocated_bytes"], rel=0.02)
    if not case.get("zero"):  # whose reserved bytes hang on how far a GPU lags behind its process
        assert said.reserved_bytes == pytest.approx(found["reserved_bytes"], rel=0.11)
    if "trace_allocated_bytes" in row["predicted"]:
        traced = row["predicted"]
        assert traced["trace_allocated_bytes"] == pytest.approx(found["allocated_bytes"], rel=1e-4)
        assert traced["trace_reserved_bytes"] == pytest.approx(found["reserved_bytes"], rel=0.01)


def test_capacities_of_the_trainer_on_gpus_are_within_a_step_and_never_too_long():
    cells = json.loads((RESULTS / "other_trainers" / "step_cells.json").read_text())
    ends = {}
    for name, row in cells.items():
        if name.startswith("edge"):
            case, fits = row["case"], row["measured"]["outcome"] == "fit"
            assert fits or not row["predicted_to_fit"], name
            ends.setdefault((case["model"], case["liger"]), []).append(
                (case["length_tokens"], row["predicted_to_fit"], fits)
            )
    assert len(ends) == 4
    for tried in ends.values():
        predicted = max(length for length, is_predicted, _ in tried if is_predicted)
        assert min(length for length, _, fits in tried if not fits) - predicted <= 4096


def ask(model: str = "Llama-3.1-8B", gpus: str = "1xH100-80GB", **settings):
    return highwater.predict(model, gpus=gpus, trainer="transformers", **settings)


def test_copies_on_every_gpu_are_ddps_with_its_buckets():
    named = {"lora": 16, "length": "16k", "loss": "chunked", "allocator": "expandable"}
    (alone, *_), (copied, *_) = (
        ask(gpus=gpus, activations="gpu", **named, **more).cells
        for gpus, more in (("1xH100-80GB", {}), ("2xH100-80GB", {"copies": [2]}))
    )
    buckets = {term.name: term.bytes for term in copied.footprint.peak.terms}["DDP's buckets"]
    assert 100e6 < buckets < 400e6
    assert copied.footprint.allocated_bytes == alone.footprint.allocated_bytes + buckets


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"model": "gpt-oss-20b"}, "was not traced with layers of gpt_oss"),
        ({"recompute": "none"}, "recompute"),
        ({"gpus": "4xH100-80GB", "ulysses": [4]}, "ulysses"),
    ],
)
def test_what_it_is_not_predicted_with_is_refused_by_name(asked, why):
    with pytest.raises(UsageError, match=why):
        ask(**asked)


def test_layers_that_nobody_traced_are_refused_with_those_that_were(tmp_path):
    model = write_model(tmp_path / "model", {**SIZES, "model_type": "olmo2"})
    with pytest.raises(
        UsageError, match=r"was not traced .* known are llama, mistral, qwen2, qwen3"
    ):
        ask(str(model))


def test_a_report_of_logits_that_ran_out_is_predicted_to():
    """LLaMA-Factory's issue 5545: QLoRA, 51,974 tokens on one H100."""
    assert ask(length=51_974, lora=16, lora_base="nf4", loss="full").answer is None
