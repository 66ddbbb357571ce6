"""A directory that any trainer opens as a Hugging Face model, where the model's own lacks weights
or a tokenizer: a catalog shape is a ``config.json`` alone.

What is there is linked. Weights that are not are drawn from a seed, in bfloat16, one parameter
after the other; a tokenizer that is not there has one token for each of so many words. Such a
directory is made once and stays in the cache.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from highwater.engine.models.buffers import fill_buffers
from highwater.engine.models.pretrained import PretrainedDirectory, write_beside
from highwater.engine.models.random_weights import fill_random
from highwater.errors import ModelError
from highwater.nouns.preparation import MissingFiles, missing_files, prepared_name

END = "</s>"
_WORDS = 32768
"""Words of a tokenizer that is made: enough that experts get different ones, and a file of less
than a MiB."""


def openable_directory(source: Path, cache: Path, scratch: Path, *, seed: int) -> Path:
    """The model's own directory where it has all, else one below ``cache``, made in ``scratch``
    where it is not there yet.

    Raises ModelError for files that are not a whole model's, and for a model whose buffers nobody
    describes.
    """
    missing = missing_files(source)
    if not any(missing):
        return source
    target = cache / prepared_name(source, seed, missing)
    with (cache / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two trials that begin together one makes it
        if not target.is_dir():
            made = scratch / target.name
            _make(source, made, seed, missing)
            made.rename(target)
    return target


def _make(source: Path, target: Path, seed: int, missing: MissingFiles) -> None:
    """Make the directory: links to what is there, and what is not."""
    target.mkdir(parents=True)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    if missing.weights:
        _write_weights(config, source, target, seed)
    else:
        shutil.copyfile(source / "config.json", target / "config.json")
    for path in sorted(source.iterdir()):
        if path.is_file() and not (target / path.name).exists():
            (target / path.name).symlink_to(path.resolve())
    if missing.tokenizer:
        write_tokenizer(target, vocab_size=config.get_text_config().vocab_size)


def write_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Write a tokenizer of words between spaces, ``w1 w2 ...``, whose first token ends a text.

    Source of the file's form: ``Tokenizer.to_str`` of tokenizers 0.23.3.
    """
    words = [END, *(f"w{number}" for number in range(1, min(vocab_size, _WORDS)))]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": END, "special": True, **plain}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": words[-1],
        },
    }
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (directory / name).write_text(json.dumps(content), encoding="utf-8")


def _write_weights(config: PreTrainedConfig, source: Path, directory: Path, seed: int) -> None:
    """Write random weights and the config that belongs to them."""
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # what is drawn is not quantised
    with torch.device("meta"):
        model = cast(
            PreTrainedModel,
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False),
        )
    buffers = _buffers(model)
    parameters = dict(model.named_parameters())
    shapes: dict[str, Tensor] = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (parameters | buffers).items()
    }
    with PretrainedDirectory(directory, model, shapes) as files:
        std = float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)
        for name, value in _values(parameters, std=std, seed=seed):
            files.write(name, value)
        for name, value in buffers.items():
            files.write(name, value)
    write_beside(
        directory, model, architecture=type(model).__name__, dtype=torch.bfloat16, source=source
    )


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a model's files have, computed as its class does."""
    saved = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    modules = {name.rpartition(".")[0] for name in saved}
    for place in sorted(modules):
        unknown = fill_buffers(model, model.get_submodule(place), device=torch.device("cpu"))
        lacking = [name for name in unknown if f"{place}.{name}" in saved]
        if lacking:
            raise ModelError(
                f"{model.config.model_type} has the buffer {place}.{lacking[0]}, for which nothing "
                "but its own files has a value",
                hint="name a directory that has the model's weights",
            )
    return {name: model.get_buffer(name) for name in sorted(saved)}


def _values(
    parameters: Mapping[str, nn.Parameter], *, std: float, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter with its values, as many at a time as there are cores."""

    def drawn(name: str) -> tuple[str, Tensor]:
        like = parameters[name]
        made = nn.Parameter(torch.empty(like.shape, dtype=like.dtype), requires_grad=False)
        fill_random(name, made, std=std, seed=seed, device=torch.device("cpu"))
        return name, made.detach()

    names, cores = iter(parameters), len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        while together := list(islice(names, cores)):
            yield from pool.map(drawn, together)
