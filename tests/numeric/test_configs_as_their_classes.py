"""Windows and RoPE as every family's config can name them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from combinatorial import in_pairs
from engine_models import built
from family_models import VOCABULARY, save_tiny
from highwater.engine.data.batches import Document, pack
from highwater.engine.training.step import Training, train_step
from highwater.errors import HighwaterError
from highwater.model.families import TRAINED, family_row
from highwater.model.model import load_model
from highwater.trainers.emitted import fused_attention
from tables import deep

FAMILIES = sorted(TRAINED & {*CONFIG_MAPPING})
ROUNDING = 5e-6
"""Of a loss in float32."""
LENGTHS = (13, 7)
WINDOW = 5
"""Shorter than both documents."""
LEFT_OUT = "left out"
CONTRADICTS = "smollm3"
"""A class whose masks have the window that its attention has not: it is refused, though two
implementations agree."""
FREQUENCIES = 8
"""Of the tiny models' heads, half their size."""
LONG = {"short_factor": [1.0] * FREQUENCIES, "long_factor": [2.0] * FREQUENCIES}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 32},
    {"rope_type": "proportional"},
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
)
"""Blocks that transformers knows, by today's key and the older one."""
WRONG_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    {"type": "mrope", "mrope_section": [2, 3, 3]},
    {"rope_type": "yarnn", "factor": 2.0},
    {"rope_type": "axial"},
    {"rope_type": None},
    {"rope_type": 3},
    {"rope_type": "linear"},
    {"rope_type": "dynamic"},
    {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 2.0},
    {"rope_type": "longrope"},
)
AMISS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "gpt_neox"), ("longrope",)),
    "persimmon": ("longrope", "proportional"),
}
"""Types with which transformers fails in families that turn a part of each head, whose lists are
shorter than LONG: what a list has to be long is not looked at before a training."""
OWN_ROPE = ("ministral3", "phi3", "phimoe")
"""Families whose class takes one scaling, by fields of its own."""


def windows(family: str) -> object:
    return family_row(family).window, family == CONTRADICTS


def ropes(family: str) -> object:
    row = family_row(family)
    reads = row.has_rope_by_layer, row.rope_types, row.reads_rope_scaling, row.unscalable
    return str(reads), family in AMISS, family in OWN_ROPE


def of_each(kind: Callable[[str], object], families: list[str]) -> list[str]:
    """A family of each kind; in `make test-all` all of them."""
    return list(deep(*families) or {kind(family): family for family in families}.values())


# of layers with a delta rule others have no weights here
@pytest.mark.parametrize(
    "family", of_each(windows, [each for each in FAMILIES if family_row(each).delta is None])
)
def test_switch_window_and_layer_types_are_as_the_class_has_them(family, mesh, tmp_path):
    """The window that is predicted is one that changes the loss."""
    # other kinds of layers would share keys with none of their kind
    tiny = "gemma4_text_dense" if family == "gemma4_text" else family
    save_tiny(tiny, tmp_path, window=WINDOW)
    model = Tiny(tmp_path / tiny, mesh)
    full = ["full_attention"] * model.config["num_hidden_layers"]
    has_switch = "use_sliding_window" in CONFIG_MAPPING[family]().to_dict()
    trained = 0
    for switch, window, kinds in in_pairs(
        (LEFT_OUT, False, True) if has_switch else (LEFT_OUT,),
        (LEFT_OUT, None, WINDOW),
        (LEFT_OUT, full, ["sliding_attention", *full[1:]], [*full, "full_attention"]),
    ):
        changes = {"use_sliding_window": switch, "sliding_window": window, "layer_types": kinds}
        ours, theirs = model.losses(changes)
        if ours is None:
            contradicts = family == CONTRADICTS and window == WINDOW and switch is not True
            assert theirs == {None} or contradicts, changes
            continue
        trained += 1
        assert {ours} == theirs, changes
        if window == WINDOW:
            predicted = load_model(str(model.directory)).shape.window_tokens
            whole, _ = model.losses({**changes, "sliding_window": sum(LENGTHS)})
            assert (predicted == WINDOW) == (ours != whole), changes
    # without `layer_types` granitemoehybrid is of Mamba-2
    in_all = 3 if family == "granitemoehybrid" else 4
    assert trained >= (in_all if deep(family) else 1)


@pytest.mark.parametrize(
    "family", of_each(ropes, [each for each in FAMILIES if family_row(each).has_rope])
)
def test_a_rope_that_transformers_knows_is_trained_and_any_other_refused(family, mesh, tmp_path):
    save_tiny(family, tmp_path)
    model = Tiny(tmp_path / family, mesh)
    new_fields = family_row(family).has_rope_by_layer or family == "cohere2_moe"
    field = "rope_parameters" if new_fields else "rope_scaling"
    plain = {"rope_theta": 10_000.0, "rope_type": "default"}
    trained = 0
    for block in (*ROPES, *WRONG_ROPES):
        if block.get("rope_type") in AMISS.get(family, ()):
            continue
        rope = {"rope_theta": 10_000.0, **block}
        if family_row(family).has_rope_by_layer:
            rope = {"full_attention": rope, "sliding_attention": plain}
        ours, theirs = model.losses({"rope_parameters": LEFT_OUT, field: rope})
        if ours is not None:
            trained += 1
            assert {ours} == theirs, rope
        elif "rope_type" in block:
            assert theirs == {None}, rope
    assert trained >= 5 or family in OWN_ROPE


class Tiny:
    """A tiny model of a family, whose config says one thing and another."""

    def __init__(self, directory: Path, mesh: dist.DeviceMesh) -> None:
        self.directory, self._mesh = directory, mesh
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())

    def losses(self, changes: Mapping[str, Any]) -> tuple[float | None, set[float | None]]:
        """Ours, None where it is refused, and those of the family's class, None where it fails;
        one that differs from ours by rounding alone is ours.
        """
        changed = {**self.config, **changes}
        changed = {name: value for name, value in changed.items() if value != LEFT_OUT}
        (self.directory / "config.json").write_text(json.dumps(changed))
        theirs = self._theirs()
        try:
            ours = self._ours()
        except HighwaterError:
            return None, theirs
        return ours, {ours if loss and abs(loss / ours - 1) < ROUNDING else loss for loss in theirs}

    def _ours(self) -> float:
        load_model(str(self.directory))
        policy = built(self.directory, self._mesh, torch.float32, recompute="none")
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        training = Training(policy=policy, optimizer=optimizer, mesh=self._mesh)
        loss, _ = train_step(training, [pack([Document(ids, ids) for ids in documents()])])
        return float(loss)

    @torch.no_grad()
    def _theirs(self) -> set[float | None]:
        """With the cache that generation fills, too: a saved model is there to be used."""
        load = AutoModelForCausalLM.from_pretrained
        model, found = None, set[float | None]()
        for attention in ("eager", "sdpa"):
            try:
                model = model or load(self.directory, dtype=torch.float32)
                model.set_attn_implementation(attention)
                assert model.config._attn_implementation == attention
                sums = [
                    torch.nn.functional.cross_entropy(
                        model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum"
                    )
                    for ids in documents()
                ]
                found.add(float(sum(sums)) / sum(length - 1 for length in LENGTHS))
            except Exception as error:  # noqa: BLE001 (whatever it is, a user would meet it)
                if "does not support an attention implementation" not in str(error):
                    found.add(None)
        return found


def documents() -> list["torch.Tensor"]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Qwen3-8B", "Qwen3-30B-A3B", "gemma-2-2b"])
def test_the_attention_that_other_trainers_are_told_of_is_one_that_the_class_takes(name):
    shape = load_model(name).shape
    of_its_class = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[shape.model_type]]
    told, flash = fused_attention(shape), of_its_class._compatible_flash_implementations
    assert (told == "flex_attention") == (name == "gpt-oss-20b")
    if told == "flex_attention":
        assert of_its_class._supports_flex_attn
        assert "flash_attention_2" not in flash
        assert not of_its_class._supports_sdpa
    else:
        assert of_its_class._supports_flash_attn
        assert flash is None
