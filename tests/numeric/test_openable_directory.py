"""A directory to train from, of a model that is a ``config.json`` alone: transformers opens it, and
nothing is missing or left over. Texts are exactly as long as they were asked for.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from highwater.engine.data.text_tokens import exact_texts
from highwater.engine.models.pretrained import openable_directory, write_tokenizer
from highwater.errors import ModelError
from highwater.nouns.corpus import MissingFiles, missing_files

VOCABULARY = 200
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}


def directory_of(family: str, folder: Path) -> Path:
    """A directory with a small config alone, of as much of ``SMALL`` as the family knows."""
    known = AutoConfig.for_model(family).to_dict()
    config = {name: value for name, value in SMALL.items() if name in known}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    return folder


def opened(source: Path, folder: Path, *, seed: int = 0) -> Path:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return openable_directory(source, folder, scratch, seed=seed)


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "mixtral", "gpt_oss"]
)
def test_transformers_opens_it_whole(family, tmp_path):
    made = opened(directory_of(family, tmp_path / family), tmp_path)
    assert missing_files(made) == MissingFiles(weights=False, tokenizer=False)
    model, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(info[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert bool(parameter.isfinite().all()), name
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters() if p.ndim > 1])
    assert float(weights.std()) == pytest.approx(0.02, rel=0.05)


def test_it_is_made_once_and_another_seed_is_another(tmp_path):
    source = directory_of("qwen3", tmp_path / "qwen3")
    first = opened(source, tmp_path)
    weights = first / "model.safetensors"
    made_at = weights.stat().st_mtime_ns
    assert opened(source, tmp_path) == first
    assert weights.stat().st_mtime_ns == made_at
    assert opened(source, tmp_path, seed=1) != first
    assert not list((tmp_path / "scratch").iterdir())


def test_what_is_there_is_linked(tmp_path):
    source = directory_of("qwen3", tmp_path / "qwen3")
    write_tokenizer(source, vocab_size=50)
    made = opened(source, tmp_path)
    assert missing_files(source) == MissingFiles(weights=True, tokenizer=False)
    assert len(AutoTokenizer.from_pretrained(made)) == 50
    assert opened(made, tmp_path) == made


@pytest.mark.parametrize("length", [2, 3, 100, 4097])
def test_texts_are_exactly_as_long_with_their_end(length, tmp_path):
    write_tokenizer(tmp_path, vocab_size=VOCABULARY)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = exact_texts(tokenizer, length_tokens=length, count=3, seed=0, end=tokenizer.eos_token)
    for text in texts:
        ids = tokenizer(text=text + tokenizer.eos_token)["input_ids"]
        assert len(ids) == length
        assert ids[-1] == tokenizer.eos_token_id
        assert max(ids) < VOCABULARY
    if length >= 100:
        assert len(set(texts)) == 3


def byte_level(folder: Path, *, merges: list[tuple[str, str]], begins: bool) -> Any:
    """A tokenizer as GPT-2's, with few merges, that begins each text with a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *letters, *(one + other for one, other in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("merges", [[], [("Ġ", "a"), ("Ġ", "b"), ("Ġa", "b")]])
def test_texts_are_exactly_as_long_by_any_tokenizer(merges, begins, tmp_path):
    tokenizer = byte_level(tmp_path, merges=merges, begins=begins)
    for length in (64, 65, 1000):
        for end in ("</s>", ""):
            (text,) = exact_texts(tokenizer, length_tokens=length, count=1, seed=0, end=end)
            assert len(tokenizer(text=text + end)["input_ids"]) == length


def test_a_length_that_no_text_has_is_refused(tmp_path):
    tokenizer = byte_level(tmp_path, merges=[], begins=True)
    with pytest.raises(ModelError, match="exactly 2 tokens"):
        exact_texts(tokenizer, length_tokens=2, count=1, seed=0, end="</s>")
