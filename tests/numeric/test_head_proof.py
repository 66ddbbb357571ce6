"""The engine applies the head itself: proven of each family that trains, and a family whose logits are more is refused by name."""

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from highwater.engine.head_proof import prove_head  # noqa: E402
from highwater.errors import ModelError  # noqa: E402

PLAIN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3_text", "glm4_moe", "gpt_neox", "granite"),
    *("granitemoe", "minimax_m2", "olmo2", "olmoe", "opt", "persimmon", "phi3", "phimoe", "smollm3", "starcoder2"),
)


def on_meta(family: str, **fields: object) -> PreTrainedModel:
    """The family's class at its default sizes, which take no memory there."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields), trust_remote_code=False)


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_whose_head_alone_makes_the_logits_is_proven(family: str) -> None:
    model = on_meta(family)
    prove_head(model)
    assert all(parameter.is_meta for parameter in model.parameters()), "nothing of the model itself was touched"


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("modernbert-decoder", {}, "beside its backbone: lm_head, decoder"),
        ("gemma2", {}, "final_logit_softcapping = 30.0"),
        ("cohere", {}, "logit_scale = 0.0625"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("bert", {"is_decoder": True}, "beside its backbone: cls"),
        ("nanochat", {}, "final_logit_softcapping = 15.0"),
    ],
)
def test_a_family_that_does_more_to_its_logits_is_refused_by_name(family: str, fields: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError) as refusal:
        prove_head(on_meta(family, **fields))
    assert refusal.value.problem.startswith(f"{family} cannot be trained: its logits are not its head's product")
    assert said in refusal.value.problem
