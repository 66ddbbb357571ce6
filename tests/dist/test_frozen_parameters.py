"""What a family does not train stays as the files have it."""

from pathlib import Path

import pytest
import torch
from frozen_cases import CASES
from transformers import AfmoeConfig, AfmoeForCausalLM

from tiny_models import SIZES

FROZEN = {f"model.layers.{layer}.mlp.expert_bias" for layer in (0, 1)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_frozen_parameter_has_no_gradient_no_state_and_no_decay(processes, ranks, tmp_path):
    every = save_model(tmp_path / "weights")
    found = ranks.results("frozen_cases", processes, tmp_path / "weights")
    assert set(found) == set(CASES)
    for case, what in found.items():
        for kind, names in what.items():
            assert set(names) == every - FROZEN, (case, kind)


def save_model(folder: Path) -> set[str]:
    """A mixture of experts whose routers have a bias that is not trained, here not 0."""
    config = AfmoeConfig(
        **SIZES | {"vocab_size": 97},
        moe_intermediate_size=24,
        num_dense_layers=0,
        num_experts=4,
        num_experts_per_tok=2,
        global_attn_every_n_layers=1,
    )
    torch.manual_seed(0)
    model = AfmoeForCausalLM(config)
    parameters = dict(model.named_parameters())
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    assert frozen == FROZEN
    with torch.no_grad():
        for name in frozen:
            parameters[name].uniform_(0.01, 0.1)
    model.save_pretrained(folder)
    return set(parameters)
