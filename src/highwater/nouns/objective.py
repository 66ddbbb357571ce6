"""Objectives: what each needs besides a policy and its optimizer, a row for each.

Code reads a row. Names are compared only where an objective's own formula is chosen
(engine/training/step.py), or another trainer's words for it (emit/).

Completions: TRL's GRPO generates a batch of whole groups, a step's micro-batches. Source:
``num_generations`` and ``generation_batch_size`` in ``trl/trainer/grpo_config.py`` of trl 1.16.0.

Optimizers: what each keeps for a parameter, and what it asks for.

Source of the 8-bit moments' sizes: torchao 0.18, ``optim/subclass_8bit.py`` and ``optim/adam.py``;
of the method: Dettmers et al., https://arxiv.org/abs/2110.02861.

LoRA: small trained matrices beside the frozen ones of a model (Hu et al.,
https://arxiv.org/abs/2106.09685), the layers that get them, and their sizes.

A linear layer of I inputs and O outputs gets A, of rank x I, and B, of O x rank: it returns
``W x + alpha / rank * B A x``.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from highwater.errors import UsageError
from highwater.model.layer_kind import AttentionKind, LayerKind, Matrices
from highwater.model.model import ModelShape
from highwater.nouns import declaration as kinds
from highwater.nouns.codec import Record, packaged
from highwater.nouns.declaration import PAPER, DeclaredRecord, setting

Objective = Literal["sft", "grpo", "ppo", "rw", "dpo"]
Head = Literal["tokens", "scalar"]
Reference = Literal["none", "divergence", "margin"]
Advantages = Literal["none", "groups", "tokens"]


class ObjectiveTraits(Record, frozen=True, kw_only=True):
    """What one objective (sft, dpo, grpo …) needs of data, of further models, and of time."""

    pairs: bool = False
    """Documents come in pairs, the chosen one first, and the loss is a mean over all pairs of the
    step. False: they come one by one, and the loss is a mean over all trained tokens."""
    head: Head = "tokens"
    """``tokens``: log-probabilities of tokens, from logits that are whole or in chunks. ``scalar``:
    one number in the place of the vocabulary, and no logits."""
    reference: Reference = "none"
    """Use of a frozen copy of the policy, whose log-probabilities are computed before the
    update: a divergence from it at each trained token, or the margin by which it prefers the chosen
    document of a pair. ``none``: there is no copy."""
    critic: bool = False
    """A second model, of token values, may be trained along; it runs before the update, too."""
    advantages: Advantages = "none"
    """Weight of the clipped ratio of new to old probability: a document's reward against those of
    its group, or an advantage of each token. ``none``: no ratio is in the loss, nor an entropy."""

    @property
    def gives_scalars(self) -> bool:
        """True if the policy outputs one scalar per token instead of logits over the vocabulary."""
        return self.head == "scalar"

    @property
    def has_reference(self) -> bool:
        """True if a frozen copy of the policy is held, and runs over every micro-batch."""
        return self.reference != "none"

    @property
    def is_of_plain_documents(self) -> bool:
        """True if documents are trained one by one, as in sft: no pairs, no rewards."""
        return not self.pairs and self.advantages == "none"

    @property
    def outside_step(self) -> str:
        """A sentence on what the predicted seconds of a step leave out; empty if nothing."""
        is_generated = self.advantages != "none"
        return "A step's seconds leave out generation." if is_generated else ""

    @property
    def documents_together(self) -> int:
        """Documents that must be in the same micro-batch: 2 for pairs, else 1."""
        return 2 if self.pairs else 1


TRAITS: Mapping[Objective, ObjectiveTraits] = {
    "sft": ObjectiveTraits(),
    "grpo": ObjectiveTraits(reference="divergence", advantages="groups"),
    "ppo": ObjectiveTraits(critic=True, advantages="tokens"),
    "rw": ObjectiveTraits(pairs=True, head="scalar"),
    "dpo": ObjectiveTraits(pairs=True, reference="margin"),
}


def without_reference(objective: Objective) -> Objective:
    """The objective most similar in data and loss that needs no reference model."""
    traits = TRAITS[objective]

    def likeness(name: Objective) -> tuple[bool, bool]:
        other = TRAITS[name]
        is_clipped = (other.advantages == "none") == (traits.advantages == "none")
        return other.pairs == traits.pairs, is_clipped

    return max((name for name, each in TRAITS.items() if not each.has_reference), key=likeness)


GENERATIONS = 8
"""``num_generations`` of GRPOConfig: a generation batch is a multiple of it."""


def generation_micro_batches(rows: int, gpus: int, generations: int = GENERATIONS) -> int:
    """Fewest micro-batches of ``rows`` sequences a GPU that have whole groups of completions."""
    together = rows * gpus
    return math.lcm(generations, together) // together


class RolloutRequest(DeclaredRecord, frozen=True, kw_only=True):
    """Settings of the engine that generates for GRPO and PPO; it is predicted, and never run."""

    rollout: Literal["vllm"] | None = setting(
        None,
        "grpo and ppo: what generates, on paper: on the same GPUs, or on --rollout-gpus",
        commands=PAPER,
    )
    gpu_memory_utilization: float | None = kinds.NUMBER(
        None,
        "rollout: share of a GPU that vLLM takes; default: TRL's 0.3, else verl's 0.5, on GPUs of "
        "its own vLLM's 0.92",
        PAPER,
        example=0.3,
    )
    sleep_level: int | None = kinds.COUNT(
        None,
        "rollout: what vLLM does while the step trains: 0, stay; 1, move its weights to the host; "
        "2, drop them; default: TRL's 0, else verl's 2",
        PAPER,
        example=2,
    )
    rollout_sequences: int | None = kinds.COUNT(
        None,
        "rollout: most sequences at once, vLLM's max_num_seqs; default: TRL's, those of a GPU's "
        "step, else verl's 256",
        PAPER,
        example=64,
    )
    rollout_tensor_parallel: int = kinds.COUNT(
        1, "rollout: GPUs that share one copy of vLLM's model", PAPER, example=2
    )


class RolloutTraits(Record, frozen=True, kw_only=True):
    """Defaults of a trainer's engine for generation; a field's own default is verl's."""

    utilization: float = 0.5
    sleep_levels: tuple[int, ...] = (2, 0, 1)
    """Sleep levels that the trainer has, its default first."""
    sequences: int | None = 256
    """Most sequences at once; None: those that one step generates on the engine's GPUs."""
    batched_tokens: int = 8192
    is_in_the_trainer: bool = False
    """True if an engine on the training's GPUs runs in the trainer's process, in its context."""


class Rollout(RolloutRequest, frozen=True, kw_only=True):
    """The engine that generates, with a trainer's defaults for what nobody named."""

    own_gpus: int
    """GPUs of its own; 0: it shares the training's."""
    most_utilization: float | None = None
    """Largest share with which the answer fits, or 0; None: it was typed, or it has own GPUs."""
    prompt_tokens: int | None = None
    """Tokens of the prompt that a sequence begins with; None: nobody named any."""
    traits: RolloutTraits


OptimizerName = Literal["adamw", "adamw-8bit", "adamw-bf16"]
MOMENTS = 2
"""Running means that AdamW keeps: of gradients, and of their squares."""
QUANTIZED_BLOCK = 256
"""Numbers that share a float32 scale; a shard that it does not divide keeps float32 moments."""
LEAST_QUANTIZED = 4096
"""Fewest numbers of a shard whose moments are quantized."""
TABLE_BYTES = 4 * 256
"""Bytes of each quantized moment's table of what the 256 codes stand for."""
PIECE = 1 << 24
"""Numbers that are updated at once, whole blocks. A compiled update in 8 bits makes two float32
numbers for each of them, which are gone before the next piece: 128 MiB, where the largest matrix of
a model would have GiB."""


STREAMED = 1 << 22
"""Numbers whose moments a GPU has at once where moments are in host memory: 16 MiB each way for
each moment, long enough for the link's full speed."""
STREAMED_BUFFERS = 2
"""Buffers that moments come through: one is filled while the other goes back."""


class OptimizerTraits(NamedTuple):
    """What an optimizer stores for each number, and which package it needs."""

    words: str
    moment_bytes: int
    """Bytes of one moment of one number. With 8 bits this holds for matrices whose shards
    ``QUANTIZED_BLOCK`` divides; other moments are then in float32."""
    is_exact: bool
    """True if its update is AdamW's in float32."""
    package: str | None = None
    """Package that has to be installed for it."""
    eager_bytes: int = 0
    """Bytes that an update which is not compiled makes for each number that it moves at once:
    measured in trainings on the CPU of models of 9, 20 and 33 million parameters."""

    @property
    def is_quantized(self) -> bool:
        """True if moments are codes with a scale for each block."""
        return self.moment_bytes == 1

    def moments_bytes(self, numbers: int) -> int:
        """Bytes of both moments of one shard with ``numbers`` elements."""
        if not self.is_quantized:
            return MOMENTS * self.moment_bytes * numbers
        if numbers < LEAST_QUANTIZED or numbers % QUANTIZED_BLOCK:
            return MOMENTS * 4 * numbers
        return MOMENTS * (numbers + 4 * numbers // QUANTIZED_BLOCK + TABLE_BYTES)


OPTIMIZERS: Mapping[OptimizerName, OptimizerTraits] = {
    "adamw": OptimizerTraits("AdamW in float32", moment_bytes=4, is_exact=True),
    "adamw-8bit": OptimizerTraits(
        "AdamW with moments of 8 bits",
        moment_bytes=1,
        is_exact=False,
        package="torchao",
        eager_bytes=48,
    ),
    "adamw-bf16": OptimizerTraits(
        "AdamW with moments in bfloat16",
        moment_bytes=2,
        is_exact=False,
        package="torchao",
        eager_bytes=28,
    ),
}
"""The optimizers, by the name that a user types."""


ALL_LINEAR = "all-linear"
"""Target of adapters: every linear layer but the head."""
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
EXPERT_MATRICES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": MLP}
"""Names that peft gives the gate, up and down matrices of experts, by the model types whose experts
have adapters here."""
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DELTA_JOINED = ("in_proj_qkvz", "in_proj_ba")
"""Linear layers into a gated delta rule, by family: one for each of its inputs, or two in which
those of one key head are together."""
MOST_RANK = 4096
LoraBase = Literal["bf16", "nf4"]
NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
"""Numbers in NF4 that share a scale, and scales that share one of float32: QLoRA's."""
BASE_PREFIX = "base_layer."
"""Words that peft puts into the name of a layer's own parameters where it has an adapter."""
_LINEAR: Mapping[str, Any] = packaged("nouns/catalog/linear_layers.json", dict[str, Any])
_FUSED: Mapping[str, Mapping[str, str]] = _LINEAR["fused"]
"""Names of matrices that several of the usual ones are joined in, by model type."""
_USUAL_NAMES: tuple[str, ...] = tuple(_LINEAR["usual"])
"""Model types whose linear layers have the usual names, or those of ``_FUSED``."""
_ROUTERS: Mapping[str, str] = _LINEAR["routers"]
"""Names of routers, by the model types whose routers are linear layers."""
_OUTSIDE = "per_layer_model_projection"
"""Name of the one linear layer outside of the decoder layers, which gives each its embeddings."""


class Lora(Record, frozen=True, kw_only=True):
    """LoRA adapters, which are trained instead of the model's own parameters."""

    rank: int
    alpha: float
    targets: str = ALL_LINEAR
    """``all-linear``, or names of linear layers with commas between them: ``q_proj,v_proj``."""
    base: LoraBase = "bf16"
    """Number format of the frozen model: the dtype it computes in, or NF4 in its linear layers."""

    def __post_init__(self) -> None:
        """Raise UsageError for a rank or alpha out of range, or for malformed layer names."""
        if not 1 <= self.rank <= MOST_RANK:
            hint = f"use 1 to {MOST_RANK}: `--lora 32`"
            raise UsageError(f"a LoRA rank of {self.rank}", hint=hint)
        if not 0 < self.alpha < math.inf:
            hint = f"use `--lora-alpha {self.rank}`"
            raise UsageError(f"a LoRA alpha of {self.alpha}", hint=hint)
        if any(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None for name in self.names or ()):
            raise UsageError(
                f"{self.targets!r} are no names of linear layers",
                hint=f"use `--lora-targets {ALL_LINEAR}`, or `--lora-targets q_proj,v_proj`",
            )

    @property
    def scale(self) -> float:
        """Factor that the product of both matrices, B A, is multiplied by."""
        return self.alpha / self.rank

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the linear layers that get an adapter; None: all linear layers."""
        return None if self.targets == ALL_LINEAR else tuple(self.targets.split(","))


def adapter_matrices(kind: LayerKind, model_type: str, lora: Lora) -> tuple[Matrices, ...]:
    """A and B of each adapter in one layer of a kind."""
    sizes = _sizes(kind, model_type).items()
    targets = (size for name, size in sizes if lora.names is None or name in lora.names)
    own = _a_and_b((lora.rank, *size) for size in targets)
    return (*own, *expert_adapter_matrices(kind, model_type, lora))


def _a_and_b(every: Iterable[tuple[int, int, int]]) -> tuple[Matrices, ...]:
    """A and B of each adapter, from its rank, its outputs and its inputs."""
    return tuple(
        each
        for rank, outputs, inputs in every
        for each in (Matrices(1, rank, inputs), Matrices(1, outputs, rank))
    )


def outer_adapter_matrices(shape: ModelShape, lora: Lora) -> tuple[Matrices, ...]:
    """A and B of each adapter outside the decoder layers."""
    is_target = lora.names is None or _OUTSIDE in lora.names
    projections = shape.layer_tables[1:] * is_target
    return _a_and_b((lora.rank, each.rows, each.row_size) for each in projections)


def expert_adapter_matrices(kind: LayerKind, model_type: str, lora: Lora) -> tuple[Matrices, ...]:
    """A and B of the adapters on all experts of one layer: their ranks are added up."""
    of_experts = expert_targets(model_type, lora) if kind.mlp.experts > 1 else {}
    hidden, width = kind.hidden_size, kind.mlp.width
    sizes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    return _a_and_b((rank * kind.mlp.experts, *sizes[name]) for name, rank in of_experts.items())


def expert_targets(model_type: str, lora: Lora) -> dict[str, int]:
    """Ranks of an expert's adapters, by peft's name of the parameter that each is on: gate and up
    are one parameter, whose adapter has the ranks of both.
    """
    gate, up, down = EXPERT_MATRICES.get(model_type, (None, None, None))
    asked = lora.names or ()
    found = {"gate_up_proj": 2 * lora.rank} if gate in asked and up in asked else {}
    return found | ({"down_proj": lora.rank} if down in asked else {})


def nf4_bytes(numbers: int) -> int:
    """Bytes of an NF4 weight of ``numbers`` elements: 4 bits each, and the scales of blocks."""
    blocks = -(-numbers // NF4_BLOCK)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // NF4_SCALE_BLOCK) + 4


def saved_by_base(shape: ModelShape, lora: Lora, *, element: int) -> int:
    """Bytes that NF4 saves in a frozen model's linear layers; ``element``: bytes of an element."""
    in_layers = (
        run.count * saved_in_layer(run.kind, shape.model_type, lora, element=element)
        for run in shape.runs
    )
    return sum(in_layers) + saved_outside(shape, lora, element=element)


@cache
def saved_in_layer(kind: LayerKind, model_type: str, lora: Lora, *, element: int) -> int:
    """The bytes of ``saved_by_base`` in one layer."""
    return _saved(_sizes(kind, model_type).values(), lora, element)


def saved_outside(shape: ModelShape, lora: Lora, *, element: int) -> int:
    """The bytes of ``saved_by_base`` outside of the decoder layers."""
    return _saved(((each.rows, each.row_size) for each in shape.layer_tables[1:]), lora, element)


def _saved(sizes: Iterable[tuple[int, int]], lora: Lora, element: int) -> int:
    numbers = (outputs * inputs for outputs, inputs in sizes if lora.base == "nf4")
    return sum(element * each - nf4_bytes(each) for each in numbers)


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Number of parameters of all adapters of a model."""
    in_layers = sum(
        run.count * adapter_parameters_of_layer(run.kind, shape.model_type, lora)
        for run in shape.runs
    )
    return in_layers + outer_adapter_parameters(shape, lora)


def outer_adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Number of parameters of the adapters outside of a model's decoder layers."""
    return sum(each.rows * each.row_size for each in outer_adapter_matrices(shape, lora))


@cache
def adapter_parameters_of_layer(kind: LayerKind, model_type: str, lora: Lora) -> int:
    """Number of parameters of the adapters of one layer of a kind."""
    matrices = adapter_matrices(kind, model_type, lora)
    return sum(each.number * each.rows * each.row_size for each in matrices)


def refuse_no_target(shape: ModelShape, lora: Lora) -> None:
    """Raise UsageError for a target that is the name of no linear layer of the model, if its
    family's names are known; for NF4 with experts; and for expert targets that peft cannot adapt.
    """
    has_experts = any(run.kind.mlp.experts > 1 for run in shape.runs)
    of_experts = EXPERT_MATRICES.get(shape.model_type, ()) if has_experts else ()
    if lora.base == "nf4" and has_experts:
        raise UsageError(
            f"{shape.model_type} in nf4: its experts are no linear layers, and stay as they are",
            hint="use `--lora-base bf16`",
        )
    asked = [name for name in lora.names or () if name in of_experts]
    if asked and any(run.kind.mlp.experts == 1 for run in shape.runs):
        raise UsageError(
            f"LoRA on {asked[0]} of {shape.model_type}, which has layers without experts too: peft "
            "has adapters on experts alone",
            hint=f"use `--lora-targets {','.join(ATTENTION)}`",
        )
    if len({name in asked for name in of_experts[:2]}) > 1:
        raise UsageError(
            f"LoRA on {asked[0]} of {shape.model_type}: {' and '.join(of_experts[:2])} of experts "
            "are one parameter",
            hint=f"use `--lora-targets {','.join((*ATTENTION, *of_experts))}`",
        )
    known = {name for run in shape.runs for name in _sizes(run.kind, shape.model_type)}
    known |= {*of_experts, *((_OUTSIDE,) if shape.layer_tables else ())}
    missing = [name for name in lora.names or () if name not in known]
    # Of a family whose names nobody read some may be another's, but one at least is ours.
    if missing and (shape.model_type in _USUAL_NAMES or len(missing) == len(lora.names or ())):
        raise UsageError(
            f"{shape.model_type} has no linear layer {missing[0]} in its decoder layers",
            hint=f"use `--lora-targets {ALL_LINEAR}`, or names of {', '.join(sorted(known))}",
        )


def _names(attention: AttentionKind) -> tuple[str, ...]:
    """Names of an attention's linear layers, in the order of ``attention.matrices``."""
    if attention.delta is None:
        own = len(attention.matrices) - 1
        return (*ATTENTION[:own], "o_proj")
    return (*(DELTA_JOINED if attention.delta.joins_gate else DELTA), "out_proj")


def _sizes(kind: LayerKind, model_type: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear layer of a layer, by name; fused layers are summed."""
    hidden, attention = kind.hidden_size, kind.attention
    own = {
        name: (hidden, size) if is_output else (size, hidden)
        for name, (size, is_output) in zip(_names(attention), attention.matrices, strict=True)
    }
    width = kind.mlp.width if kind.mlp.experts == 1 else kind.mlp.shared_width
    if width:
        into = MLP[:2] if kind.mlp.matrices == 3 else MLP[1:2]
        own |= dict.fromkeys(into, (width, hidden)) | {"down_proj": (hidden, width)}
    if kind.mlp.experts > 1 and model_type in _ROUTERS:
        own[_ROUTERS[model_type]] = (kind.mlp.experts, hidden)
    if kind.embedding_size:
        own["per_layer_input_gate"] = (kind.embedding_size, hidden)
        own["per_layer_projection"] = (hidden, kind.embedding_size)
    sizes: dict[str, tuple[int, int]] = {}
    for name, (outputs, inputs) in own.items():
        fused = _FUSED.get(model_type, {}).get(name, name)
        sizes[fused] = (sizes.get(fused, (0, 0))[0] + outputs, inputs)
    return sizes
