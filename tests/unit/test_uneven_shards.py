"""Experts that GPUs cannot share evenly: the first GPU has a row more, or a row where others have
none, in what it keeps and in what it gathers.
"""

from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.footprint import device_state_bytes, gradient_bytes
from highwater.model.layer_kind import Matrices
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings

MIXTRAL = load_model("Mixtral-8x7B-v0.1").shape
EXPERTS = 32 * 8 * 3 * 4096 * 14336
ROUTERS = 32 * 8 * 4096


def test_rows_that_divide_are_shared_evenly_and_others_as_the_first_gpu_has_them():
    sixty = Matrices(number=2, rows=60, row_size=10)
    assert [sixty.beyond_even(shards) for shards in (1, 4, 8, 64)] == [0, 0, 80, 80]


def test_sixteen_gpus_of_eight_experts_keep_a_whole_expert_each_or_none():
    settings = Settings()
    on_eight, on_sixteen = (
        device_state_bytes(MIXTRAL, settings, device="cuda", shards=shards) for shards in (8, 16)
    )
    assert on_eight == 16 * MIXTRAL.parameters
    assert on_sixteen == on_eight + 16 * (EXPERTS + ROUTERS)
    assert gradient_bytes(MIXTRAL, settings, shards=16) == on_sixteen // 4


def test_fsdp1_shares_what_it_makes_one_tensor_of():
    settings = Settings(strategy="fsdp")
    states = device_state_bytes(MIXTRAL, settings, device="cuda", shards=16)
    assert states == 16 * MIXTRAL.parameters


def test_a_layer_is_gathered_and_reduced_with_what_fills_it_up():
    def term(name: str, gpus: int) -> int:
        found = footprint(Step(MIXTRAL, Settings(), Layout(gpus=gpus), length_tokens=4096))
        (phase,) = (each for each in found.phases if each.name == "backward of a layer")
        return next(each.bytes for each in phase.terms if each.name == name)

    in_a_layer = (EXPERTS + ROUTERS) // 32
    gathered, reduced = "layers, gathered", "gradient reduction"
    assert term(gathered, 16) - term(gathered, 8) == 2 * 2 * in_a_layer
    assert term(reduced, 16) - term(reduced, 8) == 4 * in_a_layer
