"""Predicted time of a step: as recorded, of what it computes, and of which GPUs."""

import json
import runpy
from itertools import pairwise
from statistics import median, quantiles

import pytest
from msgspec import convert

import highwater
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.pages.prediction_tables import prediction_table
from highwater.speed import predicted_step, rates_of
from places import RESULTS

SCRIPTS = RESULTS / "speed"
SHAPE = load_model("Qwen3-4B").shape
CHUNKED = Settings(loss="chunked", allocator="expandable")


def test_times_that_are_held_out_are_predicted(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = runpy.run_path(str(SCRIPTS / "predicted.py"))
    steps = [step for step in found["steps"]() if step.split == "held out"]
    off = [abs(found["error"](step)) for step in steps]
    assert len(off) == 44
    assert median(off) <= 0.05
    assert quantiles(off, n=20, method="inclusive")[-1] <= 0.16


def seconds(settings: Settings = CHUNKED, layout: Layout | None = None, **asked) -> float:
    usual = {"length_tokens": 65_536, "device_name": "H200-141GB"}
    step = predicted_step(SHAPE, settings, layout or Layout(), **usual | asked)
    assert step.time_s == pytest.approx(sum(part.seconds for part in step.parts))
    assert step.tokens_per_s == pytest.approx(step.step_tokens / step.time_s)
    return step.time_s


def test_longer_takes_longer_more_gpus_less_and_settings_as_they_compute():
    lengths = [seconds(length_tokens=length) for length in (8192, 16384, 65_536, 262_144)]
    assert all(a < b for a, b in pairwise(lengths))
    shared = [seconds(layout=Layout(gpus=n, ulysses_degree=n)) for n in (1, 2, 4, 8)]
    assert all(a > b for a, b in pairwise(shared))
    assert seconds(micro_batches=4) > 1.9 * seconds(micro_batches=2)
    kept = ("layer", "all-but-attention", "none")
    taken = [seconds(Settings(loss="chunked", recompute=each)) for each in kept]
    assert all(more > less for more, less in pairwise(taken))
    assert seconds(Settings(loss="chunked", lora=32)) < seconds()
    assert seconds(Settings(loss="chunked", offload=True)) > seconds()
    assert seconds(Settings(loss="chunked", attention="block_sparse")) < seconds()


def test_other_gpus_are_scaled_and_unknown_ones_have_no_times():
    slow, fast = rates_of("NVIDIA A100-SXM4-80GB"), rates_of("H200-141GB")
    assert (slow.basis, fast.basis) == ("scaled", "measured")
    assert slow.matmul_flops == pytest.approx(fast.matmul_flops * 312 / 989)
    assert rates_of("a GPU of 24.00 GiB") is None
    assert rates_of("V100") is None
    usual = {"length_tokens": 4096, "device_name": "a GPU of 24.00 GiB"}
    assert predicted_step(SHAPE, CHUNKED, Layout(), **usual) is None


def test_a_prediction_says_how_long_a_step_takes_and_how_good_that_is():
    found = highwater.predict("Qwen3-4B", gpus="1xH200-141GB")
    (best,) = (cell for cell in found.cells if cell.cell.settings.label == "Env + chunked")
    assert best.step is not None
    asked = {"length_tokens": best.capacity_tokens, "device_name": "H200-141GB"}
    assert best.step == predicted_step(SHAPE, best.cell.settings, Layout(), **asked)
    text = "\n".join(prediction_table(found, is_explained=True).footnotes)
    assert "half were within 3 %" in text
    nameless = highwater.predict("Qwen3-4B", gpu_memory="24GiB")
    assert all(cell.step is None for cell in nameless.cells)
    assert "a step" not in prediction_table(nameless).columns
    other = highwater.predict("Qwen3-4B", gpus="1xA100-80GB", trainer="trinity")
    assert all(cell.step is None for cell in other.cells)


def test_linear_attention_takes_what_its_operator_took_once_for_each_layer_and_token():
    shape = load_model("Qwen3.5-9B").shape

    def step(recompute="layer", gpus=1, length=262_144, device="H200-141GB", ring=1):
        layout = Layout(gpus=gpus * ring, ulysses_degree=gpus, ring_degree=ring)
        found = predicted_step(
            *(shape, Settings(loss="chunked", recompute=recompute), layout),
            length_tokens=length,
            device_name=device,
            micro_batches=1,
        )
        assert found.basis == "of_an_operator"
        return {part.name: part.seconds for part in found.parts}["linear attention"]

    assert step() == pytest.approx(24 * (2 * 0.39 + 1.05))
    assert step("all-but-attention") == pytest.approx(24 * (0.39 + 1.05))
    assert step(length=131_072) == pytest.approx(step() / 2)
    assert step(gpus=4) == pytest.approx(0.65 * step()), "as many launches for a share of the heads"
    assert step(device="H100-80GB") > 1.2 * step(), "it moves memory"
    assert step(ring=4) == pytest.approx(24 * (2 * 0.39 + 1.05 + 3 * 0.39) / 4), "crossed, too"


def test_a_ring_sends_what_goes_into_linear_attention_and_comes_out_of_it():
    """And nothing around it: a quarter of Qwen3.5-9B's layers passes keys and values on."""
    shape, settings = load_model("Qwen3.5-9B").shape, Settings(loss="chunked")

    def exchanged_s(**degrees):
        found = predicted_step(
            *(shape, settings, Layout(gpus=4, **degrees)),
            length_tokens=262_144,
            device_name="H200-141GB",
            micro_batches=1,
        )
        return {part.name: part.seconds for part in found.parts}["exchanges between GPUs"]

    of_states = exchanged_s()
    own, passes, keys = 2 * 262_144 / 4, 3, 4 * 256
    of_softmax = 8 * own * (passes + 2) * 2 * keys * 3
    of_delta = 24 * own * passes * 2 * 4096 * 3 / 4
    found = exchanged_s(ring_degree=4) - of_states
    assert found == pytest.approx((of_softmax + of_delta) / 250e9)


UNALIGNED = "gemma-4-E4B --length 65536"
"""Its time was that of wide heads in rows of an odd length, which took twice as long."""


def hybrids():
    recorded = json.loads((RESULTS / "families" / "hybrids.json").read_text())
    for asked, row in recorded.items():
        if "measured" in row and not asked.startswith(UNALIGNED):
            spec = row["measured"]["document"]["spec"]
            (first, *_) = row["measured"]["document"]["result"]["ranks"]
            if first["step_times_s"]:  # of a memory-only trial there is none
                named = asked.partition(" --loss")[0]
                yield pytest.param(spec, first["step_times_s"][-1], id=named)


@pytest.mark.parametrize(("spec", "measured_s"), list(hybrids()))
def test_steps_of_whole_hybrids_take_as_long_as_notes_say(spec, measured_s):
    found = predicted_step(
        load_model(spec["model_name"]).shape,
        *(convert(spec["settings"], Settings), convert(spec["layout"], Layout)),
        length_tokens=spec["length_tokens"],
        device_name="H200-141GB",
        micro_batches=1,
    )
    assert 0.8 < measured_s / found.time_s < 1.35


def gemma_steps():
    lines = (RESULTS / "families" / "gemma_times.ndjson").read_text().splitlines()
    for line in map(json.loads, lines):
        if line["what"] == "step" and line.get("run") != 1:  # rows were aligned
            named = line["trial"].partition(" --loss")[0]
            yield pytest.param(line["trial"].split(), line["step_times_s"][-1], id=named)


@pytest.mark.parametrize(("words", "measured_s"), list(gemma_steps()))
def test_steps_of_gemma_4_take_as_long_as_notes_say(words, measured_s):
    name, *flags = words
    asked = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    found = highwater.predict(name, gpus="1xH200-141GB", ulysses=1, **asked)
    (step,) = (c.step for c in found.cells if not c.cell.settings.offload)
    assert step is not None
    assert 0.90 < measured_s / step.time_s < 1.15


def test_a_step_has_the_micro_batches_that_were_asked_for():
    usual = {"gpus": "4xH100-80GB", "length": "32k"}
    found = [highwater.predict("Qwen3-8B", micro_batches=count, **usual) for count in (2, 8)]
    two, eight = (each.answer.step for each in found)
    assert eight.step_tokens == 4 * two.step_tokens
    assert 3.5 * two.time_s < eight.time_s < 4 * two.time_s
