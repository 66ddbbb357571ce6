"""Trinity-RFT, whose trainer is verl's actor: its YAML, and the memory of a step.

In version 0.6.0 only the rollout reads ``model.rope_scaling``: the trainer reads the model's own
``config.json`` (``trinity/trainer/verl/config.py``), so YaRN has to be in both.

With LoRA it saves the adapters of every checkpoint for its rollout, and with FSDP2 trains them in
bfloat16 (``_maybe_patch_lora_fsdp2`` and ``_save_lora`` in ``trinity/trainer/verl/workers.py``).

Source of the names: ``trinity/common/config.py`` of trinity-rft 0.6.0.

The memory of a step is predicted in closed form, fitted to its published A100 tables, and by replay
of traces in the package (made by ``docs/results/lab/trinity.py``).

``peak = 16 P / shards + 8 T V + 2 T E layers + 4 V E (1 if tied, else 2) + 2.5e9`` bytes, context
included. With LoRA the first term is ``(4 P + 16 A) / shards``: one dtype, float32, for the whole
model. Source: ``_build_lora_module`` in
``verl/workers/engine/fsdp/transformer_impl.py`` of verl 0.9.1.

T tokens of one GPU's micro-batch  E hidden size  V vocabulary  P parameters  A adapters' parameters
"""

import lzma
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from highwater.errors import ModelError, UsageError
from highwater.memory.capacity import MemoryLimit
from highwater.memory.capacity_table import PUBLISHED_SETTINGS
from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES, Footprint, Phase, Term
from highwater.memory.formula.layers import Step
from highwater.memory.predictor import FormulaPredictor, ReplayPredictor, Replays
from highwater.memory.trace.replay import Replayed, ScaledTrace, alive_at, ran_out, replay_trace
from highwater.memory.trainers import BundledReplay, TrainerMemory
from highwater.model.families import family_row
from highwater.model.held_bytes import (
    device_state_bytes,
    host_state_bytes,
    layer_input_bytes,
    policy_parameters,
)
from highwater.model.model import ModelShape
from highwater.nouns.codec import Record, from_json
from highwater.nouns.layout import Layout
from highwater.nouns.objective import ALL_LINEAR, Lora, RolloutRequest
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Allocator
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import TrainerTraits
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.trainers.emitted import (
    DIVIDED,
    Dialect,
    Emitted,
    Value,
    environment,
    exports,
    lora_words,
    model_lies,
    yaml_path,
    yarn_lines,
)
from highwater.trainers.targets import OF_ALL, OF_LORA, EmitTarget
from highwater.units import GIB

VERSION = "0.6.0"
_WORDS = Dialect("trinity", "Trinity-RFT", VERSION)
_COMMAND = "trinity run --config trinity.yaml"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM accepts (``MaxLoRARanks``); Trinity-RFT passes the adapters' rank."""
_NARROW_ADAPTERS = (
    "adapters in float32: with FSDP2 it trains them in bf16, where updates below 0.2 % of a number "
    "are lost; the frozen model is in float32"
)


def trinity(found: Recommendation, chosen: Candidate, *, model_path: str | None = None) -> Emitted:
    """Make the sections that depend on the length. UsageError for unsupported adapters."""
    values = _values(found, chosen, yaml_path(model_path))
    variables = environment(chosen.cell.settings)
    why = "model.rope_scaling reaches the rollout alone, the trainer reads the model itself"
    said = [
        *exports(variables, before="`ray start`"),
        *model_lies(model_path, before="`ray start`"),
        *yarn_lines(found, why=why),
    ]
    if found.rollout_gpus:
        said.append(DIVIDED.format(found.rollout_gpus))
    cannot = () if chosen.cell.settings.lora is None else (_NARROW_ADAPTERS,)
    return _WORDS.emitted(
        found, chosen, said, values, command=_COMMAND, environment=variables, cannot=cannot
    )


def _values(found: Recommendation, chosen: Candidate, model_path: str) -> dict[str, Value]:
    values: dict[str, Value] = {
        "mode": "both" if found.rollout_gpus else "train",
        "algorithm.algorithm_type": chosen.cell.settings.objective,
        "model.model_path": model_path,
        "model.max_model_len": found.length_tokens,
    }
    if found.yarn is not None:
        scaling = dict(found.yarn.rope_parameters)
        theta = scaling.pop("rope_theta", None)
        values |= {f"model.rope_scaling.{name}": value for name, value in scaling.items()}
        if theta is not None:
            values["model.rope_theta"] = float(theta)
    lora = chosen.cell.settings.adapters
    values |= {} if lora is None else _lora_values(lora, is_served=found.rollout_gpus > 0)
    values |= {"cluster.node_num": 1, "cluster.gpu_per_node": found.gpus + found.rollout_gpus}
    if found.rollout_gpus:
        values |= {
            "explorer.rollout_model.engine_num": found.rollout_gpus,
            "explorer.rollout_model.tensor_parallel_size": 1,
        }
    return values | {
        "trainer.trainer_type": "verl",
        "trainer.trainer_strategy": chosen.cell.settings.strategy,
        "trainer.ulysses_sequence_parallel_size": chosen.cell.layout.ulysses_degree,
        "trainer.use_dynamic_bsz": True,
        "trainer.use_remove_padding": True,
        "trainer.max_token_len_per_gpu": chosen.token_budget_tokens,
        "trainer.offload_policy": chosen.cell.settings.offloads_model,
    }


def _lora_values(lora: Lora, *, is_served: bool) -> dict[str, Value]:
    """Fields of LoRA. Raises UsageError unless it is on all linear layers: Trinity-RFT would save a
    pattern of names as a list of letters.
    """
    if lora.targets != ALL_LINEAR:
        raise UsageError(
            f"Trinity-RFT has no adapters on layers by their names, such as {lora.targets}",
            hint=f"leave `--lora-targets {lora.targets}` out; of a model with experts leave "
            f"`{lora_words(lora)}` out",
        )
    if is_served and lora.rank not in _RANKS:
        served = min((rank for rank in _RANKS if rank > lora.rank), default=_RANKS[-1])
        raise UsageError(
            f"vLLM, Trinity-RFT's rollout, has no adapters of rank {lora.rank}",
            hint=f"use `--lora {served}`",
        )
    return {
        "model.lora_configs.0.name": "lora",
        "model.lora_configs.0.lora_rank": lora.rank,
        "model.lora_configs.0.lora_alpha": _WORDS.whole_alpha(lora),
        "model.lora_configs.0.target_modules": lora.targets,
        "synchronizer.sync_method": "checkpoint",
    }


ACCURACY = (
    "by the closed form, fitted to the published A100 table, of which it has 69 of 80 cells with "
    "expandable segments and 30 of 40 without, the others within one step of the grid"
)
"""Sentence on the errors of the closed form."""
_LOGITS_BYTES = 8.0
"""Bytes of logits per token x vocabulary in Trinity-RFT and verl, which divide by the temperature
in place through a view. Measured with torch 2.11."""
_FIXED_BYTES = 2_500_000_000
"""Bytes that do not depend on the length, besides states, embedding and head; with the context.
Fitted to the published A100 tables."""
_EMBEDDING_BYTES = 4
"""Bytes per element of embedding and head, gathered whole on every GPU. Fitted to those tables."""
_WIDER_BYTES = 2
"""Further bytes per element of a frozen model, in float32 instead of our engine's bfloat16."""
_FILLED_SHARE: Mapping[str, float] = {"expandable": 1.0, "native": 0.86}
"""Share of the allocator's memory that live tensors can fill. Fitted to the published A100 tables:
the native allocator loses 12 to 14 %."""


def footprint(step: Step) -> Footprint:
    """Memory of a step of Trinity-RFT's trainer, by default with two sequences in a micro-batch.
    Raises ModelError for a family whose own class, which that trainer runs, allocates scaled or
    capped logits besides the head's.
    """
    shape, settings, layout = step.shape, step.settings, step.layout
    if family_row(shape.model_type).logits is not None:
        raise ModelError(
            f"the family {shape.model_type} scales or caps its logits in further buffers of their "
            f"size where that trainer runs it, which nobody measured",
            hint="use a family with plain logits, for example `highwater predict Qwen3-0.6B --gpus "
            "1xH100-80GB --trainer trinity`",
        )
    wider = 0 if settings.lora is None else _WIDER_BYTES * policy_parameters(shape, settings)
    on_device = device_state_bytes(shape, settings, device=step.device)
    states = (on_device + (0 if settings.offloads_model else wider)) // layout.shard_degree
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    host = host_state_bytes(shape, settings, layout=layout)
    host += wider * settings.offloads_model * layout.machine_gpus // layout.shard_degree
    terms = (
        Term("states", states),
        Term("logits", round(_LOGITS_BYTES * step.tokens * shape.vocab_size)),
        Term("kept by recompute", step.tokens * layer_input_bytes(shape)),
        Term("embedding and head, gathered", _EMBEDDING_BYTES * embeddings),
        Term("context and the rest", _FIXED_BYTES),
    )
    return Footprint(
        phases=(Phase("loss", terms),),
        outside=(),
        host=(Term("offloaded states and reference", host),),
        filled_share=_FILLED_SHARE[settings.allocator],
    )


_ALWAYS = ("strategy", "objective", "entropy", "loss")


def published_fields(named: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as in the published tables, given the ``named`` ones. Published offload is FSDP2's,
    with expandable segments; LoRA, not published, needs FSDP2 to keep frozen parameters apart.
    """
    is_offloaded = named.get("offload", False) is not False
    published = PUBLISHED_SETTINGS["env+offload" if is_offloaded else "vanilla"]
    rows = "sequences_per_micro_batch"
    names = (
        *_ALWAYS,
        *(("allocator",) if is_offloaded else ()),
        *(() if {"token_budget", rows} & {*named} else (rows,)),
    )
    fields: dict[str, Any] = {name: getattr(published, name) for name in names}
    fields["prompt_tokens"] = PROMPT_TOKENS
    return fields if named.get("lora") is None else {**fields, "strategy": "fsdp2"}


TRACES_FILE = Path(__file__).with_name("trinity.json.xz")
REPLAY_ACCURACY = (
    "by replay of a trace, which has of the published A100 table 39 of 40 cells with expandable "
    "segments and 34 of 40 without, and all but two of the others within one step of the grid"
)
"""Sentence on the errors of the replay."""
OUTSIDE_BYTES: Mapping[bool, int] = {False: round(2.0 * GIB), True: round(3.5 * GIB)}
"""Bytes outside the traces, by whether GPUs share sequences: context, NCCL, other memory of the
workers. Fitted to the published A100 table: 2.0 GiB, by one cell, and 3.2 to 3.7 GiB, all alike,
give the most cells exactly (docs/results/lab/outside_scan.py). On H200s these workers have 1.6 and
2.0 to 2.8 GiB outside the allocator (docs/results/lab, Outside the allocator)."""


class BundledTrace(Record, frozen=True, kw_only=True):
    """A traced step of one model on one layout, which comes with the package."""

    shape: ModelShape
    layout: Layout
    log: msgspec.Raw
    """A ``ScaledTrace``, decoded on demand: all 40 would take a third of a second."""


_Place = tuple[ModelShape, Layout]


def covers(shape: ModelShape, cell: Cell) -> bool:
    """True if there is a bundled trace for a model's cell."""
    is_whole = cell.settings.offload is False and cell.settings.lora is None
    return is_whole and (shape, cell.layout) in _logs()


def predictor(question: Question, cell: Cell, memory_limit: MemoryLimit) -> ReplayPredictor:
    """The replay of a cell with a bundled trace."""
    shape, layout = place = question.model.shape, cell.layout
    trace, replays = bundled_trace(place), _replays(place, cell.settings.allocator)

    def tokens(length_tokens: int) -> int:
        return Step(shape, cell.settings, layout, length_tokens).tokens

    outside_bytes = OUTSIDE_BYTES[layout.context_degree > 1]
    return ReplayPredictor(
        by_formula=FormulaPredictor(cache(footprint), question, cell, memory_limit),
        alive=lambda length_tokens, number: alive_at(trace, tokens(length_tokens), number),
        replay=lambda length_tokens, room_bytes: replays(tokens(length_tokens), room_bytes),
        outside=(Term("context, NCCL and the rest", outside_bytes),),
    )


@cache
def _replays(place: _Place, allocator: Allocator) -> Replays:
    """Replays by tokens, a twelfth of a second each; none if the live bytes exceed the capacity."""
    trace = bundled_trace(place)
    alive_bytes = cache(trace.least_bytes)

    def replay(tokens: int, capacity_bytes: int | None) -> tuple[Replayed, int]:
        if capacity_bytes is not None:
            least_bytes = alive_bytes(tokens) + sum(CUBLAS_WORKSPACES_BYTES)
            if least_bytes > capacity_bytes:
                return ran_out(least_bytes), 0
        return replay_trace(trace, tokens, allocator=allocator, capacity_bytes=capacity_bytes)

    return Replays(replay)


@cache
def bundled_trace(place: tuple[ModelShape, Layout]) -> ScaledTrace:
    """The trace of a model on a layout, with FSDP, AdamW in float32, no offload and no LoRA."""
    return from_json(bytes(_logs()[place]), ScaledTrace)


@cache
def _logs() -> dict[_Place, msgspec.Raw]:
    traces = from_json(lzma.decompress(TRACES_FILE.read_bytes()), tuple[BundledTrace, ...])
    return {(trace.shape, trace.layout): trace.log for trace in traces}


PREDICTED = TrainerTraits(
    step="Trinity-RFT's trainer, which is verl's actor",
    is_run=False,
    settings=frozenset(
        (
            *("ulysses", "allocator", "offload", "sequences_per_micro_batch", "token_budget"),
            *("rope", "headroom", "start_length", "resolution", "max_length", "prompt_tokens"),
            *("lora", "lora_alpha", "lora_targets", *RolloutRequest.__struct_fields__),
        )
    ),
    traces="bundled",
    targets=("trinity", "verl"),
)
MEMORY = TrainerMemory(
    formula=footprint,
    accuracy=ACCURACY,
    of_adapters="the table is of whole models: LoRA has other states there, which nobody measured",
    replay=BundledReplay(covers=covers, predictor=predictor, accuracy=REPLAY_ACCURACY),
    fixed_fields=published_fields,
)
TARGET = EmitTarget(
    package="trinity-rft",
    before=("ray status > /dev/null 2>&1 || ray start --head",),
    file="trinity.yaml",
    emit=trinity,
    yours=("what it learns, and from what: `algorithm` and `buffer` in trinity.yaml",),
    predicted_for="trinity",
    knows=OF_ALL | OF_LORA,
)
