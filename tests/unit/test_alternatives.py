"""Alternatives: what is named where nothing that was asked about trains the length."""

import re
from typing import Any

import pytest

from highwater.nouns.declaration import MOST_GPUS_OF_A_MACHINE
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.recommendation import Recommendation
from highwater.recommendation.recommend import recommend as asked_of_any


def recommend(model: str, **asked: Any) -> Recommendation:
    """With activations on the GPU: in host memory nearly everything fits."""
    return asked_of_any(model, **{} if "trainer" in asked else {"activations": "gpu"}, **asked)


def test_where_nothing_fits_the_fewest_more_gpus_a_larger_one_and_a_technique_are_named():
    found = recommend("Qwen3-8B", gpus="1xA100-80GB", length="256k")
    assert found.chosen is None
    assert found.earlier == found.candidates
    more, larger, technique = found.alternatives
    assert (more.kind, larger.kind, technique.kind) == ("more GPUs", "a larger GPU", "technique")
    counts = range(2, MOST_GPUS_OF_A_MACHINE + 1)
    fewest = next(
        n for n in counts if recommend("Qwen3-8B", gpus=f"{n}xA100-80GB", length="256k").chosen
    )
    assert more.flags == ("--gpus", f"{fewest}xA100-80GB")
    kinds = [kind for kind in gpu_catalog() if kind.vendor == "NVIDIA" and kind.usable_bytes]
    kinds = [kind for kind in kinds if kind.usable_bytes > found.device_bytes]
    does = [k for k in kinds if recommend("Qwen3-8B", gpus=f"1x{k.name}", length="256k").chosen]
    assert larger.flags == ("--gpus", f"1x{min(does, key=lambda k: k.usable_bytes).name}")
    assert technique.label is None
    assert "one that shrinks `" in technique.what
    for alternative in (more, larger):
        chosen = recommend("Qwen3-8B", gpus=alternative.flags[1], length="256k").chosen
        assert chosen.label == alternative.label
        assert chosen.headroom_bytes == alternative.headroom_bytes


def test_what_stands_in_the_way_is_the_technique():
    asked = {"gpus": "1xA100-80GB", "length": "64k"}
    alone = recommend("Qwen3-4B", allocator="native", loss="full", **asked)
    assert alone.chosen is None
    technique = alone.alternatives[-1]
    assert technique.without in (("--allocator",), ("--loss",))
    kept = {"loss": "full"} if "--allocator" in technique.without else {"allocator": "native"}
    assert recommend("Qwen3-4B", **kept, **asked).chosen
    asked = {"model": "Qwen3-4B", "gpus": "1xA100-80GB", "length": "64k"}
    asked |= {"sequences_per_micro_batch": 1, "host_memory": "32GiB"}
    technique = recommend(**asked).alternatives[-1]
    assert technique.flags == ("--micro-batches", "1")
    assert recommend(**asked, micro_batches=1).chosen.label == technique.label


def test_a_trainer_is_offered_the_other_states_that_it_knows():
    asked = {"model": "Qwen3-4B", "gpus": "1xA100-80GB", "length": "12k", "offload": False}
    found = recommend(**asked, trainer="trinity")
    assert found.chosen is None
    assert found.alternatives[-1].flags == ("--lora", "32"), "it has no moments of 8 bits"
    assert recommend(**asked, trainer="trinity", lora=32).chosen
    assert "--optimizer" in recommend(**{**asked, "length": "128k"}).alternatives[-1].flags


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({"model": "Llama-3.2-3B"}, "--optimizer adamw-8bit --parameters bf16"),
        ({"model": "Qwen3-8B", "host_memory": "256GiB"}, "--optimizer adamw"),
    ],
    ids=["narrow parameters", "states on the host"],
)
def test_moments_of_8_bits_that_do_not_fit_have_an_alternative_on_the_same_gpu(asked, flags):
    asked = {"gpus": "1xRTX-4090", "length": "4k", **asked}
    found = asked_of_any(optimizer="adamw-8bit", **asked)
    assert found.chosen is None
    technique = found.alternatives[-1]
    assert " ".join(technique.flags) == flags
    assert technique.cell is not None


def test_the_fewest_more_gpus_need_not_be_twice_as_many():
    found = recommend("Qwen3-8B", gpus="3xA100-40GB", length="256k")
    assert found.chosen is None
    assert found.alternatives[0].flags == ("--gpus", "4xA100-40GB")


def test_more_gpus_are_multiples_of_those_that_share_vllms_model():
    asked: dict[str, Any] = {"length": "16k", "objective": "grpo", "offload": False}
    asked |= {"rollout": "vllm", "rollout_tensor_parallel": 2}
    more = next(
        each
        for each in recommend("Qwen3-14B", gpus="2xH100-80GB", **asked).alternatives
        if each.kind == "more GPUs"
    )
    assert more.cell.layout.gpus % 2 == 0
    assert recommend("Qwen3-14B", gpus=more.flags[1], **asked).chosen.label == more.label


def test_vllm_is_given_less_of_each_gpu_where_it_was_given_more_than_fits():
    asked: dict[str, Any] = {"gpus": "8xH100-80GB", "length": "17k", "offload": False}
    asked |= {"objective": "grpo", "rollout": "vllm"}
    less, *_ = recommend("Qwen3-8B", gpu_memory_utilization=0.9, **asked).alternatives
    assert less.what == "less of each GPU for vLLM"
    assert less.flags == ("--gpu-memory-utilization", "0.75")
    for share, fits in ((0.75, True), (0.8, False)):
        found = recommend("Qwen3-8B", gpu_memory_utilization=share, **asked)
        assert bool(found.chosen and found.chosen.risk == "safe") == fits


def test_more_gpus_end_at_a_number_of_machines():
    hopeless = recommend("Qwen3-32B", gpus="16xRTX-3090", length="1m", offload=False)
    assert "more GPUs" not in {alternative.kind for alternative in hopeless.alternatives}


@pytest.mark.parametrize(
    ("gpus", "degrees"),
    [(4, {"ulysses": 4}), (4, {"ring": 2}), (4, {"copies": 2}), (3, {"ulysses": 1, "ring": 3})],
)
def test_more_gpus_are_those_that_the_named_degrees_make_a_layout_of(gpus, degrees):
    asked: dict[str, Any] = {"length": "900k", **degrees}
    found = recommend("Qwen3-8B", gpus=f"{gpus}xA100-80GB", **asked)
    assert found.chosen is None
    for alternative in found.alternatives:
        if alternative.kind == "more GPUs" and alternative.flags:
            chosen = recommend("Qwen3-8B", gpus=alternative.flags[1], **asked).chosen
            assert chosen.label == alternative.label


def test_a_ring_is_the_technique_where_heads_do_not_share_a_sequence_among_all_gpus():
    asked = {"gpus": "6xH200-141GB", "length": "900k"}
    found = recommend("Qwen3-8B", **asked)
    assert found.chosen is None
    technique = found.alternatives[-1]
    flags = dict(zip(technique.flags[::2], technique.flags[1::2], strict=True))
    assert set(flags) == {"--ulysses", "--ring"}
    degrees = {flag.removeprefix("--"): int(degree) for flag, degree in flags.items()}
    assert recommend("Qwen3-8B", **asked, **degrees).chosen.label == technique.label


@pytest.mark.parametrize("named", [{"copies": 2}, {"ring": 3, "ulysses": 1}])
def test_a_degree_that_stands_in_the_way_is_the_technique(named):
    asked = {"gpus": "6xH200-141GB", "offload": False}
    lengths = range(40_960, 2_000_000, 40_960)
    tried = (recommend("Qwen3-8B", length=tokens, **asked, **named) for tokens in lengths)
    length = next(found.length_tokens for found in tried if found.chosen is None)
    technique = recommend("Qwen3-8B", length=length, **asked, **named).alternatives[-1]
    assert technique.flags or technique.without
    flags = dict(zip(technique.flags[::2], technique.flags[1::2], strict=True))
    kept = {name: n for name, n in named.items() if f"--{name}" not in technique.without}
    changed = kept | {flag.removeprefix("--"): int(degree) for flag, degree in flags.items()}
    assert recommend("Qwen3-8B", length=length, **asked, **changed).chosen.label == technique.label


def test_a_host_that_is_too_small_is_blamed_and_what_is_asked_for_is_enough():
    found = recommend("Qwen3-8B", gpus="1xA100-80GB", length="8k", offload=True, host_memory="1GiB")
    assert found.chosen is None
    assert "host memory" in found.alternatives[-1].what
    asked = {"gpus": "1xA100-80GB", "length": "32k", "lora": 32, "lora_base": "bf16"}
    what = recommend("Qwen3-32B", **asked, host_memory="20GiB").alternatives[-1].what
    needed = re.search(r"([\d.]+ GiB) at least", what)
    assert needed is not None, what
    size = needed[1].replace(" ", "")
    assert float(size.removesuffix("GiB")) > 60  # the model in bf16, and no states of it
    enough = f"{float(size.removesuffix('GiB')) + 0.01}GiB"
    assert recommend("Qwen3-32B", **asked, host_memory=enough).chosen is not None


def test_other_trainings_are_named_last_the_lossy_ones_before_adapters():
    found = recommend("Qwen3-30B-A3B", gpus="2xH200-141GB", length="128k", host_memory="200GiB")
    assert found.chosen is None
    assert "lossy" in found.alternatives[-1].what
    assert "--optimizer" in found.alternatives[-1].flags
    small = {"gpus": "1xRTX-4090", "length": "32k", "host_memory": "64GiB"}
    adapters = recommend("Llama-3.1-8B", **small).alternatives[-1]
    assert "another training" in adapters.what
    assert adapters.flags == ("--lora", "32")
    assert recommend("Llama-3.1-8B", **small, lora=32).chosen.label == adapters.label


def test_alternatives_leave_the_gpus_for_rollout_alone():
    asked = {"model": "Qwen3-8B", "length": "256k", "rollout_gpus": 1}
    for alternative in recommend(gpus="2xA100-80GB", **asked).alternatives:
        if alternative.flags:
            assert recommend(gpus=alternative.flags[1], **asked).chosen.label == alternative.label


@pytest.mark.parametrize(
    ("gpus", "flag"),
    [("8xH20-96GB", "--rollout-tensor-parallel"), ("1xH20-96GB", "--gpu-memory-utilization")],
)
def test_where_vllm_has_no_room_its_own_settings_are_changed_first(gpus, flag):
    asked: dict[str, Any] = {"gpus": gpus, "length": "4k", "lora": 16, "objective": "grpo"}
    assert recommend("Qwen3-32B", **asked, rollout="vllm").chosen is None
    technique = recommend("Qwen3-32B", **asked, rollout="vllm").alternatives[0]
    assert technique.flags[0] == flag
    name = flag.removeprefix("--").replace("-", "_")
    value = float(technique.flags[1]) if "util" in flag else int(technique.flags[1])
    assert recommend("Qwen3-32B", **asked, rollout="vllm", **{name: value}).chosen
