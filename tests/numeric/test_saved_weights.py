"""What is read from a directory is what transformers loads from it, or it is refused by name."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine_models import on_meta
from highwater.engine.data.text_tokens import exact_texts
from highwater.engine.models import weights
from highwater.engine.models.build import read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.fill import Fill
from highwater.engine.models.pretrained import config_of, openable_directory, write_tokenizer
from highwater.engine.models.weights import SavedWeights, dequantised
from highwater.errors import ModelError
from highwater.nouns.corpus import MissingFiles, missing_files
from run_folders import Harmful
from tiny_models import SIZES

FILE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def saved(directory: Path, *, tied: bool = False) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    ).save_pretrained(directory)
    return directory


def change(directory: Path, **tensors: "torch.Tensor | None") -> None:
    held = {**load_file(directory / FILE), **tensors}
    save_file(
        {name: tensor for name, tensor in held.items() if tensor is not None},
        directory / FILE,
        metadata={"format": "pt"},
    )


def filled(directory: Path, *, gives_scalars: bool = False) -> Decoder:
    config = read_config(str(directory), length_tokens=64, rope="auto")
    model = on_meta(config, loss=None if gives_scalars else "full")
    with weights.opened(str(directory)) as files:
        fill = Fill(model, files, device=torch.device("cpu"), seed=0)
        fill.one_unit(model)
    fill.finish()
    return model


def assert_as_transformers_loads_it(directory: Path) -> Decoder:
    model = filled(directory)
    ours, theirs = (
        model.causal_lm,
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
    )
    expected = dict(theirs.named_parameters(remove_duplicate=False))
    found = dict(ours.named_parameters(remove_duplicate=False))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    computed = [dict(m.named_buffers()) for m in (ours, theirs)]
    assert computed[0].keys() == computed[1].keys()
    assert all(torch.equal(computed[0][name], computed[1][name]) for name in computed[0])
    tied = [
        m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (ours, theirs)
    ]
    assert tied[0] == tied[1]
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_saved_weights_are_those_that_transformers_loads(tied, tmp_path):
    assert assert_as_transformers_loads_it(saved(tmp_path, tied=tied)).weights == "saved"


def test_a_tied_head_that_differs_in_the_files_is_trained_apart_as_transformers_does(tmp_path):
    saved(tmp_path, tied=True)
    change(tmp_path, **{HEAD: torch.randn(64, 32)})
    model = assert_as_transformers_loads_it(tmp_path)
    assert not torch.equal(model.head.weight, model.causal_lm.get_input_embeddings().weight)
    assert model.parameter_count == sum(p.numel() for p in model.causal_lm.parameters())
    said = config_of(
        model.causal_lm, architecture="LlamaForCausalLM", dtype=torch.float32, source=tmp_path
    )
    assert said["tie_word_embeddings"] is False


def test_a_tied_head_that_the_files_hold_twice_or_under_the_heads_name_alone_stays_tied(tmp_path):
    saved(tmp_path, tied=True)
    change(tmp_path, **{HEAD: load_file(tmp_path / FILE)[EMBEDDING].clone()})
    assert_as_transformers_loads_it(tmp_path)
    change(tmp_path, **{EMBEDDING: None})
    assert_as_transformers_loads_it(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "lm_head.bias", "model.layers.2.mlp.up_proj.weight"],
)
def test_what_the_config_has_no_place_for_is_refused_by_name(name, tmp_path):
    """A tensor that transformers drops with a warning."""
    saved(tmp_path)
    change(tmp_path, **{name: torch.ones(32)})
    with pytest.raises(ModelError, match=f"no place for: {name}"):
        filled(tmp_path)


def test_biases_that_the_config_has_are_read_as_the_hint_says(tmp_path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(ModelError) as refusal:
        filled(tmp_path)
    assert "attention_bias" in refusal.value.hint
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_as_transformers_loads_it(tmp_path)


def test_what_follows_from_the_config_may_be_in_old_files(tmp_path):
    saved(tmp_path)
    change(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_as_transformers_loads_it(tmp_path)
    change(tmp_path, **{"model.rotary_emb.inv_freq": torch.full((4,), 7.0)})
    assert_as_transformers_loads_it(tmp_path)


@pytest.mark.parametrize("rows", [63, 65])
def test_another_vocabulary_is_refused_and_not_cut(rows, tmp_path):
    saved(tmp_path)
    change(tmp_path, **{EMBEDDING: torch.randn(rows, 32)})
    with pytest.raises(ModelError, match=rf"\({rows}, 32\), .* \(64, 32\)"):
        filled(tmp_path)


def test_files_that_hold_nothing_of_the_model_are_refused(tmp_path):
    saved(tmp_path)
    save_file({"other.weight": torch.ones(4)}, tmp_path / FILE)
    with pytest.raises(ModelError, match=r"lack model\.embed_tokens\.weight"):
        filled(tmp_path)


def test_more_experts_than_the_config_has_are_refused(tmp_path):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **moe)).save_pretrained(
        tmp_path
    )
    assert_as_transformers_loads_it(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "num_experts": 3, "num_local_experts": 3})
    )
    with pytest.raises(ModelError, match=r"no place for: .*experts\.3\.|mlp\.gate"):
        filled(tmp_path)


def test_a_models_weights_train_a_reward_model_whose_head_is_random_or_saved(tmp_path):
    saved(tmp_path)
    model = filled(tmp_path, gives_scalars=True)
    assert torch.equal(
        model.causal_lm.get_input_embeddings().weight, load_file(tmp_path / FILE)[EMBEDDING]
    )
    assert 0 < float(model.head.weight.detach().abs().max()) < 0.2
    change(tmp_path, **{"score.weight": torch.ones(1, 32), HEAD: None})
    assert torch.equal(filled(tmp_path, gives_scalars=True).head.weight, torch.ones(1, 32))


def as_pickles(directory: Path, *, parts: int) -> None:
    """The weights in PyTorch's own format, in so many files."""
    held = load_file(directory / FILE)
    (directory / FILE).unlink()
    if parts == 1:
        torch.save(held, directory / "pytorch_model.bin")
        return
    names = [f"pytorch_model-{part + 1:05}-of-{parts:05}.bin" for part in range(parts)]
    where = {name: names[index % parts] for index, name in enumerate(held)}
    for name in names:
        torch.save({key: own for key, own in held.items() if where[key] == name}, directory / name)
    (directory / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_pytorchs_own_files_are_read_as_transformers_reads_them(tied, parts, tmp_path):
    saved(tmp_path, tied=tied)
    as_pickles(tmp_path, parts=parts)
    assert assert_as_transformers_loads_it(tmp_path).weights == "saved"


@pytest.mark.parametrize(
    "write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))]
)
def test_a_file_that_runs_code_is_refused_and_runs_none(write, tmp_path):
    saved(tmp_path)
    (tmp_path / FILE).unlink()
    write({EMBEDDING: Harmful(tmp_path / "harm")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read as tensors alone"):
        filled(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {EMBEDDING: torch.ones(4)}}, "holds more than tensors by name"),
        ({EMBEDDING: torch.ones(64, 32, dtype=torch.int8)}, "numbers of dtype I8"),
    ],
)
def test_a_file_of_something_else_is_refused(content, said, tmp_path):
    saved(tmp_path)
    (tmp_path / FILE).unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=said):
        filled(tmp_path)


EXPERTS, INPUTS, OUTPUTS = 3, 64, 12


def packed() -> tuple["torch.Tensor", "torch.Tensor"]:
    """Blocks with every byte there is."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(
        256, (EXPERTS, OUTPUTS, INPUTS // 32, 16), generator=generator, dtype=torch.uint8
    )
    blocks.view(-1)[:256] = torch.arange(256)
    scales = torch.randint(
        100, 140, (EXPERTS, OUTPUTS, INPUTS // 32), generator=generator, dtype=torch.uint8
    )
    scales.view(-1)[:3] = torch.tensor([0, 3, 250])
    return blocks, scales


def test_mxfp4_is_dequantised_as_transformers_does():
    blocks, scales = packed()
    expected = convert_moe_packed_tensors(blocks, scales)
    found = dequantised(blocks, scales)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert found.shape == (EXPERTS, INPUTS, OUTPUTS)
    assert torch.equal(found, expected)
    assert float(found.float().std()) > 0


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """A rank whose peers are not there: nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("second_of_two")
def test_a_rank_reads_and_dequantises_its_own_experts(tmp_path):
    blocks, scales = packed()
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / FILE)
    own = torch.full((1, INPUTS, OUTPUTS), torch.nan)
    whole = DTensor.from_local(
        own,
        init_device_mesh("cpu", (2,)),
        [Shard(0)],
        shape=torch.Size((EXPERTS, INPUTS, OUTPUTS)),
        stride=(INPUTS * OUTPUTS, OUTPUTS, 1),
    )
    read: list[slice] = []

    class Counted:
        """An open file that tells which experts are read of it."""

        def __init__(self, part: Any) -> None:
            self.part = part

        def get_slice(self, name: str) -> "Counted":
            return Counted(self.part.get_slice(name))

        def __getitem__(self, rows: slice) -> "torch.Tensor":
            read.append(rows)
            return self.part[rows]

        def get_shape(self) -> list[int]:
            return self.part.get_shape()

    with safe_open(tmp_path / FILE, framework="pt") as file:
        files = SavedWeights(str(tmp_path), dict.fromkeys(file.keys(), Counted(file)))
        files.check({name: nn.Parameter(whole)}, {}, others=(), ignored=())
        files.fill({name: nn.Parameter(whole)}, {})
    assert torch.equal(own, convert_moe_packed_tensors(blocks, scales)[2:].float())
    assert read == [slice(2, 3), slice(2, 3)]


def test_what_is_saved_of_a_dequantised_model_is_not_called_quantised(tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    model = filled(tmp_path).causal_lm
    said = config_of(model, architecture="LlamaForCausalLM", dtype=torch.float32, source=tmp_path)
    assert "quantization_config" not in said


VOCABULARY = 200
SMALL: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": 32,
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
    known = transformers.AutoConfig.for_model(family).to_dict()
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
    model, info = transformers.AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(info[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert bool(parameter.isfinite().all()), name
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters() if p.ndim > 1])
    assert float(weights.std()) == pytest.approx(0.02, rel=0.05)


def test_it_is_made_once_for_each_seed_and_what_is_there_is_linked(tmp_path):
    source = directory_of("qwen3", tmp_path / "qwen3")
    first = opened(source, tmp_path)
    weights = first / "model.safetensors"
    made_at = weights.stat().st_mtime_ns
    assert opened(source, tmp_path) == first
    assert weights.stat().st_mtime_ns == made_at
    assert opened(source, tmp_path, seed=1) != first
    assert not list((tmp_path / "scratch").iterdir())
    source = directory_of("qwen3", tmp_path / "with words")
    write_tokenizer(source, vocab_size=50)
    made = opened(source, tmp_path)
    assert missing_files(source) == MissingFiles(weights=True, tokenizer=False)
    assert len(transformers.AutoTokenizer.from_pretrained(made)) == 50
    assert opened(made, tmp_path) == made


@pytest.mark.parametrize("length", [2, 3, 100, 4097])
def test_texts_are_exactly_as_long_with_their_end(length, tmp_path):
    write_tokenizer(tmp_path, vocab_size=VOCABULARY)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
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
