"""What a training exports loads in transformers or peft, and computes what the engine does."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from closeness import deviation
from engine_models import assembled
from family_models import WRAPPED, save_tiny
from highwater.engine.data.batches import Document, pack
from highwater.engine.training.export import export
from highwater.engine.training.step import Training, train_step
from highwater.errors import UsageError
from highwater.nouns.hyperparameters import Hyperparameters
from tiny_models import SIZES
from trial_specs import trial_in

FILE = "model.safetensors"
FLOAT32 = 5e-6
"""Norm-relative: attention and norms of the engine in another order."""
OF_THEIRS = 3
"""Times transformers' own deviation in float32 from float64, which a float32 state makes large."""
BFLOAT16 = 0.02
"""Norm-relative: weights are rounded to 8 bits."""
BESIDE = {
    "generation_config.json": '{"temperature": 0.5, "do_sample": true}',
    "tokenizer_config.json": '{"model_max_length": 64}',
    "chat_template.jinja": "{{ messages }}",
    "vocab.json": '{"a": 0}',
}
IDS = [(7 * index) % 64 for index in range(40)]


@pytest.fixture
def source(alone: None, tmp_path: Path) -> Path:
    """A model's directory, with a tokenizer's files and some that are nobody's."""
    directory = tmp_path / "source"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=True, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(directory)
    for name, text in BESIDE.items():
        (directory / name).write_text(text)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (directory / "notes.txt").write_text("mine")
    return directory


def trained(source: Path, **settings: Any) -> Training:
    numbers = Hyperparameters(learning_rate=0.05)
    own = assembled(trial_in(source, loss="chunked", hyperparameters=numbers, **settings))
    ids = torch.tensor(IDS)
    for _ in range(2):
        train_step(own, [pack([Document(ids, ids, reward=1.0), Document(ids[:9], ids[:9])])] * 2)
    return own


def told(own: Training) -> "torch.Tensor":
    ids, positions = torch.tensor(IDS), torch.arange(len(IDS))
    with torch.no_grad():
        if own.policy.gives_scalars:
            return own.policy(ids, positions, positions[-1:], (len(IDS),))
        return own.policy(ids, positions, positions[:-1], ids[1:], (len(IDS),)).logprobs_N


def read(model: Any) -> "torch.Tensor":
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS])).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.ndim == 1:
        return logits
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def test_an_exported_model_loads_in_transformers_with_the_same_logits(source, tmp_path):
    own, out = trained(source), tmp_path / "runs" / "model"
    before = told(own)
    written = export(own, out, source=source)
    assert written == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    assert deviation(read(AutoModelForCausalLM.from_pretrained(out)), before) < FLOAT32
    assert deviation(read(AutoModelForCausalLM.from_pretrained(source)), before) > 0.01
    assert {name: (out / name).read_text() for name in BESIDE} == BESIDE
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert not (out / "notes.txt").exists()


def test_weights_are_in_the_dtype_that_the_models_config_names(source, tmp_path):
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    own = trained(source)
    export(own, tmp_path / "model", source=source)
    held = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert deviation(read(model), told(own)) < BFLOAT16


def test_a_reward_model_loads_as_a_sequence_classifier(source, tmp_path):
    own = trained(source, objective="rw", sequences_per_micro_batch=2)
    export(own, tmp_path / "model", source=source)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert deviation(read(model), told(own)) < FLOAT32


def test_adapters_load_in_peft_and_merged_ones_elsewhere_with_the_same_logits(source, tmp_path):
    peft = pytest.importorskip("peft", reason="adapters need the lora extra")
    own = trained(source, lora=4)
    export(own, tmp_path / "adapter", source=source)
    base = AutoModelForCausalLM.from_pretrained(source)
    assert deviation(read(base), told(own)) > 0.01
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert deviation(read(model), told(own)) < FLOAT32
    assert (tmp_path / "adapter" / "tokenizer_config.json").is_file()
    export(own, tmp_path / "merged", source=source, merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert deviation(read(model), told(own)) < FLOAT32


@pytest.mark.parametrize("family", list(WRAPPED))
def test_a_text_model_is_saved_in_the_whole_whose_other_weights_stay(family, alone, tmp_path):
    save_tiny(family, tmp_path)
    source, out = tmp_path / family, tmp_path / "model"
    own = trained(source)
    export(own, out, source=source)
    before, after = load_file(source / FILE), load_file(out / FILE)
    assert before.keys() == after.keys()
    # a layer's scale is no parameter of Gemma 4, but is saved
    still = ("vis", "projector", "layer_scalar")
    tower = [name for name in before if any(part in name for part in still)]
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - {*tower})
    model, loading = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert type(model).__name__ == json.loads((out / "config.json").read_text())["architectures"][0]
    theirs = read(model)
    model.set_experts_implementation("eager")  # the grouped product has no float64
    exact = read(model.double())
    assert deviation(exact, told(own)) < OF_THEIRS * deviation(exact, theirs)
    assert trained(out).policy.weights == "saved"


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl"])
def test_adapters_of_a_text_model_load_in_peft_beside_the_whole(family, alone, tmp_path):
    peft = pytest.importorskip("peft", reason="adapters need the lora extra")
    save_tiny(family, tmp_path)
    source = tmp_path / family
    own = trained(source, lora=4)
    export(own, tmp_path / "adapter", source=source)
    base = AutoModelForImageTextToText.from_pretrained(source)
    assert deviation(read(base), told(own)) > 0.01
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert deviation(read(model), told(own)) < FLOAT32
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert all("language_model" in name for name in adapted)


def test_nothing_is_written_over_and_each_hint_works(source, tmp_path):
    own, out = trained(source), tmp_path / "model"
    out.mkdir()
    export(own, out, source=source)  # over an empty one
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    partial = tmp_path / "model.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half, of one that was killed")
    (partial / "notes.txt").write_text("mine")
    for said in ("is there already", r"model\.partial is in the way"):
        with pytest.raises(UsageError, match=said) as refused:
            export(own, out, source=source)
        _, here, there = shlex.split(re.search(r"`(mv .*)`", refused.value.hint)[1])
        Path(here).rename(there)
    export(own, out, source=source)
    assert {
        path.name: (tmp_path / "model.before" / path.name).read_bytes()
        for path in out.iterdir()
        if path.is_file()
    } == before
    assert (tmp_path / "model.partial.mine" / "notes.txt").read_text() == "mine"


def test_the_directory_that_the_model_came_from_is_never_written(source):
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is there already"):
        export(trained(source), source, source=source)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
