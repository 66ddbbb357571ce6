"""Weights beside a config.json: which files are read, what their headers tell."""

import json
import os
import re
from pathlib import Path

import pytest

from highwater.errors import ModelError
from highwater.model.model import load_model
from highwater.model.weight_files import refuse_quantised, saved_tensors, unties, weight_files
from places import write_safetensors
from tiny_models import TINY, write_model, written_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BOTH = {EMBEDDING: ("BF16", (1000, 64)), HEAD: ("BF16", (1000, 64))}
PROJECTION = "model.layers.0.self_attn.q_proj"


def refused(directory: Path) -> ModelError:
    with pytest.raises(ModelError) as refusal:
        load_model(str(directory))
    assert refusal.value.hint
    return refusal.value


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_algo": "NVFP4"}, "nvfp4"),
        ({"bits": 4}, "quantization_config"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_method_and_usefully(block, method, tmp_path):
    problem = refused(write_model(tmp_path / "m", quantization_config=block))
    assert f"a quantised checkpoint ({method})" in problem.problem
    assert "quantization_config" in problem.hint
    assert written_model(tmp_path / "copy").shape.layers == 2


@pytest.mark.parametrize("block", [None, {}])
def test_a_config_that_says_of_no_quantisation_is_read(block, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "quantization_config": block}))
    assert load_model(str(tmp_path)).shape.layers == 2


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        (f"{PROJECTION}.weight_scale_inv", "F32", "block-wise FP8"),
        (f"{PROJECTION}.weight_scale", "BF16", "FP8 or INT8 with scales"),
        (f"{PROJECTION}.qweight", "I32", "GPTQ or AWQ"),
        (f"{PROJECTION}.weight.absmax", "F32", "bitsandbytes 4-bit"),
        (f"{PROJECTION}.weight", "F8_E4M3", "numbers of dtype F8_E4M3"),
        (f"{PROJECTION}.weight", "U8", "numbers of dtype U8"),
        ("model.layers.0.mlp.experts.down_proj_blocks", "U8", "numbers of dtype U8"),
    ],
)
def test_quantised_tensors_are_refused_whatever_the_config_says(name, dtype, said, tmp_path):
    directory = write_model(tmp_path)
    tensors = {EMBEDDING: ("BF16", (1000, 64)), name: (dtype, (64, 64))}
    write_safetensors(directory / "model.safetensors", tensors)
    problem = refused(directory).problem
    assert said in problem
    assert name in problem


def test_mxfp4_is_read_where_blocks_have_scales_and_refused_where_they_have_not(tmp_path):
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    directory = write_model(tmp_path, **config)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    pair = {f"{experts}_blocks": ("U8", (2, 4, 2, 16)), f"{experts}_scales": ("U8", (2, 4, 2))}
    write_safetensors(directory / "model.safetensors", pair)
    refuse_quantised(directory, config)
    with pytest.raises(ModelError, match=f"{experts}_blocks"):
        refuse_quantised(directory, {**config, "model_type": "mixtral"})
    write_safetensors(directory / "model.safetensors", {f"{experts}_blocks": ("U8", (2, 4, 2, 16))})
    with pytest.raises(ModelError, match=f"{experts}_blocks"):
        refuse_quantised(directory, config)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        *((EMBEDDING, dtype, (8, 64)) for dtype in ("F64", "F32", "F16", "BF16")),
        ("h.0.attn.bias", "U8", (1, 1, 8, 8)),  # an old file's causal mask
    ],
)
def test_wide_numbers_are_not_quantised(name, dtype, shape, tmp_path):
    directory = write_model(tmp_path)
    write_safetensors(directory / "model.safetensors", {name: (dtype, shape)})
    assert load_model(str(directory)).shape.layers == 2


def test_the_single_file_goes_before_the_index_and_both_before_pytorchs_own(tmp_path):
    assert weight_files(tmp_path) == ()
    (tmp_path / "pytorch_model.bin").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["pytorch_model.bin"]
    write_safetensors(tmp_path / "a.safetensors", {EMBEDDING: ("F32", (8, 4))})
    (tmp_path / "model.safetensors.index.json").write_text(index(**{EMBEDDING: "a.safetensors"}))
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors"]
    both = {EMBEDDING: ("F32", (8, 4)), HEAD: ("BF16", (8, 4))}
    write_safetensors(tmp_path / "model.safetensors", both)
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    tensors = saved_tensors(tmp_path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == both
    assert tensors[HEAD].end - tensors[HEAD].begin == 64


def write_numbered(directory: Path, *names: str) -> Path:
    for number, name in enumerate(names, 1):
        file = directory / f"model-0000{number}-of-00002.safetensors"
        write_safetensors(file, {name: ("F32", (4,))})
    return directory


def test_numbered_files_without_an_index_are_read_when_all_are_there(tmp_path):
    """And hold no tensor twice."""
    directory = write_numbered(write_model(tmp_path), "t1", "t2")
    assert set(saved_tensors(directory)) == {"t1", "t2"}
    (directory / "model-00001-of-00002.safetensors").unlink()
    assert re.search(r"\b1 .* of 2\b", refused(directory).problem)
    write_numbered(directory, EMBEDDING, EMBEDDING)
    assert f"both hold {EMBEDDING}" in refused(directory).problem


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_model.safetensors", "holds an adapter"),
        ("adapter_config.json", "holds an adapter"),
        ("consolidated.safetensors", "not in Hugging Face's files: consolidated.safetensors"),
        ("consolidated.00.pth", "not in Hugging Face's files: consolidated.00.pth"),
        ("model.gguf", "not in Hugging Face's files: model.gguf"),
        ("pytorch_model-00001-of-00002.bin", "not in Hugging Face's files"),
        ("other.safetensors", "not in Hugging Face's files"),
    ],
)
def test_weights_that_would_not_be_read_are_refused_and_not_made_random(name, said, tmp_path):
    """An adapter also beside the weights of its model."""
    directory = write_model(tmp_path)
    (directory / name).touch()
    assert said in refused(directory).problem
    if "adapter" in said:
        write_safetensors(directory / "model.safetensors", {EMBEDDING: ("F32", (8, 4))})
        assert said in refused(directory).problem


def index(**files: str) -> str:
    return json.dumps({"weight_map": files})


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (index(a="gone.safetensors", b="model-1.safetensors"), "names 1 of 2 files that are not"),
        (index(a="../elsewhere.safetensors"), "not a file beside it"),
        (index(), "names no file"),
        *((text, "cannot be read") for text in ('{"weight_map": [1]}', "[" * 5000, "{}")),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(index, said, tmp_path):
    directory = write_model(tmp_path)
    write_safetensors(directory / "model-1.safetensors", {"b": ("F32", (4,))})
    (directory / "model.safetensors.index.json").write_text(index)
    assert said in refused(directory).problem


ENDS_LATE = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(60)


def headed(count: int, rest: bytes) -> bytes:
    return count.to_bytes(8, "little") + rest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a header of 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (headed(2**40, b"{}"), "a header of 1099511627776 bytes"),
        (headed(2, b"[]"), "cannot be read as safetensors"),
        (headed(9, b'{"a": {}}'), "cannot be read as safetensors"),
        (headed(60, ENDS_LATE), "a tensor ends at byte 84 of 68"),
    ],
)
def test_a_damaged_file_is_refused(content, said, tmp_path):
    directory = write_model(tmp_path)
    (directory / "model.safetensors").write_bytes(content)
    assert said in refused(directory).problem


def test_a_tied_head_that_differs_from_the_embedding_is_one_of_its_own(tmp_path):
    directory = write_model(tmp_path)
    file = directory / "model.safetensors"
    write_safetensors(file, BOTH)
    assert not unties(directory)
    assert load_model(str(directory)).shape.tied_embeddings
    content = bytearray(file.read_bytes())
    content[-1] = 1
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))  # the same size, within the same tick of some file systems
    shape = load_model(str(directory)).shape
    assert not shape.tied_embeddings
    assert shape.parameters - written_model(tmp_path / "tied").shape.parameters == 1000 * 64


def test_a_tied_head_of_another_dtype_is_refused(tmp_path):
    directory = write_model(tmp_path)
    write_safetensors(directory / "model.safetensors", {**BOTH, HEAD: ("F32", (1000, 64))})
    assert "of dtypes F32 and BF16" in refused(directory).problem
    write_model(directory, tie_word_embeddings=False)
    assert not load_model(str(directory)).shape.tied_embeddings
