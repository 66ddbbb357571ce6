"""torchtitan: a recommendation as its configuration, a Python file.

Some models of the catalog are torchtitan's own; any other uses its experiment with transformers'
models, which reads the model's ``config.json``. Its context parallelism gathers keys and values
instead of sharing heads or passing them round a ring.

LoRA is a converter in the configuration of torchtitan's own models. Their queries, keys and values
come from one layer, ``wqkv``, which has one adapter.

Source of the names: ``torchtitan/trainer.py``, ``config``, ``components/lora.py`` and
``models/common`` of torchtitan 0.3.0.
"""

from collections.abc import Mapping
from pathlib import Path

from highwater.errors import UsageError
from highwater.model.held_bytes import policy_parameters
from highwater.model.model import load_model
from highwater.model.model_place import is_hub_id
from highwater.nouns.objective import ATTENTION, MLP, Lora
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.trainers.emitted import (
    Dialect,
    Emitted,
    Value,
    environment,
    exports,
    listed,
    lora_words,
    model_lies,
    refuse_obstacle,
    shape_here,
    unfused,
    whole_logits_bytes,
)
from highwater.trainers.targets import OF_LORA, OF_THE_ENGINE, EmitTarget
from highwater.units import GIB, format_bytes

VERSION = "0.3.0"
_WORDS = Dialect("torchtitan", "torchtitan", VERSION)
_QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")
FLAVORS: Mapping[str, tuple[str, str]] = {
    **{f"Qwen3-{size}": ("qwen3", size) for size in _QWEN3_SIZES},
    "Llama-3.1-8B": ("llama3", "8B"),
}
"""Module and flavor of torchtitan's own models, by their catalog names."""
_LAYERS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "wqkv"),
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""Names of linear layers in torchtitan's own models, by their names in transformers."""
_FUSED = ATTENTION[:3]
_MODULE = "torchtitan_settings"
_BY_ENVIRONMENT = 'os.environ["MODEL_PATH"]'
_WRITTEN = {
    name: Path(__file__).with_name(f"torchtitan_{name}.txt").read_text(encoding="utf-8")
    for name in ("own", "transformers")
}
"""Templates of the module, for torchtitan's own models and for transformers' models."""
_ROPE = """\
    for layer in model.model.layers:
        layer.attention.rope = replace(
            layer.attention.rope,
{rope}        )
"""
_LORA = """\
    lora = LoRAConverter.Config(
{lora}    )
"""


def torchtitan(
    found: Recommendation, chosen: Candidate, *, model_path: str | None = None
) -> Emitted:
    """Make a module with the configuration. Raises UsageError for settings torchtitan lacks."""
    cell, settings = chosen.cell, chosen.cell.settings
    refuse_obstacle(
        cell,
        lambda objective, layout: (
            _WORDS.other_objective(objective, is_written=False) or _WORDS.shared_copies(layout)
        ),
    )
    is_directory = model_path is not None and not is_hub_id(model_path)
    own = None if is_directory else FLAVORS.get(found.model_name)
    variables, values = environment(settings), _values(found, chosen)
    values |= _rope(found) if own else {}
    if settings.adapters is not None:
        _refuse_adapters(found, chosen, settings.adapters, is_own=own is not None)
        values |= _lora_values(settings.adapters)
    start = f"torchrun --nproc_per_node={cell.layout.gpus} -m torchtitan.train"
    chunks = _chunks(chosen) if own else None
    shape = shape_here(found, model_path if is_directory else None)
    said = [
        *exports(variables),
        *model_lies(model_path if is_directory else None),
        "the learning rate is to be replaced by yours; add a dataloader=, a checkpoint= that "
        "loads the weights, ...",
    ]
    return _WORDS.emitted(
        found,
        chosen,
        said,
        values,
        command=f"{start} --module {_MODULE} --config train",
        start=f"start, where {_MODULE}.py lies",
        environment=variables,
        cannot=_cannot(found, chosen, is_own=own is not None),
        yarn=None if own else "the model is read from there",
        logits_bytes=None if chunks else whole_logits_bytes(chosen, shape),
        text=lambda comments: comments + _program(chosen, values, own, model_path),
    )


_CHUNK_TOKENS = 256, 2048
"""Fewest and most tokens of a sequence in a chunk of the loss; chunks are equal. The largest holds
3 GiB of logits at a vocabulary of 150,000."""


def _chunks(chosen: Candidate) -> int | None:
    """Fewest equal chunks of a GPU's part of a sequence; None for full logits, or if none fits."""
    sequences = chosen.cell.settings.sequences_per_micro_batch
    fewest_tokens, most_tokens = _CHUNK_TOKENS
    share_tokens = chosen.token_budget_tokens // sequences
    if chosen.cell.settings.holds_logits:
        return None
    numbers = range(-(-share_tokens // most_tokens), share_tokens // fewest_tokens + 1)
    return next((number for number in numbers if share_tokens % number == 0), None)


def _cannot(found: Recommendation, chosen: Candidate, *, is_own: bool) -> tuple[str, ...]:
    settings, layout = chosen.cell.settings, chosen.cell.layout
    said: list[str] = []
    if layout.context_degree > 1:
        how = "Ulysses" if layout.ring_degree == 1 else "a ring"
        said.append(
            f"{how}: {layout.context_degree} GPUs share each sequence by context parallelism, "
            "which gathers keys and values of all heads"
        )
    if settings.strategy == "fsdp":
        said.append("FSDP1: it shards with FSDP2")
    if not is_own:
        said += unfused(chosen.cell, "for transformers' models")
    elif _chunks(chosen) is None:
        said += unfused(chosen.cell, f"at {found.length_tokens} tokens, which no chunks divide")
    if found.yarn is not None and is_own:
        said.append("YaRN's attention factor: its own models scale the frequencies alone")
    if settings.adapters is not None:
        said += _of_adapters(found, chosen, settings.adapters)
    return tuple(said)


def _of_adapters(found: Recommendation, chosen: Candidate, lora: Lora) -> list[str]:
    """Sentences on how torchtitan's LoRA differs from the predicted step."""
    where = "host memory" if chosen.cell.settings.offloads_model else "each GPU"
    more = format_bytes(_wider_bytes(found, chosen))
    said = [
        f"a frozen model in bf16: it has one dtype, float32, for adapters and model, which takes "
        f"{more} more of {where}"
    ]
    if set(_FUSED) <= set(_targets(lora)):
        said.append(
            f"adapters on {', '.join(_FUSED)}: they are one layer, wqkv, with one adapter of rank "
            f"{lora.rank}"
        )
    return said


def _targets(lora: Lora) -> tuple[str, ...]:
    """The layers with an adapter, by the names of transformers' models."""
    return (*ATTENTION, *MLP) if lora.names is None else lora.names


def _refuse_adapters(found: Recommendation, chosen: Candidate, lora: Lora, *, is_own: bool) -> None:
    """Raise UsageError for adapters that torchtitan lacks, or if a float32 model does not fit."""
    if not is_own:
        raise UsageError(
            "torchtitan has adapters on models of its own, not on transformers'",
            hint=f"leave `{lora_words(lora)}` out, or name one of {', '.join(FLAVORS)}",
        )
    fused = [name for name in _FUSED if name in _targets(lora)]
    if fused and len(fused) < len(_FUSED):
        others = [name for name in _targets(lora) if name not in _FUSED]
        raise UsageError(
            f"torchtitan has {', '.join(_FUSED)} in one layer, and adapters are asked for on "
            f"{', '.join(fused)}",
            hint=f"use `--lora-targets {','.join((*_FUSED, *others))}`",
        )
    more, headroom = _wider_bytes(found, chosen), chosen.headroom_bytes
    if chosen.cell.settings.offloads_model or headroom is None:
        return
    if more > headroom + found.reserved_bytes:
        raise UsageError(
            f"torchtitan has a frozen model in float32, which takes {format_bytes(more)} more of "
            f"each GPU than highwater's engine, beside which {format_bytes(headroom)} are free",
            hint=f"add `--reserved {-(-more // GIB)}GiB`",
        )


def _wider_bytes(found: Recommendation, chosen: Candidate) -> int:
    """Further bytes of a frozen model in float32 instead of bf16, on a GPU or the machine."""
    layout = chosen.cell.layout
    ranks = layout.machine_gpus if chosen.cell.settings.offloads_model else 1
    frozen = policy_parameters(load_model(found.model_name).shape, chosen.cell.settings)
    return 2 * frozen * ranks // layout.shard_degree


def _lora_values(lora: Lora) -> dict[str, Value]:
    """Values of the converter; without names of layers it would also take the head."""
    layers = dict.fromkeys(_LAYERS[name] for name in _targets(lora))
    return {
        "lora.rank": lora.rank,
        "lora.alpha": float(lora.alpha),
        **listed("lora.target_modules", layers),
    }


def _values(found: Recommendation, chosen: Candidate) -> dict[str, Value]:
    settings, layout = chosen.cell.settings, chosen.cell.layout
    degree = layout.context_degree
    # the batch of a step with one micro-batch per rank; otherwise the user names it
    step_rows = settings.sequences_per_micro_batch * layout.data_parallel_degree
    values: dict[str, Value] = {
        "training.local_batch_size": settings.sequences_per_micro_batch,
        **({} if settings.accumulates else {"training.global_batch_size": step_rows}),
        "training.seq_len": found.length_tokens,
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
        "training.enable_cpu_offload": settings.offloads_model,
        # a CUDA graph needs the same document mask in every step, and refuses others
        "training.disable_cuda_graphs": True,
        "parallelism.data_parallel_replicate_degree": layout.replicate_degree,
        "parallelism.data_parallel_shard_degree": layout.shard_degree // degree,
        "parallelism.context_parallel_degree": degree,
    }
    # "headtail" cannot cut the mask of flex attention, which torchtitan's language models use
    return values | ({"parallelism.context_parallel_load_balancer": "ptrr"} if degree > 1 else {})


def _rope(found: Recommendation) -> dict[str, Value]:
    if found.yarn is None:
        return {}
    native = int(found.yarn.rope_parameters["original_max_position_embeddings"])
    return {
        "rope.scaling": "yarn",
        "rope.rope_factor": found.yarn.factor,
        "rope.original_seq_len": native,
        "rope.max_seq_len": found.yarn.max_position_embeddings,
    }


def _program(
    chosen: Candidate,
    values: Mapping[str, Value],
    own: tuple[str, str] | None,
    model_path: str | None,
) -> str:
    settings = chosen.cell.settings
    recompute = "None" if settings.recompute == "none" else "FullAC.Config()"
    sections = (("training", "TrainingConfig"), ("parallelism", "ParallelismConfig"))
    written = "".join(
        f"        {name}={kind}(\n{_arguments(name, values)}        ),\n" for name, kind in sections
    )
    written += f"        activation_checkpoint={recompute},\n"
    written += "        optimizer=default_adamw(lr=1e-5),\n"
    if own is None:
        model = repr(model_path) if model_path else _BY_ENVIRONMENT
        # the tokenizer is read only from a directory, the model also by its id
        directory = _BY_ENVIRONMENT if model_path and is_hub_id(model_path) else model
        imports = "import os\n\n" if directory == _BY_ENVIRONMENT else ""
        return imports + _WRITTEN["transformers"].format(
            model=model, directory=directory, settings=written
        )
    rope = _arguments("rope", values)
    chunks = _chunks(chosen)
    loss = f"ChunkedLossWrapper.Config(num_chunks={chunks}, loss_fn=loss)" if chunks else "loss"
    lora = _converter(values)
    return _WRITTEN["own"].format(
        module=own[0],
        flavor=own[1],
        imports="from torchtitan.components.lora import LoRAConverter\n" if lora else "",
        lora=_LORA.format(lora=lora) if lora else "",
        converters=", converters=[lora]" if lora else "",
        rope=_ROPE.format(rope=rope) if rope else "",
        loss=loss,
        settings=written,
    )


def _converter(values: Mapping[str, Value]) -> str:
    """The LoRA converter's arguments, a line each, with layers as one list; empty without LoRA."""
    names = [value for name, value in values.items() if name.startswith("lora.target_modules.")]
    if not names:
        return ""
    rank, alpha = values["lora.rank"], values["lora.alpha"]
    arguments = {"rank": rank, "alpha": alpha, "target_modules": names}
    return "".join(f"        {name}={value!r},\n" for name, value in arguments.items())


def _arguments(section: str, values: Mapping[str, Value]) -> str:
    """The values of one section as arguments, a line ``name=value,`` each."""
    own = {name: value for name, value in values.items() if name.startswith(f"{section}.")}
    named = ((name.removeprefix(f"{section}."), value) for name, value in own.items())
    return "".join(f"            {name}={value!r},\n" for name, value in named)


TARGET = EmitTarget(
    file="torchtitan_settings.py",
    emit=torchtitan,
    yours=(
        "`dataloader=`, and a `checkpoint=` that loads the weights, in torchtitan_settings.py",
        "the learning rate there",
    ),
    predicted_for="highwater",
    knows=OF_THE_ENGINE | OF_LORA,
)
